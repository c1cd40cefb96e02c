"""The ledger's store against a simple model, killed or cut from power at any step.

What an operation left that needs no sync is there after a kill; after a loss of power, some first part of such
operations since the last sync is.
"""

from __future__ import annotations

import copy
import random
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prorl_trio.ledger import LedgerLimits, NewJob
from prorl_trio.ledger.operations import (
    LAZY,
    Accept,
    Acknowledge,
    BeginAttempt,
    CloseSession,
    Finish,
    Forget,
    OpenSession,
)
from prorl_trio.ledger.store import Store
from prorl_trio.types.errors import ProrlError
from support.faulty_disk import FaultyDisk
from support.power_loss import Wreck

LIMITS = LedgerLimits(log_bytes=65_536, reserve_bytes=8_192, max_bytes=64_000_000, max_group_bytes=20_000, max_reads=1)
DISK = FaultyDisk()
MEMORY = Path("/dev/shm")
"""Syncs cost nothing there, and what they promise is the model's to check."""
SESSIONS = ("s", "t")
sizes = st.one_of(st.integers(0, 60), st.integers(0, 3_000), st.just(12_000))


class Model:
    """What a ledger is to hold."""

    def __init__(self) -> None:
        self.sessions: dict[str, tuple[int, int]] = {}
        self.unfinished: dict[str, tuple[str, int, bytes]] = {}
        self.undelivered: dict[tuple[str, int], tuple[str, int, bytes]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"{self.sessions} {list(self.unfinished)} {list(self.undelivered)}"

    def do(self, operation: object) -> None:
        match operation:
            case OpenSession(session_id, first):
                self.sessions.setdefault(session_id, (first, first))
            case CloseSession(session_id):
                self.sessions.pop(session_id, None)
                self.unfinished = {k: v for k, v in self.unfinished.items() if v[0] != session_id}
                self.undelivered = {k: v for k, v in self.undelivered.items() if k[0] != session_id}
            case Accept(session_id, jobs):
                for job in jobs:
                    self.unfinished[job.job_id] = (session_id, 0, job.spec)
            case BeginAttempt(job_id, attempt):
                session_id, _, spec = self.unfinished[job_id]
                self.unfinished[job_id] = (session_id, attempt, spec)
            case Finish(session_id, job_id, attempt, cursor, outcome):
                del self.unfinished[job_id]
                self.undelivered[session_id, cursor] = (job_id, attempt, b"".join(outcome))
                acked, last = self.sessions[session_id]
                self.sessions[session_id] = (acked, max(last, cursor))
            case Acknowledge(session_id, cursor):
                if session_id in self.sessions:
                    acked, last = self.sessions[session_id]
                    self.sessions[session_id] = (max(acked, cursor), last)
                    self.undelivered = {
                        k: v for k, v in self.undelivered.items() if k[0] != session_id or k[1] > cursor
                    }
            case Forget(session_id, job_ids):
                gone = {job_id for job_id in job_ids if self.unfinished.get(job_id, (session_id,))[0] == session_id}
                self.unfinished = {k: v for k, v in self.unfinished.items() if k not in gone}
                self.undelivered = {k: v for k, v in self.undelivered.items() if k[0] != session_id or v[0] not in gone}


def stored(store: Store) -> Model:
    model = Model()
    model.sessions = {session.session_id: (session.acked, session.last) for session in store.sessions()}
    for job in store.jobs():
        payload = store.read(job.job_id, job.cursor)
        if job.cursor is None:
            model.unfinished[job.job_id] = (job.session_id, job.attempt, payload)
        else:
            model.undelivered[job.session_id, job.cursor] = (job.job_id, job.attempt, payload)
    return model


class LedgerMachine(RuleBasedStateMachine):
    """Operations in groups of any size; crashes between them."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="prorl-ledger-model-", dir=MEMORY if MEMORY.is_dir() else None))
        self.folder = self.root / "0"
        self.chance = random.Random(seed)
        self.numbers = 0
        self.group: list[object] = []
        self.model = Model()
        self.possible = [Model()]
        """What may be found after a loss of power; the last is what is there now."""
        self.open()
        self.run(OpenSession("s", 0))
        self.commit()

    def open(self) -> None:
        self.wreck = Wreck(self.folder)
        DISK.before = self.wreck.take
        self.store = Store(self.folder, LIMITS, DISK)
        DISK.before = self.wreck.take

    def run(self, operation: object) -> None:
        self.group.append(operation)

    def payload(self, size: int) -> bytes:
        return self.chance.randbytes(size)

    @rule(session=st.sampled_from(SESSIONS), specs=st.lists(sizes, min_size=1, max_size=4))
    def accept(self, session: str, specs: list[int]) -> None:
        if session in self.model.sessions:
            jobs = []
            for size in specs:
                self.numbers += 1
                jobs.append(NewJob(job_id=f"j{self.numbers}", fingerprint=b"f", spec=self.payload(size)))
            self.run(Accept(session, jobs))

    @rule(pick=st.integers(0, 1_000), size=sizes)
    def finish(self, pick: int, size: int) -> None:
        jobs = sorted(self.model.unfinished)
        if jobs:
            job_id = jobs[pick % len(jobs)]
            session_id, attempt, _ = self.model.unfinished[job_id]
            in_group = sum(isinstance(operation, Finish) for operation in self.group)
            cursor = self.model.sessions[session_id][1] + 1 + in_group
            half = self.payload(size // 2)
            self.run(Finish(session_id, job_id, attempt + pick % 2, cursor, [half, half]))

    @rule(pick=st.integers(0, 1_000))
    def attempt(self, pick: int) -> None:
        jobs = sorted(self.model.unfinished)
        if jobs:
            job_id = jobs[pick % len(jobs)]
            self.run(BeginAttempt(job_id, self.model.unfinished[job_id][1] + 1))

    @rule(session=st.sampled_from(SESSIONS), back=st.integers(0, 3))
    def acknowledge(self, session: str, back: int) -> None:
        if session in self.model.sessions:
            self.run(Acknowledge(session, max(0, self.model.sessions[session][1] - back)))

    @rule(pick=st.integers(0, 1_000))
    def forget(self, pick: int) -> None:
        jobs = sorted(self.model.unfinished)
        if jobs:
            job_id = jobs[pick % len(jobs)]
            self.run(Forget(self.model.unfinished[job_id][0], [job_id, "unknown"]))

    @rule(session=st.sampled_from(SESSIONS), first=st.integers(0, 5))
    def open_session(self, session: str, first: int) -> None:
        self.run(OpenSession(session, first))

    @precondition(lambda self: self.chance.random() < 0.2)
    @rule()
    def close_session(self) -> None:
        self.run(CloseSession("t"))

    @rule()
    def commit(self) -> None:
        operations, self.group = self.group, []
        answers = self.store.commit(operations)
        done = [operation for operation, answer in zip(operations, answers, strict=True) if answer is None]
        for answer in answers:
            assert answer is None or isinstance(answer, ProrlError)
        before, states = copy.deepcopy(self.model), []
        for operation in sorted(done, key=lambda operation: isinstance(operation, LAZY)):
            self.model.do(operation)
            states.append(copy.deepcopy(self.model))
        synced = sum(not isinstance(operation, LAZY) for operation in done)
        if synced and self.model != before:
            self.possible = states[synced - 1 :]
        elif self.model != before:  # a group that changes nothing is not written, so it syncs nothing before it
            self.possible += states

    @rule(kept=st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    def crash(self, kept: float) -> None:
        """A kill keeps all, a loss of power some of what was not synced."""
        self.group = []
        left = self.root / f"{int(self.folder.name) + 1}"
        self.wreck.leave(left, self.chance, kept=kept)
        DISK.before = lambda _step: None
        self.store.close()
        shutil.rmtree(self.folder)
        self.folder = left
        self.open()
        found = stored(self.store)
        assert self.store.damage == []
        if kept < 1:
            assert found in self.possible, (found, self.possible)
        else:
            assert found == self.model
        self.model = found
        self.possible = [copy.deepcopy(found)]

    @rule()
    def restart(self) -> None:
        self.group = []
        self.store.close()
        self.open()
        assert stored(self.store) == self.model
        self.possible = [copy.deepcopy(self.model)]

    @invariant()
    def holds_what_it_is_to_hold(self) -> None:
        if not self.group:
            assert stored(self.store) == self.model

    @invariant()
    def counts_what_is_live(self) -> None:
        statistics = self.store.statistics()
        payloads = [*(j[2] for j in self.model.unfinished.values()), *(j[2] for j in self.model.undelivered.values())]
        assert self.group or (statistics.jobs, statistics.live_bytes) == (len(payloads), sum(map(len, payloads)))

    @invariant()
    def disk_is_bounded_by_what_is_live(self) -> None:
        if not self.store.cleaning_due:
            statistics = self.store.statistics()
            pages = 8_192 * (statistics.jobs + 20)
            assert statistics.disk_bytes <= 3 * (statistics.live_bytes + pages) + 5 * LIMITS.log_bytes + 4 * 12_000

    def teardown(self) -> None:
        if hasattr(self, "store"):
            DISK.before = lambda _step: None
            self.store.close()
            shutil.rmtree(self.root)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
