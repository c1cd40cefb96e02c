"""Budgets, retries, error codes, early stops, fresh sandboxes: how a job ends, and what its outcome says."""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

from prorl_trio.agent.context import MAX_EVALUATION_LOG_CHARS
from prorl_trio.pipeline.job import Job
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.types.errors import AgentFault, BackendError, EvaluationError, SandboxLost, SandboxUnavailable
from prorl_trio.types.models import Budgets, GroupPolicy, RetryPolicy

GREEDY = RetryPolicy(max_attempts=3, backoff_s=0.0)


class Plays(AgentHandler):
    """Each stage is an async function of the context, and the attempt's number is `context.spec`-independent."""

    name = "plays"

    def __init__(self, init=None, run=None, eval=None, after_run="release"):
        self.stages = {"init": init, "run": run, "eval": eval}
        self.after_run = after_run
        self.ran_in = []

    def validate(self, payload):
        pass

    def sandbox_spec(self, context):
        return SandboxSpec()

    async def _play(self, stage, context):
        await trio.lowlevel.checkpoint()
        play = self.stages[stage]
        return await play(context) if play else None

    async def init(self, context):
        self.ran_in.append(context.sandbox.sandbox_id)
        await self._play("init", context)

    async def run(self, context):
        await self._play("run", context)

    async def eval(self, context):
        if self.after_run != "release":
            self.ran_in.append(context.sandbox.sandbox_id)
        result = await self._play("eval", context)
        return Evaluation(reward=1.0, details={}) if result is None else result


@asynccontextmanager
async def pipeline(rig):
    with trio.fail_after(30):
        async with rig.open_pipeline():
            yield rig


async def end(rig, handler, **fields):
    job = Job(rig.spec(**fields), handler, rig.resources, rig.observer)
    rig.pipeline.submit(job)
    await job.finished.wait()
    return rig.observer.outcomes[job.spec.job_id]


def raising(*errors):
    """Raise these, one a call; then nothing."""
    left = list(errors)

    async def play(_context):
        if left:
            raise left.pop(0)

    return play


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize("charge", ["sandbox", "inference", "handler"])
async def test_a_run_time_out_is_blamed_on_where_the_time_went(rig, charge):
    async def run(context):
        with context.waiting("something", charge):
            await trio.sleep_forever()

    async with pipeline(rig):
        outcome = await end(rig, Plays(run=run), budgets=Budgets(run_s=0.1))
    assert (outcome.status, outcome.cause, outcome.error_code) == ("timed_out", charge, "budget_run")
    assert outcome.reward is None


async def test_the_total_budget_spans_stages(rig):
    async def slow(_context):
        await trio.sleep(0.3)

    async with pipeline(rig):
        outcome = await end(rig, Plays(init=slow, run=slow, eval=slow), budgets=Budgets(total_s=0.5))
    assert (outcome.status, outcome.error_code, outcome.reward) == ("timed_out", "budget_total", None)
    assert "the job used" in outcome.error


async def test_an_evaluation_over_its_budget_is_an_evaluator_time_out_and_keeps_its_log(rig):
    async def evaluate(context):
        context.log_evaluation("test 1 passed\n")
        await trio.sleep_forever()

    async with pipeline(rig):
        outcome = await end(rig, Plays(eval=evaluate), budgets=Budgets(eval_s=0.1))
    assert (outcome.status, outcome.cause, outcome.error_code) == ("timed_out", "evaluator", "evaluator_timeout")
    assert outcome.evaluation_log == "test 1 passed\n"


async def test_the_end_of_the_agents_budget_is_evaluated_and_keeps_the_trajectory(rig):
    rig.says = ['{"name": "ipython", "arguments": {"code": "6*7"}}'] * 50

    class Slow(MathHandler):
        async def run(self, context):
            ipython = context.sandbox.ipython

            async def never(*args, **kwargs):
                if context.turns:
                    await trio.sleep_forever()
                return await ipython(*args, **kwargs)

            context.sandbox.ipython = never
            await super().run(context)

    async with pipeline(rig):
        outcome = await end(rig, Slow(), budgets=Budgets(agent_s=1.0), max_turns=50)
    assert (outcome.status, outcome.reward, outcome.cause) == ("completed", 0.0, None)
    assert outcome.trajectory.stop_reason == "agent_budget"
    assert [turn.observations for turn in outcome.trajectory.turns] == [["42"], []]
    sampled = sum(turn.completion_end - turn.completion_start for turn in outcome.trajectory.turns)
    assert sampled == sum(int(segment.loss_mask.sum()) for segment in outcome.trajectory.segments)


