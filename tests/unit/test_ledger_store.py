"""The ledger's disk side by itself: what a group of operations comes to, and what of it is on the disk."""

from __future__ import annotations

import sqlite3
from unittest.mock import Mock

import pytest

from prorl_trio.ledger import LedgerFailed, LedgerFull, LedgerLimits, LedgerRefused, NewJob
from prorl_trio.ledger.operations import Accept, Acknowledge, BeginAttempt, CloseSession, Finish, Forget, OpenSession
from prorl_trio.ledger.store import WAIT_FOR_ROOM, Store
from prorl_trio.types.errors import ProtocolError, UnknownJob
from support.faulty_disk import FaultyDisk

KIB = 1024
LIMITS = LedgerLimits(log_bytes=KIB * KIB, reserve_bytes=64 * KIB, max_bytes=16 * KIB * KIB)


class Bench:
    """A ledger with jobs `a` to `d` of session `s`."""

    def __init__(self, folder):
        self.folder = folder
        self.disk = FaultyDisk()
        self.store = Store(folder, LIMITS, self.disk)
        jobs = [NewJob(job_id=name, fingerprint=b"f", spec=b"spec") for name in "abcd"]
        assert self.store.commit([OpenSession("s", 0), Accept("s", jobs)]) == [None, None]

    def commit(self, *operations):
        return self.store.commit(operations)

    def reopen(self):
        self.store.close()
        self.store = Store(self.folder, LIMITS, self.disk)


@pytest.fixture
def bench(memory_path):
    bench = Bench(memory_path / "ledger")
    yield bench
    bench.store.close()


def finish(job_id, cursor, attempt=1):
    return Finish("s", job_id, attempt, cursor, [job_id.encode()])


@pytest.mark.parametrize(
    "late", [Acknowledge("s", 1), Forget("s", ["a"]), CloseSession("s"), BeginAttempt("b", 1)], ids=lambda one: str(one)
)
def test_what_needs_no_sync_is_done_after_the_outcomes_of_its_group(bench, late):
    """An outcome is not refused for what somebody gave up in the same moment."""
    syncs = bench.disk.syncs
    assert bench.commit(late, finish("a", 1)) == [None, None]
    assert bench.disk.syncs > syncs
    bench.reopen()
    left = {job.job_id: (job.cursor, job.attempt) for job in bench.store.jobs()}
    if isinstance(late, CloseSession):
        assert left == {}
    elif isinstance(late, BeginAttempt):
        assert left == {"b": (None, 1), "c": (None, 0), "d": (None, 0), "a": (1, 1)}
    else:
        assert left == dict.fromkeys("bcd", (None, 0))


@pytest.mark.parametrize("beside", [[], [Acknowledge("s", 1)], [BeginAttempt("c", 1)]], ids=len)
def test_an_outcome_is_synced_whatever_is_in_its_group(bench, beside):
    bench.commit(finish("a", 1))
    syncs = bench.disk.syncs
    assert bench.commit(*beside, finish("b", 2)) == [None] * (len(beside) + 1)
    assert bench.disk.syncs > syncs


def test_cursors_never_go_back(bench):
    assert bench.commit(finish("b", 3), finish("a", 1)) == [None, None]
    bench.reopen()
    (session,) = bench.store.sessions()
    assert session.last == 3
    assert bench.commit(Acknowledge("s", 3)) == [None]
    (refused,) = bench.commit(Acknowledge("s", 4))
    assert isinstance(refused, ProtocolError)
    (refused,) = bench.commit(finish("c", 2))
    assert isinstance(refused, ProtocolError)


def test_a_session_forgets_its_own_jobs_only(bench):
    assert bench.commit(OpenSession("other", 0), Forget("other", ["a"])) == [None, None]
    assert {job.job_id for job in bench.store.jobs()} == set("abcd")


def test_an_outcome_is_read_by_its_own_cursor_only(bench):
    bench.commit(finish("a", 1))
    assert bench.store.read("a", 1) == b"a"
    assert bench.store.read("b", None) == b"spec"
    for cursor in (None, 2):
        with pytest.raises(UnknownJob):
            bench.store.read("a", cursor)


