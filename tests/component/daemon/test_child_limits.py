"""The limits of what the daemon starts: a program that starts others at once cannot be ahead of them."""

from __future__ import annotations

import os
import resource

import pytest
import trio

from prorl_daemon.bash_protocol import Bash
from prorl_daemon.children import ChildReaper
from prorl_daemon.limits import BACKSTOP_CPU_S, BACKSTOP_FACTOR
from prorl_daemon.shell import open_shell
from prorl_ipc.limits import SandboxLimits

LIMITS = SandboxLimits(memory_bytes=512 << 20, max_processes=5000, cpu_s=1000)
BORN_WITH = {
    resource.RLIMIT_DATA: LIMITS.memory_bytes,
    resource.RLIMIT_CPU: LIMITS.cpu_s + BACKSTOP_CPU_S,
    resource.RLIMIT_NPROC: BACKSTOP_FACTOR * LIMITS.max_processes,
}


@pytest.fixture
def born(monkeypatch):
    """The limits that processes had before the daemon could have set any of them."""
    found = []

    def adopt(self, pid, adopt=ChildReaper.adopt):
        found.append({what: resource.prlimit(pid, what) for what in BORN_WITH})
        return adopt(self, pid)

    monkeypatch.setattr(ChildReaper, "adopt", adopt)
    return found


def expected():
    """Each limit, or the one of this machine that is lower still; nobody can raise it."""
    limits = {}
    for what, limit in BORN_WITH.items():
        hard = resource.getrlimit(what)[1]
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        limits[what] = (least, least)
    return limits


async def test_a_program_is_born_with_them(born):
    reaper, null = ChildReaper(LIMITS, isolated=True), os.open(os.devnull, os.O_RDWR)
    try:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                await nursery.start(reaper.serve)
                child = await reaper.start(
                    ["/bin/sleep", "0.2"], (null, null, null), env={}, limiter=trio.CapacityLimiter(1)
                )
                assert await child.wait() == 0
                nursery.cancel_scope.cancel()
    finally:
        os.close(null)
    assert born == [expected()]


async def test_a_shell_is_born_with_them(born):
    reaper = ChildReaper(LIMITS, isolated=True)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(reaper.serve)
            async with open_shell(
                reaper, Bash, executable="/bin/bash", env={}, cwd="/", limiter=trio.CapacityLimiter(1)
            ) as shell:
                pass
            await shell.child.wait()
            nursery.cancel_scope.cancel()
    assert born == [expected()]
