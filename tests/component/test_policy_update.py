"""A trainer gives the policy other weights over the WebSocket alone: on engines that look like vLLM, and on ones that
fail, or take their time, as the test says."""

from __future__ import annotations

import logging
import os

import pytest
import trio

from prorl_trio.client import (
    BlockingClient,
    PolicyUpdateFailed,
    connect,
    open_policy_update,
    policy_update,
)
from prorl_trio.types.backends import PauseBackends, RenewUpdate
from prorl_trio.types.errors import BackendsBusy, PauseTimeout, UpdateRefused
from support.fake_service import TOKEN, open_service
from support.faulty_proxy import FaultyProxy
from support.pausable_engine import A, B
from support.update_rig import (
    DEADLINE_S,
    assert_old,
    open_look_alikes,
    open_trainer,
    open_updated_node,
    sampled_as,
    update_and_fail,
    update_to,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def pool():
    async with open_updated_node(A, B) as node:
        yield node


# ---------------------------------------------------------------- engines that look like vLLM


async def test_every_engine_gets_the_weights_and_completions_the_version(tmp_path):
    async with open_look_alikes() as (node, client, engines):
        for mode, version in (("wait", "1"), ("abort", "2"), ("keep", "3")):
            async with client.policy_update(version, mode=mode, timeout_s=10) as update:
                assert [each.engine for each in update.report.backends] == ["paused", "paused"]
                assert all(engine.paused == mode for engine in engines)
                await update.load_folder(tmp_path / version, check="none")
            assert [engine.weights for engine in engines] == [str(tmp_path / version)] * 2
            assert [engine.weight_version for engine in engines] == [version] * 2
            assert [each.engine for each in update.report.backends] == ["resumed", "resumed"]
            assert not any(engine.paused for engine in engines)
            assert await sampled_as(node.backends) == version
            known = (await client.list_backends()).pool["backends"]
            assert [each["policy_version"] for each in known] == [version] * 2


async def test_one_that_fails_leaves_the_old_version_everywhere_and_is_named():
    async with open_look_alikes() as (node, client, (good, bad)):
        bad.bad_folders.add("/w/2")
        before = {"0": "fake-model", "1": "/w/1"}
        for version, folder in before.items():
            if version != "0":
                await update_to(client, version, folder)
            with pytest.raises(PolicyUpdateFailed, match=f"{bad.url}: POST /collective_rpc .* from /w/2") as caught:
                await update_to(client, "2", "/w/2")
            assert list(caught.value.failed) == [bad.url]
            assert "remove_backend" in str(caught.value)
            assert (good.weights, bad.weights) == (folder, folder)
            assert (good.paused, bad.paused) == (None, None)
            assert await sampled_as(node.backends) == version
            assert node.backends.versions.current == version


async def test_one_that_is_taken_out_holds_up_no_update():
    async with open_look_alikes() as (node, client, (good, bad)):
        bad.bad_folders.add("/w/1")
        with pytest.raises(PolicyUpdateFailed) as caught:
            await update_to(client, "1", "/w/1")
        for url in caught.value.failed:
            await client.remove_backend(url)
        await update_to(client, "1", "/w/1")
        assert (good.weights, await sampled_as(node.backends)) == ("/w/1", "1")


async def test_one_that_cannot_load_says_what_to_do():
    async with open_look_alikes(development=(True, False)) as (node, client, (good, other)):
        with pytest.raises(PolicyUpdateFailed, match=f"{other.url}: it loads no weights .*VLLM_SERVER_DEV_MODE=1"):
            await update_to(client, "1", "/w/1")
        assert (good.weights, await sampled_as(node.backends)) == ("fake-model", "0")


async def test_an_exception_in_the_block_leaves_the_old_version_everywhere():
    async with open_look_alikes() as (node, client, engines):
        seen = []
        with pytest.raises(ZeroDivisionError):
            await update_and_fail(client, lambda: seen.extend(engine.weights for engine in engines))
        assert seen == ["/w/1", "/w/1"]
        assert [engine.weights for engine in engines] == ["fake-model", "fake-model"]
        assert not any(engine.paused for engine in engines)
        assert await sampled_as(node.backends) == "0"


async def test_the_block_may_move_the_weights_by_other_means():
    async with open_look_alikes(development=(True, False)) as (node, client, _):
        async with client.policy_update("1"):
            assert node.backends.admission.closed
        assert await sampled_as(node.backends) == "1"


# ---------------------------------------------------------------- bad moments


async def test_a_load_that_failed_cannot_be_passed_over(pool):
    pool.engines[B].broken.add("load")
    async with open_trainer(pool) as client:

        async def pass_over():
            async with client.policy_update("1", timeout_s=5) as update:
                with pytest.raises(PolicyUpdateFailed):
                    await update.load_folder("/w/1", check="none")
                pool.engines[B].broken.clear()

        with pytest.raises(UpdateRefused, match=B):
            await pass_over()
    assert_old(pool)


async def test_one_that_cannot_be_paused_is_named_and_the_others_go_on(pool):
    pool.engines[B].broken.add("pause")
    async with open_trainer(pool) as client:
        with pytest.raises(PolicyUpdateFailed, match=f"{B}: out of order"):
            await update_to(client, "1", "/w/1")
    assert pool.engines[A].told == ["wait", "resume"]
    assert_old(pool)


async def test_one_whose_load_never_ends_is_named_and_the_old_version_stays_everywhere(pool):
    pool.engines[B].silent.add("load /w/1")
    async with open_trainer(pool) as client:
        with pytest.raises(PolicyUpdateFailed, match=f"{B}: no answer"):
            await update_to(client, "1", "/w/1", timeout_s=2)
    assert_old(pool)


async def test_a_pause_that_takes_too_long_or_comes_across_another_changes_nothing(pool):
    pool.engines[B].silent.add("pause")
    async with open_trainer(pool) as client:
        with pytest.raises(PauseTimeout, match=B):
            await update_to(client, "1", "/w/1", timeout_s=0.05)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.backends.operate, PauseBackends("keep", 20))
            while not pool.backends.admission.closed:
                await trio.sleep(0.01)
            with pytest.raises(BackendsBusy):
                await update_to(client, "1", "/w/1")
            assert pool.backends.admission.closed, "whoever pauses goes on with it"
            nursery.cancel_scope.cancel()
    assert_old(pool)


