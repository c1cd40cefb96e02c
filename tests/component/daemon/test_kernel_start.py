"""Kernels that do not start, or whose start is cancelled at any step: no descriptor and no folder is left."""

from __future__ import annotations

import os
import sys
import tempfile
from types import SimpleNamespace

import pytest
import trio

from prorl_daemon.children import ChildReaper
from prorl_daemon.keeper import StartFailed
from prorl_daemon.kernels import open_kernel
from prorl_ipc.limits import SandboxLimits
from support.cancel_sweep import cancel_sweep

NOWHERE = "/nowhere/python"


@pytest.fixture
def left(tmp_path, monkeypatch):
    """Descriptors of this process, and what lies in its temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda: (os.listdir(tmp_path), sorted(os.listdir("/proc/self/fd"))[:-1])


async def sweep(open_it, left):
    async def start():
        with pytest.raises(StartFailed, match=f"{NOWHERE} could not be started"):
            async with open_it():
                pass

    async def check(run):
        await trio.lowlevel.checkpoint()
        assert left() == before

    with trio.fail_after(60):
        await start()
        before = left()
        with trio.CancelScope() as scope:  # before its first step, which the sweep does not reach
            scope.cancel()
            await start()
        assert scope.cancelled_caught
        assert left() == before
        assert await cancel_sweep(start, check) > 2


async def test_our_own(left, monkeypatch):
    reaper, limiter = ChildReaper(SandboxLimits(), isolated=False), trio.CapacityLimiter(1)
    monkeypatch.setattr(sys, "executable", NOWHERE)
    await sweep(lambda: open_kernel(reaper, env={}, cwd="/", runtime_env={}, limiter=limiter), left)


async def test_jupyters(left):
    jupyter_kernel = pytest.importorskip("prorl_daemon.jupyter_kernel")
    reaper, limiter = ChildReaper(SandboxLimits(), isolated=False), trio.CapacityLimiter(1)
    spec = SimpleNamespace(name="k", argv=[NOWHERE], env={}, resource_dir="", interrupt_mode="signal")

    def open_it():
        return jupyter_kernel.open_jupyter_kernel(spec, reaper, env={}, cwd="/", runtime_env={}, limiter=limiter)

    await sweep(open_it, left)
