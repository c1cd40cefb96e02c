"""Kernel memory and kernel objects that processes hold by their open files and mappings, read from /proc.

The kernel counts most of them for the user, who is the same in all sandboxes and in the node, or for the machine.
Without a control group of the sandbox nothing else bounds them.
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
"""The least that a full pipe takes. The kernel bounds for the user what its pipes take beyond that."""
MAPPING_BYTES = 256
"""About what the kernel takes for a mapping, without its page tables."""
MAX_MAPPINGS = 65_530
"""The most of a process: the kernel's default for `vm.max_map_count`."""
MIN_MAPPING_KIB = 4
MANY_MAPPINGS = 131_072
"""Mappings are counted one by one only if processes of this size may have more of them."""
COUNTING_S = 0.5
"""Mappings are counted for so long in one look: some microseconds each."""
FEW_SOCKETS = 16
"""Buffers of so many sockets are not asked for: a Unix socket's take 0.5 MiB at most, those of TCP 10."""
MOST_OTHERS = 64
OTHER_SOCKET_BYTES = 8 * 1024 * 1024
"""The most that is assumed of a socket that cannot be asked for (UDP-Lite, raw), beyond the first few of them."""
FEW_UNSEEN = 64
"""A process whose files cannot be looked at is not suspected of anything below this number."""
READ_BYTES = 64 * 1024
EVENTPOLL, SOCKET, PIPE = "anon_inode:[eventpoll]", "socket:[", "pipe:["

# Of the kernel's `sock_diag` (man 7 sock_diag), which `ss -m` asks.
NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_REQUEST_DUMP = 0x301
EVERY_STATE = 0xFFFFFFFF
UDIAG_SHOW_MEMINFO = 0x20
UNIX_DIAG_MEMINFO = 5
INET_DIAG_SKMEMINFO = 7
CLOSING_STATES = (4, 5, 9, 11)
"""TCP_FIN_WAIT1, FIN_WAIT2, LAST_ACK, CLOSING: a connection that is closed here, and not over."""
SK_MEMINFO_VARS = 9
TAKEN = (0, 2, 4, 5, 6, 7)
"""Bytes that are taken now, of these variables: receive, send, forward allocation, queued, option, backlog."""
UNIX_HEAD, INET_HEAD = 16, 72
"""Bytes of `struct unix_diag_msg` and `struct inet_diag_msg`; the inode is at 4, and at 68."""
MPTCP = 262
NETWORK_PROTOCOLS = {
    "TCP": (socket.AF_INET, (socket.IPPROTO_TCP, MPTCP)),
    "UDP": (socket.AF_INET, (socket.IPPROTO_UDP,)),
    "TCP6": (socket.AF_INET6, (socket.IPPROTO_TCP, MPTCP)),
    "UDP6": (socket.AF_INET6, (socket.IPPROTO_UDP,)),
}
"""By their names in /proc/net/sockstat and sockstat6; a connection of MPTCP has one of TCP below it."""
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
    """What sockets take in the kernel.

    Attributes:
        bytes: by inode; 0: of those without one.
        network_bytes: the bytes among these of TCP and UDP.
        orphans: TCP connections that are closed, and whose other end has not taken what was sent.
    """

    bytes: dict[int, int]
    network_bytes: int = 0
    orphans: int = 0


def read_socket_use(*, few: int) -> SocketUse:
    """Return what the sockets of this network namespace take. Blocks.

    Unix, TCP and UDP sockets; those of other kinds are left out, and all where the kernel has no such interface. A
    microsecond a socket; for TCP and UDP the kernel looks through a table of the whole machine, which takes
    milliseconds, so protocols with not more than `few` sockets are left out.
    """
    found = SocketUse({})
    unix = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, EVERY_STATE, 0, UDIAG_SHOW_MEMINFO, 0, 0)
    requests = [(unix, UNIX_HEAD, 4, UNIX_DIAG_MEMINFO)]
    for name, (family, protocols) in NETWORK_PROTOCOLS.items():
        for protocol in protocols if sockets_in_use(name) > few else ():
            extensions = 1 << (INET_DIAG_SKMEMINFO - 1)
            inet = struct.pack("=BBBBI48x", family, protocol & 0xFF, extensions, 0, EVERY_STATE)
            if protocol > 0xFF:  # more than the field holds: in an attribute
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
    """The bodies of the messages that the kernel answers with."""
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
    """The number of mappings that a process of this size was seen to have."""

    size_kib: int
    number: int


