"""The own time of a command: the time that has passed, less the time in which its processes waited for a CPU.

A busy machine makes a program late, and must not make it too slow. Every interval counts as `min(real, max(cpu, wall -
waited))`. There `real` is the time that has passed, and `wall` what this process's clock shows of it: that one stands
while the process does not run (`prorl_ipc.clock`). So a program that was stopped with it is charged for nothing, and
one that keeps it from running for what it computes. `cpu` is the CPU time of all processes of the sandbox in that
interval, also of those that have detached themselves, and `waited` the time in which the command's threads could have
run and had no CPU (/proc/PID/task/TID/schedstat). So a program that sleeps is charged for its sleep, and one that
computes for what it computes, in however many processes.

An interval counts in full where the evidence has gaps: processes were born and had ended before they were looked at
(the PID namespace's last number says so), or the kernel keeps no such times. The wait of a thread does not count that
has brought it upon itself: one with another priority, policy or set of CPUs than this process was started with. Nor do
the waits of more than `WAITERS` threads add up: many that are woken at once wait for each other, for far longer
together than they compute.
"""

from __future__ import annotations

import heapq
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import trio

from prorl_daemon.processes import read_process_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_daemon.processes import ProcessEntry, ProcessTable

INTERVAL_S = 0.2
"""Between two looks. A look takes some 20 us for each process of the sandbox."""

WAITERS = 8
"""Threads whose waits of an interval are added, those that waited longest."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Seen(NamedTuple):
    """The processes at one moment.

    `cpu_s` is of those alive, without this one, and of the children that they have waited for; `waits_s` is of the
    command's threads, by number, since they began. `last_tid` is the last number that the PID namespace gave to a
    thread, and `newest` are the numbers above the last look's that are in use.
    """

    cpu_s: float
    waits_s: dict[int, float]
    last_tid: int
    newest: int


class OwnTime:
    """A clock of a command's own time. It runs from `begin` to `stop`; `serve` keeps it.

    Args:
        members: picks the command's processes.
        is_lenient: a command that waited for a CPU may use up to twice its limit, for a CPU that is shared is slower.
            The caller sees from `own_s` that this was needed.
        look: how the processes are seen.
        now_s: the clock of this process.
        real_s: the clock of the time that passes, whether or not this process runs.
    """

    def __init__(
        self,
        members: Callable[[ProcessTable], set[ProcessEntry]],
        *,
        is_lenient: bool = False,
        look: Callable[[Callable[[ProcessTable], set[ProcessEntry]], int], Seen] | None = None,
        now_s: Callable[[], float] = trio.current_time,
        real_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = members
        self._is_lenient = is_lenient
        self._look = look or globals()["look"]
        self._now_s = now_s
        self._real_s = real_s
        self._limit_s = 0.0
        self._since_s: float | None = None
        self._real_since_s = 0.0
        self._seen: Seen | None = None
        self._changed = trio.Event()
        self.own_s = 0.0
        self.cpu_s = 0.0
        self.waited_s = 0.0

    def begin(self, limit_s: float) -> None:
        """Let the clock run: from zero with a new limit, or on, if `limit_s` is 0. Without any limit it never runs."""
        if limit_s:
            self._limit_s, self.own_s, self.cpu_s, self.waited_s = limit_s, 0.0, 0.0, 0.0
        if self._limit_s and self._since_s is None:
            self._since_s, self._real_since_s, self._seen = self._now_s(), self._real_s(), None
            self._changed.set()

    def stop(self) -> None:
        """Stop the clock. What has passed since the last look counts, an interval at most: more is the looker's."""
        if self._since_s is not None:
            self.own_s += min(INTERVAL_S, self._now_s() - self._since_s)
            self._since_s = None

    @property
    def is_late(self) -> bool:
        """Return whether the limit is exceeded, with or without leniency."""
        return self.own_s > self._limit_s

    @property
    def is_over(self) -> bool:
        """Return whether the command has to be ended."""
        grace_s = min(self._limit_s, self.waited_s) if self._is_lenient else 0.0
        return self.own_s > self._limit_s + grace_s

    async def serve(self) -> None:
        """Return when the limit is exceeded."""
        while True:
            while self._since_s is None:
                self._changed = trio.Event()
                await self._changed.wait()
            await trio.sleep(max(0.01, min(INTERVAL_S, self._limit_s - self.own_s)))
            if self._since_s is not None:
                self.tick()
                if self.is_over:
                    return

    def tick(self) -> None:
        """Look, and count what has passed since the last look."""
        assert self._since_s is not None
        before, self._seen = self._seen, self._look(self._members, self._seen.last_tid if self._seen else 0)
        now_s, real_now_s = self._now_s(), self._real_s()
        wall_s, self._since_s = now_s - self._since_s, now_s
        real_s, self._real_since_s = max(wall_s, real_now_s - self._real_since_s), real_now_s
        if before is None:
            self.own_s += min(INTERVAL_S, wall_s)
            return
        cpu_s = max(0.0, self._seen.cpu_s - before.cpu_s)
        waits_s = (max(0.0, each_s - before.waits_s.get(tid, 0.0)) for tid, each_s in self._seen.waits_s.items())
        waited_s = sum(heapq.nlargest(WAITERS, waits_s))
        if self._seen.last_tid <= 0 or self._seen.last_tid - before.last_tid != self._seen.newest:
            waited_s = 0.0
        self.cpu_s += cpu_s
        self.waited_s += min(waited_s, wall_s)
        self.own_s += min(real_s, max(cpu_s, wall_s - waited_s))


def look(members: Callable[[ProcessTable], set[ProcessEntry]], above_tid: int) -> Seen:
    """Look at the processes now. See `Seen`."""
    table = read_process_table()
    waits_s = {}
    cpu_s = sum(_cpu_s(entry.pid) for entry in table.with_descendants(lambda entry: True) if entry.pid != os.getpid())
    for entry in members(table):
        for tid in _threads(entry.pid):
            if _rank(entry.pid, tid) == _OURS:
                waits_s[tid] = _waited_s(entry.pid, tid)
    last_tid = _last_tid()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    newest = sum(above_tid < tid <= last_tid for pid in pids for tid in _threads(pid))
    return Seen(cpu_s, waits_s, last_tid, newest)


def _threads(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _cpu_s(pid: int) -> float:
    """CPU time of a process and of the children that it has waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def _rank(pid: int, tid: int) -> tuple[int, int, set[int], bytes] | None:
    """Return what decides how long a thread waits beside others; None if it has ended. `tid` 0: the caller."""
    try:
        autogroup = b""
        with suppress(FileNotFoundError), open(f"/proc/{pid}/autogroup", "rb") as file:
            autogroup = file.read().partition(b" nice ")[2]
        return (os.getpriority(os.PRIO_PROCESS, tid), os.sched_getscheduler(tid), os.sched_getaffinity(tid), autogroup)
    except OSError:
        return None


_OURS = _rank(os.getpid(), 0)
"""Rank of this process before it has started anything: programs of its user can change it (`PRIO_USER`)."""


def _waited_s(pid: int, tid: int) -> float:
    try:
        with open(f"/proc/{pid}/task/{tid}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _last_tid() -> int:
    try:
        with open("/proc/loadavg", "rb") as file:
            return int(file.read().split()[4])
    except (OSError, ValueError, IndexError):
        return -1