def test_time_in_which_the_ledger_was_open_counts_over_a_restart(bench, monkeypatch):
    """What was acknowledged is known for so long of the ledger's own time, however often it is opened."""
    now_s = [1000.0]
    monkeypatch.setattr("prorl_trio.ledger.store.time.monotonic", lambda: now_s[0])
    bench.reopen()
    bench.commit(finish("a", 1))
    bench.commit(Acknowledge("s", 1))
    for number in range(3):
        assert "a" in bench.store.lookup(["a"])
        now_s[0] += 0.4 * LIMITS.tombstone_s
        bench.commit(BeginAttempt("b", number + 1), finish("cd"[number % 2], number + 2))
        bench.reopen()
    assert bench.store.lookup(["a"]) == {}


def test_counts_are_as_before_a_transaction_that_did_not_go_through(bench, monkeypatch):
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    monkeypatch.setattr(bench.store._tables, "_change_session", Mock(side_effect=full))
    before = bench.store.statistics()
    assert bench.commit(finish("a", 1)) == [WAIT_FOR_ROOM]
    after = bench.store.statistics()
    assert (after.jobs, after.live_bytes) == (before.jobs, before.live_bytes)


@pytest.mark.parametrize(
    "unstorable",
    [
        BeginAttempt("b", 2**63),
        BeginAttempt("b", 2**64),
        Finish("s", "b", 2**63, 2, [b"x"]),
        OpenSession("other", 2**63),
        OpenSession("\ud800", 0),
        Accept(
            "s",
            [NewJob(job_id="new", fingerprint=b"f", spec=b"x"), NewJob(job_id="\ud800", fingerprint=b"f", spec=b"x")],
        ),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_value_that_cannot_be_stored_is_refused_alone_and_fails_no_disk(bench, unstorable):
    answers = bench.commit(finish("a", 1), unstorable, Accept("s", [NewJob(job_id="e", fingerprint=b"f", spec=b"x")]))
    assert isinstance(answers[1], LedgerRefused), answers
    assert (answers[0], answers[2]) == (None, None)
    assert bench.commit(BeginAttempt("c", 1)) == [None]
    bench.reopen()
    assert {job.job_id for job in bench.store.jobs()} == {*"abcde"}
    assert [session.session_id for session in bench.store.sessions()] == ["s"]


def test_a_ledger_that_somebody_has_removed_takes_nothing_new_until_it_is_back(bench):
    """What is written to a removed file ends with the process: an accepted job would be lost in silence."""
    new = Accept("s", [NewJob(job_id="e", fingerprint=b"f", spec=b"x")])
    elsewhere = bench.folder.with_name("moved")
    bench.folder.rename(elsewhere)
    done, refused = bench.commit(finish("a", 1), new)
    assert done is None, "those who wait for outcomes get them"
    assert isinstance(refused, LedgerFull)
    assert "was removed" in str(refused)
    assert "was removed" in bench.store.statistics().full
    assert bench.store.disk_is_full, "it is looked at again"
    elsewhere.rename(bench.folder)
    assert bench.commit(new) == [None]
    assert not bench.store.statistics().full
    bench.reopen()
    assert {job.job_id for job in bench.store.jobs()} == {*"abcde"}


def test_a_lack_of_memory_in_a_transaction_fails_no_disk(bench, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(bench.store._tables, "_change_session", Mock(side_effect=MemoryError))
        before = bench.store.statistics()
        with pytest.raises(MemoryError):
            bench.commit(finish("a", 1))
    assert bench.commit(finish("a", 1)) == [None]
    assert bench.store.statistics().jobs == before.jobs
    assert not bench.store.statistics().full


@pytest.mark.parametrize(
    ("damage", "operation"),
    [
        ("UPDATE jobs SET attempt = 7 WHERE job_id = 'a'", finish("a", 1, attempt=9)),
        ("UPDATE jobs SET fingerprint = x'00' WHERE job_id = 'a'", BeginAttempt("a", 1)),
        ("UPDATE sessions SET last = 9", finish("a", 1)),
        ("UPDATE sessions SET acked = 3", finish("a", 5)),
    ],
)
def test_a_row_that_has_changed_on_the_disk_is_not_gone_by(bench, damage, operation):
    bench.store._db.execute(damage)
    bench.commit(operation)
    assert "has changed" in bench.store.statistics().full
    (refused,) = bench.commit(finish("b", 2))
    assert isinstance(refused, LedgerFailed)
