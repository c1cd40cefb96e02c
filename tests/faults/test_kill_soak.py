"""Node, trainer, backend and the daemons of sandboxes are killed with -9 at random points under load: each job has one
outcome at the trainer, none is doubled, none missing, and nothing is left on the machine.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import trio

from prorl_trio.config import SandboxConfig
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.types.errors import ConfigError
from support.skips import because
from support.soak import Leftovers, adopted_orphans, kill_at_random, open_world
from support.soak.backend import TURN_S
from support.soak.trainer import is_retried

pytestmark = pytest.mark.alone

GONE_WITHIN_S = 10
PROGRESS_INTERVAL_S = 30


@pytest.fixture
def folder():
    """Short enough for the paths of Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="soak-") as path, adopted_orphans():
        yield Path(path)


@pytest.fixture
def show(capsys):
    """Print a line to whoever looks at a long run."""

    def show(line):
        with capsys.disabled():
            sys.stderr.write(f"{line}\n")

    return show


async def soak(folder, harm, *, jobs, provider="process", max_warm=2, deadline_s, turn_s=TURN_S):
    """Let `harm(world)` do what it does while they work, and look at what the trainer took, and at what is left."""
    try:
        await choose_provider(SandboxConfig(provider=provider))
    except ConfigError as exc:
        pytest.skip(because(f"{provider} does not work on this machine: {exc}", "prorl-trio doctor"))
    config = {
        "sandbox": {"provider": provider, "max_warm": max_warm},
        "ledger": {"max_attempts": 100},  # no job is to blame for it that its node is killed time and again
    }
    with trio.move_on_after(deadline_s) as deadline:
        async with open_world(folder, jobs=jobs, turn_s=turn_s, **config) as world:
            left = Leftovers(world.temp)
            await harm(world)
            await world.trainer.done.wait()
    assert not deadline.cancelled_caught, "\n".join(
        f"{path.name}: ...{path.read_text(errors='replace')[-2_000:]}" for path in sorted(folder.glob("*.log"))
    )
    entries = world.entries()
    counts = Counter(entry.job_id for entry in entries)
    assert counts == Counter(f"job-{n}" for n in range(jobs))
    assert [entry.cursor for entry in entries] == sorted({entry.cursor for entry in entries})
    check_ends(entries, world.daemons.kills)
    end = time.monotonic() + GONE_WITHIN_S
    while (remains := left.find()) and time.monotonic() < end:
        await trio.sleep(0.05)
    assert remains == set()


def check_ends(entries, daemon_kills):
    """A killed node, trainer or backend costs no job; a killed daemon at most one, which has no reward then."""
    failed = [entry for entry in entries if entry.status != "completed"]
    assert {entry.reward for entry in entries if entry.status == "completed"} <= {1.0}
    assert {(entry.status, entry.cause, entry.reward) for entry in failed} <= {("failed", "sandbox", None)}, failed
    assert not [entry for entry in failed if is_retried(entry.job_id)], "its policy says that it is run again"
    assert len(failed) <= daemon_kills


def random_kills(seed, show=None, **kills):
    """Harm: each of these is killed so often, at random."""

    async def harm(world):
        victims = {name: getattr(world, name) for name in kills}
        async with trio.open_nursery() as nursery:
            if show is not None:
                nursery.start_soon(tell, show, world, victims)
            times = {victims[name]: count for name, count in kills.items()}
            await kill_at_random(times, random.Random(seed), world.progress, world.jobs)
            await world.trainer.done.wait()
            nursery.cancel_scope.cancel()
        assert {name: victim.kills for name, victim in victims.items()} == kills

    return harm


async def tell(show, world, victims):
    began = time.monotonic()
    while True:
        await trio.sleep(PROGRESS_INTERVAL_S)
        killed = ", ".join(f"{name} {victim.kills}" for name, victim in victims.items())
        show(f"{time.monotonic() - began:6.0f} s: {world.progress()} of {world.jobs} jobs; killed: {killed}")


async def test_all_three_killed_at_random(folder):
    await soak(folder, random_kills(1, node=1, trainer=2, backend=1), jobs=30, deadline_s=120)


async def test_a_lost_sandbox_is_no_fault_of_the_policy(folder):
    async def kill_until_it_hurts(world):
        while not [entry for entry in world.entries() if entry.status == "failed" or entry.attempt > 1]:
            assert not world.trainer.done.is_set(), "no kill hit a job"
            world.daemons.kill()
            # Ever more rarely: where a start takes longer than the pause, no job that is run again would ever end.
            await trio.sleep(0.1 * 1.1**world.daemons.kills)

    # In RUN for longer than in INIT, whose sandboxes are opened anew without a trace: a kill soon hits a job at work.
    await soak(folder, kill_until_it_hurts, jobs=6, max_warm=0, deadline_s=120, turn_s=0.5)


@pytest.mark.slow
async def test_all_four_killed_more_often(folder):
    await soak(folder, random_kills(2, node=3, trainer=3, backend=2, daemons=8), jobs=200, deadline_s=600)


@pytest.mark.soak
@pytest.mark.parametrize(("provider", "jobs"), [("process", 5_000), ("apptainer", 200)])
async def test_the_large_run(folder, provider, jobs, show):
    harm = random_kills(3, show, node=10, trainer=10, backend=5, daemons=20)
    await soak(folder, harm, jobs=jobs, provider=provider, deadline_s=3_000)
