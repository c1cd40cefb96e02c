"""Sets limits of other namespaces from outside: on their processes, and on resources shared by the whole machine.

Since Linux 6.14 each PID namespace has its own `pid_max`, written by one of its processes. It stops a fork bomb
however busy the machine is. A user namespace limits inotify instances, a devpts mount limits terminals.
Processes inside a sandbox may not write these, so this process makes a child that joins from outside. Standard library
only, without imports from this project: it runs as `python -I -S pid_setter.py FD`, one small process for each node,
and ends with the socket FD.

It cannot change the machine's own settings. First it gives up being user 0, to whom an older kernel would allow that.
The child that writes has only the capabilities over the sandbox's user namespace.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_ANSWER_BYTES = 512
NOTHING = b"-"
"""The answer without a problem."""

PID_MAX_FILE = "/proc/sys/kernel/pid_max"
OWN_NAMESPACE = "/proc/self/ns/pid"
OWN_USER_NAMESPACE = "/proc/self/ns/user"
USER_LIMITS = ("max_user_namespaces", "max_inotify_instances", "max_inotify_watches")
"""Below /proc/sys/user: limits of a process's user namespace and its descendants."""
DEVPTS = b"/dev/pts"
PROC = b"/proc"
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
NS_GET_USERNS = 0xB701
NS_GET_PARENT = 0xB702
PR_SET_DUMPABLE = 4
PR_SET_SECUREBITS = 28
KEEP_CAPABILITIES = 1 << 2
"""SECBIT_NO_SETUID_FIXUP: capabilities do not depend on the user."""
NOBODY = 65534
PROBED_PID_MAX = 1024
MAX_REQUEST_BYTES = 64

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def give_up_root() -> None:
    """Become a user without write access to the machine's settings; as root, keep root's capabilities for joining.

    Processes inside the joined namespaces may not inspect this process or its children.
    """
    if os.geteuid() == 0:
        _check(_libc.prctl(PR_SET_SECUREBITS, KEEP_CAPABILITIES, 0, 0, 0), "prctl(PR_SET_SECUREBITS)")
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _check(_libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def probe() -> str:
    """Write it in a new namespace and check that the machine's own value is unchanged.

    Return the problem, or nothing.
    """
    try:
        before = _read()
        _in_child(_probe_private)
    except OSError as exc:
        return str(exc.strerror)
    return "" if _read() == before else "the kernel has one kernel.pid_max for all PID namespaces"


def _probe_private() -> None:
    _check(_libc.unshare(CLONE_NEWUSER), "unshare(CLONE_NEWUSER)")
    _check(_libc.unshare(CLONE_NEWPID), "unshare(CLONE_NEWPID)")
    here = os.stat(OWN_NAMESPACE).st_ino
    _in_child(lambda: _write(PROBED_PID_MAX, os.stat(OWN_NAMESPACE).st_ino, here))


def set_pid_max(namespace: int, pid_max: int) -> None:
    """Set it for the PID namespace of the descriptor `namespace`, which must be a child of this process's own.

    Raises:
        OSError: the descriptor is wrong, the namespace cannot be joined, or the setting may not be written.
    """
    here = os.stat(OWN_NAMESPACE).st_ino
    wanted = os.fstat(namespace).st_ino
    parent = fcntl.ioctl(namespace, NS_GET_PARENT)
    try:
        if wanted == here or os.fstat(parent).st_ino != here:
            raise OSError(errno.EINVAL, "not a PID namespace of a sandbox")
    finally:
        os.close(parent)
    _in_child(lambda: _set_from_inside(namespace, pid_max, wanted, here))


def _set_from_inside(namespace: int, pid_max: int, wanted: int, here: int) -> None:
    owner = fcntl.ioctl(namespace, NS_GET_USERNS)
    _check(_libc.setns(owner, CLONE_NEWUSER), "setns(CLONE_NEWUSER)")
    _check(_libc.setns(namespace, CLONE_NEWPID), "setns(CLONE_NEWPID)")
    _in_child(lambda: _write(pid_max, wanted, here))


def bound_shared(namespace: int, mounts: int, limits: list[int]) -> None:
    """Set `USER_LIMITS` and then the ptys of the sandbox with these descriptors of its PID and mount namespace.

    Also make its /proc read-only.

    Raises:
        OSError: they do not belong to a sandbox, cannot be joined, or may not be changed.
    """
    owner = fcntl.ioctl(namespace, NS_GET_USERNS)
    try:
        here = os.stat(OWN_USER_NAMESPACE).st_ino
        if os.fstat(owner).st_ino == here or len(limits) != len(USER_LIMITS) + 1:
            raise OSError(errno.EINVAL, "not the namespaces of a sandbox")
        _in_child(lambda: _bound_from_inside(owner, mounts, limits, here))
    finally:
        os.close(owner)


def _bound_from_inside(owner: int, mounts: int, limits: list[int], here: int) -> None:
    _check(_libc.setns(owner, CLONE_NEWUSER), "setns(CLONE_NEWUSER)")
    if os.stat(OWN_USER_NAMESPACE).st_ino == here:
        raise OSError(errno.EXDEV, "not in the sandbox's user namespace")
    for name, limit in zip(USER_LIMITS, limits, strict=False):
        with open(f"/proc/sys/user/{name}", "wb") as file:
            file.write(b"%d" % limit)
    _check(_libc.setns(mounts, CLONE_NEWNS), "setns(CLONE_NEWNS)")
    options = b"mode=620,ptmxmode=666,max=%d" % limits[-1]
    flags = MS_REMOUNT | MS_NOSUID | MS_NOEXEC
    _check(_libc.mount(b"devpts", DEVPTS, b"devpts", flags, options), "mount(/dev/pts)")
    # Over the writable one, of which the daemon holds a descriptor: root inside owns the daemon's files.
    _check(_libc.mount(PROC, PROC, None, MS_BIND | MS_REC, None), "mount(/proc)")
    flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
    _check(_libc.mount(None, PROC, None, flags, None), "mount(/proc, read-only)")


def _write(pid_max: int, wanted: int, outside: int) -> None:
    """Write `pid_max` in the namespace `wanted`, after proving that this process is inside."""
    if os.stat(OWN_NAMESPACE).st_ino != wanted or wanted == outside:
        raise OSError(errno.EXDEV, "not in the sandbox's PID namespace")
    with open(PID_MAX_FILE, "wb") as file:
        file.write(b"%d" % pid_max)
    if _read() != pid_max:
        raise OSError(errno.EIO, f"{PID_MAX_FILE} did not change")


def _read() -> int:
    with open(PID_MAX_FILE, "rb") as file:  # as bytes: without access rights, no codec can be loaded
        return int(file.read())


def _in_child(act: Callable[[], None]) -> None:
    """Run `act` in a forked child, and re-raise its error here."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"%d its child failed" % errno.EIO
        try:
            act()
            said = NOTHING
        except OSError as exc:
            said = f"{exc.errno} {exc.strerror}".encode()
        finally:  # in any case, the child must not continue
            with suppress(OSError):
                os.write(writer, said)
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    if said != NOTHING:
        number, _, text = said.decode().partition(" ")
        raise OSError(int(number or errno.EIO), text or "its child was killed")


def serve(channel: socket.socket) -> None:
    """Report whether `pid_max` can be set here, then answer requests until the other end closes.

    A request is that number, with a descriptor of a PID namespace; or the limits of `bound_shared`, with an additional
    descriptor of a mount namespace.
    """
    give_up_root()
    channel.send(probe().encode()[:MAX_ANSWER_BYTES] or NOTHING)
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 2)
        if not request:
            return
        problem = ""
        try:
            if len(descriptors) == 1:
                set_pid_max(descriptors[0], int(request))
            else:
                bound_shared(descriptors[0], descriptors[1], list(map(int, request.split())))
        except OSError as exc:
            problem = str(exc.strerror)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        channel.send(problem.encode()[:MAX_ANSWER_BYTES] or NOTHING)


if __name__ == "__main__":
    with closing(socket.socket(fileno=int(sys.argv[1]))) as channel:
        serve(channel)
