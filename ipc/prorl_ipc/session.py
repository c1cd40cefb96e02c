"""The frames between a trainer and a node: msgpack over WebSocket binary messages. Text: PROTOCOL.md.

A job's spec and its outcome travel as opaque `msgspec.Raw`: one malformed spec in a batch is rejected by itself with
the path of its field, and an outcome is encoded once, however often it is delivered. Their types are
`prorl_trio.types.models.JobSpec` and `prorl_trio.types.models.Outcome`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from prorl_ipc.arena_memory import ArenaRef

SESSION_PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Default maximum of one WebSocket message."""
MAX_FRAME_JOBS: Final = 10_000
"""Jobs, or ids of jobs, in one frame of a trainer. The node reads a frame in one step, which must be short."""
MAX_CANCEL_TARGETS: Final = 64
"""Targets of one `Cancel`. Each may be compared with every job of the node."""

MAX_ATTEMPTS: Final = 1_000_000
"""Maximum number of attempts of one job that began on other nodes."""

_MANY: Final[Any] = msgspec.Meta(max_length=MAX_FRAME_JOBS)
JobIds = Annotated[list[str], _MANY]
RawJobs = Annotated[list[msgspec.Raw], _MANY]
Attempts = Annotated[dict[str, Annotated[int, msgspec.Meta(ge=0, le=MAX_ATTEMPTS)]], _MANY]


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Base of every frame: immutable, tagged with its class name, strict."""


# ---------------------------------------------------------------- trainer -> node


class SessionHello(_Frame, frozen=True):
    """First frame of a connection.

    The trainer chooses `session_id`. A known id resumes that session: unacknowledged outcomes after `resume_after` are
    sent again, and an older connection is closed. With `batches`, the node may send several frames in one message.
    `max_unacked_outcomes` and `max_unacked_bytes` limit the outcomes sent beyond the last acknowledged one, but one is
    always sent; 0 takes the node's window, which is also the maximum. `observe_all` and `observe_group` request
    `Observed...` frames about the jobs of other sessions, all or of one group.
    """

    version: int
    token: str
    session_id: str
    resume_after: int = 0
    batches: bool = False
    max_unacked_outcomes: int = 0
    max_unacked_bytes: int = 0
    observe_all: bool = False
    observe_group: str = ""


class Submit(_Frame, frozen=True, omit_defaults=True):
    """Submit jobs, each a `JobSpec`. Answered by one `Accepted` or `Rejected` per job, in order.

    `attempts`: number of attempts that began on other nodes, by job id, for jobs that are moved here.
    """

    request_id: int
    jobs: RawJobs
    attempts: Attempts = {}


class CheckJobs(_Frame, frozen=True):
    """Check jobs, each a `JobSpec`, without submitting them. Answered by `CheckedJobs`."""

    request_id: int
    jobs: RawJobs


class TheseJobs(_Frame, frozen=True, omit_defaults=True):
    """The jobs with these ids. With `ahead`, unknown ids are remembered and cancelled when they are submitted."""

    job_ids: JobIds
    ahead: bool = False


class MatchingJobs(_Frame, frozen=True, omit_defaults=True):
    """The live jobs that match every given field and every tag. Without a field, it matches no job."""

    group_id: str | None = None
    session_id: str | None = None
    tags: dict[str, str] = {}


class AllJobs(_Frame, frozen=True):
    """All live jobs."""


CancelTarget = TheseJobs | MatchingJobs | AllJobs
"""A selection of jobs for `Cancel`."""


class Cancel(_Frame, frozen=True, omit_defaults=True):
    """Cancel the jobs of this session that match any target; with `on_node`, of all sessions of the node.

    Answered by `Cancelled` when the jobs hold no resource.
    """

    request_id: int
    targets: Annotated[list[CancelTarget], msgspec.Meta(max_length=MAX_CANCEL_TARGETS)]
    reason: str = ""
    on_node: bool = False


class WithdrawJobs(_Frame, frozen=True, omit_defaults=True):
    """Cancel jobs of this session that run elsewhere, without an outcome, and free their ids.

    With `ended`, also forget jobs that have ended. Answered by `WithdrawnJobs` when the jobs hold no resource.
    """

    request_id: int
    job_ids: JobIds
    reason: str = ""
    ended: bool = False


class Ack(_Frame, frozen=True):
    """Acknowledge all outcomes up to and including `cursor`. The node deletes them."""

    cursor: int


class StatusRequest(_Frame, frozen=True):
    """Request a `StatusReport`."""

    request_id: int


class RoomRequest(_Frame, frozen=True):
    """Request a `RoomReport`."""

    request_id: int


class ListJobs(_Frame, frozen=True):
    """Request the jobs of this session with an outcome still to come. Answered by one or several `JobList`."""

    request_id: int


class CallBackends(_Frame, frozen=True):
    """Run an operation on the node's pool of LLM backends. Answered by `BackendsAnswer`.

    `operation` is its name, and `arguments` a map of the fields of its request (`prorl_trio.types.backends`).
    """

    request_id: int
    operation: str
    arguments: msgspec.Raw


class WithdrawCall(_Frame, frozen=True):
    """Withdraw a `CallBackends`: it is cancelled if it is still running. Not answered."""

    request_id: int


class AttachArena(_Frame, frozen=True):
    """The trainer has mapped the arena as `reader_id`, and accepts `OutcomeRefFrame` from now on. Not answered.

    It applies to this connection. An unknown reader is ignored.
    """

    reader_id: str


class HeartbeatPing(_Frame, frozen=True):
    """Heartbeat of either side. Answered by `HeartbeatPong` with the same `nonce`."""

    nonce: int


class HeartbeatPong(_Frame, frozen=True):
    """Answer to `HeartbeatPing`."""

    nonce: int


# ---------------------------------------------------------------- node -> trainer


class SessionWelcome(_Frame, frozen=True):
    """The session is open.

    `resumed`: the session was known. `pending`: outcomes that will be sent again. `arena_socket`: path of the node's
    arena socket, on its own host; empty without an arena.
    """

    version: int
    node_id: str
    session_id: str
    resumed: bool
    pending: int
    arena_socket: str = ""


class SessionRefused(_Frame, frozen=True):
    """The node refuses the connection and closes it. The `code` determines whether to reconnect."""

    code: Literal["version", "token", "protocol", "draining", "replaced", "admission"]
    message: str


class Accepted(_Frame, frozen=True, omit_defaults=True):
    """The node has the job. `cursor`: cursor of its outcome, if the job was known and has ended; else 0."""

    request_id: int
    index: int
    job_id: str
    cursor: int = 0


class Rejected(_Frame, frozen=True):
    """The job at `index` of the batch was rejected. `path` names the invalid field, if there is one.

    `code`: `malformed`, `unknown_handler`, `duplicate_job`, `already_delivered`, `admission` (then `retry_after_s` is
    set), `draining`.
    """

    request_id: int
    index: int
    job_id: str | None
    code: str
    message: str
    path: str = ""
    retry_after_s: float | None = None


class CheckedJobs(_Frame, frozen=True):
    """Answer to `CheckJobs`: a `Rejected` for each job that would be rejected, by `index`."""

    request_id: int
    refused: list[Rejected]


class OutcomeFrame(_Frame, frozen=True):
    """An `Outcome`. `cursor` increases by one per outcome of a session. Acknowledged by `Ack`."""

    cursor: int
    job_id: str
    outcome: msgspec.Raw


class OutcomeRefFrame(_Frame, frozen=True):
    """An `OutcomeFrame` with empty token arrays, for a trainer that has mapped the arena.

    `segments` has one reference for each segment of the trajectory, in order.
    """

    cursor: int
    job_id: str
    outcome: msgspec.Raw
    segments: list[ArenaRef]


class JobEvent(_Frame, frozen=True):
    """A job changed its stage. For progress displays; may be dropped under load."""

    job_id: str
    status: str
    detail: str = ""


class ObservedEvent(_Frame, frozen=True):
    """A `JobEvent` of an observed session."""

    session_id: str
    job_id: str
    status: str
    detail: str = ""


class ObservedOutcome(_Frame, frozen=True):
    """The `Outcome` of a job of an observed session, after it was offered to its own trainer.

    It is sent at most once, without a cursor, and is not acknowledged.
    """

    session_id: str
    job_id: str
    outcome: msgspec.Raw


class ObservationLost(_Frame, frozen=True):
    """`count` frames of `Observed...` were dropped since the previous frame, because this trainer was too slow."""

    count: int


class Cancelled(_Frame, frozen=True):
    """Answer to `Cancel`.

    The jobs in `cancelled` had no outcome yet. Of the ids in the targets, `ended` had ended before, and `unknown` were
    never submitted, or are acknowledged.
    """

    request_id: int
    cancelled: list[str]
    ended: list[str]
    unknown: list[str]


class WithdrawnJobs(_Frame, frozen=True):
    """Answer to `WithdrawJobs`. `forgotten` jobs do not get an outcome; the others still have one."""

    request_id: int
    forgotten: list[str]


class JobList(_Frame, frozen=True):
    """Answer to `ListJobs`: the jobs of this session whose outcome was not yet sent on this connection.

    With `more`, another `JobList` follows directly.
    """

    request_id: int
    job_ids: list[str]
    more: bool = False


class StatusReport(_Frame, frozen=True):
    """Answer to `StatusRequest`: the current state of the node, a map of plain values."""

    request_id: int
    statistics: msgspec.Raw


class RoomReport(_Frame, frozen=True):
    """Answer to `RoomRequest`: the current room for jobs of this session. Nothing is reserved.

    `room`: number of jobs that admission would accept. `free`: number of these that would start without waiting for a
    worker of RUN; a negative value counts waiting jobs. `run_workers`: number of workers of RUN. `unready`: reason why
    the node would not work on a new job; empty if it would.
    """

    request_id: int
    room: int
    free: int
    run_workers: int
    unready: str = ""


class BackendsAnswer(_Frame, frozen=True):
    """Answer to `CallBackends`: the operation's `answer`, which is a map, or nil and an error.

    `code` and `message` describe the error, and `path` names the invalid field, if there is one.
    """

    request_id: int
    answer: msgspec.Raw = msgspec.Raw(b"\xc0")
    code: str = ""
    message: str = ""
    path: str = ""


ClientFrame = (
    SessionHello
    | Submit
    | CheckJobs
    | Cancel
    | WithdrawJobs
    | Ack
    | StatusRequest
    | RoomRequest
    | ListJobs
    | CallBackends
    | WithdrawCall
    | AttachArena
    | HeartbeatPing
    | HeartbeatPong
)
ServerFrame = (
    SessionWelcome
    | SessionRefused
    | Accepted
    | Rejected
    | CheckedJobs
    | OutcomeFrame
    | OutcomeRefFrame
    | JobEvent
    | ObservedEvent
    | ObservedOutcome
    | ObservationLost
    | Cancelled
    | WithdrawnJobs
    | JobList
    | StatusReport
    | RoomReport
    | BackendsAnswer
    | HeartbeatPing
    | HeartbeatPong
)

ClientMessage = ClientFrame | list[ClientFrame]
ServerMessage = ServerFrame | list[ServerFrame]
"""The content of one WebSocket message: a frame, or several that were ready together."""
