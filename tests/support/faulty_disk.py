"""A disk for the ledger that is full, fails, waits, ends the process or is written down, on demand.

It is a SQLite VFS on top of SQLite's own, made with ctypes in the SQLite that Python's `sqlite3` uses.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import sqlite3
import threading
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from prorl_trio.ledger import Disk

if TYPE_CHECKING:
    from collections.abc import Callable

_OPEN_CREATE: Final = 0x4
_numbers = itertools.count(1)


class Step(NamedTuple):
    """A call of the disk. `content` is what was written at `offset`; of a `resize`, `offset` is the new size.

    `sync_folder` makes what was created and removed in the folder `path` durable, `sync` what was written to a file.
    """

    kind: Literal["create", "write", "resize", "sync", "remove", "sync_folder"]
    path: str
    offset: int = 0
    content: bytes = b""


class FaultyDisk(Disk):
    """The real disk until told otherwise. Set the attributes at any time, from any thread.

    Attributes:
        free_bytes: by how much files can still grow; None: no limit.
        write_error, sync_error: an errno that the next calls raise; 0: none. SQLite knows EIO and ENOSPC.
        writable_bytes: how many bytes of a write succeed before `write_error`.
        may_sync: syncs wait while it is not set.
        syncing: set when a sync has begun; whoever waits for it clears it.
        syncs: how many were made, of files.
        before: called with each step before it is made; what it raises ends the step. To write steps down, or to die.

    Raises:
        RuntimeError: Python's SQLite does not let others add a VFS.
    """

    def __init__(self) -> None:
        self.free_bytes: int | None = None
        self.write_error = 0
        self.writable_bytes = 0
        self.sync_error = 0
        self.may_sync = threading.Event()
        self.may_sync.set()
        self.syncing = threading.Event()
        self.syncs = 0
        self.before: Callable[[Step], None] = lambda _step: None
        self.vfs = f"prorl-faulty-{next(_numbers)}"
        _install(self)

    # ------------------------------------------------------------ see `Disk`

    def resize(self, path: Path, size_bytes: int) -> None:
        """See `Disk`."""
        self.before(Step("resize", str(path), size_bytes))
        had_bytes = path.stat().st_size if path.exists() else 0
        self.take(size_bytes - had_bytes)
        super().resize(path, size_bytes)

    def make_folder(self, path: Path) -> None:
        """See `Disk`."""
        self.before(Step("create", str(path)))
        super().make_folder(path)

    def sync_folder(self, path: Path) -> None:
        """See `Disk`."""
        self.before(Step("sync_folder", str(path)))
        super().sync_folder(path)

    # ------------------------------------------------------------ what the files ask

    def take(self, grown_bytes: int) -> None:
        """A file is to grow by so much. Raises OSError."""
        if self.free_bytes is not None:
            if grown_bytes > self.free_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.free_bytes -= grown_bytes

    def allow_sync(self, path: str) -> None:
        """A file is to be synced. Raises OSError."""
        self.before(Step("sync", path))
        self.syncing.set()
        self.may_sync.wait()
        if self.sync_error:
            raise OSError(self.sync_error, os.strerror(self.sync_error))
        self.syncs += 1


# ------------------------------------------------------------ SQLite's side


class _Methods(ctypes.Structure):
    """sqlite3_io_methods, its version 3."""

    _fields_ = [
        ("iVersion", c_int),
        *(
            (name, c_void_p)
            for name in (
                "xClose", "xRead", "xWrite", "xTruncate", "xSync", "xFileSize", "xLock", "xUnlock",
                "xCheckReservedLock", "xFileControl", "xSectorSize", "xDeviceCharacteristics", "xShmMap",
                "xShmLock", "xShmBarrier", "xShmUnmap", "xFetch", "xUnfetch",
            )
        ),
    ]  # fmt: skip


class _File(ctypes.Structure):
    """sqlite3_file."""

    _fields_ = [("methods", POINTER(_Methods))]


_OPEN = CFUNCTYPE(c_int, c_void_p, c_void_p, POINTER(_File), c_int, POINTER(c_int))
_DELETE = CFUNCTYPE(c_int, c_void_p, c_char_p, c_int)
_WRITE = CFUNCTYPE(c_int, POINTER(_File), c_void_p, c_int, c_int64)
_TRUNCATE = CFUNCTYPE(c_int, POINTER(_File), c_int64)
_SYNC = CFUNCTYPE(c_int, POINTER(_File), c_int)
_SIZE = CFUNCTYPE(c_int, POINTER(_File), POINTER(c_int64))


class _Vfs(ctypes.Structure):
    """sqlite3_vfs, its version 3."""

    _fields_ = [
        ("iVersion", c_int), ("szOsFile", c_int), ("mxPathname", c_int), ("pNext", c_void_p), ("zName", c_char_p),
        ("pAppData", c_void_p), ("xOpen", _OPEN), ("xDelete", _DELETE),
        *(
            (name, c_void_p)
            for name in (
                "xAccess", "xFullPathname", "xDlOpen", "xDlError", "xDlSym", "xDlClose", "xRandomness", "xSleep",
                "xCurrentTime", "xGetLastError", "xCurrentTimeInt64", "xSetSystemCall", "xGetSystemCall",
                "xNextSystemCall",
            )
        ),
    ]  # fmt: skip


_kept: list[Any] = []
"""What SQLite has pointers to, for as long as the process lives."""


def _install(disk: FaultyDisk) -> None:
    library = _sqlite()
    library.sqlite3_vfs_find.restype = POINTER(_Vfs)
    base = library.sqlite3_vfs_find(None)
    vfs = _Vfs()
    ctypes.memmove(ctypes.byref(vfs), base, ctypes.sizeof(_Vfs))
    vfs.zName = disk.vfs.encode()
    methods: dict[int, _Methods] = {}
    original: dict[int, tuple[Any, Any, Any, Any]] = {}
    paths: dict[int, str] = {}

    def key(file: Any) -> int:
        return ctypes.addressof(file.contents)

    def wrapped(of: Any) -> _Methods:
        at = ctypes.addressof(of.contents)
        if at not in methods:
            table = _Methods()
            ctypes.memmove(ctypes.byref(table), of, ctypes.sizeof(_Methods))
            calls = (_WRITE(write), _TRUNCATE(truncate), _SYNC(sync))
            table.xWrite, table.xTruncate, table.xSync = (ctypes.cast(call, c_void_p) for call in calls)
            own = of.contents
            methods[at] = table
            original[ctypes.addressof(table)] = (
                _WRITE(own.xWrite), _TRUNCATE(own.xTruncate), _SYNC(own.xSync), _SIZE(own.xFileSize)
            )  # fmt: skip
            _kept.append((table, calls))
        return methods[at]

    def own(file: Any) -> tuple[Any, Any, Any, Any]:
        return original[ctypes.addressof(file.contents.methods.contents)]

    def size_of(file: Any) -> int:
        size = c_int64()
        own(file)[3](file, ctypes.byref(size))
        return size.value

    def open_file(_vfs: Any, name: int | None, file: Any, flags: int, out: Any) -> int:
        path = os.fsdecode(ctypes.string_at(name)) if name else ""  # SQLite's pointer goes on: more lies behind it
        if flags & _OPEN_CREATE and path and not os.path.exists(path):
            disk.before(Step("create", path))
        code = base.contents.xOpen(ctypes.cast(base, c_void_p), name, file, flags, out)
        if code == sqlite3.SQLITE_OK and path:
            paths[key(file)] = path
            file.contents.methods = ctypes.pointer(wrapped(file.contents.methods))
        return int(code)

    def delete(_vfs: Any, name: bytes, sync_folder: int) -> int:
        path = os.fsdecode(name)
        disk.before(Step("remove", path))
        code = int(base.contents.xDelete(ctypes.cast(base, c_void_p), name, sync_folder))
        if sync_folder:
            disk.before(Step("sync_folder", str(Path(path).parent)))
        return code

    def write(file: Any, content: int, size: int, offset: int) -> int:
        path = paths[key(file)]
        try:
            if not disk.write_error:
                disk.before(Step("write", path, offset, ctypes.string_at(content, size)))
                disk.take(max(0, offset + size - size_of(file)))
        except OSError:
            return sqlite3.SQLITE_FULL
        if disk.write_error:
            own(file)[0](file, content, min(size, disk.writable_bytes), offset)
            return sqlite3.SQLITE_FULL if disk.write_error == errno.ENOSPC else sqlite3.SQLITE_IOERR_WRITE
        return int(own(file)[0](file, content, size, offset))

    def truncate(file: Any, size: int) -> int:
        path, had_bytes = paths[key(file)], size_of(file)
        disk.before(Step("resize", path, size))
        if disk.free_bytes is not None and size < had_bytes:
            disk.free_bytes += had_bytes - size
        return int(own(file)[1](file, size))

    def sync(file: Any, flags: int) -> int:
        try:
            disk.allow_sync(paths[key(file)])
        except OSError:
            return sqlite3.SQLITE_IOERR_FSYNC
        code = int(own(file)[2](file, flags))
        return code

    vfs.xOpen, vfs.xDelete = _OPEN(open_file), _DELETE(delete)
    _kept.append(vfs)
    if library.sqlite3_vfs_register(ctypes.byref(vfs), 0):
        raise RuntimeError("SQLite has not taken the VFS")


def _sqlite() -> Any:
    import _sqlite3

    for name in (getattr(_sqlite3, "__file__", None), None):
        library = ctypes.CDLL(name)
        if hasattr(library, "sqlite3_vfs_register"):
            return library
    raise RuntimeError("Python's sqlite3 has SQLite inside, and does not show it: no VFS can be added to it")
