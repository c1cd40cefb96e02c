"""The cost of a fleet's head by the number of its nodes, measured over real connections to nodes without work.

The head, with its ledger on a disk, runs in one process, the nodes in another, and this process is the trainer.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec
import numpy as np
import trio

from perf.harness import tell
from perf.processes import open_child, raise_file_limit
from perf.rollouts import TOKEN, submit_all
from prorl_ipc.nursery import open_single_nursery
from prorl_trio.client import connect
from prorl_trio.config import HeadConfig, ListenConfig
from prorl_trio.edges.auth import Door
from prorl_trio.edges.serve import serve_edges
from prorl_trio.fleet.serve import serve_fleet
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.ledger import MemoryLedger
from prorl_trio.rendezvous.entry import Capacity, NodeEntry, this_process
from prorl_trio.rendezvous.folder import claim_folder, renew_entry, write_entry
from prorl_trio.rendezvous.watch import FleetWatch
from prorl_trio.sessions.journal import Journal
from prorl_trio.sessions.limits import SessionLimits
from prorl_trio.sessions.node_api import Room
from prorl_trio.sessions.session_table import SessionTable
from prorl_trio.types.errors import BackendError
from prorl_trio.types.models import JobSpec, Outcome, PolicySpan, Segment, TaskInstance, Timing, Trajectory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from prorl_trio.client import RolloutClient
    from prorl_trio.inference.engines.protocol import EngineClient
    from prorl_trio.pipeline.observer import JobView
    from prorl_trio.sessions.node_api import SessionSink
    from prorl_trio.types.backends import AnswerT, NodeRequest
    from prorl_trio.types.models import ToolCall, ToolSchema

HANDLER: Final = "nothing"
PLACES: Final = 64
TOKENS: Final = 64
HEARTBEAT_S: Final = 5.0
MEMBERS_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.1
MIB: Final = 1024 * 1024


class At(msgspec.Struct, frozen=True):
    """The address of a first node, or of a head."""

    url: str


async def _no_engine(url: str, _timeout_s: float) -> EngineClient:
    await trio.lowlevel.checkpoint()
    raise BackendError(f"{url}: there are no engines here", retryable=False)


class _Node:
    """A `NodeApi` whose jobs end inside `take`."""

    def __init__(self, node_id: str, tokens: int) -> None:
        self.node_id = node_id
        self.tokens = tokens
        self.backends = Backends(_no_engine)

    async def operate(self, request: NodeRequest[AnswerT]) -> AnswerT:
        return await self.backends.operate(request)

    def validate(self, spec: JobSpec) -> None:
        """Accept everything."""

    def check(self, spec: JobSpec, sink: SessionSink, ahead: int) -> None:
        """Accept everything."""

    def is_unexamined(self, spec: JobSpec) -> bool:
        """Return False: nothing needs examination."""
        return False

    async def examine(self, specs: Sequence[JobSpec]) -> None:
        """Do nothing: nothing needs examination."""

    def take(self, spec: JobSpec, sink: SessionSink, attempt: int) -> None:
        sink.deliver(_outcome(spec, self.tokens))

    def room(self, session_id: str, ahead: int) -> Room:
        return Room(room=PLACES - ahead, free=PLACES - ahead, run_workers=PLACES)

    async def cancel(self, job_id: str, reason: str) -> None:
        """Do nothing: jobs are never live."""
        await trio.lowlevel.checkpoint()

    def cancel_soon(self, job_id: str, reason: str) -> None:
        """Do nothing: jobs are never live."""

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
        """Return the ids as text, because it lacks a tokenizer."""
        del tools
        return str(token_ids), []


def _outcome(spec: JobSpec, tokens: int) -> Outcome:
    segment = Segment.from_arrays(
        np.arange(tokens, dtype="<i4"),
        np.full(tokens, -0.5, dtype="<f4"),
        np.ones(tokens, dtype="u1"),
        [PolicySpan(start=0, end=tokens, policy_version="0", engine="none")],
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
    folder: Path, number: int, tokens: int, nursery: trio.Nursery, *, task_status: trio.TaskStatus[NodeEntry]
) -> NoReturn:
    """Serve a node, and renew its entry."""
    node = _Node(f"node-{number:02d}", tokens)
    sessions = SessionTable(Journal(MemoryLedger(), nursery, sys.maxsize), SessionLimits())
    serve = partial(serve_edges, node, ListenConfig(port=0), Door(TOKEN.encode()), sessions=sessions)
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
async def serve_fakes(path: str, count: int, tokens: int = TOKENS) -> AsyncIterator[At]:
    """Serve nodes without agents in a separate process. Their jobs end as soon as they are submitted.

    Each has a real WebSocket edge, sessions in memory, and an entry in the folder of its fleet.
    """
    folder = claim_folder(Path(path))
    async with open_single_nursery() as nursery:
        entries = [await nursery.start(_serve, folder, number, tokens, nursery) for number in range(count)]
        yield At(entries[0].url)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def serve_head(folder: str) -> AsyncIterator[At]:
    """Serve the head of a fleet, with its ledger in a folder next to the fleet's."""
    fleet = {"dir": folder, "heartbeat_interval_s": HEARTBEAT_S}
    listen = {"port": 0, "token": TOKEN}
    ledger = {"dir": f"{folder}.ledger", "reserve_bytes": MIB}
    config = msgspec.convert({"listen": listen, "fleet": fleet, "ledger": ledger}, HeadConfig)
    async with open_single_nursery() as nursery:
        host, port = await nursery.start(serve_fleet, config)
        yield At(f"ws://{host}:{port}")
        nursery.cancel_scope.cancel()


