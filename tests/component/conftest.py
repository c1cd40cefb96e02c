"""What component tests share: for the core, resources over a fake engine and a fake sandbox, and an observer of jobs;
for the edges, a fake node."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from prorl_trio.agent.context import Resources
from prorl_trio.agent.scoring import open_scorer_pool
from prorl_trio.chat.format import ChatFormat
from prorl_trio.config import AgentConfig, ModelConfig, NodeConfig
from prorl_trio.http.client import RetryPolicy
from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.pipeline.pipeline import open_pipeline
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import JobSpec, SamplingParams, TaskInstance
from support.fake_node import FakeNode

FAST_RETRY = RetryPolicy(max_attempts=2, first_delay_s=0.01)


class Observer:
    """Records what a session would get."""

    session_id = "trainer"

    def __init__(self):
        self.outcomes, self.statuses = {}, []
        self._changed = trio.lowlevel.ParkingLot()

    def deliver(self, outcome):
        assert outcome.job_id not in self.outcomes, "a job has one outcome"
        self.outcomes[outcome.job_id] = outcome

    def report(self, job_id, status, detail):
        self.statuses.append((job_id, status))
        self._changed.unpark_all()

    async def wait_status(self, job_id, status):
        while (job_id, status) not in self.statuses:
            await self._changed.park()


class Rig:
    """A tiny model, an engine that says what `says` holds, and a sandbox host, for one test."""

    def __init__(self, folder):
        self.tiny = make_tiny_model(folder)
        self.folder = folder
        self.says = []
        self.provider = FakeProvider()
        self.observer = Observer()
        self.config = NodeConfig(model=ModelConfig(path=str(folder)), agent=AgentConfig(max_nudges=1))
        self.engine = None
        self.resources = None
        self.pipeline = None

    def script(self, _prompt):
        ids = self.tiny.turn(self.says.pop(0)) if self.says else self.tiny.turn("I do not know.")
        return ids, [-0.25] * len(ids), "stop"

    def spec(self, job_id="job", **fields):
        instance = TaskInstance(instance_id="q", handler="math", payload={"question": "What is 6 * 7?", "answer": "42"})
        defaults = {"sampling": SamplingParams(max_output_tokens=200), "max_turns": 4, "instance": instance}
        return JobSpec(job_id=job_id, **{**defaults, **fields})

    @asynccontextmanager
    async def open(self, *, max_model_len=4000):
        engine_config = FakeEngineConfig(
            vocab_size=259, end_of_turn_id=self.tiny.end_of_turn_id, max_model_len=max_model_len
        )
        async with AsyncExitStack() as stack:
            self.engine = await stack.enter_async_context(open_fake_engine(script=self.script, config=engine_config))
            backends = Backends(made_by(lambda url: VllmClient(url, retry=FAST_RETRY)))
            stack.push_async_callback(backends.aclose)
            await backends.add(self.engine.url)
            self.resources = Resources(
                config=self.config,
                chat_format=ChatFormat.load(self.folder),
                backends=backends,
                scorers=await stack.enter_async_context(open_scorer_pool(2)),
            )
            yield self

    @asynccontextmanager
    async def open_pipeline(self):
        """The rig with a running pipeline; afterwards nothing of any job may be left."""
        async with self.open(), open_sandbox_host(self.provider) as host, trio.open_nursery() as service:
            async with open_pipeline(self.resources, host, service) as self.pipeline:
                yield self
            assert self.provider.live == []
            assert self.pipeline.statistics()["jobs"] == 0
            assert [s.busy for s in self.pipeline.stages] == [0, 0, 0]
            assert self.resources.backends.statistics()["open_leases"] == 0


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path / "model")


@pytest.fixture
def node():
    return FakeNode()


@pytest.fixture
async def deadline(request):
    """Fails a test that takes longer than the `DEADLINE_S` of its module."""
    with trio.fail_after(request.module.DEADLINE_S):
        yield
