"""A whole node under load, as a process: jobs cancelled at random moments, and a trainer that stops reading."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.sessions.feed import READ_AHEAD_BYTES
from support.soak import Leftovers, adopted_orphans, open_world
from support.soak.trainer import SESSION_ID, soak_spec

pytestmark = [pytest.mark.alone, pytest.mark.timeout(1500)]

MIB = 1024 * 1024
SETTLED_WITHIN_S = 10
LATENCY_JOBS = 5
OUTCOME_BYTES = MIB
HOT_BYTES = 8 * MIB
SLACK_BYTES = 48 * MIB
"""What else a node that works takes."""


@pytest.fixture
def folder():
    """Short enough for the paths of Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="load-") as path, adopted_orphans():
        yield Path(path)


@asynccontextmanager
async def open_client(world, **options):
    async with connect(world.url, world.token, connect_timeout_s=60, **options) as client:
        yield client


async def wait_gone(find):
    """What is left when it had its time to go."""
    end = trio.current_time() + SETTLED_WITHIN_S
    while (remains := find()) and trio.current_time() < end:
        await trio.sleep(0.05)
    return remains


def open_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


# ---------------------------------------------------------------- cancel


@pytest.mark.parametrize(
    ("jobs", "patience_s"), [(60, 5.0), pytest.param(500, 1.0, marks=pytest.mark.soak)], ids=["quick", "whole"]
)
async def test_jobs_cancelled_at_random_moments_return_soon_and_leave_nothing(folder, jobs, patience_s):
    rng = random.Random(3)
    took_s = {}
    with trio.fail_after(30 + jobs):
        async with open_world(folder, jobs=0, sandbox={"provider": "process", "max_warm": 0}) as world:
            left = Leftovers(world.temp)
            async with open_client(world) as client:
                before = open_files(world.node.pid)
                ids = [f"c-{n}" for n in range(jobs)]

                async def cancel(job_id):
                    await trio.sleep(rng.uniform(0, jobs / 50))
                    started = trio.current_time()
                    answer = await client.cancel([job_id])
                    took_s[job_id] = trio.current_time() - started
                    assert answer.unknown == []

                await client.submit([soak_spec(job_id) for job_id in ids])
                async with trio.open_nursery() as nursery:
                    for job_id in ids:
                        nursery.start_soon(cancel, job_id)
                outcomes = {outcome.job_id: outcome async for outcome in client.results(jobs)}
                status = await client.status()
                assert status["pipeline"]["jobs"] == 0
                assert status["sandboxes"]["live"] == 0
                assert await wait_gone(lambda: open_files(world.node.pid) > before + 2) is False
        assert await wait_gone(left.find) == set()
    assert outcomes.keys() == set(ids)
    statuses = [outcome.status for outcome in outcomes.values()]
    assert set(statuses) <= {"cancelled", "completed"}, "completed: it had ended before its cancel came"
    assert statuses.count("cancelled") > jobs / 4
    slowest = sorted(took_s, key=took_s.__getitem__)[-5:]
    assert took_s[slowest[-1]] < patience_s, [(took_s[name], outcomes[name].timing) for name in slowest]


# ---------------------------------------------------------------- a trainer that stops reading


def resident_bytes(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def latencies(client, prefix):
    """Seconds of some jobs from submit to outcome, one after the other."""
    times = []
    for n in range(LATENCY_JOBS):
        started = time.monotonic()
        await client.submit([soak_spec(f"{prefix}-{n}")])
        assert len([outcome async for outcome in client.results(1)]) == 1
        times.append(time.monotonic() - started)
    return sorted(times)


@pytest.mark.parametrize(
    ("jobs", "silence_s"), [(25, 2.0), pytest.param(400, 60.0, marks=pytest.mark.soak)], ids=["quick", "whole"]
)
async def test_a_trainer_that_stops_reading_stalls_itself_alone(folder, jobs, silence_s):
    with trio.fail_after(120 + jobs + silence_s):
        config = {
            "sandbox": {"provider": "process", "max_warm": 0},
            "stages": {"init_workers": 2, "run_workers": 4},
            "ledger": {"hot_outcome_bytes": HOT_BYTES},
        }
        async with (
            open_world(folder, jobs=jobs, details_bytes=OUTCOME_BYTES, **config) as world,
            open_client(world) as other,
        ):
            while world.progress() < 2:  # noqa: ASYNC110 - another process makes it
                await trio.sleep(0.02)
            beside_a_reader = await latencies(other, "with")
            taken, resident = world.progress(), resident_bytes(world.node.pid)
            world.trainer.send_signal(signal.SIGSTOP)
            stopped = trio.current_time()
            beside_a_stopped_one = await latencies(other, "without")
            await trio.sleep_until(stopped + silence_s)
            status = await other.status()
            undelivered = status["sessions"][SESSION_ID]["undelivered"]
            assert status["sessions"][SESSION_ID]["undelivered_bytes"] >= undelivered * OUTCOME_BYTES
            assert status["outcome_cache"]["bytes"] <= HOT_BYTES
            assert world.progress() <= taken + 1
            assert (
                resident_bytes(world.node.pid) - resident < HOT_BYTES + READ_AHEAD_BYTES + OUTCOME_BYTES + SLACK_BYTES
            )
            world.trainer.send_signal(signal.SIGCONT)
            await world.trainer.done.wait()
    assert sorted(entry.job_id for entry in world.entries()) == sorted(f"job-{n}" for n in range(jobs))
    middle = LATENCY_JOBS // 2
    assert beside_a_stopped_one[middle] < 2 * beside_a_reader[middle] + 0.5
