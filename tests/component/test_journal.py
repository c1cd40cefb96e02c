"""Sessions over a real ledger and a fake node: what is stored when, and what a new start makes of it."""

from __future__ import annotations

import errno
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from prorl_trio.config import LedgerConfig
from prorl_trio.ledger import LedgerCorrupt, LedgerFailed, LedgerLimits, LedgerStatistics, open_ledger
from prorl_trio.ledger.operations import Acknowledge, Finish
from prorl_trio.sessions.journal import open_journal
from prorl_trio.sessions.limits import SessionLimits
from prorl_trio.sessions.session import Session
from prorl_trio.sessions.session_table import SessionTable, recover_sessions
from prorl_trio.sessions.submission import submit_all
from prorl_trio.threads import MAX_WAIT_S, run_sync
from prorl_trio.types.errors import AdmissionRejected, AlreadyDelivered, Draining, DuplicateJob, UnknownHandler
from support.fake_node import FakeNode, make_outcome, make_spec
from support.sessions import all_held, ended, submit

MIB = 1024 * 1024
LIMITS = LedgerLimits(log_bytes=MIB, reserve_bytes=MIB, max_bytes=16 * MIB)


class Node(FakeNode):
    """Notes as which attempt each job was taken, or raises `take_error`."""

    def __init__(self, take_error=None):
        super().__init__()
        self.taken = []
        self.take_error = take_error

    def take(self, spec, sink, attempt):
        if self.take_error is not None:
            raise self.take_error
        self.taken.append((spec.job_id, attempt))
        super().take(spec, sink, attempt)


@asynccontextmanager
async def open_life(tmp_path, limits=LIMITS, ledger=None, take_error=None, **config):
    """One life of a node's process."""
    with trio.fail_after(30):
        async with open_ledger(tmp_path / "ledger", limits) as real, open_journal(ledger or real) as journal:
            table, node = SessionTable(journal), Node(take_error)
            if ledger is None:
                await recover_sessions(table, node, LedgerConfig(**config))
            yield table, node, journal


async def test_a_new_start_has_the_outcomes_and_runs_the_rest_as_the_next_attempt(tmp_path):
    async with open_life(tmp_path) as (table, node, _):
        session, _ = table.open("s", 3)
        assert await submit(session, node, *map(make_spec, "abc")) == [None] * 3
        node.advance("b", "init")
        node.finish("c")
        await ended(session, 1)
    async with open_life(tmp_path) as (table, node, _):
        session, resumed = table.open("s", 0)
        assert resumed
        assert [(held.cursor, held.decode().status) for held in await all_held(session)] == [(4, "completed")]
        assert node.taken == [("a", 1), ("b", 2)]  # in the order of acceptance
        assert await submit(session, node, make_spec("a"), make_spec("c")) == [None, None]  # they join
        (refused,) = await submit(session, node, make_spec("b", other=1))
        assert isinstance(refused, DuplicateJob)
        node.finish("b")
        await ended(session, 2)
        assert (await session.outcome_of("b")).cursor == 5
        assert len(node.submitted) == 2


async def test_attempts_that_began_on_other_nodes_count_over_a_restart(tmp_path):
    """Else two attempts have the same number, and the ledger takes the outcome of the earlier one for the later."""
    for _ in range(2):
        async with open_life(tmp_path) as (table, node, _):
            session, resumed = table.open("s", 0)
            if not resumed:
                specs = [make_spec("moved"), make_spec("new")]
                await submit_all(session, specs, node, lambda _index, error: None, {"moved": 2})
            assert node.taken == [("moved", 3), ("new", 1)]


