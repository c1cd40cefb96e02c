"""By default nothing that was sampled is sampled again, whatever cuts a completion: else short ones would win."""

from __future__ import annotations

from array import array
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise

import msgspec
import pytest
import trio

from prorl_trio.agent.context import RolloutContext
from prorl_trio.config import BackendConfig
from prorl_trio.http.client import RetryPolicy
from prorl_trio.inference.engines.protocol import CompletionTimedOut, made_by
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.inference.pool.pace import MAX_FIRST_SCOUTS, PACE_VALID_S, Pace
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.testing.fake_engine import FakeEngine, FakeEngineConfig, open_look_alike
from prorl_trio.types.backends import PauseBackends, ResumeBackends
from prorl_trio.types.errors import BackendError
from support.completions import asked, begun

pytestmark = pytest.mark.timeout(60)

PROMPT = [5, 6, 7]
SLICE = BackendConfig().slice_tokens
WHOLE = list(range(100, 160))


def story(prompt):
    """One that goes on the same way wherever it is taken up."""
    said = len(prompt) - len(PROMPT)
    return WHOLE[said:], [-1.0 - index / 100 for index in range(said, 60)], "stop"


@asynccontextmanager
async def open_pool(config, kind=FakeEngine, script=story):
    async with open_look_alike(kind, script, config, 0) as engine:
        backends = Backends(made_by(partial(VllmClient, retry=RetryPolicy(max_attempts=2, first_delay_s=0.01))))
        await backends.add(engine.url)
        engine.requests.clear()
        try:
            yield backends, engine
        finally:
            await backends.aclose()


async def complete(backends, *, max_tokens=60, timeout_s=10.0, slice_tokens=SLICE):
    so_far = begun(asked(PROMPT, max_tokens, timeout_s=timeout_s), slice_tokens=slice_tokens)
    async with backends.lease("task") as lease:
        return await lease.attempt(so_far)


def sampled_again(engine):
    """Of the requests: positions that were asked for although an earlier request had been given them."""
    prompts = [len(request.prompt) for request in engine.requests]
    return [now for before, now in pairwise(prompts) if now <= before]


async def test_a_time_out_costs_no_token_and_no_rollout():
    """The only engine there is takes several time-outs for one completion."""
    async with open_pool(FakeEngineConfig(per_token_s=0.02)) as (backends, engine):
        completion = await complete(backends, timeout_s=0.5)  # 25 tokens, 25, and 10: none ends where the last token is
        assert [*completion.token_ids] == WHOLE
        assert completion.logprobs == array("f", [-1.0 - index / 100 for index in range(60)])
        assert (completion.finish_reason, len(completion.spans)) == ("stop", 1)
        assert len(engine.requests) > 2
        assert sampled_again(engine) == []


async def test_the_first_completion_that_is_slow_in_one_piece_is_streamed_afterwards():
    """It was quick before, so nobody expected that."""
    async with open_pool(FakeEngineConfig()) as (backends, engine):
        await complete(backends)
        engine.config = msgspec.structs.replace(engine.config, per_token_s=0.02)
        engine.requests.clear()
        so_far = begun(asked(PROMPT, 60, timeout_s=0.5), slice_tokens=SLICE)
        async with backends.lease("other") as lease:
            with pytest.raises(CompletionTimedOut):
                await lease.attempt(so_far)
            completion = await lease.attempt(so_far)
        assert [*completion.token_ids] == WHOLE
        assert [request.stream for request in engine.requests][:2] == [False, True]
        assert sampled_again(engine) == [len(PROMPT)], "but for the one that nobody had heard of"


async def test_slices_are_one_completion():
    async with open_pool(FakeEngineConfig()) as (backends, engine):
        await complete(backends)  # from now on the engine's pace is known
        engine.requests.clear()
        completion = await complete(backends, slice_tokens=8)
        assert [*completion.token_ids] == WHOLE
        assert [(len(request.prompt), request.max_tokens, request.stream) for request in engine.requests] == [
            (3, 8, False),
            (11, 8, False),
            (19, 16, False),
            (35, 28, False),
        ]
        assert (completion.finish_reason, [(span.start, span.end) for span in completion.spans]) == ("stop", [(0, 60)])
        engine.requests.clear()
        short = await complete(backends, max_tokens=20, slice_tokens=8)
        assert ([*short.token_ids], short.finish_reason) == (WHOLE[:20], "length")
        assert [request.max_tokens for request in engine.requests] == [8, 8, 4]


