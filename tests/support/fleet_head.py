"""A head over fake nodes behind a real WebSocket edge, whose sessions are on a disk or in memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.config import HeadConfig, LedgerConfig
from prorl_trio.fleet import head as head_module
from prorl_trio.fleet import members, pools
from prorl_trio.fleet import pools as policy
from prorl_trio.fleet.head import open_fleet_head
from prorl_trio.ledger import LedgerLimits, MemoryLedger, open_ledger
from prorl_trio.rendezvous.head import HeadEntry, renew_head
from prorl_trio.rendezvous.watch import FleetWatch
from prorl_trio.sessions.journal import open_journal
from prorl_trio.sessions.session_table import SessionTable, recover_sessions
from support.fake_fleet import entry_of, open_fake_fleet
from support.fake_node import make_outcome
from support.fake_service import TOKEN, open_service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from pathlib import Path

    from prorl_trio.client import RolloutClient
    from prorl_trio.fleet.head import Fleet
    from prorl_trio.sessions.node_api import SessionSink
    from prorl_trio.types.models import JobSpec, Outcome
    from support.fake_fleet import FakeFleet
    from support.fake_node import FakeNode
    from support.fake_service import Service

MIB = 1024 * 1024
LIMITS = LedgerLimits(log_bytes=MIB, reserve_bytes=MIB, max_bytes=64 * MIB)
RESTORED = LedgerConfig(max_attempts=1_000_000)


class Head:
    """A head that listens: `fleet` is the head itself, `sessions` its sessions, `service.url` its address."""

    def __init__(self, fleet: Fleet, sessions: SessionTable, service: Service) -> None:
        self.fleet = fleet
        self.sessions = sessions
        self.service = service

    @property
    def url(self) -> str:
        return self.service.url

    async def wait_members(self, *names: str) -> None:
        """Return when these nodes, and no others, are members that get jobs."""
        while not self.has_members(*names):  # noqa: ASYNC110 - reports of their room come by a timer
            await trio.sleep(0.01)

    @property
    def names(self) -> list[str]:
        """The members with a session, by name."""
        return sorted(self.fleet.members.all)

    def is_settled(self) -> bool:
        """Return whether each living node has joined or is left out, and its policy is known or waits for an update."""
        policy = self.fleet._pools.policy
        there = self.fleet.dispatch.members
        return (
            self.fleet.members.settled
            and (policy.settled or policy.waiting)
            and all(name in there and there[name].workers for name in self.fleet.members.all)
        )

    def has_members(self, *names: str) -> bool:
        ready = {name for name, member in self.fleet.dispatch.members.items() if member.workers and not member.behind}
        return ready == set(names) and set(self.fleet.members.all) == set(names)


def head_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have heads look at the folder, ask members, and try again, within hundredths of a second."""
    monkeypatch.setattr(members, "WATCH_INTERVAL_S", 0.05)
    monkeypatch.setattr(members, "RETRY_S", 0.05)
    monkeypatch.setattr(head_module, "ROOM_INTERVAL_S", 0.05)
    monkeypatch.setattr(head_module, "STATUS_INTERVAL_S", 0.05)
    monkeypatch.setattr(head_module, "RECOVERY_POLL_S", 0.02)
    monkeypatch.setattr(policy, "RETRY_S", 0.05)
    monkeypatch.setattr(pools, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(pools, "MAX_RETRY_S", 0.05)


@asynccontextmanager
async def open_head(
    folder: Path,
    *names: str,
    ledger: Path | None = None,
    port: int = 0,
    recovery_timeout_s: float = 20.0,
    config: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> AsyncIterator[Head]:
    """Serve the head of the fleet in `folder` when these nodes have joined. With a `ledger`, it outlives the block."""
    async with _journal(ledger) as journal:
        sessions = SessionTable(journal)
        async with open_fleet_head(
            HeadConfig(**config),
            FleetWatch(folder),
            sessions,
            session_id="head-of-tests",
            is_durable=ledger is not None,
            options={"reconnect_timeout_s": 30.0, **options},
        ) as fleet:
            await recover_sessions(sessions, fleet, RESTORED)
            async with open_service(fleet, sessions=sessions, port=port) as service:
                head = Head(fleet, sessions, service)
                fleet.start_members(recovery_timeout_s)
                if names:
                    await head.wait_members(*names)
                yield head


@asynccontextmanager
async def _journal(ledger: Path | None) -> AsyncIterator[Any]:
    if ledger is None:
        async with open_journal(MemoryLedger(), sys.maxsize) as journal:
            yield journal
        return
    async with open_ledger(ledger, LIMITS) as disk, open_journal(disk, MIB) as journal:
        yield journal


@asynccontextmanager
async def open_all(folder: Path, *names: str, **options: Any) -> AsyncIterator[tuple[FakeFleet, Head, RolloutClient]]:
    """Yield a fleet of these nodes, its head, and a client of that."""
    async with (
        open_fake_fleet(folder, *names) as fleet,
        open_head(folder, *names, **options) as head,
        connect(head.url, TOKEN) as client,
    ):
        yield fleet, head, client


@asynccontextmanager
async def open_client(
    folder: Path, *, session_id: str | None = None, **options: Any
) -> AsyncIterator[tuple[RolloutClient, Head]]:
    """Start a head for the nodes that live in `folder`; yield a client of it, and itself, when each node is judged."""
    async with open_head(folder, **options) as head, connect(head.url, TOKEN, session_id=session_id) as client:
        while not head.is_settled():  # noqa: ASYNC110 - threads on the disk are the other side
            await trio.sleep(0.01)
        yield client, head


def announce(folder: Path, head: Head) -> None:
    """Write the entry of a head, by which `connect(fleet=folder)` finds it."""
    renew_head(folder, None, head_entry(head.url))


def head_entry(url: str) -> HeadEntry:
    """The entry of a head in this process."""
    node = entry_of("head", url)
    return HeadEntry(
        node_id="head",
        url=url,
        token=TOKEN,
        host=node.host,
        process=node.process,
        version="1",
        heartbeat_interval_s=1.0,
        stale_after_s=5.0,
    )


@contextmanager
def fleet_in_thread(
    folder: Path, *names: str, on_submit: Callable[[JobSpec], Outcome | None] | None = None
) -> Iterator[FakeFleet]:
    """Yield a fleet with a head in a thread, for what blocks or has a loop of its own. Only read it."""
    found: list[FakeFleet] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with open_fake_fleet(folder, *names, on_submit=on_submit) as fleet, open_head(folder, *names) as head:
            announce(folder, head)
            found.append(fleet)
            ready.set()
            await trio.to_thread.run_sync(done.wait)

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    try:
        assert ready.wait(20)
        yield found[0]
    finally:
        done.set()
        thread.join()


class FleetOfOne:
    """A head over one fake node, for tests of sessions that use a `FakeNode`.

    Jobs are `submitted` to the head, and are `live` until it has their outcomes. `finish` ends a job on the node, as
    soon as it is there, and after those that were to be finished before.
    """

    def __init__(self, fleet: Fleet, node: FakeNode) -> None:
        self.submitted: list[JobSpec] = []
        self._fleet = fleet
        self._node = node
        self._to_end: deque[tuple[str, Outcome | None]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    @property
    def live(self) -> dict[str, JobSpec]:
        """Specs of the jobs without an outcome, by id."""
        return {job_id: job.spec for job_id, job in self._fleet.dispatch.jobs.items()}

    def take(self, spec: JobSpec, sink: SessionSink, attempt: int) -> None:
        """See `NodeApi`."""
        self.submitted.append(spec)
        self._fleet.take(spec, sink, attempt)

    def finish(self, job_id: str, outcome: Outcome | None = None) -> Outcome:
        """End a live job on the node; return the outcome that it will have."""
        spec = self.live[job_id]
        self._to_end.append((job_id, outcome))
        return outcome or make_outcome(spec)

    async def end_jobs(self) -> None:
        """End jobs on the node, for ever."""
        while True:
            if self._to_end and self._to_end[0][0] in self._node.live:
                self._node.finish(*self._to_end.popleft())
            await trio.sleep(0.005)


@asynccontextmanager
async def open_fleet_of_one(folder: Path, sessions: SessionTable) -> AsyncIterator[FleetOfOne]:
    """Yield a head with these sessions, whose one member has joined."""
    async with (
        open_fake_fleet(folder, "a") as fake,
        open_fleet_head(
            HeadConfig(),
            FleetWatch(folder),
            sessions,
            session_id="head-of-tests",
            is_durable=False,
            options={"reconnect_timeout_s": 30.0},
        ) as fleet,
        trio.open_nursery() as nursery,
    ):
        fleet.start_members(20.0)
        while not any(places.workers and not places.behind for places in fleet.dispatch.members.values()):
            await trio.sleep(0.01)
        one = FleetOfOne(fleet, fake["a"].node)
        nursery.start_soon(one.end_jobs)
        yield one
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def head_process(folder: Path, ledger: Path, log: Path) -> AsyncIterator[trio.Process]:
    """Run `prorl-trio fleet`; yield the process when it says READY, and kill it."""
    command = [sys.executable, "-m", "prorl_trio.cli", "fleet", f"--dir={folder}", f"--ledger={ledger}"]
    with tempfile.TemporaryDirectory(prefix="head-") as local, log.open("ab") as errors:
        env = {**os.environ, "TMPDIR": local}
        process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, stderr=errors, env=env)
        assert process.stdout is not None
        try:
            said = b""
            while b"READY" not in said:
                said += await process.stdout.receive_some() or pytest.fail(f"it has ended: {log.read_text()[-2000:]}")
            yield process
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
                await process.stdout.aclose()
