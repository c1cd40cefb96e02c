"""A whole node: WebSocket, pipeline, agent, a real daemon in a real sandbox; only the engine is fake."""

from __future__ import annotations

import msgspec
import pytest
import trio

from prorl_ipc.session import Accepted, Rejected
from prorl_trio.client import connect
from prorl_trio.config import AdmissionConfig, BackendConfig, ListenConfig, ModelConfig, NodeConfig, SandboxConfig
from prorl_trio.node.core import open_node
from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.errors import BackendError, ConfigError, Unauthorized
from prorl_trio.types.models import TaskInstance
from support.whole_node import TOKEN, job, open_service, usable

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(params=["bubblewrap", "apptainer", "process"])
def provider(request):
    return usable(request.param)


CALL = '<tool_call>{"name": "ipython", "arguments": {"code": "x = 6; x * 7"}}</tool_call>'


async def test_a_rollout_from_the_trainer_to_the_sandbox_and_back(tmp_path, provider):
    async with open_service(tmp_path, provider=provider, says=[CALL, r"\boxed{42}"]) as (url, engine, ends):
        endpoint = msgspec.json.decode((tmp_path / "endpoint.json").read_bytes())
        assert endpoint["url"] == url
        async with connect(url, TOKEN) as client:
            (answer,) = await client.submit([job("j")])
            assert isinstance(answer, Accepted)
            async for outcome in client.results(count=1):
                assert (outcome.status, outcome.reward) == ("completed", 1.0), outcome.error
                assert outcome.trajectory.turns[0].observations == ["42"]
                prompts = [request.prompt for request in engine.requests]
                (segment,) = outcome.trajectory.segments
                assert segment.token_ids.tolist()[: len(prompts[-1])] == prompts[-1]
            status = await client.status()
            assert status["sandboxes"]["live"] == 0
            assert status["sandboxes"]["provider"] == provider
        ends.terminate()
    assert ends.result == [True]


async def test_bad_jobs_are_rejected_one_by_one_and_good_ones_beside_them_run(tmp_path):
    bad_payload = TaskInstance(instance_id="q", handler="math", payload={"question": "6*7?", "answer": 42})
    unknown = TaskInstance(instance_id="q", handler="alchemy", payload={})
    async with open_service(tmp_path, says=[r"\boxed{42}"]) as (url, _, _), connect(url, TOKEN) as client:
        answers = await client.submit([job("a", instance=bad_payload), job("b"), job("c", instance=unknown)])
        assert [type(answer) for answer in answers] == [Rejected, Accepted, Rejected]
        assert (answers[0].code, answers[0].path) == ("malformed", "$.instance.payload.answer")
        assert answers[2].code == "unknown_handler"
        assert "math" in answers[2].message
        async for outcome in client.results(count=1):
            assert (outcome.job_id, outcome.status) == ("b", "completed")


async def test_a_plug_in_that_cannot_check_a_payload_rejects_it(tmp_path, monkeypatch):
    def broken(_self, payload):
        return payload["no such key"]

    monkeypatch.setattr(MathHandler, "validate", broken)
    async with open_service(tmp_path) as (url, _, _), connect(url, TOKEN) as client:
        (answer,) = await client.submit([job("a")])
        assert (answer.code, answer.path) == ("malformed", "$.instance.payload")
        assert "KeyError" in answer.message


async def test_the_same_id_with_another_spec_is_a_duplicate(tmp_path):
    async with open_service(tmp_path) as (url, engine, _), connect(url, TOKEN) as client:
        engine.hold()
        assert isinstance((await client.submit([job("j")]))[0], Accepted)
        (again, other) = await client.submit([job("j"), job("j", question="another")])
        assert isinstance(again, Accepted)
        assert other.code == "duplicate_job"
        await client.cancel(["j"])


async def test_a_wrong_token(tmp_path):
    async with open_service(tmp_path) as (url, _, _):
        with pytest.raises(Unauthorized):
            async with connect(url, "wrong"):
                pytest.fail("the node took a wrong token")


async def test_a_question_longer_than_the_context_fails_with_both_figures(tmp_path):
    async with open_service(tmp_path, max_model_len=900) as (url, _, _), connect(url, TOKEN) as client:
        await client.submit([job("j", question="x" * 2000)])
        async for outcome in client.results(count=1):
            assert (outcome.status, outcome.reward) == ("failed", None)
            assert "context of 900" in outcome.error


async def test_a_backend_that_drops_token_ids_fails_the_job_and_is_refused_at_registration(tmp_path):
    async with open_service(tmp_path) as (url, engine, _), connect(url, TOKEN) as client:
        engine.inject("drop_token_ids", times=1)
        await client.submit([job("j")])
        async for outcome in client.results(count=1):
            assert (outcome.status, outcome.cause, outcome.reward) == ("failed", "inference", None)
        async with open_fake_engine(config=engine.config) as unfit:
            unfit.inject("drop_token_ids", times=10)
            with pytest.raises(BackendError, match="token"):
                await client.add_backend(unfit.url)
        with pytest.raises(BackendError):
            await client.add_backend("http://127.0.0.1:9")


