"""Sandboxes that outlive the task that asked for them: opened in one stage, used in another, closed in a third."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio

from ipc.nursery import single_exception
from prorl_trio.errors import SandboxUnavailable
from prorl_trio.sandbox.provider import Sandbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from ipc.wire import BashResult, CellResult, ExecResult
    from prorl_trio.sandbox.provider import SandboxProvider, SandboxSpec

__all__ = ["HostedSandbox", "SandboxHost", "open_sandbox_host"]

logger = logging.getLogger(__name__)

MAX_START_ATTEMPTS: Final = 3
START_BACKOFF_S: Final = 0.25
"""Before the second attempt; doubled before each later one."""

CLOSE_TIMEOUT_S: Final = 20.0
"""Longest `aclose` waits. Above what a provider may take to end a sandbox."""

_TRANSIENT: Final = (
    "resource temporarily unavailable",
    "cannot allocate memory",
    "device or resource busy",
    "text file busy",
    "too many open files",
    "interrupted system call",
)
"""What a start says that failed because the machine was busy. Anything else would fail again."""


class HostedSandbox(Sandbox):
    """A live sandbox whose owner is a task of the host. Any task may use it; whoever is done with it calls `aclose`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox_id = sandbox.sandbox_id
        self._sandbox = sandbox
        self._closing = trio.Event()
        self._gone = trio.Event()

    def __repr__(self) -> str:
        state = "gone" if self._gone.is_set() else "closing" if self._closing.is_set() else "live"
        return f"<HostedSandbox {self.sandbox_id}: {state}>"

    async def bash(self, command: str, *, timeout_s: float, max_output_bytes: int = 64 * 1024) -> BashResult:
        return await self._sandbox.bash(command, timeout_s=timeout_s, max_output_bytes=max_output_bytes)

    async def ipython(self, code: str, *, timeout_s: float, max_output_bytes: int = 64 * 1024) -> CellResult:
        return await self._sandbox.ipython(code, timeout_s=timeout_s, max_output_bytes=max_output_bytes)

    async def restart_ipython(self) -> None:
        await self._sandbox.restart_ipython()

    async def read_file(self, path: str, *, max_bytes: int = 64 * 1024 * 1024) -> bytes:
        return await self._sandbox.read_file(path, max_bytes=max_bytes)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._sandbox.write_file(path, data, mode=mode)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        max_output_bytes: int = 1024 * 1024,
    ) -> ExecResult:
        return await self._sandbox.exec(
            argv, timeout_s=timeout_s, cwd=cwd, env=env, stdin=stdin, max_output_bytes=max_output_bytes
        )

    async def aclose(self) -> None:
        """End the sandbox and return when nothing of it is left. Idempotent; an action in flight raises `SandboxLost`.

        Runs to its end also when cancelled (bounded by the provider's clean-up); the cancellation is delivered after.
        """
        self._closing.set()
        with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await self._gone.wait()
        await trio.lowlevel.checkpoint_if_cancelled()


class SandboxHost:
    """Owner of sandboxes: one task each. Made by `open_sandbox_host`."""

    def __init__(self, provider: SandboxProvider, nursery: trio.Nursery, max_concurrent_starts: int) -> None:
        self._provider = provider
        self._nursery = nursery
        self._gate = trio.CapacityLimiter(max_concurrent_starts)
        self._live = 0
        self._starting = 0
        self._started_total = 0
        self._failed_total = 0

    def statistics(self) -> dict[str, int]:
        """`live` and `starting` now (`starting` includes those waiting for the gate), `*_total` since the beginning."""
        return {
            "live": self._live,
            "starting": self._starting,
            "started_total": self._started_total,
            "failed_total": self._failed_total,
        }

    async def open(self, spec: SandboxSpec) -> HostedSandbox:
        """Start a sandbox, waiting for the start gate first. It lives until `aclose`, or until the host ends.

        A start that failed because the machine was busy is tried again, a few times. Cancelled, nothing is left.

        Raises:
            SandboxUnavailable: see `SandboxProvider.open_sandbox`.
        """
        hosted: HostedSandbox = await self._nursery.start(self._own, spec, name="sandbox owner")
        return hosted

    async def _own(self, spec: SandboxSpec, *, task_status: trio.TaskStatus[HostedSandbox]) -> None:
        hosted: HostedSandbox | None = None
        try:
            async with AsyncExitStack() as stack:
                hosted = HostedSandbox(await self._start(spec, stack))
                self._live += 1
                task_status.started(hosted)
                await hosted._closing.wait()
        finally:
            if hosted is not None:
                self._live -= 1
                hosted._gone.set()

    async def _start(self, spec: SandboxSpec, stack: AsyncExitStack) -> Sandbox:
        self._starting += 1
        try:
            for attempt in range(1, MAX_START_ATTEMPTS + 1):
                try:
                    async with self._gate:
                        sandbox = await stack.enter_async_context(self._provider.open_sandbox(spec))
                except SandboxUnavailable as exc:
                    self._failed_total += 1
                    if attempt == MAX_START_ATTEMPTS or not _is_transient(exc):
                        raise
                    backoff_s = START_BACKOFF_S * 2 ** (attempt - 1)
                    logger.warning("attempt %d to start a sandbox failed, again in %g s: %s", attempt, backoff_s, exc)
                    await trio.sleep(backoff_s)
                else:
                    self._started_total += 1
                    return sandbox
            raise AssertionError("the last attempt returns or raises")
        finally:
            self._starting -= 1


def _is_transient(exc: SandboxUnavailable) -> bool:
    message = str(exc).lower()
    return any(phrase in message for phrase in _TRANSIENT)


@asynccontextmanager
async def open_sandbox_host(provider: SandboxProvider, *, max_concurrent_starts: int = 4) -> AsyncIterator[SandboxHost]:
    """A host for sandboxes of `provider`. On leaving the block all of them are ended, whatever they are doing.

    Raises:
        InternalError: something of a sandbox survived its end. Our bug.
    """
    with single_exception():
        async with provider.open_shared(), trio.open_nursery() as nursery:
            try:
                yield SandboxHost(provider, nursery, max_concurrent_starts)
            finally:
                nursery.cancel_scope.cancel("the sandbox host ends")
