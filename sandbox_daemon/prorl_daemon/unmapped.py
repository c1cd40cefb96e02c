"""Memory that no process need have mapped, so that none can be ended for it: counted, and given back.

That is what System V's shared memory, message queues and semaphores take, and the daemon's own unnamed files, which the
shell's commands lie in and which tools can write to. Nobody else in a sandbox may make such files (`syscall_rules`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from prorl_daemon.memory_files import empty_memory_files, memory_file_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

IPC_RMID = 0
OBJECT_BYTES = 512
"""About what the kernel takes for one of them without its content."""
SEMAPHORE_BYTES = 64
MESSAGE_BYTES = 64
SEGMENT_PREFIX = b"/SYSV"


class Segment(NamedTuple):
    """An object of System V: `kind` is `shm`, `msg` or `sem`. `attached`: processes have it, if it is memory."""

    kind: str
    number: int
    bytes: int
    attached: bool


def read_segments() -> list[Segment]:
    """All of this IPC namespace. Some ten microseconds for each kind, and a microsecond for each."""
    found = [
        Segment("shm", row[1], OBJECT_BYTES + row[14] + row[15], attached=row[6] > 0) for row in _read_table("shm")
    ]
    found += [
        Segment("msg", row[1], OBJECT_BYTES + row[3] + MESSAGE_BYTES * row[4], attached=False)
        for row in _read_table("msg")
    ]
    found += [
        Segment("sem", row[1], OBJECT_BYTES + SEMAPHORE_BYTES * row[3], attached=False) for row in _read_table("sem")
    ]
    return found


def held_bytes(segments: Iterable[Segment]) -> int:
    """Return the bytes of `segments` and of the unnamed files, whether processes have them mapped as well or not."""
    return sum(segment.bytes for segment in segments) + memory_file_bytes()


def attached_bytes(pids: Iterable[int], segments: Iterable[Segment]) -> dict[int, int]:
    """Return by pid what processes hold by having segments attached beside what they have mapped of them.

    A segment's rest counts for the first of those that hold it. Blocks, milliseconds each.
    """
    rest = {segment.number: segment.bytes for segment in segments if segment.attached}
    holders: dict[int, int] = {}
    for pid in pids if rest else ():
        number = -1
        with suppress(OSError), open(f"/proc/{pid}/smaps", "rb") as file:
            for line in file:
                if not line[:1].isupper():  # the head of a mapping: an address; what follows begins with its name
                    fields = line.split(None, 5)
                    number = int(fields[4]) if len(fields) > 5 and fields[5].startswith(SEGMENT_PREFIX) else -1
                    if number in rest:
                        holders.setdefault(number, pid)
                elif number in rest and line.startswith(b"Pss:"):
                    rest[number] -= 1024 * int(line.split()[1])
    held: dict[int, int] = {}
    for number, pid in holders.items():
        held[pid] = held.get(pid, 0) + max(0, rest[number])
    return held


def remove_unmapped(segments: Iterable[Segment]) -> None:
    """Remove those that no process has attached, and empty the unnamed files. Those of another user stay."""
    import ctypes  # here, because few daemons need it

    libc = ctypes.CDLL(None)
    for segment in segments:
        if segment.attached:
            continue
        if segment.kind == "sem":
            libc.semctl(segment.number, 0, IPC_RMID)
        else:
            getattr(libc, f"{segment.kind}ctl")(segment.number, IPC_RMID, None)
    empty_memory_files()


def _read_table(kind: str) -> list[list[int]]:
    try:
        with open(f"/proc/sysvipc/{kind}", encoding="ascii") as file:
            next(file)
            return [list(map(int, line.split())) for line in file]
    except (OSError, StopIteration):  # a kernel without them
        return []
