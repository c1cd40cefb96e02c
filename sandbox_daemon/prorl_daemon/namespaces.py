"""A fork into new namespaces, and their setup as a sandbox: by system calls, without another program.

The caller is in the future root of the sandbox, read-only, with the machine's own /proc; see `fork_server`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
from typing import TYPE_CHECKING, Any

from prorl_daemon.limits import drop_privileges, hold_proc
from prorl_ipc.proc_files import hidden_proc

if TYPE_CHECKING:
    from prorl_ipc.limits import NamespaceLimits

CLONE3 = 435
"""The system call's number, on every architecture. It lets a fork choose its namespaces and its parent."""
CLONE_PARENT = 0x8000
CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x200000, 0x1000000
NEW_NAMESPACES = sum(
    {
        "mnt": 0x20000,
        "cgroup": 0x2000000,
        "uts": 0x4000000,
        "ipc": 0x8000000,
        "user": 0x10000000,
        "pid": 0x20000000,
        "net": 0x40000000,
    }.values()
)
PR_SET_PDEATHSIG, PR_GET_TID_ADDRESS = 1, 40

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    *(1, 2, 4, 8, 32),
    *(0x1000, 0x4000, 0x40000),
)
PLAIN = MS_NOSUID | MS_NODEV
EMPTY_FILE, EMPTY_FOLDER = "/etc/empty", "/srv"
HOSTNAME = "sandbox"
USER_LIMITS = ("max_user_namespaces", "max_inotify_instances", "max_inotify_watches")
SIOCSIFFLAGS = 0x8914
IFF_UP, IFF_RUNNING = 0x1, 0x40

_libc: Any = ctypes.PyDLL(None, use_errno=True)
"""Called with the interpreter's lock held: no other thread may run between a fork and Python's handling after it."""
_libc.syscall.restype = ctypes.c_long


class _CloneArguments(ctypes.Structure):
    """`struct clone_args` of the kernel, in its first form."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size", "tls")
    ]


def fork_apart(*, sibling: bool) -> int:
    """Fork this single-threaded process into new namespaces of every kind; return 0 in the new process.

    Its user namespace lacks users, and its other namespaces are in their initial state: see `settle`. It has all
    capabilities inside, and none outside. With `sibling` it is a child of this process's parent.

    Raises:
        OSError: the kernel does not allow it.
    """
    thread_id = ctypes.c_void_p()
    # Where the C library stores this thread's id: its own `fork` has the kernel write the new one there.
    known = _libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(thread_id), 0, 0, 0) == 0
    flags = NEW_NAMESPACES | (CLONE_PARENT if sibling else 0)
    flags |= CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID if known else 0
    arguments = _CloneArguments(flags=flags, exit_signal=0 if sibling else signal.SIGCHLD)
    if known:
        arguments.child_tid = thread_id.value or 0
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = _libc.syscall(CLONE3, ctypes.byref(arguments), ctypes.c_size_t(ctypes.sizeof(arguments)))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    number = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, f"clone3: {os.strerror(number)}")
    return pid


def settle(*, uid: int, gid: int, home: str, disk_bytes: int, limits: NamespaceLimits) -> None:
    """Set up a sandbox in the new namespaces of this process, and drop all capabilities permanently.

    Args:
        uid: user of the process that forked this one; the only user inside.
        gid: group of that process; the only group.
        home: the home directory, a mount point of the root.
        disk_bytes: size of each file system in memory.
        limits: limits to set before any process inside could interfere.

    Raises:
        OSError: it failed; no process may be started then.
    """
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("proc", "/proc", "proc", PLAIN | MS_NOEXEC)
    _bound(limits)
    hold_proc()
    _mount("/proc", "/proc", None, MS_BIND)
    _mount(None, "/proc", None, MS_BIND | MS_REMOUNT | MS_RDONLY | PLAIN | MS_NOEXEC)
    for path, is_folder in hidden_proc():
        _mount(EMPTY_FOLDER if is_folder else EMPTY_FILE, path, None, MS_BIND)
    _mount(
        "devpts",
        "/dev/pts",
        "devpts",
        MS_NOSUID | MS_NOEXEC,
        f"newinstance,ptmxmode=0666,mode=620,max={limits.max_ptys}",
    )
    for path, mode in (("/dev/shm", "1777"), ("/tmp", "1777"), (home, "0700")):
        _mount("tmpfs", path, "tmpfs", PLAIN, f"size={disk_bytes},mode={mode}")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP | IFF_RUNNING))
    socket.sethostname(HOSTNAME)
    os.chdir("/")
    drop_privileges(kept=())
    end_with_parent()  # last: a change of credentials would undo it


def _bound(limits: NamespaceLimits) -> None:
    """Set the limits in /proc/sys of these namespaces; terminals are limited by a mount option."""
    for name in USER_LIMITS:
        _write(f"/proc/sys/user/{name}", str(getattr(limits, name)))
    if limits.pid_max:
        _write("/proc/sys/kernel/pid_max", str(limits.pid_max))


def end_with_parent() -> None:
    """Make the kernel kill this process when the parent's thread that started it, or its sibling, ends."""
    if _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, options)]
    if _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount of {kind or source or 'flags'} on {target}: {os.strerror(number)}")
