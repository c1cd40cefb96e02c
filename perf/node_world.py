"""The surroundings of a node, in a process of their own: fake engines over HTTP, and a stand-in for all daemons.

    python -m perf.node_world FOLDER ENGINE_S

FOLDER gets the model and the daemon's socket. Of the two engines one answers at once, the other after ENGINE_S. Every
completion is the same tool call; every tool call is answered at once by the daemon's own RPC. Ends with its standard
input.
"""

from __future__ import annotations

import secrets
import sys
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from ipc.errors import IpcError
from ipc.nursery import open_single_nursery
from ipc.rpc import CallContext, CallError, serve_rpc
from ipc.sandbox_calls import CellResult, IpythonRun, Ping, Pong, SandboxCall
from perf.children import raise_file_limit, say_ready
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model

__all__ = ["TURN_TEXT", "World"]

TURN_TEXT: Final = '<tool_call>{"name": "ipython", "arguments": {"code": "print(6 * 7)"}}</tool_call>'
MAX_MODEL_LEN: Final = 32_768
BACKLOG: Final = 4096
HANDSHAKE_TIMEOUT_S: Final = 60.0


class World(msgspec.Struct, frozen=True):
    """The addresses of it. `completion_tokens`: of each."""

    model: str
    quick_engine: str
    slow_engine: str
    daemon_socket: str
    daemon_token: str
    completion_tokens: int


async def _main(folder: Path, engine_s: float) -> None:
    raise_file_limit()
    tiny = make_tiny_model(folder / "model")
    ids = tiny.turn(TURN_TEXT)
    logprobs = [-0.25] * len(ids)
    config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=MAX_MODEL_LEN)
    slow_config = msgspec.structs.replace(config, first_token_s=engine_s)
    token = secrets.token_hex(16)
    socket_path = folder / "daemon"
    async with (
        open_fake_engine(script=lambda _: (ids, logprobs, "stop"), config=config) as quick,
        open_fake_engine(script=lambda _: (ids, logprobs, "stop"), config=slow_config) as slow,
        open_single_nursery() as nursery,
    ):
        nursery.start_soon(trio.serve_listeners, partial(_serve_daemon, token), [await _listen(socket_path)])
        say_ready(World(str(folder / "model"), quick.url, slow.url, str(socket_path), token, len(ids)))
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


async def _listen(path: Path) -> trio.SocketListener:
    """For thousands that come at once: where the line is full, connecting to a Unix socket fails."""
    listener = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    await listener.bind(str(path))
    listener.listen(BACKLOG)
    return trio.SocketListener(listener)


async def _serve_daemon(token: str, stream: trio.SocketStream) -> None:
    """Serve a sandbox's connection."""
    try:
        await serve_rpc(stream, _answer, token=token, handshake_timeout_s=HANDSHAKE_TIMEOUT_S)
    except IpcError as exc:
        print(f"a connection of a sandbox ended badly: {exc}", file=sys.stderr)


async def _answer(body: msgspec.Raw, context: CallContext) -> msgspec.Struct:
    del context
    await trio.lowlevel.checkpoint()
    match msgspec.msgpack.decode(body, type=SandboxCall):
        case IpythonRun():
            return CellResult(stdout="42\n", stderr="", result=None, error=None, execution_count=1, duration_s=0.0)
        case Ping():
            return Pong(uptime_s=0.0, open_fds=0)
        case call:
            raise CallError("unknown", f"the stand-in has no {type(call).__name__}")


if __name__ == "__main__":
    trio.run(_main, Path(sys.argv[1]), float(sys.argv[2]))
