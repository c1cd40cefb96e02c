"""Whatever is cancelled, wherever it is: each job ends once, and nothing of it is left."""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgspec
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_trio.agent.context import Resources
from prorl_trio.config import ModelConfig, NodeConfig, StagesConfig
from prorl_trio.pipeline.job import Job
from prorl_trio.pipeline.pipeline import open_pipeline
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.types.models import JobSpec, TaskInstance
from support.cancel_sweep import cancel_sweep

CONFIG = NodeConfig(
    model=ModelConfig(path="unused"),
    stages=StagesConfig(init_workers=1, run_workers=2, eval_workers=1, ready_queue=1, eval_queue=1),
)
RESOURCES = Resources(config=CONFIG, chat_format=None, backends=None, scorers=None)


class Steps(AgentHandler):
    """A few checkpoints in each stage, and a sandbox action in INIT and RUN."""

    name = "steps"
    after_run = "release"

    def validate(self, payload):
        pass

    def sandbox_spec(self, context):
        return SandboxSpec()

    async def init(self, context):
        await context.sandbox.bash("true", timeout_s=1)

    async def run(self, context):
        for _ in range(context.spec.max_turns):
            await context.sandbox.bash("true", timeout_s=1)

    async def eval(self, context):
        await trio.lowlevel.checkpoint()
        return Evaluation(reward=1.0, details={})


class KeepsSandbox(Steps):
    after_run = "keep"


class Observer:
    session_id = "s"

    def __init__(self):
        self.outcomes = {}

    def deliver(self, outcome):
        assert outcome.job_id not in self.outcomes, "a job has one outcome"
        self.outcomes[outcome.job_id] = outcome

    def report(self, job_id, status, detail):
        pass


@asynccontextmanager
async def open_rig(provider):
    async with (
        open_sandbox_host(provider) as host,
        trio.open_nursery() as service,
        open_pipeline(RESOURCES, host, service) as pipeline,
    ):
        yield pipeline


def submit(pipeline, observer, name, turns=2, handler=None):
    instance = TaskInstance(instance_id="i", handler="steps", payload={})
    spec = JobSpec(job_id=name, instance=instance, max_turns=turns)
    job = Job(spec, handler or Steps(), RESOURCES, observer)
    pipeline.submit(job)
    return job


async def test_a_node_cancelled_at_any_step_leaves_nothing():
    async def check(_run):
        assert provider.live == []
        assert set(observer.outcomes) == submitted
        assert {outcome.status for outcome in observer.outcomes.values()} <= {"completed", "cancelled"}

    async def operation():
        nonlocal provider, observer, submitted
        provider, observer, submitted = FakeProvider(), Observer(), set()
        async with open_rig(provider) as pipeline:
            for n, handler in enumerate((Steps(), KeepsSandbox(), Steps())):
                submit(pipeline, observer, f"j{n}", handler=handler)
                submitted.add(f"j{n}")
            await pipeline.wait_idle()

    provider, observer, submitted = FakeProvider(), Observer(), set()
    with trio.fail_after(120):
        runs = await cancel_sweep(operation, check)
    assert runs > 50, "the sweep must have gone through the stages"


async def test_cancel_of_a_job_at_any_step_returns_when_it_is_true():
    """The job is cancelled by another task after k steps of the loop, for every k."""
    for patience in range(60):
        provider, observer = FakeProvider(), Observer()
        with trio.fail_after(10):
            async with open_rig(provider) as pipeline:
                job = submit(pipeline, observer, "job")
                for _ in range(patience):
                    await trio.lowlevel.checkpoint()
                await pipeline.cancel(job, "enough")
                assert observer.outcomes["job"].status in ("cancelled", "completed")
                assert provider.live == []
                assert pipeline.live.get("job") is None
                after = submit(pipeline, observer, "after")
                await after.finished.wait()
                assert observer.outcomes["after"].status == "completed"


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("wait"), st.integers(1, 12)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=150)
@given(OPERATIONS, st.booleans())
def test_any_interleaving_of_submits_and_cancels(operations, drain):
    async def run():
        provider, observer, jobs = FakeProvider(), Observer(), []
        async with trio.open_nursery() as others, open_rig(provider) as pipeline:
            for kind, amount in operations:
                if kind == "submit":
                    handler = KeepsSandbox() if amount % 2 else Steps()
                    jobs.append(submit(pipeline, observer, f"j{len(jobs)}", amount, handler))
                elif kind == "cancel" and jobs:
                    job = jobs[amount % len(jobs)]
                    others.start_soon(pipeline.cancel, job, "enough")  # noqa: ASYNC111 - a cancel may outlast it
                elif kind == "wait":
                    for _ in range(amount):
                        await trio.lowlevel.checkpoint()
            if drain:
                await pipeline.wait_idle()
        assert provider.live == []
        assert set(observer.outcomes) == {job.spec.job_id for job in jobs}
        assert all(job.finished.is_set() for job in jobs)
        assert all(job.lifecycle.terminal for job in jobs)
        if drain and not any(kind == "cancel" for kind, _ in operations):
            assert {outcome.status for outcome in observer.outcomes.values()} <= {"completed"}
        assert msgspec.msgpack.encode(list(observer.outcomes.values()))

    with_limit(run)


def with_limit(run):
    async def limited():
        with trio.fail_after(20):
            await run()

    trio.run(limited)
