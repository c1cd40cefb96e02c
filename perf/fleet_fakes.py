"""Nodes without agents for `perf.fleet_client`, in a process of their own: jobs end as soon as they are taken.

Each has a real WebSocket edge, sessions in memory, and an entry in the folder of its fleet. Ends with its standard
input.

    python -m perf.fleet_fakes FOLDER NODES
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec
import numpy as np
import trio

from ipc.nursery import open_single_nursery
from perf.children import raise_file_limit, say_ready
from prorl_trio.config import ListenConfig
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.ledger import MemoryLedger
from prorl_trio.rendezvous.entry import Capacity, NodeEntry
from prorl_trio.rendezvous.folder import claim_folder, renew_entry, write_entry
from prorl_trio.rendezvous.identity import this_process
from prorl_trio.service.auth import Door
from prorl_trio.service.serve import serve_edges
from prorl_trio.sessions.journal import Journal
from prorl_trio.sessions.limits import SessionLimits
from prorl_trio.sessions.node_api import Room
from prorl_trio.sessions.session_table import SessionTable
from prorl_trio.types.errors import BackendError
from prorl_trio.types.models import Outcome, PolicySpan, Segment, Timing, Trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.chat.messages import ToolSchema
    from prorl_trio.inference.engines.protocol import EngineClient
    from prorl_trio.pipeline.observer import JobView
    from prorl_trio.pipeline.pipeline import JobSink
    from prorl_trio.types.backends import AnswerT, BackendRequest
    from prorl_trio.types.models import JobSpec, ToolCall

__all__ = ["TOKEN", "FakeNodes"]

TOKEN: Final = "a-token-of-the-benchmark"
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

    async def operate(self, request: BackendRequest[AnswerT]) -> AnswerT:
        """See `NodeApi`."""
        return await self.backends.operate(request)

    def validate(self, spec: JobSpec) -> None:
        """See `NodeApi`. Nothing speaks against any job."""

    def check(self, spec: JobSpec, sink: JobSink, ahead: int) -> None:
        """See `NodeApi`. It takes everything."""

    def is_unexamined(self, spec: JobSpec) -> bool:
        """See `NodeApi`. It examines nothing."""
        return False

    async def examine(self, specs: Sequence[JobSpec]) -> None:
        """See `NodeApi`. It examines nothing."""

    def take(self, spec: JobSpec, sink: JobSink, attempt: int) -> None:
        """See `NodeApi`."""
        sink.deliver(_outcome(spec))

    def room(self, session_id: str, ahead: int) -> Room:
        """See `NodeApi`."""
        return Room(room=PLACES - ahead, free=PLACES - ahead, run_workers=PLACES)

    async def cancel(self, job_id: str, reason: str) -> None:
        """See `NodeApi`. No job is ever live."""
        await trio.lowlevel.checkpoint()

    def cancel_soon(self, job_id: str, reason: str) -> None:
        """See `NodeApi`."""

    def statistics(self) -> dict[str, object]:
        """See `NodeApi`."""
        return {"node_id": self.node_id}

    def find_jobs(self, matches: object, limit: int) -> tuple[int, list[JobView]]:
        """See `NodeApi`."""
        del matches, limit
        return 0, []

    def find_job(self, job_id: str) -> JobView | None:
        """See `NodeApi`."""
        del job_id
        return None

    def unreadiness(self) -> str:
        """See `NodeApi`."""
        return ""

    def read_turn(self, token_ids: Sequence[int], tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall]]:
        """See `NodeApi`. It has no tokenizer."""
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


async def _main(folder: Path, count: int) -> None:
    raise_file_limit()
    folder = claim_folder(folder)
    async with open_single_nursery() as nursery:
        entries = [await nursery.start(_serve, folder, number, nursery) for number in range(count)]
        say_ready(FakeNodes(str(folder), entries[0].url))
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(_main, Path(sys.argv[1]), int(sys.argv[2]))
