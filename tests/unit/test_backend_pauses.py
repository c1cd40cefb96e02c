"""Pauses and weights at bad moments: while backends are probed, drained, removed, started again, or paused by somebody
else. With clients that only pretend, in virtual time."""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec
import pytest
import trio
import trio.testing

from prorl_trio.config import LoadConfig
from prorl_trio.inference.engines.load_report import LoadReport
from prorl_trio.inference.engines.protocol import EnginePaused
from prorl_trio.types.backends import ConfirmWeights, ExpectTransfer, LoadWeights, PauseBackends, ResumeBackends
from prorl_trio.types.errors import BackendError, PauseTimeout, UpdateRefused
from support.cancel_sweep import cancel_sweep
from support.completions import asked, begun
from support.pausable_engine import HEALTH, A, B, C, complete, open_pool, versions

# ------------------------------------------------------------ pauses and probes


async def test_a_long_pause_puts_nobody_out(autojump_clock):
    """A paused engine answers no probe."""
    async with open_pool(A, B) as pool:
        await pool.backends.operate(PauseBackends("keep", 5))
        await trio.sleep(300)
        assert pool.out() == set()
        await pool.backends.operate(ResumeBackends("1"))
        await trio.sleep(60)
        assert pool.out() == set()


async def test_a_probe_that_a_pause_came_across_does_not_count(autojump_clock):
    async with open_pool(A, health=msgspec.structs.replace(HEALTH, open_after_failures=1)) as pool:
        pool.engines[A].silent.add("probe")
        await trio.sleep(12)  # a probe is under way, and fails at 15
        await pool.backends.operate(PauseBackends("keep", 5))
        await pool.backends.operate(ResumeBackends())
        pool.engines[A].silent.clear()
        await trio.sleep(5)
        assert pool.out() == set()


async def test_one_that_somebody_else_paused_gets_no_tasks_meanwhile_and_is_not_taken_for_ill(autojump_clock):
    """It is back with the first probe that it answers."""
    async with open_pool(A, B) as pool:
        probe = pool.engines[A].probe

        async def held(*, timeout_s):
            await trio.lowlevel.checkpoint()
            raise EnginePaused("it is paused")

        pool.engines[A].probe = held
        await trio.sleep(100)
        assert pool.out() == {A}
        pool.engines[A].probe = probe
        await trio.sleep(11)
        assert pool.out() == set()


async def test_one_that_is_not_resumed_takes_no_tasks_until_the_watch_has_resumed_it(autojump_clock):
    async with open_pool(A, B) as pool:
        await pool.backends.operate(PauseBackends("keep", 5))
        pool.engines[A].broken.add("resume")
        report = await pool.backends.operate(ResumeBackends("1"))
        assert {each.url: each.engine for each in report.backends} == {A: "failed", B: "resumed"}
        assert pool.out() == {A}
        await trio.sleep(100)
        assert pool.out() == {A}
        pool.engines[A].broken.clear()
        await trio.sleep(30)
        assert pool.out() == set()
        assert pool.engines[A].running.is_set()


async def test_one_that_takes_no_name_is_resumed_all_the_same(autojump_clock):
    async with open_pool(A) as pool:
        await pool.backends.operate(PauseBackends("keep", 5))
        pool.engines[A].broken.add("label")
        (report,) = (await pool.backends.operate(ResumeBackends("1"))).backends
        assert (report.engine, report.error, report.policy_version) == ("failed", f"{A}: out of order", "1")
        assert pool.engines[A].running.is_set()
        assert pool.out() == set()


@pytest.mark.parametrize("how", ["remove", "clear", "close", "with its last task"])
async def test_one_that_leaves_paused_is_resumed(how, autojump_clock):
    """Nobody else would, and it could not be added again."""
    async with open_pool(A) as pool:
        backends, engine = pool.backends, pool.engines[A]
        async with backends.lease("t"):
            if how == "with its last task":
                await backends.remove(A)
            await backends.operate(PauseBackends("wait", 5))
            assert not engine.running.is_set()
        match how:
            case "remove":
                await backends.remove(A)
            case "clear":
                await backends.clear()
            case "close":
                await backends.aclose()
        assert engine.told == ["wait", "resume"]
        if how != "close":
            await backends.add(A)


