"""Measures the tools' use of resources, ends excessive use, and reports it in the result of the action that caused it.

For limits that no kernel interface available in a sandbox enforces for a whole tree of processes.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import traceback
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import trio

from prorl_daemon.holdings import Holdings, Mappings, measure_holdings
from prorl_daemon.memory_files import empty_memory_files, memory_file_bytes
from prorl_daemon.processes import kill_until_gone, read_process_table, wait_until_gone
from prorl_daemon.threads import run_blocking
from prorl_ipc.sandbox_calls import BashResult, CellResult, ExecResult

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from prorl_daemon.processes import ProcessEntry, ProcessTable
    from prorl_ipc.limits import Breach, SandboxLimits
    from prorl_ipc.sandbox_calls import SandboxCall, SandboxReply


BUSY_INTERVAL_S = 0.2
"""Interval between two checks during an action. A check takes about 0.1 ms, and some 20 us more for each process."""
IDLE_INTERVAL_S = 2.0
"""Interval between two checks without an action, for background processes."""
HOLDINGS_INTERVAL_S = 1.0
"""Interval between two checks of kernel objects of processes, during an action."""
LEAST_PAUSE = 2.0
"""Minimum pause after a check, as a multiple of the check's duration."""
FEW_FILES = 500
"""Limit of open files that are checked on the event loop, in a few milliseconds; more are checked in a thread."""
FEW_MAPPINGS = 20_000
"""Likewise for mappings, if they may be numerous."""
MAX_FILES = 65_536
"""Limit of open files of all processes together. The machine has a total limit (`fs.file-max`)."""
MAX_WATCHES = 65_536
"""Limit of files that epoll instances of all processes together watch. The user has a limit for all sandboxes and the
host (`fs.epoll.max_user_watches`). When it is reached, neither the node nor any other sandbox can wait for anything."""
MAX_IN_FLIGHT = 1024
"""Limit of open files that were sent through Unix sockets and not received, which the kernel also limits per user."""
MAX_BURIED_LOOKS = 5
"""Consecutive checks that may find sockets in flight, which may contain more files that cannot be counted."""
MAX_LOCKS = 65_536
"""Limit of file locks."""
MAX_MAPPINGS = 262_144
"""Limit of mappings of all processes together. Each may hold a file open outside every table, see `MAX_FILES`."""
MAX_NETWORK_BYTES = 128 * 1024 * 1024
"""Limit of buffers of TCP and UDP. The machine has a total limit (`net.ipv4.tcp_mem`, about 5 % of its memory). When it
is reached, the machine's own connections, such as the ones to backends, slow down or break."""
MAX_ORPHANS = 1024
"""Limit of closed connections whose peer does not receive the data. The machine has a total limit
(`net.ipv4.tcp_max_orphans`), above which it resets connections of others."""
MAX_FILTERS = 1024
"""Limit of system call filters on all threads. Compiled, they use a limited memory of the machine
(`net.core.bpf_jit_limit`). When it is used up, no sandbox of an ordinary user's node starts."""
KILL_DEADLINE_S = 2.0
_MIB = 1024 * 1024
_SIGNALLED = 128


# Memory that need not be mapped by any process, so that no process can be ended for it: counted, and freed.
#
# This is System V's shared memory, message queues and semaphores, and the daemon's own unnamed files, which
# contain the shell's commands and which tools can write to. Only the daemon may make such files
# (`syscall_rules`).

IPC_RMID = 0
OBJECT_BYTES = 512
"""Approximate kernel memory of one object without its content."""
SEMAPHORE_BYTES = 64
UNDO_BYTES = 2
"""Kernel memory for each process that may have changed a semaphore with `SEM_UNDO`: one number per semaphore of its
set."""
MESSAGE_BYTES = 64
SEGMENT_PREFIX = b"/SYSV"

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_KINDS_IN_MEMORY = ("tmpfs", "overlay", "fuse.fuse-overlayfs")
INODE_BYTES = 1024
"""Approximate kernel memory of a tmpfs inode, which the size limit of a tmpfs does not count."""


class ProcessUsage(msgspec.Struct, frozen=True):
    """The resource use of one process, or of a zombie, which only uses its place.

    `memory_bytes` counts shared pages in full.
    """

    pid: int
    start_ticks: int
    name: str
    threads: int
    cpu_s: float
    memory_bytes: int


