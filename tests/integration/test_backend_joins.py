"""A whole node whose backends come and go while rollouts run."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager
from copy import copy

import pytest
import trio

from prorl_trio.config import BackendConfig, HealthConfig, ModelConfig, NodeConfig, SandboxConfig, StagesConfig
from prorl_trio.node.core import NO_SESSIONS, open_node
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.errors import BackendError
from prorl_trio.types.models import JobSpec, SamplingParams, TaskInstance
from support.chat_families import write_family_model

pytestmark = pytest.mark.timeout(90)


class Trainer:
    """Takes outcomes."""

    session_id = "trainer"

    def __init__(self):
        self.outcomes = {}
        self.changed = trio.lowlevel.ParkingLot()

    def deliver(self, outcome):
        assert outcome.job_id not in self.outcomes
        self.outcomes[outcome.job_id] = outcome
        self.changed.unpark_all()

    def report(self, job_id, status, detail):
        self.changed.unpark_all()

    async def wait_outcomes(self, count):
        while len(self.outcomes) < count:
            await self.changed.park()


def job(job_id):
    instance = TaskInstance(instance_id="q", handler="math", payload={"question": "6 * 7?", "answer": "42"})
    return JobSpec(job_id=job_id, instance=instance, sampling=SamplingParams(max_output_tokens=200), max_turns=2)


class Engines:
    """Fake engines that answer rightly, at ports that are told before."""

    def __init__(self, tiny):
        self.config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000)
        self.tiny = tiny

    def open(self, port=0):
        ids = self.tiny.turn(r"\boxed{42}")
        return open_fake_engine(script=lambda _: (ids, [-0.5] * len(ids), "stop"), config=self.config, port=port)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@asynccontextmanager
async def open_pool_node(tmp_path, urls, outbox=NO_SESSIONS, **backends):
    config = NodeConfig(
        model=ModelConfig(path=str(tmp_path)),
        backends=BackendConfig(urls=urls, **backends),
        sandbox=SandboxConfig(provider="process", max_warm=0),
        stages=StagesConfig(eval_workers=1),
    )
    with trio.fail_after(60):
        async with open_node(config, outbox=outbox) as node:
            yield node


async def wait_job(node, job_id, what):
    """Until the job waits for what begins so."""
    while not any(view["job_id"] == job_id and view["waiting_on"].startswith(what) for view in node.live_jobs()):
        await trio.sleep(0.01)


async def test_jobs_go_on_while_backends_join_are_drained_and_cleared(tmp_path):
    engines, trainer, port = Engines(make_tiny_model(tmp_path)), Trainer(), free_port()
    url, outbox = f"http://127.0.0.1:{port}", copy(NO_SESSIONS)
    async with (
        engines.open() as late,
        open_pool_node(tmp_path, [url], outbox, weights={url: 2.0}, health=HealthConfig(interval_s=0)) as node,
    ):

        def rows():
            return [(row.url, row.state, row.weight) for row in node.statistics()["backends"]["backends"]]

        assert rows() == [(url, "down", 2.0)]
        assert node.unreadiness()
        node.take(job("j"), trainer, 1)
        await wait_job(node, "j", f"a backend that is up: {url}")
        async with engines.open(port) as first:
            await trainer.wait_outcomes(1)
            assert (rows(), node.unreadiness()) == ([(url, "active", 2.0)], "")
            outbox.refusal = "the ledger takes nothing new: disk"
            assert node.unreadiness() == outbox.refusal
            outbox.refusal = ""
            first.hold()
            node.take(job("stays"), trainer, 1)
            await first.wait_until(lambda stats: stats.running == 1)
            node.backends.drain(url)
            await node.backends.clear()
            assert (rows(), node.backends.urls()) == ([(url, "removed", 2.0)], ())
            node.take(job("late"), trainer, 1)
            await wait_job(node, "late", "a backend that takes tasks: none is registered")
            await node.backends.add(late.url, 0.5)
            await trainer.wait_outcomes(2)
            assert list(trainer.outcomes) == ["j", "late"]
            first.release()
            await trainer.wait_outcomes(3)
            assert rows() == [(late.url, "active", 0.5)]
            assert (first.stats.running, len(late.requests)) == (0, 2)  # the late job's, and that of the probe
    for outcome in trainer.outcomes.values():
        assert (outcome.status, outcome.reward) == ("completed", 1.0), outcome.error


async def test_a_backend_of_another_model_gets_no_job(tmp_path):
    make_tiny_model(tmp_path / "node")
    other = write_family_model(tmp_path / "other", "qwen3")
    config = FakeEngineConfig(model=str(other), tokenizer_file=str(other / "tokenizer.json"))
    async with open_fake_engine(config=config) as engine:
        async with open_pool_node(tmp_path / "node", [engine.url], health=HealthConfig(interval_s=0)) as node:
            (row,) = node.statistics()["backends"]["backends"]
            assert row.state == "down"
            assert str(other) in row.error
            assert str(tmp_path / "node") in row.error
        with pytest.raises(BackendError, match="whose tokenizer is not that of this node's model"):
            async with open_pool_node(tmp_path / "node", [engine.url], required=True):
                pass
        assert engine.stats.completions_total <= 8  # the probes


async def test_ids_of_another_model_are_no_work_of_the_policys(tmp_path):
    """Of an engine that offers no tokenizer: the job fails, and has no reward."""
    make_tiny_model(tmp_path)
    ids, trainer = [5, 34_764, 258], Trainer()
    async with (
        open_fake_engine(script=lambda _: (ids, [-0.5] * 3, "stop")) as engine,
        open_pool_node(tmp_path, [engine.url]) as node,
    ):
        node.take(job("j"), trainer, 1)
        await trainer.wait_outcomes(1)
    outcome = trainer.outcomes["j"]
    assert (outcome.status, outcome.reward, outcome.error_code) == ("failed", None, "backend_refused")
    assert "34764" in outcome.error
