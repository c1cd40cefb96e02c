"""Sessions in any order of steps: no outcome is lost, none comes twice to a connection, cursors grow by one."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given, settings

from prorl_ipc.session import Ack, JobEvent, OutcomeFrame
from prorl_trio.client.state import Inbox
from prorl_trio.ledger import MemoryLedger
from prorl_trio.sessions.feed import Feed
from prorl_trio.sessions.journal import open_journal
from prorl_trio.sessions.limits import SessionLimits
from prorl_trio.sessions.session import Session
from prorl_trio.sessions.submission import submit_one
from prorl_trio.types.errors import AdmissionRejected, AlreadyDelivered
from support.fake_node import FakeNode, make_spec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from prorl_trio.sessions.journal import Journal

    Step = Callable[["World", int], Awaitable[None]]

MAX_UNDELIVERED = 7
WINDOW_OUTCOMES = 3


class Wire:
    """A connection: a FIFO each way, both lost with it."""

    reader_id = ""

    def __init__(self) -> None:
        self.feed: Feed | None = None
        self.down: deque[bytes] = deque()
        self.up: deque[Ack] = deque()
        self.cursors: list[int] = []
        self.was_replaced = False

    def wake(self) -> None:
        pass

    def event(self, event: JobEvent) -> None:
        pass

    def replaced(self) -> None:
        self.was_replaced = True


class World:
    """A node's session, an unreliable wire, and a client's inbox, in every interleaving Hypothesis can think of."""

    def __init__(self, journal: Journal) -> None:
        self.node = FakeNode()
        self.session = Session("s", 0, SessionLimits(max_undelivered=MAX_UNDELIVERED), journal, clock=lambda: 0.0)
        self.inbox = Inbox()
        self.wire: Wire | None = None
        self.submitted = 0
        self.finished: list[str] = []
        self.taken: list[str] = []

    async def submit(self, _pick: int = 0) -> None:
        spec = make_spec(f"job-{self.submitted}")
        held = len(self.session.log) + self.session.running
        if held >= MAX_UNDELIVERED:
            with pytest.raises(AdmissionRejected):
                await submit_one(self.session, spec, self.node)
        else:
            await submit_one(self.session, spec, self.node)
            self.submitted += 1

    async def submit_again(self, pick: int) -> None:
        known = [spec for spec in self.node.submitted if self.session.knows(spec.job_id)]
        if known:
            before = len(self.node.submitted)
            await submit_one(self.session, known[pick % len(known)], self.node)
            assert len(self.node.submitted) == before, "a job ran twice"

    async def submit_what_was_acknowledged(self, pick: int) -> None:
        gone = [spec for spec in self.node.submitted if not self.session.knows(spec.job_id)]
        if gone and len(self.session.log) + self.session.running < MAX_UNDELIVERED:
            with pytest.raises(AlreadyDelivered):
                await submit_one(self.session, gone[pick % len(gone)], self.node)

    async def finish(self, pick: int) -> None:
        live = sorted(self.node.live)
        if live:
            job_id = live[pick % len(live)]
            self.node.finish(job_id)
            self.finished.append(job_id)

    async def connect(self, _pick: int = 0) -> None:
        """Also while connected: the newest wins."""
        old, wire = self.wire, Wire()
        feed = self.session.attach(wire, self.inbox.received)
        wire.feed = Feed(self.session.log, self.inbox.received, max_unacked_outcomes=WINDOW_OUTCOMES)
        assert feed.exhausted == wire.feed.exhausted
        if old is not None:
            assert old.was_replaced
            self.session.detach(old)
            assert self.session.connected
        wire.up.append(Ack(cursor=self.inbox.acked))
        self.wire = wire

    async def disconnect(self, _pick: int = 0) -> None:
        if self.wire is not None:
            self.session.detach(self.wire)
            assert not self.session.connected
            self.wire = None

    async def node_sends(self, _pick: int = 0) -> None:
        if self.wire is not None:
            assert self.wire.feed is not None
            message = self.wire.feed.next_frame()
            if message is not None:
                self.wire.down.append(message)

    async def client_receives(self, _pick: int = 0) -> None:
        if self.wire is not None and self.wire.down:
            frame = msgspec.msgpack.decode(self.wire.down.popleft(), type=OutcomeFrame)
            self.wire.cursors.append(frame.cursor)
            self.inbox.put(frame)

    async def client_takes(self, _pick: int = 0) -> None:
        frame = self.inbox.first()
        if frame is not None:
            self.taken.append(frame.job_id)
            self.inbox.acknowledge(frame.cursor)
            if self.wire is not None:
                self.wire.up.append(Ack(cursor=frame.cursor))

    async def node_receives(self, _pick: int = 0) -> None:
        if self.wire is not None and self.wire.up:
            self.session.ack(self.wire.up.popleft().cursor)

    async def settle(self, _pick: int = 0) -> None:
        """Everything is stored that was being stored."""
        await trio.testing.wait_all_tasks_blocked()
        log = self.session.log
        assert log.size_bytes == log.memory_bytes == sum(len(log.outcome(cursor) or b"") for cursor in log.cursors())
        assert self.session.journal.ledger.statistics().jobs == len(log) + self.session.running

    def check(self) -> None:
        """Nothing is lost, nothing doubled, all in order, once per connection, and bounded."""
        assert self.taken == self.finished[: len(self.taken)]
        if self.wire is not None:
            cursors = self.wire.cursors
            assert cursors == list(range(cursors[0], cursors[0] + len(cursors))) if cursors else True
        assert len(self.session.log) + self.session.running <= MAX_UNDELIVERED
        assert len(self.inbox) <= WINDOW_OUTCOMES

    async def end(self) -> None:
        """Whatever happened before: a good connection brings everything that is missing."""
        for job_id in sorted(self.node.live):
            self.node.finish(job_id)
            self.finished.append(job_id)
        await self.settle()
        await self.connect()
        assert self.wire is not None
        for _ in range(3 * MAX_UNDELIVERED + 3):
            await self.node_sends()
            await self.client_receives()
            await self.client_takes()
            while self.wire.up:
                await self.node_receives()
        assert self.taken == self.finished
        assert len(self.session.log) == 0
        await self.settle()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                World.submit,
                World.submit_again,
                World.submit_what_was_acknowledged,
                World.finish,
                World.finish,
                World.connect,
                World.disconnect,
                World.node_sends,
                World.client_receives,
                World.client_takes,
                World.node_receives,
                World.settle,
            ]
        ),
        st.integers(0, 100),
    ),
    min_size=30,
    max_size=90,
)


async def run(steps: Sequence[tuple[Step, int]]) -> None:
    with trio.fail_after(30):
        async with open_journal(MemoryLedger(), sys.maxsize) as journal:
            world = World(journal)
            for step, pick in steps:
                await step(world, pick)
                world.check()
            await world.end()


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_no_outcome_is_lost_and_none_comes_twice(steps: Sequence[tuple[Step, int]]) -> None:
    trio.run(run, steps)
