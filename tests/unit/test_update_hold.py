"""Updates of the policy, one at a time: who has the pool, for how long, and what engines must say before it goes on."""

from __future__ import annotations

import logging

import pytest
import trio

from prorl_trio.inference.pool.control import EngineControl
from prorl_trio.inference.pool.policy_update import UpdateHolder
from prorl_trio.inference.pool.versions import VersionOrder
from prorl_trio.types.backends import (
    ConfirmWeights,
    ExpectTransfer,
    LoadAdapter,
    LoadWeights,
    PauseBackends,
    RenewUpdate,
    ResumeBackends,
)
from prorl_trio.types.errors import BackendsBusy, UpdateRefused
from support.cancel_sweep import cancel_sweep
from support.pausable_engine import A, B, C, PausableEngine, complete, open_pool, versions

pytestmark = pytest.mark.timeout(60)

LEASE_S = 30.0


def answers(report):
    return {each.url: each.engine for each in report.backends}


async def hold(pool, holder="one", lease_s=LEASE_S):
    return await pool.backends.operate(PauseBackends("keep", 5, holder, lease_s))


def assert_old(pool):
    assert not pool.backends.admission.closed
    assert [pool.engines[url].weights for url in (A, B)] == ["first", "first"]
    assert [pool.engines[url].label for url in (A, B)] == ["0", "0"]
    assert all(pool.engines[url].running.is_set() for url in (A, B))
    assert {each.policy_version for each in pool.backends.list()} == {"0"}


# ---------------------------------------------------------------- leases


async def test_the_update_of_a_trainer_that_is_gone_is_given_up(autojump_clock, caplog):
    async with open_pool(A, B) as pool, pool.backends.lease("t") as lease:
        await hold(pool)
        await pool.backends.operate(LoadWeights("/w/1", 5, "one"))
        assert pool.backends.statistics()["updating"] == "one"
        with caplog.at_level(logging.ERROR):
            assert versions(await complete(lease)) == [("0", 0, 1)]  # as soon as the pause is over
        assert trio.current_time() == pytest.approx(LEASE_S + 4, abs=4)
        assert_old(pool)
        assert "the policy update of one is given up" in caplog.text
        assert pool.backends.statistics()["updating"] == ""
        with pytest.raises(UpdateRefused, match="the policy update of one is over"):
            await pool.backends.operate(LoadWeights("/w/1", 5, "one"))
        with pytest.raises(UpdateRefused, match="the policy update of one is over"):
            await pool.backends.operate(RenewUpdate("one"))
        with pytest.raises(UpdateRefused, match="the policy update of one is over"):
            await pool.backends.operate(ResumeBackends("1", "one"))
        await pool.backends.operate(ResumeBackends(None, "one"))
        assert_old(pool)


async def test_steps_and_renewals_keep_it_and_a_step_may_take_longer_than_the_lease(autojump_clock):
    async with open_pool(A, B) as pool:
        await hold(pool)
        for _ in range(5):
            await trio.sleep(LEASE_S * 0.9)
            await pool.backends.operate(RenewUpdate("one"))
        pool.engines[A].call_s = 3 * LEASE_S
        await pool.backends.operate(LoadWeights("/w/1", 1000, "one"))
        await trio.sleep(LEASE_S * 0.9)
        report = await pool.backends.operate(ResumeBackends("1", "one"))
        assert answers(report) == {A: "resumed", B: "resumed"}
        assert not report.paused
        await trio.sleep(3 * LEASE_S)
        assert {each.policy_version for each in pool.backends.list()} == {"1"}


async def test_a_lease_does_not_run_out_in_a_step_whatever_else_is_new_meanwhile(autojump_clock):
    holder = UpdateHolder()
    holder.take("one", LEASE_S)
    holder.begin_step()
    await trio.sleep(2 * LEASE_S)
    with trio.move_on_after(LEASE_S) as waited:
        await holder.wait_lost()
    assert waited.cancelled_caught
    holder.end_step()
    began_s = trio.current_time()
    assert (await holder.wait_lost()).holder == "one"
    assert trio.current_time() - began_s == pytest.approx(LEASE_S)


async def test_a_hold_without_a_lease_is_never_lost(autojump_clock):
    holder = UpdateHolder()
    holder.take("one", None)
    with trio.move_on_after(4000) as waited:
        await holder.wait_lost()
    assert waited.cancelled_caught


