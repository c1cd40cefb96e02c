"""Nodes of a fleet are killed, freeze, are cut off and come back: nothing is lost, and nothing comes twice."""

from __future__ import annotations

import msgspec
import pytest
import trio

from ipc.session import Accepted
from prorl_trio.client import ConnectionLost, SessionLost, connect
from prorl_trio.client.fleet.moves import Delivered, Moved, MoveLog
from prorl_trio.rendezvous.folder import write_entry
from prorl_trio.types.errors import Draining
from support.fake_fleet import finish_all, open_fake_fleet, take, watch_quickly
from support.fake_node import make_outcome, make_spec

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    watch_quickly(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "f"


def specs_of(count, first=0):
    return [make_spec(f"job-{n}") for n in range(first, first + count)]


async def say_nothing(_stream):
    await trio.sleep_forever()


def ids(outcomes):
    return sorted(outcome.job_id for outcome in outcomes)


async def test_the_jobs_of_a_killed_node_run_elsewhere_as_their_next_attempt(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet, connect(fleet=folder) as client:
        await client.submit(specs_of(8))
        lost = fleet.where()["a"]
        assert lost
        await fleet["a"].kill()
        await fleet.wait_live(b=8)
        assert {fleet["b"].node.attempts[job_id] for job_id in lost} == {2}
        finish_all(fleet, "b")
        assert ids(await take(client)) == ids(map(make_outcome, specs_of(8)))


async def test_a_node_that_comes_back_with_its_outcomes_doubles_none(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet, connect(fleet=folder) as client:
        await client.submit(specs_of(8))
        lost = fleet.where()["a"]
        await fleet["a"].kill()
        await fleet.wait_live(b=8)
        fleet["a"].node.finish(lost[0])  # it was only cut off: it goes on, and this one ends there first
        fleet["b"].node.finish(lost[1])
        await fleet["a"].start()
        await fleet.wait_live(a=0)  # those that run on b now are withdrawn
        await fleet.wait_live(b=6)  # and that which ended on a is withdrawn there
        finish_all(fleet, "b")
        assert ids(await take(client)) == ids(map(make_outcome, specs_of(8)))
        assert not client.outstanding


@pytest.mark.parametrize("is_withdrawn", [True, False])
async def test_jobs_come_back_to_a_node_whose_copies_of_them_were_withdrawn(folder, is_withdrawn):
    async with open_fake_fleet(folder, "a", "b", within_s=30) as fleet, connect(fleet=folder) as client:
        await client.submit(specs_of(8))
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


async def keep_finishing(fleet, name):
    while True:
        await trio.sleep(0.2)
        finish_all(fleet, name)


async def test_outcomes_that_were_given_out_before_the_loss_do_not_come_again(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet, connect(fleet=folder) as client:
        await client.submit(specs_of(8))
        finish_all(fleet, "a")
        first = await take(client, 2)
        await fleet["a"].kill()
        await fleet["a"].start()
        finish_all(fleet)
        rest = await take(client)
        assert ids(first + rest) == ids(map(make_outcome, specs_of(8)))


async def test_a_frozen_node_is_lost_and_is_taken_back_when_it_thaws(folder):
    async with open_fake_fleet(folder, "b") as fleet:
        await fleet.add("a", stale_after_s=0.5)
        async with connect(fleet=folder, heartbeat_interval_s=0.05, heartbeat_timeout_s=0.3) as client:
            await freeze_and_thaw(fleet, client)


async def freeze_and_thaw(fleet, client):
    await client.submit(specs_of(4))
    port = int(fleet["a"].service.url.rpartition(":")[2])
    await fleet["a"].cut()
    async with trio.open_nursery() as nursery:
        # Its kernel takes connections, and nobody answers.
        listeners = await nursery.start(trio.serve_tcp, say_nothing, port)
        assert listeners
        await fleet.wait_live(b=4)
        nursery.cancel_scope.cancel()
    await fleet["a"].start()
    while "a" not in (await client.status())["nodes"]:
        await trio.sleep(0.02)
    count = 4
    while not fleet["a"].node.live:  # it may seem frozen once more where there is no CPU for it
        await client.submit(specs_of(8, first=count))
        count += 8
    finish_all(fleet)
    assert ids(await take(client, count)) == ids(map(make_outcome, specs_of(count)))


async def test_a_node_that_leaves_is_given_no_more_and_its_jobs_are_moved(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet, connect(fleet=folder) as client:
        await client.submit(specs_of(4))
        await fleet["a"].leave()
        await fleet.wait_live(b=4)
        await client.submit(specs_of(4, first=4))
        assert len(fleet["b"].node.live) == 8
        finish_all(fleet, "b")
        assert len(await take(client)) == 8


async def test_jobs_that_a_shutdown_cut_go_on_elsewhere(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet, connect(fleet=folder) as client:
        await client.submit(specs_of(4))
        cut = fleet.where()["a"]
        fleet["a"].node.draining = True
        fleet["a"].sessions.journal.end_cut_jobs()
        for job_id in cut:
            bare = make_outcome(fleet["a"].node.live[job_id], reward=None)
            ended = msgspec.structs.replace(bare, status="cancelled", cause="cancelled", error_code="shutdown")
            fleet["a"].node.finish(job_id, ended)
        await fleet.wait_live(b=4)
        finish_all(fleet, "b")
        outcomes = await take(client)
        assert ids(outcomes) == ids(map(make_outcome, specs_of(4)))
        assert {outcome.status for outcome in outcomes} == {"completed"}


async def test_a_draining_node_is_passed_over(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet, connect(fleet=folder) as client:
        fleet["a"].node.draining = True
        answers = await client.submit(specs_of(6))
        assert all(isinstance(answer, Accepted) for answer in answers)
        assert len(fleet["b"].node.live) == 6


async def test_a_node_that_has_no_time_left_for_a_job_is_passed_over(folder, monkeypatch):
    async with open_fake_fleet(folder, "a", "b") as fleet, connect(fleet=folder) as client:

        def check(*_):
            raise Draining("the node's allocation ends")

        monkeypatch.setattr(fleet["a"].node, "check", check)
        answers = await client.submit(specs_of(6))
        assert all(isinstance(answer, Accepted) for answer in answers)
        assert len(fleet["b"].node.live) == 6


async def test_jobs_that_wait_for_the_next_start_of_their_node_are_left_to_it(folder):
    async with open_fake_fleet(folder, "a") as fleet, connect(fleet=folder) as client:
        await fleet.add("b", restart_within_s=30.0)
        while (await client.status())["fleet"]["nodes"].get("b", {}).get("behind", "not there"):
            await trio.sleep(0.02)
        await client.submit(specs_of(8))
        kept = fleet.where()["b"]
        assert kept
        await fleet["b"].kill()
        while "b" in (await client.status())["nodes"]:
            await trio.sleep(0.02)
        await fleet["b"].start()
        finish_all(fleet)
        assert ids(await take(client)) == ids(map(make_outcome, specs_of(8)))
        assert not set(kept) & {spec.job_id for spec in fleet["a"].node.submitted}


async def test_jobs_that_the_next_start_of_their_node_does_not_have_are_moved(folder):
    """It has another disk, say: Slurm has started it on another machine."""
    async with open_fake_fleet(folder, "a") as fleet, connect(fleet=folder) as client:
        await fleet.add("b", restart_within_s=90.0)
        while len((await client.status())["nodes"]) < 2:
            await trio.sleep(0.02)
        await client.submit(specs_of(8))
        kept = fleet.where()["b"]
        assert kept
        await fleet["b"].kill()
        while "b" in (await client.status())["nodes"]:
            await trio.sleep(0.02)
        fleet["b"].forget()
        await fleet["b"].start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_finishing, fleet, "a")
            nursery.start_soon(keep_finishing, fleet, "b")
            outcomes = await take(client)
            nursery.cancel_scope.cancel()
        assert ids(outcomes) == ids(map(make_outcome, specs_of(8)))
        attempts = [fleet[name].node.attempts.get(job_id, 0) for job_id in kept for name in ("a", "b")]
        assert attempts.count(2) == len(kept)


@pytest.mark.parametrize("forgets", [False, True])
async def test_jobs_of_an_earlier_client_wait_for_the_next_start_of_their_node_too(folder, forgets):
    async with open_fake_fleet(folder, "b") as fleet:
        await fleet.add("a", restart_within_s=90.0)
        async with connect(fleet=folder, session_id="s") as client:
            await client.submit(specs_of(4))
        lost = fleet.where()["a"]
        assert lost
        async with connect(fleet=folder, session_id="s") as client, trio.open_nursery() as nursery:
            await fleet["a"].kill()
            while "a" in (await client.status())["nodes"]:
                await trio.sleep(0.02)
            finish_all(fleet, "b")
            assert len(await take(client, 4 - len(lost))) == 4 - len(lost)
            assert client.outstanding
            if forgets:
                fleet["a"].forget()
            await fleet["a"].start()
            if forgets:
                with pytest.raises(SessionLost) as raised:
                    await take(client)
                assert raised.value.job_ids == lost
            else:
                nursery.start_soon(keep_finishing, fleet, "a")
                assert ids(await take(client)) == lost
            nursery.cancel_scope.cancel()


async def test_a_client_that_was_killed_gives_no_moved_job_out_twice(folder):
    class Killed(Exception):
        pass

    async with open_fake_fleet(folder, "a", "b") as fleet:
        try:
            async with connect(fleet=folder, session_id="s") as client:
                await client.submit(specs_of(4))
                lost = fleet.where()["a"]
                await fleet["a"].kill()
                await fleet.wait_live(b=4)
                finish_all(fleet, "b")
                first = await take(client, 4)
                client.acknowledge(client.cursor)
                await client.wait_written()
                raise Killed
        except Killed:
            pass
        finish_all(fleet, "a")  # it has outcomes of its own of the moved jobs
        await fleet["a"].start()
        async with connect(fleet=folder, session_id="s") as client:
            again = await take(client)
        assert ids(first) == ids(map(make_outcome, specs_of(4)))
        assert not set(ids(again)) & set(lost)


async def test_jobs_of_an_earlier_client_on_a_lost_node_are_named(folder):
    async with open_fake_fleet(folder, "a", "b") as fleet:
        async with connect(fleet=folder, session_id="s") as client:
            await client.submit(specs_of(4))
        lost = fleet.where()["a"]
        async with connect(fleet=folder, session_id="s") as client:
            await fleet["a"].kill()
            while "a" in (await client.status())["nodes"]:
                await trio.sleep(0.02)
            finish_all(fleet, "b")
            with pytest.raises(SessionLost) as raised:
                await take(client)
            assert raised.value.job_ids == lost
            answers = await client.submit([make_spec(job_id) for job_id in lost])
            assert all(isinstance(answer, Accepted) for answer in answers)
            assert {fleet["b"].node.attempts[job_id] for job_id in lost} == {2}
            finish_all(fleet, "b")
            assert ids(await take(client)) == lost


async def test_a_fleet_without_nodes_is_told_in_the_end(folder):
    async with open_fake_fleet(folder, "a") as fleet, connect(fleet=folder, reconnect_timeout_s=0.3) as client:
        await client.submit(specs_of(2))
        await fleet["a"].kill()
        with pytest.raises(ConnectionLost, match="no node of the fleet"):
            await take(client)


async def test_an_entry_half_written_or_of_a_port_that_is_anothers_harms_nobody(folder, caplog):
    async with open_fake_fleet(folder, "a", "b") as fleet:
        (folder / "half.json").write_bytes(b'{"node_id": "half", "url": "ws')
        (folder / "half.json").chmod(0o600)
        write_entry(folder, msgspec.structs.replace(fleet["a"].entry, node_id="impostor"))
        async with connect(fleet=folder) as client:
            assert sorted((await client.status())["nodes"]) == ["a", "b"]
            assert "that of node a now" in (await client.status())["fleet"]["left_out"]["impostor"]
            await client.submit(specs_of(4))
            finish_all(fleet)
            assert len(await take(client)) == 4


def test_the_log_of_moves_survives_a_killed_writer(tmp_path):
    log = MoveLog(tmp_path, "a/session")
    assert log.read() == []
    moved = Moved(job_id="x", node_id="a", attempt=2)
    log.append([moved])
    with log.path.open("ab") as file:
        file.write(b'{"type": "Moved", "job')
    log.append([Delivered(job_id="x")])
    assert log.read() == [moved, Delivered(job_id="x")]
    assert log.path.stat().st_mode & 0o777 == 0o600
    assert log.path.parent.parent == tmp_path
