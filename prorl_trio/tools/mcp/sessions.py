"""The MCP servers of one rollout: their start, their tools, calls within limits, and their end."""

from __future__ import annotations

import json
import logging
import math
import os
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import mcp_types as types
import trio
from mcp.client import Client
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp_types.version import LATEST_MODERN_VERSION
from pydantic import TypeAdapter, ValidationError
from trio.lowlevel import RunVar

from prorl_ipc.nursery import leaves, open_single_nursery
from prorl_trio.chat.families.call_values import Malformed, check_portable
from prorl_trio.sandbox.use import is_spoilt, spoilt
from prorl_trio.tools.base import Observation, Tool
from prorl_trio.tools.mcp.schemas import parameters_of, tool_name
from prorl_trio.tools.mcp.streams import Ended
from prorl_trio.tools.mcp.transports import open_transport
from prorl_trio.types.errors import McpServerLost, SandboxLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from mcp.client import IncomingMessage

    from prorl_trio.config import McpServerConfig
    from prorl_trio.sandbox.sandbox import Sandbox

logger = logging.getLogger(__name__)

MAX_TOOLS: Final = 128
"""Limit of the tools of one server."""
MAX_DESCRIPTION_CHARS: Final = 4_000
MAX_REASON_CHARS: Final = 1_000
MAX_STARTING: Final = 2 * (os.cpu_count() or 1)
MAX_LISTS: Final = 9
"""Limit of tool lists per server and rollout, because each new one begins a segment with all tokens so far."""
END_TIMEOUT_S: Final = 1.0
"""Time for a server at a URL to end its session, and for a server to end after its connection was closed."""
_MODES: Final = {"auto": "auto", "handshake": "legacy", "stateless": LATEST_MODERN_VERSION}
_Reply = types.CallToolResult | types.InputRequiredResult
_REPLY: Final[TypeAdapter[_Reply]] = TypeAdapter(_Reply)


_gates: Final[RunVar[trio.CapacityLimiter]] = RunVar("prorl_trio.tools.mcp.sessions")


def _start_gate() -> trio.CapacityLimiter:
    """Return the gate of this node for starts: more at once would only let them all time out."""
    try:
        return _gates.get()
    except LookupError:
        _gates.set(trio.CapacityLimiter(MAX_STARTING))
        return _gates.get()


class McpTool(Tool):
    """A tool of a server, which calls it `listed_name`."""

    def __init__(self, server: _Server, listed: types.Tool) -> None:
        check_portable([listed.name, listed.description])
        description = (listed.description or listed.title or "")[:MAX_DESCRIPTION_CHARS]
        # Class variables elsewhere; each of these tools has its own.
        vars(self).update(
            name=tool_name(server.name, listed.name),
            description=description,
            parameters=parameters_of(listed.input_schema),
        )
        self._server = server
        self.listed_name = listed.name

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """Raises McpServerLost if the server has ended, and the policy is not to blame."""
        del sandbox, timeout_s
        return await self._server.call(self.listed_name, dict(arguments))


class McpServers:
    """The servers of a rollout."""

    def __init__(self, servers: list[_Server]) -> None:
        self.servers = servers

    @property
    def tools(self) -> list[McpTool]:
        """Return the tools that the servers offer now."""
        return [tool for server in self.servers for tool in server.tools]

    @property
    def have_changed(self) -> bool:
        """Return whether a server has reported other tools since they were listed."""
        return any(server.has_changed for server in self.servers)

    async def relist(self) -> None:
        """List the tools of servers that have reported a change. If that fails, they remain as they are."""
        for server in self.servers:
            if server.has_changed:
                await server.relist()


@asynccontextmanager
async def open_sessions(
    configs: Mapping[str, McpServerConfig], sandbox: Sandbox | None, run_path: Path | None
) -> AsyncIterator[McpServers]:
    """Start servers, which end with the block. See `prorl_trio.agent.mcp.open_servers`."""
    async with open_single_nursery() as nursery:
        servers = [_Server(name, config, nursery, sandbox, run_path) for name, config in configs.items()]
        async with open_single_nursery() as starting:
            for server in servers:
                starting.start_soon(nursery.start, server.serve)
        yield McpServers(servers)
        for server in servers:
            server.end.set()
        nursery.cancel_scope.deadline = trio.current_time() + END_TIMEOUT_S


