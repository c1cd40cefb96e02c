"""A trainer's own engine, which knows `POST /generate` alone, as a backend."""

from __future__ import annotations

import pytest

from prorl_trio.config import BackendConfig
from prorl_trio.inference.engines.registry import EngineRegistry
from prorl_trio.node.parts import engine_finder
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.fake_trainer_engine import open_fake_trainer_engine
from prorl_trio.types.errors import BackendError, ContextLengthExceeded
from prorl_trio.types.models import SamplingParams
from support.completions import asked

pytestmark = pytest.mark.timeout(30)


async def generate(client, prompt, max_tokens=8, **sampling):
    return await client.generate(asked(prompt, max_tokens, sampling=SamplingParams(**sampling)))


@pytest.mark.parametrize("kind", ["auto", "prorl"])
async def test_it_is_found_and_its_tokens_arrive_bit_for_bit(kind):
    def script(prompt):
        return [7, 8, 2], [-0.5, -0.25, -0.125], "stop"

    async with open_fake_trainer_engine(script=script) as engine:
        client = await EngineRegistry().finder(kind, context_tokens=64)(engine.url, 5)
        info = await client.probe(timeout_s=5)
        assert (info.max_model_len, info.engine, info.pausable) == (64, "prorl", False)
        completion = await generate(client, [5, 6], temperature=0.6, top_p=0.9, stop_token_ids=[2])
        assert ([*completion.token_ids], [*completion.logprobs]) == ([7, 8, 2], [-0.5, -0.25, -0.125])
        assert completion.finish_reason == "stop"
        assert (engine.requests[-1].prompt, engine.requests[-1].max_tokens) == ([5, 6], 8)
        assert completion.spans[0].temperature == 0.6
        await client.aclose()


async def test_a_completion_that_fills_what_was_asked_for_ended_by_its_length():
    async with open_fake_trainer_engine(script=lambda prompt: ([7] * 8, [-0.5] * 8, "length")) as engine:
        client = await EngineRegistry().finder("prorl", context_tokens=64)(engine.url, 5)
        await client.probe(timeout_s=5)
        assert (await generate(client, [5], stop_token_ids=[2])).finish_reason == "length"
        assert (await generate(client, [5], stop_token_ids=[7])).finish_reason == "stop"
        with pytest.raises(ContextLengthExceeded):
            await generate(client, [5] * 64)
        await client.aclose()


async def test_one_that_drops_logprobs_or_whose_context_nobody_knows_is_refused_with_the_reason():
    async with open_fake_trainer_engine() as engine:
        client = await EngineRegistry().finder("auto")(engine.url, 5)
        with pytest.raises(BackendError, match=r"backends\.max_model_len") as caught:
            await client.probe(timeout_s=5)
        assert not caught.value.retryable
        await client.aclose()
        engine.tells_logprobs = False
        client = await EngineRegistry().finder("auto", context_tokens=64)(engine.url, 5)
        with pytest.raises(BackendError, match="drops log-probabilities") as caught:
            await client.probe(timeout_s=5)
        assert not caught.value.retryable
        await client.aclose()


async def test_a_vllm_is_not_asked_for_what_a_trainers_engine_has():
    async with open_fake_engine() as engine:
        client = await EngineRegistry().finder("auto", context_tokens=64)(engine.url, 5)
        assert (await client.probe(timeout_s=5)).max_model_len == FakeEngineConfig().max_model_len
        await client.aclose()


async def test_the_longest_context_is_the_configured_one_or_the_models_own():
    async with open_fake_trainer_engine() as engine:
        for config, expected in ((BackendConfig(max_model_len=99), 99), (BackendConfig(), 512)):
            client = await engine_finder(config, None, max_positions=512)(engine.url, 5)
            assert (await client.probe(timeout_s=5)).max_model_len == expected
            await client.aclose()
