"""The cost of a fleet's client by the number of its nodes, measured over real connections to nodes without work.

The nodes are in a process of their own, so that the CPU of this one is the client's. What grows
with the nodes is to ask all of them for their room; it is timed alone, as the client does it only every `FRESH_S`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec
import numpy as np
import trio

from ipc.nursery import open_single_nursery
from perf.harness import tell
from perf.processes import open_child, raise_file_limit
from perf.rollouts import TOKEN, submit_all
from prorl_trio.client import connect
from prorl_trio.client.fleet.rooms import FRESH_S, Rooms
from prorl_trio.client.fleet.state import FleetState
from prorl_trio.config import ListenConfig
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.ledger import MemoryLedger
from prorl_trio.rendezvous.entry import Capacity, NodeEntry
from prorl_trio.rendezvous.folder import claim_folder, renew_entry, write_entry
from prorl_trio.rendezvous.identity import this_process
from prorl_trio.rendezvous.watch import FleetWatch
from prorl_trio.service.auth import Door
from prorl_trio.service.limits import SessionLimits
from prorl_trio.service.node_api import Room
from prorl_trio.service.sessions.journal import Journal
from prorl_trio.service.sessions.session_table import SessionTable
from prorl_trio.service.websocket.server import serve_websocket
from prorl_trio.types.errors import BackendError
from prorl_trio.types.models import JobSpec, Outcome, PolicySpan, Segment, TaskInstance, Timing, Trajectory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from prorl_trio.chat.messages import ToolSchema
    from prorl_trio.client import RolloutClient
    from prorl_trio.inference.engines.protocol import EngineClient
    from prorl_trio.pipeline.observer import JobView
    from prorl_trio.pipeline.pipeline import JobSink
    from prorl_trio.types.models import ToolCall

HANDLER: Final = "nothing"
PLACES: Final = 64
TOKENS: Final = 64
HEARTBEAT_S: Final = 5.0


class FakeNodes(msgspec.Struct, frozen=True):
    """The folder of the fleet, and the address of its first node."""

    folder: str
    url: str


async def _no_engine(url: str, _timeout_s: float) -> EngineClient:
    await trio.lowlevel.checkpoint()
    raise BackendError(f"{url}: there are no engines here", retryable=False)


class _Node:
    """A `NodeApi` whose jobs end inside `take`."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.backends = Backends(_no_engine)

    def check(self, spec: JobSpec, sink: JobSink, ahead: int) -> None:
        """It takes everything."""

    def is_unexamined(self, spec: JobSpec) -> bool:
        """It examines nothing."""
        return False

    async def examine(self, specs: Sequence[JobSpec]) -> None:
        """It examines nothing."""

    def take(self, spec: JobSpec, sink: JobSink, attempt: int) -> None:
        sink.deliver(_outcome(spec))

    def room(self, session_id: str, ahead: int) -> Room:
        return Room(room=PLACES - ahead, free=PLACES - ahead, run_workers=PLACES)

    async def cancel(self, job_id: str, reason: str) -> None:
        """No job is ever live."""
        await trio.lowlevel.checkpoint()

    def cancel_soon(self, job_id: str, reason: str) -> None:
        """See `NodeApi`."""

    def statistics(self) -> dict[str, object]:
        return {"node_id": self.node_id}

    def find_jobs(self, matches: object, limit: int) -> tuple[int, list[JobView]]:
        del matches, limit
        return 0, []

    def find_job(self, job_id: str) -> JobView | None:
        del job_id
        return None

    def unreadiness(self) -> str:
        return ""

    def read_turn(self, token_ids: Sequence[int], tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall]]:
        """It has no tokenizer."""
        del tools
        return str(token_ids), []


def _outcome(spec: JobSpec) -> Outcome:
    segment = Segment.from_arrays(
        np.arange(TOKENS, dtype="<i4"),
        np.full(TOKENS, -0.5, dtype="<f4"),
        np.ones(TOKENS, dtype="u1"),
        [PolicySpan(start=0, end=TOKENS, policy_version="0", engine="none")],
    )
    return Outcome(
        job_id=spec.job_id,
        instance_id=spec.instance.instance_id,
        group_id="",
        status="completed",
        reward=1.0,
        cause=None,
        error="",
        trajectory=Trajectory(segments=[segment], turns=[], stop_reason="finished"),
        details={},
        timing=Timing(),
    )


