"""The claim of the `up` that runs a local fleet: a lock that ends with its process, and who that is. All blocks."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_launch.local.plan import LOCAL
from prorl_trio.rendezvous.folder import claim_folder
from prorl_trio.rendezvous.identity import ProcessIdentity, this_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FILE: Final = "up.lock"
_MAX_BYTES: Final = 4096
_WRITE_TIMEOUT_S: Final = 1.0
_LOOK_TIMEOUT_S: Final = 0.3
_POLL_S: Final = 0.01


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The process that runs a fleet, and the number of its nodes."""

    process: ProcessIdentity
    nodes: int


@contextmanager
def claimed(fleet: Path, nodes: int) -> Iterator[Claim | None]:
    """Claim the fleet in this folder for this process during the block. Yields the claim of another one that has it.

    Raises:
        ConfigError: the folder cannot be used.
    """
    folder = claim_folder(fleet) / LOCAL
    folder.mkdir(mode=0o700, exist_ok=True)
    handle = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _take_soon(handle):
            yield _read(handle)
            return
        os.truncate(handle, 0)
        os.pwrite(handle, msgspec.json.encode(Claim(process=this_process(), nodes=nodes)), 0)
        yield None
    finally:
        os.close(handle)  # the lock ends with it


def find_claim(fleet: Path) -> Claim | None:
    """Return the claim of the process that runs the fleet in this folder now; None if none does."""
    try:
        handle = os.open(fleet / LOCAL / _FILE, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return None if _take(handle, fcntl.LOCK_SH) else _read(handle)
    finally:
        os.close(handle)


def _take(handle: int, kind: int) -> bool:
    """Return True if the lock could be had."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _take_soon(handle: int) -> bool:
    """Return True if the lock could be had for us alone. Who only looks, as `find_claim` does, has it for a moment."""
    deadline_s = time.monotonic() + _LOOK_TIMEOUT_S
    while not _take(handle, fcntl.LOCK_EX):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)  # flock has no time-out
    return True


def _read(handle: int) -> Claim | None:
    """Return what the holder of the lock has written; None if it has ended without a word."""
    deadline_s = time.monotonic() + _WRITE_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(os.pread(handle, _MAX_BYTES, 0), type=Claim)
        time.sleep(_POLL_S)  # it is being written
    return None
