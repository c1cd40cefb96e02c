"""Nothing is left of a node's sandboxes: killed, interrupted, or killed together with its reaper. Also not as root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
import trio

from prorl_trio.sandbox.providers.registry import PROVIDERS
from prorl_trio.sandbox.reaper import RECORD_NAME, descendants, is_alive, kill
from prorl_trio.sandbox.run_dir import open_run_dir
from prorl_trio.testing.sandbox_check import mounts_of_sandboxes
from support.processes import command_line
from support.skips import because

NODE = """
import sys
from pathlib import Path
import trio
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.registry import PROVIDERS

async def main():
    async with open_sandbox_host(PROVIDERS[sys.argv[1]](Path(sys.argv[2]))) as host, trio.open_nursery() as nursery:
        for _ in range(2):
            sandbox = await host.open(SandboxSpec())
            print((await sandbox.bash("id -u; (setsid sleep 3606 &) ; sleep 3607 &", timeout_s=20)).output.split()[0])
            nursery.start_soon(lambda sandbox=sandbox: sandbox.bash("sleep 3608", timeout_s=3600))
        print("UP", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""
GONE_WITHIN_S = 5.0


@pytest.fixture(params=list(PROVIDERS))
async def provider_name(request):
    report = await PROVIDERS[request.param]().probe()
    if not report.usable:
        pytest.skip(f"{request.param} cannot run here: {report.problem}. What to do: {report.remedy}")
    return request.param


async def _start_node(name, base, *, prefix=()):
    argv = [*prefix, sys.executable, "-c", NODE, name, str(base)]
    node = await trio.lowlevel.open_process(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    printed = b""
    while b"UP\n" not in printed:
        chunk = await node.stdout.receive_some()
        assert chunk, f"the node ended early: {printed!r}"
        printed += chunk
    return node, printed.split()


async def _wait_gone(processes, base):
    # Neither the end of a stranger's process nor that of a folder is an event we could wait for.
    with trio.fail_after(GONE_WITHIN_S):
        await trio.lowlevel.checkpoint()
        while any(map(is_alive, processes)) or list(base.iterdir()):
            await trio.sleep(0.02)


@pytest.mark.alone
async def test_kill_9_of_a_node(provider_name, tmp_path):
    mounts = mounts_of_sandboxes()
    with trio.fail_after(60):
        node, _ = await _start_node(provider_name, tmp_path)
        family = descendants(node.pid)
        assert len(family) >= 9  # reaper; twice a daemon, bash, and three sleeps
        node.kill()
        await node.wait()
        await _wait_gone(family, tmp_path)
    await node.stdout.aclose()
    assert mounts_of_sandboxes() == mounts


async def test_ctrl_c_of_a_node(provider_name, tmp_path):
    with trio.fail_after(60):
        node, _ = await _start_node(provider_name, tmp_path)
        family = descendants(node.pid)
        node.send_signal(signal.SIGINT)
        await node.wait()
        assert not any(map(is_alive, family))
        assert list(tmp_path.iterdir()) == []
    await node.stdout.aclose()


async def test_kill_9_of_a_node_and_its_reaper(provider_name, tmp_path):
    with trio.fail_after(60):
        node, _ = await _start_node(provider_name, tmp_path)
        family = descendants(node.pid)
        kill(process for process in family if b"reaper.py" in command_line(process.pid))
        node.kill()
        await node.wait()
        assert list(tmp_path.glob(f"*/*/{RECORD_NAME}"))
        async with open_run_dir(tmp_path):
            pass
        assert not any(map(is_alive, family))
        assert list(tmp_path.iterdir()) == []
    await node.stdout.aclose()


async def test_kill_9_while_starting(provider_name, tmp_path):
    with trio.fail_after(60):
        for delay_s in (0.5, 0.6, 0.7, 0.8):
            argv = [sys.executable, "-c", NODE, provider_name, str(tmp_path)]
            devnull = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            node = await trio.lowlevel.open_process(argv, **devnull)
            await trio.sleep(delay_s)
            family = descendants(node.pid)
            node.kill()
            await node.wait()
            await _wait_gone(family, tmp_path)


@pytest.mark.skipif(
    os.geteuid() != 0, reason=because("only root needs to pretend to be somebody else", "run the tests as root")
)
@pytest.mark.parametrize("provider_name", ["apptainer", "bubblewrap"], indirect=True)
async def test_as_a_normal_user(provider_name, tmp_path):
    """The user is one of a user namespace where root's files are theirs, so that the project's Python can be read."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip(because("there is no unshare program", "apt-get install util-linux"))
    with trio.fail_after(60):
        as_user = (unshare, "--user", "--map-user=1000", "--map-group=1000")
        node, printed = await _start_node(provider_name, tmp_path, prefix=as_user)
        assert printed[:2] == [b"1000", b"1000"]
        family = descendants(node.pid)
        node.kill()
        await node.wait()
        await _wait_gone(family, tmp_path)
    await node.stdout.aclose()
