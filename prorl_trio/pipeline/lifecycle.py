"""The time that a job spends in each stage, in the order that `prorl_trio.types.job_states` allows. Pure.

queued -> init -> ready -> run -> ran -> eval -> completed
   |       |       |        |      |       |
   `-------`-------`--------`------`-------`--> failed | cancelled | timed_out

A job that grades a recorded rollout again begins as `ran`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from prorl_trio.types.errors import InternalError
from prorl_trio.types.job_states import TERMINAL, may_follow
from prorl_trio.types.models import Timing

if TYPE_CHECKING:
    from prorl_trio.types.models import Status

__all__ = ["Lifecycle"]

_TIMING_FIELD: Final[dict[Status, str]] = {
    "queued": "queued_init_s",
    "init": "init_s",
    "ready": "queued_run_s",
    "run": "run_s",
    "ran": "queued_eval_s",
    "eval": "eval_s",
}


class Lifecycle:
    """The status of one job, and the seconds it spent in each. Callers pass the time, of one monotonic clock."""

    def __init__(self, now_s: float, status: Literal["queued", "ran"] = "queued") -> None:
        """Begin with `status`: `ran` is that of a job of which EVAL alone is to be done."""
        self._status: Status = status
        self._entered_s = now_s
        self._spent_s: dict[str, float] = {}

    @property
    def status(self) -> Status:
        """Return the job's status."""
        return self._status

    @property
    def terminal(self) -> bool:
        """Return whether the job is over. A terminal status never changes."""
        return self._status in TERMINAL

    def age_s(self, now_s: float) -> float:
        """Seconds since the job entered its present status."""
        return now_s - self._entered_s

    def run_s(self, now_s: float) -> float | None:
        """Seconds in RUN so far; None before."""
        return self.age_s(now_s) if self._status == "run" else self._spent_s.get("run_s")

    def may_move(self, to: Status) -> bool:
        """Return whether `to` may follow the status: the next one, or a terminal one other than success."""
        return may_follow(self._status, to)

    def move(self, to: Status, now_s: float) -> None:
        """Enter `to` at `now_s` and charge the time since the last move to the status left.

        Raises:
            InternalError: `to` may not follow the present status.
        """
        if not self.may_move(to):
            raise InternalError(f"a job cannot go from {self._status} to {to}")
        field = _TIMING_FIELD[self._status]
        self._spent_s[field] = self._spent_s.get(field, 0.0) + max(0.0, now_s - self._entered_s)
        self._status = to
        self._entered_s = now_s

    def timing(self) -> Timing:
        """Seconds in each status left so far."""
        return Timing(**self._spent_s)

    def __repr__(self) -> str:
        return f"<Lifecycle {self._status}>"
