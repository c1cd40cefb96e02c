"""The fake engine's own promises, and through it what the vLLM client does when an engine misbehaves."""

from __future__ import annotations

import os
from array import array
from random import Random

import msgspec
import pytest
import trio
import trio.testing

from prorl_trio.http.client import HttpClient, RetryPolicy
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.testing.fake_engine import (
    FakeEngineConfig,
    open_fake_engine,
)
from prorl_trio.types.errors import BackendError, ContextLengthExceeded
from prorl_trio.types.models import SamplingParams
from support.cancel_sweep import cancel_sweep
from support.completions import asked

PROMPT = [40, 41, 42]
NO_RETRY = RetryPolicy(max_attempts=1)
FAST_RETRY = RetryPolicy(max_attempts=4, first_delay_s=0.001, max_delay_s=0.002)


async def open_client(engine, retry=NO_RETRY):
    client = VllmClient(engine.url, retry=retry, random=Random(1))
    await client.probe(timeout_s=5)
    return client


async def generate(client, prompt=PROMPT, max_tokens=8, timeout_s=5.0, request_id="job-1", sink=None, **sampling):
    how = {"sampling": SamplingParams(**sampling), "request_id": request_id, "timeout_s": timeout_s, "sink": sink}
    return await client.generate(asked(prompt, max_tokens, **how))


# ---------------------------------------------------------------- what is sent and received


async def test_a_script_is_returned_bit_for_bit():
    def script(prompt):
        assert prompt == PROMPT
        return [7, 8, 2], [-0.1, -1.0 / 3.0, -5e-324], "stop"

    with trio.fail_after(10):
        async with open_fake_engine(script=script, config=FakeEngineConfig(policy_version="v7")) as engine:
            client = await open_client(engine)
            completion = await generate(client)
            assert [*completion.token_ids] == [7, 8, 2]
            assert completion.logprobs == array("f", [-0.1, -1.0 / 3.0, -5e-324])
            assert completion.finish_reason == "stop"
            assert completion.policy_version == "v7"
            assert completion.engine == "vllm 0.0.fake"
            await client.aclose()


async def test_a_script_is_cut_to_the_request_and_not_advanced_by_the_probe():
    calls = []

    def script(prompt):
        calls.append(prompt)
        return [7, 8, 9, 2], [-0.1, -0.2, -0.3, -0.4], "stop"

    with trio.fail_after(10):
        async with open_fake_engine(script=script) as engine:
            client = await open_client(engine)
            assert not calls
            short = await generate(client, max_tokens=2)
            assert ([*short.token_ids], short.finish_reason) == ([7, 8], "length")
            stopped = await generate(client, stop_token_ids=[8, 9])
            assert ([*stopped.token_ids], stopped.finish_reason) == ([7, 8], "stop")
            assert calls == [PROMPT, PROMPT]
            await client.aclose()


async def test_the_whole_distribution_is_asked_for():
    """What a request leaves out comes from the model's generation config: so nothing that bends it is left out."""
    with trio.fail_after(10):
        async with open_fake_engine() as engine:
            bodies = []
            client = await open_client(engine)
            request = client.http.request

            async def spy(method, path, *, body=b"", **rest):
                bodies.append(msgspec.json.decode(body))
                return await request(method, path, body=body, **rest)

            client.http.request = spy
            await generate(client, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=[3])
            assert bodies == [
                {
                    "model": "fake-model",
                    "prompt": PROMPT,
                    "max_tokens": 8,
                    "temperature": 0.7,
                    "top_p": 0.9,
                    "top_k": 5,
                    "stop_token_ids": [3],
                    "ignore_eos": False,
                    "min_p": 0.0,
                    "repetition_penalty": 1.0,
                    "presence_penalty": 0.0,
                    "frequency_penalty": 0.0,
                    "n": 1,
                    "logprobs": 0,
                    "return_token_ids": True,
                    "skip_special_tokens": False,
                    "stream": False,
                }
            ]
            await client.aclose()


async def test_any_request_id_fits_in_a_header():
    with trio.fail_after(10):
        async with open_fake_engine() as engine:
            client = await open_client(engine)
            await generate(client, request_id="job\r\nX-Evil: 1 \N{SNOWMAN}" + "x" * 500)
            assert engine.request_ids[-1].endswith("x.1")
            assert len(engine.request_ids[-1]) == 200
            await client.aclose()


