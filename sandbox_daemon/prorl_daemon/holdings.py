"""Kernel memory and kernel objects that processes hold by their open files and mappings, read from /proc.

The kernel accounts most of these to the user, who is the same in all sandboxes and in the node, or to the machine. Only
a control group of the sandbox would bound them otherwise.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import stat
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Iterator


PIPE_BYTES = 8192
"""Minimum size of a full pipe. Beyond that the kernel bounds the pipes of a user."""
MAPPING_BYTES = 256
"""Approximate kernel memory of a mapping, without its page tables."""
MAX_MAPPINGS = 65_530
"""Maximum for a process: the kernel's default for `vm.max_map_count`."""
MIN_MAPPING_KIB = 4
MANY_MAPPINGS = 131_072
"""Mappings are only counted one by one if processes of this size may have more."""
COUNTING_S = 0.5
"""Time limit for counting mappings in one check, at some microseconds each."""
FEW_SOCKETS = 16
"""Up to this number of sockets, buffers are not queried: a Unix socket's take 0.5 MiB at most, TCP sockets' 10."""
MOST_OTHERS = 64
OTHER_SOCKET_BYTES = 8 * 1024 * 1024
"""Assumed maximum for a socket that cannot be queried (UDP-Lite, raw), beyond the first few."""
FEW_UNSEEN = 64
"""A process whose files are inaccessible is trusted up to this number of files."""
READ_BYTES = 64 * 1024
EVENTPOLL, SOCKET, PIPE = "anon_inode:[eventpoll]", "socket:[", "pipe:["

# The kernel's `sock_diag` (man 7 sock_diag), which `ss -m` uses.
NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_REQUEST_DUMP = 0x301
EVERY_STATE = 0xFFFFFFFF
UDIAG_SHOW_MEMINFO = 0x20
UNIX_DIAG_MEMINFO = 5
INET_DIAG_SKMEMINFO = 7
CLOSING_STATES = (4, 5, 9, 11)
"""TCP_FIN_WAIT1, FIN_WAIT2, LAST_ACK, CLOSING: a connection that is closed here, but not finished."""
SK_MEMINFO_VARS = 9
TAKEN = (0, 2, 4, 5, 6, 7)
"""Indices of the variables with bytes in use: receive, send, forward allocation, queued, option, backlog."""
UNIX_HEAD, INET_HEAD = 16, 72
"""Bytes of `struct unix_diag_msg` and `struct inet_diag_msg`; the inode is at 4, and at 68."""
MPTCP = 262
NETWORK_PROTOCOLS = {
    "TCP": (socket.AF_INET, (socket.IPPROTO_TCP, MPTCP)),
    "UDP": (socket.AF_INET, (socket.IPPROTO_UDP,)),
    "TCP6": (socket.AF_INET6, (socket.IPPROTO_TCP, MPTCP)),
    "UDP6": (socket.AF_INET6, (socket.IPPROTO_UDP,)),
}
"""Names in /proc/net/sockstat and sockstat6; a connection of MPTCP has a TCP connection below it."""
INET_DIAG_REQ_PROTOCOL = 3
RECEIVE_BYTES = 64 * 1024
TIMEOUT_S = 1.0


def sockets_in_use(*protocols: str) -> int:
    """Return the number of sockets of these protocols in this network namespace. Some ten microseconds."""
    found = 0
    for name in ("sockstat", "sockstat6"):
        with suppress(OSError), open(f"/proc/net/{name}", "rb") as file:
            for line in file:
                protocol, _, fields = line.partition(b":")
                if protocol.decode() in protocols and fields.startswith(b" inuse "):
                    found += int(fields.split()[1])
    return found


class SocketUse(msgspec.Struct):
    """Kernel memory of sockets.

    Attributes:
        bytes: by inode; 0 stands for sockets without an inode.
        network_bytes: the part of these bytes that belongs to TCP and UDP.
        orphans: closed TCP connections whose peer has not received all data.
    """

    bytes: dict[int, int]
    network_bytes: int = 0
    orphans: int = 0


