"""What it costs to get finished trajectories to a trainer in another process of this machine: by reference into the
arena, as frames over a WebSocket, and, the way of the reference, as lists of numbers in JSON over HTTP.

Timed for each outcome, from asking for it until its tokens lie in an array of the trainer's own.

    python -m perf.delivery [--quick] [--json FILE]
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import trio

from ipc.arena_socket import open_mapped_arena
from ipc.nursery import open_single_nursery
from ipc.session import Ack, AttachArena, OutcomeFrame, OutcomeRefFrame, ServerFrame
from ipc.websocket import CloseCode, LinkLimits, WebSocketLink, open_client_link
from perf.delivery_source import BYTES_PER_TOKEN, SourceAddress, open_source
from perf.harness import Case, Options, Report, measure_interleaved, run_benchmark
from prorl_trio.models import Outcome
from prorl_trio.outcome_refs import join_outcome

if TYPE_CHECKING:
    from ipc.arena_socket import MappedArena

__all__ = ["benchmark"]

TOKENS = 32_768
OUTCOMES = 64
QUICK_ROUNDS, ROUNDS = 15, 60
WARM_UP_ROUNDS = 2
PASS_OUTCOMES = 64
"""Delivered in one round by WebSocket and by reference; by JSON it is one."""
WS_AT_LEAST_MB_S = 150.0
SHM_AT_LEAST_MB_S = 1_000.0
ENCODE_MAX_MS = 0.3
ENCODE_BURST = 10
JSON_TIMEOUT_S = 60.0


class Trainer:
    """The receiving end: three arrays that every outcome's tokens are copied into, and counts of what came."""

    def __init__(self) -> None:
        self._ids = np.zeros(TOKENS, np.int32)
        self._logprobs = np.zeros(TOKENS, np.float32)
        self._mask = np.zeros(TOKENS, np.uint8)
        self.wire_bytes = 0
        self.tokens = 0

    def take(self, token_ids: Any, logprobs: Any, loss_mask: Any, wire_bytes: int) -> None:
        """Copy one outcome's arrays, or lists."""
        self._ids[:], self._logprobs[:], self._mask[:] = token_ids, logprobs, loss_mask
        self.wire_bytes += wire_bytes
        self.tokens += TOKENS

    def take_outcome(self, outcome: Outcome, wire_bytes: int) -> None:
        """The same for an outcome."""
        assert outcome.trajectory is not None
        segment = outcome.trajectory.segments[0]
        self.take(segment.token_ids, segment.logprobs, segment.loss_mask, wire_bytes)

    @property
    def bytes_per_token(self) -> float:
        """That crossed the socket."""
        return self.wire_bytes / self.tokens


class LinkTrainer(Trainer):
    """Outcomes over a WebSocket link; by reference if it has mapped the arena."""

    def __init__(self, mapped: MappedArena | None = None) -> None:
        super().__init__()
        self._mapped = mapped
        self._link: WebSocketLink[ServerFrame] | None = None
        self._frames: msgspec.msgpack.Decoder[ServerFrame] = msgspec.msgpack.Decoder(ServerFrame)
        self._outcomes = msgspec.msgpack.Decoder(Outcome)
        self._message_bytes = 0
        self._cursor = 0
        self.last: Outcome | None = None
        self.outside = 0

    def decode(self, message: bytes) -> ServerFrame:
        """As the link wants it; notes the size."""
        self._message_bytes = len(message)
        return self._frames.decode(message)

    def attach(self, link: WebSocketLink[ServerFrame]) -> None:
        """Receive over this link."""
        self._link = link
        if self._mapped is not None:
            link.post(AttachArena(reader_id=self._mapped.reader_id))

    def end(self) -> None:
        """End the connection."""
        assert self._link is not None
        self._link.end(CloseCode.NORMAL, "")

    async def receive(self) -> float:
        """A pass of outcomes; returns the seconds for each."""
        assert self._link is not None
        started = time.perf_counter()
        self._link.post(Ack(cursor=self._cursor + PASS_OUTCOMES))
        for _ in range(PASS_OUTCOMES):
            frame = await self._link.receive()
            size = self._message_bytes
            match frame:
                case OutcomeFrame(outcome=raw):
                    self.last = self._outcomes.decode(raw)
                    self.take_outcome(self.last, size)
                case OutcomeRefFrame():
                    assert self._mapped is not None
                    outcome = join_outcome(frame, self._mapped)
                    self._count_outside(outcome, self._mapped)
                    self.take_outcome(outcome, size)
                case _:
                    raise AssertionError(f"unexpected frame {frame}")
        self._cursor += PASS_OUTCOMES
        return (time.perf_counter() - started) / PASS_OUTCOMES

    def _count_outside(self, outcome: Outcome, mapped: MappedArena) -> None:
        """An array that does not lie in the mapping was copied."""
        assert outcome.trajectory is not None
        segment = outcome.trajectory.segments[0]
        for array in (segment.token_ids, segment.logprobs, segment.loss_mask):
            offset = array.__array_interface__["data"][0] - mapped.memory.address
            self.outside += not 0 <= offset < len(mapped.memory.mapping)


