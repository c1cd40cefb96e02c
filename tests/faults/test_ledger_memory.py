"""What was acknowledged is remembered: over a kill at any step, over restarts, and whatever happens to a clock."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest
import trio

from prorl_trio.ledger import LedgerLimits, NewJob, open_ledger, store
from support.faulty_disk import FaultyDisk
from support.power_loss import Wreck

KIB = 1024
LIMITS = LedgerLimits(log_bytes=256 * KIB, reserve_bytes=16 * KIB, max_bytes=64 * KIB * KIB, max_reads=1)
JOBS = 5_238
AT_ONCE = 291
QUICK_CUTS, SLOW_CUTS = 12, 150
HOUR_S = 3600.0


def batches():
    names = [f"job-{n}" for n in range(JOBS)]
    return [names[start : start + AT_ONCE] for start in range(0, JOBS, AT_ONCE)]


async def deliver(ledger, names, first):
    await ledger.accept("s", [NewJob(job_id=name, fingerprint=name.encode(), spec=b"spec") for name in names])
    async with trio.open_nursery() as nursery:
        for cursor, name in enumerate(names, first):
            nursery.start_soon(ledger.finish, "s", name, 1, cursor, [b"outcome of " + name.encode()])
    await ledger.acknowledge("s", first + len(names) - 1)


async def remembered(ledger, names):
    known = await ledger.lookup(names)
    assert all(found.fingerprint == name.encode() for name, found in known.items())
    return {name for name, found in known.items() if found.state == "acknowledged"}


async def kill(root, cuts):
    """At each of the `cuts` while jobs are accepted, finished and acknowledged: whoever was acknowledged is known."""
    wreck, chance = Wreck(root / "ledger"), random.Random(5)
    disk, steps, acknowledged = FaultyDisk(), [], []
    disk.before = lambda step: steps.append((step, len(acknowledged)))
    with trio.fail_after(120):
        async with open_ledger(root / "ledger", LIMITS, disk=disk) as ledger:
            await ledger.open_session("s", 0)
            for names in batches():
                await deliver(ledger, names, len(acknowledged) + 1)
                acknowledged += names
    chosen = set(chance.sample(range(len(steps)), cuts))
    for number, (step, known) in enumerate(steps):
        if number in chosen:
            folder = root / f"killed-{number}"
            wreck.leave(folder, None, kept=1)
            async with open_ledger(folder, LIMITS) as ledger:
                found = await remembered(ledger, acknowledged)
                assert found >= set(acknowledged[:known])
                assert ledger.recovered.damage == []
            for path in folder.iterdir():
                path.unlink()
        wreck.take(step)


async def test_killed_at_any_step_no_acknowledged_job_is_forgotten(memory_path):
    await kill(memory_path, QUICK_CUTS)


@pytest.mark.slow
async def test_killed_at_many_more_steps_no_acknowledged_job_is_forgotten(memory_path):
    await kill(memory_path, SLOW_CUTS)


@pytest.mark.parametrize("jump_s", [2 * HOUR_S, -2 * HOUR_S, 300 * 24 * HOUR_S])
async def test_a_wall_clock_that_is_set_over_a_restart_changes_nothing(memory_path, monkeypatch, jump_s):
    real, names = time.time, batches()[0]
    with trio.fail_after(30):
        async with open_ledger(memory_path, LIMITS) as ledger:
            await ledger.open_session("s", 0)
            await deliver(ledger, names, 1)
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        monkeypatch.setattr(time, "time_ns", lambda: int((real() + jump_s) * 1e9))
        for _ in range(2):
            async with open_ledger(memory_path, LIMITS) as ledger:
                assert await remembered(ledger, names) == set(names)
                await ledger.open_session("s", 0)


class Clock:
    """The ledger's, instead of the time since the machine started."""

    def __init__(self, monkeypatch):
        self.now_s = 5_000.0
        self.monotonic = lambda: self.now_s
        monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=self.monotonic, perf_counter=time.perf_counter))


async def test_jobs_are_remembered_for_as_long_as_the_ledger_was_open(memory_path, monkeypatch):
    clock = Clock(monkeypatch)
    limits = LedgerLimits(
        log_bytes=256 * KIB, reserve_bytes=16 * KIB, max_bytes=64 * KIB * KIB, tombstone_s=HOUR_S, retry_interval_s=1.0
    )
    with trio.fail_after(30):
        async with open_ledger(memory_path, limits) as ledger:
            await ledger.open_session("s", 0)
            await deliver(ledger, ["old"], 1)
            clock.now_s += 0.7 * HOUR_S
            await deliver(ledger, ["new"], 2)
        clock.now_s = 10.0  # the machine was off for long, and has started again
        async with open_ledger(memory_path, limits) as ledger:
            assert await remembered(ledger, ["old", "new"]) == {"old", "new"}
            clock.now_s += 0.4 * HOUR_S
            assert await remembered(ledger, ["old", "new"]) == {"new"}
            await deliver(ledger, ["third"], 3)
            clock.now_s += 0.7 * HOUR_S
            assert await remembered(ledger, ["old", "new", "third"]) == {"third"}
