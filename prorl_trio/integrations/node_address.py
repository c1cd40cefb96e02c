"""The node or fleet that a trainer's processes connect to, as configuration files name it."""

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
        url: `ws://HOST:PORT`, `wss://HOST:PORT` or `unix:///PATH`.
        endpoint_file: instead of `url`: the node's `listen.endpoint_file`, on a file system shared by all processes of
            the trainer.
        fleet: instead of both: the folder of a fleet, in which its head publishes its address.
        token_file: a file of mode 0600 with the token. By default, the token is in `PRORL_TOKEN`, and a fleet's token
            in its folder.
        tls_ca: for `wss://`, a PEM file with the certificates to trust; None: the system's certificates.
        connect_timeout_s: time limit for the first connection, in seconds.
        reconnect_timeout_s: seconds for which rollouts wait for an unavailable node, such as during a restart.
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
        """Return the address in a configuration's `node`.

        Raises:
            ConfigError: it is not a valid address.
        """
        try:
            return msgspec.convert(dict(fields), cls)
        except msgspec.ValidationError as exc:
            raise ConfigError(f"node: {exc}") from exc

    def connect(self) -> AbstractAsyncContextManager[RolloutClient]:
        """Open a new session; see `prorl_trio.connect`.

        Raises:
            ConfigError: the token is missing, there are two different tokens, or other users can read its file.
        """
        return connect(self.url, self._token(), **self._options())

    def connect_blocking(self) -> BlockingClient:
        """Open a new session, for blocking calls.

        Raises:
            ConfigError: the token is missing, there are two different tokens, or other users can read its file.
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
