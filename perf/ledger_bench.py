"""The ledger: accepted jobs, and outcomes of 300 KB from 32 tasks at a time.

The bare disk and a bare SQLite table are measured for comparison.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
import trio

from perf.harness import Case, Options, Report, Series, caption_of, run_benchmark
from prorl_ipc.nursery import open_single_nursery
from prorl_trio.ledger import Ledger, NewJob, open_ledger

OUTCOME_BYTES: Final = 300_000
SPEC_BYTES: Final = 2_000
TASKS: Final = 32
ACCEPTS: Final = 10
"""Calls per task and round, with one job each."""
MB: Final = 1e6


async def measure_ledger(options: Options) -> Report:
    """Run rounds of each alternately, on the disk of the temporary folder. Return the medians of their rates."""
    rounds, per_task = (5, 4) if options.quick else (20, 8)
    outcome = secrets.token_bytes(OUTCOME_BYTES)
    rates: dict[str, list[float]] = {"ledger": [], "floor": [], "sqlite": [], "accepts": []}
    accepts_s: list[float] = []
    with tempfile.TemporaryDirectory(prefix="prorl-perf-ledger-") as name:
        folder = Path(name)
        async with open_ledger(folder / "ledger") as ledger:
            await ledger.open_session("perf", 0)
            for number in range(rounds):
                rates["accepts"].append(await _accept(ledger, number, accepts_s))
                rates["ledger"].append(await _finish(ledger, number, per_task, outcome))
                for peer, write in (("floor", _write_bare), ("sqlite", _write_sqlite)):
                    size_mb = TASKS * per_task * OUTCOME_BYTES / MB
                    taken_s = await trio.to_thread.run_sync(write, folder, TASKS * per_task, outcome)
                    rates[peer].append(size_mb / taken_s)
            statistics = ledger.statistics()
    median = {name: float(np.median(values)) for name, values in rates.items()}
    caption = caption_of("ledger", tasks=TASKS, outcome_bytes=OUTCOME_BYTES, spec_bytes=SPEC_BYTES)
    return Report(
        title="ledger",
        series=[Series(case=Case(name="ledger.accept"), samples=[taken_s * 1e3 for taken_s in accepts_s])],
        more_metrics={
            "ledger.mb_s": median["ledger"],
            "ledger.floor_mb_s": median["floor"],
            "ledger.sqlite_mb_s": median["sqlite"],
            "ledger.of_floor": median["ledger"] / median["floor"],
            "ledger.over_sqlite": median["ledger"] / median["sqlite"],
            "ledger.accepts_per_s": median["accepts"],
            "ledger.fsync_p50_ms": statistics.fsync_p50_s * 1e3,
            "ledger.fsync_p99_ms": statistics.fsync_p99_s * 1e3,
        },
        notes=caption,
    )


async def _accept(ledger: Ledger, number: int, accepts_s: list[float]) -> float:
    """Return accepted jobs per second, then drop the jobs."""
    spec = bytes(SPEC_BYTES)
    job_ids = [[f"a{number}-{task}-{call}" for call in range(ACCEPTS)] for task in range(TASKS)]

    async def accept(mine: list[str]) -> None:
        for job_id in mine:
            started = time.perf_counter()
            await ledger.accept("perf", [NewJob(job_id=job_id, fingerprint=b"perf", spec=spec)])
            accepts_s.append(time.perf_counter() - started)

    started = time.perf_counter()
    async with open_single_nursery() as nursery:
        for mine in job_ids:
            nursery.start_soon(accept, mine)
    taken_s = time.perf_counter() - started
    await ledger.forget("perf", [job_id for mine in job_ids for job_id in mine])
    return TASKS * ACCEPTS / taken_s


async def _finish(ledger: Ledger, number: int, per_task: int, outcome: bytes) -> float:
    """Return MB per second, then acknowledge everything."""
    jobs = TASKS * per_task
    job_ids = [f"f{number}-{index}" for index in range(jobs)]
    await ledger.accept("perf", [NewJob(job_id=job_id, fingerprint=b"perf", spec=b"") for job_id in job_ids])
    first_cursor = number * jobs + 1

    async def finish(task: int) -> None:
        for index in range(task, jobs, TASKS):
            await ledger.finish("perf", job_ids[index], 1, first_cursor + index, [outcome])

    started = time.perf_counter()
    async with open_single_nursery() as nursery:
        for task in range(TASKS):
            nursery.start_soon(finish, task)
    taken_s = time.perf_counter() - started
    await ledger.acknowledge("perf", first_cursor + jobs - 1)
    return jobs * OUTCOME_BYTES / MB / taken_s


def _write_bare(folder: Path, outcomes: int, outcome: bytes) -> float:
    path = folder / "floor"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, outcomes * len(outcome))
        os.fsync(fd)
        started = time.perf_counter()
        offset = 0
        for _ in range(outcomes // TASKS):
            offset += os.pwritev(fd, [outcome] * TASKS, offset)
            os.fdatasync(fd)
        return time.perf_counter() - started
    finally:
        os.close(fd)
        path.unlink()


def _write_sqlite(folder: Path, outcomes: int, outcome: bytes) -> float:
    path = folder / "sqlite.db"
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("CREATE TABLE outcomes (cursor INTEGER PRIMARY KEY, outcome BLOB)")
        started = time.perf_counter()
        for _ in range(outcomes // TASKS):
            db.execute("BEGIN")
            db.executemany("INSERT INTO outcomes (outcome) VALUES (?)", [(outcome,)] * TASKS)
            db.execute("COMMIT")
        return time.perf_counter() - started
    finally:
        db.close()
        for file in folder.glob("sqlite.db*"):
            file.unlink()


if __name__ == "__main__":
    sys.exit(run_benchmark(measure_ledger))