async def test_without_a_lease_it_lasts(autojump_clock):
    async with open_pool(A, B) as pool:
        await hold(pool, lease_s=None)
        await trio.sleep(4000)
        assert pool.backends.admission.closed


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("how", ["lost", "undone", "done"])
async def test_a_pause_that_an_operator_asked_for_outlasts_an_update(autojump_clock, when, how):
    async with open_pool(A, B) as pool:
        if when == "before":
            await pool.backends.operate(PauseBackends("keep", 5))
        await hold(pool)
        if when == "meanwhile":
            await pool.backends.operate(PauseBackends("keep", 5))
        await pool.backends.operate(LoadWeights("/w/1", 5, "one"))
        if how == "lost":
            await trio.sleep(2 * LEASE_S)
        else:
            report = await pool.backends.operate(ResumeBackends("1" if how == "done" else None, "one"))
            assert report.paused
        assert pool.backends.admission.closed
        assert not pool.engines[A].running.is_set()
        assert pool.engines[A].weights == ("/w/1" if how == "done" else "first"), "the weights do not wait for it"
        await trio.sleep(10 * LEASE_S)
        assert pool.out() == set()
        report = await pool.backends.operate(ResumeBackends())
        assert answers(report) == {A: "resumed", B: "resumed"}
        if how != "done":
            assert_old(pool)


async def test_an_operators_resume_in_an_update_ends_the_operators_pause_only(autojump_clock):
    async with open_pool(A, B) as pool:
        await hold(pool)
        await pool.backends.operate(PauseBackends("keep", 5))
        assert (await pool.backends.operate(ResumeBackends())).paused
        with pytest.raises(BackendsBusy, match="the policy update of one is under way, with a lease of 30 s more"):
            await pool.backends.operate(ResumeBackends())
        assert not (await pool.backends.operate(ResumeBackends(None, "one"))).paused
        assert_old(pool)


# ---------------------------------------------------------------- two trainers


async def test_two_trainers_do_not_interleave(autojump_clock):
    async with open_pool(A, B) as pool:
        await hold(pool)
        busy = "the policy update of one is under way"
        with pytest.raises(BackendsBusy, match=busy):
            await hold(pool, "two")
        for holder in ("two", ""):
            with pytest.raises(BackendsBusy, match=busy):
                await pool.backends.operate(LoadWeights("/w/2", 5, holder))
            with pytest.raises(BackendsBusy, match=busy):
                await pool.backends.operate(ExpectTransfer(5, holder))
            with pytest.raises(BackendsBusy, match=busy):
                await pool.backends.operate(ConfirmWeights("2", 5, holder))
            with pytest.raises(BackendsBusy, match=busy):
                await pool.backends.operate(ResumeBackends("2", holder))
        await pool.backends.operate(ResumeBackends(None, "two"))  # there is nothing of it to undo
        assert pool.backends.admission.closed
        await pool.backends.operate(LoadWeights("/w/1", 5, "one"))
        await pool.backends.operate(ResumeBackends("1", "one"))
        await hold(pool, "two")
        await pool.backends.operate(ResumeBackends("2", "two"))
        assert {each.policy_version for each in pool.backends.list()} == {"2"}


async def test_who_pauses_is_named_to_who_comes_meanwhile(autojump_clock):
    async with open_pool(A, B) as pool, trio.open_nursery() as nursery:
        pool.engines[A].silent.add("pause")
        nursery.start_soon(hold, pool)
        await trio.sleep(1)
        with pytest.raises(BackendsBusy, match="under way, by one"):
            await hold(pool, "two")
        nursery.cancel_scope.cancel()
    assert pool.backends.statistics()["updating"] == ""


async def test_steps_that_are_asked_for_again_after_a_lost_connection_are_the_same_steps(autojump_clock):
    async with open_pool(A, B) as pool:
        await hold(pool)
        await hold(pool)
        for _ in range(2):
            await pool.backends.operate(LoadWeights("/w/1", 5, "one"))
        for _ in range(2):
            assert not (await pool.backends.operate(ResumeBackends("1", "one"))).paused
        assert pool.engines[A].weights == "/w/1"


async def test_an_update_cancelled_at_any_step_is_undone_or_whole(autojump_clock):
    async with open_pool(A, B) as pool:

        async def update():
            await hold(pool)
            await pool.backends.operate(LoadWeights("/w/1", 5, "one"))
            await pool.backends.operate(ConfirmWeights("0", 5, "one"))
            await pool.backends.operate(ResumeBackends("0", "one"))

        async def check_over(run):
            await pool.backends.operate(ResumeBackends(None, "one"))
            assert not pool.backends.admission.closed
            assert all(pool.engines[url].running.is_set() for url in (A, B))
            assert len({pool.engines[url].weights for url in (A, B)}) == 1
            assert [pool.engines[url].label for url in (A, B)] == ["0", "0"]

        assert await cancel_sweep(update, check_over) > 6


