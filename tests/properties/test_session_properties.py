"""Sessions as a state machine: no outcome is lost, none comes twice to a connection, cursors grow by one."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ipc.session import Ack, JobEvent, OutcomeFrame
from prorl_trio.client.inbox import Inbox
from prorl_trio.service.limits import SessionLimits
from prorl_trio.service.sessions.feed import Feed
from prorl_trio.service.sessions.session import Session
from prorl_trio.types.errors import AdmissionRejected
from support.fake_node import FakeNode, make_spec

MAX_UNDELIVERED = 7
WINDOW_OUTCOMES = 3


class Wire:
    """A connection: a FIFO each way, both lost with it."""

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


class SessionMachine(RuleBasedStateMachine):
    """A node's session, an unreliable wire, and a client's inbox, in every interleaving Hypothesis can think of."""

    def __init__(self) -> None:
        super().__init__()
        self.node = FakeNode()
        limits = SessionLimits(max_undelivered=MAX_UNDELIVERED)
        self.session = Session("s", 0, limits, lambda: None, clock=lambda: 0.0)
        self.inbox = Inbox()
        self.wire: Wire | None = None
        self.submitted = 0
        self.finished: list[str] = []
        self.taken: list[str] = []

    @rule()
    def submit(self) -> None:
        spec = make_spec(f"job-{self.submitted}")
        held = len(self.session.log) + self.session.running
        if held >= MAX_UNDELIVERED:
            with pytest.raises(AdmissionRejected):
                self.session.submit(spec, self.node)
        else:
            self.session.submit(spec, self.node)
            self.submitted += 1

    @rule(pick=st.integers(0, 100))
    def submit_again(self, pick: int) -> None:
        known = [spec for spec in self.node.submitted if self.session.knows(spec.job_id)]
        if known:
            before = len(self.node.submitted)
            self.session.submit(known[pick % len(known)], self.node)
            assert len(self.node.submitted) == before, "a job ran twice"

    @rule(pick=st.integers(0, 100))
    def finish(self, pick: int) -> None:
        live = sorted(self.node.live)
        if live:
            job_id = live[pick % len(live)]
            self.node.finish(job_id)
            self.finished.append(job_id)

    @rule()
    def connect(self) -> None:
        """Also while connected: the newest wins."""
        old, wire = self.wire, Wire()
        feed = self.session.attach(wire, self.inbox.received)
        wire.feed = Feed(self.session.log, self.inbox.received, max_unacked_outcomes=WINDOW_OUTCOMES)
        assert feed.exhausted == wire.feed.exhausted
        if old is not None:
            assert old.was_replaced
            self.session.detach(old)
            assert self.session.connected
        wire.up.append(Ack(cursor=self.inbox.settled))
        self.wire = wire

    @precondition(lambda self: self.wire is not None)
    @rule()
    def disconnect(self) -> None:
        assert self.wire is not None
        self.session.detach(self.wire)
        assert not self.session.connected
        self.wire = None

    @precondition(lambda self: self.wire is not None)
    @rule()
    def node_sends(self) -> None:
        assert self.wire is not None
        assert self.wire.feed is not None
        message = self.wire.feed.next_frame()
        if message is not None:
            self.wire.down.append(message)

    @precondition(lambda self: self.wire is not None and bool(self.wire.down))
    @rule()
    def client_receives(self) -> None:
        assert self.wire is not None
        frame = msgspec.msgpack.decode(self.wire.down.popleft(), type=OutcomeFrame)
        self.wire.cursors.append(frame.cursor)
        self.inbox.put(frame)

    @rule()
    def client_takes(self) -> None:
        frame = self.inbox.first()
        if frame is not None:
            self.taken.append(frame.job_id)
            self.inbox.settle(frame.cursor)
            if self.wire is not None:
                self.wire.up.append(Ack(cursor=frame.cursor))

    @precondition(lambda self: self.wire is not None and bool(self.wire.up))
    @rule()
    def node_receives(self) -> None:
        assert self.wire is not None
        self.session.ack(self.wire.up.popleft().cursor)

    @invariant()
    def nothing_lost_nothing_doubled_in_order(self) -> None:
        assert self.taken == self.finished[: len(self.taken)]

    @invariant()
    def once_per_connection(self) -> None:
        if self.wire is not None:
            cursors = self.wire.cursors
            assert cursors == list(range(cursors[0], cursors[0] + len(cursors))) if cursors else True

    @invariant()
    def bounded(self) -> None:
        assert len(self.session.log) + self.session.running <= MAX_UNDELIVERED
        assert len(self.inbox) <= WINDOW_OUTCOMES
        log = self.session.log
        assert log.size_bytes == log.memory_bytes == sum(len(log.outcome(cursor) or b"") for cursor in log.cursors())

    def teardown(self) -> None:
        """Whatever happened before: a good connection brings everything that is missing."""
        for job_id in sorted(self.node.live):
            self.node.finish(job_id)
            self.finished.append(job_id)
        self.connect()
        assert self.wire is not None
        for _ in range(3 * MAX_UNDELIVERED + 3):
            self.node_sends()
            if self.wire.down:
                self.client_receives()
            self.client_takes()
            while self.wire.up:
                self.node_receives()
        assert self.taken == self.finished
        assert len(self.session.log) == 0


TestSession = SessionMachine.TestCase
TestSession.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
