"""The processes below the daemon, read from /proc, and their end. Selected by ancestry, never by name."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_KILLED_AT_ONCE = 256
"""Processes killed and awaited together: each holds one file descriptor until it has ended."""


class ProcessEntry(msgspec.Struct, frozen=True):
    """A process. `start_ticks` distinguishes it from a later one with its pid; a zombie is not `alive`.

    A process whose first thread has ended while others run, which the kernel also calls a zombie, is alive.
    """

    pid: int
    parent: int
    group: int
    session: int
    start_ticks: int
    alive: bool


class ProcessTable:
    """An immutable snapshot of processes, with lookups by parent."""

    def __init__(self, entries: Iterable[ProcessEntry]) -> None:
        self._entries = {entry.pid: entry for entry in entries}
        self._children: dict[int, list[ProcessEntry]] = {}
        for entry in self._entries.values():
            self._children.setdefault(entry.parent, []).append(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def children(self, pid: int) -> set[ProcessEntry]:
        """Return the processes whose parent is `pid` now, including adopted orphans."""
        return set(self._children.get(pid, ()))

    def descendants(self, pid: int) -> set[ProcessEntry]:
        """Return the children of `pid`, their children, and so on; without `pid` itself."""
        found: dict[int, ProcessEntry] = {}
        frontier = [pid]
        while frontier:
            for child in self._children.get(frontier.pop(), ()):
                if child.pid not in found and child.pid != pid:
                    found[child.pid] = child
                    frontier.append(child.pid)
        return set(found.values())

    def with_descendants(self, chosen: Callable[[ProcessEntry], bool]) -> set[ProcessEntry]:
        """Return the processes for which `chosen` is true, and all their descendants."""
        roots = {entry for entry in self._entries.values() if chosen(entry)}
        return roots.union(*(self.descendants(entry.pid) for entry in roots))


def read_process_table() -> ProcessTable:
    """Read /proc. Empty if it is not mounted. A few microseconds per process."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        pids = []
    return ProcessTable(entry for pid in pids if (entry := _read_entry(pid)) is not None)


async def kill_until_gone(choose: Callable[[ProcessTable], set[ProcessEntry]]) -> set[ProcessEntry]:
    """Kill the processes selected by `choose` with SIGKILL and wait, and repeat until none is alive.

    The repetition catches processes forked in between. Never kills a process that reused the pid of a chosen one, nor
    the caller. Waits without limit for a process that does not die: call it under a deadline.

    Returns:
        The processes that this process may not signal; empty unless their user was changed.
    """
    forbidden: set[ProcessEntry] = set()
    while True:
        await trio.lowlevel.checkpoint()
        chosen = choose(read_process_table()) - forbidden
        victims = [entry for entry in chosen if entry.alive and entry.pid != os.getpid()]
        if not victims:
            return forbidden
        for start in range(0, len(victims), MAX_KILLED_AT_ONCE):
            forbidden |= await _kill_and_wait(victims[start : start + MAX_KILLED_AT_ONCE])


async def wait_until_gone(entries: Iterable[ProcessEntry]) -> None:
    """Return when all have ended. Waits without limit for a process that does not: call it under a deadline."""
    for entry in entries:
        try:
            pidfd = os.pidfd_open(entry.pid)
        except ProcessLookupError:
            continue
        try:
            current = _read_entry(entry.pid)
            if current is not None and current.start_ticks == entry.start_ticks:
                await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)


async def _kill_and_wait(victims: list[ProcessEntry]) -> set[ProcessEntry]:
    forbidden = set()
    with ExitStack() as opened:
        dying = []
        for entry in victims:
            try:
                pidfd = os.pidfd_open(entry.pid)
                opened.callback(os.close, pidfd)
                current = _read_entry(entry.pid)
                if current is not None and current.start_ticks == entry.start_ticks:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    dying.append(pidfd)
            except ProcessLookupError:
                continue
            except PermissionError:
                forbidden.add(entry)
        for pidfd in dying:
            await trio.lowlevel.wait_readable(pidfd)
    return forbidden


def _read_entry(pid: int) -> ProcessEntry | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    # The second field is the name in brackets, and may itself contain brackets and spaces.
    state, *numbers = stat[stat.rindex(b")") + 2 :].split()
    parent, group, session = (int(number) for number in numbers[:3])
    alive = state not in (b"Z", b"X") or int(numbers[16]) > 1
    return ProcessEntry(pid, parent, group, session, int(numbers[18]), alive)