async def test_the_wait_for_a_backend_is_charged_to_no_budget(rig):
    rig.says = [r"\boxed{42}"]
    async with pipeline(rig):
        backends = rig.resources.backends
        url = rig.engine.url
        backends.drain(url)
        job = Job(rig.spec(budgets=Budgets(run_s=2.0)), MathHandler(), rig.resources, rig.observer)
        rig.pipeline.submit(job)
        await rig.observer.wait_status("job", "run")
        await trio.sleep(2.5)
        assert next(iter(rig.pipeline.live)).view().waiting_on.startswith("a backend that takes tasks: <Backend http")
        await backends.add(url)
        await job.finished.wait()
    assert rig.observer.outcomes["job"].status == "completed"


async def test_a_node_without_a_backend_says_so(rig):
    rig.config = msgspec.structs.replace(
        rig.config, backends=msgspec.structs.replace(rig.config.backends, lease_timeout_s=0.1)
    )
    async with pipeline(rig):
        await rig.resources.backends.remove(rig.engine.url)
        outcome = await end(rig, MathHandler())
    assert (outcome.status, outcome.cause, outcome.error_code) == ("failed", "inference", "backend_unreachable")
    assert "lease_timeout_s" in outcome.error


# ---------------------------------------------------------------- the taxonomy


@pytest.mark.parametrize(
    ("stage", "error", "cause", "code"),
    [
        ("init", SandboxUnavailable("x"), "sandbox", "sandbox_start"),
        ("run", SandboxLost("x"), "sandbox", "sandbox_lost"),
        ("run", BackendError("x", retryable=True), "inference", "backend_unreachable"),
        ("run", BackendError("x", retryable=False), "inference", "backend_refused"),
        ("run", ValueError("x"), "handler", "handler_raised"),
        ("run", AgentFault("x", reward=None), "agent_fault", "agent_fault"),
        ("eval", ValueError("x"), "evaluator", "evaluator_crashed"),
        ("eval", EvaluationError("x", error_code="evaluator_timeout"), "evaluator", "evaluator_timeout"),
    ],
)
async def test_each_failure_has_its_code(rig, stage, error, cause, code):
    async with pipeline(rig):
        outcome = await end(rig, Plays(**{stage: raising(error)}))
    assert (outcome.status, outcome.cause, outcome.error_code, outcome.reward) == ("failed", cause, code, None)


@pytest.mark.parametrize(
    "score",
    [
        "1.0",
        Evaluation(reward="1.0", details={}),
        Evaluation(reward=True, details={}),
        Evaluation(reward=float("nan"), details={}),
        Evaluation(reward=1.0, details=None),
    ],
)
async def test_a_malformed_score_is_no_score(rig, score):
    async def evaluate(_context):
        return score

    async with pipeline(rig):
        outcome = await end(rig, Plays(eval=evaluate))
    assert (outcome.status, outcome.cause, outcome.error_code) == ("failed", "evaluator", "evaluator_malformed")
    assert outcome.reward is None


@pytest.mark.parametrize(("given", "reward"), [({}, 0.0), ({"reward": -1.0}, -1.0), ({"reward": None}, None)])
async def test_an_agent_fault_has_the_reward_zero_unless_the_handler_says_otherwise(rig, given, reward):
    async with pipeline(rig):
        outcome = await end(rig, Plays(run=raising(AgentFault("cheated", **given))))
    assert (outcome.cause, outcome.reward) == ("agent_fault", reward)


async def test_the_evaluators_log_keeps_its_head_and_tail(rig):
    async def evaluate(context):
        for _ in range(3):
            context.log_evaluation("a" * MAX_EVALUATION_LOG_CHARS)
        context.log_evaluation("the end")

    async with pipeline(rig):
        outcome = await end(rig, Plays(eval=evaluate))
    log = outcome.evaluation_log
    assert log.startswith("aaa")
    assert log.endswith("the end")
    assert "characters left out" in log
    assert len(log) < MAX_EVALUATION_LOG_CHARS + 100


@pytest.mark.parametrize("keep", [True, False])
async def test_a_partial_trajectory_is_kept_if_asked_for(rig, keep):
    rig.says = ['{"name": "ipython", "arguments": {"code": "6*7"}}'] * 3

    class Stops(MathHandler):
        async def run(self, context):
            await super().run(context)
            reached.set()
            await trio.sleep_forever()

    reached = trio.Event()
    async with pipeline(rig):
        job = Job(rig.spec(keep_partial=keep, max_turns=2), Stops(), rig.resources, rig.observer)
        rig.pipeline.submit(job)
        await reached.wait()
        await rig.pipeline.cancel(job, "enough")
    outcome = rig.observer.outcomes["job"]
    assert (outcome.status, outcome.error_code) == ("cancelled", "cancelled")
    assert (outcome.trajectory is not None) == keep


# ---------------------------------------------------------------- retries


