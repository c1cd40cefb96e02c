"""The blocking client, for trainers without trio. Its methods can be called from any thread."""

from __future__ import annotations

import os
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar

import trio
from outcome import Error, capture

from prorl_ipc.clock import RunningClock
from prorl_ipc.nursery import only_cancelled, single_exception
from prorl_trio.client.backend_calls import BlockingBackendCalls
from prorl_trio.client.client import RolloutClient
from prorl_trio.client.connection import connect
from prorl_trio.client.errors import ConnectionLost
from prorl_trio.client.policy_update import PolicyUpdate
from prorl_trio.types.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from prorl_trio.client.agents import OpenedAgent
    from prorl_trio.types.backends import AnswerT, NodeRequest, PauseMode
    from prorl_trio.types.models import JobSpec, Outcome
    from prorl_trio.weights.check import WeightCheck
    from prorl_trio.weights.safetensors import StateDict


JOIN_TIMEOUT_S: Final = 10.0
"""Maximum seconds that `close` waits for the client's thread. Closing the connection takes less."""
R = TypeVar("R")
P = ParamSpec("P")

T = TypeVar("T")


class _Abandoned(Exception):
    """Raised inside a block that must be left as if by an exception."""


class HostedBlock(Generic[T]):
    """A block that runs in its own task. It holds no reference to the client whose loop it runs in.

    Attributes:
        value: the block's value; it is set once the block is entered.
        error: the exception that ended the block after it was entered, if any.
    """

    value: T

    def __init__(self, block: AbstractAsyncContextManager[T]) -> None:
        self.error: Exception | None = None
        self._block = block
        self._abandoned = False
        self._leave = trio.Event()
        self._left = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Stay in the block until `leave` is called. Raise an exception from entering the block; store a later one."""
        entered = False
        try:
            async with self._block as self.value:
                entered = True
                task_status.started()
                await self._leave.wait()
                if self._abandoned:
                    raise _Abandoned
        except _Abandoned:
            pass
        except Exception as exc:
            if not entered:
                raise
            self.error = exc
        finally:
            self._left.set()

    async def leave(self, *, abandon: bool) -> None:
        """Leave the block, as if by an exception if `abandon`, and wait until it is left.

        Further calls do nothing.
        """
        self._abandoned = self._abandoned or abandon
        self._leave.set()
        await self._left.wait()


def _blocking(
    afn: Callable[Concatenate[RolloutClient, P], Awaitable[T]],
) -> Callable[Concatenate[BlockingClient, P], T]:
    """Return a blocking method for `BlockingClient` that runs `afn` of `RolloutClient`; it keeps `afn`'s docstring."""

    @wraps(afn)
    def method(client: BlockingClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._call(partial(afn, client._client, *args, **kwargs))

    return method


def _blocking_step(
    afn: Callable[Concatenate[PolicyUpdate, P], Awaitable[T]],
) -> Callable[Concatenate[BlockingPolicyUpdate, P], T]:
    """Return a blocking method for `BlockingPolicyUpdate` that runs `afn`; it keeps `afn`'s docstring."""

    @wraps(afn)
    def method(update: BlockingPolicyUpdate, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return update._client._call(partial(afn, update._update, *args, **kwargs))

    return method


class BlockingClient(BlockingBackendCalls):
    """A session on one node, behind blocking calls.

        with BlockingClient("ws://127.0.0.1:8700", token) as client:
            client.submit(specs)
            for outcome in client.results():
                ...

    A private trio loop runs in a daemon thread. Heartbeats and reconnects therefore continue while the trainer
    computes, and the trainer's own event loop is not touched. A method that is called inside an event loop blocks that
    loop until it returns. All methods may be called from any thread, and raise the exceptions of the same method of
    `RolloutClient`. A call that Ctrl-C interrupts is withdrawn without loss.

    A client that is never closed ends with its last reference or with the interpreter, which it does not keep from
    exiting. In that case the outcome that `results` returned last is not acknowledged.

    Args:
        url: see `connect`.
        token: see `connect`.
        session_id: see `connect`.
        **options: the other keyword arguments of `connect`. With `fleet`, the session is on the head of a fleet.

    Raises:
        ServiceError: as `connect`. The constructor blocks until the client is connected.
    """

    def __init__(self, url: str | None = None, token: str = "", session_id: str | None = None, **options: Any) -> None:
        self._loop = _Loop(lambda: connect(url, token, session_id=session_id, **options))
        self._finalizer = weakref.finalize(self, self._loop.stop)
        self._pid = os.getpid()
        self._turn = threading.Lock()
        try:
            self._client = self._loop.start()
        except BaseException:
            self._finalizer()
            raise
        self._cursor = self._client.cursor
        self.session_id = self._client.session_id
        """Pass it to the constructor to resume this session, also from another process."""

    @property
    def cursor(self) -> int:
        """Return the cursor of the outcome that `results` returned last.

        Save it with a checkpoint, and pass it as `resume_after` when resuming the session.
        """
        return self._cursor

    submit = _blocking(RolloutClient.submit)

    def results(
        self, count: int | None = None, *, timeout_s: float | None = None, follow: bool = False
    ) -> BlockingResults:
        """Return an iterator over the outcomes. See `RolloutClient.results` for `count` and `follow`.

        Several threads may iterate at once; each outcome goes to one of these threads. If the next outcome takes longer
        than `timeout_s`, the iterator raises TimeoutError. No outcome is lost, and iteration may continue.
        """
        return BlockingResults(self, count, timeout_s, follow=follow)

    cancel = _blocking(RolloutClient.cancel)
    status = _blocking(RolloutClient.status)

    def operate(self, request: NodeRequest[AnswerT]) -> AnswerT:
        """Have the node carry out a request on its pool of LLM backends. See `RolloutClient.operate`."""
        answer: AnswerT = self._call(self._client.operate, request)
        return answer

    @contextmanager
    def open_agent(self, spec: JobSpec) -> Iterator[OpenedAgent]:
        """Act as a job's agent in the block. See `RolloutClient.open_agent`.

        with client.open_agent(spec) as agent:
            answers = openai.OpenAI(base_url=agent.urls["openai"], api_key=agent.key)
        """
        hosted = self.host(lambda client: client.open_agent(spec))
        try:
            yield hosted.value
        except BaseException:
            hosted.leave(abandon=True)
            raise
        hosted.leave(abandon=False)

    def policy_update(
        self,
        version: str,
        *,
        mode: PauseMode = "wait",
        timeout_s: float = 600.0,
        max_idle_s: float | None = None,
    ) -> BlockingPolicyUpdate:
        """Return a block in which the backends are paused; see `RolloutClient.policy_update`.

            with client.policy_update("2") as update:
                update.load_folder("/checkpoints/2")

        If the block raises an exception, or Ctrl-C interrupts it, every engine stays at the old version.
        """
        return BlockingPolicyUpdate(
            self,
            PolicyUpdate([self._client], version, mode=mode, timeout_s=timeout_s, max_idle_s=max_idle_s),
        )

    def host(self, open_block: Callable[[RolloutClient], AbstractAsyncContextManager[T]]) -> Hosted[T]:
        """Enter an async block over this client in its loop.

        Stay in it until `Hosted.leave`, or until the client is closed.

        This is meant for background work. Raises the exceptions that entering the block raises.
        """
        block = HostedBlock(open_block(self._client))
        self._call(self._loop.start_hosted, block)
        return Hosted(self, block)

    def close(self) -> None:
        """Acknowledge the outcomes that `results` returned, close the connection and wait for the client's thread.

        Calls in progress raise ConnectionLost. Jobs continue. Closing the client again, or in a forked process, has no
        effect.

        Raises:
            InternalError: the thread did not end within `JOIN_TIMEOUT_S`.
        """
        self._close(acknowledge=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an exception the last returned outcome may be unused: the session's next client receives it again.
        self._close(acknowledge=exc_type is None)

    def _close(self, *, acknowledge: bool) -> None:
        if os.getpid() != self._pid:
            self._finalizer.detach()
            return
        if not self._finalizer.alive:
            return
        if acknowledge:
            with suppress(ConnectionLost):
                self._acknowledge()
        self._finalizer()
        self._loop.join()

    def _next(self, timeout_s: float | None, *, follow: bool) -> Outcome | None:
        """Return the next outcome and advance the cursor.

        Return None if nothing is outstanding and all is acknowledged.

        Blocks until an outcome arrives. One thread at a time waits for the node; other threads wait for their turn.

        Raises:
            TimeoutError: neither the turn nor an outcome came within `timeout_s`.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._turn.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            raise TimeoutError(f"no result within {timeout_s:g} s: another thread waited before")
        try:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            # The cursor moves on this side once the outcome has arrived, so an interrupted call returns the same
            # outcome again.
            arrived = self._call(partial(_next_within, follow=follow), self._client, self._cursor, left_s)
            if arrived is None:
                return None
            self._cursor, outcome = arrived
            return outcome
        finally:
            self._turn.release()

    def _acknowledge(self) -> None:
        self._check_process()
        self._loop.call_sync(self._client.acknowledge, self._cursor)

    def _call(self, afn: Callable[..., Awaitable[T]], *args: object) -> T:
        self._check_process()
        return self._loop.call(afn, *args)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConnectionLost("this client belongs to the process that made it, not to a fork; make one here")


class BlockingPolicyUpdate:
    """A block in which the backends are paused. See `BlockingClient.policy_update`."""

    def __init__(self, client: BlockingClient, update: PolicyUpdate) -> None:
        self._client = client
        self._update = update

    load_folder = _blocking_step(PolicyUpdate.load_folder)

    def load_state_dict(
        self,
        state: StateDict,
        folder: str | os.PathLike[str] | None = None,
        *,
        base: str | os.PathLike[str] | None = None,
        check: WeightCheck = "values",
    ) -> None:
        """Write tensors, have every engine load them, and wait for that. See `PolicyUpdate.load_state_dict`.

        The tensors are read in the caller's thread, because they may need its CUDA device and process group.
        """
        staged = self._client._call(partial(self._update.stage, folder, base=base, check=check))
        staged.write(state)
        self._client._call(self._update.load_staged, staged)

    load_adapter = _blocking_step(PolicyUpdate.load_adapter)
    load_checkpoint = _blocking_step(PolicyUpdate.load_checkpoint)

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Open a block in which the trainer moves the weights to the engines itself. See `PolicyUpdate.transfer`."""
        self._client._call(self._update.begin_transfer)
        yield
        self._client._call(self._update.end_transfer)

    def __enter__(self) -> Self:
        self._step(self._update.begin)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._step(self._update.finish if exc_type is None else self._update.undo)

    def _step(self, afn: Callable[[], Awaitable[None]]) -> None:
        try:
            self._client._call(afn)
        except BaseException:  # a Ctrl-C has withdrawn the step, or came after it
            self._client._call(self._update.undo)
            raise


class BlockingResults:
    """An iterator over outcomes. See `BlockingClient.results`."""

    def __init__(self, client: BlockingClient, count: int | None, timeout_s: float | None, *, follow: bool) -> None:
        self._client = client
        self._left = count
        self._timeout_s = timeout_s
        self._follow = follow

    def __iter__(self) -> BlockingResults:
        return self

    def __next__(self) -> Outcome:
        if self._left == 0:
            self._client._acknowledge()
            raise StopIteration
        outcome = self._client._next(self._timeout_s, follow=self._follow)
        if outcome is None:
            self._left = 0  # an exhausted iterator stays exhausted
            raise StopIteration
        if self._left is not None:
            self._left -= 1
        return outcome


class Hosted(Generic[T]):
    """An async block that is entered in the loop of a blocking client. Made by `BlockingClient.host`."""

    def __init__(self, client: BlockingClient, block: HostedBlock[T]) -> None:
        self._client = client
        self._block = block

    @property
    def value(self) -> T:
        """Return the value of the entered block."""
        return self._block.value

    def call(self, afn: Callable[..., Awaitable[R]], *args: object) -> R:
        """Run `afn(*args)` in the loop and return its result. If an error has ended the block, raise that error.

        Raises:
            ConnectionLost: the client or the block has ended.
        """
        try:
            return self._client._call(afn, *args)
        except ConnectionLost:
            self._raise_error()
            raise

    def leave(self, *, abandon: bool) -> None:
        """Leave the block, as if by an exception if `abandon`, and wait until it is left.

        Further calls do nothing.

        Raises the exception that leaving raises, or the exception that had ended the block.
        """
        with suppress(ConnectionLost):  # the client is closed, and the block with it
            self._client._call(partial(self._block.leave, abandon=abandon))
        self._raise_error()

    def _raise_error(self) -> None:
        if self._block.error is not None:
            raise self._block.error.with_traceback(None) from None


class _Loop:
    """A trio loop in a daemon thread, with one client in it. Holds no reference to the `BlockingClient`."""

    def __init__(self, open_client: Callable[[], AbstractAsyncContextManager[RolloutClient]]) -> None:
        self._open_client = open_client
        self._token: Future[trio.lowlevel.TrioToken] = Future()
        self._client: Future[RolloutClient] = Future()
        self._scope = trio.CancelScope()
        self._calls: dict[trio.CancelScope, trio.Event] = {}  # calls in progress; the event is set at a call's end
        self._thread = threading.Thread(target=self._run, name="prorl-trio client", daemon=True)

    def start(self) -> RolloutClient:
        """Start the thread and return the client once it is connected. Raises what `connect` raises."""
        self._thread.start()
        return self._client.result()

    def stop(self) -> None:
        """Ask the loop to end, and return at once. It may be called at any time, from any thread, and repeatedly."""
        self._token.add_done_callback(lambda token: _run_soon(token.result(), self._scope.cancel))

    def join(self) -> None:
        """Wait until the thread has ended. This takes no longer than a client needs to close its connection.

        Raises:
            InternalError: the thread still runs after `JOIN_TIMEOUT_S`.
        """
        self._thread.join(JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            raise InternalError(f"the client's thread did not end within {JOIN_TIMEOUT_S:g} s")

    def call(self, afn: Callable[..., Awaitable[T]], *args: object) -> T:
        """Run `afn(*args)` in the loop and block until it ends. Return its result, or raise its exception.

        A KeyboardInterrupt in this thread cancels it in the loop. No later call begins before the cancelled call has
        ended.

        Raises:
            ConnectionLost: the loop has ended, or ends during the call.
        """
        token, scope = self._token.result(), trio.CancelScope()

        async def withdrawable() -> T:
            ended = self._calls[scope] = trio.Event()
            try:
                with scope:
                    await self._wait_for_withdrawn_calls()
                    return await afn(*args)
                raise ConnectionLost("the call was withdrawn")
            finally:
                del self._calls[scope]
                ended.set()

        ended = capture(lambda: trio.from_thread.run(withdrawable, trio_token=token))
        if isinstance(ended, Error):
            # This may be a KeyboardInterrupt in this thread: then nothing waits for the call any more.
            _run_soon(token, scope.cancel)
            if isinstance(ended.error, trio.RunFinishedError) or only_cancelled(ended.error):
                raise ConnectionLost("the client is closed")
        return ended.unwrap()

    async def _wait_for_withdrawn_calls(self) -> None:
        await trio.lowlevel.checkpoint()  # do not start a call that is already withdrawn
        for scope, ended in list(self._calls.items()):
            if scope.cancel_called:
                await ended.wait()

    async def start_hosted(self, block: HostedBlock[Any]) -> None:
        """Have a task of the loop enter a block, and return when it is entered.

        Raises the exceptions that entering raises.
        """
        await self._hosts.start(block.run)

    def call_sync(self, fn: Callable[..., T], *args: object) -> T:
        """Run `fn(*args)` in the loop, block until it is done, and return its result.

        Raises:
            ConnectionLost: the loop has ended.
        """
        try:
            return trio.from_thread.run_sync(fn, *args, trio_token=self._token.result())
        except trio.RunFinishedError:
            raise ConnectionLost("the client is closed") from None

    def _run(self) -> None:
        def run() -> None:
            trio.run(self._main, clock=RunningClock())

        ended = capture(run)
        if isinstance(ended, Error) and not self._client.done():
            self._client.set_exception(ended.error)  # `start` raises it.
        else:
            ended.unwrap()

    async def _main(self) -> None:
        self._token.set_result(trio.lowlevel.current_trio_token())
        with self._scope, single_exception():
            async with self._open_client() as client, trio.open_nursery() as self._hosts:
                self._client.set_result(client)
                await trio.sleep_forever()
        if not self._client.done():
            self._client.set_exception(ConnectionLost("the client was closed before it was connected"))


def _run_soon(token: trio.lowlevel.TrioToken, fn: Callable[[], object]) -> None:
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(fn)


async def _next_within(
    client: RolloutClient, cursor: int, timeout_s: float | None, *, follow: bool
) -> tuple[int, Outcome] | None:
    arrived = client.peek_after(cursor)
    if arrived is not None:
        return arrived
    if not follow and not client.outstanding:
        return None
    ask = client.next_after if follow else client.next_outstanding
    if timeout_s is None:
        return await ask(cursor)
    with trio.move_on_after(timeout_s):
        return await ask(cursor)
    raise TimeoutError(f"no result within {timeout_s:g} s")
