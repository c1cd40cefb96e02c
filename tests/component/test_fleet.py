"""A client of a fleet has the interface of one node's client: jobs go where there is room, outcomes come once."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from ipc.session import Accepted, Rejected
from prorl_trio.client import BlockingClient, ConnectionLost, connect
from prorl_trio.client.fleet import roster
from prorl_trio.types.errors import ConfigError, Unauthorized
from support.fake_fleet import fake_fleet_in_thread, open_fake_fleet
from support.fake_node import make_outcome, make_spec
from support.fake_service import TOKEN

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(roster, "WATCH_INTERVAL_S", 0.05)
    monkeypatch.setattr(roster, "RETRY_S", 0.05)


def specs_of(count, **fields):
    return [make_spec(f"job-{n}", **fields) for n in range(count)]


async def take(client, count=None):
    return [outcome.job_id async for outcome in client.results(count)]


async def test_jobs_go_where_there_is_room_and_each_outcome_comes_once(tmp_path):
    async with open_fake_fleet(tmp_path / "f", "a", "b") as fleet:
        fleet["b"].node.places = 24
        async with connect(fleet=tmp_path / "f") as client:
            answers = await client.submit(specs_of(32))
            assert [(type(a), a.index, a.job_id) for a in answers] == [(Accepted, n, f"job-{n}") for n in range(32)]
            where = fleet.where()
            assert (len(where["a"]), len(where["b"])) == (8, 24)
            for member in fleet.nodes.values():
                for job_id in list(member.node.live):
                    member.node.finish(job_id)
            assert sorted(await take(client)) == sorted(spec.job_id for spec in specs_of(32))
            assert client.cursor == 32
            assert not client.outstanding
            for member in fleet.nodes.values():
                session = (await client.status())["nodes"][member.node_id]["sessions"][client.session_id]
                assert session["undelivered"] == 0


async def test_mates_stay_together_while_that_costs_no_time(tmp_path):
    async with open_fake_fleet(tmp_path / "f", "a", "b") as fleet:
        specs = [make_spec(f"{group}-{n}", group_id=group) for group in "pqrs" for n in range(4)]
        async with connect(fleet=tmp_path / "f") as client:
            await client.submit(specs)
            groups = [{job_id[0] for job_id in job_ids} for job_ids in fleet.where().values()]
            assert all(len(found) == 2 for found in groups)
            assert not groups[0] & groups[1]


async def test_admission_decides_and_a_full_fleet_says_so(tmp_path):
    async with open_fake_fleet(tmp_path / "f", "a", "b") as fleet:
        fleet["a"].node.max_live = 3
        fleet["b"].node.max_live = 2
        async with connect(fleet=tmp_path / "f") as client:
            answers = await client.submit(specs_of(6), patience_s=0)
            assert [type(answer) for answer in answers].count(Accepted) == 5
            (refused,) = [answer for answer in answers if isinstance(answer, Rejected)]
            assert (refused.code, refused.retry_after_s is not None) == ("admission", True)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.submit, specs_of(6))
                job_id = next(iter(fleet["b"].node.live))
                fleet["b"].node.finish(job_id)
            assert sum(len(job_ids) for job_ids in fleet.where().values()) == 5


async def test_answers_keep_the_order_over_rejections_and_repetitions(tmp_path):
    async with open_fake_fleet(tmp_path / "f", "a", "b") as fleet, connect(fleet=tmp_path / "f") as client:
        specs = [make_spec("x"), make_spec("nobody", handler="nobody"), make_spec("object", thing=object())]
        answers = await client.submit(specs)
        assert [getattr(answer, "code", "") for answer in answers] == ["", "unknown_handler", "malformed"]
        assert [type(answer) for answer in await client.submit([make_spec("x")])] == [Accepted]
        (other,) = await client.submit([make_spec("x", text="another")])
        assert isinstance(other, Rejected)
        assert other.code == "duplicate_job"
        assert sum(map(len, fleet.where().values())) == 1


async def test_a_submit_of_a_job_in_flight_is_answered_when_the_first_is(tmp_path):
    async with open_fake_fleet(tmp_path / "f", "a") as fleet, connect(fleet=tmp_path / "f") as client:
        fleet["a"].node.max_live = 0
        answered = []

        async def submit(patience_s):
            answered.append(await client.submit([make_spec("x"), make_spec("x")], patience_s=patience_s))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(submit, 60)
            while not client.outstanding:
                await trio.lowlevel.checkpoint()
            await submit(0)  # the first one waits for room
            assert [[answer.code for answer in answers] for answers in answered] == [["admission"] * 2]
            nursery.start_soon(submit, 60)
            fleet["a"].node.max_live = 1
        assert [[type(answer) for answer in answers] for answers in answered[1:]] == [[Accepted] * 2] * 2
        assert [spec.job_id for spec in fleet["a"].node.submitted] == ["x"]


async def test_a_submit_that_waits_for_another_takes_its_place_when_that_gives_up(tmp_path):
    async with open_fake_fleet(tmp_path / "f", "a") as fleet, connect(fleet=tmp_path / "f") as client:
        fleet["a"].node.max_live = 0
        first = trio.CancelScope()

        async def submit_first():
            with first:
                await client.submit([make_spec("x")])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(submit_first)
            while not client.outstanding:
                await trio.lowlevel.checkpoint()
            nursery.start_soon(client.submit, [make_spec("x")])
            await trio.testing.wait_all_tasks_blocked(0.01)
            first.cancel()
            fleet["a"].node.max_live = 1
        assert list(fleet["a"].node.live) == ["x"]


async def test_cancels_and_status_go_over_all_nodes(tmp_path):
    async with open_fake_fleet(tmp_path / "f", "a", "b") as fleet, connect(fleet=tmp_path / "f") as client:
        await client.submit(specs_of(16))
        report = await client.status()
        assert sorted(report["nodes"]) == ["a", "b"]
        assert len(report["backends"]["backends"]) == 2
        answer = await client.cancel(["job-0", "job-1", "none"])
        assert (answer.cancelled, answer.unknown) == (["job-0", "job-1"], ["none"])
        assert sorted(await take(client, 2)) == ["job-0", "job-1"]
        ended = await client.cancel(on_node=True, everything=True)
        assert len(ended.cancelled) == 14
        assert len(await take(client)) == 14
        assert fleet.where() == {"a": [], "b": []}


async def test_a_session_comes_back_to_all_its_nodes(tmp_path):
    async with open_fake_fleet(tmp_path / "f", "a", "b") as fleet:
        async with connect(fleet=tmp_path / "f", session_id="s") as client:
            await client.submit(specs_of(4))
        for member in fleet.nodes.values():
            for job_id in list(member.node.live)[:1]:
                member.node.finish(job_id)
        async with connect(fleet=tmp_path / "f", session_id="s") as client:
            assert client.resumed
            await client.submit(specs_of(4))
            assert sum(map(len, fleet.where().values())) == 2, "nothing runs twice"
            for member in fleet.nodes.values():
                for job_id in list(member.node.live):
                    member.node.finish(job_id)
            assert sorted(await take(client)) == [f"job-{n}" for n in range(4)]


def test_a_blocking_client_has_the_same(tmp_path):
    with (
        fake_fleet_in_thread(tmp_path / "f", "a", "b", on_submit=make_outcome),
        BlockingClient(fleet=tmp_path / "f") as client,
    ):
        answers = client.submit(specs_of(10))
        assert all(isinstance(answer, Accepted) for answer in answers)
        assert len(list(client.results())) == 10
        with client.policy_update("2"):
            pass
        versions = {each["policy_version"] for each in client.list_backends().pool["backends"]}
        assert versions == {"2"}


async def test_a_policy_update_is_on_all_nodes_or_on_none(tmp_path):
    async with open_fake_fleet(tmp_path / "f", "a", "b") as fleet, connect(fleet=tmp_path / "f") as client:

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


async def test_a_node_that_comes_after_an_update_gets_no_jobs_before_the_next(tmp_path, caplog):
    async with open_fake_fleet(tmp_path / "f", "a") as fleet, connect(fleet=tmp_path / "f") as client:
        async with client.policy_update("2"):
            pass
        late = await fleet.add("late")
        while len((await client.status())["nodes"]) < 2 or "until the next policy update" not in caplog.text:
            await trio.sleep(0.05)
        await client.submit(specs_of(4))
        assert len(fleet["a"].node.live) == 4
        async with client.policy_update("3"):
            pass
        await client.submit([make_spec(f"more-{n}") for n in range(4)])
        assert len(late.node.live) == 4


async def test_backends_go_to_the_node_with_the_fewest_and_can_be_taken_back(tmp_path):
    async with open_fake_fleet(tmp_path / "f", "a", "b") as fleet, connect(fleet=tmp_path / "f") as client:
        for n in range(2):
            await client.add_backend(f"http://more-{n}:8000")
        assert sorted(len(member.node.engines) for member in fleet.nodes.values()) == [2, 2]
        await client.remove_backend("http://more-1:8000")
        assert len((await client.list_backends()).urls) == 3


async def test_what_is_no_fleet_is_told(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        async with connect(fleet=tmp_path / "none", connect_timeout_s=0.1):
            pass
    (tmp_path / "empty").mkdir(mode=0o700)
    with pytest.raises(ConnectionLost, match="is one running"):
        async with connect(fleet=tmp_path / "empty", connect_timeout_s=0.1):
            pass
    with pytest.raises(ValueError, match="one of the three"):
        async with connect("ws://127.0.0.1:1", fleet=tmp_path):
            pass
    with pytest.raises(ValueError, match="no resume_after"):
        async with connect(fleet=tmp_path, resume_after=3):
            pass


async def test_nodes_of_several_models_and_other_tokens_are_told(tmp_path, caplog):
    async with open_fake_fleet(tmp_path / "f", "a") as fleet:
        async with connect(fleet=tmp_path / "f", token=TOKEN) as client:
            await fleet.add("other", model="another 99")
            while "another 99" not in caplog.text:  # noqa: ASYNC110 - a thread reads the disk
                await trio.sleep(0.05)
            assert "another 99" in (await client.status())["fleet"]["left_out"]["other"]
        with pytest.raises(ConfigError, match="not of one kind"):
            async with connect(fleet=tmp_path / "f", connect_timeout_s=0.3):
                pass
        await fleet["other"].leave()
        with pytest.raises(Unauthorized, match=r"not that of any of the 1 nodes.*unset PRORL_TOKEN"):
            async with connect(fleet=tmp_path / "f", token="wrong", connect_timeout_s=99):
                pass


async def test_a_node_of_another_version_of_the_package_is_left_out_and_says_so(tmp_path, caplog):
    async with open_fake_fleet(tmp_path / "f", "a") as fleet:
        async with connect(fleet=tmp_path / "f") as client:
            await fleet.add("newer", version="2")
            while "left out of the fleet" not in caplog.text:  # noqa: ASYNC110 - a thread reads the disk
                await trio.sleep(0.05)
            why = (await client.status())["fleet"]["left_out"]["newer"]
            assert "node newer on h1 has version 2 and the model m 0123, and node a version 1" in why
            assert "give it a folder of its own" in why
            await client.submit(specs_of(12))
            assert {name: len(jobs) for name, jobs in fleet.where().items()} == {"a": 12, "newer": 0}
        with pytest.raises(ConfigError, match=r"a: version 1.*newer: version 2.*another folder"):
            async with connect(fleet=tmp_path / "f", connect_timeout_s=0.3):
                pass


async def test_two_fleets_of_one_user_know_nothing_of_each_other(tmp_path):
    async with (
        open_fake_fleet(tmp_path / "f", "a", "b") as first,
        open_fake_fleet(tmp_path / "g", "a", "b") as second,
        connect(fleet=tmp_path / "f", session_id="s") as client,
        connect(fleet=tmp_path / "g", session_id="s") as other,
    ):
        await client.submit(specs_of(8))
        await other.submit(specs_of(4))
        async with other.policy_update("2"):
            pass
        versions = {each["policy_version"] for each in (await client.list_backends()).pool["backends"]}
        assert versions == {"0"}
        await first["a"].kill()
        await first.wait_live(b=8)
        assert {name: len(jobs) for name, jobs in second.where().items()} == {"a": 2, "b": 2}
        await client.cancel(whole_session=True)
        assert len(await take(client)) == 8
        assert other.node_id == "a,b"
        for member in second.nodes.values():
            for job_id in list(member.node.live):
                member.node.finish(job_id)
        assert sorted(await take(other)) == [f"job-{n}" for n in range(4)]
