"""A science question through a real node: a scripted policy searches the node's corpus, computes, and finishes."""

from __future__ import annotations

import os
import signal
from functools import partial

import msgspec
import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.config import NodeConfig
from prorl_trio.node.serve import serve_node
from prorl_trio.tasks.handlers.registry import HandlerRegistry
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.fake_search import open_fake_retrieve
from prorl_trio.testing.search_contract import DOCUMENTS
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import JobSpec, TaskInstance

pytestmark = pytest.mark.timeout(240)

QUESTION = "Which energy has a photon of 500 nm? Find the speed of light."
NUMBER = {"kind": "number", "answer": 3.97e-19, "unit": "J"}
COMPUTE = "6.62607015e-34 * 299792458 / 500e-9"
STEPS = [
    ("search", {"query": "speed of light in vacuum"}),
    ("ipython", {"code": COMPUTE}),
    ("bash", {"command": "echo $((7 * 11))"}),
    ("finish", {"answer": "2.48 eV"}),
]


def call(name, arguments):
    return f"<tool_call>\n{msgspec.json.encode({'name': name, 'arguments': arguments}).decode()}\n</tool_call>"


class Run:
    """A node with the handlers that are installed, and a policy that takes `STEPS`."""

    def __init__(self, folder, search):
        self.folder, self.search = folder, search
        self.tiny = make_tiny_model(folder / "model")

    def script(self, prompt):
        taken = self.tiny.decode(prompt).count("<tool_response>")
        ids = self.tiny.turn(call(*STEPS[taken]))
        return ids, [-0.5] * len(ids), "stop"

    async def outcomes(self, *jobs):
        engine_config = FakeEngineConfig(vocab_size=259, end_of_turn_id=self.tiny.end_of_turn_id, max_model_len=12_000)
        async with open_fake_engine(script=self.script, config=engine_config) as engine, trio.open_nursery() as nursery:
            tables = {
                "model": {"path": str(self.folder / "model")},
                "listen": {"port": 0, "token": "t"},
                "backends": {"urls": [engine.url]},
                "sandbox": {"provider": "process"},
                "arena": {"enabled": False},
                "search": self.search,
            }
            serve = partial(serve_node, msgspec.convert(tables, NodeConfig), HandlerRegistry.from_entry_points())
            host, port = await nursery.start(lambda *, task_status: serve(task_status=task_status))
            async with connect(f"ws://{host}:{port}", "t") as client:
                await client.submit(jobs)
                outcomes = {outcome.job_id: outcome async for outcome in client.results(len(jobs))}
            os.kill(os.getpid(), signal.SIGTERM)
        return outcomes


def job(job_id, grader):
    instance = TaskInstance(instance_id=job_id, handler="stem", payload={"question": QUESTION, "grader": grader})
    return JobSpec(job_id=job_id, instance=instance, max_turns=6)


async def test_it_searches_the_corpus_computes_and_answers_in_another_unit(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    lines = [{"id": each.document_id, "title": each.title, "text": each.text} for each in DOCUMENTS]
    corpus.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    search = {"backend": "bm25", "corpus": str(corpus), "index_dir": str(tmp_path / "indexes")}
    with trio.fail_after(200):
        outcomes = await Run(tmp_path, search).outcomes(
            job("right", NUMBER), job("wrong", {**NUMBER, "answer": 5e-19}), job("needless", {**NUMBER, "unit": "m"})
        )
    right, wrong, needless = (outcomes[name] for name in ("right", "wrong", "needless"))
    assert (right.status, right.reward, right.trajectory.stop_reason) == ("completed", 1.0, "finished")
    assert [call.name for turn in right.trajectory.turns for call in turn.tool_calls] == [name for name, _ in STEPS]
    found, computed, echoed, _ = (turn.observations[0] for turn in right.trajectory.turns)
    assert found.startswith("[1] Speed of light (light)\nIn vacuum exactly 299792458 m/s.")
    assert computed == repr(eval(COMPUTE))
    assert echoed == "77"
    assert right.details["value"] == pytest.approx(3.973e-19, rel=1e-3)
    assert right.details["searches"] == 1
    assert (wrong.reward, needless.reward) == (0.0, 0.0)


async def test_a_node_whose_search_is_gone_gives_no_reward_and_says_why(tmp_path):
    with trio.fail_after(200):
        async with open_fake_retrieve(DOCUMENTS) as server:
            server.down = True
            run = Run(tmp_path, {"backend": "retrieve", "url": server.url, "max_attempts": 1})
            outcomes = await run.outcomes(job("lost", NUMBER))
    lost = outcomes["lost"]
    assert (lost.status, lost.reward, lost.cause, lost.error_code) == ("failed", None, "node", "search_unavailable")
    assert "status 503" in lost.error
    assert len(lost.trajectory.turns) == 1
