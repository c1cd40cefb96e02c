"""The cost of delivering finished trajectories to a trainer in another process of this machine.

The ways are references into the arena, frames over a WebSocket, and, as in the reference implementation, lists of
numbers in JSON over HTTP. For each outcome, the time from the request until its tokens are in the trainer's own array
is measured.

    python -m perf.delivery [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import trio

from perf.harness import Case, Options, Report, caption_of, measure_interleaved, run_benchmark
from perf.processes import open_child
from prorl_ipc.arena import BLOCK_TOKENS, open_arena
from prorl_ipc.arena_socket import open_mapped_arena, serve_arena
from prorl_ipc.errors import ChannelBroken
from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.session import (
    Ack,
    AttachArena,
    ClientFrame,
    ClientMessage,
    OutcomeFrame,
    OutcomeRefFrame,
    ServerFrame,
    ServerMessage,
)
from prorl_ipc.websocket import CloseCode, LinkLimits, WebSocketLink, open_client_link, open_server_link
from prorl_trio.http.client import HttpClient
from prorl_trio.http.connection import HttpLimits
from prorl_trio.testing.fake_http import Answer, HttpCall, serve_http
from prorl_trio.types.models import Outcome, PolicySpan, Segment, Timing, Trajectory
from prorl_trio.types.outcome_refs import join_outcome, split_outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from prorl_ipc.arena import Arena, TokenBuffer
    from prorl_ipc.arena_socket import MappedArena

PROMPT_SHARE = 32
"""An outcome's prompt is this fraction (1 / n) of its tokens."""
VOCABULARY = 150_000
BYTES_PER_TOKEN = 9
ROOM = 2
"""The arena's size, as a multiple of its content."""


class SourceAddress(msgspec.Struct, frozen=True):
    """The addresses of the source."""

    port: int
    json_port: int
    arena_socket: str
    token: str