@pytest.mark.parametrize("how", ["remove", "close"])
async def test_one_that_leaves_while_it_is_told_to_pause_is_resumed_after_it(how, autojump_clock):
    async with open_pool(A, B) as pool, trio.open_nursery() as nursery:
        engine, pause = pool.engines[A], pool.engines[A].pause

        async def slow(mode, *, timeout_s):
            await trio.sleep(2)
            return await pause(mode, timeout_s=timeout_s)

        engine.pause = slow
        nursery.start_soon(pool.backends.operate, PauseBackends("keep", 10))
        await trio.sleep(1)
        await (pool.backends.remove(A) if how == "remove" else pool.backends.aclose())
        await trio.sleep(3)
        assert engine.told == ["keep", "resume"]


async def test_one_that_leaves_paused_and_does_not_answer_holds_nobody_up(autojump_clock):
    async with open_pool(A, B) as pool:
        await pool.backends.operate(PauseBackends("wait", 5))
        pool.engines[A].silent.add("resume")
        with trio.fail_after(6):
            await pool.backends.clear()
        assert pool.engines[B].running.is_set()


async def test_a_silent_one_that_is_out_does_not_undo_a_pause(autojump_clock):
    async with open_pool(A, B, C) as pool:
        pool.engines[A].silent |= {"probe", "pause"}
        await trio.sleep(40)
        assert pool.out() == {A}
        report = await pool.backends.operate(PauseBackends("wait", 8))
        assert {each.url: each.engine for each in report.backends} == {A: "failed", B: "paused", C: "paused"}
        await pool.backends.operate(ResumeBackends())
        pool.engines[A].silent.clear()
        await trio.sleep(40)
        assert pool.out() == set()


async def test_a_silent_one_that_is_well_undoes_it_and_all_go_on(autojump_clock):
    async with open_pool(A, B, C) as pool:
        pool.engines[A].silent.add("pause")
        with pytest.raises(PauseTimeout, match=f"not paused by then: {A}"):
            await pool.backends.operate(PauseBackends("keep", 8))
        assert all(engine.running.is_set() for engine in pool.engines.values())
        assert pool.engines[B].told == ["keep", "resume"]
        assert pool.backends.statistics()["admission"]["paused"] is False


async def test_a_pause_that_fails_in_a_pause_leaves_that_in_force(autojump_clock):
    async with open_pool(A, B) as pool:
        await pool.backends.operate(PauseBackends("keep", 5))
        pool.engines[B].silent.add("pause")
        with pytest.raises(PauseTimeout):
            await pool.backends.operate(PauseBackends("keep", 5))
        assert pool.backends.admission.closed
        assert "resume" not in pool.engines[A].told


async def test_one_that_failed_to_pause_may_have_paused_and_is_resumed(autojump_clock):
    async with open_pool(A, B) as pool:
        pool.engines[A].broken.add("pause")
        report = await pool.backends.operate(PauseBackends("keep", 5))
        assert {each.url: each.engine for each in report.backends} == {A: "failed", B: "paused"}
        report = await pool.backends.operate(ResumeBackends())
        assert {each.url: each.engine for each in report.backends} == {A: "resumed", B: "resumed"}
        assert pool.engines[A].told == ["resume"]


async def test_resumed_twice_under_an_older_version_and_paused_in_a_pause(autojump_clock):
    async with open_pool(A) as pool, pool.backends.lease("t") as lease:
        await pool.backends.operate(PauseBackends("keep", 5))
        await pool.backends.operate(PauseBackends("abort", 5))
        await pool.backends.operate(ResumeBackends("5"))
        await pool.backends.operate(ResumeBackends("5"))
        assert versions(await complete(lease)) == [("5", 0, 1)]
        await pool.backends.operate(ResumeBackends("4"))
        assert versions(await complete(lease)) == [("4", 0, 1)]
        assert pool.engines[A].told == ["keep", "abort", "resume"]