async def test_jobs_wait_for_a_backend_and_backends_come_and_go(tmp_path):
    async with open_service(tmp_path, says=[r"\boxed{42}"]) as (url, engine, _), connect(url, TOKEN) as client:
        await client.remove_backend(engine.url)
        await client.submit([job("j")])
        with trio.move_on_after(0.5) as waited:
            async for _ in client.results(count=1):
                pytest.fail("there was no backend")
        assert waited.cancelled_caught
        await client.add_backend(engine.url)
        async for outcome in client.results(count=1):
            assert outcome.status == "completed"


async def test_cancel_ends_the_sandbox_and_the_call(tmp_path, provider):
    async with open_service(tmp_path, provider=provider) as (url, engine, _), connect(url, TOKEN) as client:
        engine.hold()
        await client.submit([job("j")])
        await engine.wait_until(lambda stats: stats.running == 1)
        answer = await client.cancel(["j", "never-heard-of"])
        assert (answer.cancelled, answer.unknown) == (["j"], ["never-heard-of"])
        assert (await client.status())["sandboxes"]["live"] == 0
        await engine.wait_until(lambda stats: stats.running == 0)
        async for outcome in client.results(count=1):
            assert outcome.status == "cancelled"


async def test_a_trainer_that_comes_back_finds_its_outcomes(tmp_path):
    async with open_service(tmp_path, says=[r"\boxed{42}"]) as (url, engine, _):
        async with connect(url, TOKEN) as client:
            engine.hold()
            await client.submit([job("j")])
            session_id = client.session_id
        engine.release()
        async with connect(url, TOKEN, session_id=session_id) as client:
            async for outcome in client.results(count=1):
                assert (outcome.job_id, outcome.reward) == ("j", 1.0)


async def test_drain_lets_jobs_finish_and_takes_nothing_new(tmp_path):
    async with open_service(tmp_path, says=[r"\boxed{42}"]) as (url, engine, ends), connect(url, TOKEN) as client:
        engine.hold()
        await client.submit([job("j")])
        await engine.wait_until(lambda stats: stats.running == 1)
        ends.terminate()
        while not (await client.status())["draining"]:
            await trio.sleep(0.01)
        (answer,) = await client.submit([job("late")])
        assert answer.code == "draining"
        engine.release()
        async for outcome in client.results(count=1):
            assert outcome.status == "completed"
    assert ends.result == [True]


async def test_a_second_signal_cancels(tmp_path):
    async with open_service(tmp_path) as (url, engine, ends), connect(url, TOKEN) as client:
        engine.hold()
        await client.submit([job("j")])
        await engine.wait_until(lambda stats: stats.running == 1)
        ends.terminate()
        while not (await client.status())["draining"]:
            await trio.sleep(0.01)
        ends.terminate()
        async for outcome in client.results(count=1):
            assert (outcome.status, outcome.error) == ("cancelled", "the node is shutting down")
        assert engine.stats.running == 0
    assert ends.result == [False]


async def test_a_model_folder_without_a_chat_template_is_refused_at_the_start(tmp_path):
    make_tiny_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    config = NodeConfig(model=ModelConfig(path=str(tmp_path)), listen=ListenConfig(token=TOKEN))
    with pytest.raises(ConfigError, match="chat template"):
        async with open_node(config):
            pytest.fail("the node started")


async def test_a_required_backend_that_is_down_stops_the_start(tmp_path):
    make_tiny_model(tmp_path)
    config = NodeConfig(
        model=ModelConfig(path=str(tmp_path)),
        sandbox=SandboxConfig(provider="process"),
        backends=BackendConfig(urls=["http://127.0.0.1:9"], required=True, probe_timeout_s=1.0),
    )
    with pytest.raises(BackendError):
        async with open_node(config):
            pytest.fail("the node started")


async def test_a_required_backend_that_is_paused_joins_when_it_is_resumed(tmp_path):
    make_tiny_model(tmp_path)
    engine_config = FakeEngineConfig(vocab_size=259, development=True)
    async with open_fake_engine(config=engine_config) as engine:
        engine.begin_pause("wait")
        config = NodeConfig(
            model=ModelConfig(path=str(tmp_path)),
            sandbox=SandboxConfig(provider="process"),
            backends=BackendConfig(urls=[engine.url], required=True, probe_timeout_s=5.0),
        )
        with trio.fail_after(60):
            async with open_node(config) as node:
                (backend,) = node.backends.statistics()["backends"]
                assert backend.state == "down"
                assert f"POST {engine.url}/resume" in backend.error
                engine.end_pause()
                while not node.backends.list():
                    await trio.sleep(0.05)


async def test_a_full_node_rejects_with_advice_and_a_patient_client_gets_in(tmp_path):
    says = [r"\boxed{42}"] * 8
    limits = AdmissionConfig(max_live=2)
    async with open_service(tmp_path, says=says, admission=limits) as (url, _, _), connect(url, TOKEN) as client:
        with trio.fail_after(60):
            answers = await client.submit([job(f"a{n}") for n in range(4)], patience_s=0)
            assert [type(answer) for answer in answers] == [Accepted, Accepted, Rejected, Rejected]
            assert "admission.max_live" in answers[2].message
            assert 0 < answers[2].retry_after_s <= 60
            patient = await client.submit([job(f"b{n}") for n in range(4)])
            assert [type(answer) for answer in patient] == [Accepted] * 4
            outcomes = [outcome async for outcome in client.results(6)]
            assert {outcome.status for outcome in outcomes} == {"completed"}
