"""The real process of a fleet's head is killed with -9 again and again: each job has one outcome at the trainer."""

from __future__ import annotations

import random
import signal
from collections import Counter

import pytest
import trio

from prorl_ipc.session import Accepted
from prorl_trio.client import ConnectionLost, connect
from prorl_trio.rendezvous.head import read_head
from prorl_trio.types.errors import ConfigError
from support.fake_fleet import finish_all, open_fake_fleet
from support.fake_node import make_spec
from support.fleet_head import head_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KILLS = 6
JOBS = 60


async def test_a_head_that_is_killed_again_and_again_loses_and_doubles_nothing(tmp_path):
    folder, ledger, log = tmp_path / "f", tmp_path / "ledger", tmp_path / "head.log"
    rng = random.Random(7)
    seen: Counter[str] = Counter()
    async with open_fake_fleet(folder, "a", "b", within_s=500) as fleet, trio.open_nursery() as nursery:
        nursery.start_soon(keep_finishing, fleet, rng)
        for number in range(KILLS):
            async with head_process(folder, ledger, log):
                assert read_head(folder).url.startswith("ws://")
                if not number:
                    nursery.start_soon(train, folder, seen)
                await wait_for(seen, JOBS * (number + 1) // (KILLS + 1))
        async with head_process(folder, ledger, log) as process:
            await wait_for(seen, JOBS)
            process.send_signal(signal.SIGTERM)
            code = await process.wait()
            assert code == 0, log.read_text()[-3000:]
        nursery.cancel_scope.cancel()
    assert seen == Counter(f"job-{number}" for number in range(JOBS))


async def keep_finishing(fleet, rng):
    while True:
        await trio.sleep(0.05 * rng.random())
        finish_all(fleet, rng.choice("ab"))


async def wait_for(seen, count):
    while len(seen) < count:  # noqa: ASYNC110 - another task counts
        await trio.sleep(0.01)


async def train(folder, seen):
    """Submit and take, over connections that are lost again and again."""
    while True:
        try:
            async with connect(fleet=folder, session_id="s", reconnect_timeout_s=300.0) as client:
                await trade(client, seen)
        except (ConnectionLost, ConfigError, ValueError):
            await trio.sleep(0.1)  # no head has been there yet
        else:
            return


async def trade(client, seen):
    async def submit():
        for number in range(JOBS):
            (answer,) = await client.submit([make_spec(f"job-{number}")])
            assert isinstance(answer, Accepted)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(submit)
        async for outcome in client.results(JOBS, follow=True):
            assert outcome.status == "completed"
            seen[outcome.job_id] += 1