async def test_an_engine_that_stands_still_instead_of_aborting_is_left_in_time(autojump_clock):
    """Whatever time the pause has."""
    async with open_pool(A) as pool, pool.backends.lease("t") as lease, trio.open_nursery() as nursery:
        nursery.start_soon(complete, lease)
        await trio.sleep(0.5)
        report = await pool.backends.operate(PauseBackends("abort", 2))
        assert [(each.engine, each.in_flight) for each in report.backends] == [("paused", 0)]
        await pool.backends.operate(ResumeBackends("1"))


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
async def test_cancelled_at_any_step_a_pause_is_undone_and_a_resume_leaves_it(mode, autojump_clock):
    completions = 0
    async with open_pool(A, B) as pool, trio.open_nursery() as nursery:
        backends = pool.backends

        async def rollout(name):
            nonlocal completions
            async with backends.lease(name) as lease:
                while True:
                    completion = await complete(lease)
                    assert ([*completion.token_ids], completion.finish_reason) == ([7], "stop")
                    completions += 1

        for index in range(4):
            nursery.start_soon(rollout, f"t{index}")
        await trio.sleep(0.5)

        async def pause():
            await backends.operate(PauseBackends(mode, 5))

        async def check_undone(run):
            assert backends.admission.closed == run.completed
            assert all(engine.running.is_set() != run.completed for engine in pool.engines.values() if engine.told)
            await backends.operate(ResumeBackends("1"))
            await trio.sleep(0.3)

        assert await cancel_sweep(pause, check_undone) > 5

        async def pause_and_resume():
            with trio.CancelScope(shield=True):
                await backends.operate(PauseBackends(mode, 5))
            await backends.operate(ResumeBackends("2"))

        async def check_closed(run):
            assert backends.admission.closed != run.completed
            before = completions
            await trio.sleep(3)
            if not run.completed and mode != "keep":
                assert completions == before
            await backends.operate(ResumeBackends("2"))
            await trio.sleep(3)
            assert completions > before
            assert all(engine.running.is_set() for engine in pool.engines.values())
            assert {backend.policy_version for backend in backends.list()} == {"2"}

        assert await cancel_sweep(pause_and_resume, check_closed) > 5
        nursery.cancel_scope.cancel()


# ------------------------------------------------------------ where a completion goes that had to wait


@pytest.mark.parametrize("how", ["drain", "remove", "out"])
async def test_what_waits_for_the_resume_goes_to_where_tasks_are_taken_by_then(how, autojump_clock):
    async with open_pool(A, B) as pool, pool.backends.lease("t") as lease, trio.open_nursery() as nursery:
        home, other = lease.url, ({A, B} - {lease.url}).pop()
        await pool.backends.operate(PauseBackends("wait", 5))
        nursery.start_soon(complete, lease)
        await trio.sleep(1)
        match how:
            case "drain":
                pool.backends.drain(home)
            case "remove":
                await pool.backends.remove(home)
            case "out":
                pool.engines[home].broken.add("resume")
        await pool.backends.operate(ResumeBackends())
        await trio.sleep(5)
        assert (len(pool.engines[home].prompts), len(pool.engines[other].prompts)) == (0, 1)
        assert pool.backends.statistics()["moves"] == {"failure" if how == "out" else "drain": 1}


async def test_a_turn_stays_where_it_is_whatever_a_sub_agent_begins(autojump_clock):
    """Two dialogues on one lease: the retry of the one is not the beginning of a turn because the other began one."""
    policy = LoadConfig(interval_s=1, skew_margin_s=1, skew_ratio=1)
    async with open_pool(A, B, load=policy) as pool, pool.backends.lease("t") as lease:
        home, other = lease.url, ({A, B} - {lease.url}).pop()
        for url, waiting in ((home, 0), (other, 0)):
            pool.engines[url].load_report = LoadReport(
                running=2, waiting=waiting, prefill_tokens_total=1e6, prefill_s_total=1.0
            )
        await trio.sleep(2)
        await complete(lease)
        turn = begun(asked([1, 2], timeout_s=30))
        with trio.move_on_after(0.5):
            await lease.attempt(turn)
        await complete(lease)  # the sub-agent's
        pool.engines[home].load_report = LoadReport(
            running=2, waiting=90, prefill_tokens_total=1e6, prefill_s_total=1.0
        )
        await trio.sleep(2)
        await lease.attempt(turn)
        assert lease.url == home
        await complete(lease)
        assert lease.url == other


async def test_calls_that_stood_still_too_long_put_nobody_out(autojump_clock):
    async with open_pool(A) as pool, AsyncExitStack() as stack, trio.open_nursery() as nursery:
        leases = [await stack.enter_async_context(pool.backends.lease(f"t{n}")) for n in range(3)]
        timed_out = 0

        async def call(lease):
            nonlocal timed_out
            with pytest.raises(BackendError, match="no answer"):
                await complete(lease)
            timed_out += 1

        for lease in leases:
            nursery.start_soon(call, lease)
        await trio.sleep(0.5)
        await pool.backends.operate(PauseBackends("keep", 5))
        await trio.sleep(60)
        assert timed_out == 3
        await pool.backends.operate(ResumeBackends())
        assert pool.out() == set()


