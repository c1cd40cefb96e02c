"""Node, trainer and backend are killed with -9 at random points under load: each job has one outcome at the trainer,
none is doubled, none missing, and nothing is left on the machine.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import trio

from prorl_trio.config import SandboxConfig
from prorl_trio.errors import ConfigError
from prorl_trio.sandbox.registry import choose_provider
from prorl_trio.testing.soak import Leftovers, adopted_orphans, kill_at_random, open_world

GONE_WITHIN_S = 10


@pytest.fixture
def folder():
    """Short enough for the paths of Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="soak-") as path, adopted_orphans():
        yield Path(path)


async def soak(folder, *, jobs, provider, seed, node=0, trainer=0, backend=0, deadline_s):
    try:
        await choose_provider(SandboxConfig(provider=provider))
    except ConfigError as exc:
        pytest.skip(f"{provider} does not work on this machine: {exc}")
    with trio.fail_after(deadline_s):
        async with open_world(folder, jobs=jobs, sandbox={"provider": provider, "max_warm": 2}) as world:
            left = Leftovers(world.temp)
            victims = {world.node: node, world.trainer: trainer, world.backend: backend}
            await kill_at_random(victims, random.Random(seed), world.progress, jobs)
            await world.trainer.done.wait()
            assert [victim.kills for victim in victims] == list(victims.values())
    entries = world.entries()
    counts = Counter(entry.job_id for entry in entries)
    assert counts == Counter(f"job-{n}" for n in range(jobs))
    assert [entry.cursor for entry in entries] == sorted({entry.cursor for entry in entries})
    end = time.monotonic() + GONE_WITHIN_S
    while (remains := left.find()) and time.monotonic() < end:
        await trio.sleep(0.05)
    assert remains == set()
    return entries


async def test_all_three_killed_at_random(folder):
    entries = await soak(folder, jobs=30, provider="process", seed=1, node=1, trainer=2, backend=1, deadline_s=120)
    assert {entry.status for entry in entries} == {"completed"}, "what comes back costs no job"


@pytest.mark.slow
async def test_all_three_killed_more_often(folder):
    await soak(folder, jobs=200, provider="process", seed=2, node=3, trainer=3, backend=2, deadline_s=600)


@pytest.mark.soak
@pytest.mark.parametrize(("provider", "jobs"), [("process", 5_000), ("apptainer", 200)])
async def test_the_large_run(folder, provider, jobs):
    await soak(folder, jobs=jobs, provider=provider, seed=3, node=10, trainer=10, backend=5, deadline_s=3_000)