LONG_TOKENS: Final = 32 * 1024


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """CPU milliseconds for an outcome of `LONG_TOKENS` tokens."""

    head_ms: float
    client_ms: float


async def measure_hop(*, rounds: int) -> dict[str, Hop]:
    """Receive long outcomes in a trainer on the head's machine, and read each token.

    Returns:
        By way: "by reference", where the trainer maps the head's arena, and "as frames".
    """
    tell(f"{rounds * BATCH} outcomes of {LONG_TOKENS} tokens through the head of one node, for what they cost it")
    with tempfile.TemporaryDirectory(prefix="prorl-perf-") as name:
        folder, hops = Path(name) / "fleet", {}
        async with (
            open_child(serve_fakes, str(folder), 1, LONG_TOKENS, ready=At),
            open_child(serve_head, str(folder), ready=At) as (head, _),
        ):
            for way, shared_memory in (("by reference", True), ("as frames", False)):
                async with connect(fleet=folder, shared_memory=shared_memory) as client:
                    await _wait_members(client, 1)
                    head_s, client_s, _ = await _measure_jobs(client, rounds, head.cpu_s)
                hops[way] = Hop(head_ms=1e3 * head_s, client_ms=1e3 * client_s)
    return hops


READS: Final = 50
BATCH: Final = 50


async def measure_fleet_cost(nodes: int, *, rounds: int, idle_s: float) -> dict[str, float]:
    """Submit `rounds` batches of jobs to the head of a fleet of `nodes` nodes, and then to one node alone.

    Returns:
        `job_ms`: the head's CPU per job, from its submission to its outcome, including periodic work. `client_job_ms`:
        CPU
        of the trainer's client per job submitted to the head; `plain_job_ms`: to a node. `delay_ms`: median time of a
        single job through the head; `plain_delay_ms`: to one node. Such a job ends as soon as a node receives it, so
        this
        is the transit time. `folder_read_ms`: CPU for reading the fleet's folder, which the head does every second.
        `idle_busy`: the head's share of a core without jobs.
    """
    tell(f"{rounds * BATCH} jobs through the head of {nodes} nodes that do nothing, for what they cost it")
    raise_file_limit()
    with tempfile.TemporaryDirectory(prefix="prorl-perf-") as name:
        folder = Path(name) / "fleet"
        async with (
            open_child(serve_fakes, str(folder), nodes, ready=At) as (_, node),
            open_child(serve_head, str(folder), ready=At) as (head, at),
        ):
            async with connect(at.url, TOKEN) as client:
                await _wait_members(client, nodes)
                job_s, client_s, delay_s = await _measure_jobs(client, rounds, head.cpu_s)
                cpu_s = head.cpu_s()
                await trio.sleep(idle_s)
                idle_busy = (head.cpu_s() - cpu_s) / idle_s
            read_s = await trio.to_thread.run_sync(time_reads, folder)
            async with connect(node.url, TOKEN) as client:
                _, plain_s, plain_delay_s = await _measure_jobs(client, rounds, head.cpu_s)
    return {
        "job_ms": 1e3 * job_s,
        "client_job_ms": 1e3 * client_s,
        "plain_job_ms": 1e3 * plain_s,
        "delay_ms": 1e3 * delay_s,
        "plain_delay_ms": 1e3 * plain_delay_s,
        "folder_read_ms": 1e3 * read_s,
        "idle_busy": idle_busy,
    }


async def _measure_jobs(
    client: RolloutClient, rounds: int, head_cpu_s: Callable[[], float]
) -> tuple[float, float, float]:
    """Return the CPU per job of the head and of this process, and the median time of a single job."""
    await _batch(client, "warm-up")
    cpu_s, began_s = head_cpu_s(), time.process_time()
    for number in range(rounds):
        await _batch(client, str(number))
    client_s, head_s = time.process_time() - began_s, head_cpu_s() - cpu_s
    waits_s = []
    for number in range(rounds):
        began_s = time.perf_counter()
        await _batch(client, f"alone-{number}", jobs=1)
        waits_s.append(time.perf_counter() - began_s)
    return head_s / (rounds * BATCH), client_s / (rounds * BATCH), median(waits_s)


async def _wait_members(client: RolloutClient, nodes: int) -> None:
    """Return when all nodes receive jobs.

    Raises:
        trio.TooSlowError: they do not within `MEMBERS_TIMEOUT_S`.
    """
    with trio.fail_after(MEMBERS_TIMEOUT_S):
        while _places(await client.status()) < nodes * PLACES:  # noqa: ASYNC110 - the head asks by a timer
            await trio.sleep(POLL_S)


def _places(status: dict[str, Any]) -> int:
    return sum(member["free_places"] for member in status["members"].values())


async def _batch(client: RolloutClient, name: str, *, jobs: int = BATCH) -> None:
    specs = [
        JobSpec(job_id=job_id, instance=TaskInstance(instance_id=job_id, handler=HANDLER, payload={}))
        for job_id in [f"{name}-{number}" for number in range(jobs)]
    ]
    await submit_all(client, specs)
    async for outcome in client.results(jobs):
        assert outcome.trajectory is not None
        outcome.trajectory.segments[0].token_ids.sum()


def time_reads(folder: Path) -> float:
    """Return this thread's CPU time for reading the folder, which a head does every second."""
    watch = FleetWatch(folder)
    watch.read()  # the first read gets the disk's clock
    began_s = time.thread_time()
    for _ in range(READS):
        watch.read()
    return (time.thread_time() - began_s) / READS
