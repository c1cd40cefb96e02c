"""The node's side of `perf.delivery`, in a process of its own: the same outcomes by three ways.

Ends with its standard input.

    python -m perf.delivery_source FOLDER OUTCOMES TOKENS
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import trio

from ipc.arena import BLOCK_TOKENS, open_arena
from ipc.arena_socket import serve_arena
from ipc.errors import ChannelBroken
from ipc.nursery import open_single_nursery
from ipc.session import Ack, AttachArena, ClientFrame, ClientMessage, OutcomeFrame
from ipc.websocket import LinkLimits, WebSocketLink, open_server_link
from prorl_trio.types.models import Outcome, PolicySpan, Segment, Timing, Trajectory
from prorl_trio.types.outcome_refs import split_outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from ipc.arena import Arena, TokenBuffer

__all__ = ["SourceAddress", "open_source"]

PROMPT_SHARE = 32
"""So much of an outcome is its prompt."""
VOCABULARY = 150_000
BYTES_PER_TOKEN = 9
ROOM = 2
"""The arena is so many times as large as what is in it."""
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0


class SourceAddress(msgspec.Struct, frozen=True):
    """The addresses of the source. Printed by it as one line of JSON."""

    port: int
    json_port: int
    arena_socket: str
    token: str


@asynccontextmanager
async def open_source(folder: Path, *, outcomes: int, tokens: int) -> AsyncIterator[SourceAddress]:
    """A source with so many distinct outcomes of so many tokens. It ends with the block.

    Raises:
        RuntimeError: it did not start in time.
        subprocess.CalledProcessError: it failed.
    """
    argv = [sys.executable, "-m", "perf.delivery_source", str(folder), str(outcomes), str(tokens)]
    async with open_single_nursery() as nursery:
        run = partial(trio.run_process, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process: trio.Process = await nursery.start(run)
        assert process.stdin is not None
        assert process.stdout is not None
        said: bytes | bytearray = b""
        with trio.move_on_after(START_TIMEOUT_S):
            said = await process.stdout.receive_some()
        if not said:
            raise RuntimeError(f"the source did not get ready within {START_TIMEOUT_S:g} s")
        yield msgspec.json.decode(said, type=SourceAddress)
        await process.stdin.aclose()
        with trio.move_on_after(END_TIMEOUT_S):
            await process.wait()
        nursery.cancel_scope.cancel()


async def _main(folder: Path, count: int, tokens: int) -> None:
    token = secrets.token_hex(16)
    with open_arena(ROOM * count * max(tokens, BLOCK_TOKENS) * BYTES_PER_TOKEN + 2**20) as arena:
        stored = [_store(arena, number, tokens) for number in range(count)]
        with _serve_json([outcome for outcome, _ in stored]) as json_port:
            async with open_single_nursery() as nursery:
                path = folder / "arena"
                await nursery.start(partial(serve_arena, arena, path, admits=token.__eq__))
                (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
                nursery.start_soon(trio.serve_listeners, partial(_serve_link, arena, stored), [listener])
                address = SourceAddress(listener.socket.getsockname()[1], json_port, str(path), token)
                sys.stdout.write(msgspec.json.encode(address).decode() + "\n")
                sys.stdout.flush()
                await trio.to_thread.run_sync(sys.stdin.read)
                nursery.cancel_scope.cancel()


def _store(arena: Arena, number: int, tokens: int) -> tuple[Outcome, TokenBuffer]:
    """Make an outcome whose arrays are in the arena."""
    random = np.random.default_rng(number)
    buffer = arena.open_nowait()
    ids = random.integers(0, VOCABULARY, tokens, dtype=np.int32)
    prompt_tokens = tokens // PROMPT_SHARE
    buffer.append(ids[:prompt_tokens])
    sampled = ids[prompt_tokens:]
    buffer.append(sampled, -random.exponential(size=len(sampled)).astype(np.float32))
    buffer.seal()
    span = PolicySpan(start=prompt_tokens, end=tokens, policy_version="1", engine="perf")
    segment = Segment.over_arrays(*buffer.arrays(), [span])
    outcome = Outcome(
        job_id=f"job-{number}",
        instance_id=f"instance-{number}",
        group_id="",
        status="completed",
        reward=1.0,
        cause=None,
        error="",
        trajectory=Trajectory(segments=[segment], turns=[], stop_reason="finished"),
        details={},
        timing=Timing(run_s=1.0),
    )
    return outcome, buffer


async def _serve_link(arena: Arena, stored: Sequence[tuple[Outcome, TokenBuffer]], stream: trio.SocketStream) -> None:
    """A trainer's connection: outcomes follow as far as the last `Ack` allows; by reference after `AttachArena`."""
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(ClientMessage).decode
    sent, allowed, attached = 0, 0, False

    def next_frame() -> bytes | None:
        nonlocal sent
        if sent == allowed:
            return None
        sent += 1
        outcome, buffer = stored[sent % len(stored)]
        if attached:
            assert buffer.ref is not None
            return encode(split_outcome(sent, outcome, [buffer.ref]))
        return encode(OutcomeFrame(cursor=sent, job_id=outcome.job_id, outcome=msgspec.Raw(encode(outcome))))

    async def read(link: WebSocketLink[ClientFrame]) -> None:
        nonlocal allowed, attached
        try:
            while True:
                match await link.receive():
                    case Ack(cursor=cursor):
                        allowed = cursor
                        link.wake()
                    case AttachArena(reader_id=reader_id):
                        attached = arena.has_reader(reader_id)
        except ChannelBroken:
            link.end(1000, "")

    async with open_server_link(stream, decode, LinkLimits()) as link:
        link.trust()
        link.batches = True
        await link.run(partial(read, link), next_frame)


@contextmanager
def _serve_json(outcomes: Sequence[Outcome]) -> Iterator[int]:
    """The way of the reference: lists of numbers, as JSON, in the answer to a request. Yields the port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            outcome = outcomes[int(self.path.rsplit("/", 1)[1]) % len(outcomes)]
            assert outcome.trajectory is not None
            segment = outcome.trajectory.segments[0]
            arrays = {name: getattr(segment, name).tolist() for name in ("token_ids", "logprobs", "loss_mask")}
            body = json.dumps({"job_id": outcome.job_id, "reward": outcome.reward} | arrays).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    trio.run(_main, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
