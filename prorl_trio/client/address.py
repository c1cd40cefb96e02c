"""The address of a node, and the endpoint file that a node writes its addresses to."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec
import trio

from prorl_trio.rendezvous.head import read_head
from prorl_trio.types.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from os import PathLike

    from prorl_trio.rendezvous.head import HeadEntry

MAX_FILE_BYTES: Final = 64 * 1024


class Address(msgspec.Struct, frozen=True):
    """The address of a node: host, port and path (`resource`), or the path of a Unix socket (`unix_path`)."""

    host: str
    port: int
    resource: str
    secure: bool = False
    unix_path: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse `ws://HOST:PORT[/PATH]`, `wss://HOST:PORT[/PATH]` (TLS) or `unix://PATH`.

        Raises:
            ValueError: `url` is none of these.
        """
        parts = urlsplit(url)
        if parts.scheme == "unix" and not parts.netloc and parts.path:
            return cls("localhost", 0, "/", unix_path=parts.path)
        if parts.scheme not in ("ws", "wss") or not parts.hostname or parts.port is None:
            raise ValueError(f"the url of a node is ws://HOST:PORT, wss:// with TLS, or unix:///PATH; got {url!r}")
        return cls(parts.hostname, parts.port, parts.path or "/", secure=parts.scheme == "wss")

    @property
    def authority(self) -> str:
        """Return `HOST:PORT` as in a URL; for a Unix socket, `localhost`."""
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
    """A reader of the file that a node writes when it listens (`listen.endpoint_file`).

    Each `read` reads the file anew, because the node may listen on another port after its next start.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._reading = trio.CapacityLimiter(1)

    def __str__(self) -> str:
        return f"the node of {self.path}"

    async def read(self) -> list[Address]:
        """Return the addresses in the file, in the order in which to try them.

        The node's Unix socket comes first, if the file names one that exists on this host and belongs to the current
        user. The WebSocket address is always last. The node may have stopped since it wrote the file. Reads in a worker
        thread.

        Raises:
            OSError: the file does not exist or cannot be read.
            ProtocolError: the file was not written by a node.
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


class HeadFile:
    """A reader of the entry of a fleet's head, in the folder of its nodes: its addresses and its token.

    Each call reads the entry anew, because the head may listen elsewhere after its next start.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)
        self._reading = trio.CapacityLimiter(1)

    def __str__(self) -> str:
        return f"the head of the fleet in {self.folder}"

    async def read(self) -> list[Address]:
        """Return the head's addresses, in the order in which to try them. See `EndpointFile.read`.

        Raises:
            OSError: no head has been started there, or its entry cannot be read.
            ProtocolError: an address in the entry is not valid.
        """
        entry = await self._entry()
        try:
            here = [Address.parse(entry.unix_url)] if entry.unix_url else []
            return [*filter(_is_our_socket, here), Address.parse(entry.url)]
        except ValueError as exc:
            raise ProtocolError(f"the entry of {self} is not valid: {exc}") from None

    async def read_token(self) -> str:
        """Return the head's current token.

        Raises:
            OSError: no head has been started there, or its entry cannot be read.
        """
        return (await self._entry()).token

    async def _entry(self) -> HeadEntry:
        try:
            return await trio.to_thread.run_sync(read_head, self.folder, limiter=self._reading)
        except ConfigError as exc:
            raise OSError(str(exc)) from exc


def _is_our_socket(address: Address) -> bool:
    try:
        found = os.stat(address.unix_path)
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()
