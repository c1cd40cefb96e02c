"""The silence of sandboxes: it is evidence only if the sandbox could run.

The loop of a daemon with a call in flight wakes several times a second (its watchdog). If its main thread has used no
CPU time between two checks, it did not run. Its state shows the reason:

* stopped (T): processes inside cannot stop it, so the sandbox stood still;
* in an uninterruptible wait (D, for a disk, for swap or in a frozen group), or frozen: it stood still, unless the rest
  of the sandbox ran. The rest may then have used up all memory, and the time counts;
* runnable, or it ran but had to wait for a CPU: the wait does not count, unless the sandbox itself caused it;
* asleep (S): it could run, and did not. The time counts.

The sandbox itself caused a wait for a CPU only if it asks for many (`MAX_WANTED_CPUS`), however many it got: with fewer
threads, a daemon never waits for long. Either its living threads have asked for that number between two checks, or that
number could run at both. Processes that end at once leave no trace of their demand.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from prorl_ipc.client import SILENCE_S
from prorl_trio.sandbox.reaper import children, stat_fields
from prorl_trio.threads import run_blocking

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_STANDSTILL_S: Final = 120.0
"""Longest standstill, in seconds, for which a call waits. After that, the sandbox is lost."""
RUNNING_SHARE: Final = 0.1
"""A sandbox ran if its processes, without the daemon, used more than this share of a CPU."""

MAX_WANTED_CPUS: Final = max(8, os.cpu_count() or 1)
"""Threads of a sandbox that may run or wait for a CPU at once, on average, without starving their own daemon."""

_STOPPED: Final = ("T", "t")
_KEPT: Final = frozenset({*_STOPPED, "D", "R", "F"})
_MOUNTS: Final = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def is_held(pid: int) -> bool:
    """Return whether a process cannot run now: it is stopped or frozen, or waits for a disk."""
    return _look(pid, 0.0).state in _KEPT.difference("R")


class _Look(NamedTuple):
    """The daemon's state in /proc at one moment, and its main thread's CPU time; None if unknown.

    A frozen process that /proc shows asleep has the state F here.
    """

    at_s: float
    state: str
    cpu_ns: int | None
    waited_ns: int = 0


class Silence:
    """The time in which one sandbox stood still, as detected by calls that waited for its daemon.

    Args:
        find_daemon: returns the daemon's process id in this namespace; None if unknown.

    Attributes:
        on_standstill: called with the seconds of a standstill, as they are detected.
        total_s: seconds of all standstills.
    """

    def __init__(self, find_daemon: Callable[[], int | None]) -> None:
        self._find_daemon = find_daemon
        self.on_standstill: Callable[[float], None] | None = None
        self.total_s = 0.0
        self._lasts_s = 0.0
        """Seconds of the current standstill, 0 without one."""
        self._unsure_s = 0.0
        """Seconds in which the daemon did not run, while the state of the other processes is still unknown."""
        self._last: _Look | None = None
        self._use: _Use | None = None

    def __repr__(self) -> str:
        return f"<Silence: {self.total_s:.1f} s of standstill>"

    @property
    def is_too_long(self) -> bool:
        return self._lasts_s >= MAX_STANDSTILL_S

    async def look(self) -> None:
        """Check the sandbox, and add the time since the last check to `total_s` if it stood still.

        The first check, and a check long after the last one, only start a measurement. Two calls may alternate.
        """
        last, now_s, pid = self._last, trio.current_time(), self._find_daemon()
        if last is not None and now_s - last.at_s < SILENCE_S / 2:
            return
        self._last = look = _look(pid, now_s)
        if last is None or now_s - last.at_s > 4 * SILENCE_S:
            self._forget()
            return
        passed_s = now_s - last.at_s
        waited_s = min(passed_s, (look.waited_ns - last.waited_ns) / 1e9)
        is_kept = look.cpu_ns == last.cpu_ns and look.state in _KEPT
        if pid is None or look.cpu_ns is None or not (is_kept or waited_s > RUNNING_SHARE * passed_s):
            self._forget()
        elif is_kept and look.state in _STOPPED:
            self._add(passed_s)
        else:
            kept_s = passed_s if is_kept else waited_s
            before, self._use = self._use, await run_blocking(_use, pid)
            wants_cpu = not is_kept or look.state == "R"
            if before is None:
                self._unsure_s = kept_s
            elif (
                self._use.wanted_since(before, passed_s) > MAX_WANTED_CPUS * passed_s
                if wants_cpu
                else self._use.others_s - before.others_s > RUNNING_SHARE * passed_s
            ):
                self._lasts_s = self._unsure_s = 0.0
            else:
                self._add(kept_s)

    async def stands_still(self) -> bool:
        """Return whether the sandbox does not run now, or a thread of its daemon waits for a disk.

        For a sandbox that is lost by its silence. Takes three times `SILENCE_S`.
        """
        pid, self._last, found_s = self._find_daemon(), None, self.total_s
        if pid is None:
            return False
        waiting = _waiting_for_disk(pid)
        for _ in range(3):
            await self.look()
            await trio.sleep(SILENCE_S)
        await self.look()
        return self.total_s > found_s or bool(waiting & _waiting_for_disk(pid))

    def _forget(self) -> None:
        self._lasts_s, self._unsure_s, self._use = 0.0, 0.0, None

    def _add(self, seconds: float) -> None:
        seconds, self._unsure_s = seconds + self._unsure_s, 0.0
        self._lasts_s += seconds
        self.total_s += seconds
        if self.on_standstill is not None:
            self.on_standstill(seconds)


def _look(pid: int | None, at_s: float) -> _Look:
    fields = None
    with suppress(OSError):  # unknown
        fields = None if pid is None else stat_fields(pid)
    if fields is None:
        return _Look(at_s, "", None)
    cpu_ns, waited_ns = _schedstat(pid) or (None, 0)
    return _Look(at_s, "F" if fields[0] == "S" and _is_frozen(pid) else fields[0], cpu_ns, waited_ns)


def _is_frozen(pid: int | None) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/cgroup", encoding="utf-8") as groups:
        path = next((line.rstrip("\n")[3:] for line in groups if line.startswith("0::")), None)
        for mount in () if path is None else _MOUNTS:
            with suppress(OSError), open(f"{mount}{path}/cgroup.events", encoding="ascii") as events:
                return "frozen 1" in events.read()
    return False


def _cpu_ns(task: int | None) -> int | None:
    found = _schedstat(task)
    return None if found is None else found[0]


def _schedstat(task: int | None) -> tuple[int, int] | None:
    """Return the time that a thread was on a CPU, and the time that it waited for one, in nanoseconds."""
    try:
        with open(f"/proc/{task}/schedstat", "rb") as file:
            on_cpu, waited, _ = file.read().split()
            return int(on_cpu), int(waited)
    except (OSError, ValueError):
        return None


def _waiting_for_disk(pid: int | None) -> set[tuple[int, int | None]]:
    """Return the threads of a process in an uninterruptible wait, each with its used CPU time.

    A thread that waits for a child to execute a program (`vfork`) has the child's reason for waiting. Any process of
    its user may have stopped the child.
    """
    found = set()
    with suppress(OSError):
        for task in map(int, os.listdir(f"/proc/{pid}/task")):
            fields = stat_fields(task)
            if fields is not None and fields[0] == "D" and not _waits_for_child(f"/proc/{pid}/task/{task}", fields):
                found.add((task, _cpu_ns(task)))
    return found


def _waits_for_child(thread: str, fields: list[str]) -> bool:
    """Return whether a thread with these `fields` of /proc has a child in the same memory that waits for no disk.

    Shared memory has the same size in both.
    """
    with open(f"{thread}/children", encoding="ascii") as file:
        of_children = [stat_fields(int(child)) for child in file.read().split()]
    return any(each is not None and each[20] == fields[20] and each[0] != "D" for each in of_children)


class _Use(NamedTuple):
    """CPU time of a sandbox up to one moment.

    Attributes:
        others_s: seconds of all processes except the daemon, including ended ones.
        ended_s: the part of these seconds that belongs to ended processes.
        wanted_ns: for each living thread, the time that it was on a CPU or waited for one.
        runnable: threads on a CPU or waiting for one now, without the daemon's.
    """

    others_s: float
    ended_s: float
    wanted_ns: dict[int, int]
    runnable: int = 0

    def wanted_since(self, before: _Use, passed_s: float) -> float:
        """Return the minimum seconds of all threads on a CPU or waiting for one, in the `passed_s` since `before`.

        The kernel does not provide this time for ended processes, nor even their CPU time if their parent ignored them.
        """
        living_ns = sum(max(0, ns - before.wanted_ns.get(thread, 0)) for thread, ns in self.wanted_ns.items())
        seen_s = living_ns / 1e9 + max(0.0, self.ended_s - before.ended_s)
        return max(seen_s, min(self.runnable, before.runnable) * passed_s)


def _use(daemon: int) -> _Use:
    living, ended, runnable, waiting = 0, 0, 0, [daemon]
    wanted_ns: dict[int, int] = {}
    while waiting:
        pid = waiting.pop()
        with suppress(OSError):
            waiting += children(pid)
            if (fields := stat_fields(pid)) is not None:
                ended += sum(map(int, fields[13:15]))
                living += sum(map(int, fields[11:13])) if pid != daemon else 0
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                wanted_ns[thread] = sum(_schedstat(thread) or (0, 0))
                runnable += pid != daemon and (stat_fields(thread) or [""])[0] == "R"
    return _Use((living + ended) / _TICKS_PER_S, ended / _TICKS_PER_S, wanted_ns, runnable)