class JsonTrainer(Trainer):
    """Outcomes as JSON over one kept HTTP connection."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=JSON_TIMEOUT_S)
        self._number = 0

    async def receive(self) -> float:
        """One outcome; returns the seconds. Blocks: there is nothing else to do."""
        started = time.perf_counter()
        self._number += 1
        self._connection.request("GET", f"/outcome/{self._number}")
        body = self._connection.getresponse().read()
        said = json.loads(body)
        self.take(said["token_ids"], said["logprobs"], said["loss_mask"], len(body))
        return time.perf_counter() - started

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


async def benchmark(options: Options) -> Report:
    """All three ways, interleaved."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-perf-")))
        source = await stack.enter_async_context(open_source(folder, outcomes=OUTCOMES, tokens=TOKENS))
        mapped = await stack.enter_async_context(open_mapped_arena(source.arena_socket, token=source.token))
        by_ws, by_ref = LinkTrainer(), LinkTrainer(mapped)
        by_json = JsonTrainer(source.json_port)
        stack.callback(by_json.close)
        async with open_single_nursery() as nursery:
            for trainer in (by_ws, by_ref):
                await nursery.start(_connect, source, trainer)
            await by_ws.receive()

            async def encode() -> None:
                encoder.encode(by_ws.last)

            encoder = msgspec.msgpack.Encoder()
            cases = [
                Case(name="wire.encode", run=encode, burst=ENCODE_BURST, max_p50=ENCODE_MAX_MS),
                Case(name="deliver.shm", run=by_ref.receive, self_timed=True),
                Case(name="deliver.ws", run=by_ws.receive, self_timed=True),
                Case(name="deliver.json", run=by_json.receive, self_timed=True, peer=True),
            ]
            rounds = QUICK_ROUNDS if options.quick else ROUNDS
            series = await measure_interleaved(cases, rounds=rounds, warm_up_rounds=WARM_UP_ROUNDS)
            by_ws.end()
            by_ref.end()
    megabytes = TOKENS * BYTES_PER_TOKEN / 1e6
    ways = [one for one in series if one.case.self_timed]
    metrics = {f"{one.case.name}_mb_s": round(megabytes / (one.percentile(50) / 1e3), 1) for one in ways}
    return Report(
        title=f"delivery of outcomes of {TOKENS:,} tokens",
        series=series,
        more_metrics=metrics
        | {
            "deliver.shm_arrays_copied": by_ref.outside,
            "deliver.shm_bytes_per_token": round(by_ref.bytes_per_token, 4),
            "wire.bytes_per_token": round(by_ws.bytes_per_token, 4),
            "deliver.json_bytes_per_token": round(by_json.bytes_per_token, 2),
        },
        at_least={"deliver.ws_mb_s": WS_AT_LEAST_MB_S, "deliver.shm_mb_s": SHM_AT_LEAST_MB_S},
        notes=["MB/s count 9 bytes a token, whatever crosses the socket; both processes share this machine's cores"],
    )


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