@pytest.mark.parametrize(
    ("config", "cause"), [({"on_restart": "fail"}, "node"), ({"max_attempts": 1}, "node"), ({}, None)]
)
async def test_what_becomes_of_unfinished_jobs_is_configured(tmp_path, config, cause):
    async with open_life(tmp_path) as (table, node, _):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a"))
        node.advance("a", "init")
    async with open_life(tmp_path, **config) as (table, node, _):
        session, _ = table.open("s", 0)
        if cause is None:
            assert list(node.live) == ["a"]
            return
        await ended(session, 1)
        assert not node.live
        outcome = (await session.outcome_of("a")).decode()
        assert (outcome.status, outcome.cause, outcome.reward) == ("failed", cause, None)
    async with open_life(tmp_path) as (table, node, _):  # and that outcome is the one it has
        assert (await table.get("s").outcome_of("a")).decode().error == outcome.error


def damage(tmp_path, content):
    """Change the last byte of `content`, wherever the log has it."""
    found = 0
    for path in (tmp_path / "ledger").rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(content)) >= 0:
            found += 1
            with path.open("r+b") as file:
                file.seek(at + len(content) - 1)
                file.write(bytes([content[-1] ^ 0xFF]))
    assert found == 1


async def test_a_job_whose_spec_is_damaged_ends_as_the_nodes_failure(tmp_path, caplog):
    async with open_life(tmp_path) as (table, node, _):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a", question="what was asked"), make_spec("b"))
    damage(tmp_path, b"what was asked")
    async with open_life(tmp_path) as (table, node, _):
        session = table.get("s")
        await ended(session, 1)
        outcome = (await session.outcome_of("a")).decode()
        assert (outcome.status, outcome.cause, outcome.reward) == ("failed", "node", None)
        assert "spec cannot be read" in outcome.error
        assert outcome.error in caplog.text
        assert list(node.live) == ["b"]
    async with open_life(tmp_path) as (table, node, _):
        assert (await table.get("s").outcome_of("a")).decode().error == outcome.error


async def test_an_outcome_that_is_damaged_is_delivered_as_lost(tmp_path, caplog):
    async with open_life(tmp_path) as (table, node, _):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a"), make_spec("b"))
        node.finish("a", msgspec.structs.replace(make_outcome(make_spec("a")), details={"log": "what came of it"}))
        node.finish("b")
        await ended(session, 2)
    damage(tmp_path, b"what came of it")
    async with open_life(tmp_path) as (table, node, _):
        session = table.get("s")
        lost, kept = (held.decode() for held in await all_held(session))
        assert (lost.job_id, lost.status, lost.cause, lost.reward) == ("a", "failed", "node", None)
        assert "its outcome is lost" in lost.error
        assert "the outcome of job a is lost" in caplog.text
        assert (kept.job_id, kept.status) == ("b", "completed")
        assert not node.live
        session.ack(2)


async def test_a_job_whose_handler_is_gone_fails_and_the_node_starts(tmp_path):
    async with open_life(tmp_path) as (table, node, _):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a"))
    async with open_life(tmp_path, take_error=UnknownHandler("no handler 'fake'")) as (table, node, _):
        session = table.get("s")
        await ended(session, 1)
        outcome = (await session.outcome_of("a")).decode()
        assert (outcome.status, outcome.cause, outcome.error_code) == ("failed", "handler", "handler_raised")
        assert "no handler 'fake'" in outcome.error
        assert session.running == 0


async def test_a_batch_stored_when_the_node_has_ended_is_run_by_the_next_start(tmp_path):
    async with open_life(tmp_path, take_error=Draining("the node has ended")) as (table, node, journal):
        session, _ = table.open("s", 0)
        session.cancel_ahead("a", "not needed")
        assert [type(error) for error in await submit(session, node, make_spec("a"), make_spec("b"))] == [Draining] * 2
        assert (session.running, journal.promised) == (0, 0)
    async with open_life(tmp_path) as (_table, node, _):
        assert node.taken == [("a", 1), ("b", 1)]


