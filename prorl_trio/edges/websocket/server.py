"""Connections that became WebSockets: authenticates them, and hands each link to a `Connection`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import trio

from prorl_ipc.errors import ProtocolViolation
from prorl_ipc.session import (
    SESSION_PROTOCOL_VERSION,
    Accepted,
    Ack,
    AttachArena,
    CallBackends,
    Cancel,
    Cancelled,
    CheckedJobs,
    CheckJobs,
    ClientFrame,
    ClientMessage,
    JobEvent,
    JobList,
    ListJobs,
    Rejected,
    RoomReport,
    RoomRequest,
    SessionHello,
    SessionRefused,
    SessionWelcome,
    StatusReport,
    StatusRequest,
    Submit,
    TheseJobs,
    WithdrawCall,
    WithdrawJobs,
    WithdrawnJobs,
)
from prorl_ipc.websocket import CloseCode, LinkClosed, LinkLimits, WebSocketLink, open_server_link
from prorl_trio.edges.operations import answer_call
from prorl_trio.edges.requests import JobId, error_of, job_id_of, read
from prorl_trio.sessions.cancelling import cancel
from prorl_trio.sessions.limits import JOBS_PER_CHECKPOINT, RETRY_AFTER_S
from prorl_trio.sessions.submission import submit_all
from prorl_trio.types.errors import AdmissionRejected, ConfigError, ProtocolError, ServiceError
from prorl_trio.types.models import JobSpec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from prorl_trio.config import ListenConfig
    from prorl_trio.edges.auth import Door
    from prorl_trio.edges.guard import Visitor
    from prorl_trio.sessions.node_api import NodeApi
    from prorl_trio.sessions.observation import Observation
    from prorl_trio.sessions.session import Session
    from prorl_trio.sessions.session_table import SessionTable


LEAVING: Final = 64
"""Authenticated connections beyond `max_sessions`: replaced ones that are still closing."""

WRONG_TOKEN: Final = "wrong token"

_decode = msgspec.msgpack.Decoder(ClientMessage).decode

logger = logging.getLogger(__name__)

MAX_OPERATIONS: Final = 64
"""Cancels and calls of the backends in progress on one connection. One more ends the connection."""
EVENT_MARK_FRAMES: Final = 200
"""Job events are dropped while more frames than this wait to be sent."""
JOBS_PER_COMMIT: Final = 1_000
"""Jobs of one frame that are stored together. Their answers are sent before the next ones are stored."""
JOBS_PER_LIST: Final = 200
"""Ids in one `JobList` frame. An id has up to 200 characters."""

RefusalCode = Literal["version", "token", "protocol", "draining", "replaced", "admission"]

_decode_spec = msgspec.msgpack.Decoder(JobSpec).decode
_decode_id = msgspec.msgpack.Decoder(JobId).decode


class Connection:
    """The `Listener` of a session while the link lasts. The session and its jobs outlive it."""

    def __init__(
        self,
        link: WebSocketLink[ClientFrame],
        session: Session,
        hello: SessionHello,
        node: NodeApi,
        table: SessionTable,
    ) -> None:
        """Attach to the session, replacing its former connection.

        Raises:
            ProtocolError: `hello` asks for an impossible cursor or window.
        """
        self._link = link
        self._session = session
        self._node = node
        self._table = table
        self._operations = 0
        self._calls: dict[int, trio.CancelScope] = {}
        self._leaving = False
        self.reader_id = ""
        self._feed = session.attach(self, hello.resume_after, hello.max_unacked_outcomes, hello.max_unacked_bytes)
        self._observation: Observation | None = None
        if hello.observe_all or hello.observe_group:
            group_id = "" if hello.observe_all else hello.observe_group
            self._observation = table.observations.begin(session.session_id, group_id, link.wake)

    async def run(self) -> tuple[int, str]:
        """Serve until the link ends, then detach from the session. Return the close code and its reason."""
        try:
            return await self._link.run(self._read, self._next_frame)
        finally:
            self._session.detach(self)
            if self._observation is not None:
                self._table.observations.end(self._observation)

    def go_away(self) -> None:
        """Send what is queued, then close. Returns at once and sets no deadline."""
        self._leaving = True
        self._link.wake()

    def end(self, reason: str) -> None:
        """Close the link with a reason. A trainer that may come back connects again."""
        self._link.end(CloseCode.POLICY_VIOLATION, reason)

    def wake(self) -> None:
        """Ask for the next frame. See `Listener`."""
        self._link.wake()

    def event(self, event: JobEvent) -> None:
        """Send a job event, or drop it. See `Listener`."""
        if self._link.queued_frames < EVENT_MARK_FRAMES:
            self._link.post(event)

    def replaced(self) -> None:
        """End the link with the code "replaced". See `Listener`."""
        self.refuse("replaced", "another connection has taken this session over")

    def refuse(self, code: RefusalCode, message: str) -> None:
        """End the link with a code that the trainer's program can act on."""
        refuse(self._link, code, message)

    def _attach_arena(self, reader_id: str) -> None:
        shared = self._session.shared
        if shared is not None and shared.has_reader(reader_id):
            self.reader_id = reader_id
            shared.adopt(self._session.session_id, reader_id)

    def _next_frame(self) -> bytes | None:
        frame = self._feed.next_frame()
        if frame is None and self._observation is not None and not self._leaving:
            frame = self._observation.next_frame()
        if frame is None and self._leaving and self._feed.exhausted:
            self._link.end(CloseCode.GOING_AWAY, "the node is going away")
        return frame

    async def _read(self) -> None:
        self._link.start_soon(self._feed.read_ahead, self._session.read, self._link.wake)
        try:
            while True:
                await self._handle(await self._link.receive())
                await self._link.wait_room()
        except LinkClosed as exc:
            self._link.end(exc.code, exc.reason)
        except (ProtocolViolation, ProtocolError) as exc:
            self.refuse("protocol", str(exc))

    async def _handle(self, frame: ClientFrame) -> None:
        match frame:
            case Submit():
                await self._submit(frame)
            case CheckJobs():
                self._start(self._check, frame)
            case Ack():
                self._session.ack(frame.cursor)
            case Cancel():
                if frame.on_node and any(isinstance(target, TheseJobs) and target.ahead for target in frame.targets):
                    raise ProtocolError("ahead is for the jobs of one session, and does not go with on_node")
                self._start(self._cancel, frame)
            case WithdrawJobs():
                known = self._session.withdraw(frame.job_ids, ended=frame.ended)  # before any later submit of theirs
                self._start(self._withdraw, frame, known)
            case AttachArena():
                self._attach_arena(frame.reader_id)
            case RoomRequest():
                self._link.post(self._room(frame.request_id))
            case StatusRequest():
                self._link.post(StatusReport(request_id=frame.request_id, statistics=self._statistics()))
            case ListJobs():
                await self._list_jobs(frame.request_id)
            case CallBackends():
                self._begin_call(frame)
            case WithdrawCall():
                if (scope := self._calls.get(frame.request_id)) is not None:
                    scope.cancel("the trainer does not wait for it any more")
            case _:
                raise ProtocolError(f"{type(frame).__name__} is not expected after the handshake")

    async def _submit(self, frame: Submit) -> None:
        for start in range(0, len(frame.jobs), JOBS_PER_COMMIT):
            await self._take(frame, start, frame.jobs[start : start + JOBS_PER_COMMIT])
            await self._link.wait_room()

    async def _take(self, frame: Submit, start: int, raws: Sequence[msgspec.Raw]) -> None:
        """Submit jobs, and answer for each in order, in the step in which it is accepted: before its outcome."""
        decoded: list[JobSpec | ServiceError] = []
        for raw in raws:
            try:
                decoded.append(read(_decode_spec, raw))
            except ServiceError as exc:
                decoded.append(exc)
            if len(decoded) % JOBS_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
        position, request_id = 0, frame.request_id

        def post(error: ServiceError | None) -> None:
            nonlocal position
            item, raw, index = decoded[position], raws[position], start + position
            position += 1
            if error is not None:
                job_id = item.job_id if isinstance(item, JobSpec) else job_id_of(_decode_id, raw)
                self._link.post(_rejected(request_id, index, job_id, error))
            elif isinstance(item, JobSpec):
                cursor = self._session.log.find(item.job_id) or 0
                self._link.post(Accepted(request_id=request_id, index=index, job_id=item.job_id, cursor=cursor))

        def post_malformed() -> None:
            while position < len(decoded) and isinstance(error := decoded[position], ServiceError):
                post(error)

        def answer(_index: int, error: ServiceError | None) -> None:
            post_malformed()
            post(error)

        specs = [d for d in decoded if isinstance(d, JobSpec)]
        await submit_all(self._session, specs, self._node, answer, frame.attempts)
        post_malformed()

    async def _list_jobs(self, request_id: int) -> None:
        """Send the jobs of the session whose outcome is still to come on this connection.

        Waits first for jobs of earlier connections that are being stored. The list is then made and queued without a
        checkpoint, so that no outcome comes in between.
        """
        for job in list(self._session.running_jobs()):
            await job.answered.wait()
        job_ids = self._session.to_come(self._feed.sent)
        for start in range(0, max(1, len(job_ids)), JOBS_PER_LIST):
            page, more = job_ids[start : start + JOBS_PER_LIST], start + JOBS_PER_LIST < len(job_ids)
            self._link.post(JobList(request_id=request_id, job_ids=page, more=more))

    def _room(self, request_id: int) -> RoomReport:
        room = self._node.room(self._session.session_id, self._session.journal.promised)
        return RoomReport(
            request_id=request_id,
            room=room.room,
            free=room.free,
            run_workers=room.run_workers,
            unready=self._node.unreadiness(),
        )

    def _statistics(self) -> msgspec.Raw:
        statistics = {**self._node.statistics(), "sessions": self._table.statistics()}
        return msgspec.Raw(msgspec.msgpack.encode(statistics, enc_hook=str))

    def _start(self, operation: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run an operation in a task of its own, so that the reader goes on; raise ProtocolError if too many run."""
        if self._operations >= MAX_OPERATIONS:
            raise ProtocolError(f"more than {MAX_OPERATIONS} cancels and calls of backends at once; await some first")
        self._operations += 1
        self._link.start_soon(self._operate, operation, *args)

    async def _operate(self, operation: Callable[..., Awaitable[None]], *args: object) -> None:
        try:
            await operation(*args)
        finally:
            self._operations -= 1

    async def _check(self, frame: CheckJobs) -> None:
        """Answer which of these jobs would be refused, whatever room there is."""
        specs: dict[int, JobSpec] = {}
        errors: dict[int, tuple[str | None, ServiceError]] = {}
        for index, raw in enumerate(frame.jobs):
            try:
                specs[index] = read(_decode_spec, raw)
            except ServiceError as exc:
                errors[index] = (job_id_of(_decode_id, raw), exc)
            if index % JOBS_PER_CHECKPOINT == JOBS_PER_CHECKPOINT - 1:
                await trio.lowlevel.checkpoint()
        if unexamined := [spec for spec in specs.values() if self._node.is_unexamined(spec)]:
            await self._node.examine(unexamined)
        for index, spec in specs.items():
            try:
                self._node.validate(spec)
            except ServiceError as exc:
                errors[index] = (spec.job_id, exc)
            if index % JOBS_PER_CHECKPOINT == JOBS_PER_CHECKPOINT - 1:
                await trio.lowlevel.checkpoint()
        refused = [_rejected(frame.request_id, index, *errors[index]) for index in sorted(errors)]
        self._link.post(CheckedJobs(request_id=frame.request_id, refused=refused))

    async def _cancel(self, frame: Cancel) -> None:
        sessions = self._table.all() if frame.on_node else [self._session]
        reason = frame.reason or ("cancelled by an operator" if frame.on_node else "cancelled by the trainer")
        found = await cancel(self._node, sessions, frame.targets, reason)
        self._link.post(Cancelled(frame.request_id, found.cancelled, found.ended, found.unknown))

    async def _withdraw(self, frame: WithdrawJobs, known: list[str]) -> None:
        await cancel(self._node, [self._session], [TheseJobs(frame.job_ids)], frame.reason)
        forgotten = [job_id for job_id in known if not self._session.knows(job_id)]
        self._link.post(WithdrawnJobs(frame.request_id, forgotten))

    def _begin_call(self, call: CallBackends) -> None:
        scope = self._calls[call.request_id] = trio.CancelScope()
        self._start(self._call_backends, call, scope)

    async def _call_backends(self, call: CallBackends, scope: trio.CancelScope) -> None:
        try:
            with scope:
                self._link.post(await answer_call(self._node, call, f"session {self._session.session_id}"))
        finally:
            if self._calls.get(call.request_id) is scope:
                del self._calls[call.request_id]


def refuse(link: WebSocketLink[ClientFrame], code: RefusalCode, message: str) -> None:
    """End a link with `SessionRefused` as its last frame."""
    close_code = CloseCode.PROTOCOL_ERROR if code in ("protocol", "version") else CloseCode.POLICY_VIOLATION
    link.end(close_code, message, last=SessionRefused(code=code, message=message))


def _rejected(request_id: int, index: int, job_id: str | None, error: ServiceError) -> Rejected:
    detail = error_of(error)
    return Rejected(
        request_id=request_id,
        index=index,
        job_id=job_id,
        code=detail.code,
        message=detail.message,
        path=detail.path,
        retry_after_s=detail.retry_after_s,
    )


def check_heartbeat(config: ListenConfig) -> None:
    """Check that a heartbeat can come before its time-out.

    Raises:
        ConfigError: it cannot.
    """
    if not 0 < config.heartbeat_interval_s < config.heartbeat_timeout_s:
        raise ConfigError(
            f"listen.heartbeat_interval_s ({config.heartbeat_interval_s:g}) must be more than 0 and less than "
            f"listen.heartbeat_timeout_s ({config.heartbeat_timeout_s:g})"
        )


class Trainers:
    """The connections of trainers, and what they share.

    Jobs run on when connections end: they belong to the node.

    Args:
        node: runs the jobs.
        config: limits.
        door: has the token that trainers must show.
        sessions: the node's sessions, shared with REST.
        arena_socket: path of the socket through which trainers on this host map the arena; empty: none.

    Raises:
        ConfigError: the heartbeat is not valid.
    """

    def __init__(
        self, node: NodeApi, config: ListenConfig, door: Door, sessions: SessionTable, arena_socket: str = ""
    ) -> None:
        check_heartbeat(config)
        self._node = node
        self._door = door
        self._sessions = sessions
        self._arena_socket = arena_socket
        self._max_known = config.max_sessions + LEAVING
        self._known = 0
        self._open: dict[trio.CancelScope, Connection | None] = {}
        self._close_timeout_s = config.close_timeout_s
        self._limits = LinkLimits(
            max_message_bytes=config.max_message_bytes,
            handshake_timeout_s=config.handshake_timeout_s,
            heartbeat_interval_s=config.heartbeat_interval_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
        )

    def go_away(self) -> None:
        """Let the connections send what is queued and close, within `listen.close_timeout_s`. Returns at once.

        Connections that have not authenticated are cancelled.
        """
        for scope, connection in self._open.items():
            if connection is None:
                scope.cancel("the server ends")
            else:
                scope.deadline = trio.current_time() + self._close_timeout_s
                connection.go_away()

    def end_known(self) -> None:
        """End the connections that showed the former token. Their sessions and jobs go on."""
        for connection in self._open.values():
            if connection is not None:
                connection.end("the node's token was replaced; connect again with the new one")

    async def serve(self, stream: trio.abc.Stream, received: bytes, scope: trio.CancelScope, visitor: Visitor) -> None:
        """Serve a connection on which `received` came, which begins with a WebSocket handshake, until it ends.

        Closes the stream. `scope` is around this connection: it ends with it. `visitor` leaves when it has shown the
        token.

        Raises:
            LinkClosed: it is not a valid handshake, or the client left.
        """
        self._open[scope] = None
        try:
            async with open_server_link(stream, _decode, self._limits, received) as link:
                await self._serve_link(link, scope, visitor)
        finally:
            del self._open[scope]

    async def _serve_link(self, link: WebSocketLink[ClientFrame], scope: trio.CancelScope, visitor: Visitor) -> None:
        hello = await self._hello(link)
        if hello is None:
            await link.aclose()
            return
        visitor.leave()
        self._known += 1
        try:
            await self._serve_known(link, hello, scope)
        finally:
            self._known -= 1

    async def _serve_known(
        self, link: WebSocketLink[ClientFrame], hello: SessionHello, scope: trio.CancelScope
    ) -> None:
        try:
            if self._known > self._max_known:
                raise AdmissionRejected(f"{self._max_known} connections are open, the limit", RETRY_AFTER_S)
            session, resumed = self._sessions.open(hello.session_id, hello.resume_after)
            await session.store()
            if not self._door.admits(hello.token):  # it was replaced meanwhile
                refuse(link, "token", WRONG_TOKEN)
                await link.aclose()
                return
            if self._sessions.get(hello.session_id) is not session:
                raise AdmissionRejected("the node has too many sessions", RETRY_AFTER_S)  # it gave way meanwhile
            connection = Connection(link, session, hello, self._node, self._sessions)
        except AdmissionRejected as exc:
            refuse(link, "admission", str(exc))
            await link.aclose()
            return
        except ProtocolError as exc:
            refuse(link, "protocol", str(exc))
            await link.aclose()
            return
        self._open[scope] = connection
        link.trust()
        link.batches = hello.batches
        link.post(self._welcome(session, hello, resumed=resumed))
        code, reason = await connection.run()
        logger.info("session %s: connection closed (%d): %s", session.session_id, code, reason)

    async def _hello(self, link: WebSocketLink[ClientFrame]) -> SessionHello | None:
        """Return the first frame if it is a valid `SessionHello`. Otherwise refuse the link and return None."""
        frame: ClientFrame | None = None
        timeout_s = self._limits.handshake_timeout_s
        try:
            with trio.move_on_after(timeout_s):
                frame = await link.receive()
        except ProtocolViolation as exc:
            refuse(link, "protocol", str(exc))
            return None
        if frame is None:
            refuse(link, "protocol", f"no SessionHello within {timeout_s:g} s")
        elif not isinstance(frame, SessionHello):
            refuse(link, "protocol", f"the first frame must be SessionHello, got {type(frame).__name__}")
        elif not self._door.admits(frame.token):
            refuse(link, "token", WRONG_TOKEN)
        elif frame.version != SESSION_PROTOCOL_VERSION:
            refuse(link, "version", f"the node speaks version {SESSION_PROTOCOL_VERSION}, not {frame.version}")
        else:
            return frame
        return None

    def _welcome(self, session: Session, hello: SessionHello, *, resumed: bool) -> SessionWelcome:
        return SessionWelcome(
            version=SESSION_PROTOCOL_VERSION,
            node_id=self._node.node_id,
            session_id=session.session_id,
            resumed=resumed,
            pending=session.log.last - max(session.log.acked, hello.resume_after),
            arena_socket=self._arena_socket,
        )
