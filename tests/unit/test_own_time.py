"""The own time of a command: load makes it late and not slow; sleep, forks and hidden children gain it nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import trio

from prorl_daemon.exec import INTERVAL_S, OwnTime, Seen, _rank, look

NEAR = pytest.approx


class Machine:
    """A machine that gives a program so much CPU, and has it wait so long, in each second."""

    def __init__(self, *, cpu=0.0, waited=0.0, born=0, seen_born=None, threads=1):
        self.now_s = 100.0
        self.threads = threads
        self.rates = (cpu, waited, born, born if seen_born is None else seen_born)
        self.cpu_s = self.waited_s = 0.0
        self.tid = 10

    def look(self, members, above_tid):
        waits_s = dict.fromkeys(range(1000, 1000 + self.threads), self.waited_s / self.threads)
        return Seen(self.cpu_s, waits_s, self.tid, self.newest)

    def passes(self, clock, seconds):
        cpu, waited, born, self.newest = self.rates
        self.now_s += seconds
        self.cpu_s += cpu * seconds
        self.waited_s += waited * seconds
        self.tid += born
        clock.tick()

    def clock(self, limit_s, **how):
        self.newest = 0
        clock = OwnTime(lambda table: set(), look=self.look, now_s=lambda: self.now_s, **how)
        clock.begin(limit_s)
        self.passes(clock, INTERVAL_S)
        return clock


@pytest.mark.parametrize(
    ("what", "machine", "own_s"),
    [
        ("computes alone", {"cpu": 1.0}, 20.0),
        ("computes at a load of ten", {"cpu": 0.1, "waited": 0.9}, 2.0),
        ("sleeps", {}, 20.0),
        ("sleeps while the machine is busy", {"cpu": 0.01, "waited": 0.01}, 19.8),
        ("forks into four on two CPUs, alone", {"cpu": 2.0, "waited": 2.0}, 20.0),
        ("forks into a hundred at a load", {"cpu": 0.5, "waited": 99.5, "threads": 100}, 10.0),
        ("takes turns with three others at a load", {"cpu": 0.1, "waited": 0.9, "threads": 4}, 2.0),
        ("sleeps, while a hundred that it wakes at once wait", {"cpu": 0.02, "waited": 1.0, "threads": 100}, 18.4),
        ("hides its children from the looks", {"cpu": 0.01, "waited": 0.99, "born": 3, "seen_born": 0}, 20.0),
        ("starts children that live", {"cpu": 0.1, "waited": 0.9, "born": 1}, 2.0),
        ("on a kernel without such times", {"cpu": 0.1}, 20.0),
    ],
)
def test_own_time_is_what_passes_without_the_wait_for_a_cpu(what, machine, own_s):
    machine = Machine(**machine)
    clock = machine.clock(100.0)
    for _ in range(100):
        machine.passes(clock, 0.2)
    assert clock.own_s == NEAR(own_s + INTERVAL_S), what


@pytest.mark.parametrize(("cpu", "own_s"), [(0.0, 0.4), (0.5, 5.0), (2.0, 10.0)])
def test_what_the_looker_missed_counts_only_as_far_as_it_was_computed_in(cpu, own_s):
    """It was stopped with the program; or the program has kept it from running."""
    machine = Machine(cpu=cpu)
    clock, lost_s = machine.clock(100.0), 9.6
    clock._real_s = lambda: machine.now_s + lost_s * (machine.now_s > began_s)
    began_s = machine.now_s
    clock._real_since_s = began_s
    machine.cpu_s += cpu * lost_s
    machine.passes(clock, 0.4)
    assert clock.own_s == NEAR(own_s + INTERVAL_S)


def test_the_cpu_time_of_children_that_ended_is_kept():
    machine = Machine(cpu=1.0)
    clock = machine.clock(100.0)
    machine.passes(clock, 2.0)
    machine.cpu_s = 0.0
    machine.passes(clock, 2.0)
    machine.passes(clock, 2.0)
    assert clock.cpu_s == NEAR(4.0, abs=0.5)
    assert clock.own_s == NEAR(6.0 + INTERVAL_S)


@pytest.mark.parametrize(("waited", "ends"), [(0.0, 10.0), (0.5, 20.0), (0.9, 20.0), (0.1, 11.1)])
def test_a_lenient_clock_gives_what_was_waited_up_to_the_limit_again(waited, ends):
    machine = Machine(cpu=1.0 - waited, waited=waited)
    clock = machine.clock(10.0, is_lenient=True)
    strict = machine.clock(10.0)
    while not strict.is_over:
        machine.passes(clock, 0.1)
        strict.tick()
    assert strict.own_s == NEAR(10.0, abs=0.4)
    while not clock.is_over:
        machine.passes(clock, 0.1)
    assert clock.is_late
    assert clock.own_s == NEAR(ends, abs=0.4)


def test_the_clock_stands_still_between_an_answer_and_the_next_question():
    machine = Machine(cpu=1.0)
    clock = machine.clock(10.0)
    machine.passes(clock, 3.0)
    clock.stop()
    machine.now_s += 50.0
    clock.begin(0)
    machine.passes(clock, INTERVAL_S)
    assert clock.own_s == NEAR(3.0 + 2 * INTERVAL_S)
    clock.stop()
    clock.begin(5.0)
    assert clock.own_s == 0.0


def test_what_the_looker_itself_is_late_is_not_charged():
    machine = Machine()
    clock = machine.clock(10.0)
    machine.now_s += 30.0
    clock.stop()
    assert clock.own_s == NEAR(2 * INTERVAL_S)


async def test_a_clock_without_a_limit_never_ends_anything():
    clock = OwnTime(lambda table: set())
    clock.begin(0)
    clock.stop()
    assert not clock.is_over
    assert clock.own_s == 0.0
    with trio.move_on_after(0.01) as scope:
        await clock.serve()
    assert scope.cancelled_caught


CPUS = sorted(os.sched_getaffinity(0))
CHANGES = ["os.nice(1)", "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))"]
CHANGES += [f"os.sched_setaffinity(0, {{{CPUS[0]}}})"] if len(CPUS) > 1 else []


@pytest.mark.parametrize("change", CHANGES)
def test_who_lowers_its_own_rank_is_known(change):
    code = f"import os\nprint(1, flush=True)\ninput()\n{change}\nprint(2, flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        before = _rank(process.pid, process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"2\n"
        assert before == _rank(os.getpid(), 0) != _rank(process.pid, process.pid)
        process.communicate(b"\n")


def test_a_look_reads_the_kernels_times():
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        seen = look(lambda table: {e for e in table.children(os.getpid()) if e.pid == process.pid}, process.pid - 1)
        assert seen.cpu_s >= 0.25
        assert seen.waits_s[process.pid] >= 0.0
        assert seen.newest >= 1 or seen.last_tid < process.pid
        process.communicate(b"\n")
