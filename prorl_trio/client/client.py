"""The trainer's client for trio. Without trio, use `prorl_trio.client.BlockingClient`."""

from __future__ import annotations

import uuid
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from prorl_ipc.nursery import single_exception
from prorl_ipc.session import (
    MAX_FRAME_JOBS,
    MAX_MESSAGE_BYTES,
    SESSION_PROTOCOL_VERSION,
    Accepted,
    AllJobs,
    Cancel,
    Cancelled,
    CancelTarget,
    CheckedJobs,
    CheckJobs,
    MatchingJobs,
    ObservedEvent,
    Rejected,
    RoomReport,
    RoomRequest,
    SessionHello,
    StatusReport,
    StatusRequest,
    TheseJobs,
    WithdrawCall,
    WithdrawJobs,
    WithdrawnJobs,
)
from prorl_ipc.tls import client_context
from prorl_ipc.websocket import LinkLimits
from prorl_ipc.wire import UNDECODABLE
from prorl_trio.client.address import Address, EndpointFile, HeadFile
from prorl_trio.client.agents import open_agent
from prorl_trio.client.backend_calls import BackendCalls
from prorl_trio.client.policy_update import open_policy_update
from prorl_trio.client.requests import Call, FrameT, RequestFrame, SubmitCall
from prorl_trio.client.results import ResultCalls
from prorl_trio.client.state import ClientState, Observed
from prorl_trio.client.transport import Patience, Transport
from prorl_trio.config.secrets import check_token
from prorl_trio.types.errors import AdmissionRejected, ConfigError, ProtocolError, Unauthorized, unsendable
from prorl_trio.types.models import Outcome
from prorl_trio.weights.store import WeightStores

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from os import PathLike

    from prorl_ipc.session import JobEvent
    from prorl_trio.client.agents import OpenedAgent
    from prorl_trio.client.policy_update import PolicyUpdate
    from prorl_trio.types.backends import PauseMode
    from prorl_trio.types.models import JobSpec


BATCH_BYTES: Final = 1024 * 1024
BATCH_JOBS: Final = 1_000
"""Limits of one `Submit` frame, in jobs and bytes. A larger submit is split. A frame has at least one job."""
FRAME_OVERHEAD_BYTES: Final = 64
"""Upper bound of the bytes that `Submit` adds to its jobs."""
ADMISSION_PATIENCE_S: Final = 600.0
"""Maximum seconds that `submit` retries on a full node."""
MIN_RETRY_S: Final = 0.02
CLEAR_TIMEOUT_S: Final = 30.0
"""Time limit in seconds for removing the folders of weights when the client is closed."""
MAX_CALLS: Final = 32
"""Maximum number of a client's requests in flight. Further requests wait for their turn."""

_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class EventStream:
    """An async iterator over job events; it ends with the session. See `RolloutClient.events`."""

    def __init__(self, state: ClientState) -> None:
        self._state = state

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> JobEvent:
        await trio.lowlevel.checkpoint()
        while not self._state.events:
            if self._state.failure is not None:
                raise StopAsyncIteration
            await self._state.wait_changed()
        return self._state.events.popleft()


class ObservedStream:
    """An async iterator over `Observed`; it ends with the session. See `RolloutClient.observed`."""

    def __init__(self, state: ClientState) -> None:
        self._state = state

    @property
    def lost(self) -> int:
        """Return the number of frames that the node and this client dropped because they were not read in time."""
        return self._state.observed.lost

    def __aiter__(self) -> ObservedStream:
        return self

    async def __anext__(self) -> Observed:
        await trio.lowlevel.checkpoint()
        while (frame := self._state.observed.take()) is None:
            if self._state.failure is not None:
                raise StopAsyncIteration
            await self._state.wait_changed()
        if isinstance(frame, ObservedEvent):
            return Observed(frame.session_id, frame.job_id, frame.status, frame.detail)
        try:
            outcome = _decode_outcome(frame.outcome)
        except UNDECODABLE as exc:
            raise ProtocolError(f"the observed outcome of job {frame.job_id!r} cannot be read: {exc}") from None
        return Observed(frame.session_id, frame.job_id, outcome.status, outcome.error, outcome)


