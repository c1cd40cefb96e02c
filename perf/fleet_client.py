"""The cost of a fleet's client by the number of its nodes, measured over real connections to nodes without work.

The nodes (`perf.fleet_fakes`) are in a process of their own, so that the CPU of this one is the client's. What grows
with the nodes is to ask all of them for their room; it is timed alone, as the client does it only every `FRESH_S`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from ipc.session import Accepted
from perf.children import open_child, raise_file_limit
from perf.fleet_fakes import HANDLER, TOKEN, FakeNodes
from perf.harness import tell
from prorl_trio.client import connect
from prorl_trio.client.fleet.rooms import FRESH_S, Rooms
from prorl_trio.client.fleet.state import FleetState
from prorl_trio.rendezvous.watch import FleetWatch
from prorl_trio.types.models import JobSpec, TaskInstance

if TYPE_CHECKING:
    from prorl_trio.client import RolloutClient

__all__ = ["FleetCost", "measure_fleet_cost", "time_reads"]

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
        async with open_child("perf.fleet_fakes", [str(folder), str(nodes)], FakeNodes) as (_, fakes):
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
    for answer in await client.submit(specs):
        if not isinstance(answer, Accepted):
            raise RuntimeError(f"job {answer.job_id} was rejected: {answer.message}")
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
