"""A fleet's folder on a disk shared by all machines: entries are written atomically and read with their liveness.

All functions block on the disk; call them in a thread.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_trio.rendezvous.entry import ENTRY_FORMAT, NodeEntry
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from os import PathLike

SUFFIX: Final = ".json"
HEAD: Final = "head"
HEAD_FILE: Final = f"{HEAD}{SUFFIX}"
"""The file of the fleet's head, which does not belong to a node: see `rendezvous.head`."""
MAX_ENTRY_BYTES: Final = 64 * 1024
STALE_TRIES: Final = 3
"""Number of attempts to open a file that NFS reports as replaced."""
_CLOCK: Final = ".clock-"
_DRAFT: Final = ".draft-"


def claim_folder(path: str | PathLike[str]) -> Path:
    """Create the folder with mode 0700 if it is missing, and return it.

    Raises:
        ConfigError: the folder cannot be created, or other users can access it.
    """
    folder = Path(path)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"fleet.dir: {folder} cannot be made: {exc.strerror}; name a folder that the node's user can make"
        ) from exc
    return require_folder(folder)


def require_folder(path: str | PathLike[str]) -> Path:
    """Return the folder if it exists and only we can access it, because its entries contain tokens.

    Raises:
        ConfigError: it is missing, is not a folder, belongs to another user, or is open to others.
    """
    folder = Path(path)
    try:
        found = folder.stat()
    except OSError as exc:
        raise ConfigError(f"the fleet's folder {folder} cannot be read: {exc.strerror}; has a node started?") from exc
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"the fleet's folder {folder} is no folder")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"the fleet's folder {folder} belongs to user {found.st_uid}, not to us; take one of your own"
        )
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"the fleet's folder {folder} has mode {mode:04o}, others can enter it; chmod 700 it")
    return folder


def write_entry(folder: Path, entry: NodeEntry) -> None:
    """Write or replace the entry of a node atomically: a reader finds either the old or the new entry.

    Raises:
        OSError: the entry cannot be written; the old entry remains.
    """
    write_file(folder, entry.node_id, entry)


def write_file(folder: Path, name: str, content: msgspec.Struct) -> None:
    """Write or replace the file `NAME.json` with mode 0600, atomically: a reader finds either the old or the new file.

    Raises:
        OSError: the file cannot be written; the old file remains.
    """
    handle, draft = tempfile.mkstemp(prefix=f"{_DRAFT}{name}-", dir=folder)  # with mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
        os.replace(draft, folder / f"{name}{SUFFIX}")
    except BaseException:
        os.unlink(draft)
        raise


def renew_entry(folder: Path, entry: NodeEntry) -> None:
    """Send a heartbeat: set the entry's file to the current time by the disk's clock, which needs no disk space.

    Raises:
        OSError: the file is missing or unreachable.
    """
    os.utime(folder / f"{entry.node_id}{SUFFIX}")


def remove_entry(folder: Path, entry: NodeEntry) -> None:
    """Remove the entry and the drafts of a killed writer of that name, unless another process has taken over the name.

    Raises:
        OSError: the entry cannot be removed.
    """
    path = folder / f"{entry.node_id}{SUFFIX}"
    try:
        if read_entry(path)[0].process != entry.process:
            return
        path.unlink(missing_ok=True)
    except (FileNotFoundError, ConfigError):
        return
    for draft in folder.glob(f"{_DRAFT}{entry.node_id}-*"):
        draft.unlink(missing_ok=True)


def read_entry(path: Path) -> tuple[NodeEntry, int]:
    """Return the entry in a file, and its modification time in ns by the clock of the disk.

    The file is opened before its time is read, because NFS then refreshes both.

    Raises:
        FileNotFoundError: the file no longer exists.
        ConfigError: the file is unreadable, incomplete, readable by others, owned by another user, or in another
            format.
    """
    content, found = read_file(path)
    try:
        entry = msgspec.json.decode(content, type=NodeEntry)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is no whole entry of a node: {exc}") from None
    if entry.format != ENTRY_FORMAT:
        raise ConfigError(
            f"{path} has format {entry.format}, and this version reads {ENTRY_FORMAT}; update the older side"
        )
    if entry.node_id != path.name.removesuffix(SUFFIX):
        raise ConfigError(f"{path} is the entry of node {entry.node_id!r}: it was copied or renamed; remove it")
    return entry, found.st_mtime_ns


def read_file(path: Path) -> tuple[bytes, os.stat_result]:
    """Return the contents of an entry's file, and its status.

    On NFS the file may be replaced while it is opened; the new file is then read.

    Raises:
        FileNotFoundError, ConfigError: see `read_entry`.
    """
    for _ in range(STALE_TRIES):
        try:
            with open(
                path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
            ) as it:
                found = os.fstat(it.fileno())
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                    raise ConfigError(f"{path} is no entry of a node: it must be a file of our own with mode 0600")
                return it.read(MAX_ENTRY_BYTES), found
        except FileNotFoundError:
            raise
        except OSError as exc:
            if exc.errno != errno.ESTALE:
                raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def entry_paths(folder: Path) -> list[Path]:
    """Return the entry files in the folder, sorted by name.

    Raises:
        ConfigError: the folder cannot be read.
    """
    try:
        names = sorted(
            name
            for name in os.listdir(folder)
            if name.endswith(SUFFIX) and not name.startswith(".") and name != HEAD_FILE
        )
    except OSError as exc:
        raise ConfigError(f"the fleet's folder {folder} cannot be read: {exc.strerror}") from exc
    return [folder / name for name in names]


def time_there(folder: Path) -> int | None:
    """Return the current time by the disk's clock in ns, as a new file gets it; None if it cannot be determined."""
    try:
        handle, path = tempfile.mkstemp(prefix=_CLOCK, dir=folder)
    except OSError:  # full, or read-only for us
        return None
    try:
        os.utime(path)
        return os.fstat(handle).st_mtime_ns
    except OSError:  # the file or the disk has disappeared
        return None
    finally:
        with suppress(OSError):
            os.close(handle)
        with suppress(OSError):
            os.unlink(path)