@asynccontextmanager
async def serve_source(folder: str, count: int, tokens: int) -> AsyncIterator[SourceAddress]:
    """Serve `count` distinct outcomes of `tokens` tokens in three ways, as the node's side in a separate process."""
    token = secrets.token_hex(16)
    with open_arena(ROOM * count * max(tokens, BLOCK_TOKENS) * BYTES_PER_TOKEN + 2**20) as arena:
        stored = [_store(arena, number, tokens) for number in range(count)]
        answer = partial(serve_http, handle=partial(_answer_json, [outcome for outcome, _ in stored]))
        async with open_single_nursery() as nursery:
            path = Path(folder, "arena")
            await nursery.start(partial(serve_arena, arena, path, admits=token.__eq__))
            ports = []
            for serve in (partial(_serve_link, arena, stored), answer):
                (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
                nursery.start_soon(trio.serve_listeners, serve, [listener])
                ports.append(listener.socket.getsockname()[1])
            yield SourceAddress(ports[0], ports[1], str(path), token)
            nursery.cancel_scope.cancel()


def _store(arena: Arena, number: int, tokens: int) -> tuple[Outcome, TokenBuffer]:
    """Return an outcome with arrays in the arena."""
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
    """Serve a trainer's connection.

    Outcomes follow as far as the last `Ack` allows, by reference after `AttachArena`.
    """
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


async def _answer_json(outcomes: Sequence[Outcome], call: HttpCall) -> Answer:
    """Answer in the reference's way, with lists of numbers as JSON."""
    await trio.lowlevel.checkpoint()
    outcome = outcomes[int(call.path.rsplit("/", 1)[1]) % len(outcomes)]
    assert outcome.trajectory is not None
    segment = outcome.trajectory.segments[0]
    arrays = {name: getattr(segment, name).tolist() for name in ("token_ids", "logprobs", "loss_mask")}
    return Answer(200, json.dumps({"job_id": outcome.job_id, "reward": outcome.reward} | arrays).encode())


OUTCOMES = 64
QUICK_ROUNDS, ROUNDS = 15, 60
WARM_UP_ROUNDS = 2
WS_AT_LEAST_MB_S = 150.0
SHM_AT_LEAST_MB_S = 1_000.0
ENCODE_MAX_MS = 0.3
ENCODE_BURST = 10
JSON_TIMEOUT_S = 60.0


class Load(msgspec.Struct, frozen=True):
    """The size of outcomes in tokens, and their number per round by WebSocket and by reference.

    JSON uses a single one.
    """

    tokens: int
    pass_outcomes: int

    @property
    def megabytes(self) -> float:
        """Return the size of one outcome at 9 bytes per token, regardless of the bytes on the socket."""
        return self.tokens * BYTES_PER_TOKEN / 1e6


LARGE = Load(tokens=32_768, pass_outcomes=64)
SMALL = Load(tokens=1_024, pass_outcomes=256)
"""A load that shows the fixed cost of an outcome. Its number is the node's limit of unacknowledged outcomes."""


class Arrays:
    """Three arrays as the destination of every outcome's tokens."""

    def __init__(self, load: Load) -> None:
        self._ids = np.zeros(load.tokens, np.int32)
        self._logprobs = np.zeros(load.tokens, np.float32)
        self._mask = np.zeros(load.tokens, np.uint8)

    def copy(self, token_ids: Any, logprobs: Any, loss_mask: Any) -> None:
        self._ids[:], self._logprobs[:], self._mask[:] = token_ids, logprobs, loss_mask

    def take(self, outcome: Outcome) -> None:
        assert outcome.trajectory is not None
        segment = outcome.trajectory.segments[0]
        self.copy(segment.token_ids, segment.logprobs, segment.loss_mask)


class LinkTrainer:
    """Receives outcomes over a WebSocket link, by reference if it has mapped the arena. Copies all of their tokens."""

    def __init__(self, load: Load, mapped: MappedArena | None = None) -> None:
        self._load, self._mapped = load, mapped
        self._arrays = Arrays(load)
        self._link: WebSocketLink[ServerFrame] | None = None
        self._decode = msgspec.msgpack.Decoder(ServerMessage).decode
        self._outcomes = msgspec.msgpack.Decoder(Outcome)
        self._cursor = 0
        self.wire_bytes = 0
        self.last: Outcome | None = None
        self.outside = 0

    @property
    def bytes_per_token(self) -> float:
        return self.wire_bytes / (self._cursor * self._load.tokens)

    def decode(self, message: bytes) -> Any:
        """Decode a message of the link, and count its bytes."""
        self.wire_bytes += len(message)
        return self._decode(message)

    def attach(self, link: WebSocketLink[ServerFrame]) -> None:
        self._link = link
        if self._mapped is not None:
            link.post(AttachArena(reader_id=self._mapped.reader_id))

    def end(self) -> None:
        assert self._link is not None
        self._link.end(CloseCode.NORMAL, "")

    async def receive(self) -> float:
        """Receive a pass of outcomes; return the seconds for each."""
        assert self._link is not None
        count = self._load.pass_outcomes
        started = time.perf_counter()
        self._cursor += count
        self._link.post(Ack(cursor=self._cursor))
        for _ in range(count):
            self.last = self._read(await self._link.receive())
            self._arrays.take(self.last)
        taken_s = time.perf_counter() - started
        self._count_outside()
        return taken_s / count

    def _read(self, frame: ServerFrame) -> Outcome:
        match frame:
            case OutcomeFrame(outcome=raw):
                return self._outcomes.decode(raw)
            case OutcomeRefFrame():
                assert self._mapped is not None
                return join_outcome(frame, self._mapped)
            case _:
                raise AssertionError(f"unexpected frame {frame}")

    def _count_outside(self) -> None:
        """Count an array of the last outcome as copied if it is outside of the mapping."""
        if self._mapped is None or self.last is None or self.last.trajectory is None:
            return
        memory, segment = self._mapped.memory, self.last.trajectory.segments[0]
        first = np.frombuffer(memory.mapping, "u1", 1).__array_interface__["data"][0]
        for array in (segment.token_ids, segment.logprobs, segment.loss_mask):
            offset = array.__array_interface__["data"][0] - first
            self.outside += not 0 <= offset < len(memory.mapping)


class JsonTrainer:
    """Receives outcomes as JSON over one persistent HTTP connection."""

    def __init__(self, load: Load, port: int) -> None:
        self._arrays = Arrays(load)
        self.http = HttpClient(f"http://127.0.0.1:{port}", limits=HttpLimits(max_connections=1))
        self._tokens = load.tokens
        self._number = 0
        self.wire_bytes = 0

    @property
    def bytes_per_token(self) -> float:
        return self.wire_bytes / (self._number * self._tokens)

    async def receive(self) -> float:
        """Receive an outcome; return the seconds."""
        started = time.perf_counter()
        self._number += 1
        body = (await self.http.request("GET", f"/outcome/{self._number}", timeout_s=JSON_TIMEOUT_S)).body
        said = json.loads(body)
        self._arrays.copy(said["token_ids"], said["logprobs"], said["loss_mask"])
        self.wire_bytes += len(body)
        return time.perf_counter() - started


async def benchmark(options: Options) -> Report:
    """Measure all ways, interleaved."""
    encoder = msgspec.msgpack.Encoder()

    async def encode() -> None:
        encoder.encode(by_ws.last)

    async with _open_ways(LARGE) as (by_ref, by_ws, by_json), _open_ways(SMALL) as (small_ref, small_ws, _):
        await by_ws.receive()
        cases = [
            Case(name="wire.encode", run=encode, burst=ENCODE_BURST, max_p50=ENCODE_MAX_MS),
            Case(name="deliver.shm", run=by_ref.receive, self_timed=True),
            Case(name="deliver.ws", run=by_ws.receive, self_timed=True),
            Case(name="deliver.json", run=by_json.receive, self_timed=True, peer=True),
            Case(name="deliver.shm_small", run=small_ref.receive, self_timed=True),
            Case(name="deliver.ws_small", run=small_ws.receive, self_timed=True),
        ]
        rounds = QUICK_ROUNDS if options.quick else ROUNDS
        series = await measure_interleaved(cases, rounds=rounds, warm_up_rounds=WARM_UP_ROUNDS)
    ways = [(one, SMALL if one.case.name.endswith("_small") else LARGE) for one in series if one.case.self_timed]
    metrics = {f"{one.case.name}_mb_s": 1e3 * load.megabytes / one.percentile(50) for one, load in ways}
    return Report(
        title=f"delivery of outcomes of {LARGE.tokens:,} tokens, and of {SMALL.tokens:,}",
        series=series,
        more_metrics=metrics
        | {
            "deliver.shm_arrays_copied": by_ref.outside + small_ref.outside,
            "deliver.shm_bytes_per_token": by_ref.bytes_per_token,
            "wire.bytes_per_token": by_ws.bytes_per_token,
            "deliver.json_bytes_per_token": by_json.bytes_per_token,
        },
        at_least={"deliver.ws_mb_s": WS_AT_LEAST_MB_S, "deliver.shm_mb_s": SHM_AT_LEAST_MB_S},
        notes=caption_of("delivery"),
    )


@asynccontextmanager
async def _open_ways(load: Load) -> AsyncIterator[tuple[LinkTrainer, LinkTrainer, JsonTrainer]]:
    """Open a source of outcomes and its trainers: by reference, by WebSocket, by JSON. All end with the block."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-perf-")))
        child = open_child(serve_source, str(folder), OUTCOMES, load.tokens, ready=SourceAddress)
        _, source = await stack.enter_async_context(child)
        mapped = await stack.enter_async_context(open_mapped_arena(source.arena_socket, token=source.token))
        by_ref, by_ws = LinkTrainer(load, mapped), LinkTrainer(load)
        by_json = JsonTrainer(load, source.json_port)
        stack.callback(by_json.http.close)
        async with open_single_nursery() as nursery:
            for trainer in (by_ref, by_ws):
                await nursery.start(_connect, source, trainer)
            yield by_ref, by_ws, by_json
            by_ref.end()
            by_ws.end()


async def _connect(
    source: SourceAddress, trainer: LinkTrainer, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    stream = await trio.open_tcp_stream("127.0.0.1", source.port)
    async with open_client_link(stream, "127.0.0.1", "/", trainer.decode, LinkLimits()) as link:
        trainer.attach(link)
        task_status.started()
        await link.run(trio.sleep_forever)


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark))