async def test_an_acknowledged_job_is_not_run_again(tmp_path):
    async def replay(session, node):
        again, other, fresh = await submit(session, node, make_spec("a"), make_spec("b", other=1), make_spec("c"))
        assert isinstance(again, AlreadyDelivered)
        assert isinstance(other, DuplicateJob)
        assert fresh is None
        assert not session.knows("a")

    async with open_life(tmp_path) as (table, node, journal):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a"), make_spec("b"))
        node.finish("a")
        node.finish("b")
        await ended(session, 2)
        session.ack(2)
        await replay(session, node)  # while the acknowledgement is on its way
        assert (list(node.live), session.running, journal.promised) == (["c"], 1, 0)
        assert journal.ledger.statistics().jobs == 1
    async with open_life(tmp_path) as (table, node, _):  # also over a restart
        await replay(table.get("s"), node)
        assert list(node.live) == ["c"]
        another, _ = table.open("another trainer's", 0)
        assert await submit(another, node, make_spec("a")) == [None]


async def test_an_acknowledged_id_is_free_after_a_while(tmp_path):
    limits = LedgerLimits(log_bytes=MIB, reserve_bytes=MIB, max_bytes=16 * MIB, tombstone_s=0.0)
    async with open_life(tmp_path, limits) as (table, node, journal):
        session, _ = table.open("s", 0)
        for cursor in (1, 2):
            assert await submit(session, node, make_spec("a")) == [None]
            node.finish("a")
            await ended(session, 1)
            session.ack(cursor)
    async with open_life(tmp_path, limits) as (table, node, journal):
        session = table.get("s")
        assert (len(session.log), session.log.last, node.live) == (0, 2, {})
        assert journal.ledger.statistics().jobs == 0


async def test_an_outcome_that_one_job_forgets_is_not_redelivered(tmp_path):
    async with open_life(tmp_path) as (table, node, _):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a"), make_spec("b"))
        node.finish("a")
        node.finish("b")
        await ended(session, 2)
        session.forget("a")
        assert await submit(session, node, make_spec("a", other=1)) == [None]  # the id is free at once
        node.cancel_soon("a", "")
        await ended(session, 2)
        session.forget("a")
    async with open_life(tmp_path) as (table, node, _):
        session = table.get("s")
        assert [(held.cursor, held.job_id) for held in await all_held(session)] == [(2, "b")]
        await submit(session, node, make_spec("c"))
        node.finish("c")
        await ended(session, 2)
        assert (await session.outcome_of("c")).cursor == 4, "a trainer that was sent 3 would take it for that one"


async def test_a_full_ledger_rejects_all_or_nothing_and_running_jobs_finish(tmp_path):
    limits = LedgerLimits(log_bytes=MIB, reserve_bytes=MIB, max_bytes=16 * MIB, max_jobs=2)
    async with open_life(tmp_path, limits) as (table, node, journal):
        session, _ = table.open("s", 0)
        assert await submit(session, node, make_spec("a")) == [None]
        answers = await submit(session, node, make_spec("b"), make_spec("c"))
        assert all(isinstance(error, AdmissionRejected) and "max_jobs" in str(error) for error in answers)
        assert not session.knows("b")
        assert journal.promised == 0
        node.finish("a")
        await ended(session, 1)
        assert await submit(session, node, make_spec("b")) == [None]


async def test_a_batch_of_a_trainer_that_left_is_taken_to_its_end(tmp_path):
    async with open_life(tmp_path) as (table, node, _):
        session, _ = table.open("s", 0)
        with trio.move_on_after(0):
            await submit(session, node, make_spec("a"))
        assert await submit(session, node, make_spec("a"), make_spec("a")) == [None, None]  # joins what is under way
        assert [spec.job_id for spec in node.submitted] == ["a"]


async def test_an_id_of_another_session_is_refused(tmp_path):
    async with open_life(tmp_path) as (table, node, _):
        first, _ = table.open("s", 0)
        second, _ = table.open("t", 0)
        await submit(first, node, make_spec("a"))
        refused, taken = await submit(second, node, make_spec("a"), make_spec("b"))
        assert isinstance(refused, DuplicateJob)
        assert taken is None


