"""Pauses and weights at bad moments: while backends are probed, drained, removed, started again, or paused by somebody
else. With clients that only pretend, in virtual time."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from random import Random

import msgspec
import pytest
import trio
import trio.testing

from ipc.nursery import open_single_nursery
from prorl_trio.config import HealthConfig, LoadConfig
from prorl_trio.errors import BackendError, PauseTimeout
from prorl_trio.inference.engine import Completion, EngineClient, EngineInfo, EnginePaused
from prorl_trio.inference.engine_load import EngineLoad
from prorl_trio.inference.partial import PartialCompletion
from prorl_trio.inference.pool import Backends
from prorl_trio.models import PolicySpan, SamplingParams
from prorl_trio.testing.cancel_sweep import cancel_sweep

A, B, C = "http://a:1", "http://b:1", "http://c:1"
HEALTH = HealthConfig(interval_s=10, open_after_failures=2, close_after_successes=2)


class Engine(EngineClient):
    """Has a pause of its own, during which it samples nothing, and a name for its weights.

    `says`, if there is one, is what its next completions end as.
    """

    def __init__(self, url):
        self.url = url
        self.label = "0"
        self.max_model_len = 99
        self.running = trio.Event()
        self.running.set()
        self.silent: set[str] = set()
        self.broken: set[str] = set()
        self.tells_versions = True
        self.says: list[tuple[list[int], str]] = []
        self.prompts: list[list[int]] = []
        self.told: list[str] = []
        self.load_report = None
        self.call_s = 1.0

    async def probe(self, *, timeout_s):
        await self._reach("probe", timeout_s)
        await self._sample(timeout_s)
        return EngineInfo(
            url=self.url,
            model="m",
            max_model_len=self.max_model_len,
            engine="fake",
            policy_version=self.label,
            label=self.label,
        )

    async def generate(self, prompt_token_ids, sampling, *, max_tokens, request_id, timeout_s, **more):
        await self._reach("generate", timeout_s)
        self.prompts.append(prompt_token_ids)
        label = self.label
        await trio.sleep(self.call_s)
        await self._sample(timeout_s)
        ids, reason = self.says.pop(0) if self.says else ([7], "stop")
        spans = [PolicySpan(start=0, end=len(ids), policy_version=label, engine="fake")] if ids else []
        return Completion(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            finish_reason=reason,
            policy_version=label,
            engine="fake",
            spans=spans,
            versions_told=self.tells_versions and bool(ids),
            label=label if self.tells_versions else "",
        )

    async def load(self, *, timeout_s):
        await trio.lowlevel.checkpoint()
        return self.load_report

    async def pause(self, mode, *, timeout_s):
        await self._reach("pause", timeout_s)
        self.told.append(mode)
        self.running = trio.Event()
        return True

    async def label_weights(self, policy_version, *, timeout_s):
        await self._reach("label", timeout_s)
        self.label = policy_version
        return True

    async def resume(self, *, timeout_s):
        await self._reach("resume", timeout_s)
        self.told.append("resume")
        self.running.set()

    async def aclose(self):
        await trio.lowlevel.checkpoint()

    async def _reach(self, what, timeout_s):
        await trio.lowlevel.checkpoint()
        if what in self.silent:
            await trio.sleep(timeout_s)
            raise BackendError(f"{self.url}: no answer", retryable=True)
        if what in self.broken:
            raise BackendError(f"{self.url}: out of order", retryable=True)

    async def _sample(self, timeout_s):
        with trio.move_on_after(timeout_s):
            await self.running.wait()
            return
        raise BackendError(f"{self.url}: no answer", retryable=True)


class Pool:
    """Watched backends."""

    def __init__(self, **options):
        self.engines = {url: Engine(url) for url in (A, B, C)}
        options = {"health": HEALTH, "load": LoadConfig(interval_s=0), "random": Random(0), **options}
        self.backends = Backends(self.engines.__getitem__, probe_timeout_s=5, **options)

    def out(self):
        return {each.url for each in self.backends.statistics()["backends"] if each.suspended}


@asynccontextmanager
async def open_pool(*urls, **options):
    pool = Pool(**options)
    for url in urls:
        await pool.backends.add(url)
    with trio.fail_after(5000):
        async with open_single_nursery() as nursery:
            nursery.start_soon(pool.backends.watch)
            yield pool
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True), trio.move_on_after(60):
                await pool.backends.aclose()


async def complete(lease, tokens=8):
    return await lease.generate([1, 2, 3], SamplingParams(), max_tokens=tokens, request_id="r-t0", timeout_s=30)


def versions(completion):
    return [(span.policy_version, span.start, span.end) for span in completion.spans]


# ------------------------------------------------------------ pauses and probes


async def test_a_long_pause_puts_nobody_out(autojump_clock):
    """A paused engine answers no probe."""
    async with open_pool(A, B) as pool:
        await pool.backends.pause("keep", 5)
        await trio.sleep(300)
        assert pool.out() == set()
        await pool.backends.resume("1")
        await trio.sleep(60)
        assert pool.out() == set()


async def test_a_probe_that_a_pause_came_across_does_not_count(autojump_clock):
    async with open_pool(A, health=msgspec.structs.replace(HEALTH, open_after_failures=1)) as pool:
        pool.engines[A].silent.add("probe")
        await trio.sleep(12)  # a probe is under way, and fails at 15
        await pool.backends.pause("keep", 5)
        await pool.backends.resume()
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
        await pool.backends.pause("keep", 5)
        pool.engines[A].broken.add("resume")
        report = await pool.backends.resume("1")
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
        await pool.backends.pause("keep", 5)
        pool.engines[A].broken.add("label")
        (report,) = (await pool.backends.resume("1")).backends
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
            await backends.pause("wait", 5)
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
        nursery.start_soon(pool.backends.pause, "keep", 10)
        await trio.sleep(1)
        await (pool.backends.remove(A) if how == "remove" else pool.backends.aclose())
        await trio.sleep(3)
        assert engine.told == ["keep", "resume"]


async def test_one_that_leaves_paused_and_does_not_answer_holds_nobody_up(autojump_clock):
    async with open_pool(A, B) as pool:
        await pool.backends.pause("wait", 5)
        pool.engines[A].silent.add("resume")
        with trio.fail_after(6):
            await pool.backends.clear()
        assert pool.engines[B].running.is_set()


async def test_a_silent_one_that_is_out_does_not_undo_a_pause(autojump_clock):
    async with open_pool(A, B, C) as pool:
        pool.engines[A].silent |= {"probe", "pause"}
        await trio.sleep(40)
        assert pool.out() == {A}
        report = await pool.backends.pause("wait", 8)
        assert {each.url: each.engine for each in report.backends} == {A: "failed", B: "paused", C: "paused"}
        await pool.backends.resume()
        pool.engines[A].silent.clear()
        await trio.sleep(40)
        assert pool.out() == set()


async def test_a_silent_one_that_is_well_undoes_it_and_all_go_on(autojump_clock):
    async with open_pool(A, B, C) as pool:
        pool.engines[A].silent.add("pause")
        with pytest.raises(PauseTimeout, match=f"not paused by then: {A}"):
            await pool.backends.pause("keep", 8)
        assert all(engine.running.is_set() for engine in pool.engines.values())
        assert pool.engines[B].told == ["keep", "resume"]
        assert pool.backends.statistics()["gate"]["paused"] is False


async def test_resumed_twice_under_an_older_version_and_paused_in_a_pause(autojump_clock):
    async with open_pool(A) as pool, pool.backends.lease("t") as lease:
        await pool.backends.pause("keep", 5)
        await pool.backends.pause("abort", 5)
        await pool.backends.resume("5")
        await pool.backends.resume("5")
        assert versions(await complete(lease)) == [("5", 0, 1)]
        await pool.backends.resume("4")
        assert versions(await complete(lease)) == [("4", 0, 1)]
        assert pool.engines[A].told == ["keep", "abort", "resume"]


async def test_an_engine_that_stands_still_instead_of_aborting_is_left_in_time(autojump_clock):
    """Whatever time the pause has."""
    async with open_pool(A) as pool, pool.backends.lease("t") as lease, trio.open_nursery() as nursery:
        nursery.start_soon(complete, lease)
        await trio.sleep(0.5)
        report = await pool.backends.pause("abort", 2)
        assert [(each.engine, each.in_flight) for each in report.backends] == [("paused", 0)]
        await pool.backends.resume("1")


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
                    assert (completion.token_ids, completion.finish_reason) == ([7], "stop")
                    completions += 1

        for index in range(4):
            nursery.start_soon(rollout, f"t{index}")
        await trio.sleep(0.5)

        async def pause():
            await backends.pause(mode, 5)

        async def check_undone(run):
            assert backends.gate.closed == run.completed
            assert all(engine.running.is_set() != run.completed for engine in pool.engines.values() if engine.told)
            await backends.resume("1")
            await trio.sleep(0.3)

        assert await cancel_sweep(pause, check_undone) > 5

        async def pause_and_resume():
            with trio.CancelScope(shield=True):
                await backends.pause(mode, 5)
            await backends.resume("2")

        async def check_closed(run):
            assert backends.gate.closed != run.completed
            before = completions
            await trio.sleep(3)
            if not run.completed and mode != "keep":
                assert completions == before
            await backends.resume("2")
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
        await pool.backends.pause("wait", 5)
        nursery.start_soon(complete, lease)
        await trio.sleep(1)
        match how:
            case "drain":
                pool.backends.drain(home)
            case "remove":
                await pool.backends.remove(home)
            case "out":
                pool.engines[home].broken.add("resume")
        await pool.backends.resume()
        await trio.sleep(5)
        assert (len(pool.engines[home].prompts), len(pool.engines[other].prompts)) == (0, 1)
        assert pool.backends.statistics()["moves"] == {"failure" if how == "out" else "drain": 1}


async def test_a_turn_stays_where_it_is_whatever_a_sub_agent_begins(autojump_clock):
    """Two dialogues on one lease: the retry of the one is not the beginning of a turn because the other began one."""
    policy = LoadConfig(interval_s=1, skew_margin_s=1, skew_ratio=1)
    async with open_pool(A, B, load=policy) as pool, pool.backends.lease("t") as lease:
        home, other = lease.url, ({A, B} - {lease.url}).pop()
        for url, waiting in ((home, 0), (other, 0)):
            pool.engines[url].load_report = EngineLoad(
                running=2, waiting=waiting, prefill_tokens_total=1e6, prefill_s_total=1.0
            )
        await trio.sleep(2)
        await complete(lease)
        turn = PartialCompletion([1, 2], SamplingParams(), 8)
        with trio.move_on_after(0.5):
            await lease.complete(turn, request_id="r-t1", timeout_s=30)
        await complete(lease)  # the sub-agent's
        pool.engines[home].load_report = EngineLoad(
            running=2, waiting=90, prefill_tokens_total=1e6, prefill_s_total=1.0
        )
        await trio.sleep(2)
        await lease.complete(turn, request_id="r-t1", timeout_s=30)
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
        await pool.backends.pause("keep", 5)
        await trio.sleep(60)
        assert timed_out == 3
        await pool.backends.resume()
        assert pool.out() == set()


async def test_the_time_that_a_call_stood_still_is_not_what_calls_take(autojump_clock):
    """Or each pause would send rollouts away from where their prefixes are."""
    policy = LoadConfig(interval_s=1)
    async with open_pool(A, load=policy) as pool, pool.backends.lease("t") as lease, trio.open_nursery() as nursery:
        pool.engines[A].load_report = EngineLoad(running=1, waiting=1)
        await trio.sleep(2)
        await complete(lease)
        (before,) = pool.backends.statistics()["backends"]
        nursery.start_soon(complete, lease)
        await trio.sleep(0.5)
        await pool.backends.pause("keep", 5)
        await trio.sleep(20)
        await pool.backends.resume()
        await trio.sleep(2)
        (after,) = pool.backends.statistics()["backends"]
        assert after.wait_s == before.wait_s == pytest.approx(0.5)


# ------------------------------------------------------------ aborts that nobody asked for here


@pytest.mark.parametrize("told", [True, False])
async def test_a_completion_that_somebody_elses_pause_aborted_is_continued(told, autojump_clock):
    """A trainer may tell the engine itself: what it answers then is no end of a turn."""
    async with open_pool(A) as pool, pool.backends.lease("t") as lease:
        engine = pool.engines[A]
        engine.tells_versions = told
        engine.says = [([10, 11], "abort"), ([], "abort"), ([12], "abort"), ([13], "stop")]
        completion = await complete(lease)
        assert (completion.token_ids, completion.finish_reason) == ([10, 11, 12, 13], "stop")
        assert engine.prompts == [[1, 2, 3], [1, 2, 3, 10, 11], [1, 2, 3, 10, 11], [1, 2, 3, 10, 11, 12]]


async def test_one_that_aborts_everything_is_given_up(autojump_clock):
    async with open_pool(A) as pool, pool.backends.lease("t") as lease:
        pool.engines[A].says = [([], "abort")] * 9
        with pytest.raises(BackendError, match="before its first token, 3 times") as caught:
            await complete(lease)
        assert caught.value.retryable
        assert len(pool.engines[A].prompts) == 3


async def test_an_abort_that_comes_after_its_pause_was_undone_is_no_end_of_a_turn(autojump_clock):
    """One engine aborts, another never answers the pause: by the time the abort is answered, the pool goes on."""
    got = []
    async with open_pool(A, B) as pool, trio.open_nursery() as nursery, pool.backends.lease("t") as lease:
        home, other = lease.url, ({A, B} - {lease.url}).pop()
        engine = pool.engines[home]
        engine.says, engine.call_s = [([10], "abort"), ([11], "stop")], 3

        async def sample():
            got.append(await complete(lease))

        nursery.start_soon(sample)
        await trio.sleep(1)
        pool.engines[other].silent.add("pause")
        with pytest.raises(PauseTimeout):
            await pool.backends.pause("abort", 1)
        await trio.sleep(10)
        assert [(each.token_ids, each.finish_reason) for each in got] == [([10, 11], "stop")]


# ------------------------------------------------------------ weights that changed without us


async def test_weights_that_got_another_name_without_a_resume_are_recorded_under_it(autojump_clock):
    """A trainer that updates the engine and does not tell: spans, and the salt of the prefix cache, must say so."""
    async with open_pool(A) as pool, pool.backends.lease("t") as lease:
        await pool.backends.resume("1")
        assert versions(await complete(lease)) == [("1", 0, 1)]
        pool.engines[A].label = "2"
        assert versions(await complete(lease)) == [("2", 0, 1)]
        assert lease.info.policy_version == "2"
        await pool.backends.resume("3")
        assert versions(await complete(lease)) == [("3", 0, 1)]


async def test_versions_that_only_engines_know_of_have_their_place_in_the_order(autojump_clock):
    """Or a trajectory over one update would be taken for one over two, and refused as too stale."""
    async with open_pool() as pool:
        pool.engines[A].label = "checkpoint"
        await pool.backends.add(A)
        await pool.backends.resume("first")
        async with pool.backends.lease("t") as lease:
            for label in ("second", "third"):
                pool.engines[A].label = label
                await complete(lease)
        updates = pool.backends.versions.updates
        names = ["checkpoint", "first", "second", "third"]
        assert [updates(older, newer) for older, newer in pairwise(names)] == [1, 1, 1]
        assert (updates("checkpoint", "third"), updates("third", "checkpoint")) == (3, 0)


async def test_a_probe_learns_of_another_name_and_of_another_length(autojump_clock):
    async with open_pool(A) as pool, pool.backends.lease("t") as lease:
        engine = pool.engines[A]
        engine.tells_versions = False
        engine.label, engine.max_model_len = "2", 50
        await trio.sleep(25)
        assert (lease.info.policy_version, lease.info.max_model_len) == ("2", 50)
        assert versions(await complete(lease)) == [("2", 0, 1)]


async def test_one_that_was_started_again_is_out_until_it_has_the_weights(autojump_clock):
    async with open_pool(A, B) as pool:
        await pool.backends.resume("7")
        pool.engines[A].label = "0"
        await trio.sleep(12)
        assert pool.out() == {A}
        why = {each.url: each.error for each in pool.backends.statistics()["backends"]}
        assert (why[A].startswith(f"{A}: has lost weights 7: "), why[B]) == (True, "")
        await trio.sleep(100)
        assert pool.out() == {A}
        pool.backends.drain(B)
        assert "has lost weights 7" in pool.backends.shortage()
        await pool.backends.add(B)
        await pool.backends.resume("8")
        await trio.sleep(30)
        assert pool.out() == set()
        pool.engines[A].label = "0"
        await trio.sleep(12)
        await pool.backends.add(A)  # whoever does so answers for its weights
        await trio.sleep(50)
        assert pool.out() == set()


async def test_added_again_it_keeps_the_name_that_the_pool_gave_its_weights(autojump_clock):
    """The engine's own name, which it had from the start, is of no resume."""
    async with open_pool() as pool:
        pool.engines[A].label = "checkpoint-6"
        pool.engines[A].broken.add("label")
        assert (await pool.backends.add(A)).policy_version == "checkpoint-6"
        await pool.backends.resume("7")
        async with pool.backends.lease("t") as lease:
            await complete(lease)
            pool.backends.drain(A)
            await pool.backends.add(A)
            assert lease.info.policy_version == "7"
            assert versions(await complete(lease)) == [("7", 0, 1)]


async def test_tokens_of_one_that_was_started_again_are_not_recorded_as_the_policys(autojump_clock):
    async with open_pool(A) as pool, pool.backends.lease("t") as lease:
        await pool.backends.resume("7")
        pool.engines[A].label = "0"
        assert versions(await complete(lease)) == [("0", 0, 1)]


async def test_a_probe_that_a_resume_overtook_does_not_bring_the_old_name_back(autojump_clock):
    async with open_pool(A) as pool, pool.backends.lease("t") as lease:
        await pool.backends.resume("1")
        engine, probe = pool.engines[A], pool.engines[A].probe

        async def slow(*, timeout_s):
            info = await probe(timeout_s=timeout_s)
            await trio.sleep(3)
            return info

        engine.probe = slow
        await trio.sleep(11)
        await pool.backends.resume("2")
        await trio.sleep(5)
        assert lease.info.policy_version == "2"
        assert pool.out() == set()
