"""Each backend of a fleet has one node: by host and load, another when that is lost, its own when it is back."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack, nullcontext

import msgspec
import pytest

from prorl_trio.rendezvous.entry import SlurmStep
from prorl_trio.rendezvous.folder import write_entry
from prorl_trio.types.errors import BackendError
from support.fake_fleet import open_fake_fleet, until, update
from support.fleet_head import head_quickly, open_client

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    head_quickly(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "f"


def moved(fleet, url, *, to):
    return lambda: url in fleet[to].node.backends.urls()


async def test_a_backend_goes_to_a_node_on_its_own_host_however_many_that_has(folder):
    async with open_fake_fleet(folder, "far") as fleet:
        await fleet.add("near", host="h7", backends={f"http://h7:{port}": 1.0 for port in (1, 2, 3)})
        async with open_client(folder) as (client, _head):
            await client.add_backend("http://h7:9")
        assert "http://h7:9" in fleet.owners()["near"]


@pytest.mark.parametrize(
    ("url", "entry"),
    [
        ("http://127.0.0.1:9", {"host": socket.gethostname()}),
        ("http://c3:9", {"slurm": SlurmStep(job_id="1", step_id="0", node_name="c3")}),
    ],
)
async def test_a_host_has_several_names(folder, url, entry):
    async with open_fake_fleet(folder, "far") as fleet:
        await fleet.add("near", **entry, backends={"http://x:1": 1.0, "http://x:2": 1.0})
        async with open_client(folder) as (client, _head):
            await client.add_backend(url)
        assert url in fleet.owners()["near"]


async def test_of_several_nodes_on_a_host_those_with_fewest_get_its_backends(folder):
    async with open_fake_fleet(folder, "a", "b", "c") as fleet, open_client(folder) as (client, _head):
        for port in range(6):
            await client.add_backend(f"http://h1:{port}")
        assert [len(urls) for urls in fleet.owners().values()] == [3, 3, 3]


async def test_backends_of_a_lost_node_go_to_those_on_their_host_first_and_then_to_the_fewest(folder):
    async with open_fake_fleet(folder, "far") as fleet:
        await fleet.add("near", host="h7", backends={"http://h7:1": 1.0, "http://h7:2": 1.0})
        await fleet.add("lost", host="h8", backends={"http://h7:3": 2.0, "http://h8:1": 1.0})
        async with open_client(folder) as (client, _head):
            await fleet["lost"].kill()
            await until(moved(fleet, "http://h7:3", to="near"))
            await until(moved(fleet, "http://h8:1", to="far"))
            listed = {each["url"]: each for each in (await client.list_backends()).pool["backends"]}
            assert listed["http://h7:3"]["weight"] == 2.0


async def test_a_backend_that_was_added_goes_on_with_another_node_when_its_own_is_lost(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet, open_client(folder) as (client, _head):
        await client.add_backend("http://more:1", weight=3.0)
        assert fleet.owners()["a"] == ["http://a:8000", "http://more:1"]
        await fleet["a"].kill()
        await until(moved(fleet, "http://more:1", to="b"))
        assert fleet["b"].node.listed("http://more:1").weight == 3.0


async def test_a_weight_that_was_changed_goes_with_the_backend_of_a_lost_node(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet, open_client(folder) as (client, _head):
        await client.add_backend("http://more:1", weight=3.0)
        for url in ("http://more:1", "http://a:8000"):
            await client.weigh_backend(url, 5.0)
        with pytest.raises(BackendError):
            await client.weigh_backend("http://a:8000", -1.0)
        await fleet["a"].kill()
        for url in ("http://more:1", "http://a:8000"):
            await until(moved(fleet, url, to="b"))
            assert fleet["b"].node.listed(url).weight == 5.0


async def test_a_head_that_is_started_again_knows_who_was_given_which_backend(folder):
    async with open_fake_fleet(folder, "a", "b", "c") as fleet:
        async with open_client(folder) as (client, _head):
            await client.add_backend("http://more:1", weight=3.0)
            await fleet["b"].kill()
            await until(moved(fleet, "http://b:8000", to="c"))
        async with open_client(folder) as (client, _head):
            await fleet["a"].kill()
            await until(moved(fleet, "http://more:1", to="c"))
            assert fleet["c"].node.listed("http://more:1").weight == 3.0
            await fleet.restart("b")
            await until(lambda: "http://b:8000" not in fleet.owners()["c"])
            await client.drain_backend("http://more:1")
            await until(moved(fleet, "http://a:8000", to="c"))


async def test_a_node_that_came_back_while_there_was_no_head_has_its_backends_to_itself(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet:
        async with open_client(folder):
            await fleet["b"].kill()
            await until(moved(fleet, "http://b:8000", to="a"))
        await fleet.restart("b")
        async with open_client(folder):
            await until(lambda: fleet.owners() == {"a": ["http://a:8000"], "b": ["http://b:8000"]})


@pytest.mark.parametrize("head_restarts", [False, True])
async def test_a_node_that_was_only_cut_off_gives_up_what_another_was_given_meanwhile(folder, head_restarts):
    async with open_fake_fleet(folder, "a", "b") as fleet:
        async with open_client(folder) as (client, _head):
            await client.add_backend("http://more:1", weight=3.0)
            await fleet["a"].kill()
            await until(moved(fleet, "http://more:1", to="b"))
            if not head_restarts:
                await fleet["a"].start()
                await until(lambda: "http://more:1" not in fleet.owners()["a"])
        if head_restarts:
            await fleet["a"].start()
            async with open_client(folder):
                await until(lambda: sum("http://more:1" in urls for urls in fleet.owners().values()) == 1)


async def test_each_engine_has_one_owner_again_when_its_node_is_back(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet, open_client(folder) as (client, _head):
        await update(client, "2")
        await fleet["a"].kill()
        await until(moved(fleet, "http://a:8000", to="b"))
        await update(client, "3")
        assert fleet.engines["http://a:8000"].weights == "/weights/3"
        await fleet.restart("a")
        await until(lambda: fleet.owners() == {"a": ["http://a:8000"], "b": ["http://b:8000"]})
        await update(client, "4")
        assert {each.label for each in fleet.engines.values()} == {"4"}


async def test_an_engine_stays_with_the_other_node_until_its_own_has_the_fleets_policy(folder, caplog):
    async with open_fake_fleet(folder, "a", "b") as fleet, open_client(folder) as (client, _head):
        await update(client, "2")
        await fleet["a"].kill()
        await until(moved(fleet, "http://a:8000", to="b"))
        fleet.engines["http://a:8000"].label = "0"  # started again, too
        await fleet.restart("a")
        await until(lambda: "node a gets no jobs" in caplog.text)
        assert "http://a:8000" in fleet.owners()["b"]
        await update(client, "3")
        await until(lambda: fleet.owners()["b"] == ["http://b:8000"])


async def test_an_engine_that_is_away_is_given_to_another_node_when_it_is_back(folder, caplog):
    async with open_fake_fleet(folder, "a", "b") as fleet, open_client(folder):
        fleet.engines["http://a:8000"].broken.add("probe")
        await fleet["a"].kill()
        await until(lambda: "out of order" in caplog.text)
        fleet.engines["http://a:8000"].broken.clear()
        await until(moved(fleet, "http://a:8000", to="b"))


async def test_an_engine_that_missed_an_update_serves_no_older_policy(folder, caplog):
    async with open_fake_fleet(folder, "a", "b") as fleet, open_client(folder) as (client, _head):
        await update(client, "2")
        fleet.engines["http://a:8000"].broken.add("probe")
        await fleet["a"].kill()
        await until(lambda: "out of order" in caplog.text)
        await update(client, "3")
        fleet.engines["http://a:8000"].broken.clear()
        await until(lambda: "load it there, then add them" in caplog.text)
        assert fleet.owners()["b"] == ["http://b:8000"]


async def test_an_engine_that_says_it_has_other_weights_is_not_taken_over(folder, caplog):
    async with open_fake_fleet(folder, "a", "b") as fleet, open_client(folder) as (client, _head):
        await update(client, "2")
        fleet.engines["http://a:8000"].label = "1"
        await fleet["a"].kill()
        await until(lambda: "its weights are of version 1, and not 2" in caplog.text)
        assert fleet.owners()["b"] == ["http://b:8000"]


async def test_an_engine_whose_node_was_lost_in_an_update_is_not_taken_over(folder, caplog):
    async with open_fake_fleet(folder, "a", "b") as fleet, open_client(folder) as (client, head):

        async def update_and_lose():
            async with client.policy_update("2") as change:
                await fleet["a"].kill()
                await until(lambda: head.names == ["b"])
                await change.load_folder("/weights/2", check="none")

        with pytest.raises(BackendError, match=r"node [ab] was lost while it was asked to load"):
            await update_and_lose()
        await until(lambda: "load it there, then add them" in caplog.text)
        assert fleet.owners()["b"] == ["http://b:8000"]


@pytest.mark.parametrize("head_restarts", [False, True])
async def test_what_was_drained_or_removed_stays_out_when_its_node_is_lost(folder, head_restarts):
    async with open_fake_fleet(folder, "b") as fleet, AsyncExitStack() as stack:
        await fleet.add("a", backends={f"http://a:{port}": 1.0 for port in (1, 2, 3)})
        async with open_client(folder) if head_restarts else nullcontext() as first:
            client, _head = first or await stack.enter_async_context(open_client(folder))
            await client.drain_backend("http://a:1")
            await client.remove_backend("http://a:2")
        if head_restarts:
            await stack.enter_async_context(open_client(folder))
        await fleet["a"].kill()
        await until(moved(fleet, "http://a:3", to="b"))
        assert fleet.owners()["b"] == ["http://a:3", "http://b:8000"]


async def test_backends_that_nodes_have_configured_since_their_last_heartbeat_stay_with_all(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet:
        for name in ("a", "b"):
            backends = fleet[name].node.backends
            await backends.add("http://shared:1")
            backends.configured = frozenset({"http://shared:1"})
        async with open_client(folder) as (_client, head):
            await until(head.is_settled)
            assert all("http://shared:1" in urls for urls in fleet.owners().values())


async def test_a_backend_that_a_node_configures_after_it_joined_goes_to_another_when_the_node_is_lost(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet, open_client(folder) as (_client, head):
        node = fleet["a"]
        node.entry = msgspec.structs.replace(node.entry, backends={"http://later:1": 2.0})
        write_entry(folder, node.entry)
        await until(lambda: head.fleet.members.all["a"].entry == node.entry)
        await node.kill()
        await until(moved(fleet, "http://later:1", to="b"))
        assert fleet["b"].node.listed("http://later:1").weight == 2.0
        assert "http://a:8000" not in fleet.owners()["b"], "the node had given that up"
