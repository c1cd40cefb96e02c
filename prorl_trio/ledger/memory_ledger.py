"""A ledger in memory, with the same rules, that ends with its process and never waits."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import msgspec
import trio

from prorl_trio.ledger.ledger import KnownJob, Ledger, LedgerLimits, LedgerStatistics, Recovered
from prorl_trio.ledger.operations import (
    Accept,
    Acknowledge,
    BeginAttempt,
    CloseSession,
    Finish,
    Forget,
    OpenSession,
)
from prorl_trio.ledger.rules import check_accept, check_acknowledge, check_begin, check_finish, state_of
from prorl_trio.types.errors import ProrlError, UnknownJob

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prorl_trio.ledger.ledger import Ref
    from prorl_trio.ledger.operations import Call, Operation


class _Session(msgspec.Struct):
    acked: int
    last: int
    jobs: set[str] = msgspec.field(default_factory=set)
    cursors: dict[int, str] = msgspec.field(default_factory=dict)
    """Job ids of the outcomes that are not acknowledged."""


class _Job(msgspec.Struct):
    session_id: str
    fingerprint: bytes
    payload: bytes
    attempt: int = 0
    cursor: int | None = None


class _Tombstone(NamedTuple):
    session_id: str
    fingerprint: bytes
    at_s: float


class MemoryLedger(Ledger):
    """A ledger without a disk, and without a disk's limits.

    It holds at most as many outcomes as admission allows, and shares their bytes with the session.

    Every call is carried out and answered at once. Changing calls and `lookup` are not checkpoints.
    """

    is_immediate: ClassVar[bool] = True

    def __init__(self, limits: LedgerLimits | None = None) -> None:
        self.recovered = Recovered()
        self._limits = limits or LedgerLimits()
        self._sessions: dict[str, _Session] = {}
        self._jobs: dict[str, _Job] = {}
        self._tombstones: OrderedDict[str, _Tombstone] = OrderedDict()
        """Tombstones by job id, oldest first."""
        self._live_bytes = 0
        self._operations = 0

    def __repr__(self) -> str:
        return f"<MemoryLedger {len(self._jobs)} jobs, {self._live_bytes} bytes>"

    def post(self, call: Call) -> None:
        self._operations += 1
        try:
            self._do(call.operation)
        except ProrlError as exc:
            call.answer(exc)
        else:
            call.answer(None)

    async def read(self, ref: Ref) -> bytes:
        await trio.lowlevel.checkpoint_if_cancelled()
        job = self._jobs.get(ref.job_id)
        if job is None or job.cursor != ref.cursor:
            raise UnknownJob(f"the payload of job {ref.job_id!r} is acknowledged, forgotten, or was replaced")
        return job.payload

    async def lookup(self, job_ids: Sequence[str]) -> dict[str, KnownJob]:
        self._forget_old(trio.current_time())
        known = {}
        for job_id in job_ids:
            if (job := self._jobs.get(job_id)) is not None:
                known[job_id] = KnownJob(
                    session_id=job.session_id,
                    fingerprint=job.fingerprint,
                    state=state_of(job),
                )
            elif (stone := self._tombstones.get(job_id)) is not None:
                known[job_id] = KnownJob(
                    session_id=stone.session_id, fingerprint=stone.fingerprint, state="acknowledged"
                )
        return known

    def statistics(self) -> LedgerStatistics:
        return LedgerStatistics(live_bytes=self._live_bytes, jobs=len(self._jobs), operations=self._operations)

    async def _ask(self, operation: Operation) -> None:
        self._operations += 1
        self._do(operation)

    def _do(self, operation: Operation) -> None:
        match operation:
            case Accept():
                self._accept(operation)
            case Finish():
                self._finish(operation)
            case BeginAttempt(job_id, attempt):
                check_begin(operation, self._jobs.get(job_id)).attempt = attempt
            case Acknowledge():
                self._acknowledge(operation)
            case Forget(session_id, job_ids):
                if (session := self._sessions.get(session_id)) is not None:
                    self._drop(session, session.jobs.intersection(job_ids))
            case OpenSession(session_id, first):
                self._sessions.setdefault(session_id, _Session(first, first))
            case CloseSession(session_id):
                if (session := self._sessions.pop(session_id, None)) is not None:
                    self._drop(session, list(session.jobs))

    def _accept(self, operation: Accept) -> None:
        if not operation.jobs:
            return
        session = self._sessions.get(operation.session_id)
        session = check_accept(operation, session, self._jobs.get, len(self._jobs), self._limits.max_jobs)
        for job in operation.jobs:
            self._jobs[job.job_id] = _Job(operation.session_id, job.fingerprint, job.spec)
            session.jobs.add(job.job_id)
            self._live_bytes += len(job.spec)
            self._tombstones.pop(job.job_id, None)

    def _finish(self, operation: Finish) -> None:
        session_id, job_id, attempt, cursor, outcome = operation
        session = self._sessions.get(session_id)
        is_taken = session is not None and cursor in session.cursors
        session, job = check_finish(operation, session, self._jobs.get(job_id), lambda: is_taken)
        payload = outcome[0] if len(outcome) == 1 and isinstance(outcome[0], bytes) else b"".join(outcome)
        self._live_bytes += len(payload) - len(job.payload)
        job.attempt, job.cursor, job.payload = attempt, cursor, payload
        session.last = max(session.last, cursor)
        session.cursors[cursor] = job_id

    def _acknowledge(self, operation: Acknowledge) -> None:
        session_id, cursor = operation
        session = check_acknowledge(operation, self._sessions.get(session_id))
        if session is None:
            return
        given = range(session.acked + 1, cursor + 1)
        job_ids = [session.cursors[number] for number in given if number in session.cursors]
        session.acked = cursor
        now_s = trio.current_time()
        for job_id in job_ids:
            self._tombstones.pop(job_id, None)
            self._tombstones[job_id] = _Tombstone(session_id, self._jobs[job_id].fingerprint, now_s)
        self._drop(session, job_ids)
        self._forget_old(now_s)

    def _drop(self, session: _Session, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            job = self._jobs.pop(job_id)
            self._live_bytes -= len(job.payload)
            session.jobs.remove(job_id)
            if job.cursor is not None:
                del session.cursors[job.cursor]

    def _forget_old(self, now_s: float) -> None:
        limit_s = now_s - self._limits.tombstone_s
        while self._tombstones and (
            len(self._tombstones) > self._limits.max_tombstones or next(iter(self._tombstones.values())).at_s <= limit_s
        ):
            self._tombstones.popitem(last=False)
