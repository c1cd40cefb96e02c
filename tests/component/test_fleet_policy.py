"""A fleet has one order of policy updates: on all nodes or none; who has an older one gets no jobs."""

from __future__ import annotations

import re

import pytest
import trio

from prorl_trio.client import PolicyUpdateFailed
from prorl_trio.fleet import pools as policy
from prorl_trio.types.backends import ResumeBackends
from prorl_trio.types.errors import BackendError
from support.fake_fleet import open_fake_fleet, until, update
from support.fake_node import make_spec
from support.fleet_head import head_quickly, open_client

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    head_quickly(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "f"


def specs_of(count):
    return [make_spec(f"job-{n}") for n in range(count)]


def versions(fleet):
    """The policy version of each node's own backends."""
    return {
        node_id: {each.policy_version for each in member.node.backends.list()}
        for node_id, member in fleet.nodes.items()
    }


async def behind(client):
    nodes = (await client.status())["members"]
    return {node_id: shown["behind"] for node_id, shown in nodes.items()}


@pytest.mark.parametrize(("older", "newer"), [("1", "2"), ("blue", "amber")])
async def test_a_node_that_missed_an_update_gets_no_jobs_of_a_client_that_is_opened_later(folder, older, newer):
    async with open_fake_fleet(folder, "a", "b") as fleet:
        async with open_client(folder) as (client, head):
            await update(client, older)
            await fleet["b"].cut()
            await fleet["b"].leave()
            await until(lambda: head.names == ["a"])
            await update(client, newer)
        await fleet["b"].start()
        assert versions(fleet) == {"a": {newer}, "b": {older}}
        async with open_client(folder) as (client, head):
            assert "policy versions" in (await behind(client))["b"]
            await client.submit(specs_of(4))
            await fleet.wait_live(a=4, b=0)
            await update(client, "3")
            assert await behind(client) == {"a": "", "b": ""}


async def test_a_node_with_a_later_policy_that_is_found_later_makes_the_others_wait(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet:
        async with open_client(folder) as (client, head):
            await fleet["b"].leave()
            await until(lambda: head.names == ["a"])
            await update(client, "7")
            await fleet["a"].leave()
            await fleet["b"].start()
        async with open_client(folder) as (client, head):
            assert await behind(client) == {"b": ""}
            await fleet["a"].start()
            await until(lambda: head.names == ["a", "b"])
            while (await behind(client))["a"]:
                await trio.sleep(0.01)
            await client.submit(specs_of(4))
            await fleet.wait_live(a=4, b=0)


async def test_versions_whose_order_nobody_knows_refuse_jobs_until_an_update(folder, monkeypatch):
    ask = policy.FleetPolicy._ask

    async def ask_late(self):
        for _ in range(2000):  # a submission that did not wait for it would be over
            await trio.lowlevel.checkpoint()
        return await ask(self)

    monkeypatch.setattr(policy.FleetPolicy, "_ask", ask_late)
    async with open_fake_fleet(folder, "a", "b") as fleet:
        await fleet["a"].node.backends.operate(ResumeBackends("green"))
        await fleet["b"].node.backends.operate(ResumeBackends("blue"))
        async with open_client(folder) as (client, _head):
            answers = await client.submit(specs_of(4), patience_s=0)
            assert {answer.code for answer in answers} == {"admission"}
            assert re.search(r"blue: b; green: a.*policy_update", answers[0].message)
            await update(client, "red")
            await client.submit(specs_of(4))
            await fleet.wait_live(a=2, b=2)


async def test_versions_whose_order_nobody_knows_are_settled_by_the_end_of_a_node(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet:
        await fleet["a"].node.backends.operate(ResumeBackends("green"))
        await fleet["b"].node.backends.operate(ResumeBackends("blue"))
        async with open_client(folder) as (client, _head):
            await fleet["b"].leave()
            while (await behind(client)) != {"a": ""}:
                await trio.sleep(0.01)
            await client.submit(specs_of(4))
            await fleet.wait_live(a=4)


async def test_an_engine_that_fails_on_one_node_leaves_all_nodes_at_the_version_before(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet, open_client(folder) as (client, _head):
        await update(client, "1")
        engine = fleet.engines["http://b:8000"]
        engine.broken.add("load /weights/2")
        with pytest.raises(PolicyUpdateFailed, match="http://b:8000"):
            await update(client, "2")
        assert versions(fleet) == {"a": {"1"}, "b": {"1"}}
        assert {each.weights for each in fleet.engines.values()} == {"/weights/1"}
        assert not any(member.node.backends.admission.closed for member in fleet.nodes.values())
        assert await behind(client) == {"a": "", "b": ""}
        engine.broken.clear()
        await update(client, "2")
        assert versions(fleet) == {"a": {"2"}, "b": {"2"}}


async def test_a_node_that_is_lost_between_pause_and_resume_leaves_the_others_at_the_version_before(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet, open_client(folder) as (client, head):
        await update(client, "1")

        async def update_and_lose():
            async with client.policy_update("2") as change:
                await fleet["b"].kill()
                await until(lambda: head.names == ["a"])
                await change.load_folder("/weights/2", check="none")

        with pytest.raises(BackendError, match=r"node [ab] was lost while it was asked to load"):
            await update_and_lose()
        assert versions(fleet)["a"] == {"1"}
        assert fleet.engines["http://a:8000"].weights == "/weights/1"
        assert not fleet["a"].node.backends.admission.closed
        await client.submit(specs_of(2))
        await fleet.wait_live(a=2)


async def test_a_node_that_is_lost_at_the_resume_is_behind_when_it_is_back(folder, monkeypatch):
    async with open_fake_fleet(folder, "a", "b") as fleet, open_client(folder) as (client, head):
        await update(client, "1")
        b = fleet["b"].node.backends
        asked = trio.Event()

        operate = b.operate

        async def hang(request):
            if not isinstance(request, ResumeBackends):
                return await operate(request)
            asked.set()
            await trio.sleep_forever()

        monkeypatch.setattr(b, "operate", hang)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(update, client, "2")
            await asked.wait()
            await fleet["b"].kill()
        monkeypatch.undo()
        assert versions(fleet) == {"a": {"2"}, "b": {"1"}}
        await fleet["b"].start()
        await b.operate(ResumeBackends(None, b.statistics()["updating"]))  # its lease runs out
        await until(lambda: head.names == ["a", "b"])
        while "policy versions" not in (await behind(client))["b"]:
            await trio.sleep(0.01)
        await client.submit(specs_of(4))
        await fleet.wait_live(a=4)
