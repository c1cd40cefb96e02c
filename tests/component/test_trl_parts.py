"""The parts of the TRL adapters that speak with a node, without TRL: checks, weights, and rollouts of given tasks."""

from __future__ import annotations

import json
import queue
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import trio
from transformers import AutoTokenizer, PretrainedConfig

from prorl_trio.chat.format import ChatFormat
from prorl_trio.client import BlockingClient, WeightsRefused
from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.integrations.trl.async_worker import RolloutBuffer, RolloutWorker
from prorl_trio.integrations.trl.model_check import check_config, check_embedding, check_tokenizer
from prorl_trio.integrations.trl.rollout_func import RolloutFunction, RolloutsRejected, run_rollouts
from prorl_trio.integrations.trl.weights import WeightTransfer, newest_version
from prorl_trio.sampling import JobTemplate
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.errors import ConfigError, MalformedJob
from prorl_trio.types.model_facts import ModelFacts
from prorl_trio.types.models import TaskInstance
from support.fake_node import FakeNode, make_outcome
from support.fake_service import TOKEN, open_service
from support.tiny_weights import make_model, tensors
from support.trl_arguments import async_arguments

pytestmark = pytest.mark.timeout(60)

DEADLINE_S = 30


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    make_tiny_model(folder)
    return folder


# ---------------------------------------------------------------- tokenizers


def facts_of(folder):
    return msgspec.convert(ChatFormat.load(folder).facts(), ModelFacts)


def test_the_node_and_transformers_say_the_same_of_a_tokenizer(model):
    facts = facts_of(model)
    assert (facts.vocab_size, facts.sampleable, facts.end_of_turn_ids) == (259, None, [258])
    check_tokenizer(AutoTokenizer.from_pretrained(model), facts)
    check_embedding(1, facts)  # without a config.json nobody knows


def test_the_rows_of_the_embedding_count(model):
    (model / "config.json").write_text(json.dumps({"vocab_size": 320}))
    facts = facts_of(model)
    assert facts.sampleable == 320
    check_embedding(320, facts)
    with pytest.raises(ConfigError, match="the trainer's model has a vocabulary of 259, the node's of 320"):
        check_embedding(259, facts)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"rope_theta": 5e5}, "rope_theta 500000.0 in its configuration, the node's 10000.0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta 500000.0"),
        ({"num_attention_heads": 8, "head_dim": 8}, "num_attention_heads 8"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06"),
    ],
)
async def test_a_model_with_the_same_tensors_that_computes_something_else_is_refused(model, changed, error):
    config = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "max_position_embeddings": 99}))
    facts = facts_of(model)
    check_config(PretrainedConfig(**config, dtype="float32"), facts)
    check_config(PretrainedConfig(model_type="other", tie_word_embeddings=False), facts)  # what both have is compared
    node = SimpleNamespace(status=lambda: {"model": msgspec.to_builtins(facts)})
    with pytest.raises(ConfigError, match=error):
        WeightTransfer(node, config=PretrainedConfig(**config | changed)).init_weight_transfer()


def test_other_ids_are_another_vocabulary(model):
    facts = facts_of(model)
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    file.write_text(json.dumps(content))
    assert facts_of(model).vocabulary != facts.vocabulary
    with pytest.raises(ConfigError, match="have 259 ids each and give them to different tokens"):
        check_tokenizer(AutoTokenizer.from_pretrained(model), facts)


# ---------------------------------------------------------------- a node


FACTS = ModelFacts(
    vocabulary="", vocab_size=12, sampleable=12, end_of_turn_ids=[2], architecture={"num_attention_heads": 4}
)


class Node(FakeNode):
    """It tells what model it has, and `told` of each job how it ends: its reward by default."""

    def __init__(self, told=lambda _spec: 1.0):
        super().__init__(self.outcome_of)
        self.told = told

    def outcome_of(self, spec):
        reward = self.told(spec)
        if reward is not None:
            return make_outcome(spec, reward=reward)
        failed = {"status": "failed", "reward": None, "trajectory": None, "cause": "sandbox", "error": "no disk"}
        return msgspec.structs.replace(make_outcome(spec), **failed)

    def check(self, spec, sink, ahead):
        if spec.instance.handler == "unknown":
            raise MalformedJob("no such handler", path="$.instance.handler")

    def statistics(self):
        return {**super().statistics(), "model": msgspec.structs.asdict(FACTS)}


