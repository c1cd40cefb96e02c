"""Opens files and folders that tools control, with no more rights than a tool has.

The daemon may open files that its tools may not: its own files in /proc, and, through its descriptors
(`/proc/self/fd`), their targets, such as the writable /proc (`limits.hold_proc`). A tool that names such a path in a
call, or replaces a file by a link to it, must not gain access.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
from typing import Any

OPENAT2 = 437
"""The system call's number, on every architecture; since Linux 5.6."""
RESOLVE_NO_MAGICLINKS = 0x02
AT_FDCWD = -100


def open_path(path: str, flags: int, mode: int = 0) -> int:
    """Open `path` and return its descriptor, which programs do not inherit. Blocks.

    Links are followed, except links in /proc to a process's open files or folders. A terminal does not become the
    daemon's controlling terminal. `mode` is for a new file, and 0 without `O_CREAT`.

    Raises:
        OSError: as `os.open`; `ELOOP` for such a link, and `EACCES` for a file of the daemon's own in /proc.
    """
    flags |= os.O_CLOEXEC | (0 if flags & os.O_PATH else os.O_NOCTTY)
    fd = _openat2(path, flags, mode) if _has_openat2() else os.open(os.path.realpath(path), flags, mode)
    try:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"/proc/{os.getpid()}/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _openat2(path: str, flags: int, mode: int) -> int:
    how = struct.pack("=3Q", flags, mode, RESOLVE_NO_MAGICLINKS)
    while True:
        fd: int = _syscall()(OPENAT2, AT_FDCWD, os.fsencode(path), how, len(how))
        if fd >= 0:
            return fd
        if (number := ctypes.get_errno()) != errno.EINTR:
            raise OSError(number, os.strerror(number), path)


@functools.cache
def _has_openat2() -> bool:
    """Return whether the kernel supports the call, and a container's filter around the node allows it."""
    try:
        os.close(_openat2("/", os.O_PATH | os.O_CLOEXEC, 0))
    except OSError:
        return False
    return True


@functools.cache
def _syscall() -> Any:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
    call.restype = ctypes.c_long
    return call
