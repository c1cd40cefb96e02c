"""What the machines of a fleet share goes wrong: its disk hangs, and their clocks are minutes apart."""

from __future__ import annotations

import pytest
import trio

from prorl_trio.rendezvous.watch import FleetWatch
from support.fake_fleet import finish_all, open_fake_fleet, take
from support.fake_node import make_spec
from support.fleet_head import head_quickly, open_client
from support.hanging_disk import hanging_call

pytestmark = pytest.mark.timeout(120)

STALE_AFTER_S = 3.0
JOBS = [make_spec(f"job-{n}") for n in range(8)]
NAMES = [spec.job_id for spec in JOBS]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    head_quickly(monkeypatch)


async def test_a_head_goes_on_and_ends_while_the_fleets_disk_hangs(tmp_path, monkeypatch):
    folder = tmp_path / "f"
    with hanging_call() as hanging:
        async with open_fake_fleet(folder, "a", "b", within_s=30) as fleet, open_client(folder) as (client, _head):
            monkeypatch.setattr(FleetWatch, "read", hanging)
            while not hanging.called.is_set():  # noqa: ASYNC110 - a thread reads the disk
                await trio.sleep(0.01)
            await client.submit(JOBS)
            await fleet.wait_live(a=4, b=4)
            finish_all(fleet)
            assert sorted(outcome.job_id for outcome in await take(client)) == NAMES


@pytest.mark.parametrize("lost", ["slow", "right", "fast"])
async def test_machines_whose_clocks_are_five_minutes_apart_lose_nothing(tmp_path, lost):
    async with open_fake_fleet(tmp_path / "f") as fleet:
        for name, ahead_s in {"slow": -300.0, "right": 0.0, "fast": 300.0}.items():
            (await fleet.add(name, stale_after_s=STALE_AFTER_S)).clock_ahead_s = ahead_s
        async with open_client(tmp_path / "f", heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0) as (client, head):
            await head.wait_members(*fleet.nodes)  # a slow clock looks like one that stands still, at first
            await client.submit(JOBS)
            while sum(map(len, fleet.where().values())) < len(JOBS):
                await trio.sleep(0.02)
            moved = fleet.where()[lost]
            assert moved
            await fleet[lost].cut()  # nothing but its heartbeat tells
            others = [name for name in fleet.nodes if name != lost]
            while set(moved) - {job_id for name in others for job_id in fleet[name].node.live}:
                await trio.sleep(0.02)
            finish_all(fleet, *others)
            assert sorted(outcome.job_id for outcome in await take(client)) == NAMES
