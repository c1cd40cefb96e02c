"""The events that change a fleet's dispatch, and the effects that it requests. Plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.types.models import JobSpec, Status, TerminalStatus

# ---------------------------------------------------------------- events


class Taken(NamedTuple):
    """A session has submitted a job after `attempt` earlier attempts."""

    spec: JobSpec
    session_id: str
    attempt: int


class Joined(NamedTuple):
    """The head has a session on a member that holds these jobs of the head, running or ended."""

    node_id: str
    holds: frozenset[str]


class Lost(NamedTuple):
    """The session on a member is over. `waits`: the member's next start gets time to return with its jobs."""

    node_id: str
    why: str
    waits: bool = False


class Waited(NamedTuple):
    """The waiting time for the next start of a lost member is over."""

    node_id: str


class Recovered(NamedTuple):
    """All members in the folder have joined since the head's start, or the time for that is over."""


class Room(NamedTuple):
    """A member has reported its room: see `prorl_ipc.session.RoomReport`.

    `own` is the number of the head's jobs there before EVAL at the time of the request.
    """

    node_id: str
    room: int
    free: int
    workers: int
    own: int
    unready: str = ""


class Policy(NamedTuple):
    """A member gets no jobs because of its policy version (`behind` is the reason), or gets jobs again (empty)."""

    node_id: str
    behind: str


class Begun(NamedTuple):
    """The start of the job's attempt is stored."""

    job_id: str


class Answered(NamedTuple):
    """A member has answered a submission: an empty `code` accepts the job, otherwise it is the code of the refusal."""

    node_id: str
    job_id: str
    code: str = ""
    message: str = ""


class Progress(NamedTuple):
    """A job has changed its stage on a member."""

    node_id: str
    job_id: str
    status: Status


class Ended(NamedTuple):
    """The outcome of a job's `attempt` has arrived from a member, with `cursor` of the head's session there."""

    node_id: str
    job_id: str
    cursor: int
    attempt: int
    status: TerminalStatus
    error_code: str | None = None


class Stored(NamedTuple):
    """The delivered outcome is in the head's ledger, or the ledger has refused it."""

    node_id: str
    job_id: str
    cursor: int


class Forgotten(NamedTuple):
    """A member has forgotten this outcome."""

    node_id: str
    job_id: str
    cursor: int


class Withdrawn(NamedTuple):
    """A member has forgotten these jobs, or the attempt to make it forget them is over."""

    node_id: str
    job_ids: Sequence[str]


class Cancel(NamedTuple):
    """A job must end as cancelled."""

    job_id: str
    reason: str


Event = (
    Taken
    | Joined
    | Lost
    | Waited
    | Recovered
    | Room
    | Policy
    | Begun
    | Answered
    | Progress
    | Ended
    | Stored
    | Forgotten
    | Withdrawn
    | Cancel
)

# ---------------------------------------------------------------- effects


class Begin(NamedTuple):
    """Store that an attempt of the job starts, then apply `Begun`."""

    job_id: str
    attempt: int
    node_id: str


class Submit(NamedTuple):
    """Submit the job to a member, then apply `Answered`."""

    node_id: str
    job_id: str


class CancelThere(NamedTuple):
    """Cancel the job on a member; its outcome will arrive."""

    node_id: str
    job_id: str
    reason: str


class Withdraw(NamedTuple):
    """Make a member cancel and forget these jobs, running or ended, without an outcome; then apply `Withdrawn`."""

    node_id: str
    job_ids: Sequence[str]


class Forget(NamedTuple):
    """Make a member forget a job and its outcome completely; then apply `Forgotten`.

    An acknowledgement would make the member refuse the id for a while. But the job may have to return to it, and
    another session of the head may reuse the id.
    """

    node_id: str
    job_id: str
    cursor: int


class Deliver(NamedTuple):
    """Deliver the outcome that has just arrived; apply `Stored` when it is stored."""

    node_id: str
    job_id: str
    cursor: int


class Acknowledge(NamedTuple):
    """Acknowledge the outcomes of a member up to a cursor, which it has forgotten."""

    node_id: str
    cursor: int


class End(NamedTuple):
    """End a job with an outcome from the head: cancelled for a reason, or failed (`failed`) by the fleet."""

    job_id: str
    reason: str
    failed: bool = False


class Restored(NamedTuple):
    """A job continues where it is: a member has it without the head's knowledge."""

    job_id: str
    node_id: str


Effect = Begin | Submit | CancelThere | Withdraw | Forget | Deliver | Acknowledge | End | Restored