# ---------------------------------------------------------------- what engines say


async def test_an_engine_that_says_that_it_has_others_is_refused_and_the_old_version_comes_back(autojump_clock):
    async with open_pool(A, B) as pool:
        await pool.backends.operate(PauseBackends("keep", 5))
        await pool.backends.operate(LoadWeights("/w/1", 5))
        pool.engines[B].lies = "0"
        report = await pool.backends.operate(ConfirmWeights("1", 5))
        assert answers(report) == {A: "confirmed", B: "failed"}
        with pytest.raises(UpdateRefused, match=f"{B}: it says that its weights are 0, and not 1"):
            await pool.backends.operate(ResumeBackends("1"))
        assert pool.backends.admission.closed
        assert pool.backends.policy_version == "0"
        assert pool.engines[A].label == "1"
        pool.engines[B].lies = ""
        await pool.backends.operate(ResumeBackends())
        assert_old(pool)


async def test_one_that_does_not_get_its_old_name_back_takes_no_tasks_until_it_has_it(autojump_clock):
    """Its tokens would be said to be of the version that was given up."""
    async with open_pool(A, B) as pool:
        await pool.backends.operate(PauseBackends("keep", 5))
        await pool.backends.operate(ConfirmWeights("1", 5))
        pool.engines[B].broken.add("label")
        assert answers(await pool.backends.operate(ResumeBackends())) == {A: "resumed", B: "failed"}
        assert pool.out() == {B}
        pool.engines[B].broken.clear()
        await trio.sleep(60)
        assert pool.out() == set()
        assert_old(pool)


async def test_weights_that_the_trainer_moves_are_on_trial_as_well(autojump_clock):
    async with open_pool(A, B) as pool:
        await hold(pool)
        await pool.backends.operate(ExpectTransfer(5, "one"))
        with pytest.raises(UpdateRefused, match="did not load its new weights"):
            await pool.backends.operate(ResumeBackends("1", "one"))
        pool.engines[A].label, pool.engines[A].weights = "1", "moved"
        report = await pool.backends.operate(ConfirmWeights("1", 5, "one", tell=False))
        assert answers(report) == {A: "confirmed", B: "failed"}
        assert report.backends[1].error == f"{B}: it says that its weights are 0, and not 1"
        await pool.backends.operate(ResumeBackends(None, "one"))
        assert_old(pool)
        await hold(pool, "two")
        await pool.backends.operate(ExpectTransfer(5, "two"))
        for url in (A, B):
            pool.engines[url].label, pool.engines[url].weights = "1", "moved"
        assert answers(await pool.backends.operate(ConfirmWeights("1", 5, "two", tell=False))) == {
            A: "confirmed",
            B: "confirmed",
        }
        await pool.backends.operate(ResumeBackends("1", "two"))
        assert {each.policy_version for each in pool.backends.list()} == {"1"}
        await hold(pool, "three")  # those have no folder to be put back from
        await pool.backends.operate(ExpectTransfer(5, "three"))
        report = await pool.backends.operate(ResumeBackends(None, "three"))
        assert answers(report) == {A: "failed", B: "failed"}
        assert f"{A}: it may have weights that the trainer moved there" in report.backends[0].error
        assert pool.out() == {A, B}


async def test_one_that_is_added_while_others_are_asked_is_asked_as_well(autojump_clock):
    async with open_pool(A, B) as pool, trio.open_nursery() as nursery:
        await pool.backends.operate(PauseBackends("keep", 5))
        pool.engines[A].silent.add("read label")
        nursery.start_soon(pool.backends.operate, ResumeBackends("1"))
        await trio.sleep(1)
        await pool.backends.add(C)
        await trio.sleep(60)
        assert pool.engines[C].label == "1"


# ---------------------------------------------------------------- adapters


def adapters(pool, url=A):
    return list(pool.engines[url].adapters), pool.engines[url].adapter


async def adapt(pool, version, *, mode="wait"):
    await pool.backends.operate(PauseBackends(mode, 5))
    return await pool.backends.operate(LoadAdapter(f"lora-v{version}", f"/w/{version}", 5))


async def test_an_adapter_is_used_from_the_resume_on_and_the_one_before_is_unloaded(autojump_clock):
    async with open_pool(A, B) as pool, pool.backends.lease("t") as lease:
        for version in ("1", "2"):
            assert answers(await adapt(pool, version)) == {A: "loaded", B: "loaded"}
            assert pool.engines[A].adapter != f"lora-v{version}"
            await pool.backends.operate(ResumeBackends(version))
            assert adapters(pool) == ([f"lora-v{version}"], f"lora-v{version}")
            assert versions(await complete(lease)) == [(version, 0, 1)]
        await pool.backends.operate(PauseBackends("wait", 5))
        await pool.backends.operate(ResumeBackends("3"))  # other weights by other means: the adapter stays
        assert adapters(pool) == (["lora-v2"], "lora-v2")
        await pool.backends.operate(PauseBackends("wait", 5))
        await pool.backends.operate(LoadWeights("/w/4", 5))
        await pool.backends.operate(ResumeBackends("4"))  # whole weights
        assert adapters(pool) == ([], "")


