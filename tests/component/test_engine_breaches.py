"""Engines that drop, garble or break off what they send: the vLLM client refuses them, loudly."""

from __future__ import annotations

from functools import partial
from random import Random

import msgspec
import pytest
import trio

from prorl_trio.errors import BackendError
from prorl_trio.inference.vllm import RetryPolicy, VllmClient
from prorl_trio.models import SamplingParams
from prorl_trio.testing.fake_engine import FakeEngine, error_answer, open_fake_engine, open_look_alike
from prorl_trio.testing.fake_http import Answer, serve_http

FAST_RETRY = RetryPolicy(max_attempts=4, first_delay_s=0.001, max_delay_s=0.002)


async def open_client(engine, retry=FAST_RETRY):
    client = VllmClient(engine.url, retry=retry, random=Random(1))
    await client.probe(timeout_s=5)
    return client


async def generate(client, max_tokens=8, sink=None):
    return await client.generate(
        [40, 41, 42], SamplingParams(), max_tokens=max_tokens, request_id="job-1", timeout_s=5.0, sink=sink
    )


BREACHES = {
    "drop_token_ids": "drops token ids",
    "drop_logprobs": "drops log-probabilities",
    "count_mismatch": "counts differ: 8 ids, 7 logprobs, 8 in its usage",
    "usage_mismatch": "counts differ: 8 ids, 8 logprobs, 9 in its usage",
    "changed_prompt": "sent a prompt of 3, it read one of 2",
    "nan_logprob": "not a completion to train on: JSON is malformed",
    "null_logprob": r"Expected `float`, got `null` - at `\$\.choices\[0\]\.logprobs\.token_logprobs\[7\]`",
    "clamped_logprob": r"Expected `float` > -9999\.0 - at `\$\.choices\[0\]\.logprobs\.token_logprobs\[7\]`",
    "bad_json": "not a completion to train on: Input data was truncated",
    "unknown_finish": "unknown finish_reason 'repetition'",
}


@pytest.mark.parametrize("fault", BREACHES)
async def test_a_broken_contract_is_refused_loudly_and_not_retried(fault):
    with trio.fail_after(10):
        async with open_fake_engine(script=lambda prompt: ([9] * 20, [-0.5] * 20, "stop")) as engine:
            client = await open_client(engine)
            engine.inject(fault)
            with pytest.raises(BackendError, match=BREACHES[fault]) as caught:
                await generate(client)
            assert not caught.value.retryable
            assert engine.url in str(caught.value)
            assert len(engine.requests) == 2  # the probe's and this one
            await generate(client)
            await client.aclose()


PROBE_REASONS = {
    **BREACHES,
    "count_mismatch": "counts differ: 2 ids, 1 logprobs, 2 in its usage",
    "usage_mismatch": "counts differ: 2 ids, 2 logprobs, 3 in its usage",
    "null_logprob": "got `null`",
    "clamped_logprob": r"Expected `float` > -9999\.0",
    "server_error": "status 500: Internal server error",
    "reset_before_headers": "connection lost after 0 bytes",
    "reset_after_headers": "connection lost after",
}


@pytest.mark.parametrize("fault", PROBE_REASONS)
async def test_an_engine_that_breaks_the_contract_does_not_pass_the_probe(fault):
    breach = fault in BREACHES
    with trio.fail_after(10):
        async with open_fake_engine() as engine:
            engine.inject(fault, times=2)  # a kept connection that is reset is replaced once
            client = VllmClient(engine.url, retry=FAST_RETRY)
            with pytest.raises(BackendError, match=PROBE_REASONS[fault]) as caught:
                await client.probe(timeout_s=5)
            assert caught.value.retryable != breach
            assert engine.url in str(caught.value)
            await client.aclose()


STREAM_REASONS = {
    "drop_token_ids": "counts differ: 0 ids, 0 logprobs, 20 in its usage",
    "drop_logprobs": "drops log-probabilities",
    "count_mismatch": "1 ids, 0 logprobs in one event",
    "usage_mismatch": "counts differ: 20 ids, 20 logprobs, 21 in its usage",
    "changed_prompt": "sent a prompt of 3, it read one of 2",
    "nan_logprob": "JSON is malformed",
    "null_logprob": "got `null`",
    "clamped_logprob": r"Expected `float` > -9999\.0",
    "bad_json": "Input data was truncated",
    "unknown_finish": "unknown finish_reason 'repetition'",
}
CUT = {
    "reset_after_headers": "connection lost after",
    "engine_error": "failed in the middle of an answer: .*the engine died",
}