class DiskUsage(msgspec.Struct, frozen=True):
    """The use of one file system.

    `used_bytes`: by content or by inodes, whichever is more. `full`: no room is left.
    """

    path: str
    used_bytes: int
    full: bool


def measure_processes(pids: Iterable[int]) -> list[ProcessUsage]:
    """Measure the `pids` that still exist. Some ten microseconds each."""
    return [usage for pid in pids if (usage := _measure(pid)) is not None]


def measure_proportional(processes: Iterable[ProcessUsage]) -> dict[int, int]:
    """Return the memory of each by pid, with shared pages divided among their users, in bytes.

    Blocks, milliseconds each.
    """
    return {process.pid: _proportional_bytes(process.pid, process.memory_bytes) for process in processes}


def measure_disks(paths: Iterable[str]) -> list[DiskUsage]:
    """Return the writable file systems at `paths`, each once, with the first path. Microseconds each."""
    found: dict[int, DiskUsage] = {}
    for path in paths:
        try:
            device, status = os.stat(path).st_dev, os.statvfs(path)
        except OSError:
            continue
        if device in found or status.f_flag & os.ST_RDONLY:
            continue
        used_bytes = (status.f_blocks - status.f_bfree) * status.f_frsize
        inode_bytes = (status.f_files - status.f_ffree) * INODE_BYTES
        full = status.f_bavail * status.f_frsize < _PAGE_BYTES or (status.f_files > 0 and status.f_favail == 0)
        found[device] = DiskUsage(path, max(used_bytes, inode_bytes), full)
    return list(found.values())


def in_memory(paths: Iterable[str]) -> list[str]:
    """Return the `paths` that are in a file system of memory, or in a layer over another."""
    kinds: dict[str, str] = {}
    with suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, place, kind, *_ = line.split(" ")
            kinds[place] = kind
    return [path for path in paths if kinds.get(path) in _KINDS_IN_MEMORY]


def _measure(pid: int) -> ProcessUsage | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    end = stat.rindex(b")")  # the name is in brackets, and may itself contain brackets and spaces
    name = stat[stat.index(b"(") + 1 : end].decode(errors="replace")
    state, *fields = stat[end + 2 :].split()
    alive = state not in (b"Z", b"X")
    return ProcessUsage(
        pid=pid,
        start_ticks=int(fields[18]),
        name=name,
        threads=int(fields[16]),
        cpu_s=(int(fields[10]) + int(fields[11])) / _TICKS_PER_S if alive else 0.0,
        memory_bytes=int(fields[20]) * _PAGE_BYTES if alive else 0,
    )


