"""The state of a client, across connections. Synchronous; the transport writes it, the client's methods read it."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import contextmanager
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import msgspec
import trio

from prorl_ipc.errors import StaleReference
from prorl_ipc.session import (
    Accepted,
    Ack,
    BackendsAnswer,
    Cancelled,
    CheckedJobs,
    JobEvent,
    JobList,
    ListJobs,
    ObservationLost,
    ObservedEvent,
    ObservedOutcome,
    OutcomeFrame,
    OutcomeRefFrame,
    Rejected,
    RoomReport,
    ServerFrame,
    SessionRefused,
    SessionWelcome,
    StatusReport,
    WithdrawnJobs,
)
from prorl_ipc.websocket import CloseCode
from prorl_trio.client.errors import SessionLost, SessionReplaced
from prorl_trio.client.requests import Requests
from prorl_trio.types.errors import AdmissionRejected, Draining, ProtocolError, ServiceError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_ipc.arena_memory import ArenaRef, TokenArrays
    from prorl_ipc.arena_socket import MappedArena
    from prorl_ipc.websocket import WebSocketLink
    from prorl_trio.types.models import Outcome


logger = logging.getLogger(__name__)

LIST_REQUEST: Final = 0
"""Request id of `ListJobs`; calls have larger ids."""
EVENTS_KEPT: Final = 1024
"""Maximum number of unread job events. The oldest are dropped."""
ADMISSION_RETRY_S: Final = 5.0
ACK_DELAY_S: Final = 0.005
"""Delay of an acknowledgement while more outcomes are queued, so that one frame covers several outcomes."""

_encode = msgspec.msgpack.Encoder().encode


# The shared memory arenas that a client has mapped.
#
# They are the arenas of the current node process and of the one before, whose outcomes may still be unread.

ARENAS_KEPT: Final = 2

KEPT_FRAMES: Final = 1024
KEPT_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of the unread frames in bytes. Beyond it the oldest are dropped and counted, but never the last one."""


class Observed(NamedTuple):
    """A stage change of another session's job, or its end. At the end `outcome` is set, and `detail` is its error."""

    session_id: str
    job_id: str
    status: str
    detail: str
    outcome: Outcome | None = None


class ObservedInbox:
    """A queue of frames in order of arrival, bounded by `KEPT_FRAMES` and `KEPT_BYTES`."""

    def __init__(self) -> None:
        self.lost = 0
        """Count of the frames dropped so far, here and by the node."""
        self._frames: deque[ObservedEvent | ObservedOutcome] = deque()
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: ObservedEvent | ObservedOutcome) -> None:
        """Add a frame. If the queue is then over its limits, drop the oldest frames and count them in `lost`."""
        self._frames.append(frame)
        self._size_bytes += _size(frame)
        while len(self._frames) > 1 and (len(self._frames) > KEPT_FRAMES or self._size_bytes > KEPT_BYTES):
            self.take()
            self.lost += 1

    def take(self) -> ObservedEvent | ObservedOutcome | None:
        """Remove and return the oldest frame; None if the queue is empty."""
        if not self._frames:
            return None
        frame = self._frames.popleft()
        self._size_bytes -= _size(frame)
        return frame


def _size(frame: ObservedEvent | ObservedOutcome) -> int:
    return memoryview(frame.outcome).nbytes if isinstance(frame, ObservedOutcome) else 0


class Inbox:
    """A queue of outcomes in cursor order, each once, even if the node sends it again.

    The node's limit on unacknowledged outcomes bounds its size.

    Attributes:
        received: the cursor that arrived last. A new connection resumes after it.
        left_out: the number of skipped cursors that will not arrive.
        acked: the caller has acknowledged everything up to this cursor.
    """

    def __init__(self, resume_after: int = 0) -> None:
        self.received = resume_after
        self.acked = resume_after
        self.left_out = 0
        self._begun = False
        self._frames: deque[OutcomeFrame | OutcomeRefFrame] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: OutcomeFrame | OutcomeRefFrame) -> bool:
        """Add a frame at the end. Return False, and change nothing, if its cursor had already arrived.

        Cursors that the frame skips are counted in `left_out`: another client received these outcomes, or had the node
        drop them. Cursors before the first frame were acknowledged by an earlier client, and are not counted.
        """
        if frame.cursor <= self.received:
            return False
        if self._begun:
            self.left_out += frame.cursor - self.received - 1
        self._begun = True
        self.received = frame.cursor
        self._frames.append(frame)
        return True

    def acknowledge(self, cursor: int) -> bool:
        """Remove everything up to `cursor` and advance `acked` to it. Return False if `acked` was already there."""
        while self._frames and self._frames[0].cursor <= cursor:
            self._frames.popleft()
        if cursor <= self.acked:
            return False
        self.acked = cursor
        return True

    def rewind(self) -> list[str]:
        """Remove all frames, which the node will send again, and return their job ids."""
        dropped = [frame.job_id for frame in self._frames]
        self._frames.clear()
        self.received = self.acked
        return dropped

    def first(self) -> OutcomeFrame | OutcomeRefFrame | None:
        """Return the oldest frame without removing it; None if the queue is empty."""
        return self._frames[0] if self._frames else None

    def after(self, cursor: int) -> list[OutcomeFrame | OutcomeRefFrame]:
        """Return the frames after `cursor`, oldest first, without removing them."""
        found = list(takewhile(lambda frame: frame.cursor > cursor, reversed(self._frames)))
        return found[::-1]

    def job_ids(self) -> set[str]:
        return {frame.job_id for frame in self._frames}

    def frames(self, limit: int) -> list[OutcomeFrame | OutcomeRefFrame]:
        """Return the oldest frames, at most `limit`, without removing them."""
        return list(islice(self._frames, limit))