async def test_an_adapter_that_one_engine_fails_to_load_is_used_by_none(autojump_clock):
    async with open_pool(A, B) as pool:
        await adapt(pool, "1")
        await pool.backends.operate(ResumeBackends("1"))
        pool.engines[B].broken.add("load adapter")
        assert answers(await adapt(pool, "2")) == {A: "loaded", B: "failed"}
        with pytest.raises(UpdateRefused, match=f"{B}: it did not load"):
            await pool.backends.operate(ResumeBackends("2"))
        pool.engines[B].broken.clear()
        pool.engines[A].broken.add("unload adapter")
        assert answers(await pool.backends.operate(ResumeBackends())) == {A: "resumed", B: "resumed"}
        assert adapters(pool) == (["lora-v1", "lora-v2"], "lora-v1"), "one that stays loaded is no harm"
        assert adapters(pool, B) == (["lora-v1"], "lora-v1")
        assert {each.policy_version for each in pool.backends.list()} == {"1"}


async def test_the_adapter_in_use_stays_if_the_update_to_it_is_made_again_and_fails(autojump_clock):
    async with open_pool(A, B) as pool:
        await adapt(pool, "1")
        await pool.backends.operate(ResumeBackends("1"))
        await adapt(pool, "1")
        await pool.backends.operate(ResumeBackends())
        assert adapters(pool) == (["lora-v1"], "lora-v1")


async def test_under_an_adapter_the_whole_weights_stay_those_that_engines_are_put_back_to(autojump_clock):
    async with open_pool(A, B) as pool:
        await adapt(pool, "1")
        await pool.backends.operate(ResumeBackends("1"))
        await pool.backends.operate(PauseBackends("wait", 5))
        pool.engines[B].broken.add("load /w/2")
        assert answers(await pool.backends.operate(LoadWeights("/w/2", 5))) == {A: "loaded", B: "failed"}
        assert answers(await pool.backends.operate(ResumeBackends())) == {A: "resumed", B: "resumed"}
        assert [pool.engines[url].weights for url in (A, B)] == ["first", "first"]
        assert adapters(pool) == (["lora-v1"], "lora-v1")


async def test_engines_that_take_no_adapters_say_so(autojump_clock):
    async with open_pool(A, B) as pool:
        pool.engines[B].broken.add("no adapters")
        assert answers(await adapt(pool, "1")) == {A: "loaded", B: "not_offered"}
        await pool.backends.operate(ResumeBackends())
        assert adapters(pool) == ([], "")


async def test_kept_completions_would_go_on_with_the_former_adapter_so_it_is_refused(autojump_clock):
    async with open_pool(A) as pool, pool.backends.lease("t") as lease, trio.open_nursery() as nursery:
        nursery.start_soon(complete, lease)
        await trio.sleep(0.5)
        with pytest.raises(UpdateRefused, match="1 completions were kept"):
            await adapt(pool, "1", mode="keep")
        await pool.backends.operate(ResumeBackends())


# ------------------------------------------------------------------------------------------- engines without labels


async def test_a_completion_that_ends_while_an_engine_is_asked_makes_no_label_it_was_not_told():
    engine = PausableEngine(A)
    control = EngineControl(engine, await engine.probe(timeout_s=5), VersionOrder())

    async def no_label(policy_version, *, timeout_s):
        return False

    async def says_its_own(*, timeout_s):
        control.heard("0", control.info)  # of a completion, meanwhile
        return "0"

    engine.label_weights, engine.read_label = no_label, says_its_own
    assert await control.operate(ConfirmWeights("1", 5)) == "confirmed"


async def test_weights_that_an_engine_loads_while_it_is_added_again_are_on_trial(autojump_clock):
    engine = PausableEngine(A)
    info = await engine.probe(timeout_s=5)
    control = EngineControl(engine, info, VersionOrder())
    load = engine.load_weights

    async def load_while_added(folder, *, timeout_s):
        control.added(info)
        return await load(folder, timeout_s=timeout_s)

    engine.load_weights = load_while_added
    assert await control.operate(LoadWeights("/w/1", 5)) == "loaded"
    assert (control.trial.folder, control.failed_to_load) == ("/w/1", False)