@pytest.mark.parametrize("where", ["pause", "block", "load", "resume"])
async def test_cancelled_anywhere_it_is_resumed(where, pool):
    engine = pool.engines[B]
    async with open_trainer(pool) as client, trio.open_nursery() as nursery:
        there = trio.Event()

        async def update():
            async with client.policy_update("1", timeout_s=10) as update:
                engine.silent.discard("pause")
                if where == "block":
                    there.set()
                    await trio.sleep_forever()
                if where == "load":
                    engine.call_s = 1000.0
                await update.load_folder("/w/1", check="none")
                if where == "resume":
                    engine.silent.add("resume")

        if where == "pause":
            engine.silent.add("pause")
        nursery.start_soon(update)
        match where:
            case "pause":
                while not pool.backends.admission.closed:
                    await trio.sleep(0.01)
            case "block":
                await there.wait()
            case "load":
                while "load /w/1" not in engine.told:
                    await trio.sleep(0.01)
            case "resume":
                while pool.backends.versions.current != "1":
                    await trio.sleep(0.01)
        engine.silent.discard("resume")
        engine.call_s = 0.0
        nursery.cancel_scope.cancel()
    if where == "resume":  # it had been announced: the new one is everywhere
        assert [each.policy_version for each in pool.backends.list()] == ["1", "1"]
        assert [each.weights for each in pool.engines.values()] == ["/w/1", "/w/1"]
        assert not pool.backends.admission.closed
    else:
        assert_old(pool)


async def test_an_engine_that_does_not_get_its_weights_back_is_named_in_the_log(pool, caplog):
    engine = pool.engines[B]
    async with open_trainer(pool) as client:
        with pytest.raises(ZeroDivisionError), caplog.at_level(logging.ERROR):
            await update_and_fail(client, lambda: engine.broken.add("load first"))
    assert f"backend {B} is given no tasks until it has its weights again: {B}: out of order" in caplog.text
    assert pool.listed(B).suspended
    assert not pool.listed(A).suspended


