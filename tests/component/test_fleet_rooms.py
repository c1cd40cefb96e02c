"""A fleet's client asks who has room once for many submissions, and places them as if it had asked for each."""

from __future__ import annotations

import pytest
import trio

from ipc.session import Accepted
from prorl_trio.client import connect
from prorl_trio.client.fleet import rooms, roster
from support.fake_fleet import open_fake_fleet
from support.fake_node import make_spec

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setattr(roster, "WATCH_INTERVAL_S", 0.05)
    monkeypatch.setattr(rooms, "FRESH_S", 3600.0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "f"


@pytest.fixture
def asked(monkeypatch):
    """The nodes that were asked for their room, in order."""
    calls = []

    def watch(fleet):
        for name, member in fleet.nodes.items():
            real = member.node.room

            def room(session_id, ahead, name=name, real=real):
                calls.append(name)
                return real(session_id, ahead)

            monkeypatch.setattr(member.node, "room", room)
        return calls

    return watch


async def take(client, count):
    return sorted([outcome.job_id async for outcome in client.results(count)])


async def test_nodes_are_asked_once_and_jobs_go_where_room_is_left_or_was_made(folder, asked):
    async with open_fake_fleet(folder, "a", "b") as fleet, connect(fleet=folder) as client:
        calls = asked(fleet)
        for number in range(16):
            await client.submit([make_spec(f"job-{number}")])
        assert {name: len(jobs) for name, jobs in fleet.where().items()} == {"a": 8, "b": 8}
        for number in range(16, 24):  # all places are taken: an outcome makes room for the next
            (ended, *_) = fleet.where()["b"]
            fleet["b"].node.finish(ended)
            assert await take(client, 1) == [ended]
            await client.submit([make_spec(f"job-{number}")])
            assert f"job-{number}" in fleet.where()["b"]
        assert sorted(calls) == ["a", "b"]


async def test_a_node_that_refuses_is_asked_again(folder, asked):
    async with open_fake_fleet(folder, "a", "b") as fleet, connect(fleet=folder) as client:
        await client.submit([make_spec("first")])
        calls = asked(fleet)
        fleet["b"].node.max_live = 0  # it is the emptier one, as far as was said
        (answer,) = await client.submit([make_spec("second")])
        assert isinstance(answer, Accepted)
        assert fleet.where()["a"] == ["first", "second"]
        assert "b" in calls


async def test_jobs_for_which_no_room_is_known_have_all_nodes_asked_again(folder):
    async with open_fake_fleet(folder, "a") as fleet, connect(fleet=folder) as client:
        fleet["a"].node.max_live = 2
        await client.submit([make_spec("first"), make_spec("second")])
        fleet["a"].node.max_live = 3
        (answer,) = await client.submit([make_spec("third")], patience_s=0)
        assert isinstance(answer, Accepted)


async def test_a_node_that_joins_is_asked(folder, asked):
    async with open_fake_fleet(folder, "a") as fleet, connect(fleet=folder) as client:
        await client.submit([make_spec("first")])
        await fleet.add("b")
        while (await client.status())["fleet"]["nodes"].get("b", {}).get("behind", "not there"):
            await trio.sleep(0.01)
        calls = asked(fleet)
        await client.submit([make_spec("second")])
        assert fleet.where() == {"a": ["first"], "b": ["second"]}
        assert sorted(calls) == ["a", "b"]


async def test_what_was_said_is_old_after_a_while(folder, asked, monkeypatch):
    monkeypatch.setattr(rooms, "FRESH_S", 0.0)
    async with open_fake_fleet(folder, "a") as fleet, connect(fleet=folder) as client:
        calls = asked(fleet)
        await client.submit([make_spec("first")])
        await client.submit([make_spec("second")])
        assert calls == ["a", "a"]
