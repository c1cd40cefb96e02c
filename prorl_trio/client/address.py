"""Where a node listens, and the file in which it says so."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec
import trio

from prorl_trio.types.errors import ProtocolError

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["Address", "EndpointFile"]

MAX_FILE_BYTES: Final = 64 * 1024


class Address(msgspec.Struct, frozen=True):
    """Where a node listens."""

    host: str
    port: int
    resource: str
    secure: bool = False
    unix_path: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """From `ws://HOST:PORT[/PATH]`, `wss://...` or `unix://PATH`. Raises ValueError if it is something else."""
        parts = urlsplit(url)
        if parts.scheme == "unix" and not parts.netloc and parts.path:
            return cls("localhost", 0, "/", unix_path=parts.path)
        if parts.scheme not in ("ws", "wss") or not parts.hostname or parts.port is None:
            raise ValueError(f"the url of a node is ws://HOST:PORT, wss:// with TLS, or unix:///PATH; got {url!r}")
        return cls(parts.hostname, parts.port, parts.path or "/", secure=parts.scheme == "wss")

    @property
    def authority(self) -> str:
        """Host and port, as in a URL."""
        if self.unix_path:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        if self.unix_path:
            return f"unix://{self.unix_path}"
        return f"{'wss' if self.secure else 'ws'}://{self.authority}{self.resource}"


class _Endpoints(msgspec.Struct):
    url: str
    unix_url: str = ""


class EndpointFile:
    """What a node writes when it listens (`listen.endpoint_file`); its next start may listen elsewhere."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._reading = trio.CapacityLimiter(1)

    def __str__(self) -> str:
        return f"the node of {self.path}"

    async def read(self) -> list[Address]:
        """Where the node listens, or did last; the best first: the Unix socket that it has for its own host, if there
        is one here, of our own user. Always one that is reached from everywhere.

        Raises:
            OSError: there is no such file, or it cannot be read.
            ProtocolError: no node has written it.
        """
        return await trio.to_thread.run_sync(self._read, limiter=self._reading)

    def _read(self) -> list[Address]:
        with self.path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES)
        try:
            endpoints = msgspec.json.decode(content, type=_Endpoints)
            everywhere = Address.parse(endpoints.url)
            here = [Address.parse(endpoints.unix_url)] if endpoints.unix_url else []
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as exc:
            raise ProtocolError(f"{self.path} is no endpoint file of a node: {exc}") from None
        return [*filter(_is_our_socket, here), everywhere]


def _is_our_socket(address: Address) -> bool:
    try:
        found = os.stat(address.unix_path)
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()
