"""The session that a cell belongs to: our own IPython's, or that of a Jupyter kernel."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from prorl_daemon.ipython import IpythonSession
from prorl_daemon.kernel import open_kernel
from prorl_daemon.kernelspec import find_kernelspec
from prorl_daemon.threads import run_blocking
from prorl_ipc.server import CallError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prorl_daemon.children import Child, ChildReaper
    from prorl_daemon.kernel_ends import KernelEnds
    from prorl_ipc.sandbox_calls import CellResult, IpythonRestart, IpythonRun

MAX_JUPYTER_KERNELS = 4
"""Different ones of one sandbox, each a process of its own."""


class KernelSessions:
    """The sessions of cells by the name of their kernel; the empty name is our own IPython child.

    Each is independent of the others: its cells wait for each other only. All live in `serve`.

    Args:
        env: what the cells and what they start see.
        cwd: where each new kernel starts.
        runtime_env: what this daemon's Python needs to start.
        prestarted: the first of our own IPython children, if it was started already.
    """

    def __init__(
        self,
        reaper: ChildReaper,
        *,
        env: dict[str, str],
        cwd: str,
        runtime_env: dict[str, str],
        limiter: trio.CapacityLimiter,
        prestarted: tuple[Child, KernelEnds] | None = None,
    ) -> None:
        self._start: dict[str, Any] = {"env": env, "cwd": cwd, "runtime_env": runtime_env, "limiter": limiter}
        self._reaper = reaper
        self._limiter = limiter
        own = {**self._start, "env": {"MPLBACKEND": "Agg", **env}}
        self._own = IpythonSession(partial(open_kernel, reaper, **own, prestarted=[prestarted] if prestarted else []))
        self._jupyter: dict[str, IpythonSession] = {}
        self._nursery: trio.Nursery | None = None

    async def serve(self, *, prestart: bool, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start kernels when they are first asked for (our own at once if `prestart`), until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await self._own.serve(prestart=prestart)

    async def run(self, request: IpythonRun, send_output: Callable[[str, bytes], Awaitable[None]]) -> CellResult:
        """Run one cell, as `IpythonSession.run`. Raises besides: CallError `no_kernel`, there is none of that name."""
        session = self._own if not request.kernel else await self._session(request.kernel)
        return await session.run(request, send_output)

    async def restart(self, request: IpythonRestart) -> int:
        """Start a kernel anew, as `IpythonSession.restart`. Errors as `run`."""
        session = self._own if not request.kernel else await self._session(request.kernel)
        return await session.restart()

    async def _session(self, name: str) -> IpythonSession:
        if name not in self._jupyter:
            try:
                spec = await run_blocking(partial(find_kernelspec, name), limiter=self._limiter)
            except BlockingIOError as exc:
                raise CallError("no_ipython", f"{name}: {exc.strerror}") from exc
            await self._open_session(name, spec)
        return self._jupyter[name]

    async def _open_session(self, name: str, spec: Any) -> None:
        if name in self._jupyter:  # another call was faster
            return
        if len(self._jupyter) == MAX_JUPYTER_KERNELS:
            running = ", ".join(sorted(self._jupyter))
            raise CallError(
                "no_kernel", f"{MAX_JUPYTER_KERNELS} Jupyter kernels are the limit here; there are {running}"
            )
        from prorl_daemon.jupyter_kernel import open_jupyter_kernel

        session = self._jupyter[name] = IpythonSession(partial(open_jupyter_kernel, spec, self._reaper, **self._start))
        assert self._nursery is not None
        self._nursery.start_soon(session.serve)
