"""The process tree of a local server ends with its block, and with its launcher, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import trio

from prorl_launch import supervised
from prorl_launch.paths import checkout_dir
from prorl_launch.supervised import open_supervised
from prorl_trio.types.errors import InternalError

TIMEOUT_S = 30
GRACE_S = 0.3

DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(60)
"""
TREE = (
    """
import os, subprocess, sys, time
# A child in its group, and a grandchild in a session of its own whose parent has gone; both deaf to SIGTERM.
deaf = """
    + repr(DEAF)
    + """
subprocess.Popen([sys.executable, "-c", deaf])
if os.fork() == 0:
    os.setsid()
    subprocess.Popen([sys.executable, "-c", deaf])
    os._exit(0)
print(os.environ["TMPDIR"], flush=True)
time.sleep(60)
"""
)
LAUNCHER = """
import pathlib, sys, trio
from prorl_launch.supervised import open_supervised
async def main():
    command = [sys.executable, "-c", sys.argv[2]]
    async with open_supervised(command, env={}, log_file=pathlib.Path(sys.argv[1]), grace_s=0.3):
        await trio.sleep_forever()
trio.run(main)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


async def wait_gone(pids: list[int], *paths: str) -> None:
    while any(is_alive(pid) for pid in pids) or any(Path(path).exists() for path in paths):
        await trio.sleep(0.02)


async def wait_tree(log_file: Path) -> tuple[str, list[int]]:
    """The temporary folder, and the pids of both deaf processes, once `TREE` has printed them."""
    while True:
        lines = log_file.read_text().split() if log_file.exists() else []
        if len(lines) == 3:
            pids = [int(line) for line in lines if line.isdigit()]
            return next(line for line in lines if not line.isdigit()), pids
        await trio.sleep(0.02)


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "log"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def test_leaving_the_block_ends_the_whole_tree(log_file):
    with trio.fail_after(TIMEOUT_S):
        async with open_supervised(python(TREE), env={}, log_file=log_file, grace_s=GRACE_S) as server:
            folder, pids = await wait_tree(log_file)
            assert Path(folder).is_dir()
            assert os.getsid(server.pid) == server.pid
        assert not any(is_alive(pid) for pid in [server.pid, *pids])
        assert not Path(folder).exists()


@pytest.mark.parametrize("how", ["error", "cancel"])
async def test_an_error_and_a_cancellation_do_too(log_file, how):
    pids: list[int] = []
    with trio.fail_after(TIMEOUT_S):
        expected = pytest.raises(ZeroDivisionError) if how == "error" else nullcontext()
        with trio.CancelScope() as scope, expected:
            async with open_supervised(python(TREE), env={}, log_file=log_file, grace_s=GRACE_S):
                _, pids = await wait_tree(log_file)
                if how == "error":
                    raise ZeroDivisionError
                scope.cancel()
                await trio.sleep_forever()
        assert len(pids) == 2
        assert not any(is_alive(pid) for pid in pids)


async def test_kill_9_of_the_launcher_does_too(log_file):
    with trio.fail_after(TIMEOUT_S):
        launcher = await trio.lowlevel.open_process(
            [sys.executable, "-c", LAUNCHER, str(log_file), TREE], cwd=checkout_dir()
        )
        try:
            folder, pids = await wait_tree(log_file)
        finally:
            launcher.kill()
            with trio.move_on_after(5, shield=True):
                await launcher.wait()
        with trio.fail_after(5):
            await wait_gone(pids, folder)


def children(pid: int) -> list[int]:
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


@pytest.mark.parametrize("victim", ["keeper", "guard"])
async def test_a_killed_supervisor_is_made_up_for(log_file, victim):
    with trio.fail_after(TIMEOUT_S):
        async with open_supervised(python(TREE), env={}, log_file=log_file, grace_s=GRACE_S) as server:
            folder, pids = await wait_tree(log_file)
            keeper = server._supervisor.pid
            (guard,) = children(keeper)
            os.kill({"keeper": keeper, "guard": guard}[victim], signal.SIGKILL)
            await wait_gone([server.pid, *pids, keeper, guard], folder)
            assert await server.wait() in (-signal.SIGKILL, 128 + signal.SIGKILL)


async def test_both_halves_of_the_supervisor_killed_at_once(log_file):
    """Here both deaf ones stay in the command's session: what left that, and both halves too, is beyond reach."""
    code = TREE.replace("os.setsid()", "")
    with trio.fail_after(TIMEOUT_S):
        async with open_supervised(python(code), env={}, log_file=log_file, grace_s=GRACE_S) as server:
            folder, pids = await wait_tree(log_file)
            keeper = server._supervisor.pid
            os.kill(keeper, signal.SIGSTOP)
            (guard,) = children(keeper)
            for pid in (guard, keeper):
                os.kill(pid, signal.SIGKILL)
        assert not any(is_alive(pid) for pid in [server.pid, *pids, guard])
        assert not Path(folder).exists()


async def test_kill_9_of_the_launcher_and_of_the_guard(log_file):
    with trio.fail_after(TIMEOUT_S):
        launcher = await trio.lowlevel.open_process(
            [sys.executable, "-c", LAUNCHER, str(log_file), TREE], cwd=checkout_dir()
        )
        try:
            folder, pids = await wait_tree(log_file)
            (keeper,) = children(launcher.pid)
            (guard,) = children(keeper)
        finally:
            launcher.kill()
            with trio.move_on_after(5, shield=True):
                await launcher.wait()
        os.kill(guard, signal.SIGKILL)
        with trio.fail_after(5):
            await wait_gone([*pids, guard, keeper], folder)


@pytest.mark.parametrize(
    ("code", "exit_code"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
async def test_the_exit_code_is_the_commands(log_file, code, exit_code):
    with trio.fail_after(TIMEOUT_S):
        async with open_supervised(python(code), env={}, log_file=log_file, grace_s=GRACE_S) as server:
            assert await server.wait() == exit_code


async def test_what_is_left_when_the_command_ends_is_ended(log_file):
    with trio.fail_after(TIMEOUT_S):
        code = TREE.replace("time.sleep(60)\n", "")
        async with open_supervised(python(code), env={}, log_file=log_file, grace_s=GRACE_S) as server:
            assert await server.wait() == 0
            left = [int(line) for line in log_file.read_text().split() if line.isdigit()]
            assert not any(is_alive(pid) for pid in left)


async def test_a_command_that_does_not_exist(log_file):
    with trio.fail_after(TIMEOUT_S):
        async with open_supervised(["/no/such/program"], env={}, log_file=log_file, grace_s=GRACE_S) as server:
            assert server.pid == 0
            assert await server.wait() == 1
    assert "No such file" in log_file.read_text()


async def test_a_log_that_cannot_be_written_starts_nothing(tmp_path):
    with trio.fail_after(TIMEOUT_S), pytest.raises(FileNotFoundError):
        async with open_supervised(python(""), env={}, log_file=tmp_path / "none" / "log", grace_s=GRACE_S):
            pytest.fail("started")


async def test_a_hanging_supervisor_is_an_error(log_file, monkeypatch, tmp_path):
    stub = tmp_path / "stub.py"
    stub.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(supervised.supervisor, "__file__", str(stub))
    monkeypatch.setattr(supervised, "_START_TIMEOUT_S", 0.2)
    monkeypatch.setattr(supervised, "_STOP_MARGIN_S", 0.2)
    with trio.fail_after(TIMEOUT_S), pytest.raises(InternalError, match="has not started its command"):
        async with open_supervised(python(""), env={}, log_file=log_file, grace_s=GRACE_S):
            pytest.fail("started")
    listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert str(stub) not in listed
