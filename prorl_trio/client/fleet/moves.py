"""A log on the fleet's disk of the jobs that were moved, so that a client that is killed gives none out twice.

A job that was on two nodes may have two outcomes, and each node knows of its own only. So the move is written before
it is made, and the delivery before it is acknowledged. A session whose jobs were never moved has no log.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec

from prorl_trio.file_systems import sync_folder
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["Delivered", "MoveLog", "Moved", "Named"]

FOLDER: Final = "moves"


class Moved(msgspec.Struct, frozen=True, tag=True):
    """The job is no more on `node_id`, which was lost; `attempt` is the number of the next one."""

    job_id: str
    node_id: str
    attempt: int


class Delivered(msgspec.Struct, frozen=True, tag=True):
    """An outcome of the job was given out and used."""

    job_id: str


class Named(msgspec.Struct, frozen=True, tag=True):
    """The trainer was told that no node has the job any more."""

    job_id: str


Line = Moved | Delivered | Named


class MoveLog:
    """The log of one session. All methods block on the disk; call them in a thread, one at a time."""

    def __init__(self, fleet: Path, session_id: str) -> None:
        self.path = fleet / FOLDER / f"{quote(session_id, safe='')}.jsonl"
        self._named = False
        """Its name is on the disk, and that of its folder."""

    def read(self) -> list[Line]:
        """Return the lines; a last one that a killed writer left unfinished is not among them.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            lines = self.path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise ConfigError(f"{self.path} cannot be read: {exc.strerror}") from exc
        decode = msgspec.json.Decoder(Line).decode
        found: list[Line] = []
        for line in lines:
            try:
                found.append(decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # the unfinished line of a writer that was killed, and was written on
        return found

    def append(self, lines: Iterable[Line]) -> None:
        """Write lines, and return when they are on the disk.

        Raises:
            ConfigError: they cannot be written.
        """
        encoded = b"\n" + b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(self.path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(encoded)
                file.flush()
                os.fsync(file.fileno())
            if not self._named:  # else a loss of power may take its name, and with that what is in it
                for folder in (self.path.parent, self.path.parent.parent):
                    sync_folder(folder)
                self._named = True
        except OSError as exc:
            raise ConfigError(f"{self.path} cannot be written: {exc.strerror}; make room on the fleet's disk") from exc