async def test_max_tokens_is_cut_to_the_context():
    with trio.fail_after(10):
        async with open_fake_engine(config=FakeEngineConfig(max_model_len=10)) as engine:
            client = await open_client(engine)
            await generate(client, prompt=[5] * 6, max_tokens=100)
            assert engine.requests[-1].max_tokens == 4
            requests = len(engine.requests)
            with pytest.raises(ContextLengthExceeded, match="prompt of 10 tokens leaves no room in a context of 10"):
                await generate(client, prompt=[5] * 10)
            assert len(engine.requests) == requests
            await client.aclose()


async def test_a_context_that_shrank_since_the_probe_is_understood():
    with trio.fail_after(10):
        async with open_fake_engine(config=FakeEngineConfig(max_model_len=20)) as engine:
            client = await open_client(engine)
            engine.config = FakeEngineConfig(max_model_len=10)
            with pytest.raises(ContextLengthExceeded) as caught:
                await generate(client, prompt=[5] * 12)
            assert (caught.value.prompt_tokens, caught.value.max_model_len) == (12, 10)
            await client.aclose()


async def test_generate_needs_a_probe_a_prompt_and_a_token():
    async with open_fake_engine() as engine:
        client = VllmClient(engine.url)
        with pytest.raises(RuntimeError, match=r"probe\(\) must succeed"):
            await generate(client)
        await client.probe(timeout_s=5)
        with pytest.raises(ValueError, match="0 ids"):
            await generate(client, prompt=[])
        with pytest.raises(ValueError, match="and 0"):
            await generate(client, max_tokens=0)
        await client.aclose()


# ---------------------------------------------------------------- retries


@pytest.mark.parametrize("fault", ["server_error", "reset_before_headers"])
async def test_what_was_not_answered_is_sent_again(fault):
    with trio.fail_after(10):
        async with open_fake_engine() as engine:
            client = await open_client(engine, FAST_RETRY)
            engine.inject(fault, times=3)
            assert (await generate(client)).token_ids
            assert engine.stats.faults_total == 3
            await client.aclose()


async def test_retries_end_with_a_retryable_error():
    with trio.fail_after(10):
        async with open_fake_engine() as engine:
            client = await open_client(engine, FAST_RETRY)
            engine.inject("server_error", times=100)
            with pytest.raises(
                BackendError, match=r"status 500: Internal server error; gave up after 4 attempts"
            ) as caught:
                await generate(client)
            assert caught.value.retryable
            assert list(engine.request_ids)[1:] == ["job-1.1", "job-1.2", "job-1.3", "job-1.4"]
            await client.aclose()


async def test_retries_stay_within_the_timeout():
    with trio.fail_after(10):
        async with open_fake_engine() as engine:
            client = await open_client(engine, RetryPolicy(max_attempts=100, first_delay_s=5.0))
            engine.inject("server_error", times=100)
            with pytest.raises(BackendError, match="gave up after 1 attempts"):
                await generate(client, timeout_s=1.0)
            await client.aclose()


async def test_half_an_answer_is_not_asked_for_again():
    with trio.fail_after(10):
        async with open_fake_engine() as engine:
            client = await open_client(engine, FAST_RETRY)
            engine.inject("reset_after_headers")
            with pytest.raises(BackendError, match="connection lost after") as caught:
                await generate(client)
            assert caught.value.retryable
            assert len(engine.requests) == 2
            await client.aclose()


async def test_a_hanging_engine_times_out_and_is_left():
    with trio.fail_after(10):
        async with open_fake_engine() as engine:
            client = await open_client(engine, FAST_RETRY)
            engine.inject("hang")
            with pytest.raises(BackendError, match="not answered within") as caught:
                await generate(client, timeout_s=0.1)
            assert caught.value.retryable
            await engine.wait_until(lambda stats: stats.aborted_total == 1)
            await client.aclose()


async def test_a_client_error_is_not_retried_and_carries_the_servers_words():
    with trio.fail_after(10):
        async with open_fake_engine() as engine:
            client = await open_client(engine, FAST_RETRY)
            engine.config = FakeEngineConfig(model="another")
            with pytest.raises(BackendError, match="status 404: The model `fake-model` does not exist") as caught:
                await generate(client)
            assert not caught.value.retryable
            assert len(engine.requests) == 2
            await client.aclose()


async def test_a_dead_engine_is_retryable_and_a_wrong_url_is_not():
    async with open_fake_engine() as engine:
        client = await open_client(engine, FAST_RETRY)
    with trio.fail_after(10):
        with pytest.raises(BackendError, match="cannot connect to") as caught:
            await generate(client)
        assert caught.value.retryable
        with pytest.raises(BackendError, match="cannot connect to") as caught:
            await client.probe(timeout_s=5)
        assert caught.value.retryable
        await client.aclose()
    with pytest.raises(BackendError, match="leave out path") as caught:
        VllmClient("http://127.0.0.1:8000/v1")
    assert not caught.value.retryable
    for url in (
        "http://a\0b:80",
        "http://[::1%\0]:80",
        "http://a b:80",
        "http://a:8\n0",
        " http://a:80",
        "http://ä:80",
    ):
        with pytest.raises(BackendError, match="printable ASCII") as caught:
            VllmClient(url)
        assert not caught.value.retryable


