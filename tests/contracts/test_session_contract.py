"""The promises of a session to its trainer, whatever keeps the ledger. For a new start, see test_journal.py."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from prorl_ipc.session import OutcomeFrame, TheseJobs
from prorl_trio.ledger import LedgerLimits, MemoryLedger, open_ledger
from prorl_trio.sessions.cancelling import cancel
from prorl_trio.sessions.journal import open_journal
from prorl_trio.sessions.limits import SessionLimits
from prorl_trio.sessions.session_table import SessionTable
from prorl_trio.sessions.submission import submit_one
from prorl_trio.types.errors import AdmissionRejected, AlreadyDelivered, DuplicateJob, ProtocolError, UnknownHandler
from prorl_trio.types.models import EncodedOutcome
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fleet_head import open_fleet_of_one
from support.sessions import all_held, ended, submit

pytestmark = pytest.mark.timeout(30)

MIB = 1024 * 1024
LIMITS = LedgerLimits(log_bytes=MIB, reserve_bytes=MIB, max_bytes=16 * MIB)


class SilentListener:
    """A connection that keeps what it is told."""

    reader_id = ""

    def __init__(self):
        self.events = []
        self.was_replaced = False

    def wake(self):
        """Silent."""

    def event(self, event):
        self.events.append(event)

    def replaced(self):
        self.was_replaced = True


@pytest.fixture(params=["memory", "disk"])
def open_sessions(request, memory_path):
    """Opens sessions over a ledger of one kind, and a fake node for them."""
    return sessions_over(request.param, memory_path)


@pytest.fixture(params=["memory", "disk", "fleet"])
def open_anywhere(request, memory_path):
    """Does as `open_sessions`; also with the head of a fleet of one as the node."""
    return sessions_over(request.param, memory_path)


def sessions_over(kind, memory_path):

    @asynccontextmanager
    async def open_both(limits=None, ledger_limits=LIMITS, hot_outcome_bytes=MIB):
        async with AsyncExitStack() as stack:
            ledger = MemoryLedger(ledger_limits)
            if kind == "disk":
                ledger = await stack.enter_async_context(open_ledger(memory_path / "ledger", ledger_limits))
            journal = await stack.enter_async_context(open_journal(ledger, hot_outcome_bytes))
            table, node = SessionTable(journal, limits), FakeNode()
            if kind == "fleet":
                node = await stack.enter_async_context(open_fleet_of_one(memory_path / "fleet", table))
            yield table, node

    return open_both


def read(feed):
    frame = feed.next_frame()
    assert frame is not None
    decoded = msgspec.msgpack.decode(frame, type=OutcomeFrame)
    return decoded.cursor, decoded.job_id


async def finish(session, node, *job_ids):
    """End these jobs; return when their outcomes are offered."""
    last = session.log.last + len(job_ids)
    for job_id in job_ids:
        node.finish(job_id)
    while session.log.last < last:
        await session.wait_arrival()


# ---------------------------------------------------------------- submit


async def test_submitting_twice_joins_and_another_spec_is_refused(open_anywhere):
    async with open_anywhere() as (table, node):
        session, resumed = table.open("s", 0)
        assert not resumed
        spec = make_spec("a", question={"b": 1, "a": [1, 2]})
        same = make_spec("a", question={"a": [1, 2], "b": 1})  # key order does not make another spec
        assert await submit(session, node, spec, same) == [None, None]
        assert await submit(session, node, same) == [None]
        with pytest.raises(DuplicateJob, match="'a' is here with another spec"):
            await submit_one(session, make_spec("a", question={}), node)
        await finish(session, node, "a")
        assert await submit(session, node, spec) == [None]  # finished and not acknowledged: joins that
        with pytest.raises(DuplicateJob, match="'a' is here with another spec"):
            await submit_one(session, make_spec("a", question={}), node)
        assert len(node.submitted) == 1
        assert session.knows("a")
        assert not session.is_running("a")
        session.ack(1)
        assert not session.knows("a")
        assert table.open("s", 0) == (session, True)


async def test_an_id_is_one_sessions_until_its_outcome_is_acknowledged(open_anywhere):
    """So no session's cancel ends another one's job, and no outcome goes to two."""
    async with open_anywhere() as (table, node):
        first, second = table.open("s", 0)[0], table.open("t", 0)[0]
        assert await submit(first, node, make_spec("a")) == [None]
        for _ in range(2):  # while it runs, and when it has ended
            for spec in (make_spec("a"), make_spec("a", question={})):
                refused, taken = await submit(second, node, spec, make_spec("b"))
                assert isinstance(refused, DuplicateJob)
                assert "another session's" in str(refused)
                assert taken is None
            if node.live.keys() >= {"a"}:
                await finish(first, node, "a")
        assert (len(first.log), len(second.log)) == (1, 0)
        assert not second.knows("a")
        first.ack(1)
        assert await submit(second, node, make_spec("a")) == [None]
        await finish(second, node, "a")
        assert [held.job_id for held in await all_held(second)] == ["a"]


async def test_of_two_sessions_that_submit_an_id_at_once_one_has_it(open_anywhere):
    async with open_anywhere() as (table, node):
        sessions = [table.open(name, 0)[0] for name in "st"]
        answers = {}

        async def work(session):
            answers[session.session_id] = await submit(session, node, make_spec("a"), make_spec(session.session_id))

        async with trio.open_nursery() as nursery:
            for session in sessions:
                nursery.start_soon(work, session)
        first, second = sorted(answers.values(), key=lambda answer: answer[0] is not None)
        assert first == [None, None]
        assert isinstance(second[0], DuplicateJob)
        assert second[1] is None
        assert [spec.job_id for spec in node.submitted].count("a") == 1


async def test_an_acknowledged_job_is_not_run_again(open_anywhere):
    async with open_anywhere() as (table, node):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a"), make_spec("b"))
        await finish(session, node, "a", "b")
        session.ack(2)
        again, other, fresh = await submit(session, node, make_spec("a"), make_spec("b", other=1), make_spec("c"))
        assert isinstance(again, AlreadyDelivered)
        assert isinstance(other, DuplicateJob)
        assert fresh is None
        assert not session.knows("a")
        assert (list(node.live), session.running, table.journal.promised) == (["c"], 1, 0)
        assert table.journal.ledger.statistics().jobs == 1


async def test_only_so_many_acknowledged_ids_are_remembered(open_anywhere):
    limits = msgspec.structs.replace(LIMITS, max_tombstones=1)
    async with open_anywhere(ledger_limits=limits) as (table, node):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a"), make_spec("b"))
        await finish(session, node, "a", "b")
        session.ack(2)
        free, remembered = await submit(session, node, make_spec("a"), make_spec("b"))
        assert free is None
        assert isinstance(remembered, AlreadyDelivered)


async def test_a_full_ledger_rejects_all_or_nothing_and_running_jobs_finish(open_anywhere):
    async with open_anywhere(ledger_limits=msgspec.structs.replace(LIMITS, max_jobs=2)) as (table, node):
        session, _ = table.open("s", 0)
        assert await submit(session, node, make_spec("a")) == [None]
        answers = await submit(session, node, make_spec("b"), make_spec("c"))
        assert all(isinstance(error, AdmissionRejected) and "max_jobs" in str(error) for error in answers)
        assert not session.knows("b")
        assert table.journal.promised == 0
        await finish(session, node, "a")
        assert await submit(session, node, make_spec("b")) == [None]


async def test_a_batch_of_a_trainer_that_left_is_taken_to_its_end(open_anywhere):
    async with open_anywhere() as (table, node):
        session, _ = table.open("s", 0)
        with trio.move_on_after(0):
            await submit(session, node, make_spec("a"))
        assert await submit(session, node, make_spec("a"), make_spec("a")) == [None, None]  # joins what is under way
        assert [spec.job_id for spec in node.submitted] == ["a"]


async def test_a_payload_with_keys_that_are_not_strings_is_taken(open_anywhere):
    async with open_anywhere() as (table, node):
        session, _ = table.open("s", 0)
        spec = make_spec("a", question={1: "x", "a": "y"})
        assert await submit(session, node, spec) == [None]
        assert await submit(session, node, spec) == [None]
        assert len(node.submitted) == 1


async def test_a_job_the_node_refuses_leaves_no_trace(open_anywhere):
    async with open_anywhere() as (table, node):
        session, _ = table.open("s", 0)
        with pytest.raises(UnknownHandler):
            await submit_one(session, make_spec("a", handler="nobody"), node)
        assert not session.knows("a")
        assert session.running == 0
        assert table.journal.ledger.statistics().jobs == 0


async def test_running_and_undelivered_jobs_together_are_limited(open_anywhere):
    async with open_anywhere(SessionLimits(max_undelivered=3)) as (table, node):
        session, _ = table.open("s", 0)
        await submit(session, node, *map(make_spec, "abc"))
        await finish(session, node, "a")
        with pytest.raises(AdmissionRejected, match=r"2 jobs running and 1 outcomes .* the limit of 3"):
            await submit_one(session, make_spec("d"), node)
        session.ack(1)
        assert await submit(session, node, make_spec("d")) == [None]


async def test_undelivered_bytes_are_limited(open_anywhere):
    async with open_anywhere(SessionLimits(max_undelivered_bytes=1)) as (table, node):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a"))
        await finish(session, node, "a")
        with pytest.raises(AdmissionRejected, match="bytes of outcomes not acknowledged"):
            await submit_one(session, make_spec("b"), node)


# ---------------------------------------------------------------- cancel


async def test_a_cancel_reaches_its_own_job_and_says_what_it_found(open_anywhere):
    async with open_anywhere() as (table, node):
        session, _ = table.open("s", 0)
        await submit(session, node, *map(make_spec, "abc"))
        await finish(session, node, "a")
        found = await cancel(node, table.all(), [TheseJobs(["a", "b", "nobody"])], "not needed")
        assert (found.cancelled, found.ended, found.unknown) == (["b"], ["a"], ["nobody"])
        await ended(session, 2)
        assert [held.decode().status for held in await all_held(session)] == ["completed", "cancelled"]
        assert list(node.live) == ["c"]


async def test_a_job_cancelled_ahead_ends_when_it_comes(open_anywhere):
    async with open_anywhere() as (table, node):
        session, _ = table.open("s", 0)
        session.cancel_ahead("a", "not wanted")
        assert await submit(session, node, make_spec("a"), make_spec("b")) == [None, None]
        await ended(session, 1)
        outcome = (await session.outcome_of("a")).decode()
        assert (outcome.status, outcome.error) == ("cancelled", "not wanted")
        assert list(node.live) == ["b"]


# ---------------------------------------------------------------- outcomes, cursors, acknowledgement


async def test_what_is_not_acknowledged_is_sent_again_to_each_new_connection(open_sessions):
    async with open_sessions() as (table, node):
        session, _ = table.open("s", 7)
        await submit(session, node, *map(make_spec, "abc"))
        await finish(session, node, "b", "a", "c")
        first, second = SilentListener(), SilentListener()
        feed = session.attach(first, 7)
        assert [read(feed) for _ in range(3)] == [(8, "b"), (9, "a"), (10, "c")]
        assert feed.next_frame() is None
        session.ack(8)
        feed = session.attach(second, 7)
        assert [read(feed) for _ in range(2)] == [(9, "a"), (10, "c")]
        session.ack(8)  # an old cursor changes nothing
        feed = session.attach(first, 9)
        assert read(feed) == (10, "c")
        with pytest.raises(ProtocolError, match="cursor 11 acknowledged, but 10 is the last"):
            session.ack(11)
        session.ack(10)
        assert (len(session.log), session.log.acked, session.log.last) == (0, 10, 10)
        await table.journal.wait_stored()
        statistics = table.journal.ledger.statistics()
        assert (statistics.jobs, statistics.live_bytes) == (0, 0)


async def test_outcomes_that_have_left_memory_are_read_from_the_ledger(open_sessions):
    async with open_sessions(hot_outcome_bytes=0) as (table, node):
        session, _ = table.open("s", 0)
        await submit(session, node, *map(make_spec, "ab"))
        await finish(session, node, "a", "b")
        assert not session.log.in_memory(1)
        feed = session.attach(SilentListener(), 0)
        async with trio.open_nursery() as nursery:
            arrived = trio.lowlevel.ParkingLot()
            nursery.start_soon(feed.read_ahead, session.read, arrived.unpark_all)
            got = []
            while len(got) < 2:
                if (frame := feed.next_frame()) is None:
                    await arrived.park()
                else:
                    got.append(msgspec.msgpack.decode(frame, type=OutcomeFrame).job_id)
            nursery.cancel_scope.cancel()
        assert got == ["a", "b"]


async def test_a_second_outcome_of_a_job_is_dropped(open_sessions, caplog):
    async with open_sessions() as (table, node):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a"))
        outcome = node.finish("a")
        session.deliver(outcome)  # before the first one is stored
        await ended(session, 1)
        session.deliver(msgspec.structs.replace(outcome, reward=0.25))
        assert caplog.text.count("job a has ended already") == 2
        assert session.log.last == 1
        assert (await session.outcome_at(1)).decode() == outcome
    assert session.log.last == 1


async def test_outcomes_may_arrive_as_bytes_more_than_once(open_sessions):
    """Whoever sent one is told when it may forget it: once it is stored, or if it is not needed."""
    async with open_sessions() as (table, node):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a"), make_spec("b"))
        node.advance("b", "init")
        node.advance("b", "init")
        outcome = make_outcome(make_spec("a"), reward=0.5)
        sent = EncodedOutcome.read(msgspec.msgpack.encode(outcome))
        assert (sent.job_id, sent.status, sent.error_code, sent.attempt) == ("a", "completed", None, 1)
        stored = []
        session.deliver_encoded(sent, stored.append)
        session.deliver_encoded(sent, stored.append)  # again, perhaps before the first is stored
        await ended(session, 1)
        assert stored == [True, True]
        session.deliver_encoded(sent, stored.append)
        session.ack(1)
        session.deliver_encoded(sent, stored.append)
        assert stored == [True] * 4
        late = EncodedOutcome.read(msgspec.msgpack.encode(make_outcome(make_spec("b"))))
        session.deliver_encoded(late, stored.append)  # of the first attempt, and the second one runs
        assert stored == [True] * 5
        assert session.is_running("b")
        session.deliver_encoded(msgspec.structs.replace(late, attempt=2), stored.append)
        await ended(session, 1)
        assert len(stored) == 6
        assert [(held.cursor, held.job_id) for held in await all_held(session)] == [(2, "b")]


async def test_an_outcome_of_bytes_that_is_too_large_loses_its_trajectory(open_sessions):
    async with open_sessions(SessionLimits(max_message_bytes=4_000)) as (table, node):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a"))
        outcome = msgspec.structs.replace(make_outcome(make_spec("a")), details={"log": "x" * 5_000})
        session.deliver_encoded(EncodedOutcome.read(msgspec.msgpack.encode(outcome)), lambda _stored: None)
        await ended(session, 1)
        got = (await session.outcome_at(1)).decode()
        assert (got.status, got.error_code, got.details) == ("failed", "handler_raised", {})


async def test_an_outcome_that_one_job_forgets_is_not_redelivered(open_anywhere):
    async with open_anywhere() as (table, node):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a"), make_spec("b"))
        await finish(session, node, "a", "b")
        session.forget("a")
        assert await submit(session, node, make_spec("a", other=1)) == [None]  # the id is free at once
        node.cancel_soon("a", "")
        await ended(session, 2)
        session.forget("a")
        feed = session.attach(SilentListener(), 0)
        assert read(feed) == (2, "b")
        assert feed.next_frame() is None


async def test_who_waits_for_a_job_has_its_outcome_even_if_it_is_acknowledged_at_once(open_anywhere):
    async with open_anywhere() as (table, node):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a"))
        running = session.running_job("a")
        node.finish("a", make_outcome(make_spec("a"), reward=0.5))
        await running.ended.wait()
        session.ack(1)
        assert running.outcome.reward == 0.5


# ---------------------------------------------------------------- connections


async def test_the_newest_connection_wins_and_the_old_one_cannot_detach_it(open_sessions):
    async with open_sessions() as (table, _):
        session, _ = table.open("s", 0)
        old, new = SilentListener(), SilentListener()
        session.attach(old, 0)
        session.attach(new, 0)
        assert old.was_replaced
        session.detach(old)
        assert session.connected
        session.report("a", "run", "")
        assert [event.job_id for event in new.events] == ["a"]
        session.detach(new)
        assert not session.connected
        session.report("a", "eval", "")


async def test_resuming_beyond_the_last_cursor_is_refused(open_sessions):
    async with open_sessions() as (table, _):
        session, _ = table.open("s", 5)
        with pytest.raises(ProtocolError, match="resume_after 6 is beyond 5"):
            session.attach(SilentListener(), 6)
        assert not session.connected


@pytest.mark.parametrize(("session_id", "resume_after"), [("", 0), ("x" * 201, 0), ("s", -1), ("s", 2**63)])
async def test_impossible_hellos_are_refused(open_sessions, session_id, resume_after):
    async with open_sessions() as (table, _):
        with pytest.raises(ProtocolError):
            table.open(session_id, resume_after)


# ---------------------------------------------------------------- how many there may be


async def test_a_full_table_gives_way_only_where_nothing_is_lost(open_sessions, mock_clock):
    async with open_sessions(SessionLimits(max_sessions=2)) as (table, node):
        running, _ = table.open("running", 0)
        await submit(running, node, make_spec("a"))
        owed, _ = table.open("owed", 0)
        await submit(owed, node, make_spec("b"))
        await finish(owed, node, "b")
        table.open("empty", 0)
        mock_clock.jump(1)
        table.open("new", 0)
        mock_clock.jump(1)
        table.open("newer", 0)  # the oldest that holds nothing gives way
        assert [session.session_id for session in table.all()] == ["running", "owed", "new", "newer"]


async def test_abandoned_sessions_keep_what_they_hold_and_nobody_out(open_sessions, mock_clock):
    async with open_sessions(SessionLimits(max_sessions=3)) as (table, node):
        for number in range(10):
            session, _ = table.open(f"abandoned-{number}", 0)
            await submit(session, node, make_spec(f"job-{number}"))
            if number % 2:
                await finish(session, node, f"job-{number}")
        mock_clock.jump(80_000)
        for number in range(3):
            table.open(f"trainer-{number}", 0)[0].attach(SilentListener(), 0)
        assert len(table) == 13
        assert [len(table.open(f"abandoned-{number}", 0)[0].log) for number in (0, 1)] == [0, 1]
        with pytest.raises(
            AdmissionRejected, match=r"3 sessions, its limit of connected ones \(listen\.max_sessions\); end"
        ):
            table.open("trainer-3", 0)
        assert table.open("abandoned-1", 0)[1]


async def test_wait_delivered_waits_for_connected_trainers_only(open_sessions):
    async with open_sessions() as (table, node):
        here, _ = table.open("here", 0)
        away, _ = table.open("away", 0)
        for session in (here, away):
            await submit(session, node, make_spec(session.session_id))
            node.finish(session.session_id)  # being stored is not delivered either
        here.attach(SilentListener(), 0)
        delivered = trio.Event()

        async def wait():
            await table.wait_delivered()
            delivered.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            await ended(here, 1)
            assert not delivered.is_set()
            here.ack(1)
            await delivered.wait()
        await ended(away, 1)
