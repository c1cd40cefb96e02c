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
"""Jobs, or ids of jobs, in one frame of a trainer. The node reads a frame in one step, which must not be long."""
MAX_CANCEL_TARGETS: Final = 64
"""Targets of one `Cancel`. Each may be compared with every job of the node."""

MAX_ATTEMPTS: Final = 1_000_000
"""Attempts of one job that may have begun on other nodes."""

_MANY: Final[Any] = msgspec.Meta(max_length=MAX_FRAME_JOBS)
JobIds = Annotated[list[str], _MANY]
RawJobs = Annotated[list[msgspec.Raw], _MANY]
Attempts = Annotated[dict[str, Annotated[int, msgspec.Meta(ge=0, le=MAX_ATTEMPTS)]], _MANY]


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Base of every frame: immutable, tagged with its class name, strict."""


# ---------------------------------------------------------------- trainer -> node


class SessionHello(_Frame, frozen=True):
    """First frame of a connection.

    `session_id` is chosen by the trainer. A known one resumes that session (its unacknowledged outcomes are sent
    again, after `resume_after`); a connection still open for it is closed: the newest wins. `batches`: the trainer
    takes several frames in one message. `max_unacked_outcomes`, `max_unacked_bytes`: how much it takes beyond what it
    has acknowledged, one outcome always; 0, or more than the node's own window: that. `observe_all`, `observe_group`:
    see what comes of the jobs of other sessions, all of them or those of one group, as `Observed...` frames.
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
    """Jobs (each a `JobSpec`) for the node. Answered by one `Accepted` or `Rejected` per job, in order.

    `attempts`: how many attempts of a job have begun on other nodes, by its id, for jobs that are moved here.
    """

    request_id: int
    jobs: RawJobs
    attempts: Attempts = {}


class CheckJobs(_Frame, frozen=True):
    """Ask what speaks against these jobs (each a `JobSpec`). Nothing is accepted. Answered by `CheckedJobs`."""

    request_id: int
    jobs: RawJobs


class TheseJobs(_Frame, frozen=True, omit_defaults=True):
    """The jobs with these ids. `ahead`: unknown ids are remembered, and cancelled when they are submitted."""

    job_ids: JobIds
    ahead: bool = False


class MatchingJobs(_Frame, frozen=True, omit_defaults=True):
    """The jobs without an outcome for which all holds that is given, every tag included. Where nothing is, none."""

    group_id: str | None = None
    session_id: str | None = None
    tags: dict[str, str] = {}


class AllJobs(_Frame, frozen=True):
    """All jobs without an outcome."""


CancelTarget = TheseJobs | MatchingJobs | AllJobs
"""The jobs that a `Cancel` means."""


class Cancel(_Frame, frozen=True, omit_defaults=True):
    """Cancel the jobs of this session that any of the targets means; `on_node`: of all sessions of the node.

    Answered by `Cancelled` when none of them owns anything any more.
    """

    request_id: int
    targets: Annotated[list[CancelTarget], msgspec.Meta(max_length=MAX_CANCEL_TARGETS)]
    reason: str = ""
    on_node: bool = False


class WithdrawJobs(_Frame, frozen=True, omit_defaults=True):
    """Cancel these jobs of this session, which are submitted elsewhere, so that no outcome is left and the id is free.

    `ended`: forget also those that have ended. Answered by `WithdrawnJobs` when none owns anything any more.
    """

    request_id: int
    job_ids: JobIds
    reason: str = ""
    ended: bool = False


class Ack(_Frame, frozen=True):
    """To the node: everything up to and including `cursor` has been received; the node forgets it."""

    cursor: int


class StatusRequest(_Frame, frozen=True):
    """Ask for a `StatusReport`."""

    request_id: int


class RoomRequest(_Frame, frozen=True):
    """Ask for a `RoomReport`."""

    request_id: int


class ListJobs(_Frame, frozen=True):
    """Ask which jobs of this session still have something to say. Answered by one `JobList` or several."""

    request_id: int


class CallBackends(_Frame, frozen=True):
    """Look at, change, pause or resume the node's pool of LLM backends. Answered by `BackendsAnswer`.

    `operation` is the name of one, and `arguments` a map of its request's fields: see `prorl_trio.types.backends`.
    """

    request_id: int
    operation: str
    arguments: msgspec.Raw


class WithdrawCall(_Frame, frozen=True):
    """Nobody waits for the answer to this `CallBackends` any more: if it is not over, it is cancelled. Not answered."""

    request_id: int


class AttachArena(_Frame, frozen=True):
    """To the node: this trainer has mapped the arena, as `reader_id`; outcomes may come as `OutcomeRefFrame` now.

    Not answered. Counts for this connection; a reader the node does not know (any more) changes nothing.
    """

    reader_id: str


