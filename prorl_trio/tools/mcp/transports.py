"""The places of a server: a program in the sandbox, a program on the node, or a URL."""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import httpx2
import trio
from mcp.client.streamable_http import streamable_http_client

from prorl_trio.sandbox.process_tree import open_process_tree
from prorl_trio.sandbox.run_dir import open_run_dir
from prorl_trio.tools.mcp.streams import Ended, open_streams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from mcp.client._transport import TransportStreams

    from prorl_trio.config import McpServerConfig
    from prorl_trio.sandbox.sandbox import Sandbox

SERVICE_TIMEOUT_S: Final = 7 * 24 * 3600.0
"""Time limit of a program in a sandbox, longer than any rollout."""
MAX_STDERR_BYTES: Final = 4096
MAX_LOG_BYTES: Final = 64 * 1024 * 1024
"""Limit of a server's logs in a sandbox, which the node receives."""
EXIT_TIMEOUT_S: Final = 1.0
"""Time for a process to end after its output has."""
READ_BYTES: Final = 64 * 1024
HTTP_TIMEOUT: Final = httpx2.Timeout(30.0, read=300.0)
_LAUNCHER: Final = ("/bin/sh", "-c", 'read -r _; cd "$1" && shift && echo READY && exec "$@"', "sh")
"""Becomes the server when its record for the reaper is written."""
_KILLS: Final = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})


def open_transport(
    config: McpServerConfig, sandbox: Sandbox | None, run_path: Path | None, on_end: Callable[[Ended], None]
) -> AbstractAsyncContextManager[TransportStreams]:
    """Run or reach a server during the block; `on_end` is called when its process ends."""
    if config.url:
        return _to_url(config)
    return _on_node(config, run_path, on_end) if config.where == "node" else _in_sandbox(config, sandbox, on_end)


@asynccontextmanager
async def _in_sandbox(
    config: McpServerConfig, sandbox: Sandbox | None, on_end: Callable[[Ended], None]
) -> AsyncIterator[TransportStreams]:
    if sandbox is None:
        raise ValueError("it needs a sandbox, which this task does not have")
    async with sandbox.open_program(
        config.command,
        timeout_s=SERVICE_TIMEOUT_S,
        env=config.env,
        max_stderr_bytes=MAX_STDERR_BYTES,
        is_service=True,
    ) as program:
        program.max_stderr_bytes = MAX_LOG_BYTES

        async def receive() -> bytes:
            if not (data := await program.receive_some()):
                result = await program.wait()
                said = result.stderr.decode(errors="replace").strip()
                on_end(Ended(f"it ended with exit code {result.exit_code}" + (f" and said: {said}" if said else "")))
            return data

        async with open_streams(program.send, receive, on_end, config.max_message_bytes) as streams:
            yield streams


@asynccontextmanager
async def _on_node(
    config: McpServerConfig, run_path: Path | None, on_end: Callable[[Ended], None]
) -> AsyncIterator[TransportStreams]:
    async with open_run_dir(run_path) as run_dir, run_dir.open_sandbox_dir() as folder:
        home = str(folder.home)
        own = {"PATH": os.environ.get("PATH", os.defpath), "HOME": home, "LANG": "C.UTF-8"}
        async with open_process_tree(
            [*_LAUNCHER, home, *config.command],
            env={**own, **config.env, **config.read_secrets()},
            stdin_line=b"\n",
            folder=folder.path,
            start_timeout_s=config.start_timeout_s,
        ) as tree:

            async def receive() -> bytes:
                if not (data := await tree.stdout.receive_some(READ_BYTES)):
                    with trio.move_on_after(EXIT_TIMEOUT_S):
                        await tree.wait_exit()
                    on_end(Ended(tree.explain(tree.describe_exit()), tree.exit_code() in _KILLS))
                return data

            async with open_streams(tree.stdin.send_all, receive, on_end, config.max_message_bytes) as streams:
                yield streams


@asynccontextmanager
async def _to_url(config: McpServerConfig) -> AsyncIterator[TransportStreams]:
    max_bytes = config.max_message_bytes

    async def limit(response: httpx2.Response) -> None:
        if response.headers.get("content-type", "").startswith("application/json"):  # others are limited by the package
            response.stream = _Limited(response.stream, max_bytes)

    async with (
        httpx2.AsyncClient(
            headers=config.read_secrets(), timeout=HTTP_TIMEOUT, event_hooks={"response": [limit]}
        ) as http,
        streamable_http_client(config.url, http_client=http, max_sse_event_size=max_bytes) as streams,
    ):
        yield streams


class _Limited(httpx2.AsyncByteStream):
    """A response that ends with an error beyond `max_bytes`."""

    def __init__(self, stream: Any, max_bytes: int) -> None:
        self._stream = stream
        self._pieces = aiter(stream)
        self._max_bytes = self._left_bytes = max_bytes

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        data: bytes = await anext(self._pieces)
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise httpx2.StreamError(f"the result is larger than {self._max_bytes} bytes")
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()