async def with_client(node, use):
    """Call `use(client)` in a thread, as a trainer does, and return what it returns."""

    def run(url):
        with BlockingClient(url, TOKEN) as client:
            return use(client)

    with trio.fail_after(DEADLINE_S):
        async with open_service(node) as service:
            return await trio.to_thread.run_sync(run, service.url)


async def with_engine(folder, use):
    """Call `use(client, engine)` in a thread; the node has an engine that serves the model in `folder`."""
    config = FakeEngineConfig(development=True, model=str(folder))
    async with open_fake_engine(config=config) as engine:
        node = Node()
        node.backends = Backends(made_by(VllmClient))
        await node.backends.add(engine.url)
        try:
            return await with_client(node, lambda client: use(client, engine))
        finally:
            await node.backends.aclose()


# ---------------------------------------------------------------- weights


async def test_versions_go_on_from_the_nodes_own(tmp_path):
    base = make_model(tmp_path / "base")

    def use(client, engine):
        with client.policy_update("7") as update:
            update.load_folder(base)
        transfer = WeightTransfer(client, folder=tmp_path, base=base)
        transfer.init_weight_transfer()
        for version in ("8", "9"):
            transfer.pause()
            assert engine.paused == "wait"
            transfer.send_weights(iter(tensors(float(version)).items()))
            transfer.resume()
            assert (engine.weight_version, newest_version(client)) == (version, int(version))
        transfer.destroy()

    await with_engine(base, use)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model.embed_tokens.weight": np.zeros((13, 4), np.float32)}, "a vocabulary of 13, the node's of 12"),
        ({"model.norm.weight": np.full(4, np.nan, np.float32)}, "model.norm.weight"),
        ({"model.norm.weight": None}, "model.norm.weight"),
    ],
)
async def test_weights_that_cannot_be_used_leave_the_old_ones_at_work(tmp_path, change, error):
    base = make_model(tmp_path / "base")
    state = {name: tensor for name, tensor in {**tensors(), **change}.items() if tensor is not None}

    def use(client, engine):
        transfer = WeightTransfer(client, folder=tmp_path)
        transfer.init_weight_transfer()
        transfer.pause()
        with pytest.raises((ConfigError, WeightsRefused), match=error):
            transfer.send_weights(iter(state.items()))
        assert (engine.paused, engine.weights, newest_version(client)) == (None, str(base), 0)
        transfer.destroy()

    await with_engine(base, use)


async def test_an_end_in_the_middle_gives_the_update_up(tmp_path):
    base = make_model(tmp_path / "base")

    def use(client, engine):
        transfer = WeightTransfer(client, folder=tmp_path)
        transfer.init_weight_transfer()
        transfer.pause()
        transfer.destroy()
        assert (engine.paused, newest_version(client)) == (None, 0)

    await with_engine(base, use)


async def test_without_an_engine_there_is_no_version():
    with pytest.raises(ConfigError, match="the node has no backend"):
        await with_client(Node(), newest_version)


# ---------------------------------------------------------------- rollouts of given tasks


def instance(name, handler="math"):
    return TaskInstance(instance_id=name, handler=handler, payload={})


def rollouts(client, *instances, **options):
    settings = {"evaluation": False, "stall_s": 20.0} | options
    return run_rollouts(client, instances, lambda _: JobTemplate(max_turns=3), **settings)


async def test_rows_come_in_the_order_of_the_prompts_and_equal_neighbours_are_a_group():
    node = Node(lambda spec: float(spec.job_id.split("-")[1]))
    a, b = instance("a"), instance("b")
    outcomes = await with_client(node, lambda client: rollouts(client, a, a, b, b, a, evaluation=True))
    assert [outcome.reward for outcome in outcomes] == [0, 1, 2, 3, 4]
    assert [outcome.instance_id for outcome in outcomes] == ["a", "a", "b", "b", "a"]
    groups = [outcome.group_id for outcome in outcomes]
    assert groups[0] == groups[1] != groups[2] == groups[3] != groups[4]
    assert groups[4] != groups[0]
    assert {(spec.priority, spec.max_turns) for spec in node.submitted} == {("eval", 3)}