async def test_the_time_that_a_call_stood_still_is_not_what_calls_take(autojump_clock):
    """Or each pause would send rollouts away from where their prefixes are."""
    policy = LoadConfig(interval_s=1)
    async with open_pool(A, load=policy) as pool, pool.backends.lease("t") as lease, trio.open_nursery() as nursery:
        pool.engines[A].load_report = LoadReport(running=1, waiting=1)
        await trio.sleep(2)
        await complete(lease)
        (before,) = pool.backends.statistics()["backends"]
        nursery.start_soon(complete, lease)
        await trio.sleep(0.5)
        await pool.backends.operate(PauseBackends("keep", 5))
        await trio.sleep(20)
        await pool.backends.operate(ResumeBackends())
        await trio.sleep(2)
        (after,) = pool.backends.statistics()["backends"]
        assert after.wait_s == before.wait_s == pytest.approx(0.5)


# ---------------------------------------------------------------- weights from a folder


def loaded(report):
    return {each.url: each.engine for each in report.backends}


async def test_new_weights_are_on_trial_until_a_resume_announces_them(autojump_clock):
    async with open_pool(A, B) as pool, pool.backends.lease("t") as lease:
        await pool.backends.operate(PauseBackends("keep", 5))
        assert loaded(await pool.backends.operate(LoadWeights("/w/1", 5))) == {A: "loaded", B: "loaded"}
        report = await pool.backends.operate(ResumeBackends("1"))
        assert loaded(report) == {A: "resumed", B: "resumed"}
        assert versions(await complete(lease)) == [("1", 0, 1)]
        assert {engine.weights for engine in pool.engines.values() if engine.url != C} == {"/w/1"}
        assert pool.engines[A].told == ["keep", "load /w/1", "resume"]


async def test_one_that_fails_to_load_leaves_the_old_version_everywhere(autojump_clock):
    """Also where it had loaded: the first time it is what the engine was started with, then what was loaded before."""
    async with open_pool(A, B) as pool, pool.backends.lease("t") as lease:
        for version, folder, broken in (("0", "first", "/w/x"), ("1", "/w/1", "/w/y")):
            if version != "0":
                await pool.backends.operate(PauseBackends("keep", 5))
                await pool.backends.operate(LoadWeights(folder, 5))
                await pool.backends.operate(ResumeBackends(version))
            await pool.backends.operate(PauseBackends("keep", 5))
            pool.engines[B].broken.add(f"load {broken}")
            report = await pool.backends.operate(LoadWeights(broken, 5))
            assert loaded(report) == {A: "loaded", B: "failed"}
            assert report.backends[1].error == f"{B}: out of order"
            with pytest.raises(UpdateRefused, match=B):
                await pool.backends.operate(ResumeBackends("next"))
            assert pool.backends.admission.closed
            report = await pool.backends.operate(ResumeBackends())
            assert loaded(report) == {A: "resumed", B: "resumed"}
            assert {each.policy_version for each in report.backends} == {version}
            assert versions(await complete(lease)) == [(version, 0, 1)]
            assert (pool.engines[A].weights, pool.engines[B].weights) == (folder, folder)


async def test_one_that_is_drained_counts_while_it_has_tasks(autojump_clock):
    """Its tasks go on there after the resume, and would be said to be of a version that it did not load."""
    async with open_pool(B) as pool, pool.backends.lease("t") as lease:
        await pool.backends.operate(PauseBackends("keep", 5))
        pool.engines[B].broken.add("load /w/1")
        assert loaded(await pool.backends.operate(LoadWeights("/w/1", 5))) == {B: "failed"}
        pool.backends.drain(B)
        await pool.backends.add(A)
        with pytest.raises(UpdateRefused, match=f"{B}: it did not load its new weights"):
            await pool.backends.operate(ResumeBackends("1"))
        assert pool.backends.policy_version == "0"
        assert pool.backends.admission.closed
        await pool.backends.operate(ResumeBackends())
        assert {version for version, _, _ in versions(await complete(lease))} == {"0"}


async def test_one_that_does_not_get_its_former_weights_back_takes_no_tasks_until_it_has_them(autojump_clock):
    async with open_pool(A, B) as pool:
        await pool.backends.operate(PauseBackends("keep", 5))
        await pool.backends.operate(LoadWeights("/w/1", 5))
        pool.engines[A].broken.add("load first")
        assert loaded(await pool.backends.operate(ResumeBackends())) == {A: "failed", B: "resumed"}
        await trio.sleep(100)
        assert (pool.out(), pool.engines[A].weights) == ({A}, "")
        pool.engines[A].broken.clear()
        await trio.sleep(40)
        assert (pool.out(), pool.engines[A].weights) == (set(), "first")