class RolloutClient(ResultCalls, BackendCalls):
    """A trainer's session on one node. Made by `connect`. Use it only in the trio loop in which it was made.

    The client reconnects automatically. Calls in flight wait for the new connection and are sent again. When
    reconnecting fails for good, every call raises the reason (`ConnectionLost`, `SessionLost`, `SessionReplaced`, ...).
    `results` raises it after the outcomes that had arrived. A cancelled call may or may not have reached the node.
    """

    def __init__(self, state: ClientState, max_message_bytes: int, nursery: trio.Nursery) -> None:
        super().__init__(state)
        self._nursery = nursery
        self._background: set[trio.CancelScope] = set()
        self._max_message_bytes = max_message_bytes
        self._turns = trio.Semaphore(MAX_CALLS)
        self.weight_stores = WeightStores()

    def __repr__(self) -> str:
        state = self._state
        how = repr(state.failure) if state.failure else "connected" if state.connected else "connecting"
        return f"<RolloutClient {state.session_id!r}, {how}, {len(state.inbox)} results waiting>"

    @property
    def session_id(self) -> str:
        """Return the session's id. Pass it to `connect` to resume the session, also from another process."""
        return self._state.session_id

    @property
    def session_state(self) -> ClientState:
        """Return this client's view of the session, for a client of several nodes."""
        return self._state

    @property
    def node_id(self) -> str:
        """Return the id of the node at this client's first connection."""
        assert self._state.welcome is not None
        return self._state.welcome.node_id

    @property
    def resumed(self) -> bool:
        """Return True if the node knew the session when this client first connected."""
        assert self._state.welcome is not None
        return self._state.welcome.resumed

    async def submit(
        self,
        specs: Sequence[JobSpec],
        *,
        patience_s: float = ADMISSION_PATIENCE_S,
        attempts: Mapping[str, int] | None = None,
    ) -> list[Accepted | Rejected]:
        """Submit jobs. Return one answer per spec, in the order of `specs` (`index` is the position there).

        An accepted job gets exactly one outcome, through `results`. A rejected job is not on the node: `code` and
        `message` contain the reason, `path` names the field, and `retry_after_s` is the delay after which there may be
        room. Submitting the same spec again does not run it again: the answer accepts the existing job.

        A job that a full node refuses (`code` is `admission`) is resubmitted when the node suggests, for at most
        `patience_s` seconds in all. With 0 the first answer is final. Often only the caller frees capacity: another
        task must consume `results` during the wait. Jobs are sent in batches. A cancel may leave some jobs on the node;
        submitting the same specs again is safe.

        `attempts` is for jobs that are moved from a lost node: the number of attempts begun there, by job id.

        Raises:
            ServiceError: the session is over.
        """
        answers: list[Accepted | Rejected] = []
        deadline_s = trio.current_time() + patience_s
        with self._state.submitting():
            await trio.lowlevel.checkpoint()
            for batch in self._batches(specs):
                if isinstance(batch, Rejected):
                    answers.append(batch)
                    continue
                answers += await self._submit_batch(batch, deadline_s, attempts or {})
        return [msgspec.structs.replace(answer, index=index) for index, answer in enumerate(answers)]

    async def check(self, specs: Sequence[JobSpec]) -> list[Rejected]:
        """Return the answers for the jobs that the node would refuse regardless of its capacity. Submits nothing.

        `index` is the job's position in `specs`. The node checks handler, payload and gold answer.

        Raises:
            ServiceError: the session is over.
        """
        refused: list[Rejected] = []
        done = 0
        for batch in self._batches(specs):
            if isinstance(batch, Rejected):
                refused.append(msgspec.structs.replace(batch, index=done))
                done += 1
                continue
            answer = await self._ask(CheckedJobs, partial(_check_jobs, [encoded for _, encoded in batch]))
            refused += [msgspec.structs.replace(each, index=done + each.index) for each in answer.refused]
            done += len(batch)
        return refused

    async def _submit_batch(
        self, batch: Sequence[tuple[str, msgspec.Raw]], deadline_s: float, attempts: Mapping[str, int]
    ) -> list[Accepted | Rejected]:
        """Submit the jobs of one frame and return their answers.

        Retry the jobs that the full node refuses until the deadline.
        """
        answers: dict[int, Accepted | Rejected] = {}
        waiting = list(range(len(batch)))
        while True:
            call = SubmitCall([batch[position] for position in waiting], attempts)
            await self._call(call)
            answers.update((p, answer) for p, answer in zip(waiting, call.answers, strict=True) if answer is not None)
            waits_s = {p: _retry_after_s(answers[p]) for p in waiting}
            waiting = [p for p in waiting if waits_s[p] is not None]
            left_s = deadline_s - trio.current_time()
            if not waiting or left_s <= 0:
                return [answers[p] for p in sorted(answers)]
            soonest_s = min(wait_s for wait_s in waits_s.values() if wait_s is not None)
            await trio.sleep(min(left_s, max(MIN_RETRY_S, soonest_s)))

    def events(self) -> EventStream:
        """Return an iterator over the stage changes of this session's jobs, for people and progress bars.

        Events may be lost: the node drops some under load, and this client drops the oldest unread events. The iterator
        ends with the session.
        """
        return EventStream(self._state)

    def observed(self) -> ObservedStream:
        """Return an iterator over stages and outcomes of other sessions' jobs, if `connect` asked to observe.

        The events are for display only: nothing needs to be acknowledged. Frames may be lost. `ObservedStream.lost`
        counts the frames for which this client or the network was too slow, but not frames sent while disconnected. The
        iterator ends with the session.
        """
        return ObservedStream(self._state)

    def open_agent(self, spec: JobSpec) -> AbstractAsyncContextManager[OpenedAgent]:
        """Submit a job, wait until it needs its agent, and act as that agent in the block.

            async with client.open_agent(spec) as agent:
                answers = openai.AsyncOpenAI(base_url=agent.urls["openai"], api_key=agent.key)
                ...

        When the block ends, the rollout is graded by its handler or with `agent.reward`. `results` returns its outcome
        like any other. An exception in the block cancels the job.

        Raises:
            ServiceError: the node refused the job, the job ended before it needed its agent, or the session is over.
            NoAgentWanted: at the end of the block, if the attempt failed during the block and the job is retried.
        """
        return open_agent(self, spec)

    async def cancel(
        self,
        job_ids: Sequence[str] = (),
        reason: str = "",
        *,
        group_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        whole_session: bool = False,
        ahead: bool = False,
        on_node: bool = False,
        session_id: str | None = None,
        everything: bool = False,
    ) -> Cancelled:
        """Cancel jobs of this session, or of any session of the node. Return when they have stopped running.

        The outcomes of the cancelled jobs come through the `results` of their own session, like any other. In the
        answer, `cancelled` lists the jobs that had no outcome yet, and `ended` the given ids with an outcome. `unknown`
        lists the ids that were never submitted there, or whose jobs ended and were acknowledged.

        Args:
            job_ids: jobs, by id.
            reason: the `error` of the outcomes; if empty, the error names the canceller.
            group_id: also cancel all jobs of this group that have not ended.
            tags: also cancel all jobs that have all these tags and have not ended.
            whole_session: cancel all jobs of this session that have not ended.
            ahead: remember unknown ids, and cancel these jobs when they are submitted. Use it for a cancel that may
                arrive before the submit of another process.
            on_node: cancel jobs of any session. A job must match all of the given `group_id`, `tags` and `session_id`.
            session_id: with `on_node`: also cancel the jobs of that session that have not ended.
            everything: with `on_node`: cancel all jobs of the node that have not ended.

        Raises:
            ServiceError: the session is over.
            ValueError: the arguments mix options for this session with options for `on_node`.
        """
        if (whole_session or ahead) if on_node else (everything or session_id is not None):
            raise ValueError("whole_session and ahead are for a session; session_id and everything go with on_node")
        *earlier, last = _pages(job_ids)
        found = [await self._cancel([TheseJobs(page, ahead)], reason, on_node=on_node) for page in earlier]
        targets: list[CancelTarget] = [TheseJobs(last, ahead)] if last else []
        if on_node:
            targets.append(MatchingJobs(group_id, session_id, dict(tags or {})))
        else:
            targets += [MatchingJobs(group_id=group_id)] if group_id else []
            targets += [MatchingJobs(tags=dict(tags))] if tags else []
        if whole_session or everything:
            targets.append(AllJobs())
        found.append(await self._cancel(targets, reason, on_node=on_node))
        return Cancelled(
            request_id=found[-1].request_id,
            cancelled=[job_id for answer in found for job_id in answer.cancelled],
            ended=[job_id for answer in found for job_id in answer.ended],
            unknown=[job_id for answer in found for job_id in answer.unknown],
        )

    async def _cancel(self, targets: list[CancelTarget], reason: str, *, on_node: bool) -> Cancelled:
        return await self._ask(Cancelled, lambda i: Cancel(i, targets, reason, on_node))

    async def withdraw(self, job_ids: Sequence[str], reason: str, *, ended: bool = False) -> None:
        """Cancel jobs of this session without producing outcomes, so that their ids are free again.

        This is for jobs that are submitted elsewhere. Do not submit them here again before this call has returned. With
        `ended`, jobs that have ended but are not acknowledged are forgotten as well.

        Raises:
            ServiceError: the session is over.
        """
        for page in _pages(job_ids):
            await self._ask(WithdrawnJobs, partial(_withdraw_jobs, page, reason, ended))

    def policy_update(
        self,
        version: str,
        *,
        mode: PauseMode = "wait",
        timeout_s: float = 600.0,
        max_idle_s: float | None = None,
    ) -> AbstractAsyncContextManager[PolicyUpdate]:
        """Open a block that replaces the policy's weights.

        Backends pause in the block, and resume under `version` after it.

            async with client.policy_update("2", mode="abort") as update:
                await update.load_folder("/checkpoints/2")

        Instead of `load_folder`, `load_state_dict` accepts tensors, or the block may transfer the weights itself. If
        the block raises an exception or is cancelled, or an engine fails, every engine stays at the old version.

        Args:
            version: the name under which completions are recorded after the block.
            mode: the handling of completions in flight: `wait` for them; `abort` them and continue them later from the
                received tokens; or `keep` them and continue with the new weights.
            timeout_s: limit in seconds for the pause, for each load, and for the rollback to the old version.
            max_idle_s: maximum seconds between two steps of the block, such as for training in it; None:
                `timeout_s`.

        Raises:
            PolicyUpdateFailed: an engine could not be paused, failed to load, or reports different weights afterwards.
            WeightsRefused: the weights are incomplete, or belong to a model that the engines do not serve.
            PauseTimeout: the pause took too long; nothing has changed.
            BackendsBusy: another pause or resume is running, or another trainer's update; nothing has changed.
            UpdateRefused: the block ignored a load that failed; or the node abandoned the update, because it received
                nothing from this client for `LEASE_S`, or the block made no step within `max_idle_s`.
            ServiceError: the session is over.
        """
        return open_policy_update([self], version, mode=mode, timeout_s=timeout_s, max_idle_s=max_idle_s)

    def run_in_background(self, afn: Callable[[], Awaitable[None]]) -> None:
        """See `BackendCalls.run_in_background`."""

        async def run() -> None:
            with trio.CancelScope() as scope:
                self._background.add(scope)
                try:
                    await afn()
                finally:
                    self._background.discard(scope)

        self._nursery.start_soon(run)

    def stop_background(self) -> None:
        """Cancel the background tasks."""
        for scope in self._background:
            scope.cancel()

    async def status(self) -> dict[str, Any]:
        """Return the live state of the node, for people and dashboards.

        Raises:
            ServiceError: the session is over.
        """
        report = await self._ask(StatusReport, lambda i: StatusRequest(request_id=i))
        return msgspec.msgpack.decode(report.statistics, type=dict[str, Any])

    async def room(self) -> RoomReport:
        """Return the number of this session's jobs that the node could accept now. It reserves nothing.

        Raises:
            ServiceError: the session is over.
        """
        return await self._ask(RoomReport, lambda i: RoomRequest(request_id=i))

    def _batches(self, specs: Sequence[JobSpec]) -> Iterator[list[tuple[str, msgspec.Raw]] | Rejected]:
        """Yield the encoded jobs of each frame, and a `Rejected` for a spec that cannot be encoded or is too large."""
        limit_bytes = self._max_message_bytes - FRAME_OVERHEAD_BYTES
        batch: list[tuple[str, msgspec.Raw]] = []
        size_bytes = 0
        for spec in specs:
            rejected, encoded = _encode_spec(spec, limit_bytes)
            full = len(batch) == BATCH_JOBS or size_bytes + len(encoded) > min(BATCH_BYTES, limit_bytes)
            if batch and (rejected is not None or full):
                yield batch
                batch, size_bytes = [], 0
            if rejected is not None:
                yield rejected
            else:
                batch.append((spec.job_id, msgspec.Raw(encoded)))
                size_bytes += len(encoded)
        if batch:
            yield batch

    async def _ask(self, answer_type: type[FrameT], build: Callable[[int], RequestFrame]) -> FrameT:
        call = Call(build, answer_type)
        await self._call(call)
        assert call.answer is not None
        return call.answer

    async def _call(self, call: Call[Any] | SubmitCall) -> None:
        """Send `call` and wait until it is answered, over as many connections as necessary.

        Raises:
            ServiceError: the client failed before the answer was complete.
        """
        state = self._state
        async with self._turns:
            if state.failure is not None:
                state.raise_failure()
            request_id = state.requests.add(call)
            try:
                if state.connected:
                    state.post(call.frame(request_id))
                await call.answered.wait()
            except trio.Cancelled:
                if call.withdrawable:
                    state.post(WithdrawCall(request_id=request_id))
                raise
            finally:
                state.requests.remove(request_id)
            if not call.complete:
                state.raise_failure()