def _proportional_bytes(pid: int, otherwise: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:  # it has ended, or runs an inaccessible program, or the kernel is older than 4.14
        return otherwise
    return otherwise


class Segment(NamedTuple):
    """An object of System V: `kind` is `shm`, `msg` or `sem`.

    `attached`: processes have attached it, if it is memory.
    """

    kind: str
    number: int
    bytes: int
    attached: bool


def read_segments(processes: int) -> list[Segment]:
    """Return all objects of this IPC namespace with this number of processes.

    Some ten microseconds a kind, one each.
    """
    each_bytes = SEMAPHORE_BYTES + UNDO_BYTES * processes
    found = [
        Segment("shm", row[1], OBJECT_BYTES + row[14] + row[15], attached=row[6] > 0) for row in _read_table("shm")
    ]
    found += [
        Segment("msg", row[1], OBJECT_BYTES + row[3] + MESSAGE_BYTES * row[4], attached=False)
        for row in _read_table("msg")
    ]
    found += [Segment("sem", row[1], OBJECT_BYTES + each_bytes * row[3], attached=False) for row in _read_table("sem")]
    return found


def held_bytes(segments: Iterable[Segment]) -> int:
    """Return the bytes of `segments` and of the unnamed files, whether or not processes have mapped them."""
    return sum(segment.bytes for segment in segments) + memory_file_bytes()


def attached_bytes(pids: Iterable[int], segments: Iterable[Segment]) -> dict[int, int]:
    """Return by pid the bytes that processes hold by attached segments in addition to their mapped part.

    A segment's rest counts for its first holder. Blocks, milliseconds each.
    """
    rest = {segment.number: segment.bytes for segment in segments if segment.attached}
    holders: dict[int, int] = {}
    for pid in pids if rest else ():
        number = -1
        with suppress(OSError), open(f"/proc/{pid}/smaps", "rb") as file:
            for line in file:
                if not line[:1].isupper():  # the head of a mapping: an address; the following lines begin with a name
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
    """Remove segments that no process has attached, and empty the unnamed files. Segments of another user stay."""
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


class _Found(NamedTuple):
    breach: Breach
    text: str


class Watchdog:
    """Watches all descendants of this process. Lives in `serve`.

    Args:
        writable: paths whose file systems are checked, if they are in memory and writable.
        isolated: this process sees, and may signal, only the sandbox.
        limiter: limiter of threads.
    """

    def __init__(
        self,
        limits: SandboxLimits,
        *,
        writable: Sequence[str],
        isolated: bool,
        limiter: trio.CapacityLimiter,
    ) -> None:
        self._limits = limits
        self._writable = in_memory(writable)
        self._isolated = isolated
        self._limiter = limiter
        self._found: _Found | None = None
        self._disk_bytes = {disk.path: disk.used_bytes for disk in measure_disks(self._writable)}
        """Bytes used at the last check, or at the beginning; by path."""
        self._disk_floor = dict(self._disk_bytes)
        self._devices = frozenset(os.stat(path).st_dev for path in self._disk_bytes)
        self._kernel_bytes: dict[int, int] = {}
        """By process id, at the last check; see `Holdings`."""
        self._files = 0
        self._mappings: dict[int, Mappings] = {}
        self._buried_looks = 0
        self._own_network = isolated and [name for _, name in socket.if_nameindex()] == ["lo"]
        self._has_complained = False
        self._actions = 0
        self._acted = trio.Event()

    def __repr__(self) -> str:
        return f"<Watchdog: {self._actions} actions, {self._found}>"

    def allowed(self, call: SandboxCall) -> SandboxCall:
        """Return the call with its `timeout_s` reduced to `wall_s`, if it is longer."""
        if _timeout_s(call) <= self._limits.wall_s:
            return call
        return msgspec.structs.replace(call, timeout_s=self._limits.wall_s)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count an action as running during the block, so that the limits are checked often."""
        self._actions += 1
        self._acted.set()
        self._acted = trio.Event()
        try:
            yield
        finally:
            self._actions -= 1

    def judge(self, call: SandboxCall, result: SandboxReply) -> SandboxReply:
        """Return the result with the limit that was exceeded since the last one, if any, and reset that."""
        if not isinstance(result, BashResult | CellResult | ExecResult):
            return result
        found, self._found = self._found, None
        if found is not None and found.breach == "memory" and memory_file_bytes() > _MIB:
            empty_memory_files()  # their writer continued after they were emptied
        if found is None:
            found = self._what_else(result, _timeout_s(call))
        if found is None:
            return result
        return msgspec.structs.replace(result, breach=found.breach, breach_text=found.text)

    async def serve(self) -> None:
        """Check the limits repeatedly, often during an action. Runs until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._repeat, self._look, BUSY_INTERVAL_S)
            if self._isolated:
                nursery.start_soon(self._repeat, self._look_at_holdings, HOLDINGS_INTERVAL_S)

    async def _repeat(self, look: Callable[[], Awaitable[None]], busy_interval_s: float) -> None:
        pause_s = busy_interval_s
        while True:
            if not self._actions:
                with trio.move_on_after(IDLE_INTERVAL_S):
                    await self._acted.wait()
            await trio.sleep(pause_s)
            began_s = trio.current_time()
            try:
                await look()
            except Exception as exc:  # a failed check does not end the sandbox; the next one follows
                self._complain(exc)
            pause_s = max(busy_interval_s, LEAST_PAUSE * (trio.current_time() - began_s))

    def _complain(self, error: Exception) -> None:
        """Print the first error, because tools may cause one every time."""
        if not self._has_complained:
            self._has_complained = True
            traceback.print_exception(error, file=sys.stderr)

    async def _look(self) -> None:
        if self._isolated and _count_processes() > self._limits.max_processes:
            await self._end_all("processes", self._too_many())
            return
        below = read_process_table().descendants(os.getpid())
        processes = measure_processes(entry.pid for entry in below)
        if sum(process.threads for process in processes) > self._limits.max_processes:
            await self._end_all("processes", self._too_many())
            return
        for process in processes:
            if process.cpu_s > self._limits.cpu_s:
                text = f"{_name(process)} was killed: it had used more than {self._limits.cpu_s} s of CPU time"
                await self._end_one(process, "cpu", text)
        segments = read_segments(len(processes)) if self._isolated else []
        used_bytes = sum(process.memory_bytes for process in processes) + sum(self._kernel_bytes.values())
        if used_bytes + held_bytes(segments) > self._limits.memory_bytes:
            await self._reduce_memory(processes, segments)
        await self._look_at_disks()

    async def _look_at_holdings(self) -> None:
        """Check kernel objects that the kernel limits per user, per machine, or not at all."""
        processes = measure_processes(entry.pid for entry in read_process_table().descendants(os.getpid()))
        measure = partial(
            measure_holdings,
            [process.pid for process in processes],
            most=max(MAX_WATCHES, MAX_LOCKS),
            memory_bytes=self._limits.memory_bytes,
            own_network=self._own_network,
            mappings=self._mappings,
            own_devices=self._devices,
        )
        few = self._files + sum(process.threads for process in processes) < FEW_FILES
        few = few and sum(counted.number for counted in self._mappings.values()) < FEW_MAPPINGS
        held = measure() if few else await run_blocking(measure, limiter=self._limiter, or_here=True)
        self._files, self._kernel_bytes = held.files, held.kernel_bytes
        self._buried_looks = self._buried_looks + 1 if held.buried else 0
        if what := self._too_much(held):
            self._kernel_bytes = {}
            await self._end_all("descriptors", f"all processes were killed: {what}")

    def _too_much(self, held: Holdings) -> str:
        """Return a description of the exceeded limit, or an empty string."""
        for number, most, what in (
            (held.watches, MAX_WATCHES, "their epoll instances watched {} files"),
            (held.files, MAX_FILES, "they had {} files open"),
            (held.in_flight, MAX_IN_FLIGHT, "{} open files had been sent through sockets and not received"),
            (held.locks, MAX_LOCKS, "they held {} locks of files"),
            (held.mappings, MAX_MAPPINGS, "they had {} mappings, each of which may hold a file open"),
            (held.network_bytes, MAX_NETWORK_BYTES, "buffers of their connections took {} bytes"),
            (held.orphans, MAX_ORPHANS, "{} closed connections had data left that nobody took"),
            (held.filters, MAX_FILTERS, "their threads had {} filters of system calls"),
        ):
            if number > most:
                return what.format(f"more than {most}")
        if self._buried_looks >= MAX_BURIED_LOOKS:
            return f"{held.buried} sockets had been sent through sockets and not received"
        return ""

    async def _reduce_memory(self, processes: list[ProcessUsage], segments: list[Segment]) -> None:
        """Free memory that no process holds; then kill the largest process, and the next, until the limit is kept."""
        pids = [process.pid for process in processes]
        sizes, attached = await run_blocking(
            lambda: (measure_proportional(processes), attached_bytes(pids, segments)),
            limiter=self._limiter,
            or_here=True,
        )
        sizes = {pid: size + attached.get(pid, 0) + self._kernel_bytes.get(pid, 0) for pid, size in sizes.items()}
        removable_bytes = held_bytes(segment for segment in segments if not segment.attached)
        unowned_bytes = self._kernel_bytes.get(0, 0)
        total_bytes = sum(sizes.values()) + removable_bytes + unowned_bytes
        if total_bytes <= self._limits.memory_bytes:
            return
        together = (
            f"all processes together used {total_bytes // _MIB} MiB of memory, and "
            f"{self._limits.memory_bytes // _MIB} MiB are allowed"
        )
        if (kernel_bytes := sum(self._kernel_bytes.values())) > total_bytes // 2:
            together += f"; {kernel_bytes // _MIB} MiB of it are page tables, mappings, pipes and buffers of sockets"
        if unowned_bytes > self._limits.memory_bytes:
            self._kernel_bytes = {}
            await self._end_all("memory", f"all processes were killed: {together}")
            return
        if removable_bytes > _MIB:
            remove_unmapped(segments)
            total_bytes -= removable_bytes
            text = f"{removable_bytes // _MIB} MiB of memory that no process had attached were given back: {together}"
            self._found = _Found("memory", text)
        largest_first = sorted(processes, key=lambda process: sizes[process.pid], reverse=True)
        for process in largest_first:
            if total_bytes <= self._limits.memory_bytes:
                return
            await self._end_one(process, "memory", f"{_name(process)} was killed: {together}")
            self._kernel_bytes.pop(process.pid, None)
            total_bytes -= sizes[process.pid]
            if process.pid in attached:
                remove_unmapped(read_segments(len(processes)))

    async def _look_at_disks(self) -> None:
        """Check file systems without their own size. Processes that free space are spared, to allow a clean-up."""
        for disk in measure_disks(self._writable):
            before_bytes = self._disk_bytes.get(disk.path, 0)
            self._disk_bytes[disk.path] = disk.used_bytes
            own_bytes = disk.used_bytes - self._disk_floor.get(disk.path, 0)
            if own_bytes > self._limits.disk_bytes and disk.used_bytes > before_bytes:
                text = (
                    f"all processes were killed: the files in {disk.path} took {own_bytes // _MIB} MiB, and "
                    f"{self._limits.disk_bytes // _MIB} MiB are allowed; remove some"
                )
                await self._end_all("disk", text)

    async def _end_one(self, process: ProcessUsage, breach: Breach, text: str) -> None:
        def chosen(table: ProcessTable) -> set[ProcessEntry]:
            below = table.descendants(os.getpid())
            return {entry for entry in below if (entry.pid, entry.start_ticks) == (process.pid, process.start_ticks)}

        self._found = _Found(breach, text)
        with trio.move_on_after(KILL_DEADLINE_S):
            await kill_until_gone(chosen)

    async def _end_all(self, breach: Breach, text: str) -> None:
        self._found = _Found(breach, text)
        with trio.move_on_after(KILL_DEADLINE_S):
            if self._isolated:
                # In one go, so that nothing can fork away. It spares the caller and the namespace's first process. A
                # shell that is started afterwards is not awaited.
                with suppress(ProcessLookupError):  # no process is left
                    os.kill(-1, signal.SIGKILL)
                await wait_until_gone(read_process_table().descendants(os.getpid()))
            else:
                await kill_until_gone(lambda table: table.descendants(os.getpid()))

    def _too_many(self) -> str:
        return f"all processes were killed: there were more than {self._limits.max_processes} of them"

    def _what_else(self, result: BashResult | CellResult | ExecResult, asked_timeout_s: float) -> _Found | None:
        """Return the kernel's action, as far as the result shows it.

        This is the signal with which a limit ends a process, or Python's error for the kernel's refusal.
        """
        exit_code = None if isinstance(result, CellResult) else result.exit_code
        error = result.error if isinstance(result, CellResult) else None
        if exit_code == _SIGNALLED + signal.SIGXCPU:
            return _Found("cpu", f"the command was killed: it used more than {self._limits.cpu_s} s of CPU time")
        if exit_code == _SIGNALLED + signal.SIGXFSZ or (error is not None and error.errno == errno.EFBIG):
            return _Found("file_size", f"a file may have at most {self._limits.max_file_bytes // _MIB} MiB")
        if error is not None and error.name == "MemoryError":
            return _Found("memory", f"a process may use at most {self._limits.memory_bytes // _MIB} MiB of memory")
        if result.timed_out and asked_timeout_s > self._limits.wall_s:
            return _Found("wall", f"no action may take more than {self._limits.wall_s:g} s here")
        for disk in measure_disks(self._writable):
            own_bytes = disk.used_bytes - self._disk_floor.get(disk.path, 0)
            if disk.full or own_bytes > self._limits.disk_bytes:
                size = f"{self._limits.disk_bytes // _MIB} MiB are allowed"
                return _Found("disk", f"the disk of {disk.path} is full: {size}; remove some files")
        return None


def _count_processes() -> int:
    try:
        return sum(name.isdigit() for name in os.listdir("/proc"))
    except OSError:
        return 0


def _timeout_s(call: SandboxCall) -> float:
    timeout_s: float = getattr(call, "timeout_s", 0.0)
    return timeout_s


def _name(process: ProcessUsage) -> str:
    return f"{process.name} (pid {process.pid})"