async def _serve(
    folder: Path, number: int, nursery: trio.Nursery, *, task_status: trio.TaskStatus[NodeEntry]
) -> NoReturn:
    """Serve a node, and keep its entry fresh."""
    node = _Node(f"node-{number:02d}")
    sessions = SessionTable(Journal(MemoryLedger(), nursery, sys.maxsize), SessionLimits())
    serve = partial(serve_websocket, node, ListenConfig(port=0), Door(TOKEN.encode()), sessions=sessions)
    host, port = await nursery.start(serve)
    entry = NodeEntry(
        node_id=node.node_id,
        url=f"ws://{host}:{port}",
        token=TOKEN,
        host=node.node_id,
        process=this_process(),
        model="none",
        version="perf",
        capacity=Capacity(run_workers=PLACES, max_live=PLACES, live=0),
        heartbeat_interval_s=HEARTBEAT_S,
        stale_after_s=600.0,
    )
    await trio.to_thread.run_sync(write_entry, folder, entry)
    task_status.started(entry)
    while True:
        await trio.sleep(HEARTBEAT_S)
        await trio.to_thread.run_sync(renew_entry, folder, entry)


@asynccontextmanager
async def serve_fakes(path: str, count: int) -> AsyncIterator[FakeNodes]:
    """Serve nodes without agents, whose jobs end as soon as they are taken, in a process of their own.

    Each has a real WebSocket edge, sessions in memory, and an entry in the folder of its fleet.
    """
    folder = claim_folder(Path(path))
    async with open_single_nursery() as nursery:
        entries = [await nursery.start(_serve, folder, number, nursery) for number in range(count)]
        yield FakeNodes(str(folder), entries[0].url)
        nursery.cancel_scope.cancel()


READS: Final = 50
BATCH: Final = 50


class FleetCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a fleet of `nodes` to its client, in seconds of its CPU.

    Attributes:
        job_s: for a job, from its submission to its outcome, without asking for room; `plain_job_s`: the same of the
            client of one node alone.
        ask_s: to ask all nodes for their room. `round_s`: the time on the wall of that, a median.
        read_s: for a look at the fleet's folder.
        idle_busy: share of a core that the client takes while it has no jobs.
    """

    nodes: int
    job_s: float
    plain_job_s: float
    ask_s: float
    round_s: float
    read_s: float
    idle_busy: float

    @property
    def added_s(self) -> float:
        """CPU for a job that the client of one node alone would not take."""
        return max(0.0, self.job_s - self.plain_job_s)


async def measure_fleet_cost(nodes: int, *, rounds: int, idle_s: float) -> FleetCost:
    """Give so many batches of jobs to a fleet of so many nodes, and then to one node alone."""
    tell(f"{rounds * BATCH} jobs through {nodes} nodes that do nothing, for what they cost the client")
    raise_file_limit()
    with tempfile.TemporaryDirectory(prefix="prorl-perf-") as name:
        folder = Path(name) / "fleet"
        async with open_child(serve_fakes, str(folder), nodes, ready=FakeNodes) as (_, fakes):
            async with connect(fleet=fakes.folder, connect_timeout_s=60.0) as client:
                ask_s, round_s = await _time_asking(client, rounds)
                batch_s = await _time_batches(client, rounds)
                began_s = time.process_time()
                await trio.sleep(idle_s)
                idle_busy = (time.process_time() - began_s) / idle_s
            read_s = await trio.to_thread.run_sync(time_reads, folder)
            async with connect(fakes.url, TOKEN) as client:
                plain_s = await _time_batches(client, rounds)
    return FleetCost(
        nodes=nodes,
        job_s=max(0.0, batch_s - ask_s) / BATCH,
        plain_job_s=plain_s / BATCH,
        ask_s=ask_s,
        round_s=round_s,
        read_s=read_s,
        idle_busy=idle_busy,
    )


async def _time_asking(client: RolloutClient, rounds: int) -> tuple[float, float]:
    """Return the CPU of this process for asking all nodes once, and the median time of that."""
    state = client.session_state
    assert isinstance(state, FleetState)
    rooms = Rooms(state)
    waits_s = []
    await rooms.look()
    cpu_s = time.process_time()
    for _ in range(rounds):
        rooms.forget()
        began_s = time.perf_counter()
        await rooms.look()
        waits_s.append(time.perf_counter() - began_s)
    return (time.process_time() - cpu_s) / rounds, sorted(waits_s)[rounds // 2]


async def _time_batches(client: RolloutClient, rounds: int) -> float:
    """Return the CPU of this process for a batch, which asks for room once."""
    await _batch(client, "warm-up")
    began_s = time.process_time()
    for number in range(rounds):
        await trio.sleep(FRESH_S)  # idle: it is known no more who has room
        await _batch(client, str(number))
    return (time.process_time() - began_s) / rounds


async def _batch(client: RolloutClient, name: str) -> None:
    specs = [
        JobSpec(job_id=job_id, instance=TaskInstance(instance_id=job_id, handler=HANDLER, payload={}))
        for job_id in [f"{name}-{number}" for number in range(BATCH)]
    ]
    await submit_all(client, specs)
    async for _ in client.results(BATCH):
        pass


def time_reads(folder: Path) -> float:
    """Return the CPU of this thread for a look at the folder, as a client takes it every second."""
    watch = FleetWatch(folder)
    watch.read()  # the first one asks the disk for its time
    began_s = time.thread_time()
    for _ in range(READS):
        watch.read()
    return (time.thread_time() - began_s) / READS