async def test_weights_that_somebody_else_moved_cannot_be_taken_back_and_that_is_said(autojump_clock):
    async with open_pool(A) as pool:
        await pool.backends.operate(ResumeBackends("1"))
        await pool.backends.operate(PauseBackends("keep", 5))
        await pool.backends.operate(LoadWeights("/w/2", 5))
        (report,) = (await pool.backends.operate(ResumeBackends())).backends
        assert report.engine == "failed"
        assert f"{A}: it may have the weights in /w/2, and where those of version 1 are is not known" in report.error
        assert pool.out() == {A}
        pool.engines[A].running.set()  # as one that was started again
        await pool.backends.add(A)
        await trio.sleep(40)
        assert pool.out() == set()


async def test_one_that_loads_nothing_says_so_and_is_left_alone(autojump_clock):
    async with open_pool(A, B) as pool:
        pool.engines[B].broken.add("no weights")
        await pool.backends.operate(PauseBackends("keep", 5))
        assert loaded(await pool.backends.operate(LoadWeights("/w/1", 5))) == {A: "loaded", B: "not_offered"}
        await pool.backends.operate(ResumeBackends())
        assert pool.engines[B].told == ["keep", "load /w/1", "resume"]


async def test_weights_are_loaded_in_a_pause_only(autojump_clock):
    async with open_pool(A) as pool:
        with pytest.raises(UpdateRefused, match="pause the backends first"):
            await pool.backends.operate(LoadWeights("/w/1", 5))
        assert pool.engines[A].told == []


async def test_a_load_cancelled_at_any_step_is_taken_back_by_the_resume(autojump_clock):
    async with open_pool(A, B) as pool:

        async def load():
            with trio.CancelScope(shield=True):
                await pool.backends.operate(PauseBackends("keep", 5))
            await pool.backends.operate(LoadWeights("/w/1", 5))

        async def check_taken_back(run):
            await pool.backends.operate(ResumeBackends())
            assert {engine.weights for engine in pool.engines.values()} == {"first"}
            assert all(engine.running.is_set() for engine in pool.engines.values())

        assert await cancel_sweep(load, check_taken_back) > 3


# ------------------------------------------------------------ engines that are added again


@pytest.mark.parametrize("how", ["named", "unnamed"])
async def test_one_that_is_added_again_gets_the_weights_of_its_version_back(how, autojump_clock):
    async with open_pool(A, B) as pool:
        await pool.backends.operate(PauseBackends("keep", 5))
        await pool.backends.operate(LoadWeights("/w/1", 5))
        await pool.backends.operate(ResumeBackends("1"))
        await pool.backends.remove(A)
        if how == "unnamed":
            pool.engines[A].label = "0"
        await pool.backends.add(A)
        await pool.backends.operate(PauseBackends("keep", 5))
        await pool.backends.operate(LoadWeights("/w/2", 5))
        report = await pool.backends.operate(ResumeBackends())
        assert [each.engine for each in report.backends] == ["resumed", "resumed"]
        assert [engine.weights for engine in (pool.engines[A], pool.engines[B])] == ["/w/1", "/w/1"]
        assert pool.out() == set()


async def test_one_whose_weights_are_not_known_is_out_for_that_reason(autojump_clock):
    async with open_pool(A, B) as pool:
        await pool.backends.operate(PauseBackends("keep", 5))
        await pool.backends.operate(ExpectTransfer(5))
        for engine in pool.engines.values():
            engine.label = "1"
        await pool.backends.operate(ConfirmWeights("1", 5, tell=False))
        await pool.backends.operate(ResumeBackends("1"))
        await pool.backends.remove(A)
        await pool.backends.add(A)
        await pool.backends.operate(PauseBackends("keep", 5))
        await pool.backends.operate(LoadWeights("/w/2", 5))
        await pool.backends.operate(ResumeBackends())
        assert A in pool.out()
        (why,) = [each.error for each in pool.backends.statistics()["backends"] if each.url == A]
        assert why == (
            f"{A}: it may have the weights in /w/2, and where those of version 1 are is not known here: move them "
            "there and resume with that version, or remove it"
        )


async def test_a_task_does_not_come_back_to_where_it_failed_before_one_has_answered(autojump_clock):
    """Its tasks have left the one that fails, so that has the least to do."""
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(A, B, C))
        lease, *_ = [await stack.enter_async_context(pool.backends.lease(task)) for task in "tuv"]
        tried = [lease.url]
        for _ in range(2):
            assert lease.repin()
            tried.append(lease.url)
        assert {*tried} == {A, B, C}
        assert not lease.repin()
