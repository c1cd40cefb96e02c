"""Identification of processes by pid and start time, and the reaper, which cleans up after a killed node.

Standard library only, without imports from this project: the reaper runs as `python -I -S reaper.py RUN_DIR`, one small
process for each node, in its own session. It waits for the lock on the node's run folder, which the kernel releases
whenever the node ends. Then it ends the processes recorded in that folder and removes the folder.

Because pids are reused, a pid alone is never signalled. A pid with the recorded start time is the same process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

RECORD_NAME = "processes"
"""File in a sandbox's folder with one `pid start_time` per line."""

CGROUP_RECORD_NAME = "cgroup"
"""File in a sandbox's folder with the path of its cgroup, if it has one."""
CGROUP_PREFIX = "sandbox-of-"
"""The name prefix of every cgroup that this project may remove."""

ORPHAN_GRACE_S = 1.5
"""Time for the processes of a dead node to end by themselves, since their control channel has closed."""

KILL_TIMEOUT_S = 2.0
RETRY_INTERVAL_S = 1.0
NO_PIDFD_POLL_S = 0.01


class ProcessId(NamedTuple):
    """A unique process: `start_time` is in clock ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    start_time: int


_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Errors of /proc for a process that is gone or not ours. Any other error means that the state is unknown."""


def stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; None if the process does not exist."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()
    except _GONE:
        return None


def identify(pid: int) -> ProcessId | None:
    """Return the process that has this pid now; None if it does not exist or is a zombie.

    Raises:
        OSError: its state cannot be determined, for lack of a descriptor or memory. All functions that check whether a
            process is alive raise this, because an unknown process must not count as dead.
    """
    fields = stat_fields(pid)
    return None if fields is None or _has_ended(fields) else ProcessId(pid, int(fields[19]))


def _has_ended(fields: list[str]) -> bool:
    """Return whether it is a zombie with all its threads.

    If only its first thread has ended, it may still be the init of a PID namespace: the kernel ends the other processes
    there with the last thread.
    """
    return fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1)


def is_alive(process: ProcessId) -> bool:
    """Return whether this exact process still runs. A zombie does not."""
    return identify(process.pid) == process


def descendants(pid: int) -> set[ProcessId]:
    """Return all living descendants of `pid`, in any namespace, as far as /proc shows them."""
    found: set[ProcessId] = set()
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for child in children(parent):
            process = identify(child)
            if process is not None and process not in found:
                found.add(process)
                waiting.append(child)
    return found


def children(pid: int) -> list[int]:
    """Return the process ids of all children of a process, including ended ones that were not reaped."""
    found: list[int] = []
    with contextlib.suppress(*_GONE):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(*_GONE), open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found.extend(map(int, file.read().split()))
    return found


def session_members(session: int) -> set[ProcessId]:
    """Return all living processes of a session. Reads all of /proc, so call it in a thread, and rarely."""
    members: set[ProcessId] = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = stat_fields(int(name))
            if fields is not None and fields[3] == str(session) and not _has_ended(fields):
                members.add(ProcessId(int(name), int(fields[19])))
    return members


def kill(processes: Iterable[ProcessId]) -> None:
    """Send SIGKILL to each process whose identity still matches. Does not wait."""
    for process in processes:
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)


def wait_gone(processes: Iterable[ProcessId], timeout_s: float) -> set[ProcessId]:
    """Block until all have ended, for at most `timeout_s`; return the survivors."""
    deadline = time.monotonic() + timeout_s
    remaining = {process for process in processes if is_alive(process)}
    while remaining and (left_s := deadline - time.monotonic()) > 0:
        _wait_one(next(iter(remaining)), left_s)
        remaining = {process for process in remaining if is_alive(process)}
    return remaining


def _wait_one(process: ProcessId, timeout_s: float) -> None:
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except OSError:  # Linux before 5.3 sends no event for the end of a process that is not our child
        time.sleep(min(NO_PIDFD_POLL_S, timeout_s))
        return
    try:
        if is_alive(process):
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(timeout_s * 1000)
    finally:
        os.close(pidfd)


def write_record(folder: Path, processes: Iterable[ProcessId]) -> None:
    """Record the processes of the sandbox of this folder, for the reaper."""
    text = "".join(f"{process.pid} {process.start_time}\n" for process in processes)
    unfinished = folder / f"{RECORD_NAME}.new"
    unfinished.write_text(text, encoding="ascii")  # a full disk must not destroy the existing record
    unfinished.replace(folder / RECORD_NAME)


def _read_records(run_dir: Path) -> set[ProcessId]:
    return {process for record in run_dir.glob(f"*/{RECORD_NAME}") for process in _read_record(record)}