class MappedArenas:
    """The last `ARENAS_KEPT` mapped arenas. Adding an arena drops the oldest.

    An arena remains readable after the connection that mapped it has ended.
    """

    def __init__(self) -> None:
        self._arenas: deque[MappedArena] = deque(maxlen=ARENAS_KEPT)

    def __len__(self) -> int:
        return len(self._arenas)

    def add(self, arena: MappedArena) -> None:
        """Add `arena`, replacing any earlier mapping of the same arena."""
        others = [other for other in self._arenas if other.arena_id != arena.arena_id]
        self._arenas.clear()
        self._arenas.extend([*others, arena])

    def view(self, ref: ArenaRef) -> TokenArrays:
        """Return the tokens of `ref` as views of the shared memory, without a copy.

        Raises:
            StaleReference: the node has reused that memory, or the arena is not mapped here.
            ProtocolViolation: `ref` was never valid in its arena.
        """
        for arena in self._arenas:
            if arena.arena_id == ref.arena_id:
                return arena.view(ref)
        raise StaleReference(f"arena {ref.arena_id} is not mapped")


class ClientState:
    """The client's state of a session: inbox, calls in flight, and the current link, if any."""

    def __init__(self, session_id: str, resume_after: int) -> None:
        self.session_id = session_id
        self.inbox = Inbox(resume_after)
        self.requests = Requests()
        self.events: deque[JobEvent] = deque(maxlen=EVENTS_KEPT)
        self.observed = ObservedInbox()
        self.welcome: SessionWelcome | None = None
        self.link: WebSocketLink[ServerFrame] | None = None
        self.arenas = MappedArenas()
        self.failure: ServiceError | None = None
        self._acked = resume_after
        """Cursor of the last acknowledgement sent over this link."""
        self._ack_waits = False
        self._awaited: set[str] = set()
        """Accepted jobs of the session without an outcome, to this client's knowledge."""
        self._listed: list[str] | None = None
        """Job ids of the `JobList` pages so far; None: no list was requested."""
        self._submitting = 0
        self._changed = trio.Event()

    @property
    def connected(self) -> bool:
        return self.link is not None

    @property
    def outstanding(self) -> bool:
        """Return True while an outcome may still arrive.

        That is the case if an accepted job lacks an outcome, if a submit is in progress, or if the node's list of the
        session's jobs has not arrived. Outcomes that have arrived do not count.
        """
        return bool(self._awaited) or self._listed is not None or self._submitting > 0

    @property
    def listing(self) -> bool:
        """Return True until the node's list of the session's jobs has arrived."""
        return self._listed is not None

    def awaited(self) -> set[str]:
        """Return the accepted jobs of the session without an outcome, to this client's knowledge."""
        return set(self._awaited)

    @contextmanager
    def submitting(self) -> Iterator[None]:
        """Count a submit as in progress during the block, so that `outstanding` is True."""
        self._submitting += 1
        try:
            yield
        finally:
            self._submitting -= 1
            self._notify()

    def opened(self, link: WebSocketLink[ServerFrame], welcome: SessionWelcome) -> None:
        """Start using a new link: send all unanswered requests again, then the acknowledgement.

        Raises:
            SessionLost: the node has forgotten jobs that it had accepted.
        """
        if self.welcome is not None and not welcome.resumed and self._awaited:
            raise SessionLost(
                f"node {welcome.node_id} no longer knows session {self.session_id!r} and its {len(self._awaited)} jobs "
                "without an outcome (it was restarted); submit them again",
                sorted(self._awaited),
            )
        self.welcome = self.welcome or welcome
        self.link = link
        # Submits go first: acknowledging a job makes the node forget it, and a later submit would run it again.
        for frame in self.requests.frames():
            link.post(frame)
        self._ack_waits = False
        self._acked = self.inbox.acked
        link.post(Ack(cursor=self._acked))
        # Only the node knows which outcomes are still to come: of jobs that ended while disconnected, and of earlier
        # clients.
        self._listed = None
        if welcome.resumed:
            self._ask_for_list()
        self._notify()

    def lost(self) -> None:
        """Forget the link that has ended."""
        self.link = None

    def take(self, frame: ServerFrame) -> None:
        """Handle one frame from the node: store it, pass an answer to its call, and wake the waiting tasks.

        Raises:
            ServiceError: the frame ends the client: it is a refusal, or it violates the protocol.
        """
        if isinstance(frame, OutcomeFrame | OutcomeRefFrame) and frame.cursor > self.inbox.received + 1:
            self._ask_for_list()  # find the jobs whose outcomes will not arrive
        match frame:
            case OutcomeFrame() | OutcomeRefFrame():
                left_out = self.inbox.left_out
                if self.inbox.put(frame):
                    if self.inbox.left_out > left_out:
                        logger.warning(
                            "session %s: %d outcomes before cursor %d will not come: somebody else took them, or had "
                            "the node give them up",
                            self.session_id,
                            self.inbox.left_out - left_out,
                            frame.cursor,
                        )
                    self._awaited.discard(frame.job_id)
                    self.requests.infer_accepted(frame.job_id)
                    self._notify()
            case (
                Accepted()
                | Rejected()
                | CheckedJobs()
                | Cancelled()
                | WithdrawnJobs()
                | StatusReport()
                | RoomReport()
                | BackendsAnswer()
            ):
                self.requests.take(frame)
                if isinstance(frame, Accepted) and not 0 < frame.cursor <= self.inbox.received:
                    self._awaited.add(frame.job_id)
                elif isinstance(frame, WithdrawnJobs):
                    self._awaited.difference_update(frame.forgotten)
                    self._notify()
            case JobList():
                self._list(frame)
            case JobEvent():
                self.events.append(frame)
                self._notify()
            case ObservedEvent() | ObservedOutcome():
                self.observed.put(frame)
                self._notify()
            case ObservationLost():
                self.observed.lost += frame.count
            case SessionRefused():
                raise refusal(frame)
            case _:
                raise ProtocolError(f"{type(frame).__name__} is not expected after the handshake")

    def acknowledge(self, cursor: int) -> None:
        """Acknowledge the outcomes up to `cursor`: drop them here, and send the acknowledgement over the link, if any.

        Does not wait. While more outcomes are in the inbox, the frame is sent `ACK_DELAY_S` later.
        """
        if not self.inbox.acknowledge(cursor) or self.link is None or self._ack_waits:
            return
        if len(self.inbox):
            self._ack_waits = True
            self.link.start_soon(self._ack_soon, self.link)
        else:
            self.link.wake()

    def next_ack(self) -> bytes | None:
        """Return the newest acknowledgement, encoded, for an idle link.

        Return None if it is already sent, or is delayed.
        """
        ack = None if self._ack_waits else self._ack()
        return None if ack is None else _encode(ack)

    def ask_again(self, why: str) -> None:
        """Close the link, so that the next link delivers all unacknowledged outcomes again.

        Empties the inbox. `why` is the reason in the close frame.
        """
        self._awaited.update(self.inbox.rewind())
        if self.link is not None:
            self.link.end(CloseCode.NORMAL, why)

    def post(self, frame: msgspec.Struct) -> None:
        """Send the newest acknowledgement, then `frame`. Does nothing without a link: `opened` sends requests again."""
        if self.link is not None:
            if (ack := self._ack()) is not None:
                self.link.post(ack)  # first: the frame may be about an acknowledged job
            self.link.post(frame)

    def fail(self, failure: ServiceError) -> None:
        """End the client with `failure` and wake all waiting tasks. Only the first failure counts."""
        if self.failure is None:
            self.failure = failure
            self.requests.wake_all()
            self._notify()

    def raise_failure(self) -> NoReturn:
        assert self.failure is not None
        raise self.failure.with_traceback(None)

    async def wait_changed(self) -> None:
        """Wait for the next outcome, event, connection or failure.

        The caller must check the state before the call, and again afterwards.
        """
        await self._changed.wait()

    def _ask_for_list(self) -> None:
        if self._listed is None and self.link is not None:
            self._listed = []
            self.link.post(ListJobs(request_id=LIST_REQUEST))

    def _list(self, page: JobList) -> None:
        if self._listed is None:
            raise ProtocolError("got a JobList that was not asked for")
        self._listed += page.job_ids
        if not page.more:
            self._awaited, self._listed = set(self._listed), None
            self._notify()

    async def _ack_soon(self, link: WebSocketLink[ServerFrame]) -> None:
        await trio.sleep(ACK_DELAY_S)
        if self.link is link:
            self._ack_waits = False
            link.wake()

    def _ack(self) -> Ack | None:
        if self.inbox.acked == self._acked:
            return None
        self._acked = self.inbox.acked
        return Ack(cursor=self._acked)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def refusal(frame: SessionRefused) -> ServiceError:
    """Return the error for the node's refusal of a session."""
    match frame.code:
        case "token":
            return Unauthorized(f"the node refused the connection: {frame.message}")
        case "replaced":
            return SessionReplaced(frame.message)
        case "draining":
            return Draining(frame.message)
        case "admission":
            return AdmissionRejected(frame.message, ADMISSION_RETRY_S)
        case "version" | "protocol":
            return ProtocolError(f"the node refused the connection ({frame.code}): {frame.message}")
