"""What a killed engine leaves in /dev/shm is removed, that and nothing else."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from prorl_launch.abandoned import sweep
from prorl_launch.paths import checkout_dir, import_path
from prorl_launch.shared_memory import FOLDER, SharedMemory, unlink_unused
from prorl_launch.supervised import open_supervised
from prorl_launch.supervisor import EXIT_SURVIVORS

pytestmark = pytest.mark.alone

TIMEOUT_S = 30
GRACE_S = 0.3

ENGINE = """
import os, signal, sys, time
from multiprocessing import get_context, resource_tracker, shared_memory

# As vLLM does it, in two processes; the tracker that would clean up is killed with them in reality.
resource_tracker.register = lambda *_: None
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = shared_memory.SharedMemory(create=True, size=100_000)
semaphore = get_context("spawn").Semaphore()
names = [memory.name, "sem." + semaphore._semlock.name.lstrip("/")]
if os.fork() == 0:
    os.setsid()
    mine = shared_memory.SharedMemory(create=True, size=200_000)
    names.append(mine.name)
    print(*names, flush=True)
    time.sleep(60)
time.sleep(60)
"""
LAUNCHER = """
import pathlib, sys, trio
from prorl_launch.supervised import open_supervised
async def main():
    command = [sys.executable, "-c", sys.argv[2]]
    async with open_supervised(command, env={}, log_file=pathlib.Path(sys.argv[1]), grace_s=0.3):
        await trio.sleep_forever()