@pytest.mark.parametrize("fault", [*STREAM_REASONS, *CUT])
async def test_a_stream_that_breaks_the_contract_is_refused_and_one_that_breaks_off_may_be_gone_on_with(fault):
    got = []
    with trio.fail_after(10):
        async with open_fake_engine(script=lambda prompt: ([9] * 20, [-0.5] * 20, "stop")) as engine:
            client = await open_client(engine)
            engine.inject(fault)
            with pytest.raises(BackendError, match=STREAM_REASONS.get(fault) or CUT[fault]) as caught:
                await generate(client, max_tokens=50, sink=lambda ids, _: got.extend(ids))
            assert caught.value.retryable == (fault in CUT)
            assert engine.url in str(caught.value)
            assert len(engine.requests) == 2, "what was received is never asked for again"
            assert fault not in CUT or got == [9] * 10
            assert (await generate(client)).token_ids
            await client.aclose()


@pytest.mark.parametrize("fault", ["server_error", "reset_before_headers"])
async def test_a_stream_of_which_nothing_came_is_asked_for_again(fault):
    got = []
    with trio.fail_after(10):
        async with open_fake_engine() as engine:
            client = await open_client(engine)
            engine.inject(fault, times=2)
            completion = await generate(client, sink=lambda ids, _: got.extend(ids))
            assert got == completion.token_ids
            await client.aclose()


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        ([], "lists no model"),
        ([{"id": "m"}], "reports a max_model_len of None"),
        ([{"id": "m", "max_model_len": 4}], "reports a max_model_len of 4"),
        ([{"max_model_len": 9}], "/v1/models is not what was expected: .*`id`"),
    ],
)
async def test_a_server_that_cannot_be_used_is_refused_with_the_reason(card, reason):
    async def answer(call):
        await trio.lowlevel.checkpoint()
        return Answer(200, msgspec.json.encode({"data": card}))

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            serve = partial(trio.serve_tcp, lambda stream: serve_http(stream, answer), 0, host="127.0.0.1")
            listeners = await nursery.start(serve)
            port = listeners[0].socket.getsockname()[1]
            client = VllmClient(f"http://127.0.0.1:{port}")
            with pytest.raises(BackendError, match=reason) as caught:
                await client.probe(timeout_s=5)
            assert not caught.value.retryable
            await client.aclose()
            nursery.cancel_scope.cancel()


class Routed(FakeEngine):
    """A server behind vllm-router: that refuses malformed requests itself, also for what the server does not offer."""

    async def _answer(self, call):
        if call.path == "/inference/v1/generate" and b"token_ids" not in call.body:
            await trio.lowlevel.checkpoint()
            return error_answer(422, "Failed to deserialize the JSON body: missing field `token_ids`")
        return await super()._answer(call)


async def test_behind_a_router_it_is_the_server_that_tells_what_it_offers():
    with trio.fail_after(10):
        async with open_look_alike(Routed, None, None, 0) as engine:
            client = VllmClient(engine.url)
            assert (await client.probe(timeout_s=5)).api == "/v1/completions"
            assert (await generate(client)).token_ids
            await client.aclose()


async def test_too_many_and_no_tokens_are_refused():
    answers = [([], [], "stop"), ([5], [-0.1], "length")]
    with trio.fail_after(10):
        async with open_fake_engine(script=lambda prompt: answers.pop(0)) as engine:
            client = await open_client(engine)
            with pytest.raises(BackendError, match="it sampled 0"):
                await generate(client)
            assert (await generate(client)).finish_reason == "length"
            await client.aclose()


@pytest.mark.parametrize(("value", "fit"), [(1e-4, True), (0.5, False), (-9998.0, True), (float("inf"), False)])
async def test_logprobs_must_be_finite_and_not_positive(value, fit):
    with trio.fail_after(10):
        async with open_fake_engine(script=lambda prompt: ([5], [value], "stop")) as engine:
            client = await open_client(engine)
            if fit:
                assert (await generate(client)).logprobs == [value]
            else:
                with pytest.raises(BackendError, match=r"token_logprobs\[0\]"):
                    await generate(client)
            await client.aclose()
