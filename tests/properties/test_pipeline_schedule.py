"""Random jobs with failures, retries, groups, cancels and budgets, on a mock clock: each has one outcome, and when it
is over nothing is owned and the counters add up."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
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
from prorl_trio.types.errors import AgentFault, BackendError, SandboxLost
from prorl_trio.types.models import Budgets, GroupPolicy, JobSpec, RetryPolicy, TaskInstance

CONFIG = NodeConfig(
    model=ModelConfig(path="unused"),
    stages=StagesConfig(init_workers=2, run_workers=4, eval_workers=2, ready_queue=2, eval_queue=2),
)
RESOURCES = Resources(config=CONFIG, chat_format=None, backends=None, scorers=None)


class Chaos(AgentHandler):
    """Each stage takes a random time and ends in a random way."""

    name = "chaos"

    def __init__(self, rng, after_run):
        self.rng = rng
        self.after_run = after_run

    def validate(self, payload):
        pass

    def sandbox_spec(self, context):
        return SandboxSpec()

    async def _live(self, context, *errors):
        await trio.sleep(self.rng.expovariate(1.0))
        await context.sandbox.bash("true", timeout_s=1) if context.sandbox is not None else None
        if self.rng.random() < 0.25:
            raise self.rng.choice(errors)

    async def init(self, context):
        await self._live(context, SandboxLost("init"), ValueError("init"))

    async def run(self, context):
        await self._live(context, BackendError("run", retryable=True), AgentFault("run"), SandboxLost("run"))

    async def eval(self, context):
        if self.rng.random() < 0.5:
            async with context.open_sandbox(SandboxSpec()):
                await self._live(context, ValueError("eval"), SandboxLost("eval"))
        else:
            await self._live(context, ValueError("eval"), SandboxLost("eval"))
        return Evaluation(reward=self.rng.random(), details={})


class Watches:
    session_id = "s"

    def __init__(self):
        self.outcomes, self.ended, self.moves = {}, Counter(), Counter()

    def deliver(self, outcome):
        assert outcome.job_id not in self.outcomes, "a job has one outcome"
        self.outcomes[outcome.job_id] = outcome

    def report(self, job_id, status, detail):
        assert job_id not in self.outcomes, "nothing is said of a job that is over"

    def job_moved(self, job, status, detail):
        assert not self.ended[job.job_id]
        self.moves[status] += 1

    def turn_done(self, job, turn):
        raise AssertionError("there are no turns")

    def job_ended(self, job, outcome):
        self.ended[job.job_id] += 1


def make_spec(rng, n):
    group = f"g{n // 4}" if rng.random() < 0.5 else ""
    return JobSpec(
        job_id=f"j{n}",
        instance=TaskInstance(instance_id="i", handler="chaos", payload={}),
        group_id=group,
        group=GroupPolicy(size=4, min_completed=2, deadline_s=rng.choice([None, 5.0])) if group else None,
        priority=rng.choice(["train", "eval"]),
        budgets=Budgets(run_s=rng.choice([None, 2.0]), total_s=rng.choice([None, 6.0])),
        retry=RetryPolicy(max_attempts=rng.randint(1, 3), causes=("sandbox", "inference", "handler"), backoff_s=0.01),
        keep_partial=rng.random() < 0.5,
    )


async def storm(seed, *, jobs, drain):
    rng, provider, watches, taken = random.Random(seed), FakeProvider(), Watches(), []
    async with (
        open_sandbox_host(provider) as host,
        trio.open_nursery() as service,
        open_pipeline(RESOURCES, host, service, observers=[watches]) as pipeline,
    ):
        for n in range(jobs):
            handler = Chaos(rng, rng.choice(["release", "keep"]))
            job = Job(make_spec(rng, n), handler, RESOURCES, watches)
            pipeline.submit(job)
            taken.append(job)
            if rng.random() < 0.3:
                await trio.sleep(rng.expovariate(2.0))
            if rng.random() < 0.15:
                service.start_soon(pipeline.cancel, rng.choice(taken), "enough")  # noqa: ASYNC111 - it outlasts the pipeline, not the job
            if rng.random() < 0.05:
                pipeline.resize(rng.choice(["init", "run", "eval"]), rng.randint(1, 5))
        if drain:
            await pipeline.wait_idle()
            assert [stage.busy for stage in pipeline.stages] == [0, 0, 0]
        statistics = pipeline.statistics()
    assert provider.live == []
    assert set(watches.outcomes) == {job.spec.job_id for job in taken}
    assert set(watches.ended.values()) <= {1}
    assert len(pipeline) == 0
    assert not pipeline.live._by_session
    assert all(len(stage.queue) == 0 and stage.busy == 0 for stage in pipeline.stages)
    if drain:
        assert sum(statistics["outcomes"].values()) == jobs
        assert statistics["retried"] == sum(len(outcome.attempts) for outcome in watches.outcomes.values()) or any(
            outcome.status == "cancelled" for outcome in watches.outcomes.values()
        )
    assert watches.moves["queued"] == jobs + pipeline.statistics()["retried"]
    check(watches.outcomes.values(), taken)


def check(outcomes, jobs):
    specs = {job.spec.job_id: job.spec for job in jobs}
    for outcome in outcomes:
        assert (outcome.reward is not None) == (outcome.status == "completed" or outcome.cause == "agent_fault")
        assert (outcome.cause is None) == (outcome.error_code is None) == (outcome.status == "completed")
        assert outcome.attempt == len(outcome.attempts) + 1 <= specs[outcome.job_id].retry.max_attempts
        assert [record.attempt for record in outcome.attempts] == list(range(1, outcome.attempt))
        assert {record.cause for record in outcome.attempts} <= set(specs[outcome.job_id].retry.causes)
        assert msgspec.msgpack.encode(outcome)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.booleans())
def test_any_schedule_keeps_the_rules(seed, drain):
    async def run():
        with trio.fail_after(10_000):
            await storm(seed, jobs=30, drain=drain)

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_five_hundred_cancels_at_random_moments_return_at_once():
    rng, provider, watches = random.Random(7), FakeProvider(), Watches()
    taken_s = []

    async def cancel_later(job):
        await trio.sleep(rng.random() * 2)
        before_s = trio.current_time()
        await pipeline.cancel(job, "enough")
        taken_s.append(trio.current_time() - before_s)

    with trio.fail_after(60):
        async with (
            open_sandbox_host(provider) as host,
            trio.open_nursery() as service,
            open_pipeline(RESOURCES, host, service) as pipeline,
        ):
            async with trio.open_nursery() as cancels:
                for n in range(500):
                    spec = msgspec.structs.replace(make_spec(rng, n), group=None)
                    job = Job(spec, Chaos(rng, rng.choice(["release", "keep"])), RESOURCES, watches)
                    pipeline.submit(job)
                    cancels.start_soon(cancel_later, job)
            assert len(pipeline) == 0
            assert provider.live == []
    assert len(taken_s) == len(watches.outcomes) == 500
    assert max(taken_s) < 1.0
    assert sum(outcome.status == "cancelled" for outcome in watches.outcomes.values()) > 400


@pytest.mark.parametrize("seed", range(2))
async def test_storms_on_the_real_clock(seed, monkeypatch):
    monkeypatch.setattr(random.Random, "expovariate", lambda self, lambd: self.random() / (100 * lambd))
    with trio.fail_after(30):
        await storm(seed, jobs=40, drain=True)