async def test_a_failed_rollout_is_run_again_from_a_fresh_sandbox(rig):
    handler = Plays(init=raising(SandboxUnavailable("first")), run=raising(SandboxLost("second")))
    async with pipeline(rig):
        outcome = await end(rig, handler, retry=GREEDY)
        statistics = rig.pipeline.statistics()
    assert statistics["retried"] == 2
    assert {fate: row["count"] for fate, row in statistics["fates"].items()} == {
        "admitted": 2,  # the first attempt did not come so far
        "delivered": 1,
        "dropped": 1,
    }
    assert (outcome.status, outcome.attempt, outcome.reward) == ("completed", 3, 1.0)
    assert [(r.attempt, r.cause, r.error_code, r.error) for r in outcome.attempts] == [
        (1, "sandbox", "sandbox_start", "first"),
        (2, "sandbox", "sandbox_lost", "second"),
    ]
    assert len(set(handler.ran_in)) == 3
    line = [status for _, status in rig.observer.statuses]
    assert line.count("queued") == 3
    assert line[-1] == "completed"


async def test_retries_end_at_the_limit(rig):
    handler = Plays(run=raising(*[SandboxLost(f"loss {n}") for n in range(9)]))
    async with pipeline(rig):
        outcome = await end(rig, handler, retry=GREEDY)
    assert (outcome.status, outcome.attempt, outcome.error) == ("failed", 3, "loss 2")
    assert len(outcome.attempts) == 2


@pytest.mark.parametrize("error", [AgentFault("x"), ValueError("a bug")])
async def test_what_the_policy_does_not_name_is_not_retried(rig, error):
    async with pipeline(rig):
        outcome = await end(rig, Plays(run=raising(error)), retry=GREEDY)
    assert (outcome.status, outcome.attempt, outcome.attempts) == ("failed", 1, [])


async def test_a_time_out_of_the_infrastructure_is_retried(rig):
    hangs = [True]

    async def run(context):
        if hangs:
            hangs.pop()
            with context.waiting("the engine", "inference"):
                await trio.sleep_forever()

    async with pipeline(rig):
        outcome = await end(rig, Plays(run=run), retry=GREEDY, budgets=Budgets(run_s=0.1))
    assert (outcome.status, outcome.attempts[0].error_code) == ("completed", "budget_run")


async def test_a_cancel_during_the_back_off_ends_the_job(rig):
    policy = RetryPolicy(max_attempts=2, backoff_s=60.0)
    async with pipeline(rig):
        job = Job(rig.spec(retry=policy), Plays(run=raising(SandboxLost("x"))), rig.resources, rig.observer)
        rig.pipeline.submit(job)
        while rig.observer.statuses.count(("job", "queued")) < 2:
            await rig.observer._changed.park()
        await trio.testing.wait_all_tasks_blocked()
        assert "back-off" in next(iter(rig.pipeline.live)).view().waiting_on
        await rig.pipeline.cancel(job, "enough")
    outcome = rig.observer.outcomes["job"]
    assert (outcome.status, outcome.attempt, len(outcome.attempts)) == ("cancelled", 2, 1)


async def test_a_shutdown_during_the_back_off_ends_the_job(rig):
    policy = RetryPolicy(max_attempts=2, backoff_s=60.0)
    async with pipeline(rig):
        rig.pipeline.submit(
            Job(rig.spec(retry=policy), Plays(run=raising(SandboxLost("x"))), rig.resources, rig.observer)
        )
        while rig.observer.statuses.count(("job", "queued")) < 2:
            await rig.observer._changed.park()
    assert rig.observer.outcomes["job"].error_code == "shutdown"


async def test_a_job_may_begin_with_a_later_attempt(rig):
    async with pipeline(rig):
        job = Job(rig.spec(retry=GREEDY), Plays(run=raising(SandboxLost("x"))), rig.resources, rig.observer, attempt=3)
        rig.pipeline.submit(job)
        await job.finished.wait()
    assert (rig.observer.outcomes["job"].status, rig.observer.outcomes["job"].attempt) == ("failed", 3)


# ---------------------------------------------------------------- groups


def in_group(name, **policy):
    return {"job_id": name, "group_id": "g", "group": GroupPolicy(size=4, **policy)}


async def test_the_rest_of_a_group_is_cancelled_when_enough_have_completed(rig):
    async def hang(_context):
        await trio.sleep_forever()

    async with pipeline(rig):
        stragglers = [
            Job(rig.spec(**in_group(f"s{n}", min_completed=2)), Plays(run=hang), rig.resources, rig.observer)
            for n in range(2)
        ]
        for straggler in stragglers:
            rig.pipeline.submit(straggler)
        other = Job(rig.spec("other", group_id="g"), Plays(run=hang), rig.resources, rig.observer)
        rig.pipeline.submit(other)
        for n in range(2):
            assert (await end(rig, Plays(), **in_group(f"q{n}", min_completed=2))).status == "completed"
        for straggler in stragglers:
            await straggler.finished.wait()
        assert not other.finished.is_set()
        await rig.pipeline.cancel(other, "enough")
    for n in range(2):
        outcome = rig.observer.outcomes[f"s{n}"]
        assert (outcome.status, outcome.cause, outcome.error_code) == ("cancelled", "cancelled", "early_stop")
        assert "min_completed" in outcome.error


