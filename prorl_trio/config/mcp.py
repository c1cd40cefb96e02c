"""The tables `[mcp]` and `[mcp.servers.NAME]`, and the servers that a task uses."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec

from prorl_trio.config.quantities import MessageBytes, Seconds, Table
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prorl_trio.types.models import McpServer

_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]{0,30}[A-Za-z0-9])?\Z")

Text = Annotated[str, msgspec.Meta(min_length=1)]


class McpServerConfig(Table, frozen=True):
    """A server of the Model Context Protocol, with either `command` or `url`. One runs per rollout and ends with it.

    Attributes:
        command: program and arguments.
        where: place of the command: in each rollout's `sandbox`, or on the `node`, outside of all sandboxes.
        url: endpoint of a running server (streamable HTTP). Tasks can only name it.
        env: environment variables of the command, in addition to PATH, HOME and LANG.
        secrets: more variables of a command on the node, or headers for the URL. The values are names of environment
            variables of the node.
        tools: patterns of the offered tools, such as `read_*`. Empty: all. Policies see a tool as `NAME__TOOL`.
        protocol: `auto` asks the server for its era, `handshake` is for versions 2024-11-05 to 2025-11-25, `stateless`
            for 2026-07-28.
        call_timeout_s: timeout of a call, instead of `agent.tool_timeout_s`.
        start_timeout_s: timeout of the server's start, until its tools are known.
        max_message_bytes: size of one message of the server. A call with a larger result fails.
    """

    command: tuple[Text, ...] = ()
    where: Literal["sandbox", "node"] = "sandbox"
    url: str = ""
    env: dict[str, str] = msgspec.field(default_factory=dict)
    secrets: dict[str, str] = msgspec.field(default_factory=dict)
    tools: tuple[Text, ...] = ()
    protocol: Literal["auto", "handshake", "stateless"] = "auto"
    call_timeout_s: Seconds = 30.0
    start_timeout_s: Seconds = 30.0
    max_message_bytes: MessageBytes = 1024 * 1024

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError("give either command or url")
        if self.url:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
                raise ValueError("url: must be http://HOST/PATH or https://HOST/PATH; a key belongs into secrets")
            if self.env or self.where != "sandbox":
                raise ValueError("env and where belong to a command, not to a url")
        elif self.secrets and self.where == "sandbox":
            raise ValueError("secrets: the policy could read them in its sandbox; use where = 'node'")
        for name, value in (*self.env.items(), *self.secrets.items()):
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"env, secrets: {name!r} is not the name of a variable or header")

    def read_secrets(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the values of `secrets`. Raises ConfigError if the node lacks a variable; values are never shown."""
        for variable in self.secrets.values():
            if not environ.get(variable, "").strip():
                raise ConfigError(f"the environment variable {variable} is missing or empty")
        return {name: environ[variable].strip() for name, variable in self.secrets.items()}


class McpConfig(Table, frozen=True):
    """Servers of the Model Context Protocol, whose tools rollouts use (`docs/mcp.md`).

    The name of a server has letters, digits, `-` and `_`.

    Attributes:
        default: names of the servers for jobs that do not select any (`JobSpec.mcp`).
    """

    default: tuple[str, ...] = ()
    servers: dict[str, McpServerConfig] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.servers:
            _check_name(name)
        for name in self.default:
            self._find(name)

    def check_secrets(self) -> None:
        """Check that the node has every variable of `secrets`. Raises ConfigError."""
        for name, server in self.servers.items():
            try:
                server.read_secrets()
            except ConfigError as exc:
                raise ConfigError(f"mcp.servers.{name}.secrets: {exc}") from None

    def of_job(self, selected: Sequence[McpServer | str] | None) -> dict[str, McpServerConfig]:
        """Return the servers of a job by name. Raises ConfigError for unknown, invalid and repeated names."""
        found: dict[str, McpServerConfig] = {}
        try:
            for each in self.default if selected is None else selected:
                name = each if isinstance(each, str) else each.name
                if name in found:
                    raise ValueError(f"the server {name!r} occurs twice")
                found[name] = self._find(each) if isinstance(each, str) else _of_task(each)
        except ValueError as exc:
            raise ConfigError(str(exc)) from None
        return found

    def _find(self, name: str) -> McpServerConfig:
        if name not in self.servers:
            raise ValueError(f"there is no mcp.servers.{name}; there are: {', '.join(self.servers) or 'none'}")
        return self.servers[name]


def _check_name(name: str) -> None:
    if not _NAME.match(name) or "__" in name:
        raise ValueError(f"{name!r} is not the name of a server: 1 to 32 letters, digits, '-' and single '_' inside")


def _of_task(server: McpServer) -> McpServerConfig:
    _check_name(server.name)
    return McpServerConfig(command=tuple(server.command), env=dict(server.env), tools=tuple(server.tools))
