"""What the watchdog reads of processes' files and mappings, and that no error of its own ends the daemon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import trio

from prorl_daemon import run, watchdog
from prorl_daemon.holdings import measure_holdings
from prorl_daemon.watchdog import Watchdog
from prorl_ipc.limits import SandboxLimits
from prorl_ipc.sandbox_calls import OWN_ERROR_EXIT

MIB = 1024 * 1024
HOLD = """
import ctypes, fcntl, mmap, os, select, socket, sys, threading
listener, there = socket.socketpair()
epoll = select.epoll()
events = [os.eventfd(0) for _ in range(20)]
for event in events:
    epoll.register(event, select.EPOLLIN)
locked = open(sys.argv[1], "w+")
for at in range(7):
    fcntl.lockf(locked, fcntl.LOCK_EX, 1, 2 * at)
for _ in range(3):
    socket.send_fds(there, [b"x"], [0] * 5)
pipes = [os.pipe() for _ in range(4)]
done = threading.Event()
def with_own_files():
    if sys.argv[2] == "own":
        assert ctypes.CDLL(None).unshare(0x400) == 0
        more = [os.eventfd(0) for _ in range(100)]
        for event in more:
            epoll.register(event, select.EPOLLIN)
    done.set()
    threading.Event().wait()
threading.Thread(target=with_own_files, daemon=True).start()
done.wait()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hold(tmp_path):
    processes = []

    def start(files):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path / f"locked-{files}"), files],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        processes.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process.pid

    yield start
    for process in processes:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def measured(*pids, most=10_000, memory_bytes=2**40):
    return measure_holdings(pids, most=most, memory_bytes=memory_bytes, own_network=False, mappings={})


def test_each_kind_is_counted_once_for_a_table_of_files(hold):
    shared, own = measured(hold("shared")), measured(hold("own"))
    assert (shared.watches, shared.locks, shared.in_flight) == (20, 7, 15)
    assert 30 <= shared.files < 60
    assert own.files >= 2 * shared.files + 100 - 10
    assert own.watches == 2 * 120  # what two tables have is counted twice: it may be two
    (kernel_bytes,) = shared.kernel_bytes.values()
    assert 4 * 8192 < kernel_bytes < MIB


def test_counting_stops_above_what_is_too_much(hold):
    pid = hold("shared")
    assert measured(pid, most=10).files > 10
    assert measured(pid, most=60).watches == 20


def test_mappings_are_counted_where_they_may_be_many(hold):
    pid = hold("shared")
    few, many = measured(pid).kernel_bytes[pid], measured(pid, memory_bytes=1).kernel_bytes[pid]
    assert many - few >= 50 * 256


def test_a_process_that_has_ended_holds_nothing():
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert measured(process.pid).files == 0


def fill(end):
    try:
        return end.send(bytes(4096))
    except BlockingIOError:
        return 0


def test_the_kernel_says_what_buffers_take():
    ends = socket.socketpair()
    with ends[0], ends[1]:
        ends[0].setblocking(False)
        for _ in iter(lambda: fill(ends[0]), 0):
            pass
        mine = [socket.socketpair() for _ in range(10)]
        try:
            found = measured(os.getpid())
        finally:
            for pair in mine:
                for end in pair:
                    end.close()
    assert found.kernel_bytes[os.getpid()] > 100_000


def made(limits=None):
    return Watchdog(limits or SandboxLimits(), writable=(), isolated=True, limiter=trio.CapacityLimiter(2))


async def test_ending_everything_where_nobody_is_left_is_no_error(monkeypatch):
    async def no_wait(_):
        await trio.lowlevel.checkpoint()

    def nobody(pid, number):
        assert (pid, number) == (-1, 9)
        raise ProcessLookupError

    dog = made()
    monkeypatch.setattr(watchdog.os, "kill", nobody)
    monkeypatch.setattr(watchdog, "wait_until_gone", no_wait)
    await dog._end_all("disk", "it is full")
    assert dog._found.breach == "disk"


async def test_a_look_that_fails_is_said_once_and_followed_by_another(monkeypatch, capsys):
    dog, looks = made(), []

    async def look():
        looks.append(1)
        await trio.lowlevel.checkpoint()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(watchdog, "IDLE_INTERVAL_S", 0.0)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dog._repeat, look, 0.0)
            while True:
                await trio.sleep(0.01)
                if len(looks) >= 3:
                    break
            nursery.cancel_scope.cancel()
    assert capsys.readouterr().err.count("[Errno 24]") == 1


def test_an_error_of_the_daemons_own_has_an_exit_code_of_its_own(monkeypatch, capsys):
    def fail(*_args, **_fields):
        raise ExceptionGroup("a task failed", [OSError(28, "No space left on device")])

    for name in ("drop_privileges", "start_maker", "confine", "limit_self", "hide_self", "hold_proc"):
        monkeypatch.setattr(run, name, lambda *_args, **_fields: None)
    monkeypatch.setattr(run.trio, "run", fail)
    monkeypatch.setattr(run.gc, "freeze", lambda: None)
    start = type("Start", (), {"token": "t", "listen_fd": 0, "cwd": "", "fakeroot": False, "isolated": False})
    start.limits, start.prestart_ipython = SandboxLimits(), False
    monkeypatch.setattr(run, "read_start_line", lambda *_args, **_fields: start)
    assert run.run_daemon() == OWN_ERROR_EXIT
    assert "No space left" in capsys.readouterr().err
