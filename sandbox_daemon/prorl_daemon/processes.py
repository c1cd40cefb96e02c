"""The processes below the daemon, read from /proc, and their end. Chosen by kinship, never by name."""

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
"""Processes killed and waited for together: each holds one file descriptor meanwhile."""


class ProcessEntry(msgspec.Struct, frozen=True):
    """A process. `start_ticks` tells it from a later one with its pid; a zombie is not `alive`.

    A process whose first thread has ended while others run, which the kernel calls a zombie as well, is alive.
    """

    pid: int
    parent: int
    group: int
    session: int
    start_ticks: int
    alive: bool


class ProcessTable:
    """A snapshot of processes, made from their entries, with lookups by parent. It does not change afterwards."""

    def __init__(self, entries: Iterable[ProcessEntry]) -> None:
        self._entries = {entry.pid: entry for entry in entries}
        self._children: dict[int, list[ProcessEntry]] = {}
        for entry in self._entries.values():
            self._children.setdefault(entry.parent, []).append(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def children(self, pid: int) -> set[ProcessEntry]:
        """Return the processes whose parent is `pid` now, orphans that it adopted among them."""
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
        """Return the processes for which `chosen` is true, and everything below them."""
        roots = {entry for entry in self._entries.values() if chosen(entry)}
        return roots.union(*(self.descendants(entry.pid) for entry in roots))


def read_process_table() -> ProcessTable:
    """Read /proc. Empty where it is not mounted. A few microseconds a process."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        pids = []
    return ProcessTable(entry for pid in pids if (entry := _read_entry(pid)) is not None)


async def kill_until_gone(choose: Callable[[ProcessTable], set[ProcessEntry]]) -> set[ProcessEntry]:
    """SIGKILL what `choose` picks from a fresh table, wait for it, and again, until it picks nothing that is alive.

    Repeating catches what was forked meanwhile. Never kills a process that took the pid of a chosen one, nor the
    caller. Waits for ever on a process that does not die: call it under a deadline.

    Returns:
        The processes this process may not signal; empty unless something changed its user.
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
    """Return when all of them have ended. Waits for ever on one that does not: call it under a deadline."""
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
    # The second field is the name in brackets, and may itself hold brackets and spaces.
    state, *numbers = stat[stat.rindex(b")") + 2 :].split()
    parent, group, session = (int(number) for number in numbers[:3])
    alive = state not in (b"Z", b"X") or int(numbers[16]) > 1
    return ProcessEntry(pid, parent, group, session, int(numbers[18]), alive)