def test_the_delay_doubles_up_to_its_maximum_with_jitter():
    policy = RetryPolicy(first_delay_s=1.0, max_delay_s=4.0)
    for attempt, ceiling_s in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 4.0), (50, 4.0)):
        delays = [policy.delay_s(attempt, Random(seed)) for seed in range(50)]
        assert ceiling_s / 2 <= min(delays) < max(delays) <= ceiling_s


# ---------------------------------------------------------------- cancel, abort, close


async def test_cancel_aborts_exactly_the_cancelled():
    with trio.fail_after(10):
        async with open_fake_engine() as engine:
            client = await open_client(engine)
            engine.hold()
            async with trio.open_nursery() as stays:
                for _ in range(3):
                    stays.start_soon(generate, client)
                async with trio.open_nursery() as goes:
                    for _ in range(5):
                        goes.start_soon(generate, client)
                    await engine.wait_until(lambda stats: stats.running == 8)
                    goes.cancel_scope.cancel()
                stats = await engine.wait_until(lambda stats: stats.running == 3)
                assert stats.aborted_total == 5
                engine.release()
            assert engine.stats.aborted_total == 5
            assert engine.stats.running_peak == 8
            await client.aclose()


async def test_a_call_cancelled_at_any_step_leaves_nothing_running():
    with trio.fail_after(30):
        async with open_fake_engine() as engine:
            client = await open_client(engine, FAST_RETRY)

            async def call():
                engine.inject("server_error")  # so that the retry is swept, too
                await generate(client)

            async def check(run):
                await engine.wait_until(lambda stats: stats.running == 0)
                assert client.http.statistics().busy == 0
                await generate(client)

            assert await cancel_sweep(call, check) > 10
            await client.aclose()


async def test_aborted_by_the_engine_keeps_what_was_sampled():
    with trio.fail_after(10):
        config = FakeEngineConfig(first_token_s=0.0, per_token_s=0.05)
        async with open_fake_engine(script=lambda prompt: ([9] * 1000, [-0.5] * 1000, "stop"), config=config) as engine:
            client = await open_client(engine)
            completions = []

            async def one():
                completions.append(await generate(client, max_tokens=1000))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(one)
                await engine.wait_until(lambda stats: stats.running == 1)
                await trio.testing.wait_all_tasks_blocked()
                engine.abort_all()
            assert completions[0].finish_reason == "abort"
            assert len(completions[0].token_ids) == len(completions[0].logprobs) < 1000
            await client.aclose()


async def test_close_fails_calls_in_flight_and_later_ones():
    failures = []

    async def fails(client):
        with pytest.raises(BackendError, match="the client is closed") as caught:
            await generate(client)
        failures.append(caught.value.retryable)

    with trio.fail_after(10):
        async with open_fake_engine() as engine:
            client = await open_client(engine, RetryPolicy(first_delay_s=100.0))
            engine.hold()
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(fails, client)
                await engine.wait_until(lambda stats: stats.running == 3)
                await client.aclose()
            await fails(client)
            assert failures == [True] * 4


async def test_the_endpoints_that_people_ask_for():
    with trio.fail_after(10):
        async with open_fake_engine() as engine:
            http = HttpClient(engine.url)
            for path in ("/health", "/version", "/v1/models", "/weight_info", "/metrics"):
                assert (await http.request("GET", path, timeout_s=5)).status == 200
            assert (await http.request("GET", "/nothing", timeout_s=5)).status == 404
            garbage = await http.request("POST", "/v1/completions", body=b"{", timeout_s=5)
            assert garbage.status == 400
            http.close()


async def test_nothing_is_left_and_errors_come_out_alone():
    def script(prompt):
        raise ZeroDivisionError("in the script")

    async def use_broken_script():
        async with open_fake_engine(script=script) as engine:
            client = await open_client(engine)
            try:
                await generate(client)
            finally:
                client.http.close()

    async def fail_in_the_block():
        async with open_fake_engine():
            raise KeyError("the body's")

    fds = len(os.listdir("/proc/self/fd"))
    with trio.fail_after(10):
        with pytest.raises(ZeroDivisionError):
            await use_broken_script()
        with pytest.raises(KeyError, match="the body's"):
            await fail_in_the_block()
    assert len(os.listdir("/proc/self/fd")) == fds