async def test_a_pause_waits_for_a_slice_only():
    async with open_pool(FakeEngineConfig()) as (backends, engine):
        await complete(backends)
        engine.requests.clear()
        engine.hold()
        done = []

        async def sample():
            done.append(await complete(backends, slice_tokens=8))

        async def release_when_closed():
            while not backends.admission.closed:
                await trio.lowlevel.checkpoint()
            engine.release()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sample)
            await engine.wait_until(lambda stats: stats.running == 1)
            nursery.start_soon(release_when_closed)
            await backends.operate(PauseBackends("wait", 5))
            assert (len(engine.requests), done) == (1, [])
            await backends.operate(ResumeBackends("7"))
    assert [*done[0].token_ids] == WHOLE
    assert [(span.start, span.end, span.policy_version) for span in done[0].spans] == [(0, 8, "0"), (8, 60, "7")]


async def test_slices_end_where_the_context_does():
    async with open_pool(FakeEngineConfig(max_model_len=30)) as (backends, _engine):
        await complete(backends)
        completion = await complete(backends, slice_tokens=8)
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 27)


class Unstreamed(FakeEngine):
    """Answers in one piece whatever it is asked."""

    async def _complete(self, call):
        return await super()._complete(
            msgspec.structs.replace(call, body=call.body.replace(b'"stream":true', b'"stream":false'))
        )


async def test_an_engine_that_cannot_stream_is_not_asked_to_any_more():
    async with open_pool(FakeEngineConfig(), Unstreamed) as (backends, engine):
        assert [*(await complete(backends)).token_ids] == WHOLE
        assert len(engine.requests) == 2, "it was tried"
        assert [*(await complete(backends)).token_ids] == WHOLE
        assert len(engine.requests) == 3


async def test_a_stream_that_drops_something_is_refused_as_before():
    async with open_pool(FakeEngineConfig()) as (backends, engine):
        engine.inject("drop_logprobs")
        with pytest.raises(BackendError, match="drop"):
            await complete(backends)


async def test_a_rollout_outlives_a_time_out_of_its_only_engine(rig):
    """Which was quick before, so the completion came in one piece."""
    rig.says = [r"It is surely \boxed{42}."] * 3
    rig.config = msgspec.structs.replace(rig.config, backends=BackendConfig(request_timeout_s=0.5))
    async with rig.open():
        context = RolloutContext(spec=rig.spec(), resources=rig.resources)
        async with rig.provider.open_sandbox(SandboxSpec()) as context.sandbox:
            (backend,) = rig.resources.backends._placement.backends()
            backend.pace.measured(100, 0.001, trio.current_time())
            rig.engine.config = msgspec.structs.replace(rig.engine.config, first_token_s=3600.0)

            def quick_again(prompt):
                rig.engine.config = msgspec.structs.replace(rig.engine.config, first_token_s=0.0)
                return rig.script(prompt)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(MathHandler().run, context)
                await rig.engine.wait_until(lambda stats: stats.running == 1)
                rig.engine._script = quick_again
        assert [request.stream for request in rig.engine.requests][-2:] == [False, True]
    assert context.stop_reason == "finished"


async def test_a_rollout_goes_on_where_its_only_engine_broke_off(rig):
    rig.says = [r"It is surely \boxed{42}."] * 3
    async with rig.open():
        rig.engine.inject("reset_after_headers")
        rig.engine.requests.clear()
        context = RolloutContext(spec=rig.spec(), resources=rig.resources)
        async with rig.provider.open_sandbox(SandboxSpec()) as context.sandbox:
            await MathHandler().run(context)
        prompts = [len(request.prompt) for request in rig.engine.requests]
    assert prompts[1] > prompts[0], "what had come was kept"
    assert context.turns[0].completion_end - context.turns[0].completion_start > prompts[1] - prompts[0]


# ---------------------------------------------------------------- the pace


def test_scouts_tell_the_pace_and_are_few():
    pace = Pace()
    scopes = []
    for _ in range(MAX_FIRST_SCOUTS):
        assert pace.wants_stream(256, 600.0, 0.0)
        scopes.append(pace.scout())
        scopes[-1].__enter__()
    assert not pace.wants_stream(256, 600.0, 0.0)
    for scope in scopes:
        scope.__exit__(None, None, None)
    pace.measured(100, 2.0, 10.0)
    assert not pace.wants_stream(256, 600.0, 10.0)
    assert pace.production_s(50, 100.0) == 1.0
    assert pace.production_s(50, 0.5) == 0.5
    assert pace.wants_stream(256, 600.0, 11.0 + PACE_VALID_S), "it is measured again"
    assert pace.wants_stream(256, 6.0, 10.0), "it would take 5 s of 6"
    pace.measured(0, 0.0, 500.0)
    assert pace.wants_stream(256, 600.0, 500.0), "nothing was measured"
