"""Weights that change without us, and aborts that nobody asked for here: what is recorded, and who gets tasks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import trio
import trio.testing

from prorl_trio.types.backends import PauseBackends, ResumeBackends
from prorl_trio.types.errors import BackendError, PauseTimeout
from support.pausable_engine import A, B, complete, open_pool, versions

# ------------------------------------------------------------ aborts that nobody asked for here


@pytest.mark.parametrize("told", [True, False])
async def test_a_completion_that_somebody_elses_pause_aborted_is_continued(told, autojump_clock):
    """A trainer may tell the engine itself: what it answers then is no end of a turn."""
    async with open_pool(A) as pool, pool.backends.lease("t") as lease:
        engine = pool.engines[A]
        engine.tells_versions = told
        engine.says = [([10, 11], "abort"), ([], "abort"), ([12], "abort"), ([13], "stop")]
        completion = await complete(lease)
        assert ([*completion.token_ids], completion.finish_reason) == ([10, 11, 12, 13], "stop")
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
            await pool.backends.operate(PauseBackends("abort", 1))
        await trio.sleep(10)
        assert [([*each.token_ids], each.finish_reason) for each in got] == [([10, 11], "stop")]


# ------------------------------------------------------------ weights that changed without us


async def test_weights_that_got_another_name_without_a_resume_are_recorded_under_it(autojump_clock):
    """A trainer that updates the engine and does not tell: spans, and the salt of the prefix cache, must say so."""
    async with open_pool(A) as pool, pool.backends.lease("t") as lease:
        await pool.backends.operate(ResumeBackends("1"))
        assert versions(await complete(lease)) == [("1", 0, 1)]
        pool.engines[A].label = "2"
        assert versions(await complete(lease)) == [("2", 0, 1)]
        assert lease.info.policy_version == "2"
        await pool.backends.operate(ResumeBackends("3"))
        assert versions(await complete(lease)) == [("3", 0, 1)]


async def test_versions_that_only_engines_know_of_have_their_place_in_the_order(autojump_clock):
    """Or a trajectory over one update would be taken for one over two, and refused as too stale."""
    async with open_pool() as pool:
        pool.engines[A].label = "checkpoint"
        await pool.backends.add(A)
        await pool.backends.operate(ResumeBackends("first"))
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
        await pool.backends.operate(ResumeBackends("7"))
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
        await pool.backends.operate(ResumeBackends("8"))
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
        await pool.backends.operate(ResumeBackends("7"))
        async with pool.backends.lease("t") as lease:
            await complete(lease)
            pool.backends.drain(A)
            await pool.backends.add(A)
            assert lease.info.policy_version == "7"
            assert versions(await complete(lease)) == [("7", 0, 1)]


async def test_tokens_of_one_that_was_started_again_are_not_recorded_as_the_policys(autojump_clock):
    async with open_pool(A) as pool, pool.backends.lease("t") as lease:
        await pool.backends.operate(ResumeBackends("7"))
        pool.engines[A].label = "0"
        assert versions(await complete(lease)) == [("0", 0, 1)]


async def test_a_probe_that_a_resume_overtook_does_not_bring_the_old_name_back(autojump_clock):
    async with open_pool(A) as pool, pool.backends.lease("t") as lease:
        await pool.backends.operate(ResumeBackends("1"))
        engine, probe = pool.engines[A], pool.engines[A].probe

        async def slow(*, timeout_s):
            info = await probe(timeout_s=timeout_s)
            await trio.sleep(3)
            return info

        engine.probe = slow
        await trio.sleep(11)
        await pool.backends.operate(ResumeBackends("2"))
        await trio.sleep(5)
        assert lease.info.policy_version == "2"
        assert pool.out() == set()
