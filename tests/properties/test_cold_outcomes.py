"""Sessions whose outcomes leave memory at any time, over a ledger that is slow, loses outcomes, or fails: each outcome
is delivered once and in order, the same to everybody, and the bounds hold at every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_ipc.session import OutcomeFrame
from prorl_trio.ledger import LedgerCorrupt, LedgerFailed
from prorl_trio.ledger.operations import Call, Finish
from prorl_trio.sessions.feed import READ_AHEAD_BYTES
from prorl_trio.sessions.journal import open_journal
from prorl_trio.sessions.session_table import SessionTable
from prorl_trio.sessions.submission import submit_one
from prorl_trio.types.models import Outcome
from support.fake_node import FakeNode, make_outcome, make_spec

if TYPE_CHECKING:
    from prorl_ipc.session import JobEvent
    from prorl_trio.sessions.feed import Feed
    from prorl_trio.sessions.session import Session

HOT_BYTES = 6_000
SESSIONS = 2
TOKENS = (10, 100, 300)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "finish",
                "finish",
                "store",
                "store",
                "connect",
                "disconnect",
                "send",
                "ack",
                "forget",
                "read",
                "lose",
                "hold",
            ]
        ),
        st.integers(0, 100),
    ),
    max_size=60,
)


class Disk:
    """A ledger in memory, whose outcomes are stored, and read, when the test lets it."""

    is_immediate = False

    def __init__(self) -> None:
        self.stored: dict[tuple[str, int], bytes] = {}
        self.lost: set[str] = set()
        self.storing: list[Call] = []
        self.broken = False
        self.readable = trio.Event()
        self.readable.set()

    async def open_session(self, session_id: str, first_cursor: int) -> None:
        await trio.lowlevel.checkpoint()

    async def lookup(self, job_ids: list[str]) -> dict[str, object]:
        await trio.lowlevel.checkpoint()
        return {}

    async def accept(self, session_id: str, jobs: object) -> None:
        await trio.lowlevel.checkpoint()

    def post(self, call: Call) -> None:
        if isinstance(call.operation, Finish):
            self.storing.append(call)
        else:
            call.answer(None)

    def store(self, call: Call) -> None:
        """An outcome is on the disk, or the disk is broken."""
        assert isinstance(call.operation, Finish)
        if not self.broken:
            self.stored[call.operation.job_id, call.operation.cursor] = b"".join(call.operation.outcome)
        call.answer(LedgerFailed("broken") if self.broken else None)

    async def read(self, ref: object) -> bytes:
        await self.readable.wait()
        if ref.job_id in self.lost:  # type: ignore[attr-defined]
            self.lost.discard(ref.job_id)  # type: ignore[attr-defined] - the next read would succeed
            raise LedgerCorrupt("rotten")
        return self.stored[ref.job_id, ref.cursor]  # type: ignore[attr-defined]


class Trainer:
    """One session's end of the world: a connection at times, and what came."""

    reader_id = ""

    def __init__(self, session: Session, world: World) -> None:
        self.session = session
        self.world = world
        self.feed: Feed | None = None
        self.scope = trio.CancelScope()
        self.received = 0
        self.finished: list[str] = []
        self.got: list[str] = []

    def wake(self) -> None:
        pass

    def event(self, event: JobEvent) -> None:
        pass

    def replaced(self) -> None:
        self.scope.cancel()

    async def connect(self) -> None:
        self.feed = self.session.attach(self, self.received)
        self.scope = trio.CancelScope()
        self.world.tasks.start_soon(self._read_ahead, self.feed, self.scope)
        await trio.testing.wait_all_tasks_blocked()

    async def _read_ahead(self, feed: Feed, scope: trio.CancelScope) -> None:
        with scope:
            await feed.read_ahead(self.session.read, self.wake)

    def disconnect(self) -> None:
        if self.feed is not None:
            self.feed = None
            self.scope.cancel()
            self.session.detach(self)

    def offered(self) -> int:
        """What it will have got in the end, of what may be sent now."""
        return len(self.got) + sum(cursor > self.received for cursor in self.session.log.cursors())

    def send(self) -> bool:
        frame = None if self.feed is None else self.feed.next_frame()
        if frame is None:
            return False
        decoded = msgspec.msgpack.decode(frame, type=OutcomeFrame)
        assert decoded.cursor > self.received
        self.received = decoded.cursor
        self.got.append(decoded.job_id)
        self.world.see(decoded.job_id, bytes(decoded.outcome))
        return True


