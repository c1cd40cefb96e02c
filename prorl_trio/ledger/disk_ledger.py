"""A ledger on disk: calls are collected, and a thread commits them in groups."""

from __future__ import annotations

import sqlite3
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.ledger.database import Job
from prorl_trio.ledger.disk import REMEDY, Disk
from prorl_trio.ledger.ledger import (
    KnownJob,
    Ledger,
    LedgerFailed,
    LedgerLimits,
    LedgerStatistics,
    Recovered,
    RecoveredSession,
    Ref,
    UndeliveredOutcome,
    UnfinishedJob,
)
from prorl_trio.ledger.operations import LAZY, Call, Finish
from prorl_trio.ledger.rules import state_of
from prorl_trio.ledger.store import Store, WaitForRoom
from prorl_trio.supervision import service_task
from prorl_trio.threads import run_sync
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

CLOSE_TIMEOUT_S: Final = 60.0


class DiskLedger(Ledger):
    """Jobs and outcomes that outlive the process. `open_ledger` creates it.

    A call is stored together with concurrent calls. If the disk is full, calls that need not survive a loss of power
    still return, and are stored once there is room. Waiting operations never outnumber the tasks that wait for them.

    When the disk is full or `max_bytes` is reached, outcomes use the space of the reserve. When the reserve is full as
    well, `finish` waits, and all later outcomes of the session wait behind it. Memory is therefore bounded by the
    outcomes of running jobs, because no new job is accepted during that time.
    """

    def __init__(self, store: Store, recovered: Recovered, limits: LedgerLimits, writing: trio.CapacityLimiter) -> None:
        self._store = store
        self._limits = limits
        self._writing = writing
        self._reading = trio.CapacityLimiter(limits.max_reads)
        self._calls: deque[Call] = deque()
        self._waiting: deque[Call] = deque()
        """Calls that wait for room, in order."""
        self._arrived = trio.Event()
        self._closed = False
        self.recovered = recovered

    def __repr__(self) -> str:
        statistics = self.statistics()
        return f"<DiskLedger {statistics.jobs} jobs, {statistics.disk_bytes} bytes, {statistics.full or 'open'}>"

    def post(self, call: Call) -> None:
        if self._closed:
            call.answer(LedgerFailed("the ledger is closed"))
        else:
            self._calls.append(call)
            self._arrived.set()

    async def read(self, ref: Ref) -> bytes:
        return await run_sync(self._store.read, ref.job_id, ref.cursor, limiter=self._reading)

    async def lookup(self, job_ids: Sequence[str]) -> dict[str, KnownJob]:
        found = await run_sync(self._store.lookup, job_ids, limiter=self._reading)
        known = {}
        for job_id, job in found.items():
            if isinstance(job, Job):
                known[job_id] = KnownJob(session_id=job.session_id, fingerprint=job.fingerprint, state=state_of(job))
            else:
                known[job_id] = KnownJob(session_id=job[0], fingerprint=job[1], state="acknowledged")
        return known

    def statistics(self) -> LedgerStatistics:
        return msgspec.structs.replace(self._store.statistics(), waiting=len(self._waiting))

    # ------------------------------------------------------------ groups

    async def _commit_groups(self) -> None:
        """Commit groups one after the other until cancelled.

        Calls that were already passed to the thread are still answered.
        """
        retry_at = trio.current_time()
        while True:
            if not self._calls and not self._store.cleaning_due:
                await self._wait_for_work(retry_at)
            group = self._take_group(retry=trio.current_time() >= retry_at)
            freed = self._store.freed
            try:
                operations = [call.operation for call in group]
                answers = await run_sync(self._store.commit, operations, limiter=self._writing)
            except BaseException:
                # No call was answered: `_close` reports that the ledger is gone, even if the group reached the disk.
                self._calls.extendleft(reversed(group))
                raise
            no_room = []
            for call, answer in zip(group, answers, strict=True):
                if not isinstance(answer, WaitForRoom):
                    call.answer(answer)
                    continue
                no_room.append(call)
                if isinstance(call.operation, LAZY):
                    call.answer(None)  # it is compensated; a start before that finds more than remains
            self._waiting.extendleft(reversed(no_room))
            if self._store.freed > freed:
                retry_at = trio.current_time()
            elif no_room or self._store.disk_is_full:
                retry_at = trio.current_time() + self._limits.retry_interval_s

    async def _wait_for_work(self, retry_at: float) -> None:
        self._arrived = trio.Event()
        if self._waiting or self._store.disk_is_full:  # also without waiting calls: `full` keeps trainers away
            with trio.move_on_at(retry_at):  # the disk sends no signal when it has room again
                await self._arrived.wait()
        else:
            await self._arrived.wait()

    def _take_group(self, *, retry: bool) -> list[Call]:
        """Take the next calls in order, within the limits of a group.

        An outcome never overtakes an outcome of the same session that waits for room.
        """
        group: list[Call] = []
        size_bytes = 0
        sources = (self._waiting, self._calls) if retry else (self._calls,)
        for source in sources:
            held_back = {call.operation.session_id for call in self._waiting if isinstance(call.operation, Finish)}
            while source and len(group) < self._limits.max_group_operations:
                call = source[0]
                if call.abandoned and not isinstance(call.operation, LAZY):
                    source.popleft()  # its caller was cancelled before the operation began, so it is dropped
                elif (
                    source is self._calls
                    and isinstance(call.operation, Finish)
                    and call.operation.session_id in held_back
                ):
                    self._waiting.append(source.popleft())
                elif group and size_bytes + call.size_bytes > self._limits.max_group_bytes:
                    return group
                else:
                    group.append(source.popleft())
                    size_bytes += call.size_bytes
        return group

    def _close(self) -> None:
        self._closed = True
        left = (*self._calls, *self._waiting)
        self._calls.clear()
        self._waiting.clear()
        for call in left:
            call.answer(LedgerFailed("the ledger was closed"))


