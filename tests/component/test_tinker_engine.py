"""A Tinker server as a backend: what it answers, loses, holds back or forgets, and which weights a token is of."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

from prorl_trio.config import BackendConfig
from prorl_trio.http.client import RetryPolicy
from prorl_trio.inference.engines import tinker
from prorl_trio.inference.engines.protocol import CompletionTimedOut, RequestRefused
from prorl_trio.inference.engines.tinker import TinkerAccess, TinkerClient
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.node.parts import engine_finder
from prorl_trio.testing.fake_engine import FakeEngineConfig
from prorl_trio.testing.fake_http import Answer
from prorl_trio.testing.fake_tinker import FakeTinker, message_field, open_fake_tinker, sample_message
from prorl_trio.types.backends import LoadWeights, PauseBackends, ResumeBackends
from prorl_trio.types.errors import BackendError, ConfigError, ContextLengthExceeded
from prorl_trio.types.models import SamplingParams
from support.completions import asked, begun

pytestmark = pytest.mark.timeout(60)

CHECKPOINT = "tinker://run/sampler_weights/1"
RETRY = RetryPolicy(max_attempts=2, first_delay_s=0.01, max_delay_s=0.01)


def script(_prompt):
    return [7, 8, 2], [-0.5, -0.25, -0.125], "stop"


@asynccontextmanager
async def open_both(kind=FakeTinker, **access):
    async with open_fake_tinker(script=script, kind=kind) as server:
        client = TinkerClient(server.url, access=TinkerAccess(**access), retry=RETRY)
        with trio.fail_after(30):
            yield server, client
        await client.aclose()


async def test_tokens_arrive_bit_for_bit_and_the_sampling_is_sent():
    async with open_both() as (server, client):
        info = await client.probe(timeout_s=5)
        assert (info.model, info.engine, info.max_model_len, info.label) == ("fake-model", "tinker", 2048, "0")
        sampling = SamplingParams(temperature=0.6, top_p=0.9, stop_token_ids=[2])
        completion = await client.generate(asked([5, 6], sampling=sampling))
        assert ([*completion.token_ids], [*completion.logprobs]) == ([7, 8, 2], [-0.5, -0.25, -0.125])
        assert (completion.finish_reason, completion.spans[0].temperature) == ("stop", 0.6)
        assert (server.requests[-1].prompt, server.requests[-1].stop_token_ids) == ([5, 6], [2])


class Crooked(FakeTinker):
    """A server that answers futures with `body`."""

    body = b""
    status = 200
    content_type = "application/x-protobuf"

    async def _retrieve(self, request_id, call):
        good = await super()._retrieve(request_id, call)
        return Answer(self.status, self.body, self.content_type) if self.body else good


def sequence(tokens, logprobs, reason="stop"):
    return sample_message({"stop_reason": reason, "tokens": tokens, "logprobs": logprobs})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (sequence([7, 8], [-0.5]), "drops token ids or logprobs: 2 ids, 1 logprobs"),
        (sequence([7], [-0.5, -0.5]), "drops token ids or logprobs: 1 ids, 2 logprobs"),
        (sequence([7, 8], []), "drops log-probabilities"),
        (sequence([-7], [-0.5]), "negative token id"),
        (sequence([7], [math.nan]), "log-probability that is none"),
        (sequence([7], [-math.inf]), "log-probability that is none"),
        (sequence([7], [0.5]), "log-probability that is none"),
        (sequence([7], [-0.5], "other"), "unknown finish_reason '7'"),
        (sequence([7] * 9, [-0.5] * 9), "asked for 1 to 8 tokens, it sampled 9"),
        (sequence([], []), "it sampled 0"),
        (sequence([7], [-0.5]) * 2, "got 2"),
        (sequence([7, 8], [-0.5, -0.5])[:-3], "not a whole protobuf message"),
        (message_field(1, message_field(2, b"\7\0\0")), "not a sample to train on"),
        (b"\x80", "not a whole protobuf message"),
        (b"\x0b", "not a whole protobuf message"),
        (b'{"type":"sample","sequences":[{"stop_reason":"stop","tokens":[7],"logprobs":[null]}]}', "not a sample"),
        (b'{"type":"sample","sequences":[{"stop_reason":"stop","tokens":[-7],"logprobs":[-0.5]}]}', "not a sample"),
        (b'{"type":"sample","sequences":[{"stop_reason":"stop","tokens":[7]}]}', "drops log-probabilities"),
        (b'{"type":"sample"}', "got 0"),
        (b'["sample"]', "not a sample"),
    ],
)
async def test_an_answer_that_cannot_be_trained_on_is_refused_with_the_reason(body, reason):
    async with open_both(Crooked) as (server, client):
        await client.probe(timeout_s=5)
        server.body = body
        server.content_type = "application/json" if body[:1] in (b"{", b"[") else "application/x-protobuf"
        with pytest.raises(BackendError, match="not fit for token-exact rollouts") as caught:
            await client.generate(asked())
        assert reason in str(caught.value)
        assert not caught.value.retryable


@pytest.mark.parametrize(
    ("tokens", "reason", "kept", "ended"),
    [
        ([7, 2, 9, 2], "length", [7, 2], "stop"),
        ([7, 8, 2], "length", [7, 8, 2], "stop"),
        ([7, 8, 9], "length", [7, 8, 9], "length"),
    ],
)
async def test_an_answer_ends_at_its_stop_token_also_from_a_server_that_ignores_it(tokens, reason, kept, ended):
    async with open_both(Crooked) as (server, client):
        await client.probe(timeout_s=5)
        server.body = sequence(tokens, [-0.5] * len(tokens), reason)
        completion = await client.generate(asked(sampling=SamplingParams(stop_token_ids=[2])))
        assert ([*completion.token_ids], completion.finish_reason) == (kept, ended)
        assert len(completion.logprobs) == completion.spans[-1].end == len(kept)
        assert completion.dropped_tokens == len(tokens) - len(kept)


async def test_fields_that_this_client_does_not_know_are_skipped():
    unknown = b"\x28\x96\x01" + b"\x39" + b"x" * 8 + b"\x45" + b"x" * 4 + message_field(15, b"?" * 300)
    async with open_both(Crooked) as (server, client):
        await client.probe(timeout_s=5)
        server.body = unknown + sequence([7, 8, 2], [-0.5, -0.25, -0.125]) + unknown
        assert [*(await client.generate(asked())).token_ids] == [7, 8, 2]


async def test_a_busy_server_is_asked_until_it_has_room_and_its_probe_does_not_fail():
    async with open_both() as (server, client):
        server.busy = 10  # five times the attempts that a failing server gets
        await client.probe(timeout_s=5)
        server.busy = 10
        assert (await client.generate(asked())).finish_reason == "stop"
        assert server.busy == 0
        server.busy = 10**6
        with pytest.raises(BackendError, match=r"429.*Too many samples in flight|not answered within") as caught:
            await client.generate(asked(timeout_s=0.3))
        assert caught.value.retryable


async def test_a_slow_submission_is_repeated_and_is_the_same_sample(monkeypatch):
    async with open_both() as (server, client):
        await client.probe(timeout_s=5)
        samples = len(server.sampled_from)
        monkeypatch.setattr(tinker, "CANCEL_GRACE_S", 0.05)
        server.busy = 10
        client._retry = RetryPolicy(max_attempts=2, first_delay_s=0.02, max_delay_s=0.02)
        assert (await client.generate(asked())).finish_reason == "stop"
        assert len(server.sampled_from) == samples + 1


@pytest.mark.parametrize("asks_again", [False, True])
async def test_a_result_is_polled_for_until_it_is_there(asks_again):
    async with open_both() as (server, client):
        await client.probe(timeout_s=5)
        server.poll_s, server.asks_again = 0.001, asks_again
        server.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.generate, asked())
            await server.wait_until(lambda stats: stats.running == 1)
            for _ in range(5):
                await server.polled.wait()
            server.release()


async def test_a_lost_future_is_sampled_again_and_a_server_that_loses_all_is_given_up():
    async with open_both() as (server, client):
        await client.probe(timeout_s=5)
        samples = len(server.sampled_from)
        server.losing = 2
        assert [*(await client.generate(asked())).token_ids] == [7, 8, 2]
        assert len(server.sampled_from) == samples + 3
        server.losing = 10
        with pytest.raises(BackendError, match="lost the session or the sample 3 times") as caught:
            await client.generate(asked())
        assert caught.value.retryable


async def test_a_restarted_server_gets_its_sessions_again_with_the_same_weights_and_version():
    async with open_both() as (server, client):
        server.checkpoints.add(CHECKPOINT)
        await client.probe(timeout_s=5)
        assert await client.load_weights(CHECKPOINT, timeout_s=5)
        assert await client.label_weights("1", timeout_s=5)
        server.restart()
        completion = await client.generate(asked())
        assert server.sampled_from[-1] == CHECKPOINT
        assert [span.policy_version for span in completion.spans] == ["1"]
        server.restart()
        info = await client.probe(timeout_s=5)
        assert (info.label, info.weights, server.sampled_from[-1]) == ("1", CHECKPOINT, CHECKPOINT)
        server.restart()
        server.checkpoints.clear()
        with pytest.raises(BackendError, match=f"are the weights {CHECKPOINT} still there"):
            await client.generate(asked())


async def test_a_sample_has_the_version_that_its_weights_had_when_it_began():
    async with open_both() as (server, client):
        await client.probe(timeout_s=5)
        found = []

        async def before():
            found.append(await client.generate(asked()))

        assert await client.label_weights("1", timeout_s=5)
        server.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(before)
            await server.wait_until(lambda stats: stats.running == 1)
            assert await client.label_weights("2", timeout_s=5)
            server.release()
        found.append(await client.generate(asked()))
        assert [versions(each) for each in found] == [["1"], ["2"]]


async def test_many_at_once_open_one_session():
    async with open_both() as (server, client):
        await client.probe(timeout_s=5)
        server.restart()
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(client.generate, asked())
        assert (len(server.sessions), len(server.samplers)) == (1, 1)


@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_a_sample_that_nobody_waits_for_is_cancelled_in_the_server(how):
    async with open_both() as (server, client):
        await client.probe(timeout_s=5)
        server.hold()
        if how == "timeout":
            with pytest.raises(CompletionTimedOut):
                await client.generate(asked(timeout_s=0.3))
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.generate, asked())
                await server.wait_until(lambda stats: stats.running == 1)
                nursery.cancel_scope.cancel()
        await server.wait_until(lambda stats: stats.running == 0)
        assert len(server.cancelled) == 1


async def test_a_failed_sample_is_the_servers_or_the_requests_doing():
    async with open_both() as (server, client):
        await client.probe(timeout_s=5)
        server.inject("server_error")
        with pytest.raises(BackendError, match="the sample failed: Internal server error") as caught:
            await client.generate(asked())
        assert caught.value.retryable

    async with open_both(Crooked) as (server, client):
        await client.probe(timeout_s=5)
        server.body, server.content_type = b'{"error":"bad prompt","category":"user"}', "application/json"
        with pytest.raises(RequestRefused, match="bad prompt"):
            await client.generate(asked())
        server.status, server.body = 400, b'{"detail":"the engine is away"}'
        with pytest.raises(BackendError, match=r"the sample failed: .*the engine is away") as caught:
            await client.generate(asked())
        assert caught.value.retryable
        server.body = b'{"detail":"the maximum context length is 64 tokens, and your prompt has 70"}'
        with pytest.raises(ContextLengthExceeded) as exceeded:
            await client.generate(asked())
        assert exceeded.value.max_model_len == 64


async def test_the_key_is_sent_with_each_request_and_is_in_no_message():
    async with open_both(api_key="tml-secret") as (server, client):
        server.api_key = "tml-secret"
        await client.probe(timeout_s=5)
        assert (await client.generate(asked())).token_ids
        server.api_key = "tml-other"
        with pytest.raises(BackendError, match="401") as caught:
            await client.probe(timeout_s=5)
        assert "tml-" not in str(caught.value)
        assert "tml-" not in repr(client)


class Prefixed(FakeTinker):
    """A server whose endpoints have a path in front."""

    async def _answer(self, call):
        if not call.path.startswith("/services/t/"):
            await trio.lowlevel.checkpoint()
            return Answer(404, b"{}")
        return await super()._answer(msgspec.structs.replace(call, path=call.path.removeprefix("/services/t")))


async def test_the_url_may_have_a_path_where_the_kind_is_named():
    async with open_fake_tinker(script=script, kind=Prefixed) as server:
        url = f"{server.url}/services/t/"
        client = await engine_finder(BackendConfig(engine="tinker", urls=[url]), None)(url, 5)
        assert (await client.probe(timeout_s=5)).url == client.url == f"{server.url}/services/t"
        assert (await client.generate(asked())).token_ids
        await client.aclose()
    with pytest.raises(ConfigError, match="leave out path"):
        engine_finder(BackendConfig(urls=[url]), None)


class TwoModels(FakeTinker):
    """A server of several models, which does not report how long a context may be."""

    async def _answer(self, call):
        if call.path.endswith("get_server_capabilities"):
            await trio.lowlevel.checkpoint()
            cards = [{"model_name": "other"}, {"model_name": "fake-model"}, {"model_name": "x", "sampleable": False}]
            return Answer(200, msgspec.json.encode({"supported_models": cards}))
        return await super()._answer(call)


async def test_one_of_several_models_is_named_and_the_context_of_a_silent_server_is_configured():
    async with open_fake_tinker(kind=TwoModels) as server:
        for model, tokens, reason in (
            ("", 64, r"backends\.tinker\.model is not set; it offers: other, fake-model, x"),
            ("third", 64, "wanted third"),
            ("fake-model", 0, r"backends\.max_model_len"),
        ):
            client = TinkerClient(server.url, access=TinkerAccess(model=model), context_tokens=tokens)
            with pytest.raises(BackendError, match=reason) as caught:
                await client.probe(timeout_s=5)
            assert not caught.value.retryable
            await client.aclose()
        client = TinkerClient(server.url, access=TinkerAccess(model="fake-model"), context_tokens=64)
        assert (await client.probe(timeout_s=5)).max_model_len == 64
        await client.aclose()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"weights": "/checkpoints/1"}, "is not a path of the form tinker://"),
        ({"api_key_file": "/a", "api_key_env": "B"}, "not both"),
    ],
)
def test_careless_settings_are_refused_when_they_are_read(fields, reason):
    with pytest.raises(msgspec.ValidationError, match=reason):
        msgspec.convert({"tinker": fields}, BackendConfig)


def test_a_key_that_is_not_there_stops_the_start(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    config = msgspec.convert({"engine": "tinker", "tinker": {"api_key_env": "NO_SUCH_KEY"}}, BackendConfig)
    with pytest.raises(ConfigError, match=r"backends\.tinker\.api_key_env: \$NO_SUCH_KEY is empty"):
        engine_finder(config, None)


async def test_a_node_starts_with_the_checkpoint_that_is_configured():
    async with open_both(weights=CHECKPOINT) as (server, client):
        with pytest.raises(BackendError, match="still there"):
            await client.probe(timeout_s=5)
        server.checkpoints.add(CHECKPOINT)
        assert (await client.probe(timeout_s=5)).weights == CHECKPOINT
        assert set(server.sampled_from) == {CHECKPOINT}


@asynccontextmanager
async def open_pool(server):
    backends = Backends(engine_finder(BackendConfig(engine="tinker"), None))
    await backends.add(server.url)
    try:
        with trio.fail_after(30):
            yield backends
    finally:
        await backends.aclose()


async def complete(backends, task):
    async with backends.lease(task) as lease:
        return await lease.complete(begun(asked(request_id=task)))


def versions(completion):
    return [span.policy_version for span in completion.spans]


async def test_an_update_with_keep_gives_each_token_the_version_of_its_own_weights():
    async with open_fake_tinker(script=script, config=FakeEngineConfig()) as server, open_pool(server) as backends:
        server.checkpoints.add(CHECKPOINT)
        server.hold()
        found = []

        async def before():
            found.append(await complete(backends, "before"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(before)
            await server.wait_until(lambda stats: stats.running == 1)
            await backends.operate(PauseBackends("keep"))
            server.release()
            report = await backends.operate(LoadWeights(CHECKPOINT))
            assert [each.engine for each in report.backends] == ["loaded"]
            await backends.operate(ResumeBackends("1"))
        assert versions(found[0]) == ["0"]
        assert versions(await complete(backends, "after")) == ["1"]
        assert server.sampled_from[-1] == CHECKPOINT


async def test_a_checkpoint_that_is_not_there_leaves_the_former_weights_and_their_version():
    async with open_fake_tinker(script=script) as server, open_pool(server) as backends:
        server.checkpoints.add(CHECKPOINT)
        for path, version in ((CHECKPOINT, "1"), ("tinker://run/sampler_weights/2", None)):
            await backends.operate(PauseBackends("wait"))
            report = await backends.operate(LoadWeights(path))
            await backends.operate(ResumeBackends(version))
        assert report.backends[0].engine == "failed"
        assert versions(await complete(backends, "after")) == ["1"]
        assert server.sampled_from[-1] == CHECKPOINT


async def test_weights_on_trial_that_are_given_up_are_replaced_by_the_base_model():
    async with open_fake_tinker(script=script) as server, open_pool(server) as backends:
        server.checkpoints.add(CHECKPOINT)
        await backends.operate(PauseBackends("wait"))
        await backends.operate(LoadWeights(CHECKPOINT))
        await backends.operate(ResumeBackends(None))
        assert versions(await complete(backends, "after")) == ["0"]
        assert server.sampled_from[-1] == "fake-model"


async def test_a_server_added_again_without_the_policys_weights_does_not_join_unseen():
    """Its new client samples from the base model, so its tokens would be of another version than is recorded."""
    async with open_fake_tinker(script=script) as server, open_pool(server) as backends:
        server.checkpoints.add(CHECKPOINT)
        await backends.operate(PauseBackends("wait"))
        await backends.operate(LoadWeights(CHECKPOINT))
        await backends.operate(ResumeBackends("1"))
        await backends.remove(server.url)
        with pytest.raises(BackendError, match="its weights have no name, and the policy's are 1"):
            await backends.add(server.url, policy_version="1")
