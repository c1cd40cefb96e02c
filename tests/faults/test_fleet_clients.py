"""A fleet's client is cancelled, ends and comes back between two steps of a move: no job is lost, none comes twice."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
import trio

from ipc.session import Accepted
from prorl_trio.client import SessionLost, connect
from prorl_trio.client.fleet import book
from prorl_trio.client.fleet.moves import Moved, MoveLog
from support.fake_fleet import finish_all, open_fake_fleet, take, until, watch_quickly
from support.fake_node import make_outcome, make_spec
from support.quiet_clock import stretched

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    watch_quickly(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "f"


def shut_down(fleet, name):
    """Have a node cut its jobs, as at its end."""
    fleet[name].node.draining = True
    fleet[name].sessions.journal.end_cut_jobs()
    for job_id in list(fleet[name].node.live):
        bare = make_outcome(fleet[name].node.live[job_id], reward=None)
        fleet[name].node.finish(job_id, msgspec.structs.replace(bare, status="cancelled", error_code="shutdown"))


async def start_again(fleet, name, *clients):
    """Start a node that was shut down, with its ledger."""
    await fleet[name].kill()
    for client in clients:
        await lost(client, name)
    fleet[name].node.draining = False
    await fleet[name].start()


async def jobs_of_an_earlier_client(fleet, folder):
    """Have a client of session `s` submit four jobs and end; return those on node `a`."""
    async with connect(fleet=folder, session_id="s") as client:
        await client.submit([make_spec(f"job-{n}") for n in range(4)])
    return live(fleet, "a")


def live(fleet, *names):
    return sorted(job_id for name in names or fleet.nodes for job_id in fleet[name].node.live)


async def lost(client, name):
    await until(lambda: name not in client.node_id.split(","))


async def test_a_job_that_its_node_has_cut_and_no_other_has_is_named_to_the_next_client(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet:
        async with connect(fleet=folder, session_id="s") as client:
            fleet["b"].node.max_live = 0
            await client.submit([make_spec("x")])
            shut_down(fleet, "a")
            await until(lambda: not len(fleet["a"].sessions.get("s").log))
        await start_again(fleet, "a")
        for others in (None, 0):
            async with connect(fleet=folder, session_id="s") as client:
                if others is None:
                    with pytest.raises(SessionLost) as raised:
                        await take(client)
                    assert raised.value.job_ids == ["x"]
                assert await take(client) == [], "it was told once"
        async with connect(fleet=folder, session_id="s") as client:
            (answer,) = await client.submit([make_spec("x")])
            assert isinstance(answer, Accepted)
            finish_all(fleet)
            assert [outcome.job_id for outcome in await take(client)] == ["x"]


async def test_a_job_that_a_rolling_restart_cuts_everywhere_comes_back_to_its_nodes(folder):
    async with open_fake_fleet(folder, "a") as fleet, connect(fleet=folder) as client:
        for _ in range(3):
            if not fleet["a"].node.live:
                await client.submit([make_spec("x")])
            shut_down(fleet, "a")
            await start_again(fleet, "a", client)
            await fleet.wait_live(a=1)
        finish_all(fleet)
        assert [(outcome.job_id, outcome.status) for outcome in await take(client)] == [("x", "completed")]


async def test_a_moved_job_that_is_back_has_its_outcome_also_if_that_is_a_cancel(folder):
    """An earlier client has moved it, found no room elsewhere, and found it on its node again."""
    async with open_fake_fleet(folder, "a", "b") as fleet:
        async with connect(fleet=folder, session_id="s") as client:
            fleet["b"].node.max_live = 0
            await client.submit([make_spec("x")])
        MoveLog(folder, "s").append([Moved(job_id="x", node_id="a", attempt=2)])
        async with connect(fleet=folder, session_id="s") as client:
            assert (await client.cancel(["x"])).cancelled == ["x"]
            assert [(outcome.job_id, outcome.status) for outcome in await take(client)] == [("x", "cancelled")]


async def test_a_cancel_reaches_a_job_that_is_placed_while_nodes_are_told_of_it(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet, connect(fleet=folder) as client:
        await client.submit([make_spec(f"job-{n}") for n in range(2)])
        for name in ("a", "b"):
            fleet[name].node.max_live = len(fleet[name].node.live)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.submit, [make_spec("late")])
            await until(lambda: len(client.session_state.book.jobs) == 3)
            fleet["b"].node.cancel_gate = gate = trio.Event()
            nursery.start_soon(partial(client.cancel, whole_session=True))
            fleet["a"].node.max_live = 100
            await until(lambda: "late" in fleet["a"].node.attempts)
            gate.set()
        assert {outcome.status for outcome in await take(client)} == {"cancelled"}


async def test_a_job_that_was_cancelled_while_its_node_was_away_does_not_run_on_there(folder):
    async with open_fake_fleet(folder, "a") as fleet, connect(fleet=folder) as client:
        await fleet.add("b", restart_within_s=30.0)
        await until(lambda: client.node_id == "a,b")
        await until(lambda: not any(member.behind for member in client.session_state.members.values()))
        await client.submit([make_spec(f"job-{n}") for n in range(8)])
        kept = live(fleet, "b")
        assert kept
        await fleet["b"].kill()
        await lost(client, "b")
        assert (await client.cancel(kept)).cancelled == kept
        await fleet["b"].start()
        await until(lambda: not fleet["b"].node.live)
        finish_all(fleet, "a")
        outcomes = await take(client)
        assert sorted(outcome.job_id for outcome in outcomes if outcome.status == "cancelled") == kept
        assert len(outcomes) == 8


async def test_a_job_that_was_submitted_again_as_asked_has_one_outcome_for_all_clients(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet:
        gone = await jobs_of_an_earlier_client(fleet, folder)
        async with connect(fleet=folder, session_id="s") as client:
            await fleet["a"].kill()
            await lost(client, "a")
            finish_all(fleet, "b")
            with pytest.raises(SessionLost):
                await take(client)
            await client.submit([make_spec(job_id) for job_id in gone])
            finish_all(fleet, "b")
            assert sorted(outcome.job_id for outcome in await take(client)) == gone
        await fleet["a"].start()
        async with connect(fleet=folder, session_id="s") as client:
            await until(lambda: client.node_id == "a,b")
            finish_all(fleet, "a")
            assert await take(client) == []


async def test_a_moved_job_is_remembered_however_many_end_after_it(folder, monkeypatch):
    monkeypatch.setattr(book, "OVER_KEPT", 4)
    async with open_fake_fleet(folder, "a", "b") as fleet, connect(fleet=folder) as client:
        await client.submit([make_spec(f"job-{n}") for n in range(4)])
        assert fleet["a"].node.live
        await fleet["a"].kill()
        await fleet.wait_live(b=4)
        for first in range(4, 14):
            finish_all(fleet, "b")
            await client.submit([make_spec(f"job-{first}")])
        finish_all(fleet, "b")
        assert len(await take(client)) == 14
        await client.wait_written()
        await fleet["a"].start()
        await until(lambda: client.node_id == "a,b")
        finish_all(fleet, "a")
        assert await take(client) == []


async def test_a_node_that_is_cut_off_from_the_client_alone_keeps_no_job_from_the_others(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet, connect(fleet=folder) as client:
        # It has a link, and what it is asked goes nowhere.
        client.session_state.members["a"].client.room = trio.sleep_forever
        for number in range(3):
            with trio.fail_after(stretched(10.0)):
                (answer,) = await client.submit([make_spec(f"job-{number}")])
            assert isinstance(answer, Accepted)
            await trio.sleep(0.3)
        assert {f"job-{number}" for number in range(3)} <= fleet["b"].node.live.keys()


async def test_a_reader_that_follows_is_told_of_jobs_that_a_lost_node_took_along(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet:
        gone = await jobs_of_an_earlier_client(fleet, folder)
        async with connect(fleet=folder, session_id="s") as client:
            await fleet["a"].kill()
            finish_all(fleet, "b")
            with pytest.raises(SessionLost) as raised, trio.fail_after(20):
                async for _ in client.results(4, follow=True):
                    pass
            assert raised.value.job_ids == gone
