"""Promises of every ledger, in memory or on a disk, while it runs; and of those on a disk when they are opened again.

What a kill, a loss of power and a bad disk leave of one: tests/faults/test_ledger_*.py.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager

import pytest
import trio
import trio.lowlevel
import trio.testing

from prorl_trio.ledger import (
    LedgerFailed,
    LedgerFull,
    LedgerLimits,
    MemoryLedger,
    NewJob,
    RecoveredSession,
    Ref,
    StaleAttempt,
    open_ledger,
)
from prorl_trio.types.errors import DuplicateJob, ProtocolError, UnknownJob
from support.cancel_sweep import cancel_sweep
from support.faulty_disk import FaultyDisk

KIB = 1024
SMALL = LedgerLimits(log_bytes=64 * KIB, reserve_bytes=64 * KIB, max_bytes=1024 * KIB, retry_interval_s=0.01)
LONG_LOG = LedgerLimits(log_bytes=KIB * KIB, reserve_bytes=64 * KIB, max_bytes=16 * KIB * KIB)
"""Not copied into the database during a test, which takes syncs, too."""


class Keeper:
    """Opens ledgers of one kind. `lasts`: what one has is there when the next is opened."""

    def __init__(self, kind, path):
        self.lasts = kind == "disk"
        self._path = path

    @asynccontextmanager
    async def open(self, limits=SMALL):
        if not self.lasts:
            yield MemoryLedger(limits)
            return
        async with open_ledger(self._path, limits) as ledger:
            yield ledger


@pytest.fixture(params=["memory", "disk"])
def keeper(request, memory_path):
    return Keeper(request.param, memory_path / "new" / "ledger")


def job(job_id, spec=b"spec"):
    return NewJob(job_id=job_id, fingerprint=job_id.encode(), spec=spec)


def unfinished(ledger):
    return [(job.session_id, job.job_id, job.fingerprint, job.last_attempt) for job in ledger.recovered.unfinished]


def undelivered(ledger):
    return [(job.session_id, job.cursor, job.job_id, job.attempt) for job in ledger.recovered.undelivered]


async def test_what_was_stored_is_there_after_a_restart(keeper):
    with trio.fail_after(10):
        async with keeper.open() as ledger:
            assert ledger.recovered.sessions == []
            await ledger.open_session("s", 7)
            await ledger.open_session("idle", 0)
            await ledger.accept("s", [job("b", b"spec of b"), job("a"), job("empty", b"")])
            await ledger.accept("s", [job("late")])
            await ledger.begin_attempt("a", 1)
            await ledger.begin_attempt("b", 1)
            await ledger.begin_attempt("b", 2)
            ref = await ledger.finish("s", "a", 1, 8, [b"out", memoryview(b"come"), b""])
            assert ref.size_bytes == 7
            assert await ledger.read(ref) == b"outcome"
        for _ in range(2 if keeper.lasts else 0):
            async with keeper.open() as ledger:
                assert ledger.recovered.sessions == [
                    RecoveredSession(session_id="idle", acked=0, last=0),
                    RecoveredSession(session_id="s", acked=7, last=8),
                ]
                assert unfinished(ledger) == [
                    ("s", "b", b"b", 2),
                    ("s", "empty", b"empty", 0),
                    ("s", "late", b"late", 0),
                ]
                assert undelivered(ledger) == [("s", 8, "a", 1)]
                specs = [await ledger.read(job.spec) for job in ledger.recovered.unfinished]
                assert specs == [b"spec of b", b"", b"spec"]
                assert await ledger.read(ledger.recovered.undelivered[0].outcome) == b"outcome"
                assert ledger.recovered.damage == []


async def test_a_job_has_one_outcome_and_no_late_one(keeper):
    with trio.fail_after(10):
        async with keeper.open() as ledger:
            await ledger.open_session("s", 0)
            await ledger.open_session("other", 0)
            await ledger.accept("s", [job("a"), job("b")])
            await ledger.begin_attempt("a", 2)
            with pytest.raises(StaleAttempt, match="attempt 1 of job 'a' refused: it is at attempt 2"):
                await ledger.finish("s", "a", 1, 1, [b"late"])
            with pytest.raises(StaleAttempt):
                await ledger.begin_attempt("a", 2)
            with pytest.raises(UnknownJob):
                await ledger.finish("other", "a", 2, 1, [b"not its session"])
            await ledger.finish("s", "a", 2, 1, [b"first"])
            with pytest.raises(StaleAttempt, match="has ended it with cursor 1"):
                await ledger.finish("s", "a", 2, 2, [b"second"])
            with pytest.raises(StaleAttempt):
                await ledger.begin_attempt("a", 3)
            with pytest.raises(ProtocolError, match="cursor 1 of session 's' is taken"):
                await ledger.finish("s", "b", 1, 1, [b"same cursor"])
            with pytest.raises(UnknownJob):
                await ledger.finish("s", "nobody", 1, 2, [b""])
            with pytest.raises(ProtocolError, match="not open"):
                await ledger.finish("closed", "a", 1, 2, [b""])
            assert await ledger.read(Ref("a", 1, 5)) == b"first"
            with pytest.raises(UnknownJob):
                await ledger.read(Ref("a", None, 4))


async def test_of_outcomes_at_the_same_time_one_counts(keeper):
    results = []

    async def finish(ledger, number):
        try:
            results.append(await ledger.finish("s", "a", 1, number, [b"%d" % number]))
        except StaleAttempt as exc:
            results.append(exc)

    with trio.fail_after(10):
        async with keeper.open() as ledger:
            await ledger.open_session("s", 0)
            await ledger.accept("s", [job("a"), job("b"), job("c")])
            async with trio.open_nursery() as nursery:
                for number in (1, 2, 3):
                    nursery.start_soon(finish, ledger, number)
            (ref,) = [result for result in results if isinstance(result, Ref)]
            assert await ledger.read(ref) == b"%d" % ref.cursor

            async with trio.open_nursery() as nursery:  # and of two jobs, one gets the cursor
                refused = []
                for job_id in ("b", "c"):

                    async def claim(job_id=job_id):
                        try:
                            await ledger.finish("s", job_id, 1, 9, [job_id.encode()])
                        except ProtocolError:
                            refused.append(job_id)

                    nursery.start_soon(claim)
            assert len(refused) == 1
            known = await ledger.lookup(["a", "b", "c"])
            assert [job_id for job_id, found in known.items() if found.state == "stored"] == refused
        for _ in range(keeper.lasts):
            async with keeper.open() as ledger:
                assert len(ledger.recovered.undelivered) == 2
                assert [job.job_id for job in ledger.recovered.unfinished] == refused


async def test_a_batch_is_accepted_whole_or_not_at_all(keeper):
    with trio.fail_after(10):
        async with keeper.open() as ledger:
            await ledger.open_session("s", 0)
            await ledger.open_session("other", 0)
            await ledger.accept("s", [job("a")])
            with pytest.raises(DuplicateJob, match="'a' is here already, in session 's'"):
                await ledger.accept("other", [job("b"), job("a")])
            with pytest.raises(DuplicateJob):
                await ledger.accept("s", [job("c"), job("c")])
            with pytest.raises(ProtocolError):
                await ledger.accept("nobody", [job("d")])
            await ledger.accept("s", [])
            assert set(await ledger.lookup(["a", "b", "c", "d"])) == {"a"}


async def test_the_number_of_jobs_is_limited(keeper):
    limits = LedgerLimits(log_bytes=64 * KIB, reserve_bytes=64 * KIB, max_bytes=1024 * KIB, max_jobs=3)
    with trio.fail_after(10):
        async with keeper.open(limits) as ledger:
            await ledger.open_session("s", 0)
            await ledger.accept("s", [job("a"), job("b")])
            with pytest.raises(LedgerFull, match=r"2 jobs are stored; 2 more would exceed max_jobs \(3\)"):
                await ledger.accept("s", [job("c"), job("d")])
            await ledger.finish("s", "a", 1, 1, [b""])
            await ledger.acknowledge("s", 1)
            await ledger.accept("s", [job("c"), job("d")])


async def check_known(ledger):
    known = await ledger.lookup(list("abcdex"))
    assert {name: found.state for name, found in known.items()} == {
        "b": "acknowledged",
        "c": "acknowledged",
        "e": "stored",
    }
    assert known["b"].fingerprint == b"b"


async def check_accepted_again(ledger):
    await ledger.accept("s", [job("b")])
    assert (await ledger.lookup(["b"]))["b"].state == "stored"


async def test_acknowledged_jobs_are_known_for_a_while(keeper):
    limits = LedgerLimits(log_bytes=64 * KIB, reserve_bytes=64 * KIB, max_bytes=1024 * KIB, max_tombstones=2)
    with trio.fail_after(10):
        async with keeper.open(limits) as ledger:
            await ledger.open_session("s", 0)
            await ledger.accept("s", [job(name) for name in "abcde"])
            for cursor, name in enumerate("abc", 1):
                await ledger.finish("s", name, 1, cursor, [b""])
            known = await ledger.lookup(list("abcdex"))
            assert {name: found.state for name, found in known.items()} == {
                **dict.fromkeys("abc", "offered"),
                **dict.fromkeys("de", "stored"),
            }
            for cursor in (1, 2, 1, 3):
                await ledger.acknowledge("s", cursor)
            with pytest.raises(ProtocolError, match="cursor 4 acknowledged, but 3 is the last one"):
                await ledger.acknowledge("s", 4)
            await ledger.acknowledge("closed", 1)
            await ledger.forget("s", ["d", "unknown"])
            await ledger.forget("other", ["e"])
            await check_known(ledger)
            if not keeper.lasts:
                await check_accepted_again(ledger)
        for _ in range(2 if keeper.lasts else 0):
            async with keeper.open(limits) as ledger:
                await check_known(ledger)
                assert ledger.recovered.sessions == [RecoveredSession(session_id="s", acked=3, last=3)]
        for _ in range(keeper.lasts):
            async with keeper.open(limits) as ledger:
                await check_accepted_again(ledger)


async def test_fingerprints_expire(keeper):
    limits = LedgerLimits(log_bytes=64 * KIB, reserve_bytes=64 * KIB, max_bytes=1024 * KIB, tombstone_s=0.0)
    with trio.fail_after(10):
        async with keeper.open(limits) as ledger:
            await ledger.open_session("s", 0)
            await ledger.accept("s", [job("a")])
            await ledger.finish("s", "a", 1, 1, [b""])
            await ledger.acknowledge("s", 1)
            assert await ledger.lookup(["a"]) == {}


async def test_a_closed_session_leaves_nothing(keeper):
    with trio.fail_after(10):
        async with keeper.open() as ledger:
            await ledger.open_session("s", 0)
            await ledger.accept("s", [job("a"), job("b")])
            ref = await ledger.finish("s", "a", 1, 1, [b"x"])
            await ledger.close_session("s")
            await ledger.close_session("s")
            with pytest.raises(UnknownJob):
                await ledger.read(ref)
            assert ledger.statistics().jobs == 0
        async with keeper.open() as ledger:
            assert (ledger.recovered.sessions, unfinished(ledger), undelivered(ledger)) == ([], [], [])


async def test_calls_that_come_during_a_sync_share_the_next(memory_path):
    disk = FaultyDisk()
    with trio.fail_after(10):
        async with open_ledger(memory_path, LONG_LOG, disk=disk) as ledger:
            await ledger.open_session("s", 0)
            await ledger.accept("s", [job(f"{n}") for n in range(20)])
            disk.may_sync.clear()
            disk.syncing.clear()
            syncs = disk.syncs
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ledger.finish, "s", "0", 1, 1, [b"first"])
                await trio.to_thread.run_sync(disk.syncing.wait)
                for number in range(1, 20):
                    nursery.start_soon(ledger.finish, "s", str(number), 1, number + 1, [b"next"])
                await trio.testing.wait_all_tasks_blocked()
                disk.may_sync.set()
            assert disk.syncs == syncs + 2
            assert ledger.statistics().largest_group == 19


async def test_what_needs_no_sync_has_none(memory_path):
    disk = FaultyDisk()
    with trio.fail_after(10):
        async with open_ledger(memory_path, LONG_LOG, disk=disk) as ledger:
            await ledger.open_session("s", 0)
            await ledger.accept("s", [job("a"), job("b")])
            await ledger.finish("s", "a", 1, 1, [b""])
            syncs = disk.syncs
            await ledger.begin_attempt("b", 1)
            await ledger.acknowledge("s", 1)
            await ledger.forget("s", ["b"])
            await ledger.close_session("s")
            assert disk.syncs == syncs


async def test_a_call_cancelled_before_its_group_is_not_made(memory_path):
    disk = FaultyDisk()
    with trio.fail_after(10):
        async with open_ledger(memory_path, SMALL, disk=disk) as ledger:
            await ledger.open_session("s", 0)
            disk.may_sync.clear()
            disk.syncing.clear()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ledger.accept, "s", [job("a")])
                await trio.to_thread.run_sync(disk.syncing.wait)
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await ledger.accept("s", [job("b")])
                disk.may_sync.set()
            assert set(await ledger.lookup(["a", "b"])) == {"a"}


async def test_cancelled_anywhere_the_state_is_consistent(keeper):
    numbers = iter(range(1, 10_000))
    tried = []
    with trio.fail_after(30):
        async with keeper.open() as ledger:
            await ledger.open_session("s", 0)

            async def work():
                number = next(numbers)
                tried.append(number)
                await ledger.accept("s", [job(f"{number}")])
                await ledger.begin_attempt(f"{number}", 1)
                await ledger.finish("s", f"{number}", 1, number, [b"%d" % number])

            async def check(run):
                number = tried[-1]
                found = (await ledger.lookup([f"{number}"])).get(f"{number}")
                if run.completed:
                    assert found is not None
                    assert found.state == "offered"
                if found is not None and found.state == "offered":
                    assert await ledger.read(Ref(f"{number}", number, 0)) == b"%d" % number

            await cancel_sweep(work, check)
            known = await ledger.lookup([str(number) for number in tried])
            assert ledger.statistics().jobs == len(known)
        for _ in range(keeper.lasts):
            async with keeper.open() as ledger:
                found = {job.job_id for job in (*ledger.recovered.unfinished, *ledger.recovered.undelivered)}
                assert found == set(known)


async def test_leaving_answers_who_still_waits(memory_path):
    disk = FaultyDisk()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            failed = trio.Event()

            async def wait_for_ever(ledger):
                with pytest.raises(LedgerFailed, match="closed"):
                    await ledger.finish("s", "a", 1, 1, [bytes(100 * KIB)])
                failed.set()

            async with open_ledger(memory_path, SMALL, disk=disk) as ledger:
                await ledger.open_session("s", 0)
                await ledger.accept("s", [job("a")])
                disk.free_bytes = 0
                nursery.start_soon(wait_for_ever, ledger)  # noqa: ASYNC111 - it is to outlive the ledger
                while not ledger.statistics().waiting:
                    await trio.lowlevel.checkpoint()
            await failed.wait()
        with pytest.raises(LedgerFailed):
            await ledger.accept("s", [job("b")])


async def test_the_disk_gets_back_what_nobody_wants_any_more(memory_path):
    with trio.fail_after(20):
        async with open_ledger(memory_path, SMALL) as ledger:
            await ledger.open_session("s", 0)
            for round_number in range(20):
                names = [f"{round_number}-{n}" for n in range(1, 11)]
                await ledger.accept("s", [job(name) for name in names])
                for n, name in enumerate(names, 1):
                    await ledger.finish("s", name, 1, 10 * round_number + n, [bytes(30 * KIB)])
                await ledger.acknowledge("s", 10 * round_number + 10)
            assert ledger.statistics().live_bytes == 0
            while ledger.statistics().disk_bytes > SMALL.reserve_bytes + 6 * SMALL.log_bytes:
                await trio.sleep(0.001)


async def test_an_old_outcome_does_not_keep_what_came_after_it(memory_path):
    with trio.fail_after(20):
        async with open_ledger(memory_path, SMALL) as ledger:
            await ledger.open_session("slow", 0)
            await ledger.open_session("s", 0)
            await ledger.accept("slow", [job("waits"), job("old", b"old spec")])
            old = await ledger.finish("slow", "old", 3, 1, [b"old outcome"])
            for number in range(1, 101):
                await ledger.accept("s", [job(f"{number}")])
                await ledger.finish("s", f"{number}", 1, number, [bytes(30 * KIB)])
                await ledger.acknowledge("s", number)
                assert ledger.statistics().disk_bytes <= SMALL.reserve_bytes + 10 * SMALL.log_bytes
            assert await ledger.read(old) == b"old outcome"
        async with open_ledger(memory_path, SMALL) as ledger:
            assert unfinished(ledger) == [("slow", "waits", b"waits", 0)]
            assert undelivered(ledger) == [("slow", 1, "old", 3)]
            assert await ledger.read(old) == b"old outcome"
            assert ledger.recovered.damage == []


async def test_an_outcome_larger_than_the_log_is_stored(memory_path):
    limits = LedgerLimits(log_bytes=16 * KIB, reserve_bytes=64 * KIB, max_bytes=1024 * KIB)
    with trio.fail_after(10):
        async with open_ledger(memory_path, limits) as ledger:
            await ledger.open_session("s", 0)
            await ledger.accept("s", [job("a"), job("b")])
            large = os.urandom(200 * KIB)
            await ledger.finish("s", "a", 1, 1, [large])
            await ledger.finish("s", "b", 1, 2, [b"small"])
        async with open_ledger(memory_path, limits) as ledger:
            payloads = [await ledger.read(job.outcome) for job in ledger.recovered.undelivered]
            assert payloads == [large, b"small"]


async def test_the_loop_never_waits_for_the_disk(memory_path):
    """With a sync that does not return, everything that only looks still answers."""
    disk = FaultyDisk()
    with trio.fail_after(10):
        async with open_ledger(memory_path, SMALL, disk=disk) as ledger:
            await ledger.open_session("s", 0)
            await ledger.accept("s", [job("a"), job("b")])
            ref = await ledger.finish("s", "a", 1, 1, [b"outcome"])
            disk.may_sync.clear()
            disk.syncing.clear()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ledger.finish, "s", "b", 1, 2, [b""])
                await trio.to_thread.run_sync(disk.syncing.wait)
                assert ledger.statistics().jobs == 2
                assert await ledger.read(ref) == b"outcome"
                assert (await ledger.lookup(["b"]))["b"].state == "stored"
                assert "2 jobs" in repr(ledger)
                disk.may_sync.set()
