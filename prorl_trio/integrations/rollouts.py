"""Rollouts on a node, awaited in asyncio: one session for all coroutines of a process.

The client runs in a trio loop in its own thread. Rollouts are passed to this thread and their outcomes passed
back; a rollout needs no thread. Nothing is kept after the process, because its waiting coroutines have ended with it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn

import trio
from outcome import capture

from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.session import Rejected
from prorl_trio.client.errors import ConnectionLost, SessionLost
from prorl_trio.types.errors import ConfigError, Draining, ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.client.client import RolloutClient
    from prorl_trio.integrations.node_address import NodeAddress
    from prorl_trio.types.models import JobSpec, Outcome

CANCEL_GRACE_S: Final = 10.0
"""Maximum seconds that a cancelled rollout waits until its job has left the node."""
ADMISSION_PATIENCE_S: Final = 86_400.0
"""Maximum seconds that rollouts wait for a full node. Their trainer has already decided to run them."""
DRAIN_RETRY_S: Final = 1.0
"""Pause in seconds before resubmitting to a node that is draining for a restart."""
JOIN_TIMEOUT_S: Final = 10.0


class JobRefused(ServiceError):
    """The node refused a job for a permanent reason, given by `code`."""

    def __init__(self, answer: Rejected) -> None:
        where = f" ({answer.path})" if answer.path else ""
        super().__init__(f"the node refuses job {answer.job_id!r}{where}: {answer.code}: {answer.message}")
        self.refusal = answer.code


class _Waiting:
    """A rollout that a coroutine awaits, in that coroutine's loop."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Outcome] = self._loop.create_future()
        self._left: asyncio.Future[None] = self._loop.create_future()

    async def wait(self) -> Outcome:
        return await self._outcome

    async def wait_left(self) -> None:
        """Wait until the rollout's job has left the node, or until the grace period is over."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._left, CANCEL_GRACE_S)

    # From any thread:

    def deliver(self, outcome: Outcome) -> None:
        self._soon(self._outcome, lambda: self._outcome.set_result(outcome))

    def fail(self, error: BaseException) -> None:
        self._soon(self._outcome, lambda: self._outcome.set_exception(error))
        self.left()

    def left(self) -> None:
        self._soon(self._left, lambda: self._left.set_result(None))

    def _soon(self, future: asyncio.Future[Any], settle: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nothing waits in it
            self._loop.call_soon_threadsafe(lambda: None if future.done() else settle())


class Rollouts:
    """Rollouts on one node, for every asyncio loop of this process.

    A lost connection is reopened. If the node has forgotten the session, as a node without an on-disk ledger does when
    it is killed, the awaited rollouts are submitted again. Each rollout raises an error that ends the session for good.

    Args:
        node: the node to connect to; the connection is opened with the first rollout.
    """

    def __init__(self, node: NodeAddress) -> None:
        self._node = node
        self._waiting: dict[str, _Waiting] = {}
        self._unsent: list[str] = []
        self._withdrawn: dict[str, _Waiting] = {}
        self._changed = trio.Event()
        self._scope = trio.CancelScope()
        self._token: Future[trio.lowlevel.TrioToken] | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._over: BaseException | None = None

    @property
    def over(self) -> bool:
        """Return True if the session has ended for good and can run no further rollouts."""
        return self._over is not None

    async def run(self, spec: JobSpec) -> Outcome:
        """Run a rollout and return its outcome, whatever it is.

        A cancel cancels the job, and returns when the job has left the node, or after `CANCEL_GRACE_S`.

        Raises:
            JobRefused: the node does not accept it.
            ServiceError: the session is over.
            ConfigError: the node's token cannot be read.
        """
        waiting = _Waiting(spec)
        self._post(self._begin, waiting)
        try:
            return await waiting.wait()
        except asyncio.CancelledError:
            self._post(self._withdraw, waiting)
            await waiting.wait_left()  # noqa: ASYNC102 - asyncio's; bounded by the grace
            raise

    def close(self) -> None:
        """Close the session. Awaited rollouts raise ConnectionLost; their jobs continue."""
        if self._thread is None or self._token is None:
            return
        with suppress(trio.RunFinishedError):
            self._token.result().run_sync_soon(self._scope.cancel)
        self._thread.join(JOIN_TIMEOUT_S)

    # ------------------------------------------------------------ any thread

    def _post(self, fn: Callable[[_Waiting], None], waiting: _Waiting) -> None:
        token = self._start()
        try:
            token.run_sync_soon(fn, waiting)
        except trio.RunFinishedError:
            waiting.fail(self._error())

    def _start(self) -> trio.lowlevel.TrioToken:
        with self._starting:
            if self._token is None:
                self._token = Future()
                self._thread = threading.Thread(target=self._run, name="prorl-trio rollouts", daemon=True)
                self._thread.start()
        return self._token.result()

    # ------------------------------------------------------------ the thread's trio loop

    def _run(self) -> None:
        capture(trio.run, self._main)  # `_over` has its exception
        for waiting in [*self._waiting.values(), *self._withdrawn.values()]:
            waiting.fail(self._error())

    async def _main(self) -> None:
        assert self._token is not None
        self._token.set_result(trio.lowlevel.current_trio_token())
        try:
            with self._scope:
                while True:
                    try:
                        await self._serve_session()
                    except SessionLost:
                        self._unsent = list(self._waiting)
                    await trio.lowlevel.checkpoint()
            self._over = ConnectionLost("the session was closed")
        except BaseException as exc:
            self._over = exc
            raise

    async def _serve_session(self) -> NoReturn:
        async with self._node.connect() as client, open_single_nursery() as nursery:
            nursery.start_soon(self._submit, client)
            nursery.start_soon(self._cancel, client)
            async for outcome in client.results(follow=True):
                if waiting := self._waiting.pop(outcome.job_id, None):
                    waiting.deliver(outcome)
        raise AssertionError("results that follow do not end")

    async def _submit(self, client: RolloutClient) -> NoReturn:
        while True:
            while not self._unsent:
                await self._changed.wait()
            specs = [self._waiting[job_id].spec for job_id in self._unsent if job_id in self._waiting]
            self._unsent.clear()
            answers = await client.submit(specs, patience_s=ADMISSION_PATIENCE_S)
            refused = [answer for answer in answers if isinstance(answer, Rejected)]
            for answer in refused:
                waiting = self._waiting.get(specs[answer.index].job_id)
                if waiting is None:
                    continue
                if answer.code == Draining.code:
                    self._unsent.append(waiting.spec.job_id)
                else:
                    del self._waiting[waiting.spec.job_id]
                    waiting.fail(JobRefused(answer))
            if self._unsent and refused:
                await trio.sleep(DRAIN_RETRY_S)

    async def _cancel(self, client: RolloutClient) -> NoReturn:
        while True:
            while not self._withdrawn:
                await self._changed.wait()
            withdrawn, self._withdrawn = self._withdrawn, {}
            # The job may be on its way to a node that has no room for it yet.
            await client.cancel(list(withdrawn), "its trainer waits for it no more", ahead=True)
            for waiting in withdrawn.values():
                waiting.left()

    def _begin(self, waiting: _Waiting) -> None:
        self._waiting[waiting.spec.job_id] = waiting
        self._unsent.append(waiting.spec.job_id)
        self._wake()

    def _withdraw(self, waiting: _Waiting) -> None:
        job_id = waiting.spec.job_id
        if self._waiting.pop(job_id, None) is None or job_id in self._unsent:  # it has ended, or never began
            waiting.left()
            return
        self._withdrawn[job_id] = waiting
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _error(self) -> BaseException:
        """Return a separate exception for each waiter, because each adds a traceback."""
        kind = ConfigError if isinstance(self._over, ConfigError) else ConnectionLost
        return kind(str(self._over))


_open: dict[tuple[int, NodeAddress], Rollouts] = {}
_opening = threading.Lock()


def rollouts_on(node: NodeAddress) -> Rollouts:
    """Return this process's rollouts on `node`. The object is shared until its session is over."""
    with _opening:
        key = (os.getpid(), node)
        found = _open.get(key)
        if found is None or found.over:
            found = _open[key] = Rollouts(node)
        return found


def close_all() -> None:
    """Close every session of this process. Their jobs continue."""
    with _opening:
        sessions, here = dict(_open), os.getpid()
        _open.clear()
    for (pid, _), rollouts in sessions.items():
        if pid == here:
            rollouts.close()