async def test_a_group_ends_at_its_deadline_also_for_those_that_come_later(rig):
    async def hang(_context):
        await trio.sleep_forever()

    async with pipeline(rig):
        first = await end(rig, Plays(run=hang), **in_group("a", deadline_s=0.1))
        late = await end(rig, Plays(), **in_group("b", deadline_s=0.1))
    assert (first.error_code, late.error_code) == ("early_stop", "early_stop")
    assert "deadline_s" in first.error


async def test_a_groups_deadline_does_not_count_its_time_in_queues(rig):
    """One waits behind another session's job for longer than the deadline, and then both have it to themselves."""
    gate = trio.Event()

    async def hold(_context):
        await gate.wait()

    async with pipeline(rig):
        rig.pipeline.resize("run", 1)
        other = Job(rig.spec("other"), Plays(run=hold), rig.resources, rig.observer)
        rig.pipeline.submit(other)
        await rig.observer.wait_status("other", "run")
        jobs = [Job(rig.spec(**in_group(n, deadline_s=0.3)), Plays(), rig.resources, rig.observer) for n in "ab"]
        for job in jobs:
            rig.pipeline.submit(job)
        await rig.observer.wait_status("b", "ready")
        await trio.sleep(0.5)
        gate.set()
        for job in (other, *jobs):
            await job.finished.wait()
    assert {rig.observer.outcomes[name].status for name in "ab"} == {"completed"}


# ---------------------------------------------------------------- a fresh sandbox for the evaluation


class JudgesElsewhere(Plays):
    """Evaluates in a sandbox of its own."""

    def __init__(self, judge=None, **played):
        super().__init__(**played)
        self.judge = judge
        self.judged_in = None

    async def eval(self, context):
        assert context.sandbox is None
        async with context.open_sandbox(SandboxSpec()) as fresh:
            self.judged_in = fresh.sandbox_id
            if self.judge is not None:
                await self.judge(fresh)
        return Evaluation(reward=1.0, details={})


async def test_the_evaluator_gets_a_sandbox_the_agent_has_not_seen_when_the_agent_is_done(rig):
    async def run(context):
        assert len(rig.provider.live) == 1

    handler = JudgesElsewhere(run=run)
    async with pipeline(rig):
        outcome = await end(rig, handler)
        assert rig.provider.live == []
    assert outcome.status == "completed"
    assert rig.provider.opened_total == 2
    assert handler.judged_in not in handler.ran_in


@pytest.mark.parametrize("error", [ValueError("x"), SandboxLost("x")])
async def test_a_failed_evaluation_leaves_no_sandbox(rig, error):
    handler = JudgesElsewhere(judge=raising(error))
    async with pipeline(rig):
        outcome = await end(rig, handler)
        assert rig.provider.live == []
    assert outcome.status == "failed"
    assert outcome.reward is None


async def test_a_cancel_ends_the_evaluators_sandbox(rig):
    judging = trio.Event()

    async def judge(fresh):
        judging.set()
        await trio.sleep_forever()

    async with pipeline(rig):
        job = Job(rig.spec(), JudgesElsewhere(judge=judge), rig.resources, rig.observer)
        rig.pipeline.submit(job)
        await judging.wait()
        await rig.pipeline.cancel(job, "enough")
        assert rig.provider.live == []
    assert rig.observer.outcomes[job.spec.job_id].status == "cancelled"


# ---------------------------------------------------------------- resizing


async def test_workers_come_and_go(rig):
    gate = trio.Event()

    async def run(_context):
        await gate.wait()

    async with pipeline(rig):
        rig.pipeline.resize("run", 2)
        jobs = [Job(rig.spec(f"j{n}"), Plays(run=run), rig.resources, rig.observer) for n in range(8)]
        for job in jobs:
            rig.pipeline.submit(job)
        await trio.testing.wait_all_tasks_blocked()
        stage = rig.pipeline.stages[1]
        assert stage.busy == 2
        rig.pipeline.resize("run", 5)
        await trio.testing.wait_all_tasks_blocked()
        assert stage.busy == 5
        rig.pipeline.resize("run", 1)
        gate.set()
        await rig.pipeline.wait_idle()
        await trio.testing.wait_all_tasks_blocked()
        assert (stage.busy, stage._staff, len(stage._idle)) == (0, 1, 1)
        assert (await end(rig, Plays(), job_id="after")).status == "completed"