def read_socket_use(*, few: int) -> SocketUse:
    """Return the kernel memory of the sockets of this network namespace. Blocks.

    It covers Unix, TCP and UDP sockets, and is empty if the kernel lacks the interface. It takes a microsecond per
    socket. For TCP and UDP the kernel scans a table of the whole machine, which takes milliseconds, so protocols with
    at most `few` sockets are left out.
    """
    found = SocketUse({})
    unix = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, EVERY_STATE, 0, UDIAG_SHOW_MEMINFO, 0, 0)
    requests = [(unix, UNIX_HEAD, 4, UNIX_DIAG_MEMINFO)]
    for name, (family, protocols) in NETWORK_PROTOCOLS.items():
        for protocol in protocols if sockets_in_use(name) > few else ():
            extensions = 1 << (INET_DIAG_SKMEMINFO - 1)
            inet = struct.pack("=BBBBI48x", family, protocol & 0xFF, extensions, 0, EVERY_STATE)
            if protocol > 0xFF:  # too large for the field: in an attribute
                inet += struct.pack("=HHI", 8, INET_DIAG_REQ_PROTOCOL, protocol)
            requests.append((inet, INET_HEAD, 68, INET_DIAG_SKMEMINFO))
    for request, head, inode_at, attribute in requests:
        with suppress(OSError, struct.error):
            for body in _dump(request):
                (inode,) = struct.unpack_from("=I", body, inode_at)
                size = _memory(body[head:], attribute)
                found.bytes[inode] = found.bytes.get(inode, 0) + size
                if attribute == INET_DIAG_SKMEMINFO:
                    found.network_bytes += size
                    found.orphans += inode == 0 and body[1] in CLOSING_STATES
    return found


