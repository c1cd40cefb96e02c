"""When the silence of a sandbox is excused: where its daemon could not run, by no doing of the rest of the sandbox."""

from __future__ import annotations

import subprocess
import sys

import pytest
import trio

from prorl_ipc.client import SILENCE_S
from prorl_trio.sandbox import silence as module
from prorl_trio.sandbox.client import DaemonSandbox
from prorl_trio.sandbox.silence import Silence

PID = 17


class Seen:
    """What /proc shows of a sandbox, which changes with each look: the daemon's state and CPU time, and the others'."""

    def __init__(self, monkeypatch, *, state, daemon=0, others=0.0, waits=0.0, wanted=0.0, runnable=0):
        self.state, self.daemon, self.others, self.waits, self.wanted = state, daemon, others, waits, wanted
        self.runnable = runnable
        self.waited_ns = self.wanted_ns = 0
        self.cpu_ns, self.others_s = 1_000_000, 5.0
        self.threads = set()
        monkeypatch.setattr(module, "_look", self.look)
        monkeypatch.setattr(
            module, "_use", lambda pid: module._Use(self.others_s, 0.0, {PID: self.wanted_ns}, self.runnable)
        )
        monkeypatch.setattr(module, "_waiting_for_disk", lambda pid: self.threads)
        monkeypatch.setattr(module, "run_blocking", self.run_here)

    async def run_here(self, function, *arguments):
        await trio.lowlevel.checkpoint()
        return function(*arguments)

    def look(self, pid, at_s):
        self.cpu_ns += self.daemon or 0
        self.others_s += self.others * SILENCE_S
        self.waited_ns += int(self.waits * SILENCE_S * 1e9)
        self.wanted_ns += int(self.wanted * SILENCE_S * 1e9)
        return module._Look(at_s, self.state, None if self.daemon is None else self.cpu_ns, self.waited_ns)


async def look_for(silence, seconds):
    for _ in range(int(seconds / SILENCE_S)):
        await trio.sleep(SILENCE_S)
        await silence.look()


@pytest.mark.parametrize(
    ("what", "seen", "excused"),
    [
        ("it runs", {"state": "S", "daemon": 1}, False),
        ("it is in a long system call, and runs now and then", {"state": "D", "daemon": 1}, False),
        ("it could run, and sleeps", {"state": "S"}, False),
        ("it is stopped", {"state": "T"}, True),
        ("it is stopped, and the rest runs", {"state": "T", "others": 2.0}, True),
        ("it waits for a disk, or is frozen", {"state": "D"}, True),
        ("it is frozen, and shown asleep", {"state": "F"}, True),
        ("it waits for a CPU that others have", {"state": "R", "others": 0.02, "wanted": 1.0}, True),
        ("it waits, and its own programs get a part", {"state": "R", "others": 0.6, "wanted": 4.0}, True),
        ("it waits for a CPU that its own sandbox has", {"state": "R", "others": 1.5, "wanted": 300.0}, False),
        ("it waits for memory that its own sandbox takes", {"state": "D", "others": 0.6}, False),
        (
            "it runs now and then, on a CPU that others have",
            {"state": "S", "daemon": 1, "waits": 1.0, "wanted": 1},
            True,
        ),
        (
            "it runs, on a CPU that its own sandbox has",
            {"state": "R", "daemon": 1, "waits": 1.0, "wanted": 300.0},
            False,
        ),
        ("it waits, beside few that can run", {"state": "R", "wanted": 1.0, "runnable": module.MAX_WANTED_CPUS}, True),
        (
            "it waits, beside many that have ended when it is looked at again",
            {"state": "S", "daemon": 1, "waits": 1.0, "wanted": 1.0, "runnable": module.MAX_WANTED_CPUS + 1},
            False,
        ),
        ("it hardly waits for a CPU", {"state": "S", "daemon": 1, "waits": 0.05}, False),
        ("it is gone", {"state": "", "daemon": None}, False),
        ("it has ended", {"state": "Z"}, False),
    ],
)
async def test_what_is_excused(what, seen, excused, monkeypatch, autojump_clock):
    Seen(monkeypatch, **seen)
    silence, uncounted = Silence(lambda: PID), []
    silence.on_standstill = uncounted.append
    await look_for(silence, 20.0)
    assert silence.total_s == sum(uncounted) == pytest.approx(19.5 if excused else 0.0), what
    assert await silence.stands_still() is excused


async def test_a_standstill_ends_when_the_daemon_runs(monkeypatch, autojump_clock):
    seen, silence = Seen(monkeypatch, state="T"), Silence(lambda: PID)
    await look_for(silence, 5.0)
    seen.state, seen.daemon = "S", 1
    await look_for(silence, 5.0)
    assert (silence.total_s, silence.is_too_long) == (4.5, False)
    assert not await silence.stands_still()


async def test_two_calls_that_wait_find_the_same_time_once(monkeypatch, autojump_clock):
    Seen(monkeypatch, state="D")
    silence = Silence(lambda: PID)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(look_for, silence, 10.0)
        await trio.sleep(0.1)
        nursery.start_soon(look_for, silence, 10.0)
    assert silence.total_s == pytest.approx(9.5, abs=SILENCE_S)