class World:
    """What happens, step by step."""

    def __init__(self, disk: Disk, tasks: trio.Nursery) -> None:
        self.disk = disk
        self.tasks = tasks
        self.node = FakeNode()
        self.seen: dict[str, bytes] = {}
        self.jobs = 0
        self.forgotten: set[str] = set()

    def see(self, job_id: str, outcome: bytes) -> None:
        """Whoever looks sees the same, and it is what the job did, or says that it is lost."""
        assert self.seen.setdefault(job_id, outcome) == outcome
        decoded = msgspec.msgpack.decode(outcome, type=Outcome)
        assert decoded.job_id == job_id
        assert decoded.status == "completed" or "its outcome is lost: rotten" in decoded.error

    async def read(self, session: Session, cursor: int) -> None:
        job_id = session.log.job_id(cursor)
        held = await session.outcome_at(cursor)
        if held is not None:
            self.see(job_id, held.outcome)

    async def step(self, what: str, pick: int, trainers: list[Trainer]) -> None:
        trainer = trainers[pick % len(trainers)]
        session = trainer.session
        held = list(session.log.cursors())
        if what == "finish":
            self.jobs += 1
            spec = make_spec(f"job-{self.jobs}")
            await submit_one(session, spec, self.node)
            self.node.finish(spec.job_id, make_outcome(spec, tokens=TOKENS[pick % len(TOKENS)]))
            trainer.finished.append(spec.job_id)
        elif what == "store" and self.disk.storing:
            self.disk.store(self.disk.storing.pop(pick % len(self.disk.storing)))
        elif what == "connect":
            await trainer.connect()
        elif what == "disconnect":
            trainer.disconnect()
        elif what == "send":
            trainer.send()
        elif what == "ack" and trainer.received > session.log.acked:
            session.ack(min(trainer.received, session.log.acked + 1 + pick % 3))
        elif what == "forget" and held:
            job_id = session.log.job_id(held[pick % len(held)])
            self.forgotten.add(job_id)
            session.forget(job_id)
        elif what == "read" and held:
            self.tasks.start_soon(self.read, session, held[pick % len(held)])
        elif what == "lose" and held:
            self.disk.lost.add(session.log.job_id(held[pick % len(held)]))
        elif what == "hold":
            self.disk.readable = trio.Event() if self.disk.readable.is_set() else self._let_read()
        await trio.testing.wait_all_tasks_blocked()

    def _let_read(self) -> trio.Event:
        self.disk.readable.set()
        return self.disk.readable


async def run(steps: list[tuple[str, int]]) -> None:
    disk = Disk()
    with trio.fail_after(30):
        async with trio.open_nursery() as tasks, open_journal(disk, HOT_BYTES) as journal:  # type: ignore[arg-type]
            table = SessionTable(journal)
            world = World(disk, tasks)
            trainers = [Trainer(table.open(f"s{n}", 0)[0], world) for n in range(SESSIONS)]

            def check() -> None:
                cache = journal.cache
                logs = [trainer.session.log for trainer in trainers]
                hot = sum(len(log.outcome(c) or b"") for log in logs for c in log.cursors() if log.in_memory(c))
                assert cache.size_bytes <= HOT_BYTES
                assert cache.size_bytes <= hot  # besides, those that were lost
                for trainer in trainers:
                    assert trainer.feed is None or trainer.feed.ahead_bytes <= READ_AHEAD_BYTES

            for what, pick in steps:
                await world.step(what, pick, trainers)
                check()
            world._let_read()
            for trainer in trainers:
                await trainer.connect()
            while any(len(trainer.got) < trainer.offered() for trainer in trainers) or disk.storing:
                while disk.storing:
                    disk.store(disk.storing.pop())
                for trainer in trainers:
                    trainer.send()
                await trio.testing.wait_all_tasks_blocked()
                check()
            for trainer in trainers:
                missing = [job_id for job_id in trainer.finished if job_id not in trainer.got]
                assert set(missing) <= world.forgotten
                assert trainer.got == [job_id for job_id in trainer.finished if job_id in trainer.got]
                trainer.session.ack(trainer.session.log.last)
                assert (len(trainer.session.log), trainer.session.log.memory_bytes) == (0, 0)
                trainer.disconnect()
            assert journal.cache.size_bytes == 0
            await trio.testing.wait_all_tasks_blocked()


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_outcomes_that_leave_memory_at_any_time_are_delivered_once_and_in_order(steps: list[tuple[str, int]]) -> None:
    trio.run(run, steps)


async def test_a_disk_that_fails_holds_outcomes_back_and_those_before_it_can_be_read() -> None:
    disk = Disk()
    with trio.fail_after(10):
        async with trio.open_nursery() as tasks, open_journal(disk, 0) as journal:  # type: ignore[arg-type]
            table = SessionTable(journal)
            world = World(disk, tasks)
            trainer = Trainer(table.open("s", 0)[0], world)
            await world.step("finish", 0, [trainer])
            await world.step("store", 0, [trainer])
            disk.broken = True
            await world.step("finish", 0, [trainer])
            await world.step("store", 0, [trainer])
            await trainer.connect()
            assert trainer.send()
            assert not trainer.send()
            assert (trainer.got, journal.failed, trainer.session.running) == (["job-1"], "broken", 1)
            trainer.disconnect()
