"""The kernel memory of sockets, asked of the kernel by `sock_diag` (man 7 sock_diag): what `ss -m` shows."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_REQUEST_DUMP = 0x301
EVERY_STATE = 0xFFFFFFFF
UDIAG_SHOW_MEMINFO = 0x20
UNIX_DIAG_MEMINFO = 5
INET_DIAG_SKMEMINFO = 7
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


def read_socket_bytes(*, few: int) -> dict[int, int]:
    """Return the bytes that the sockets of this network namespace take, by inode; 0: of those without one. Blocks.

    Unix, TCP and UDP sockets; those of other kinds are left out, and all where the kernel has no such interface. A
    microsecond a socket; for TCP and UDP the kernel looks through a table of the whole machine, which takes
    milliseconds, so protocols with not more than `few` sockets are left out.
    """
    found: dict[int, int] = {}
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
                found[inode] = found.get(inode, 0) + _memory(body[head:], attribute)
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