def _read_record(record: Path) -> set[ProcessId]:
    processes: set[ProcessId] = set()
    if record.exists():
        with contextlib.suppress(*_GONE):
            for line in record.read_text(encoding="ascii").splitlines():
                pid, _, start_time = line.partition(" ")
                if pid.isdigit() and start_time.isdigit():  # the node may have been killed during the write
                    processes.add(ProcessId(int(pid), int(start_time)))
    return processes


def write_cgroup_record(folder: Path, cgroup: Path) -> None:
    """Record the cgroup of the sandbox of this folder, for the reaper."""
    (folder / CGROUP_RECORD_NAME).write_text(str(cgroup), encoding="utf-8")


def remove_cgroup(cgroup: Path) -> bool:
    """Kill the processes in `cgroup` and remove it. Return True when it is gone.

    Blocks for at most `KILL_TIMEOUT_S`.
    """
    for attempt in (1, 2):
        with contextlib.suppress(OSError):
            os.rmdir(cgroup)
        if not cgroup.exists():
            return True
        if attempt == 1:
            _kill_cgroup(cgroup)
            _wait_until_empty(cgroup / "cgroup.events")
    return False


def _kill_cgroup(cgroup: Path) -> None:
    with contextlib.suppress(OSError):
        if (switch := cgroup / "cgroup.kill").exists():
            switch.write_text("1", encoding="ascii")
        else:  # Linux before 5.14
            pids = (cgroup / "cgroup.procs").read_text(encoding="ascii").split()
            kill(filter(None, map(identify, map(int, pids))))


def _wait_until_empty(events: Path) -> None:
    deadline = time.monotonic() + KILL_TIMEOUT_S
    try:
        fd = os.open(events, os.O_RDONLY)
    except OSError:
        return
    try:
        poll = select.poll()
        poll.register(fd, select.POLLPRI)
        while b"populated 1" in os.pread(fd, 4096, 0) and (left_s := deadline - time.monotonic()) > 0:
            poll.poll(left_s * 1000)
    finally:
        os.close(fd)


def _recorded_cgroup(folder: Path) -> Path | None:
    with contextlib.suppress(*_GONE, NotADirectoryError):
        cgroup = Path((folder / CGROUP_RECORD_NAME).read_text(encoding="utf-8"))
        if cgroup.is_absolute() and cgroup.name.startswith(CGROUP_PREFIX + folder.parent.name):
            return cgroup
    return None


def _reap_cgroups(run_dir: Path) -> None:
    for record in run_dir.glob(f"*/{CGROUP_RECORD_NAME}"):
        cgroup = _recorded_cgroup(record.parent)
        if cgroup is not None:
            remove_cgroup(cgroup)


def has_remains(folder: Path) -> bool:
    """Return whether a recorded process or cgroup of this sandbox still exists."""
    cgroup = _recorded_cgroup(folder)
    return any(map(is_alive, _read_record(folder / RECORD_NAME))) or (cgroup is not None and cgroup.exists())


def reap_sandbox(folder: Path) -> bool:
    """Kill the recorded processes of one sandbox, and their descendants; return whether all are gone.

    Blocks for at most twice `KILL_TIMEOUT_S`; may be retried.
    """
    family = _read_record(folder / RECORD_NAME)
    known = frozenset(family)
    for process in known:
        if is_alive(process):
            family |= descendants(process.pid)
    if family != known:
        with contextlib.suppress(OSError):  # without room for another record, the previous one stays
            write_record(folder, family)
    kill(family)
    wait_gone(family, KILL_TIMEOUT_S)
    cgroup = _recorded_cgroup(folder)
    if cgroup is not None:
        remove_cgroup(cgroup)
    return not has_remains(folder)


def reap(run_dir: Path) -> None:
    """End the remains of a dead node: its recorded processes, their descendants, its cgroups and folder. Blocks.

    Only for a holder of the lock on `run_dir`. A folder that is already gone is fine.
    """
    recorded = _read_records(run_dir)
    families = set(recorded)
    for process in recorded:
        if is_alive(process):
            families |= descendants(process.pid)
    orphans = wait_gone(families, ORPHAN_GRACE_S)
    for process in tuple(orphans):
        orphans |= descendants(process.pid)
    kill(orphans)
    wait_gone(orphans, KILL_TIMEOUT_S)
    _reap_cgroups(run_dir)
    shutil.rmtree(run_dir, ignore_errors=True)


def main(run_dir: Path) -> None:
    """Wait until the owner of `run_dir` is gone, then reap. Signals that end a node do not end its reaper."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    try:
        lock = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    fcntl.flock(lock, fcntl.LOCK_EX)
    while True:
        try:
            reap(run_dir)
        except OSError:  # no descriptor or memory: no other process cleans up here
            time.sleep(RETRY_INTERVAL_S)
        else:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
