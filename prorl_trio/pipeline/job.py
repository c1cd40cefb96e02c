"""A live rollout: its spec, its status, the sandboxes that it owns, and the sinks that receive its reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Protocol

import trio

from prorl_trio.agent.context import RolloutContext
from prorl_trio.pipeline.observer import JobView
from prorl_trio.types.errors import InternalError
from prorl_trio.types.models import PRIORITY, TERMINAL, Timing, may_follow

if TYPE_CHECKING:
    from prorl_trio.agent.context import Resources
    from prorl_trio.pipeline.observer import Observers
    from prorl_trio.sandbox.host import HostedSandbox
    from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
    from prorl_trio.types.errors import ErrorCode
    from prorl_trio.types.models import AttemptRecord, JobSpec, Outcome, Status, Turn

_QUEUE: Final[dict[Status, str]] = {"queued": "init worker", "ready": "run worker", "ran": "eval worker"}
"""The kind of worker that a queued job waits for."""


class JobSink(Protocol):
    """The receiver of a job's outcome.

    Synchronous, never blocks, never raises; called in the node's loop.
    """

    session_id: str
    """The session of these jobs; queues are fair between sessions."""

    def deliver(self, outcome: Outcome) -> None:
        """Accept the job's one terminal outcome. Called once for a job.

        Its token arrays may be views of the node's arena, valid until this returns: store an encoded form or a copy.
        """

    def report(self, job_id: str, status: Status, detail: str) -> None:
        """Note that the job entered `status`. The report may be dropped on the way to the trainer."""


class Job:
    """A live rollout. Owned by the pipeline from `submit` until its outcome is delivered.

    `sandbox` belongs to the agent and outlives a stage. `scope` is set while the job can be interrupted, in a stage or
    while it waits for a place in a queue. `used_s` is charged against `total_s`.
    """

    def __init__(
        self, spec: JobSpec, handler: AgentHandler, resources: Resources, sink: JobSink, *, attempt: int = 1
    ) -> None:
        self.spec = spec
        self.handler = handler
        self.resources = resources
        self.sink = sink
        self.session_id = sink.session_id
        self.attempt = attempt
        self.attempts: list[AttemptRecord] = []
        self.accepted_s = trio.current_time()
        self.used_s = 0.0
        self.sandbox: HostedSandbox | None = None
        self.scope: trio.CancelScope | None = None
        self.cancel_reason: str | None = None
        self.cancel_code: ErrorCode = "cancelled"
        self.finished = trio.Event()
        self._observers: Observers | None = None
        self._begin(self.accepted_s)

    def _begin(self, now_s: float) -> None:
        self.lifecycle = Lifecycle(now_s, "queued" if self.spec.recorded is None else "ran")
        self.context = RolloutContext(spec=self.spec, resources=self.resources, on_turn=self._turn_done)
        self.evaluation: Evaluation | None = None

    def begin_again(self, failed: AttemptRecord) -> None:
        """Record the failed attempt, release its tokens and start the next one, as `queued`."""
        self.attempts.append(failed)
        self.attempt += 1
        self.context.tokens.release()
        self._begin(trio.current_time())
        self._tell("queued", f"attempt {self.attempt}, after {failed.cause}: {failed.error}")

    def note_cancel(self, reason: str, code: ErrorCode) -> None:
        """Note the reason and code for which the job will end as cancelled; only the first counts. It stops nothing."""
        if self.cancel_reason is None:
            self.cancel_reason, self.cancel_code = reason, code

    async def release(self, timeout_s: float) -> str:
        """Close the sandbox that the job owns, shielded.

        Return its id if it did not close within `timeout_s`, else an empty string. The job then no longer owns it, and
        the sandbox host continues to close it.
        """
        sandbox, self.sandbox, self.context.sandbox = self.sandbox, None, None
        if sandbox is None:
            return ""
        with trio.move_on_after(timeout_s, shield=True):
            await sandbox.aclose()
        return "" if sandbox.gone else sandbox.sandbox_id

    @property
    def status(self) -> Status:
        return self.lifecycle.status

    @property
    def priority(self) -> int:
        """Priority in a stage's queue; lower goes first."""
        return PRIORITY[self.spec.priority]

    @property
    def group_key(self) -> tuple[str, str]:
        """Key of the job's group. Group ids are local to a session."""
        return self.session_id, self.spec.group_id

    def accepted(self, observers: Observers) -> None:
        """Report the job as `queued` to its sink and to `observers`, which also receive all later moves."""
        self._observers = observers
        self._tell("queued", "")
        if self.lifecycle.status != "queued":
            self._tell(self.lifecycle.status, "")

    def move(self, to: Status, detail: str = "") -> None:
        """Enter `to` and notify the sink and all observers."""
        self.lifecycle.move(to, trio.current_time())
        self._tell(to, detail)

    def ended(self, outcome: Outcome) -> None:
        """Deliver the outcome to the sink and the observers. Called once."""
        try:
            self.sink.deliver(outcome)
            if self._observers is not None:
                self._observers.job_ended(self.view, outcome)
        finally:
            self.context.tokens.release()
        self.context.on_turn = None  # it refers back here; without this reference cycle the job is freed at once
        self.finished.set()

    def view(self) -> JobView:
        now_s = trio.current_time()
        spec, status, activity = self.spec, self.lifecycle.status, self.context.activity
        idle_s = activity.idle_s(now_s)
        return JobView(
            job_id=spec.job_id,
            session_id=self.session_id,
            group_id=spec.group_id,
            instance_id=spec.instance.instance_id,
            handler=spec.instance.handler,
            priority=spec.priority,
            attempt=self.attempt,
            tags=spec.tags,
            status=status,
            age_s=now_s - self.accepted_s,
            status_age_s=self.lifecycle.age_s(now_s),
            turns=len(self.context.turns),
            last_progress_s=idle_s,
            waiting_on=activity.waiting_on or _QUEUE.get(status, ""),
            stuck=self.stuck,
            agent=spec.agent_name,
            other_waits=activity.other_waits,
        )

    @property
    def stuck(self) -> bool:
        """Return True if the job is in a stage and nothing has happened to it for `stuck_after_s`."""
        idle_s = self.context.activity.idle_s(trio.current_time())
        return self.lifecycle.status in ("init", "run", "eval") and idle_s > self.resources.config.stuck_after_s

    def _tell(self, status: Status, detail: str) -> None:
        self.context.activity.progress()
        self.sink.report(self.spec.job_id, status, detail)
        if self._observers is not None:
            self._observers.job_moved(self.view, status, detail)

    def _turn_done(self, turn: Turn) -> None:
        if self._observers is not None:
            self._observers.turn_done(self.view, turn)

    def __repr__(self) -> str:
        return f"<Job {self.spec.job_id} {self.lifecycle.status}>"


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
        """Begin with `status`; `ran` is for a job that only needs EVAL."""
        self._status: Status = status
        self._entered_s = now_s
        self._spent_s: dict[str, float] = {}

    @property
    def status(self) -> Status:
        return self._status

    @property
    def terminal(self) -> bool:
        """Return whether the job has ended. A terminal status never changes."""
        return self._status in TERMINAL

    def age_s(self, now_s: float) -> float:
        """Seconds since the job entered its current status."""
        return now_s - self._entered_s

    def run_s(self, now_s: float) -> float | None:
        """Seconds in RUN so far; None before."""
        return self.age_s(now_s) if self._status == "run" else self._spent_s.get("run_s")

    def may_move(self, to: Status) -> bool:
        """Return whether `to` may follow the status: the next one, or a terminal one other than success."""
        return may_follow(self._status, to)

    def move(self, to: Status, now_s: float) -> None:
        """Enter `to` at `now_s` and charge the time since the last move to the previous status.

        Raises:
            InternalError: `to` may not follow the current status.
        """
        if not self.may_move(to):
            raise InternalError(f"a job cannot go from {self._status} to {to}")
        field = _TIMING_FIELD[self._status]
        self._spent_s[field] = self._spent_s.get(field, 0.0) + max(0.0, now_s - self._entered_s)
        self._status = to
        self._entered_s = now_s

    def timing(self) -> Timing:
        """Seconds in each completed status so far."""
        return Timing(**self._spent_s)

    def __repr__(self) -> str:
        return f"<Lifecycle {self._status}>"