async def test_one_that_failed_is_sampled_again_alone_and_at_last_has_no_reward():
    node = Node(lambda spec: None if spec.job_id.split("-")[1] == "1" else 1.0)
    outcomes = await with_client(node, lambda client: rollouts(client, *[instance("a")] * 3, max_tries=4))
    assert [outcome.reward for outcome in outcomes] == [1.0, None, 1.0]
    assert sorted(spec.job_id.partition("-")[2] for spec in node.submitted) == [
        "0-0",
        "1-0",
        "1-1",
        "1-2",
        "1-3",
        "2-0",
    ]
    assert len({spec.group_id for spec in node.submitted}) == 1


async def test_a_job_that_the_node_rejects_ends_it_and_the_others_are_cancelled():
    with pytest.raises(RolloutsRejected, match="no such handler"):
        await with_client(Node(), lambda client: rollouts(client, instance("a"), instance("b", "unknown")))


async def test_a_step_that_never_ends_is_an_error_and_leaves_nothing_behind():
    node = FakeNode()

    def use(client):
        with pytest.raises(TimeoutError, match=r"no rollout has ended for 0.2 s, 2 are missing"):
            rollouts(client, instance("a", "fake"), instance("a", "fake"), stall_s=0.2)

    await with_client(node, use)
    assert not node.live


# ---------------------------------------------------------------- the worker of `AsyncGRPOTrainer`


async def test_a_worker_over_a_node_that_ends_nothing_is_found_ill(monkeypatch):
    monkeypatch.setattr("prorl_trio.integrations.trl.async_worker._sample_class", lambda: SimpleNamespace)
    monkeypatch.setattr("prorl_trio.integrations.trl.async_worker.check_tokenizer", lambda *_: None)
    monkeypatch.setattr("prorl_trio.integrations.trl.async_worker.model_facts", lambda _: None)
    node = FakeNode()
    await node.backends.add("http://e")

    def use(client):
        tokenizer = SimpleNamespace(eos_token_id=9)
        worker = RolloutWorker(client, [instance("a", "fake")], async_arguments(), tokenizer=tokenizer)
        worker.start()
        try:
            for _ in range(2):  # as TRL does: it asks how the worker is when it has waited for a row in vain
                with pytest.raises(queue.Empty):
                    worker.rollout_buffer.get(timeout=0.1)
            worker.check_health(30)
            with pytest.raises(TimeoutError, match=r"no rollout has ended for 0\.1 s"):
                worker.check_health(0.1)
        finally:
            worker.stop()

    await with_client(node, use)
    assert {spec.max_completion_tokens for spec in node.submitted} == {2048}


# ---------------------------------------------------------------- a step of `GRPOTrainer`


class Parameter:
    def __init__(self, value):
        self._value = value

    def detach(self):
        return self._value


class Policy:
    """A model of `tiny_weights`, as far as the function looks at it."""

    training = True

    def __init__(self, state, **config):
        self._state = state
        self.config = PretrainedConfig(**config)

    def named_parameters(self):
        return ((name, Parameter(value)) for name, value in self._state.items())

    def get_input_embeddings(self):
        return SimpleNamespace(weight=self._state["model.embed_tokens.weight"])


def trainer_of(model, **changed):
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    neutral["max_completion_length"] = 64
    accelerator = SimpleNamespace(
        is_main_process=True, wait_for_everyone=lambda: None, unwrap_model=lambda wrapped: wrapped
    )
    return SimpleNamespace(
        args=SimpleNamespace(**neutral | changed),
        state=SimpleNamespace(global_step=0),
        model=model,
        accelerator=accelerator,
        tools=None,
        use_vllm=False,
        processing_class=SimpleNamespace(eos_token_id=2),
    )