@asynccontextmanager
async def connect_node(
    url: str | None = None,
    token: str = "",
    *,
    endpoint_file: str | PathLike[str] | None = None,
    session_id: str | None = None,
    resume_after: int = 0,
    connect_timeout_s: float = 10.0,
    reconnect_timeout_s: float = 300.0,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    heartbeat_interval_s: float = 10.0,
    heartbeat_timeout_s: float = 30.0,
    tls_ca: str | PathLike[str] | None = None,
    shared_memory: bool = False,
    max_unacked_outcomes: int = 0,
    max_unacked_bytes: int = 0,
    observe_all: bool = False,
    observe_group: str = "",
    read_token: Callable[[], Awaitable[str]] | None = None,
    head: HeadFile | None = None,
) -> AsyncIterator[RolloutClient]:
    """Open a session on one node, or on the `head` of a fleet. See `prorl_trio.client.connect`, and `Transport`."""
    where = _where(url, endpoint_file) if head is None else head
    try:
        token = check_token(token, "the token given to the client")
    except ConfigError as exc:
        raise Unauthorized(str(exc)) from None
    may_be_secure = not isinstance(where, Address) or where.secure
    tls = await trio.to_thread.run_sync(_tls_context, tls_ca) if may_be_secure else None
    state = ClientState(session_id or uuid.uuid4().hex, resume_after)
    limits = LinkLimits(
        max_message_bytes=max_message_bytes,
        heartbeat_interval_s=heartbeat_interval_s,
        heartbeat_timeout_s=heartbeat_timeout_s,
    )
    patience = Patience(connect_timeout_s=connect_timeout_s, reconnect_timeout_s=reconnect_timeout_s)
    hello = SessionHello(
        version=SESSION_PROTOCOL_VERSION,
        token=token,
        session_id=state.session_id,
        batches=True,
        max_unacked_outcomes=max_unacked_outcomes,
        max_unacked_bytes=max_unacked_bytes,
        observe_all=observe_all,
        observe_group=observe_group,
    )
    transport = Transport(
        where, hello, state, limits, patience, tls=tls, shared_memory=shared_memory, read_token=read_token
    )
    with single_exception():
        async with trio.open_nursery() as nursery:
            client = RolloutClient(state, max_message_bytes, nursery)
            nursery.start_soon(transport.run)
            try:
                while state.welcome is None:
                    if state.failure is not None:
                        state.raise_failure()
                    await state.wait_changed()
                yield client
                client.acknowledge(client.cursor)
            finally:
                transport.close()
                client.stop_background()
                if client.weight_stores.used:
                    with trio.move_on_after(CLEAR_TIMEOUT_S, shield=True):
                        await trio.to_thread.run_sync(client.weight_stores.close)


