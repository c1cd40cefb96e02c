"""The life of a job, pure: its states, the events that change them, and the work that each event leaves to its session.

promised -> stored -> queued -> init -> ready -> run -> ran -> eval -> ended -> offered -> acknowledged

Only `Job.apply` changes a state. It uses neither I/O nor a clock: a session sends the events, and carries the effects
out. An event that is impossible in a state is a bug (`InternalError`). Three exceptions may come from a correct node
and change nothing: a second outcome, an outcome of an earlier attempt, and a report after the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import trio

from prorl_trio.types.errors import InternalError, ServiceError
from prorl_trio.types.models import STAGES, TERMINAL, EncodedOutcome, JobSpec, JobState, Outcome, Status, TaskInstance


class Stored(msgspec.Struct, frozen=True):
    """The ledger has the job."""


class Refused(msgspec.Struct, frozen=True):
    """The job is not accepted: it could not be stored, or the node has ended. `why` is the answer to its submit."""

    why: ServiceError


class Taken(msgspec.Struct, frozen=True):
    """The node has accepted the job. The job may already have moved or ended when this event arrives."""


class Moved(msgspec.Struct, frozen=True):
    """The node reports a stage. `init` begins an attempt. Reports may be missing or late."""

    status: Status


class Ended(msgspec.Struct, frozen=True):
    """The job's outcome has arrived.

    Attributes:
        outcome: the outcome.
        requeue: the node's end has cut the job, and the next start must run it again.
        elsewhere: another node has run the job, so the outcome may belong to an earlier attempt.
    """

    outcome: EncodedOutcome
    requeue: bool = False
    elsewhere: bool = False


class OutcomeStored(msgspec.Struct, frozen=True):
    """The ledger has the outcome."""


class OutcomeRefused(msgspec.Struct, frozen=True):
    """The ledger refused the outcome."""


class Offered(msgspec.Struct, frozen=True):
    """The outcome and all before it are stored, so it can be sent."""


class Acknowledged(msgspec.Struct, frozen=True):
    """The trainer has the outcome."""


class Forgotten(msgspec.Struct, frozen=True):
    """The outcome is dropped because it is too old, or by an authorised request."""


class Withdrawn(msgspec.Struct, frozen=True):
    """The job is submitted elsewhere. If its cancel ends it here, it gets no outcome, and its id is free again."""


Event = (
    Stored
    | Refused
    | Taken
    | Moved
    | Ended
    | OutcomeStored
    | OutcomeRefused
    | Offered
    | Acknowledged
    | Forgotten
    | Withdrawn
)


class Effects(msgspec.Struct, frozen=True, kw_only=True):
    """The work that an event leaves to the session, in the order of execution.

    Attributes:
        answer: answer the submit, with `Job.refused` or acceptance.
        begin_attempt: store this number of begun attempts; 0: nothing to store.
        store: the outcome to store.
        drop: remove the job from the session.
        delete: remove the job from the ledger.
        end: wake the tasks that wait for the outcome.
        tell: notify the senders of the outcome whether they may forget it; None: not yet.
        is_second: the event is ignored, and its outcome dropped.
        requeue: leave the job to the next start.
    """

    answer: bool = False
    begin_attempt: int = 0
    store: EncodedOutcome | None = None
    drop: bool = False
    delete: bool = False
    end: bool = False
    tell: bool | None = None
    is_second: bool = False
    requeue: bool = False


NOTHING: Final = Effects()
NO_SPEC: Final = JobSpec(job_id="-", instance=TaskInstance(instance_id="-", handler="-", payload={}))
_PAST: Final = trio.Event()
_PAST.set()


class Job(msgspec.Struct, eq=False):
    """A job of a session.

    Attributes:
        job_id: its id.
        fingerprint: a hash of its spec, to distinguish it from another job with the same id.
        attempt: number of begun attempts, on this node or another, in this process or a former one.
        state: see `prorl_trio.types.models`.
        spec: the submitted spec. It is released with the outcome, see `compact`.
        submitted_s: time of its submission.
        offered_s: time at which its outcome was offered.
        refused: why it was not accepted.
        withdrawn: see `Withdrawn`.
        result: its outcome, from `ended` on. It is released with the spec.
        is_stored: the ledger has the outcome.
        answered: set when the submit is answered.
        ended: set when `outcome` is available. Waiting tasks read the outcome from this object, even if it is
            acknowledged or dropped at once.
        senders: called when the ledger has stored or refused the outcome.
    """

    job_id: str
    fingerprint: bytes
    attempt: int = 0
    state: JobState = "promised"
    spec: JobSpec = NO_SPEC
    submitted_s: float = 0.0
    offered_s: float = 0.0
    refused: ServiceError | None = None
    withdrawn: bool = False
    result: EncodedOutcome | None = None
    is_stored: bool = False
    answered: trio.Event = msgspec.field(default_factory=trio.Event)
    ended: trio.Event = msgspec.field(default_factory=trio.Event)
    senders: list[Callable[[bool], None]] = []

    def compact(self, now_s: float) -> Job:
        """Return the offered job without its spec and its outcome's bytes, which the log holds.

        Tasks that wait for the outcome have the old object.
        """
        return offered_job(self.job_id, self.fingerprint, self.attempt, now_s)

    @property
    def awaits_outcome(self) -> bool:
        """Return whether the job may still get its outcome."""
        return self.state in ("promised", "stored") or self.state in STAGES

    @property
    def status(self) -> Status:
        """Return the stage, or the outcome's status, as the trainer knows it."""
        if self.result is not None:
            return self.result.status
        return self.state if self.state in STAGES else "queued"

    @property
    def outcome(self) -> Outcome | None:
        """Return the outcome; None until `ended` is set. Decodes it at every call."""
        return self.result.decode() if self.result is not None and self.ended.is_set() else None

    def apply(self, event: Event) -> Effects:
        """Apply the event to the job, and return the resulting work.

        Raises:
            InternalError: the event cannot occur in this state.
        """
        match event:
            case Moved(status):
                return self._move(event, status)
            case Ended():
                return self._end(event)
            case Stored():
                self._step(event, ("promised",), "stored")
                return Effects(begin_attempt=self.attempt)  # the next start counts on
            case Refused(why):
                self._step(event, ("promised", "stored"), "refused")
                self.refused = why
                return Effects(answer=True, drop=True)
            case Taken():
                if self.state == "stored":
                    self.state = "queued"
                elif self.state not in STAGES and self.result is None:  # else it ended while the node accepted it
                    raise self._illegal(event)
                return Effects(answer=True)
            case OutcomeStored():
                self._step(event, () if self.is_stored else ("ended",), "ended")
                self.is_stored = True
                return Effects(tell=True)
            case OutcomeRefused():
                self._step(event, () if self.is_stored else ("ended",), "refused")
                return Effects(drop=True, tell=False)
            case Offered():
                self._step(event, ("ended",) if self.is_stored else (), "offered")
                return Effects(end=True)
            case Acknowledged():
                self._step(event, ("offered",), "acknowledged")
                return Effects(drop=True)
            case Forgotten():
                self._step(event, ("offered",), "forgotten")
                return Effects(drop=True, delete=True)
            case Withdrawn():
                if not self.awaits_outcome:
                    raise self._illegal(event)
                self.withdrawn = True
                return NOTHING

    def _move(self, event: Moved, status: Status) -> Effects:
        if not self.awaits_outcome or status in TERMINAL:  # the outcome itself contains the final status
            return NOTHING
        if self.state == "promised":
            raise self._illegal(event)
        self.state = status  # type: ignore[assignment]
        if status != "init":
            return NOTHING
        self.attempt += 1
        return Effects(begin_attempt=self.attempt)

    def _end(self, event: Ended) -> Effects:
        outcome = event.outcome
        if not self.awaits_outcome:
            return Effects(is_second=True, tell=True if self.is_stored else None)
        if self.state == "promised":
            raise self._illegal(event)
        if event.elsewhere:
            if outcome.attempt < self.attempt:
                return Effects(is_second=True, tell=True)
            self.attempt = outcome.attempt
        self.result = outcome
        if self.withdrawn and outcome.status == "cancelled":
            self.state = "forgotten"
            return Effects(answer=True, drop=True, delete=True, end=True, tell=True)
        if event.requeue:
            self.state = "requeued"
            return Effects(answer=True, requeue=True)
        self.state = "ended"
        self.attempt = max(1, self.attempt)
        return Effects(answer=True, store=outcome)

    def _step(self, event: Event, allowed: tuple[JobState, ...], to: JobState) -> None:
        if self.state not in allowed:
            raise self._illegal(event)
        self.state = to

    def _illegal(self, event: Event) -> InternalError:
        return InternalError(f"job {self.job_id!r} is {self.state}: {type(event).__name__} cannot come")

    def __repr__(self) -> str:
        return f"<Job {self.job_id} {self.state}>"


def offered_job(job_id: str, fingerprint: bytes, attempt: int, offered_s: float) -> Job:
    """Return a job whose outcome is stored, with everything that a session needs until the acknowledgement."""
    return Job(
        job_id, fingerprint, attempt, "offered", offered_s=offered_s, is_stored=True, answered=_PAST, ended=_PAST
    )