def _dump(request: bytes) -> Iterator[bytes]:
    """Yield the bodies of the kernel's answers."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as channel:
        channel.settimeout(TIMEOUT_S)
        header = struct.pack("=IHHII", 16 + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP, 1, 0)
        channel.sendto(header + request, (0, 0))
        while True:
            data = channel.recv(RECEIVE_BYTES)
            while data:
                length, kind = struct.unpack_from("=IH", data)
                if kind in (NLMSG_DONE, NLMSG_ERROR) or length < 16:
                    return
                yield data[16:length]
                data = data[(length + 3) & ~3 :]


def _memory(attributes: bytes, wanted: int) -> int:
    while len(attributes) >= 4:
        length, kind = struct.unpack_from("=HH", attributes)
        if kind == wanted and length >= 4 + 4 * SK_MEMINFO_VARS - 4:
            values = struct.unpack_from(f"={(length - 4) // 4}I", attributes, 4)
            return sum(values[index] for index in TAKEN)
        if length < 4:
            break
        attributes = attributes[(length + 3) & ~3 :]
    return 0


class Mappings(NamedTuple):
    """The number of mappings of a process when it had this size."""

    size_kib: int
    number: int


class Holdings(msgspec.Struct):
    """The kernel objects and kernel memory that all processes hold together.

    Attributes:
        files: open files; a table shared by several processes counts once.
        watches: files that epoll instances watch.
        in_flight: files that were sent through Unix sockets and not received.
        buried: Unix sockets that no process has open, which may hold more files; only determined if some are in flight,
            and if the network is the sandbox's own.
        locks: file locks.
        mappings: as far as they are counted, see `MANY_MAPPINGS`; each may hold a file open that no table contains.
        network_bytes: buffers of TCP and UDP; only if the network is the sandbox's own.
        orphans: closed but unfinished connections; likewise.
        filters: system call filters of all threads together, beyond the ones of every process in a sandbox.
        kernel_bytes: kernel memory by process id: page tables, mappings, pipes, socket buffers. 0 stands for memory
            that no process has open.
    """

    files: int = 0
    watches: int = 0
    in_flight: int = 0
    buried: int = 0
    locks: int = 0
    mappings: int = 0
    network_bytes: int = 0
    orphans: int = 0
    filters: int = 0
    kernel_bytes: dict[int, int] = {}


def measure_holdings(
    pids: Iterable[int],
    *,
    most: int,
    memory_bytes: int,
    own_network: bool,
    mappings: dict[int, Mappings],
    own_devices: Collection[int] = (),
) -> Holdings:
    """Measure these processes. Blocks: some 3 us for each open file, 1 ms for each 2,000 watches, and 15 us a process.

    Args:
        pids: the processes.
        most: the counting of files, watches and locks stops above this number.
        memory_bytes: mappings are counted one by one if they may take half of this.
        own_network: all sockets of this network namespace belong to the sandbox.
        mappings: earlier counts, by process id; updated. A check counts for `COUNTING_S`, and the next one continues.
        own_devices: file systems on which only the sandbox has files.
    """
    found = Holdings(kernel_bytes={})
    holders: dict[int, int] = {}
    pipes: set[str] = set()
    sizes: dict[int, int] = {}
    filters_of_all = _read_status("self").get(_FILTERS, 0)
    for pid in pids:
        status = _read_status(pid)
        found.filters += _count_filters(pid, status, filters_of_all)
        found.kernel_bytes[pid] = 1024 * status.get(b"VmPTE", 0)
        sizes[pid] = status.get(b"VmSize", 0)
        for table in _tables(pid, status.get(b"Threads", 1)):
            before = len(pipes)
            _look_at(table, found, holders, pipes, pid, most)
            found.kernel_bytes[pid] += PIPE_BYTES * (len(pipes) - before)
    found.locks = max(found.locks, _listed_locks(sizes, own_devices, most))
    possible = sum(min(MAX_MAPPINGS, size // MIN_MAPPING_KIB) for size in sizes.values())
    if possible > min(MANY_MAPPINGS, memory_bytes // 2 // MAPPING_BYTES):
        _count_mappings(sizes, mappings)
        for pid, counted in mappings.items():
            found.kernel_bytes[pid] += MAPPING_BYTES * counted.number
            found.mappings += counted.number
    if found.in_flight or len(holders) > FEW_SOCKETS or sockets_in_use(*NETWORK_PROTOCOLS) > FEW_SOCKETS:
        _add_sockets(found, holders, own_network=own_network)
    return found


def _add_sockets(found: Holdings, holders: dict[int, int], *, own_network: bool) -> None:
    own = _own_sockets()
    use = read_socket_use(few=FEW_SOCKETS)
    measured = use.bytes
    if own_network:
        found.network_bytes, found.orphans = use.network_bytes, use.orphans
    for inode, size in measured.items():
        if inode in holders:
            pid = holders[inode]
            found.kernel_bytes[pid] = found.kernel_bytes.get(pid, 0) + size
        elif own_network and inode not in own:
            found.kernel_bytes[0] = found.kernel_bytes.get(0, 0) + size
    others = [inode for inode in holders if inode not in measured]
    for inode in others[MOST_OTHERS:]:
        found.kernel_bytes[holders[inode]] += OTHER_SOCKET_BYTES
    if found.in_flight and own_network:
        found.buried = sum(inode not in holders and inode not in own for inode in _unix_sockets())


def _look_at(table: str, found: Holdings, holders: dict[int, int], pipes: set[str], pid: int, most: int) -> None:
    """Add the open files of a table, given by its folder in /proc."""
    try:
        if found.files + _count_files(table) > most:
            found.files = most + 1
            return
        names = os.listdir(f"{table}/fd")
        found.files += len(names)
        for name in names if found.files <= most else ():
            _look_at_file(table, name, found, holders, pipes, pid, most)
    except PermissionError:
        # A program that may not be read, or that asked not to be inspected. The number is visible nevertheless.
        files = _count_files(table)
        found.files += files
        found.watches += (files // 2) ** 2 if files > FEW_UNSEEN else 0
    except OSError:
        return


def _look_at_file(
    table: str, name: str, found: Holdings, holders: dict[int, int], pipes: set[str], pid: int, most: int
) -> None:
    try:
        target = os.readlink(f"{table}/fd/{name}")
    except FileNotFoundError:  # it was closed in between
        return
    if target == EVENTPOLL:
        if found.watches <= most:
            found.watches += _count(f"{table}/fdinfo/{name}", b"tfd:", most)
    elif target.startswith(SOCKET):
        holders.setdefault(int(target[len(SOCKET) : -1]), pid)
        found.in_flight += _in_flight(f"{table}/fdinfo/{name}")
    elif target.startswith(PIPE):
        pipes.add(target)
    if found.locks <= most:  # the kernel locks everything that can be opened, including pipes and sockets
        found.locks += _count(f"{table}/fdinfo/{name}", b"lock:", most)


def _tables(pid: int, threads: int) -> Iterator[str]:
    """Yield folders in /proc of the different file tables of a process: its threads may have their own."""
    if threads <= 1:
        yield f"/proc/{pid}"
        return
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    seen: list[int] = []
    for task in map(int, tasks):
        if not any(_share_files(task, other) for other in seen):
            seen.append(task)
            yield f"/proc/{pid}/task/{task}"


def _share_files(task: int, other: int) -> bool:
    """Return whether two tasks share one table. False if that is unknown."""
    number = _KCMP.get(os.uname().machine)
    return number is not None and _libc().syscall(number, task, other, _KCMP_FILES, 0, 0) == 0


@functools.cache
def _libc() -> Any:
    import ctypes  # here, because a sandbox without threads never needs it

    return ctypes.CDLL(None)


_KCMP = {"x86_64": 312, "aarch64": 272}
"""The number of `kcmp`, by machine."""
_KCMP_FILES = 2


def _count_files(table: str) -> int:
    """Return the number of open files (Linux 6.2 and later: the size of the folder; before: the table's size)."""
    with suppress(OSError):
        if files := os.stat(f"{table}/fd").st_size:
            return files
    found = _TABLE_SIZE.search(next(_pieces(f"{table}/status"), b""))
    return 0 if found is None else int(found[1])


_TABLE_SIZE = re.compile(rb"^FDSize:\s+([0-9]+)", re.MULTILINE)


def _count(path: str, word: bytes, most: int) -> int:
    """Count the lines that begin with `word`. Stops with the current count above `most`."""
    counted, rest = 0, b"\n"
    for piece in _pieces(path):
        text = rest + piece
        counted += text.count(b"\n" + word)
        if counted > most:
            break
        rest = text[-len(word) :] if word else b""
    return counted


def _listed_locks(pids: Container[int], devices: Collection[int], most: int) -> int:
    """Return the number of locks that the kernel lists for these processes, and of open files of these devices.

    The list includes locks of inaccessible processes, and of open files that are in no process's table because they are
    mapped or in flight.
    """
    counted, rest, own = 0, b"", {(os.major(device), os.minor(device)) for device in devices}
    for piece in _pieces("/proc/locks"):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            found = _LISTED_LOCK.search(line)
            if found is None:
                continue
            pid = int(found[1])
            counted += pid in pids if pid >= 0 else (int(found[2], 16), int(found[3], 16)) in own
        if counted > most:
            break
    return counted


_LISTED_LOCK = re.compile(rb" (-?[0-9]+) ([0-9a-f]+):([0-9a-f]+):[0-9]+ ")


def _in_flight(path: str) -> int:
    for piece in _pieces(path):
        _, found, number = piece.partition(b"\nscm_fds:")
        return int(number.split(None, 1)[0]) if found else 0
    return 0


def _pieces(path: str) -> Iterator[bytes]:
    """Yield the content of a file in /proc: one piece unless it is long, and nothing if the process has ended.

    It reads without a buffer, which would take as long as the reading.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        while piece := os.read(fd, READ_BYTES):
            yield piece
    except OSError:  # the process has ended
        return
    finally:
        os.close(fd)


def _count_mappings(sizes: dict[int, int], mappings: dict[int, Mappings]) -> None:
    """Count the mappings of processes whose size has changed, the largest first, for `COUNTING_S`."""
    until_s = time.monotonic() + COUNTING_S
    for pid in mappings.keys() - sizes.keys():
        del mappings[pid]
    for pid, size in sorted(sizes.items(), key=lambda item: item[1], reverse=True):
        if pid in mappings and mappings[pid].size_kib == size:
            continue
        if time.monotonic() > until_s:
            break
        mappings[pid] = Mappings(size, _count(f"/proc/{pid}/maps", b"", MAX_MAPPINGS))


def _count_filters(pid: int, status: dict[bytes, int], of_all: int) -> int:
    """Return the number of system call filters that the threads of a process have set or inherited."""
    if status.get(b"Threads", 1) <= 1:
        return max(0, status.get(_FILTERS, 0) - of_all)
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0
    return sum(max(0, _read_status(f"{pid}/task/{task}").get(_FILTERS, 0) - of_all) for task in tasks)


def _read_status(task: int | str) -> dict[bytes, int]:
    """Return the numbers in the status of a task (its path in /proc) by name; sizes are in KiB."""
    text = next(_pieces(f"/proc/{task}/status"), b"")
    return {name: int(value) for name, value in _IN_STATUS.findall(text)}


_FILTERS = b"Seccomp_filters"
"""Available since Linux 5.9."""
_IN_STATUS = re.compile(rb"^(VmPTE|VmSize|Threads|Seccomp_filters):\s+([0-9]+)", re.MULTILINE)


def _own_sockets() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add(status.st_ino)
    return found


def _unix_sockets() -> list[int]:
    """Return the inodes of the Unix sockets of this network namespace, as far as they have one."""
    with suppress(OSError), open("/proc/net/unix", "rb") as file:
        next(file, None)
        return [int(line.split(None, 7)[6]) for line in file]
    return []