def _where(url: str | None, endpoint_file: str | PathLike[str] | None) -> Address | EndpointFile:
    if url is not None and endpoint_file is None:
        return Address.parse(url)
    if url is None and endpoint_file is not None:
        return EndpointFile(endpoint_file)
    raise ValueError("connect needs the url of a node or its endpoint_file, one of the two")


def _pages(job_ids: Sequence[str]) -> list[list[str]]:
    """Return the ids in lists that fit into one frame each, or one empty list for no ids."""
    starts = range(0, max(1, len(job_ids)), MAX_FRAME_JOBS)
    return [list(job_ids[start : start + MAX_FRAME_JOBS]) for start in starts]


def _withdraw_jobs(job_ids: list[str], reason: str, ended: bool, request_id: int) -> WithdrawJobs:
    return WithdrawJobs(request_id, job_ids, reason, ended)


def _check_jobs(jobs: list[msgspec.Raw], request_id: int) -> CheckJobs:
    return CheckJobs(request_id=request_id, jobs=jobs)


def _tls_context(ca_file: str | PathLike[str] | None) -> ssl.SSLContext:
    try:
        return client_context(ca_file)
    except OSError as exc:  # SSLError is a subclass
        raise ConfigError(f"tls_ca: {ca_file} cannot be used: {exc}") from exc


def _retry_after_s(answer: Accepted | Rejected) -> float | None:
    """Return the delay in seconds after which to submit the job again; None: do not retry."""
    return answer.retry_after_s if isinstance(answer, Rejected) and answer.code == AdmissionRejected.code else None


def _encode_spec(spec: JobSpec, limit_bytes: int) -> tuple[Rejected | None, bytes]:
    try:
        encoded = msgspec.msgpack.encode(spec)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        found = unsendable(spec.instance.payload, "$.instance.payload")
        message, path = (
            (f"spec cannot be encoded: {exc}", "$")
            if found is None
            else (f"spec cannot be encoded: {found.problem}", found.path)
        )
    else:
        if len(encoded) <= limit_bytes:
            return None, encoded
        message, path = f"spec has {len(encoded)} bytes, more than the limit of {limit_bytes}", "$"
    return Rejected(request_id=0, index=0, job_id=spec.job_id, code="malformed", message=message, path=path), b""