trio.run(main)
"""

SUPERVISOR = """
import os, sys
from prorl_launch import supervisor
below, kill, slow = supervisor._descendants, os.kill, int(sys.argv[1])
supervisor._descendants = lambda root: below(root) + [slow] * os.path.exists(f"/proc/{slow}")
os.kill = lambda pid, number: None if pid == slow else kill(pid, number)
sys.exit(supervisor.main(0.1, ["sh", "-c", f"read line <{sys.argv[2]}"]))
"""
"""A supervisor of whose tree one process, `slow`, takes longer to end than it waits."""
SLOW = """
import sys
sys.stdin.readline()
memory = open(sys.argv[1], "x")
print("made", flush=True)
sys.stdin.read()
"""


def only_child(pid):
    (child,) = (int(word) for file in Path(f"/proc/{pid}/task").glob("*/children") for word in file.read_text().split())
    return child


def python(code):
    return [sys.executable, "-c", code]


async def wait_files(log_file):
    """The three files of `ENGINE`, once they are all there."""
    while True:
        names = log_file.read_text().split() if log_file.exists() else []
        if len(names) == 3:
            paths = [Path(FOLDER, name) for name in names]
            assert all(path.exists() for path in paths)
            return paths
        await trio.sleep(0.02)


async def wait_removed(paths):
    while any(path.exists() for path in paths):
        await trio.sleep(0.02)


@pytest.fixture
def make():
    """Makes a file there and returns it open. (Python's own way would leave a process that tracks it.)"""
    files = []

    def make_one():
        files.append(Path(FOLDER, f"prorl-test-{secrets.token_hex(8)}").open("xb"))  # noqa: SIM115
        return files[-1]

    yield make_one
    for file in files:
        file.close()
        Path(file.name).unlink(missing_ok=True)


async def test_leaving_the_block_removes_it_and_nothing_else(tmp_path, make):
    with trio.fail_after(TIMEOUT_S):
        async with open_supervised(python(ENGINE), env={}, log_file=tmp_path / "log", grace_s=GRACE_S):
            paths = await wait_files(tmp_path / "log")
            other = make()
            other.close()
        assert not any(path.exists() for path in paths)
        assert Path(other.name).exists()


@pytest.mark.parametrize("victim", ["launcher", "guard", "keeper", "engine"])
async def test_kill_9_does_too(tmp_path, victim, make):
    with trio.fail_after(TIMEOUT_S):
        launcher = await trio.lowlevel.open_process(
            [sys.executable, "-c", LAUNCHER, str(tmp_path / "log"), ENGINE], cwd=checkout_dir()
        )
        try:
            paths = await wait_files(tmp_path / "log")
            other = make()
            other.close()
            if victim != "launcher":
                pid = launcher.pid
                for _ in range(["keeper", "guard", "engine"].index(victim) + 1):
                    pid = only_child(pid)
                os.kill(pid, signal.SIGKILL)
                await wait_removed(paths)
        finally:
            launcher.kill()
            with trio.move_on_after(5, shield=True):
                await launcher.wait()
        await wait_removed(paths)
    assert Path(other.name).exists()


async def test_the_whole_engine_killed_from_outside(tmp_path):
    """Nobody is left at whom one could look: the supervisor has to have looked before."""
    with trio.fail_after(TIMEOUT_S):
        async with open_supervised(python(ENGINE), env={}, log_file=tmp_path / "log", grace_s=GRACE_S) as server:
            paths = await wait_files(tmp_path / "log")
            child = only_child(server.pid)
            await trio.sleep(1.5)  # the time in which it does look: that it has done so shows nowhere
            for pid in (server.pid, child):
                os.kill(pid, signal.SIGKILL)
            assert await server.wait() == 128 + signal.SIGKILL
            assert not any(path.exists() for path in paths)


async def test_what_another_process_still_has_stays(tmp_path):
    with trio.fail_after(TIMEOUT_S):
        async with open_supervised(python(ENGINE), env={}, log_file=tmp_path / "log", grace_s=GRACE_S):
            paths = await wait_files(tmp_path / "log")
            with paths[0].open("rb") as held:
                holder = subprocess.Popen(["sleep", "60"], stdin=held, stdout=subprocess.DEVNULL)
        try:
            assert [path.exists() for path in paths] == [True, False, False]
        finally:
            holder.kill()
            holder.wait()
            paths[0].unlink()


def test_what_was_there_before_is_not_the_trees(make):
    before = make()
    files = SharedMemory()
    later = make()
    files.look([os.getpid()])
    status = os.fstat(later.fileno())
    assert files._made == {(status.st_dev, status.st_ino)}
    files.unlink()
    assert Path(later.name).exists()  # this process still has it
    later.close()
    before.close()
    files.unlink()
    assert not Path(later.name).exists()
    assert Path(before.name).exists()
    assert files.fd is not None
    os.close(files.fd)


def test_without_inotify_a_look_is_enough(make, monkeypatch):
    monkeypatch.setattr("prorl_launch.shared_memory._watch", lambda _folder: None)
    files = SharedMemory()
    later = make()
    files.look([os.getpid()])
    later.close()
    files.unlink()
    assert not Path(later.name).exists()


@pytest.fixture
def memory():
    path = Path(FOLDER, f"prorl-test-{secrets.token_hex(8)}")
    yield path
    path.unlink(missing_ok=True)


def test_what_takes_long_to_end_keeps_its_memory_until_a_sweep_that_comes_after(tmp_path, memory):
    place, fifo = tmp_path / "place", tmp_path / "go"
    place.mkdir()
    os.mkfifo(fifo)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = {**os.environ, "TMPDIR": str(place), "PYTHONPATH": import_path()}
    with subprocess.Popen([*python(SLOW), str(memory)], **pipes) as slow:
        supervisor = subprocess.Popen([*python(SUPERVISOR), str(slow.pid), str(fifo)], env=env, **pipes)
        supervisor.stdout.readline()
        slow.stdin.write("go\n")
        slow.stdin.flush()
        slow.stdout.readline()
        fifo.write_text("go\n")
        supervisor.communicate(timeout=TIMEOUT_S)
        assert supervisor.returncode == EXIT_SURVIVORS
        sweep(unlink_unused, str(place))
        assert memory.exists()
        assert len(list(place.iterdir())) == 1
    sweep(unlink_unused, str(place))
    assert not memory.exists()
    assert list(place.iterdir()) == []
