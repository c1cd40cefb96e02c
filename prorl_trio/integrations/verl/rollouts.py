"""Rollouts on a node, awaited in asyncio: one session for all coroutines of a process.

The client lives in a trio loop in a thread of its own. A rollout is handed over there and its outcome handed back; no
thread is taken per rollout. Nothing is kept beyond the process: whoever awaited a rollout there has gone with it.
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
    from prorl_trio.integrations.verl.node_address import NodeAddress
    from prorl_trio.types.models import JobSpec, Outcome

CANCEL_GRACE_S: Final = 10.0
"""Longest that a cancelled rollout waits until nothing of its job is left on the node."""
ADMISSION_PATIENCE_S: Final = 86_400.0
"""Longest that rollouts wait for room on a full node: its trainer has decided already that they are to be done."""
DRAIN_RETRY_S: Final = 1.0
"""Pause between two tries to submit to a node that is about to end, and to be started again, one hopes."""
JOIN_TIMEOUT_S: Final = 10.0


class JobRefused(ServiceError):
    """The node did not take a job, for a reason that another try would not change. `code` says which."""

    def __init__(self, answer: Rejected) -> None:
        where = f" ({answer.path})" if answer.path else ""
        super().__init__(f"the node refuses job {answer.job_id!r}{where}: {answer.code}: {answer.message}")
        self.refusal = answer.code


class _Waiting:
    """A rollout that a coroutine waits for, in that coroutine's loop."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Outcome] = self._loop.create_future()
        self._left: asyncio.Future[None] = self._loop.create_future()

    async def wait(self) -> Outcome:
        return await self._outcome

    async def wait_left(self) -> None:
        """Return when nothing of it is left on the node, or after the grace."""
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
        with suppress(RuntimeError):  # the loop is closed, and nobody waits there any more
            self._loop.call_soon_threadsafe(lambda: None if future.done() else settle())


class Rollouts:
    """Rollouts on one node, for every asyncio loop of this process.

    A connection that is lost is made again; where the node has forgotten the session, as one without a ledger on a
    disk does when it is killed, the rollouts that are waited for are submitted again. An error that ends the session
    for good is raised by each of them.

    Args:
        node: where to connect; nothing is connected before the first rollout.
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
        """Return True if the session has ended for good, so that no further rollout can be had of it."""
        return self._over is not None

    async def run(self, spec: JobSpec) -> Outcome:
        """Do a rollout and return its outcome, whatever that is.

        A cancel cancels the job, and returns when nothing of it is left on the node, or after `CANCEL_GRACE_S`.

        Raises:
            JobRefused: the node does not take it.
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
        """End the session. Rollouts that are waited for raise ConnectionLost; their jobs go on."""
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
            # One may be on its way to a node that has no room for it yet.
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
        """Return an exception of its own for each that is told: each of them gets a traceback."""
        kind = ConfigError if isinstance(self._over, ConfigError) else ConnectionLost
        return kind(str(self._over))


_open: dict[tuple[int, NodeAddress], Rollouts] = {}
_opening = threading.Lock()


def rollouts_on(node: NodeAddress) -> Rollouts:
    """Return this process's rollouts on `node`: the same ones each time, new ones after a session that is over."""
    with _opening:
        key = (os.getpid(), node)
        found = _open.get(key)
        if found is None or found.over:
            found = _open[key] = Rollouts(node)
        return found


def close_all() -> None:
    """End every session of this process. Their jobs go on."""
    with _opening:
        sessions, here = dict(_open), os.getpid()
        _open.clear()
    for (pid, _), rollouts in sessions.items():
        if pid == here:
            rollouts.close()