@dataclass(eq=False)
class _Server:
    """A server and its client. A new process or connection replaces one that the policy may have ended."""

    name: str
    config: McpServerConfig
    nursery: trio.Nursery
    sandbox: Sandbox | None
    run_path: Path | None
    tools: list[McpTool] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Names of its tools that are not offered."""
    has_changed: bool = False
    end: trio.Event = field(default_factory=trio.Event)
    _connection: trio.CancelScope = field(default_factory=trio.CancelScope)
    _down: trio.Event = field(default_factory=trio.Event)
    _ended: Ended | None = None
    _was_called: bool = False
    _lists_left: int = MAX_LISTS

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run the server until `end` is set, or until it ends; `started` when its tools are known.

        Raises:
            McpServerLost: it could not be started.
            SandboxLost: its sandbox is gone.
        """
        gate = _start_gate()
        await gate.acquire()
        self._down, self._ended, is_ready = trio.Event(), None, False
        limit_s = self.config.start_timeout_s
        connection = self._connection = trio.CancelScope(deadline=trio.current_time() + limit_s)
        note_end = partial(self._note_end, connection)
        with connection:  # noqa: ASYNC912 - it waits
            try:
                async with Client(
                    open_transport(self.config, self.sandbox, self.run_path, note_end),
                    mode=_MODES[self.config.protocol],
                    cache=None,
                    client_info=types.Implementation(name="prorl-trio", version="1"),
                    message_handler=self._on_message,
                ) as client:
                    self._session = client.session
                    await self._list()
                    connection.deadline = math.inf
                    self.nursery.start_soon(self._listen, client)
                    task_status.started()
                    is_ready = True
                    gate.release()
                    await self.end.wait()
            except Exception as exc:  # whatever the package raises, in groups, when a connection breaks
                note_end(Ended(leaves(exc)[0]))
            finally:
                if not is_ready:
                    gate.release()
        if not is_ready:
            note_end(Ended(TimeoutError(f"it was not ready within {limit_s:g} s")))
            raise self._error()

    async def call(self, tool: str, arguments: dict[str, Any]) -> Observation:
        """Call a tool. The server's own errors are observations, and so is an end that the policy may have caused.

        The package may need longer than the time limit to give a request up, so a separate task does that.

        Raises:
            McpServerLost: the server has ended, and the policy is not to blame.
            SandboxLost: its sandbox is gone.
        """
        if self._down.is_set():
            return await self._replace()
        self._was_called = True
        answered, scope = trio.Event(), trio.CancelScope()
        reply: _Reply | Exception | None = None

        async def ask() -> None:
            nonlocal reply
            request = types.CallToolRequest(params=types.CallToolRequestParams(name=tool, arguments=arguments))
            with scope:
                try:
                    reply = await self._session.send_request(request, _REPLY)
                except Exception as exc:
                    reply = exc
            answered.set()

        self.nursery.start_soon(ask)
        try:
            with trio.move_on_after(self.config.call_timeout_s):
                await answered.wait()
        finally:
            scope.cancel()
        match reply:
            case None:
                return Observation(text=f"[stopped after {self.config.call_timeout_s:g} s]", outcome="timed_out")
            case types.CallToolResult():
                return Observation(text=_text_of(reply), outcome="error" if reply.is_error else "ok")
            case types.InputRequiredResult():
                return Observation.refused(f"{tool} asks for input, which it cannot have here.")
            case MCPError() if reply.error.code == types.CONNECTION_CLOSED and await self._is_down_soon():
                return await self._replace()
            case MCPError() | ValidationError():
                return Observation.refused(f"{tool} failed: {reply if isinstance(reply, MCPError) else 'no result'}")
        raise reply

    async def relist(self) -> None:
        self.has_changed = False
        if not self._down.is_set():
            with trio.move_on_after(self.config.call_timeout_s), suppress(MCPError, ValidationError, McpServerLost):
                await self._list()

    async def _list(self) -> None:
        """List the tools, unless that was done too often. Raises McpServerLost if no tool can be offered."""
        if not self._lists_left:
            return
        self._lists_left -= 1
        listed: list[types.Tool] = []
        cursor: str | None = None
        while len(listed) <= MAX_TOOLS:
            page = await self._session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))
            listed += page.tools
            cursor = page.next_cursor
            if not cursor or not page.tools:
                break
        patterns, chosen, others = self.config.tools or ("*",), dict[str, McpTool](), list[str]()
        for each in listed:
            try:
                tool = McpTool(self, each)
            except Malformed as exc:
                logger.warning("MCP server %r: the tool %.100r is left out: %s", self.name, each.name, exc)
                continue
            is_chosen = any(fnmatchcase(each.name, one) for one in patterns) and len(chosen) < MAX_TOOLS
            if is_chosen and tool.name not in chosen:
                chosen[tool.name] = tool
            else:
                others.append(each.name)
        if not chosen:
            known = ", ".join(others) or "none"
            raise self._error(f"it has no tool that its `tools` select; there are: {known}")
        self.tools, self.others = list(chosen.values()), others

    async def _is_down_soon(self) -> bool:
        with trio.move_on_after(END_TIMEOUT_S):
            await self._down.wait()
        return self._down.is_set()

    async def _replace(self) -> Observation:
        """Start the server again if the policy may have ended it, and return what the policy sees of that.

        A URL that answers again has only broken a connection, perhaps because of the call.
        """
        error = self._error()
        was_killed = self._ended is not None and self._ended.was_killed
        if not (self.config.url or is_spoilt(error) or (self._place == "node" and self._was_called and not was_killed)):
            raise error
        try:
            await self.nursery.start(self.serve)
        except McpServerLost as again:
            if self.config.url:
                raise
            return Observation.refused(f"{again}.")
        self.has_changed = True
        return Observation.refused(f"{error}. It was started again, without its state.")

    @property
    def _place(self) -> Literal["sandbox", "node"]:
        return "node" if self.config.url else self.config.where

    def _error(self, why: str = "") -> McpServerLost | SandboxLost:
        """Return the error for its end, which is the policy's if it has used the server's sandbox."""
        reason = self._ended.reason if self._ended is not None else None
        if isinstance(reason, McpServerLost | SandboxLost):
            return reason
        what = f"MCP server {self.name!r}: {why or reason or 'it has closed the connection'}"
        error = McpServerLost(what[:MAX_REASON_CHARS], self._place)
        is_used = self._place == "sandbox" and self.sandbox is not None and self.sandbox.is_used
        return spoilt(error) if is_used else error

    def _note_end(self, connection: trio.CancelScope, ended: Ended) -> None:
        """Note the first reason of the end of a connection, and end what is left of it."""
        connection.cancel()
        if connection is self._connection:
            self._ended = self._ended or ended
            self._down.set()

    async def _on_message(self, message: IncomingMessage) -> None:
        self.has_changed |= isinstance(message, types.ToolListChangedNotification)
        await trio.lowlevel.checkpoint()

    async def _listen(self, client: Client) -> None:
        """Note changes of the tools in the stateless era, in which servers report them to listeners only."""
        with suppress(MCPError, ListenNotSupportedError, SubscriptionLost):
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self.has_changed = True


def _text_of(result: types.CallToolResult) -> str:
    """Return a result as text: its blocks, or its structured content. Media have their type and size instead."""
    parts = []
    for block in result.content:
        within = block.resource if isinstance(block, types.EmbeddedResource) else block
        text = getattr(within, "text", None)
        size = (
            f", {len(block.data) * 3 // 4} bytes" if isinstance(block, types.ImageContent | types.AudioContent) else ""
        )
        what = getattr(within, "uri", None) or getattr(within, "mime_type", None) or block.type
        parts.append(text if isinstance(text, str) else f"[{what}{size}]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts) or "[no output]"
