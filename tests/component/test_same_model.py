"""The proof that an engine serves the node's model, over fakes that offer their tokenizer and such that do not."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager

import pytest
import trio
from tokenizers import AddedToken, Tokenizer

from prorl_trio.chat.format import ChatFormat
from prorl_trio.chat.tokenizer_sample import tokenizer_sample
from prorl_trio.config import HealthConfig
from prorl_trio.inference.engines.registry import EngineRegistry
from prorl_trio.inference.pool.admission import AnotherModel, ModelProof
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.fake_http import Answer
from prorl_trio.testing.fake_sglang import open_fake_sglang
from prorl_trio.testing.fake_trainer_engine import open_fake_trainer_engine
from prorl_trio.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.timeout(60)
ENGINES = pytest.mark.parametrize("open_engine", [open_fake_engine, open_fake_sglang], ids=["vllm", "sglang"])


def served(folder):
    return FakeEngineConfig(model=str(folder), tokenizer_file=str(folder / "tokenizer.json"))


def proof_of(folder):
    return ModelProof(tokenizer_sample(folder, ChatFormat.load(folder).codec))


@pytest.fixture
def node_model(tmp_path):
    make_tiny_model(tmp_path / "node")
    return tmp_path / "node"


def with_more_tokens(folder, *tokens):
    """A model whose tokenizer is the tiny one with more control tokens, as Qwen3's is Qwen2.5's."""
    make_tiny_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@asynccontextmanager
async def open_pool(folder, **options):
    backends = Backends(EngineRegistry().finder("auto", context_tokens=2048), proof=proof_of(folder), **options)
    try:
        with trio.fail_after(30):
            yield backends
    finally:
        await backends.aclose()


@ENGINES
async def test_an_engine_of_the_nodes_model_joins(open_engine, node_model, caplog):
    async with open_engine(config=served(node_model)) as engine, open_pool(node_model) as backends:
        await backends.add(engine.url)
        assert backends.accepting
    assert caplog.records == []


@ENGINES
@pytest.mark.parametrize(
    ("on_engine", "on_node"),
    [
        (("<think>",), ()),
        ((), ("<think>",)),
        (("<think>", "<tool_call>"), ("<tool_call>", "<think>")),
        (("<|a|>",), ("<|b|>",)),
    ],
    ids=["more on the engine", "more on the node", "in another order", "others"],
)
async def test_an_engine_of_another_model_does_not_join(open_engine, tmp_path, on_engine, on_node):
    """Their plain text has the same ids: only control tokens tell the models apart."""
    theirs, ours = with_more_tokens(tmp_path / "theirs", *on_engine), with_more_tokens(tmp_path / "ours", *on_node)
    async with open_engine(config=served(theirs)) as engine, open_pool(ours) as backends:
        with pytest.raises(AnotherModel) as caught:
            await backends.add(engine.url)
        message = str(caught.value)
        assert str(theirs) in message
        assert str(ours) in message
        assert "[model] path" in message
        assert (caught.value.error_code, caught.value.retryable) == ("backend_refused", False)
        assert backends.list() == ()


async def test_a_tokenizer_that_reads_no_control_tokens_out_of_text_may_write_them(node_model):
    """As Mistral's own tokenizer does."""
    async with open_fake_engine(config=served(node_model)) as engine, open_pool(node_model) as backends:
        answer = engine._tokenizer_answer

        def plain_only(call, field):
            return Answer(200, b'{"tokens": [1, 2, 3]}') if b"im_start" in call.body else answer(call, field)

        engine._tokenizer_answer = plain_only
        await backends.add(engine.url)
        assert backends.accepting


@pytest.mark.parametrize(
    ("open_engine", "answers"),
    [(open_fake_engine, None), (open_fake_sglang, None), (open_fake_trainer_engine, None), (open_fake_sglang, 500)],
    ids=["vllm", "sglang", "trainer", "sglang without its tokenizer"],
)
async def test_an_engine_that_does_not_offer_its_tokenizer_joins_and_that_is_said_once(
    open_engine, answers, node_model, caplog
):
    config = FakeEngineConfig() if answers is None else served(node_model)
    async with open_engine(config=config) as engine, open_pool(node_model) as backends:
        if answers is not None:
            engine._tokenizer_answer = lambda _call, _field: Answer(answers, b"Internal Server Error")
        for _ in range(3):
            await backends.add(engine.url)
        assert backends.accepting
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert engine.url in record.getMessage()
    assert "no proof that it serves the model of this node" in record.getMessage()
    assert str(node_model) in record.getMessage()


async def test_an_engine_that_is_started_again_with_another_model_goes_out(node_model, tmp_path):
    """Under the same name, as with `--served-model-name`."""
    other = with_more_tokens(tmp_path / "other", "<think>")
    health = HealthConfig(interval_s=0.01, open_after_failures=100)
    async with open_fake_engine(config=served(node_model)) as engine, open_pool(node_model, health=health) as backends:
        await backends.add(engine.url)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(backends.watch)
            engine.config = FakeEngineConfig(model=engine.config.model, tokenizer_file=served(other).tokenizer_file)
            while backends.accepting:
                await trio.sleep(0.01)
            (backend,) = backends.statistics()["backends"]
            assert "not that of this node's model" in backend.error
            nursery.cancel_scope.cancel()