async def test_a_dropped_session_does_not_come_back(tmp_path):
    async with open_life(tmp_path) as (table, _node, journal):
        session, _ = table.open("s", 0)
        await session.store()
        journal.close_session("s")
        again = Session("s", 7, SessionLimits(), journal)
        await again.store()  # after the other is gone
        journal.close_session("s")
    async with open_life(tmp_path) as (table, _node, _):
        assert table.get("s") is None


class SlowLedger:
    """Stores outcomes when the test says so, or fails."""

    is_immediate = False

    def __init__(self):
        self.finishing = {}
        self.full = ""
        self.accepts = trio.Event()
        self.accepts.set()

    def statistics(self):
        return LedgerStatistics(full=self.full)

    async def open_session(self, session_id, first_cursor):
        await trio.lowlevel.checkpoint()

    async def lookup(self, job_ids):
        await trio.lowlevel.checkpoint()
        return {}

    async def accept(self, session_id, jobs):
        await self.accepts.wait()

    def post(self, call):
        if isinstance(call.operation, Finish):
            self.finishing[call.operation.cursor] = call
        else:
            call.answer(None)


async def test_a_drain_waits_for_what_is_being_stored(tmp_path):
    ledger, live_then = SlowLedger(), []
    ledger.accepts = trio.Event()
    async with open_life(tmp_path, ledger=ledger) as (table, node, journal):
        await journal.wait_answered()  # nothing is
        session, _ = table.open("s", 0)

        async def drain():
            await journal.wait_answered()
            live_then.extend(node.live)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(submit, session, node, make_spec("a"), make_spec("b"))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(drain)
            await trio.testing.wait_all_tasks_blocked()
            assert (live_then, journal.promised) == ([], 2)
            ledger.accepts.set()
        assert live_then == ["a", "b"]


async def test_an_outcome_is_offered_when_it_and_those_before_it_are_stored(tmp_path):
    ledger = SlowLedger()
    async with open_life(tmp_path, ledger=ledger) as (table, node, _):
        session, _ = table.open("s", 0)
        await submit(session, node, *map(make_spec, "abc"))
        running = session.running_job("a")
        for job_id in "abc":
            node.finish(job_id)
        assert [ledger.finishing[cursor].operation.job_id for cursor in (1, 2, 3)] == ["a", "b", "c"]
        ledger.finishing[2].answer(None)
        assert (session.log.last, session.running, running.outcome) == (0, 3, None)
        ledger.finishing[1].answer(None)
        await running.ended.wait()
        assert (session.log.last, session.running) == (2, 1)
        ledger.finishing[3].answer(None)
        await ended(session, 3)


async def test_outcomes_are_held_back_when_the_disk_failed(tmp_path):
    ledger = SlowLedger()
    async with open_life(tmp_path, ledger=ledger) as (table, node, journal):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a"))
        node.finish("a")
        ledger.finishing[1].answer(LedgerFailed("broken"))
        assert (session.log.last, journal.failed) == (0, "broken")
        assert table.refusal == "outcomes are held back until the node is started again: broken"


async def test_acknowledgements_that_come_while_one_is_written_are_written_after_it(tmp_path):
    ledger = SlowLedger()
    written = []

    def post(call):
        if isinstance(call.operation, Acknowledge):
            written.append(call)
        else:
            call.answer(None)

    ledger.post = post
    async with open_life(tmp_path, ledger=ledger) as (table, node, _):
        session, _ = table.open("s", 0)
        await submit(session, node, *map(make_spec, "abc"))
        for job_id in "abc":
            node.finish(job_id)
        for cursor in (1, 2, 3):
            session.ack(cursor)
        assert [call.operation.cursor for call in written] == [1]
        written[0].answer(None)
        assert [call.operation.cursor for call in written] == [1, 3]
        written[1].answer(None)
        assert len(written) == 2


async def test_a_full_ledger_is_a_reason_not_to_be_ready(tmp_path):
    ledger = SlowLedger()
    async with open_life(tmp_path, ledger=ledger) as (table, _, _):
        assert table.refusal == ""
        ledger.full = "disk"
        assert table.refusal == "the ledger takes nothing new: disk"