async def test_a_lost_connection_does_not_end_an_update(pool):
    with trio.fail_after(DEADLINE_S):
        async with open_service(pool) as service, trio.open_nursery() as nursery:
            proxy = FaultyProxy(service.host, service.port)
            port = await nursery.start(proxy.serve)
            async with (
                connect(f"ws://127.0.0.1:{port}", TOKEN) as client,
                client.policy_update("1", timeout_s=10) as update,
            ):
                proxy.cut_all()
                await update.load_folder("/w/1", check="none")
                proxy.cut_all()
            nursery.cancel_scope.cancel()
    assert [each.policy_version for each in pool.backends.list()] == ["1", "1"]
    assert not pool.backends.admission.closed


# ---------------------------------------------------------------- without trio


async def test_the_same_in_plain_calls(pool):
    def train(url):
        with BlockingClient(url, TOKEN) as client:
            with client.policy_update("1", mode="abort", timeout_s=10) as update:
                update.load_folder("/w/1", check="none")
            pool.engines[B].broken.add("load /w/2")
            with pytest.raises(PolicyUpdateFailed, match=B), client.policy_update("2") as update:
                update.load_folder("/w/2", check="none")
            with pytest.raises(KeyboardInterrupt), client.policy_update("2"):
                raise KeyboardInterrupt
            assert client.pause("keep", timeout_s=5).paused
            assert not client.resume().paused
            return client.list_backends().urls

    with trio.fail_after(DEADLINE_S):
        async with open_service(pool) as service:
            assert await trio.to_thread.run_sync(train, service.url) == [A, B]
    assert [each.policy_version for each in pool.backends.list()] == ["1", "1"]
    assert [each.weights for each in pool.engines.values()] == ["/w/1", "/w/1"]
    assert not pool.backends.admission.closed


# ---------------------------------------------------------------- who updates, and for how long


