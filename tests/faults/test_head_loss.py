"""Members of a fleet are killed, freeze and come back under a head: nothing is lost, and nothing comes twice."""

from __future__ import annotations

import msgspec
import pytest
import trio

from prorl_ipc.session import Accepted
from prorl_trio.client import connect
from prorl_trio.rendezvous.folder import write_entry
from prorl_trio.types.errors import Draining
from support.fake_fleet import finish_all, open_fake_fleet, take
from support.fake_node import make_outcome, make_spec
from support.fake_service import TOKEN
from support.fleet_head import head_quickly, open_all, open_head

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    head_quickly(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "f"


def specs_of(count, first=0):
    return [make_spec(f"job-{n}") for n in range(first, first + count)]


def ids(outcomes):
    return sorted(outcome.job_id for outcome in outcomes)


async def keep_finishing(fleet, *names):
    while True:
        await trio.sleep(0.05)
        finish_all(fleet, *names)


async def test_the_jobs_of_a_killed_node_run_elsewhere_as_their_next_attempt(folder):
    async with open_all(folder, "a", "b") as (fleet, _head, client):
        await client.submit(specs_of(8))
        await fleet.wait_live(a=4, b=4)
        lost = fleet.where()["a"]
        await fleet["a"].kill()
        await fleet.wait_live(b=8)
        assert {fleet["b"].node.attempts[job_id] for job_id in lost} == {2}
        finish_all(fleet, "b")
        outcomes = await take(client)
        assert ids(outcomes) == ids(map(make_outcome, specs_of(8)))
        assert {outcome.attempt for outcome in outcomes if outcome.job_id in lost} == {2}


async def test_a_node_that_comes_back_with_its_outcomes_doubles_none(folder):
    async with open_all(folder, "a", "b") as (fleet, head, client):
        await client.submit(specs_of(8))
        await fleet.wait_live(a=4, b=4)
        lost = fleet.where()["a"]
        await fleet["a"].kill()
        await fleet.wait_live(b=8)
        fleet["a"].node.finish(lost[0])  # it was only cut off: it goes on, and this job ends there first
        fleet["b"].node.finish(lost[1])
        await fleet["a"].start()
        await fleet.wait_live(a=0)  # those that run on b now are withdrawn
        finish_all(fleet, "b")
        assert ids(await take(client)) == ids(map(make_outcome, specs_of(8)))
        assert not client.outstanding
        await head.wait_members("a", "b")
        while len(fleet["a"].sessions.get("head-of-tests").log):
            await trio.sleep(0.01)


async def test_a_node_that_is_back_before_anybody_took_its_jobs_goes_on_with_them(folder):
    async with open_all(folder, "a") as (fleet, head, client):
        await client.submit(specs_of(4))
        await fleet.wait_live(a=4)
        fleet["a"].node.finish("job-0")
        await fleet["a"].kill()
        while head.fleet.members.all:
            await trio.sleep(0.01)
        fleet["a"].node.finish("job-1")
        await fleet["a"].start()
        finish_all(fleet)
        outcomes = await take(client)
        assert ids(outcomes) == ids(map(make_outcome, specs_of(4)))
        assert {outcome.attempt for outcome in outcomes} == {1}


async def test_a_frozen_node_is_lost_and_is_taken_back_when_it_thaws(folder):
    async with open_fake_fleet(folder, "b") as fleet:
        await fleet.add("a", stale_after_s=0.5)
        quick = {"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 0.3}
        async with open_head(folder, "a", "b", **quick) as head, connect(head.url, TOKEN) as client:
            await client.submit(specs_of(4))
            await fleet.wait_live(a=2, b=2)
            port = int(fleet["a"].service.url.rpartition(":")[2])
            await fleet["a"].cut()
            async with trio.open_nursery() as nursery:
                # Its kernel takes connections, and nobody answers.
                await nursery.start(trio.serve_tcp, say_nothing, port)
                await fleet.wait_live(b=4)
                nursery.cancel_scope.cancel()
            await fleet["a"].start()
            await head.wait_members("a", "b")
            await client.submit(specs_of(8, first=4))
            while sum(map(len, fleet.where().values())) != 12 or not fleet["a"].node.live:
                await trio.sleep(0.01)
            finish_all(fleet)
            assert ids(await take(client)) == ids(map(make_outcome, specs_of(12)))


async def say_nothing(_stream):
    await trio.sleep_forever()


async def test_jobs_that_a_shutdown_cut_go_on_elsewhere_and_may_come_back(folder):
    async with open_all(folder, "a", "b") as (fleet, _head, client):
        await client.submit(specs_of(4))
        await fleet.wait_live(a=2, b=2)
        for name in ("a", "b"):
            fleet[name].node.draining = True
            fleet[name].sessions.journal.end_cut_jobs()
            for job_id in fleet.where()[name]:
                bare = make_outcome(fleet[name].node.live[job_id], reward=None)
                ended = msgspec.structs.replace(bare, status="cancelled", cause="cancelled", error_code="shutdown")
                fleet[name].node.finish(job_id, ended)
            other = "b" if name == "a" else "a"
            await fleet.wait_live(**{other: 4})
            fleet[name].node.draining = False
        finish_all(fleet)
        outcomes = await take(client)
        assert ids(outcomes) == ids(map(make_outcome, specs_of(4)))
        assert {outcome.status for outcome in outcomes} == {"completed"}


async def test_a_draining_node_is_passed_over(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet:
        fleet["a"].node.draining = True
        async with open_head(folder, "a", "b") as head, connect(head.url, TOKEN) as client:
            answers = await client.submit(specs_of(6))
            assert all(isinstance(answer, Accepted) for answer in answers)
            await fleet.wait_live(b=6)


async def test_a_node_that_has_no_time_left_for_a_job_is_passed_over(folder, monkeypatch):
    async with open_fake_fleet(folder, "a", "b") as fleet, open_head(folder, "a", "b") as head:

        def check(*_):
            raise Draining("the node's allocation ends")

        monkeypatch.setattr(fleet["a"].node, "check", check)
        async with connect(head.url, TOKEN) as client:
            await client.submit(specs_of(6))
            await fleet.wait_live(b=6)


@pytest.mark.parametrize("forgets", [False, True])
async def test_jobs_that_wait_for_the_next_start_of_their_node_are_left_to_it(folder, forgets):
    async with open_fake_fleet(folder, "a") as fleet:
        await fleet.add("b", restart_within_s=90.0)
        async with open_head(folder, "a", "b") as head, connect(head.url, TOKEN) as client:
            await client.submit(specs_of(8))
            await fleet.wait_live(a=4, b=4)
            kept = fleet.where()["b"]
            await fleet["b"].kill()
            while "b" in head.fleet.members.all:
                await trio.sleep(0.01)
            if forgets:
                fleet["b"].forget()
            await fleet["b"].start()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep_finishing, fleet)
                outcomes = await take(client)
                nursery.cancel_scope.cancel()
            assert ids(outcomes) == ids(map(make_outcome, specs_of(8)))
            assert {outcome.attempt for outcome in outcomes if outcome.job_id in kept} == {2 if forgets else 1}


async def test_outcomes_that_a_node_sends_before_it_lists_its_jobs_count(folder):
    async with open_fake_fleet(folder, "a") as fleet:
        await fleet.add("b", restart_within_s=90.0)
        async with open_head(folder, "a", "b") as head, connect(head.url, TOKEN) as client:
            await client.submit(specs_of(8))
            await fleet.wait_live(a=4, b=4)
            await fleet["b"].kill()
            while "b" in head.fleet.members.all:
                await trio.sleep(0.01)
            finish_all(fleet)
            await fleet["b"].start()
            outcomes = await take(client)
            assert ids(outcomes) == ids(map(make_outcome, specs_of(8)))
            assert {outcome.attempt for outcome in outcomes} == {1}


async def test_an_entry_half_written_or_of_a_port_that_is_anothers_harms_nobody(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet:
        (folder / "half.json").write_bytes(b'{"node_id": "half", "url": "ws')
        (folder / "half.json").chmod(0o600)
        write_entry(folder, msgspec.structs.replace(fleet["a"].entry, node_id="impostor"))
        async with open_head(folder, "a", "b") as head, connect(head.url, TOKEN) as client:
            assert "that of node a now" in (await client.status())["left_out"]["impostor"]
            await client.submit(specs_of(4))
            await fleet.wait_live(a=2, b=2)
            finish_all(fleet)
            assert len(await take(client)) == 4


# ---------------------------------------------------------------- trainers that come and go


async def test_a_trainer_that_returns_while_a_node_is_down_loses_nothing_and_doubles_nothing(folder):
    """It may submit its jobs again, too: they are the ones that it has."""
    async with open_fake_fleet(folder, "a", "b") as fleet, open_head(folder, "a", "b") as head:
        async with connect(head.url, TOKEN, session_id="s") as client:
            await client.submit(specs_of(8))
            await fleet.wait_live(a=4, b=4)
        await fleet["a"].kill()
        async with connect(head.url, TOKEN, session_id="s") as client:
            await fleet.wait_live(b=8)
            assert all(isinstance(answer, Accepted) for answer in await client.submit(specs_of(8)))
            assert len(fleet["b"].node.live) == 8
            finish_all(fleet, "b")
            assert ids(await take(client)) == ids(map(make_outcome, specs_of(8)))
        finish_all(fleet, "a")  # it has outcomes of its own
        await fleet["a"].start()
        await head.wait_members("a", "b")
        async with connect(head.url, TOKEN, session_id="s") as client:
            assert await take(client) == []


# ---------------------------------------------------------------- cancel


async def test_a_cancel_returns_when_the_outcome_of_the_member_is_there(folder):
    async with open_all(folder, "a") as (fleet, head, client):
        fleet["a"].node.places = 1
        while head.fleet.dispatch.members["a"].workers != 1:
            await trio.sleep(0.01)
        await client.submit(specs_of(4))
        await fleet.wait_live(a=2)
        await client.cancel(["job-0", "job-3"], "not needed")  # one is there, one is queued
        assert "job-0" not in fleet.where()["a"]
        await client.cancel(whole_session=True)
        outcomes = await take(client)
        assert ids(outcomes) == ids(map(make_outcome, specs_of(4)))
        assert {(outcome.status, outcome.cause) for outcome in outcomes} == {("cancelled", "cancelled")}


async def test_a_cancel_whose_member_is_away_ends_the_job_and_the_copy_is_withdrawn(folder):
    async with open_all(folder, "a") as (fleet, _head, client):
        await client.submit(specs_of(2))
        await fleet.wait_live(a=2)
        await fleet["a"].kill()
        await client.cancel(whole_session=True)
        assert {outcome.status for outcome in await take(client)} == {"cancelled"}
        await fleet["a"].start()
        await fleet.wait_live(a=0)
        assert not await take(client)


# ---------------------------------------------------------------- checks


async def test_a_job_that_no_node_would_take_is_refused_at_submit(folder):
    async with open_all(folder, "a") as (fleet, _head, client):
        refused, taken = await client.submit([make_spec("x", handler="nobody"), make_spec("y")])
        assert (refused.code, refused.message) == ("unknown_handler", "no handler 'nobody'; there is: fake")
        assert isinstance(taken, Accepted)
        await fleet.wait_live(a=1)


async def test_without_nodes_jobs_are_rejected_for_now(folder):
    async with open_fake_fleet(folder) as fleet, open_head(folder) as head, connect(head.url, TOKEN) as client:
        (answer,) = await client.submit(specs_of(1), patience_s=0)
        assert answer.code == "admission"
        assert answer.retry_after_s > 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.add, "a")
            (answer,) = await client.submit(specs_of(1))
            assert isinstance(answer, Accepted)
            await fleet.wait_live(a=1)


# ---------------------------------------------------------------- the head is killed


async def test_a_head_that_starts_again_goes_on_with_the_jobs_of_its_members(folder, tmp_path):
    ledger = tmp_path / "ledger"
    async with open_fake_fleet(folder, "a", "b") as fleet:
        fleet["a"].node.places = fleet["b"].node.places = 1
        async with (
            open_head(folder, "a", "b", ledger=ledger) as head,
            connect(head.url, TOKEN, session_id="s") as client,
        ):
            await client.submit(specs_of(6))
            await fleet.wait_live(a=2, b=2)
        assert fleet.where().keys() == {"a", "b"}
        finish_all(fleet, "a")
        await fleet["b"].kill()
        async with open_head(folder, "a", ledger=ledger, recovery_timeout_s=60) as head:
            async with connect(head.url, TOKEN, session_id="s") as client, trio.open_nursery() as nursery:
                nursery.start_soon(keep_finishing, fleet, "a")
                outcomes = await take(client)
                nursery.cancel_scope.cancel()
            assert ids(outcomes) == ids(map(make_outcome, specs_of(6)))
            assert sorted(outcome.attempt for outcome in outcomes) == [1, 1, 1, 1, 2, 2]
            await fleet["b"].start()
            await fleet.wait_live(b=0)


# ---------------------------------------------------------------- nodes that come back, again and again


@pytest.mark.parametrize("is_withdrawn", [True, False])
async def test_jobs_come_back_to_a_node_whose_copies_of_them_were_withdrawn(folder, is_withdrawn):
    async with open_all(folder, "a", "b") as (fleet, _head, client):
        await client.submit(specs_of(8))
        await fleet.wait_live(a=4, b=4)
        await fleet["a"].kill()
        await fleet.wait_live(b=8)
        await fleet["a"].start()
        if is_withdrawn:
            await fleet.wait_live(a=0)
        await fleet["b"].kill()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_finishing, fleet, "a")
            outcomes = await take(client)
            nursery.cancel_scope.cancel()
        assert ids(outcomes) == ids(map(make_outcome, specs_of(8)))
        assert {outcome.status for outcome in outcomes} == {"completed"}
        await fleet["b"].start()
        await fleet.wait_live(b=0)
        assert not await take(client)


async def test_outcomes_that_were_given_out_before_the_loss_do_not_come_again(folder):
    async with open_all(folder, "a", "b") as (fleet, head, client):
        await client.submit(specs_of(8))
        await fleet.wait_live(a=4, b=4)
        finish_all(fleet, "a")
        first = await take(client, 4)
        await fleet["a"].kill()
        await fleet["a"].start()
        await head.wait_members("a", "b")
        finish_all(fleet)
        rest = await take(client)
        assert ids(first + rest) == ids(map(make_outcome, specs_of(8)))


async def test_a_node_that_leaves_is_given_no_more_and_its_jobs_are_moved(folder):
    async with open_all(folder, "a", "b") as (fleet, head, client):
        await client.submit(specs_of(4))
        await fleet.wait_live(a=2, b=2)
        await fleet["a"].leave()
        await fleet.wait_live(b=4)
        await client.submit(specs_of(4, first=4))
        await fleet.wait_live(b=8)
        finish_all(fleet, "b")
        assert len(await take(client)) == 8
        assert head.names == ["b"]


async def test_a_job_that_a_rolling_restart_cuts_everywhere_comes_back_to_its_nodes(folder):
    async with open_all(folder, "a") as (fleet, head, client):
        await client.submit([make_spec("x")])
        for _ in range(3):
            await fleet.wait_live(a=1)
            fleet["a"].node.draining = True
            fleet["a"].sessions.journal.end_cut_jobs()
            bare = make_outcome(fleet["a"].node.live["x"], reward=None)
            ended = msgspec.structs.replace(bare, status="cancelled", cause="cancelled", error_code="shutdown")
            fleet["a"].node.finish("x", ended)
            await fleet["a"].kill()
            while head.names:
                await trio.sleep(0.01)
            fleet["a"].node.draining = False
            await fleet["a"].start()
        await fleet.wait_live(a=1)
        finish_all(fleet)
        assert [(outcome.job_id, outcome.status) for outcome in await take(client)] == [("x", "completed")]


async def test_a_job_that_was_cancelled_while_its_node_was_away_does_not_run_on_there(folder):
    async with open_fake_fleet(folder, "a") as fleet:
        await fleet.add("b", restart_within_s=90.0)
        async with open_head(folder, "a", "b") as head, connect(head.url, TOKEN) as client:
            await client.submit(specs_of(8))
            await fleet.wait_live(a=4, b=4)
            kept = fleet.where()["b"]
            await fleet["b"].kill()
            while "b" in head.names:
                await trio.sleep(0.01)
            assert (await client.cancel(kept)).cancelled == kept
            await fleet["b"].start()
            await fleet.wait_live(b=0)
            finish_all(fleet, "a")
            outcomes = await take(client)
            assert sorted(outcome.job_id for outcome in outcomes if outcome.status == "cancelled") == kept
            assert len(outcomes) == 8


@pytest.mark.parametrize("call", ["room", "submit"])
async def test_a_node_that_answers_nothing_but_heartbeats_keeps_no_job_from_the_others(folder, call):
    async with open_all(folder, "a", "b") as (fleet, head, client):

        async def no_answer(*_args, **_options):
            await trio.sleep_forever()

        setattr(head.fleet.members.all["a"].client, call, no_answer)
        for number in range(30):
            (answer,) = await client.submit([make_spec(f"job-{number}")])
            assert isinstance(answer, Accepted)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_finishing, fleet, "b")
            assert len(await take(client, 15)) == 15
            nursery.cancel_scope.cancel()
