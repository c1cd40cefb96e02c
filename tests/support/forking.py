"""Bubblewrap as a node has it after its first sandbox: each sandbox is forked."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from prorl_trio.sandbox.providers.bubblewrap import BubblewrapProvider

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.sandbox.fork_server import ForkServer
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