@pytest.fixture
async def watched(pool):
    """The same node, which looks after the leases of updates."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pool.backends.watch)
        yield pool
        nursery.cancel_scope.cancel()


async def test_a_block_keeps_its_lease_for_as_long_as_it_may_last(watched, monkeypatch):
    monkeypatch.setattr(policy_update, "LEASE_S", 3.0)
    monkeypatch.setattr(policy_update, "RENEWALS", 60)
    renewed, enough = [], trio.Event()
    operate = watched.backends.operate

    async def count(request):
        if isinstance(request, RenewUpdate):
            renewed.append(request.holder)
            if len(renewed) == 70:
                enough.set()
        return await operate(request)

    monkeypatch.setattr(watched.backends, "operate", count)
    async with open_trainer(watched) as client:
        async with client.policy_update("1", timeout_s=20) as update:
            await enough.wait()
            await update.load_folder("/w/1", check="none")
        (holder,) = set(renewed)
        assert f"pid {os.getpid()} to version 1" in holder
    assert {each.policy_version for each in watched.backends.list()} == {"1"}


async def test_a_block_that_never_ends_is_given_up_by_the_node(watched, monkeypatch, caplog):
    monkeypatch.setattr(policy_update, "LEASE_S", 0.6)

    async def hang(client):
        async with client.policy_update("1", timeout_s=20, max_idle_s=1.5) as update:
            await update.load_folder("/w/1", check="none")
            while watched.backends.admission.closed:
                await trio.sleep(0.01)
            assert_old(watched)
            await update.load_folder("/w/1", check="none")

    async with open_trainer(watched) as client:
        with caplog.at_level(logging.ERROR), pytest.raises(UpdateRefused, match="its lease was not renewed in time"):
            await hang(client)
    assert_old(watched)
    assert "the update to 1 had no step for 1.5 s" in caplog.text
    assert "to version 1 " in caplog.text
    assert "is given up" in caplog.text


async def test_a_trainer_that_is_gone_holds_up_nobody(watched):
    async with open_trainer(watched) as client:
        await client.pause("keep", holder="one", lease_s=2.0)
        await client.load_weights("/w/1", holder="one")
    while watched.backends.admission.closed:  # the test's own limit is around it
        await trio.sleep(0.01)
    assert_old(watched)


async def test_the_second_of_two_trainers_is_told_who_the_first_is(pool):
    async with open_trainer(pool) as one, open_trainer(pool) as two, one.policy_update("1") as update:
        with pytest.raises(
            BackendsBusy, match=rf"the policy update of .* pid {os.getpid()} to version 1 .* is under way"
        ):
            await update_to(two, "2", "/w/2")
        await update.load_folder("/w/1", check="none")
    assert [engine.weights for engine in pool.engines.values()] == ["/w/1", "/w/1"]
    assert [engine.label for engine in pool.engines.values()] == ["1", "1"]


# ---------------------------------------------------------------- what engines say, and several nodes


async def test_an_engine_that_says_otherwise_ends_the_update_before_work_goes_on(pool):
    pool.engines[B].lies = "0"
    async with open_trainer(pool) as client:
        with pytest.raises(PolicyUpdateFailed, match=f"{B}: it says that its weights are 0, and not 1") as caught:
            await update_to(client, "1", "/w/1")
    assert list(caught.value.failed) == [B]
    assert_old(pool)
    assert [engine.label for engine in pool.engines.values()] == ["0", "0"]


async def test_weights_that_the_trainer_moves_itself_count_when_every_engine_says_so(pool):
    async def move(client, *engines):
        async with client.policy_update("1") as update, update.transfer():
            for engine in engines:
                engine.weights, engine.label = "moved", "1"

    one, other = pool.engines.values()
    async with open_trainer(pool) as client:
        with pytest.raises(PolicyUpdateFailed, match=f"{B}: it says that its weights are 0, and not 1"):
            await move(client, one)
        assert_old(pool)
        await move(client, one, other)
        assert await sampled_as(pool.backends) == "1"
    assert [engine.weights for engine in pool.engines.values()] == ["moved", "moved"]


async def test_a_transfer_that_breaks_off_is_taken_back(pool):
    async def break_off(client):
        async with client.policy_update("1") as update, update.transfer():
            pool.engines[A].weights = "half of them"
            raise ZeroDivisionError

    async with open_trainer(pool) as client:
        with pytest.raises(ZeroDivisionError):
            await break_off(client)
    assert_old(pool)


async def test_an_engine_that_does_not_say_what_it_has_cannot_be_checked():
    async with open_look_alikes(development=(True, False)) as (node, client, (_, other)):
        with pytest.raises(PolicyUpdateFailed, match=f"{other.url}: it says that its weights are 0, and not 1"):
            async with client.policy_update("1") as update, update.transfer():
                pass
        assert node.backends.policy_version == "0"


@pytest.fixture
async def second():
    async with open_updated_node(A) as node:
        yield node


@pytest.mark.parametrize("broken", ["", "pause", "load", "label"])
async def test_all_nodes_are_updated_or_none(pool, second, broken):
    second.engines[A].broken.add(broken)
    async with open_trainer(pool) as one, open_trainer(second) as other:
        if not broken:
            async with open_policy_update([one, other], "1") as update:
                await update.load_folder("/w/1", check="none")
                assert [each.url for each in update.report.backends] == [A, B, A]
            nodes = (pool, second)
            assert {each.policy_version for node in nodes for each in node.backends.list()} == {"1"}
            return
        with pytest.raises(PolicyUpdateFailed, match=f"{A}: out of order"):
            async with open_policy_update([one, other], "1") as update:
                await update.load_folder("/w/1", check="none")
    assert_old(pool)
    assert second.engines[A].weights == ("" if broken == "load" else "first")


async def test_a_node_that_somebody_else_updates_holds_up_all_of_them_and_nothing_changes(pool, second):
    async with open_trainer(pool) as one, open_trainer(second) as other, other.policy_update("2"):
        with pytest.raises(BackendsBusy, match="to version 2"):
            async with open_policy_update([one, other], "1"):
                pass
        assert_old(pool)
        assert second.backends.admission.closed


async def test_a_transfer_in_plain_calls(pool):
    def train(url):
        with BlockingClient(url, TOKEN) as client, client.policy_update("1") as update, update.transfer():
            for engine in pool.engines.values():
                engine.weights, engine.label = "moved", "1"

    with trio.fail_after(DEADLINE_S):
        async with open_service(pool) as service:
            await trio.to_thread.run_sync(train, service.url)
    assert {each.policy_version for each in pool.backends.list()} == {"1"}
