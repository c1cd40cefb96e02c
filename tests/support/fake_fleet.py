"""A fleet of fake nodes behind real WebSocket edges, each with an entry in a folder, that come and go."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from prorl_trio.rendezvous.entry import Capacity, NodeEntry, this_process
from prorl_trio.rendezvous.folder import claim_folder, remove_entry, renew_entry, write_entry
from prorl_trio.sessions.limits import SessionLimits
from support.fake_node import FakeNode
from support.fake_service import TOKEN, open_service
from support.sessions import sessions_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from prorl_trio.client import RolloutClient
    from prorl_trio.types.models import JobSpec, Outcome
    from support.fake_node import PretendedEngine
    from support.fake_service import Service

BEAT_S = 0.05
PATIENT_S = 30.0


def entry_of(node_id: str, url: str = "ws://127.0.0.1:1", **changes: Any) -> NodeEntry:
    """The entry of a node of this process."""
    fields: dict[str, Any] = {
        "node_id": node_id,
        "url": url,
        "token": TOKEN,
        "host": "h1",
        "process": this_process(),
        "model": "m 0123",
        "version": "1",
        "capacity": Capacity(run_workers=8, max_live=100, live=0),
        "heartbeat_interval_s": BEAT_S,
        "stale_after_s": PATIENT_S,
    }
    return NodeEntry(**{**fields, **changes})


class FleetNode:
    """A node of the fleet: `node` is the fake. It lives from `start` to `cut`; its sessions outlive that.

    Attributes:
        clock_ahead_s: what its machine's clock is ahead of others', by which its heartbeats are dated.
    """

    def __init__(self, fleet: FakeFleet, node: FakeNode, **entry: Any) -> None:
        self.node = node
        self.node_id = node.node_id
        self.clock_ahead_s = 0.0
        self.service: Service
        self.entry: NodeEntry
        self._fleet = fleet
        self.changes = entry
        self.sessions = sessions_in(fleet.nursery, SessionLimits())
        self._scope = trio.CancelScope()
        self._stopped = trio.Event()

    async def start(self) -> None:
        """Listen, and write the entry."""
        self._scope = trio.CancelScope()
        await self._fleet.nursery.start(self._serve)

    async def _serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        with self._scope, self._until_stopped():
            async with open_service(self.node, sessions=self.sessions) as self.service:
                self.entry = entry_of(self.node_id, self.service.url, **self.changes)
                write_entry(self._fleet.folder, self.entry)
                task_status.started()
                while True:
                    self._beat()
                    await trio.sleep(BEAT_S)

    def _beat(self) -> None:
        renew_entry(self._fleet.folder, self.entry)
        if self.clock_ahead_s:
            path = self._fleet.folder / f"{self.node_id}.json"
            at_s = path.stat().st_mtime + self.clock_ahead_s
            os.utime(path, (at_s, at_s))

    @contextmanager
    def _until_stopped(self) -> Iterator[None]:
        self._stopped = trio.Event()
        try:
            yield
        finally:
            self._stopped.set()

    async def cut(self) -> None:
        """End its connections and its heartbeat; the entry and its jobs stay."""
        self._scope.cancel()
        await self._stopped.wait()

    async def kill(self) -> None:
        """Do as `cut`, and look like a process of this machine that has ended."""
        process = msgspec.structs.replace(self.entry.process, start_time=0)
        write_entry(self._fleet.folder, msgspec.structs.replace(self.entry, process=process))
        await self.cut()

    def forget(self) -> None:
        """Lose all sessions and jobs, as with its disk. For a node that is cut."""
        self.sessions = sessions_in(self._fleet.nursery, SessionLimits())
        self.node.live.clear()

    async def leave(self) -> None:
        """Take the entry away, and end."""
        remove_entry(self._fleet.folder, self.entry)
        await self.cut()


class FakeFleet:
    """The folder, the nodes, and the engines that all of them can reach, by URL."""

    def __init__(self, folder: Path, nursery: trio.Nursery) -> None:
        self.folder = claim_folder(folder)
        self.nursery = nursery
        self.nodes: dict[str, FleetNode] = {}
        self.engines: dict[str, PretendedEngine] = {}

    def __getitem__(self, node_id: str) -> FleetNode:
        return self.nodes[node_id]

    async def add(
        self, node_id: str, on_submit: Callable[[JobSpec], Outcome | None] | None = None, **entry: Any
    ) -> FleetNode:
        """Start one more node, with the backend http://NODE_ID:8000 or those of `entry`."""
        member = FleetNode(self, await self._node(node_id, entry, on_submit), **entry)
        self.nodes[node_id] = member
        await member.start()
        return member

    async def _node(
        self, node_id: str, entry: dict[str, Any], on_submit: Callable[[JobSpec], Outcome | None] | None
    ) -> FakeNode:
        node = FakeNode(on_submit, self.engines)
        node.node_id = node_id
        for url, weight in entry.setdefault("backends", {f"http://{node_id}:8000": 1.0}).items():
            await node.backends.add(url, weight)
            self.engines[url].call_s = 0.0
        node.backends.configured = frozenset(entry["backends"])
        return node

    async def restart(self, node_id: str) -> FleetNode:
        """Start a node that has ended, as a new process, which has forgotten all, with the backends that it had."""
        changes = self.nodes[node_id].changes
        return await self.add(node_id, **changes)

    def owners(self) -> dict[str, list[str]]:
        """The backends of each node that there is."""
        return {node_id: sorted(member.node.backends.urls()) for node_id, member in self.nodes.items()}

    def where(self) -> dict[str, list[str]]:
        """The live jobs of each node."""
        return {node_id: sorted(member.node.live) for node_id, member in self.nodes.items()}

    async def wait_live(self, **counts: int) -> None:
        """Return when each of these nodes has so many live jobs."""
        for node_id, count in counts.items():
            await self.nodes[node_id].node.wait_live(count)


@asynccontextmanager
async def open_fake_fleet(
    folder: Path, *names: str, on_submit: Callable[[JobSpec], Outcome | None] | None = None, within_s: float = 100.0
) -> AsyncIterator[FakeFleet]:
    """Yield a fleet with these nodes, for so long at most."""
    with trio.fail_after(within_s):
        async with trio.open_nursery() as nursery:
            fleet = FakeFleet(folder, nursery)
            for name in names:
                await fleet.add(name, on_submit)
            yield fleet
            nursery.cancel_scope.cancel()


def finish_all(fleet: FakeFleet, *names: str) -> None:
    """End all live jobs of these nodes, or of all."""
    for name in names or fleet.nodes:
        for job_id in list(fleet[name].node.live):
            fleet[name].node.finish(job_id)


async def take(client: RolloutClient, count: int | None = None) -> list[Outcome]:
    """Return the outcomes until nothing is outstanding, or so many."""
    return [outcome async for outcome in client.results(count)]


async def until(condition: Callable[[], object]) -> None:
    """Return when it holds. The fleet's own time limit is around this."""
    await trio.lowlevel.checkpoint()
    while not condition():  # noqa: ASYNC110 - threads on the disk are the other side
        await trio.sleep(0.01)


async def update(client: RolloutClient, version: str) -> None:
    """Update the policy of the whole fleet, by weights that nobody looks at."""
    async with client.policy_update(version) as change:
        await change.load_folder(f"/weights/{version}", check="none")