class HeartbeatPing(_Frame, frozen=True):
    """Application heartbeat, either way; answered by `HeartbeatPong` with the same `nonce`."""

    nonce: int


class HeartbeatPong(_Frame, frozen=True):
    """Answer to `HeartbeatPing`."""

    nonce: int


# ---------------------------------------------------------------- node -> trainer


class SessionWelcome(_Frame, frozen=True):
    """The session is open.

    `resumed`: it was known; `pending`: outcomes waiting to be sent again. `arena_socket`: where its arena is to be had,
    on the node's own host; empty if it is not.
    """

    version: int
    node_id: str
    session_id: str
    resumed: bool
    pending: int
    arena_socket: str = ""


class SessionRefused(_Frame, frozen=True):
    """The node refuses the connection and closes it. The `code` says whether to come back."""

    code: Literal["version", "token", "protocol", "draining", "replaced", "admission"]
    message: str


class Accepted(_Frame, frozen=True, omit_defaults=True):
    """The job is the node's now. `cursor`: it was before, and has ended: its outcome has this cursor. 0: it has not."""

    request_id: int
    index: int
    job_id: str
    cursor: int = 0


class Rejected(_Frame, frozen=True):
    """The job at `index` of the batch was not taken. `path` is the offending field, if it is one field.

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
    """Answer to `CheckJobs`: why some of the jobs, by their `index`, would be refused."""

    request_id: int
    refused: list[Rejected]


class OutcomeFrame(_Frame, frozen=True):
    """To the trainer: an `Outcome`. `cursor` grows by one with each of a session; acknowledge it with `Ack`."""

    cursor: int
    job_id: str
    outcome: msgspec.Raw


class OutcomeRefFrame(_Frame, frozen=True):
    """An `Outcome` with empty token arrays, for a trainer that has mapped the arena. See `OutcomeFrame`.

    `segments` says where they are, one reference for each segment of the trajectory, in order.
    """

    cursor: int
    job_id: str
    outcome: msgspec.Raw
    segments: list[ArenaRef]


class JobEvent(_Frame, frozen=True):
    """A job changed its stage. For people and progress bars; may be dropped under pressure."""

    job_id: str
    status: str
    detail: str = ""


class ObservedEvent(_Frame, frozen=True):
    """A `JobEvent` of another session that this one observes."""

    session_id: str
    job_id: str
    status: str
    detail: str = ""


class ObservedOutcome(_Frame, frozen=True):
    """The `Outcome` of a job of another session that this one observes, once its own trainer may have it.

    Without a cursor: sent once at most, and there is nothing to acknowledge.
    """

    session_id: str
    job_id: str
    outcome: msgspec.Raw


class ObservationLost(_Frame, frozen=True):
    """So many `Observed...` frames were dropped after the frame before: this trainer was too slow for them."""

    count: int


class Cancelled(_Frame, frozen=True):
    """Answer to `Cancel`.

    Of the jobs that were meant, `cancelled` had no outcome yet. Of the ids that were given, `ended` had ended before,
    and nobody knows the `unknown` ones: never submitted, or ended and acknowledged.
    """

    request_id: int
    cancelled: list[str]
    ended: list[str]
    unknown: list[str]


class WithdrawnJobs(_Frame, frozen=True):
    """Answer to `WithdrawJobs`. Of `forgotten` jobs no outcome is to come; of the others it is."""

    request_id: int
    forgotten: list[str]


class JobList(_Frame, frozen=True):
    """Answer to `ListJobs`: the jobs of this session whose outcome was not sent on this connection yet.

    `more`: another `JobList` follows, with nothing in between.
    """

    request_id: int
    job_ids: list[str]
    more: bool = False


class StatusReport(_Frame, frozen=True):
    """Answer to `StatusRequest`: the live state of the node, a map of plain values."""

    request_id: int
    statistics: msgspec.Raw


class RoomReport(_Frame, frozen=True):
    """Answer to `RoomRequest`: room for jobs of this session, at this moment; nothing is reserved.

    `room`: jobs that admission would take; `free`: of them, those that would begin without waiting for a worker of RUN;
    negative: so many wait for one. `run_workers`: all of these. `unready`: why a job submitted now would not be worked
    on; empty: it would.
    """

    request_id: int
    room: int
    free: int
    run_workers: int
    unready: str = ""


class BackendsAnswer(_Frame, frozen=True):
    """Answer to `CallBackends`: the operation's `answer`, which is a map, or nil and an error.

    `code` and `message` say what went wrong, `path` which field it is about, if it is one.
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