@asynccontextmanager
async def open_ledger(
    folder: Path, limits: LedgerLimits | None = None, *, disk: Disk | None = None
) -> AsyncIterator[DiskLedger]:
    """Open the ledger in `folder`, which is created if missing and belongs to this process alone.

    `recovered` has the contents that a former process left. On exit, waiting calls raise `LedgerFailed`, and everything
    is made durable within `CLOSE_TIMEOUT_S`, shielded from cancellation. `disk` is for fault injection.

    Raises:
        ConfigError: another process (which is named) has locked the folder, it cannot be used, is on a network file
            system or has an older format, or its disk failed or is full.
    """
    limits = limits or LedgerLimits()
    writing = trio.CapacityLimiter(1)
    store, recovered = await run_sync(_open, folder, limits, disk or Disk(), limiter=writing)
    ledger = DiskLedger(store, recovered, limits, writing)
    try:
        async with open_single_nursery() as nursery:
            nursery.start_soon(service_task(ledger._commit_groups, f"ledger {folder}"))
            yield ledger
            nursery.cancel_scope.cancel(reason="the ledger is closed")
    finally:
        ledger._close()
        with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await run_sync(store.close, limiter=writing)


def _open(folder: Path, limits: LedgerLimits, disk: Disk) -> tuple[Store, Recovered]:
    try:
        store = Store(folder, limits, disk)
    except (OSError, sqlite3.Error) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"the ledger in {folder} cannot be opened: {why}; {REMEDY}") from exc
    jobs = store.jobs()
    return store, Recovered(
        sessions=[
            RecoveredSession(session_id=session.session_id, acked=session.acked, last=session.last)
            for session in store.sessions()
        ],
        unfinished=[
            UnfinishedJob(
                session_id=job.session_id,
                job_id=job.job_id,
                fingerprint=job.fingerprint,
                last_attempt=job.attempt,
                spec=Ref(job.job_id, None, job.length),
            )
            for job in jobs
            if job.cursor is None
        ],
        undelivered=[_undelivered(job, job.cursor) for job in jobs if job.cursor is not None],
        damage=store.damage,
    )


def _undelivered(job: Job, cursor: int) -> UndeliveredOutcome:
    return UndeliveredOutcome(
        session_id=job.session_id,
        job_id=job.job_id,
        fingerprint=job.fingerprint,
        attempt=job.attempt,
        cursor=cursor,
        outcome=Ref(job.job_id, cursor, job.length),
    )