async def test_weights_go_to_the_engines_when_the_step_has_moved_and_only_then(tmp_path, monkeypatch):
    monkeypatch.setattr("prorl_trio.integrations.trl.rollout_func.check_tokenizer", lambda *_: None)
    base = make_model(tmp_path / "base")

    def use(client, engine):
        trainer = trainer_of(Policy(tensors(2.0)))
        transfer = WeightTransfer(client, folder=tmp_path)
        function = RolloutFunction(client, instance, transfer=transfer, details=["missing"])
        seen = []
        for step, vllm in [(0, False), (0, False), (1, False), (2, True)]:
            trainer.state.global_step, trainer.use_vllm = step, vllm
            answer = function(["a", "a"], trainer)
            seen.append((engine.weight_version, engine.weights))
        assert [version for version, _ in seen] == ["1", "1", "2", "3"]
        assert seen[0] == seen[1]
        assert seen[1][1] != seen[2][1] == seen[3][1], "TRL moves them itself where it has a vLLM"
        return answer

    answer = await with_engine(base, use)
    assert answer["rollout_reward"] == [1.0, 1.0]
    assert answer["missing"] == [None, None]
    assert [len(row) for row in answer["completion_ids"]] == [8, 8]
    assert answer["prompt_ids"] == [[], []]
    assert set(map(len, answer.values())) == {2}


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda trainer: setattr(trainer.args, "temperature", 0.9), "SimpleNamespace.temperature is 0.9"),
        (lambda trainer: setattr(trainer.args, "max_tool_calling_iterations", 3), r"JobTemplate\(max_turns=...\)"),
        (lambda trainer: setattr(trainer, "tools", [print]), "would call tools a second time"),
        (lambda trainer: setattr(trainer.model, "peft_config", {"default": 1}), "adapters are not pushed"),
        (lambda trainer: setattr(trainer, "model", Policy({"model.embed_tokens.weight": np.zeros((9, 4))})), "of 9"),
        (lambda trainer: setattr(trainer, "model", Policy(tensors(), num_attention_heads=2)), "num_attention_heads 2"),
    ],
)
async def test_a_trainer_that_a_node_cannot_serve_is_refused_before_a_rollout(monkeypatch, spoil, error):
    monkeypatch.setattr("prorl_trio.integrations.trl.rollout_func.check_tokenizer", lambda *_: None)
    node = Node()

    def use(client):
        trainer = trainer_of(Policy(tensors()))
        spoil(trainer)
        with pytest.raises(ConfigError, match=error):
            RolloutFunction(client, instance)(["a"], trainer)

    await with_client(node, use)
    assert not node.submitted


async def test_trls_completion_length_bounds_the_rows(monkeypatch):
    monkeypatch.setattr("prorl_trio.integrations.trl.rollout_func.check_tokenizer", lambda *_: None)
    node = Node()
    still = SimpleNamespace(
        init_weight_transfer=lambda: None, pause=lambda: None, send_weights=lambda _: None, resume=lambda: None
    )

    def use(client):
        for job in (JobTemplate(max_completion_tokens=99, max_turns=5), lambda _: JobTemplate(max_completion_tokens=9)):
            RolloutFunction(client, instance, job=job, transfer=still)(["a"], trainer_of(Policy(tensors())))

    await with_client(node, use)
    assert [(spec.max_completion_tokens, spec.max_turns) for spec in node.submitted] == [(64, 5), (9, 8)]


def test_a_buffer_fetches_when_it_is_asked():
    fetched = iter([["a", "b"], [], ["c"]])
    asked = []

    def fetch(timeout_s):
        asked.append(timeout_s)
        try:
            return next(fetched)
        except StopIteration:
            raise TimeoutError from None

    buffer = RolloutBuffer(fetch)
    assert buffer.qsize() == 0
    assert [buffer.get(timeout=5.0) for _ in range(3)] == ["a", "b", "c"]
    assert asked == [5.0, 5.0, 5.0]
    buffer.put_nowait("d")
    assert buffer.qsize() == 1
    assert buffer.get() == "d"
    with pytest.raises(queue.Empty):
        buffer.get(block=False)
    assert asked[-1] == 0.0