class _Unreadable:
    """A ledger whose reads fail so often."""

    def __init__(self, code, times):
        self.error = OSError(code, "what happened")
        self.times = times

    async def read(self, _ref):
        await trio.lowlevel.checkpoint()
        self.times -= 1
        if self.times >= 0:
            raise self.error
        return b"outcome"


@pytest.mark.parametrize("lack", ["EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "ENOSPC", "EDQUOT", "ENOBUFS", "EINTR"])
async def test_an_outcome_that_the_machine_cannot_read_now_is_read_later(autojump_clock, caplog, lack):
    async with open_journal(_Unreadable(getattr(errno, lack), 3)) as journal:
        assert await journal.read("a", 1) == b"outcome"
    assert caplog.text.count("the outcome of job a cannot be read for now") == 3


@pytest.mark.parametrize("error", ["EACCES", "EIO"])
async def test_an_outcome_on_a_broken_disk_is_lost(autojump_clock, error):
    async with open_journal(_Unreadable(getattr(errno, error), 1)) as journal:
        with pytest.raises(LedgerCorrupt, match="what happened"):
            await journal.read("a", 1)


async def test_an_outcome_for_which_there_is_no_thread_is_read_later(monkeypatch, autojump_clock):
    """Threads are refused for longer than a call waits for one."""
    refused_until_s = trio.current_time() + 3 * MAX_WAIT_S

    async def no_thread(function, *_args, **_options):
        await trio.lowlevel.checkpoint()
        if trio.current_time() < refused_until_s:
            raise RuntimeError("can't start new thread")
        return function()

    class Threaded:
        async def read(self, _ref):
            return await run_sync(lambda: b"outcome")

    async with open_journal(Threaded()) as journal:
        monkeypatch.setattr(trio.to_thread, "run_sync", no_thread)
        assert await journal.read("a", 1) == b"outcome"
        assert trio.current_time() > refused_until_s


def cut(spec, code="shutdown"):
    fields = {"status": "cancelled", "reward": None, "cause": "cancelled", "error_code": code}
    return msgspec.structs.replace(make_outcome(spec), **fields)


@pytest.mark.parametrize(("ends", "left"), [(False, ["a", "b"]), (True, [])])
async def test_jobs_that_are_cut_run_at_the_next_start_unless_they_are_to_end(tmp_path, ends, left):
    """An error ends no job, nor an end after which the node is started again; whoever was cancelled before is over."""
    async with open_life(tmp_path) as (table, node, journal):
        session, _ = table.open("s", 0)
        specs = [make_spec("a"), make_spec("b"), make_spec("c")]
        await submit(session, node, *specs)
        if ends:
            journal.end_cut_jobs()
        for spec, code in zip(specs, ("shutdown", "shutdown", "cancelled"), strict=True):
            session.deliver(cut(spec, code))
        await ended(session, 1 if left else 3)
        assert table.requeued == len(left)
    async with open_life(tmp_path) as (table, node, _):
        assert [job_id for job_id, _attempt in node.taken] == left
        assert table.get("s").running == len(left)
        assert len(table.get("s").log) == 3 - len(left)


class Listener:
    """A trainer that is connected, and takes what comes."""

    reader_id = 0

    def wake(self):
        pass

    def event(self, _event):
        pass


async def test_no_trainer_is_waited_for_whose_jobs_are_left_to_the_next_start(tmp_path):
    async with open_life(tmp_path) as (table, node, _):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a"))
        session.attach(Listener(), 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(table.wait_delivered)
            await trio.testing.wait_all_tasks_blocked()
            assert len(nursery.child_tasks) == 1
            session.deliver(cut(make_spec("a")))


async def test_a_withdrawn_job_that_is_cut_does_not_run_at_the_next_start(tmp_path):
    async with open_life(tmp_path) as (table, node, _):
        session, _ = table.open("s", 0)
        await submit(session, node, make_spec("a"))
        session.withdraw(["a"])
        session.deliver(cut(make_spec("a")))
    async with open_life(tmp_path) as (table, node, _):
        assert not node.taken