async def test_time_between_two_calls_is_nobodys(monkeypatch, autojump_clock):
    Seen(monkeypatch, state="T")
    silence = Silence(lambda: PID)
    await look_for(silence, 2.0)
    await trio.sleep(1000.0)
    await look_for(silence, 2.0)
    assert silence.total_s == pytest.approx(3.0)


async def test_a_thread_that_waits_for_a_disk_excuses_a_daemon_that_runs(monkeypatch, autojump_clock):
    seen, silence = Seen(monkeypatch, state="S", daemon=1), Silence(lambda: PID)
    seen.threads = {(18, 500)}
    assert await silence.stands_still()


class Rpc:
    """Never answers: it asks, as often as the real client, until the time of the call is over."""

    closed = False

    async def call(self, body, reply_type, *, timeout_s, on_chunk, on_silence):
        left_s = timeout_s
        while left_s > 0:
            await trio.sleep(SILENCE_S)
            left_s += await on_silence() - SILENCE_S
        return left_s


async def test_a_call_waits_as_long_as_its_sandbox_stands_still_and_not_for_good(monkeypatch, autojump_clock):
    seen, silence = Seen(monkeypatch, state="T"), Silence(lambda: PID)
    sandbox = DaemonSandbox("sbx", Rpc(), str, silence=silence)
    for state, lasts_s in (("T", module.MAX_STANDSTILL_S), ("S", 3.0)):
        seen.state, since_s = state, trio.current_time()
        await sandbox.call(None, None, 3.0)
        assert trio.current_time() - since_s == pytest.approx(lasts_s, abs=2 * SILENCE_S)


BUSY = """
import os, subprocess, threading
def spin():
    while True:
        pass
subprocess.run(["sh", "-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"])
for _ in range(3):
    threading.Thread(target=spin, daemon=True).start()
print(flush=True)
input()
os._exit(0)
"""


def test_the_use_of_cpus_counts_threads_and_programs_that_have_ended():
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=-1, stdout=-1, text=True) as process:
        process.stdout.readline()
        before = after = module._use(process.pid)
        while after.wanted_since(before, 0.0) < 0.3:
            after = module._use(process.pid)
        process.communicate("\n")
    assert (before.ended_s > 0, len(after.wanted_ns)) == (True, 4)
    assert after.others_s == after.ended_s, "the process itself is the daemon here"


PASSES_ON = """
import ctypes, os, signal, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # the orphans are this process's
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # and nobody waits for them
until_s = time.monotonic() + 60
for _ in range(12):
    if os.fork() == 0:
        while time.monotonic() < until_s:
            if os.fork():
                os._exit(0)
            for _ in range(20_000): pass
        os._exit(0)
print(flush=True)
input()
os.kill(0, signal.SIGKILL)
"""


def test_processes_that_end_at_once_and_that_nobody_waits_for_are_seen_to_want_cpus():
    with subprocess.Popen(
        [sys.executable, "-c", PASSES_ON], stdin=-1, stdout=-1, text=True, start_new_session=True
    ) as process:
        process.stdout.readline()
        seen = [module._use(process.pid) for _ in range(50)]
        process.communicate("\n")
    assert max(use.ended_s for use in seen) == 0.0, "the kernel says nothing of them"
    assert max(use.runnable for use in seen) >= 8


STOPS_ITS_CHILD = """
import os, signal, subprocess, threading, time
def start_programs():
    while True:
        subprocess.Popen(["true"])  # by vfork
thread = threading.Thread(target=start_programs, daemon=True)
thread.start()
task = f"/proc/self/task/{thread.native_id}"
def state(of):
    try:
        return open(f"{of}/stat").read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
def stuck():
    # Twice: a child that was just about to execute its program stops after that.
    seen = []
    for _ in range(2):
        children = [state(f"/proc/{child}") for child in open(f"{task}/children").read().split()]
        seen += [state(task), *(each for each in children if each != "Z")]
        time.sleep(0.05)
    return seen == ["D", "T", "D", "T"]
while not stuck():
    for child in open(f"{task}/children").read().split():
        try:
            os.kill(int(child), signal.SIGSTOP)
            time.sleep(0.01)
            if state(task) != "D":
                os.kill(int(child), signal.SIGCONT)
        except OSError:
            pass  # it was reaped
print(thread.native_id, flush=True)
input()
for child in open(f"{task}/children").read().split():
    os.kill(int(child), signal.SIGKILL)
os._exit(0)
"""


def test_a_thread_that_waits_for_a_stopped_child_waits_for_no_disk():
    with subprocess.Popen([sys.executable, "-c", STOPS_ITS_CHILD], stdin=-1, stdout=-1, text=True) as process:
        thread = int(process.stdout.readline())
        seen = module._look(thread, 0.0).state, module._waiting_for_disk(process.pid)
        process.communicate("\n")
    assert seen == ("D", set())
