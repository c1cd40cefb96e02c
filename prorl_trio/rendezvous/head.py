"""The entry of a fleet's head in the nodes' folder: the file `head.json`, with mode 0600 because it contains the token.

All functions block on the disk; call them in a thread.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from prorl_trio.rendezvous.entry import ProcessIdentity, has_ended
from prorl_trio.rendezvous.folder import HEAD, HEAD_FILE, read_file, require_folder, time_there, write_file
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path

HEAD_FORMAT: Final = 1
"""Format of the file. Readers reject other formats."""
NS: Final = 1_000_000_000


class HeadEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The published entry of a head. Unknown fields are ignored, so that a later minor version can add fields.

    Attributes:
        format: see `HEAD_FORMAT`.
        node_id: the head's name.
        url: of its server, as trainers on other machines reach it: `ws://HOST:PORT`.
        unix_url: of the Unix socket, for clients on this machine; empty without a socket.
        rest_url: REST URL of the same server: `http://HOST:PORT`.
        token: the password for trainers.
        host: the machine's name.
        process: identity of the head's process.
        version: version of prorl-trio.
        heartbeat_interval_s: interval at which the head renews the file's modification time.
        stale_after_s: another head may take over the fleet after this many seconds without a heartbeat.
    """

    format: int = HEAD_FORMAT
    node_id: str
    url: str
    unix_url: str = ""
    rest_url: str = ""
    token: str
    host: str
    process: ProcessIdentity
    version: str
    heartbeat_interval_s: float
    stale_after_s: float

    def __repr__(self) -> str:
        return f"<HeadEntry {self.node_id!r} at {self.url}>"  # hides the token


def read_head(folder: str | PathLike[str]) -> HeadEntry:
    """Return the entry of the head of the fleet in a folder.

    Raises:
        FileNotFoundError: the fleet lacks a head.
        ConfigError: the folder or the file cannot be used.
    """
    return _read(require_folder(folder))[0]


def find_head(folder: Path) -> tuple[HeadEntry, Literal["live", "stale", "ended"], float]:
    """Return the entry of a head, its liveness, and the seconds since its last heartbeat by the disk's clock.

    Raises:
        FileNotFoundError: the fleet lacks a head.
        ConfigError: the file cannot be used.
    """
    entry, beat_ns = _read(folder)
    there_ns = time_there(folder)
    age_s = 0.0 if there_ns is None else max(0.0, (there_ns - beat_ns) / NS)
    if has_ended(entry.process):
        return entry, "ended", age_s
    return entry, "live" if age_s <= entry.stale_after_s else "stale", age_s


def _read(folder: Path) -> tuple[HeadEntry, int]:
    path = folder / HEAD_FILE
    content, found = read_file(path)
    try:
        entry = msgspec.json.decode(content, type=HeadEntry)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is no whole entry of a head: {exc}") from None
    if entry.format != HEAD_FORMAT:
        raise ConfigError(
            f"{path} has format {entry.format}, and this version reads {HEAD_FORMAT}; update the older side"
        )
    return entry, found.st_mtime_ns


class HeadReplaced(ConfigError):
    """Another head has taken over the fleet."""


class HeadClaim:
    """A new head's claim to a folder: it waits while the heartbeats of another head arrive there.

    Call `is_free` repeatedly until it returns True.
    """

    def __init__(self, folder: Path, process: ProcessIdentity) -> None:
        self._folder = folder
        self._process = process
        self._seen_ns: int | None = None
        self._since_s = 0.0

    def is_free(self, now_s: float) -> bool:
        """Return whether no other head is alive in the folder; `now_s` is by a monotonic clock.

        Raises:
            ConfigError: another head is alive there.
        """
        try:
            entry, beat_ns = _read(self._folder)
        except (FileNotFoundError, ConfigError):
            return True
        if entry.process == self._process or has_ended(entry.process):
            return True
        if self._seen_ns is None:
            self._seen_ns, self._since_s = beat_ns, now_s
        if beat_ns != self._seen_ns:
            raise ConfigError(
                f"fleet.dir: {self._folder} has a living head already ({entry.node_id!r} on {entry.host}, pid "
                f"{entry.process.pid}); end that one, or take another folder"
            )
        return now_s - self._since_s > entry.stale_after_s


def renew_head(folder: Path, before: HeadEntry | None, now: HeadEntry) -> HeadEntry:
    """Write the entry, or renew its time if nothing has changed since `before`; return the stored entry.

    Raises:
        HeadReplaced: another head has taken over the folder.
        ConfigError: the folder or the file cannot be used.
        OSError: the disk fails.
    """
    if before is not None:
        try:
            found = _read(folder)[0]
        except FileNotFoundError:
            before = None  # the file was removed by hand
        else:
            if found.process != now.process:
                raise HeadReplaced(
                    f"{folder / HEAD_FILE} is now of pid {found.process.pid} on {found.host}, which has taken the "
                    "fleet over, with its jobs: this head ends"
                )
    if before == now:
        os.utime(folder / HEAD_FILE)
    else:
        write_file(folder, HEAD, now)
    return now


def remove_head(folder: Path, entry: HeadEntry) -> None:
    """Remove the entry, unless another head has taken over the folder.

    Raises:
        OSError: the entry cannot be removed.
    """
    try:
        if _read(folder)[0].process != entry.process:
            return
    except (FileNotFoundError, ConfigError):
        return
    (folder / HEAD_FILE).unlink(missing_ok=True)
