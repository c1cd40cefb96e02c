"""Observers of a node's jobs (metrics, logs, event streams, `top`), and the view of a job that they receive."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from prorl_trio.types.models import Outcome, Status, Turn

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a job.

    Attributes:
        attempt: counted from 1; a retry after a failure is the next attempt.
        age_s: seconds since the node accepted the job.
        status_age_s: seconds since it entered its current status.
        turns: turns of the current attempt.
        last_progress_s: seconds since its last progress: a transition, a completion, or a tool's result.
        waiting_on: its current wait (`tool bash`, `init worker`); empty while it computes.
        agent: the name of the program that works on it; empty for our own agent.
        other_waits: waits of other dialogues of that program.
        stuck: it is in a stage and has made no progress for longer than `stuck_after_s` of the node's configuration.
    """

    job_id: str
    session_id: str
    group_id: str
    instance_id: str
    handler: str
    priority: Literal["train", "eval"]
    attempt: int
    tags: dict[str, str]
    status: Status
    age_s: float
    status_age_s: float
    turns: int
    last_progress_s: float
    waiting_on: str
    stuck: bool
    agent: str = ""
    other_waits: list[str] = []


class Observer(Protocol):
    """An observer of jobs. Synchronous, called in the node's loop: quick, and must not raise."""

    def job_moved(self, job: JobView, status: Status, detail: str) -> None:
        """Handle the job's move to `status`. Called at every transition, `queued` and the terminal one included."""

    def turn_done(self, job: JobView, turn: Turn) -> None:
        """Handle a turn of the policy with its observations."""

    def job_ended(self, job: JobView, outcome: Outcome) -> None:
        """Handle the job's outcome. Called once per job, after its last `job_moved`."""


class Observers:
    """All observers. An observer that raises is logged and removed, because it must never end a job or the node."""

    def __init__(self, observers: list[Observer]) -> None:
        self.observers = observers

    def job_moved(self, view: Callable[[], JobView], status: Status, detail: str) -> None:
        """Call every observer, see `Observer`. `view` is called only if there are observers."""
        if self.observers:
            job = view()
            self._tell(lambda observer: observer.job_moved(job, status, detail))

    def turn_done(self, view: Callable[[], JobView], turn: Turn) -> None:
        if self.observers:
            job = view()
            self._tell(lambda observer: observer.turn_done(job, turn))

    def job_ended(self, view: Callable[[], JobView], outcome: Outcome) -> None:
        if self.observers:
            job = view()
            self._tell(lambda observer: observer.job_ended(job, outcome))

    def _tell(self, call: Callable[[Observer], None]) -> None:
        for observer in list(self.observers):
            try:
                call(observer)
            except Exception:  # foreign code, whose errors must not end a job
                logger.exception("observer %r raised and is dropped", observer)
                self.observers.remove(observer)
