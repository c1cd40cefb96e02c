"""What the machines of a fleet share goes wrong: its disk is full, and their clocks are minutes apart."""

from __future__ import annotations

import os

import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.client.fleet import client as fleet_client
from prorl_trio.client.fleet import roster
from prorl_trio.client.fleet.moves import MoveLog
from prorl_trio.rendezvous.watch import FleetWatch
from support.fake_fleet import open_fake_fleet
from support.fake_node import make_spec
from support.hanging_disk import hanging_call
from support.small_disk import fill, small_disk

pytestmark = pytest.mark.timeout(120)

DISK_BYTES = 1024 * 1024
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STALE_AFTER_S = 3.0
JOBS = [make_spec(f"job-{n}") for n in range(8)]
NAMES = [spec.job_id for spec in JOBS]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(roster, "WATCH_INTERVAL_S", 0.05)
    monkeypatch.setattr(roster, "RETRY_S", 0.05)
    monkeypatch.setattr(fleet_client, "WRITE_RETRY_S", 0.05)


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "d"
    with small_disk(path, DISK_BYTES):
        yield path


def finish_all(node):
    for job_id in list(node.live):
        node.finish(job_id)


def fill_last_page(log):
    """Leave no room in the block of the disk that the log's end is in, either."""
    with log.open("ab") as file:
        file.write(b"\n" * (PAGE_BYTES - log.stat().st_size % PAGE_BYTES))


async def take(client, count=None):
    return sorted([outcome.job_id async for outcome in client.results(count)])


async def wait_said(caplog, *words):
    while not all(word in caplog.text for word in words):
        await trio.sleep(0.02)


@pytest.mark.alone
async def test_jobs_that_have_to_be_moved_wait_for_room_on_the_shared_disk(disk, caplog):
    async with open_fake_fleet(disk / "f", "b") as fleet, connect(fleet=disk / "f") as client:
        await fleet.add("a", stale_after_s=STALE_AFTER_S)
        while (await client.status())["fleet"]["nodes"].get("a", {}).get("behind", "not there"):
            await trio.sleep(0.02)
        await client.submit(JOBS)
        lost, kept = fleet.where()["a"], fleet.where()["b"]
        assert lost
        fill(disk / "ballast")
        await fleet["a"].cut()  # an entry that were removed would make room
        await wait_said(caplog, "moved jobs wait", "No space left on device", "make room on the fleet's disk")
        assert fleet.where()["b"] == kept, "a job ran on a node of which no line says so"
        finish_all(fleet["b"].node)
        assert await take(client, len(kept)) == kept, "others are held up"
        (disk / "ballast").unlink()
        await fleet.wait_live(b=len(lost))
        finish_all(fleet["b"].node)
        assert await take(client) == lost


@pytest.mark.alone
async def test_a_moved_job_is_acknowledged_when_its_delivery_is_on_the_shared_disk(disk):
    async with open_fake_fleet(disk / "f", "a", "b") as fleet:
        async with connect(fleet=disk / "f", session_id="s") as client:
            await client.submit(JOBS)
            assert fleet.where()["a"]
            await fleet["a"].leave()
            await fleet.wait_live(b=len(JOBS))
            fill_last_page(*(disk / "f" / "moves").iterdir())
            fill(disk / "ballast")
            finish_all(fleet["b"].node)
            assert await take(client, len(JOBS)) == NAMES
            client.acknowledge(client.cursor)
            with trio.move_on_after(0.5) as waited:
                await client.wait_written()
            assert waited.cancelled_caught
            (disk / "ballast").unlink()
            await client.wait_written()
        async with connect(fleet=disk / "f", session_id="s") as client:
            assert await take(client) == []


async def test_a_client_goes_on_and_ends_while_the_fleets_disk_hangs(tmp_path, monkeypatch):
    folder = tmp_path / "f"
    with hanging_call() as hanging:
        async with open_fake_fleet(folder, "a", "b", within_s=30) as fleet, connect(fleet=folder) as client:
            monkeypatch.setattr(FleetWatch, "read", hanging)
            while not hanging.called.is_set():  # noqa: ASYNC110 - a thread reads the disk
                await trio.sleep(0.01)
            await client.submit(JOBS)
            for node in fleet.nodes.values():
                finish_all(node.node)
            assert await take(client) == NAMES


async def test_a_client_whose_log_of_moves_hangs_can_be_left(tmp_path, monkeypatch):
    folder = tmp_path / "f"
    with hanging_call() as hanging:
        async with open_fake_fleet(folder, "a", "b", within_s=30) as fleet:
            async with connect(fleet=folder) as client:
                await client.submit(JOBS)
                kept = fleet.where()["b"]
                monkeypatch.setattr(MoveLog, "append", hanging)
                await fleet["a"].kill()
                while not hanging.called.is_set():  # noqa: ASYNC110 - a thread writes to the disk
                    await trio.sleep(0.01)
            assert fleet.where()["b"] == kept, "a job ran on a node of which no line says so"


@pytest.mark.parametrize("lost", ["slow", "right", "fast"])
async def test_machines_whose_clocks_are_five_minutes_apart_lose_nothing(tmp_path, lost):
    async with open_fake_fleet(tmp_path / "f") as fleet:
        for name, ahead_s in {"slow": -300.0, "right": 0.0, "fast": 300.0}.items():
            (await fleet.add(name, stale_after_s=STALE_AFTER_S)).clock_ahead_s = ahead_s
        async with connect(fleet=tmp_path / "f") as client:
            while set((await client.status())["nodes"]) != set(fleet.nodes):
                await trio.sleep(0.02)
            await client.submit(JOBS)
            moved = fleet.where()[lost]
            assert moved
            await fleet[lost].cut()  # nothing but its heartbeat tells
            others = [fleet[name].node for name in fleet.nodes if name != lost]
            while set(moved) - {job_id for node in others for job_id in node.live}:
                await trio.sleep(0.02)
            for node in others:
                finish_all(node)
            assert await take(client) == NAMES
