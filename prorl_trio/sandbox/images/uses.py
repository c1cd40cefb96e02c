"""The images and layers that sandboxes of live processes use, which must not be removed.

Each process that uses any has one file, locked during its lifetime, that names them. The kernel releases the lock of a
killed process, so its images become free without any action. The lock of the store makes "check and hold" and "check
for users and remove" atomic.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_trio.sandbox.cache import cache_dir

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SUFFIX: Final = ".uses"
_NOT_OURS: Final = (errno.EACCES, errno.EPERM, errno.EROFS)

_processes_own = threading.Lock()
_held: dict[Path, _Held] = {}


class _Held:
    """The file of this process in one store, and the number of holders for each name."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.descriptor, name = tempfile.mkstemp(prefix=f"{os.getpid()}-", suffix=_SUFFIX, dir=folder)
        self.path = Path(name)
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        self.counts: Counter[str] = Counter()

    def write(self) -> None:
        content = msgspec.json.encode(sorted(self.counts))
        os.pwrite(self.descriptor, content, 0)
        os.ftruncate(self.descriptor, len(content))

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)


def image_use(folder: Path) -> str:
    """Return the name under which an image in `folder` is held."""
    return f"image:{folder.name}"


def layer_use(digest: str) -> str:
    """Return the name under which a layer is held."""
    return f"layer:{digest}"


def _folder() -> Path:
    return cache_dir() / "images" / ".uses"


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock of the file `path`, made if missing; wait while another process or thread has it. Blocks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def store_lock() -> Iterator[None]:
    """Hold the lock of the whole store. Only for milliseconds, because every start of a sandbox needs it. Blocks."""
    with exclusive(cache_dir() / "images" / ".locks" / "store"):
        yield


@contextlib.contextmanager
def hold(names: Iterable[str]) -> Iterator[None]:
    """Prevent removal of the named parts (`image_use` and `layer_use`), existing or not. Blocks.

    In a store that this user may not write, this user cannot remove anything, and nothing is noted.
    """
    wanted = tuple(names)
    if not wanted or not _count(wanted, 1):
        yield
        return
    try:
        yield
    finally:
        _count(wanted, -1)


def _count(names: tuple[str, ...], change: int) -> bool:
    try:
        with store_lock(), _processes_own:
            folder = _folder()
            held = _held.get(folder)
            if held is None:
                held = _held[folder] = _Held(folder)
            held.counts.update(dict.fromkeys(names, change))
            held.counts = +held.counts
            if held.counts:
                held.write()
            else:
                del _held[folder]
                held.close()
    except OSError as exc:
        if exc.errno not in _NOT_OURS:
            raise
        return False
    return True


def in_use() -> frozenset[str]:
    """Return all names held by live processes, including this one. Under `store_lock`. Blocks."""
    names: set[str] = set()
    for path in _folder().glob(f"*{_SUFFIX}"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with contextlib.suppress(msgspec.DecodeError):
                names.update(msgspec.json.decode(path.read_bytes(), type=list[str]))
        else:
            path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
    return frozenset(names)


def _let_go() -> None:
    """Drop the lock in a forked child: a copy would hold a dead node's images during the child's lifetime."""
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
