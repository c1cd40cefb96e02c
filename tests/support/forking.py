"""Bubblewrap as a node has it after its first sandbox: each sandbox is forked."""

from __future__ import annotations

import contextlib
import os
import threading
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio

from prorl_trio.sandbox.fork_server import ForkServer
from prorl_trio.sandbox.providers.bubblewrap import BubblewrapProvider, find_bubblewrap
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.sandbox.sandbox import Sandbox

START_TIMEOUT_S = 60


@asynccontextmanager
async def open_forking(provider: BubblewrapProvider) -> AsyncIterator[ForkServer]:
    """Hold open what sandboxes of `provider` share, from when they are forked on."""
    async with provider.open_shared():
        provider.want_forks()
        with trio.fail_after(START_TIMEOUT_S):
            await provider.wait_fork_server()
        assert provider.fork_server is not None
        yield provider.fork_server


class ForkingProvider(BubblewrapProvider):
    """Opens each sandbox beside a fork server of its own, so that nobody has to hold one open."""

    @asynccontextmanager
    async def open_sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """Do what `SandboxProvider.open_sandbox` does; fail if a sandbox that could be forked was not."""
        shared = BubblewrapProvider(self._runtime_dir, packages=self._packages)
        async with open_forking(shared) as server:
            forked = server.forked_total
            async with shared.open_sandbox(spec) as sandbox:
                can_be = spec.image == "host" and not spec.layers and not spec.network
                assert server.forked_total == forked + can_be, "a sandbox was not started as it should be"
                yield sandbox


class LentForks:
    """One fork server for all tests of a process: what it imports takes a second of CPU each time.

    Whatever is in doubt about it ends the lending: from then on each host has a server of its own.
    """

    def __init__(self) -> None:
        self._own = BubblewrapProvider._keep_fork_server
        self._made_in = os.environ.get("PRORL_CACHE_DIR")
        self._server: ForkServer | None = None
        self._lent: tuple[object, ForkServer] | None = None
        self._ready = threading.Event()
        self._end: Callable[[], None] | None = None
        self._thread = threading.Thread(target=trio.run, args=(self._serve,), name="lent forks", daemon=True)

    def start(self) -> None:
        """Start the server. Returns when it can fork, or cannot be had here."""
        self._thread.start()
        self._ready.wait(START_TIMEOUT_S)

    def close(self) -> None:
        """End it."""
        if self._end is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._end()
        self._thread.join()

    async def _serve(self) -> None:
        ended = trio.Event()
        token = trio.lowlevel.current_trio_token()
        try:
            provider = BubblewrapProvider()
            if (await provider.probe()).usable:
                async with open_forking(provider) as self._server:
                    self._end = partial(token.run_sync_soon, ended.set)
                    self._ready.set()
                    await ended.wait()
        finally:
            self._ready.set()

    def _lend(self, provider: BubblewrapProvider) -> ForkServer | None:
        """Return the server as one of this run of trio; None if it is not what `provider` would start."""
        if self._server is None or provider._packages or provider._executable != find_bubblewrap():
            return None
        if os.environ.get("PRORL_CACHE_DIR") != self._made_in:
            return None
        if self._lent is not None and self._lent[1]._broken.is_set():
            self._server = None
            return None
        run = trio.lowlevel.current_trio_token()
        if self._lent is None or self._lent[0] is not run:
            mine = ForkServer(
                self._server._tree, self._server._control, limits_processes=self._server._limits_processes
            )
            self._lent = run, mine
        return self._lent[1]

    async def keep(self, provider: BubblewrapProvider) -> None:
        """Be `BubblewrapProvider._keep_fork_server`."""
        server = self._lend(provider)
        if server is None:
            await self._own(provider)
            return
        provider._fork_servers.append(server)
        provider._fork_server_changed.set()
        try:
            await server._broken.wait()
        finally:
            provider._fork_servers.remove(server)
        raise SandboxUnavailable("the lent fork server is in doubt")
