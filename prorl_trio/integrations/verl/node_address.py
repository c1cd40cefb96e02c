"""The node, or the fleet, that a trainer's processes connect to, as configuration files name it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from prorl_trio.client.blocking import BlockingClient
from prorl_trio.client.connection import connect
from prorl_trio.config.secrets import TOKEN_VARIABLE, check_token, read_token_file
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager

    from prorl_trio.client.client import RolloutClient


class NodeAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The address of a node or of a fleet, and how long its clients wait for it.

    Attributes:
        url: `ws://HOST:PORT`, `wss://HOST:PORT` or `unix:///PATH`; or instead of it:
        endpoint_file: the node's `listen.endpoint_file`, on a file system that all processes of the trainer see.
        fleet: the folder of a fleet, in which its head says where it is; or instead of both.
        token_file: a file of mode 0600 with the token; without, the token is in `PRORL_TOKEN`, and that of a fleet in
            its folder.
        tls_ca: for `wss://`, a PEM file with the certificates to trust; None: those of the system.
        connect_timeout_s: how long to try for a first connection.
        reconnect_timeout_s: how long rollouts wait for a node that is away, one that is being started again, say.
    """

    url: str | None = None
    endpoint_file: str | None = None
    fleet: str | None = None
    token_file: str | None = None
    tls_ca: str | None = None
    connect_timeout_s: float = 60.0
    reconnect_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if [self.url, self.endpoint_file, self.fleet].count(None) != 2:
            raise ValueError("give the node's url or its endpoint_file, or the folder of a fleet, and one alone")

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> NodeAddress:
        """Return the address that a configuration's `node` holds.

        Raises:
            ConfigError: it is no such address.
        """
        try:
            return msgspec.convert(dict(fields), cls)
        except msgspec.ValidationError as exc:
            raise ConfigError(f"node: {exc}") from exc

    def connect(self) -> AbstractAsyncContextManager[RolloutClient]:
        """Open a session of its own; see `prorl_trio.connect`.

        Raises:
            ConfigError: there is no token, or two different ones, or others can read its file.
        """
        return connect(self.url, self._token(), **self._options())

    def connect_blocking(self) -> BlockingClient:
        """Open a session of its own, for plain calls.

        Raises:
            ConfigError: there is no token, or two different ones, or others can read its file.
            ServiceError: see `prorl_trio.connect`.
        """
        return BlockingClient(self.url, self._token(), **self._options())

    def _options(self) -> dict[str, Any]:
        return {
            "endpoint_file": self.endpoint_file,
            "fleet": self.fleet,
            "tls_ca": self.tls_ca,
            "connect_timeout_s": self.connect_timeout_s,
            "reconnect_timeout_s": self.reconnect_timeout_s,
        }

    def _token(self) -> str:
        given = os.environ.get(TOKEN_VARIABLE, "")
        if self.token_file is None:
            if not given and self.fleet is not None:
                return ""
            if not given:
                raise ConfigError(f"no token for the node: name its node.token_file, or set {TOKEN_VARIABLE}")
            return check_token(given, TOKEN_VARIABLE)
        token = read_token_file(self.token_file, "node.token_file")
        if given and given.strip() != token:
            raise ConfigError(
                f"the environment variable {TOKEN_VARIABLE} and node.token_file {self.token_file} hold two different "
                "tokens; keep one"
            )
        return token