class Holdings(msgspec.Struct):
    """The kernel objects and kernel memory that all processes hold together.

    Attributes:
        files: open files, those of a table that several processes share once.
        watches: files that epoll instances watch.
        in_flight: files that were sent through Unix sockets and not received.
        buried: Unix sockets that no process has open, which may hold more of them; only looked for if some are in
            flight, and if the network is the sandbox's own.
        locks: of files.
        mappings: as far as they are counted, see `MANY_MAPPINGS`; each may keep a file open that no table has.
        network_bytes: buffers of TCP and UDP; only if the network is the sandbox's own.
        orphans: connections that are closed and not over; likewise.
        filters: of system calls, of all threads together, beyond those that everything in a sandbox has.
        kernel_bytes: memory of the kernel by process id: page tables, mappings, pipes, buffers of sockets. What no
            process has open is that of 0.
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
    """Look at these processes. Blocks: some 3 us for each open file, 1 ms for each 2,000 watches, and 15 us a process.

    Args:
        pids: the processes.
        most: the counting of files, watches and locks stops above this number.
        memory_bytes: mappings are counted one by one if they may take half of this.
        own_network: all sockets of this network namespace are the sandbox's.
        mappings: what was counted before, by process id; changed. A look counts for `COUNTING_S`, and the next goes on.
        own_devices: file systems that nobody else has files of.
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
    """Add what is open in a table of files, named by its folder in /proc."""
    try:
        if found.files + _count_files(table) > most:
            found.files = most + 1
            return
        names = os.listdir(f"{table}/fd")
        found.files += len(names)
        for name in names if found.files <= most else ():
            _look_at_file(table, name, found, holders, pipes, pid, most)
    except PermissionError:
        # A program that may not be read, or that asked not to be looked at. The number can be seen nevertheless.
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
    except FileNotFoundError:  # closed since
        return
    if target == EVENTPOLL:
        if found.watches <= most:
            found.watches += _count(f"{table}/fdinfo/{name}", b"tfd:", most)
    elif target.startswith(SOCKET):
        holders.setdefault(int(target[len(SOCKET) : -1]), pid)
        found.in_flight += _in_flight(f"{table}/fdinfo/{name}")
    elif target.startswith(PIPE):
        pipes.add(target)
    if found.locks <= most:  # the kernel locks whatever can be opened: pipes and sockets as well
        found.locks += _count(f"{table}/fdinfo/{name}", b"lock:", most)


def _tables(pid: int, threads: int) -> Iterator[str]:
    """Folders in /proc of the different tables of files that a process has: its threads may have their own."""
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
    """Return whether two tasks have one table. False if that cannot be told."""
    number = _KCMP.get(os.uname().machine)
    return number is not None and _libc().syscall(number, task, other, _KCMP_FILES, 0, 0) == 0


@functools.cache
def _libc() -> Any:
    import ctypes  # here, because a sandbox without threads does without

    return ctypes.CDLL(None)


_KCMP = {"x86_64": 312, "aarch64": 272}
"""The number of `kcmp`, by machine."""
_KCMP_FILES = 2


def _count_files(table: str) -> int:
    """The number of open files, which Linux 6.2 and later show as the size of the folder; before, the table's size."""
    with suppress(OSError):
        if files := os.stat(f"{table}/fd").st_size:
            return files
    found = _TABLE_SIZE.search(next(_pieces(f"{table}/status"), b""))
    return 0 if found is None else int(found[1])


_TABLE_SIZE = re.compile(rb"^FDSize:\s+([0-9]+)", re.MULTILINE)


def _count(path: str, word: bytes, most: int) -> int:
    """Count the lines that begin with `word`. Stops, with what it has, above `most`."""
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

    Such a list has what is locked by a process that may not be looked at, and by open files that no process has in its
    table: those that are mapped, or in flight.
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

    Without a buffer, which takes as long as reading.
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
    """Count those of processes whose size has changed, the largest first, for `COUNTING_S`."""
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
    """The filters of system calls that the threads of a process have put on themselves, or inherited from such."""
    if status.get(b"Threads", 1) <= 1:
        return max(0, status.get(_FILTERS, 0) - of_all)
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0
    return sum(max(0, _read_status(f"{pid}/task/{task}").get(_FILTERS, 0) - of_all) for task in tasks)


def _read_status(task: int | str) -> dict[bytes, int]:
    """The numbers in the status of a task, named by its path in /proc, by name: sizes are in KiB."""
    text = next(_pieces(f"/proc/{task}/status"), b"")
    return {name: int(value) for name, value in _IN_STATUS.findall(text)}


_FILTERS = b"Seccomp_filters"
"""Since Linux 5.9."""
_IN_STATUS = re.compile(rb"^(VmPTE|VmSize|Threads|Seccomp_filters):\s+([0-9]+)", re.MULTILINE)


def _own_sockets() -> set[int]:
    """The inodes of this process's own sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add(status.st_ino)
    return found


def _unix_sockets() -> list[int]:
    """The inodes of the Unix sockets of this network namespace, as far as they have one."""
    with suppress(OSError), open("/proc/net/unix", "rb") as file:
        next(file, None)
        return [int(line.split(None, 7)[6]) for line in file]
    return []
