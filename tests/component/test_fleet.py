"""A head has the interface of a node: jobs go where there is room, outcomes come once."""

from __future__ import annotations

import pytest
import trio

from prorl_ipc.session import Accepted, Rejected
from prorl_trio.client import BlockingClient, ConnectionLost, connect
from prorl_trio.types.errors import Unauthorized
from support.fake_fleet import finish_all, open_fake_fleet, take
from support.fake_node import make_outcome, make_spec
from support.fleet_head import announce, fleet_in_thread, head_quickly, open_all, open_client, open_head

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    head_quickly(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "f"


def specs_of(count, **fields):
    return [make_spec(f"job-{n}", **fields) for n in range(count)]


def ids(outcomes):
    return sorted(outcome.job_id for outcome in outcomes)


async def test_jobs_go_where_there_is_room_and_each_outcome_comes_once(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet:
        fleet["b"].node.places = 24
        async with open_client(folder) as (client, _head):
            answers = await client.submit(specs_of(40))
            assert [(type(a), a.index, a.job_id) for a in answers] == [(Accepted, n, f"job-{n}") for n in range(40)]
            await fleet.wait_live(a=10, b=30)
            finish_all(fleet)
            assert ids(await take(client)) == ids(map(make_outcome, specs_of(40)))
            assert client.cursor == 40
            assert not client.outstanding
            for member in fleet.nodes.values():
                while len(member.sessions.get("head-of-tests").log):
                    await trio.sleep(0.01)


async def test_a_node_that_lives_and_answers_no_submit_is_left_out_for_a_while(folder, monkeypatch):
    """As where its disk hangs. Its jobs go elsewhere, and it gets some again when it answers."""
    async with open_all(folder, "a", config={"member_timeout_s": 3.0}) as (fleet, head, client):
        answers = trio.Event()

        async def examine(specs):
            await answers.wait()

        monkeypatch.setattr(fleet["a"].node, "is_unexamined", lambda spec: not answers.is_set())
        monkeypatch.setattr(fleet["a"].node, "examine", examine)
        monkeypatch.setattr(head.fleet._checks, "is_unknown", lambda spec: False)
        await client.submit([make_spec("one")])
        with trio.fail_after(60):
            while "did not answer a submit" not in head.fleet.members.refused.get("a", ""):
                await trio.sleep(0.01)
            await fleet.add("b", make_outcome)
            assert [outcome.job_id for outcome in await take(client, 1)] == ["one"]
            answers.set()
            await head.wait_members("a", "b")


async def test_mates_stay_together_while_that_costs_no_time(folder):
    async with open_all(folder, "a", "b") as (fleet, _head, client):
        specs = [make_spec(f"{group}-{n}", group_id=group) for group in "pqrs" for n in range(4)]
        await client.submit(specs)
        await fleet.wait_live(a=8, b=8)
        groups = [{job_id[0] for job_id in job_ids} for job_ids in fleet.where().values()]
        assert all(len(found) == 2 for found in groups)
        assert not groups[0] & groups[1]


async def test_answers_keep_the_order_over_rejections_and_repetitions(folder):
    async with open_all(folder, "a", "b") as (fleet, _head, client):
        specs = [make_spec("x"), make_spec("nobody", handler="nobody"), make_spec("object", thing=object())]
        answers = await client.submit(specs)
        assert [getattr(answer, "code", "") for answer in answers] == ["", "unknown_handler", "malformed"]
        assert [type(answer) for answer in await client.submit([make_spec("x")])] == [Accepted]
        (other,) = await client.submit([make_spec("x", text="another")])
        assert isinstance(other, Rejected)
        assert other.code == "duplicate_job"
        while not sum(map(len, fleet.where().values())):
            await trio.sleep(0.01)
        assert sum(map(len, fleet.where().values())) == 1


async def test_cancels_go_over_all_nodes(folder):
    async with open_all(folder, "a", "b") as (fleet, _head, client):
        await client.submit(specs_of(16))
        await fleet.wait_live(a=8, b=8)
        answer = await client.cancel(["job-0", "job-1", "none"])
        assert (answer.cancelled, answer.unknown) == (["job-0", "job-1"], ["none"])
        assert ids(await take(client, 2)) == ["job-0", "job-1"]
        ended = await client.cancel(on_node=True, everything=True)
        assert len(ended.cancelled) == 14
        assert len(await take(client)) == 14
        assert fleet.where() == {"a": [], "b": []}


async def test_a_session_comes_back(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet, open_head(folder, "a", "b") as head:
        announce(folder, head)
        async with connect(fleet=folder, session_id="s") as client:
            await client.submit(specs_of(4))
            await fleet.wait_live(a=2, b=2)
        for member in fleet.nodes.values():
            member.node.finish(next(iter(member.node.live)))
        async with connect(fleet=folder, session_id="s") as client:
            assert client.resumed
            await client.submit(specs_of(4))
            assert sum(map(len, fleet.where().values())) == 2, "nothing runs twice"
            finish_all(fleet)
            assert ids(await take(client)) == [f"job-{n}" for n in range(4)]


def test_a_blocking_client_has_the_same(folder):
    with fleet_in_thread(folder, "a", "b", on_submit=make_outcome), BlockingClient(fleet=folder) as client:
        answers = client.submit(specs_of(10))
        assert all(isinstance(answer, Accepted) for answer in answers)
        assert len(list(client.results())) == 10
        with client.policy_update("2"):
            pass
        versions = {each["policy_version"] for each in client.list_backends().pool["backends"]}
        assert versions == {"2"}


async def test_a_policy_update_is_on_all_nodes_or_on_none(folder):
    async with open_all(folder, "a", "b") as (fleet, _head, client):

        async def versions():
            listed = await client.list_backends()
            return {each["node_id"]: each["policy_version"] for each in listed.pool["backends"]}

        async with client.policy_update("2"):
            assert all(member.node.backends.admission.statistics()["paused"] for member in fleet.nodes.values())
        assert await versions() == {"a": "2", "b": "2"}
        with pytest.raises(RuntimeError, match="mine"):
            async with client.policy_update("3"):
                raise RuntimeError("mine")
        assert await versions() == {"a": "2", "b": "2"}
        assert not any(member.node.backends.admission.statistics()["paused"] for member in fleet.nodes.values())


async def test_backends_go_to_the_node_with_the_fewest_and_can_be_taken_back(folder):
    async with open_all(folder, "a", "b") as (fleet, _head, client):
        for n in range(2):
            await client.add_backend(f"http://more-{n}:8000")
        assert sorted(len(member.node.engines) for member in fleet.nodes.values()) == [2, 2]
        await client.remove_backend("http://more-1:8000")
        assert len((await client.list_backends()).urls) == 3


async def test_what_is_no_fleet_is_told(folder, tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConnectionLost, match=r"has no head yet.*prorl-trio fleet --dir"):
            async with connect(fleet=path, connect_timeout_s=0.1):
                pass
    for options in ({"url": "ws://127.0.0.1:1", "fleet": tmp_path}, {"endpoint_file": tmp_path, "fleet": tmp_path}, {}):
        with pytest.raises(ValueError, match="one of the three"):
            async with connect(**options):
                pass


async def test_a_client_waits_for_the_head_and_may_have_a_token_of_its_own(folder):
    async with open_fake_fleet(folder, "a"), trio.open_nursery() as nursery:
        connected = trio.Event()

        async def use():
            async with connect(fleet=folder) as client:
                await client.status()
                connected.set()

        nursery.start_soon(use)
        await trio.sleep(0.3)
        assert not connected.is_set()
        async with open_head(folder, "a") as head:
            announce(folder, head)
            await connected.wait()
            with pytest.raises(Unauthorized):
                async with connect(fleet=folder, token="wrong", connect_timeout_s=99):
                    pass


async def test_a_node_of_another_model_is_left_out_and_says_so(folder, caplog):
    async with open_all(folder, "a") as (fleet, _head, client):
        await fleet.add("other", model="another 99")
        while "another 99" not in caplog.text:  # noqa: ASYNC110 - a thread reads the disk
            await trio.sleep(0.05)
        assert "another 99" in (await client.status())["left_out"]["other"]
        await client.submit(specs_of(12))
        await fleet.wait_live(a=10, other=0)


async def test_two_fleets_of_one_user_know_nothing_of_each_other(tmp_path):
    async with (
        open_all(tmp_path / "f", "a", "b") as (first, _first_head, client),
        open_all(tmp_path / "g", "a", "b") as (second, _second_head, other),
    ):
        await client.submit(specs_of(8))
        await other.submit(specs_of(4))
        await second.wait_live(a=2, b=2)
        async with other.policy_update("2"):
            pass
        versions = {each["policy_version"] for each in (await client.list_backends()).pool["backends"]}
        assert versions == {"0"}
        await first["a"].kill()
        await first.wait_live(b=8)
        assert {name: len(jobs) for name, jobs in second.where().items()} == {"a": 2, "b": 2}
        await client.cancel(whole_session=True)
        assert len(await take(client)) == 8
        finish_all(second)
        assert ids(await take(other)) == [f"job-{n}" for n in range(4)]
