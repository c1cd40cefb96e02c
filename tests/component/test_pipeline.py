from __future__ import annotations

import re

import msgspec
import pytest
import trio

from prorl_trio.config import AdmissionConfig
from prorl_trio.pipeline.job import Job
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.types.errors import Draining, EvaluationError, InternalError, SandboxUnavailable
from prorl_trio.types.models import Budgets, TaskInstance, Timing

BOXED = r"It is \boxed{42}."


pytestmark = pytest.mark.timeout(60)


class Scripted(AgentHandler):
    """Does in each stage what the test says: an error to raise, an event to wait for, or nothing."""

    name = "scripted"

    def __init__(self, **does):
        self.does = does
        self.reached = {stage: trio.Event() for stage in ("init", "run", "eval")}

    async def _do(self, stage):
        self.reached[stage].set()
        what = self.does.get(stage)
        if isinstance(what, BaseException):
            raise what
        if isinstance(what, trio.Event):
            await what.wait()
        if what == "hang":
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()

    def validate(self, payload):
        pass

    def sandbox_spec(self, context):
        return self.does.get("spec", SandboxSpec())

    async def init(self, context):
        await self._do("init")

    async def run(self, context):
        await self._do("run")

    async def eval(self, context):
        await self._do("eval")
        return Evaluation(reward=self.does.get("reward", 1.0), details={"seen": True})


async def outcome_of(rig, handler, **fields):
    job = Job(rig.spec(**fields), handler, rig.resources, rig.observer)
    rig.pipeline.submit(job)
    await job.finished.wait()
    return rig.observer.outcomes[job.spec.job_id]


async def test_a_math_job_goes_all_the_way(rig):
    rig.says = ['{"name": "ipython", "arguments": {"code": "6*7"}}', BOXED]
    async with rig.open_pipeline():
        outcome = await outcome_of(rig, MathHandler())
        assert rig.pipeline.statistics()["outcomes"]["completed"] == 1
    assert (outcome.status, outcome.reward, outcome.cause) == ("completed", 1.0, None)
    assert outcome.details["answer"] == "42"
    assert [turn.observations for turn in outcome.trajectory.turns] == [["42"], []]
    line = ["queued", "init", "ready", "run", "ran", "eval", "completed"]
    assert [status for _, status in rig.observer.statuses] == line
    assert rig.provider.opened_total == 1


@pytest.mark.parametrize(("says", "reward"), [(r"\boxed{41}", 0.0), ("no answer at all", 0.0), (r"\boxed{42.0}", 1.0)])
async def test_a_wrong_or_missing_answer_is_the_policys_reward_not_a_failure(rig, says, reward):
    rig.says = [says]
    async with rig.open_pipeline():
        outcome = await outcome_of(rig, MathHandler())
    assert (outcome.status, outcome.reward) == ("completed", reward)


async def test_a_plain_answer_is_the_last_number_of_a_message_without_a_call(rig):
    payload = {"question": "What is 6 * 7?", "answer": "42", "plain_answer": True}
    instance = TaskInstance(instance_id="q", handler="math", payload=payload)
    rig.says = ["I see.", "```python\nprint(7 * 7)\n```", "So 6 * 7 = 42."]
    async with rig.open_pipeline():
        outcome = await outcome_of(rig, MathHandler(), instance=instance)
    assert (outcome.reward, outcome.details["answer"], len(outcome.trajectory.turns)) == (1.0, "42", 3)


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (SandboxUnavailable("no sandbox"), "sandbox"),
        (EvaluationError("no score"), "evaluator"),
        (ValueError("a bug of the plug-in"), "handler"),
        (ExceptionGroup("nursery", [SandboxUnavailable("no sandbox")]), "sandbox"),
    ],
)
async def test_a_failure_is_data_with_its_cause_and_without_a_reward(rig, stage, error, cause):
    async with rig.open_pipeline():
        outcome = await outcome_of(rig, Scripted(**{stage: error}))
    if stage == "eval" and isinstance(error, ValueError):
        cause = "evaluator"
    assert (outcome.status, outcome.cause, outcome.reward) == ("failed", cause, None)
    assert str(error.exceptions[0] if isinstance(error, ExceptionGroup) else error) in outcome.error


@pytest.mark.parametrize(("stage", "cause"), [("init", "handler"), ("run", "handler"), ("eval", "evaluator")])
async def test_a_stage_over_its_budget_times_out(rig, stage, cause):
    budgets = Budgets(**{f"{stage}_s": 0.05})
    async with rig.open_pipeline():
        outcome = await outcome_of(rig, Scripted(**{stage: "hang"}), budgets=budgets)
    assert (outcome.status, outcome.cause, outcome.reward) == ("timed_out", cause, None)
    assert f"stage {stage}" in outcome.error
    assert "0.05 s" in outcome.error


@pytest.mark.alone
async def test_waiting_in_a_queue_is_not_charged_to_a_budget(rig):
    gate = trio.Event()
    async with rig.open_pipeline():
        blockers = [Job(rig.spec(f"b{n}"), Scripted(run=gate), rig.resources, rig.observer) for n in range(32)]
        for blocker in blockers:
            rig.pipeline.submit(blocker)
        waiting = Job(rig.spec("w", budgets=Budgets(run_s=0.2)), Scripted(), rig.resources, rig.observer)
        rig.pipeline.submit(waiting)
        await rig.observer.wait_status("w", "ready")
        await trio.sleep(0.4)
        gate.set()
        await waiting.finished.wait()
        await rig.pipeline.wait_idle()
    outcome = rig.observer.outcomes["w"]
    assert outcome.status == "completed"
    assert outcome.timing.queued_run_s >= 0.4
    assert outcome.timing.run_s < 0.2


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
async def test_cancel_in_a_stage_returns_when_nothing_is_left(rig, stage):
    handler = Scripted(**{stage: "hang"})
    async with rig.open_pipeline():
        job = Job(rig.spec(), handler, rig.resources, rig.observer)
        rig.pipeline.submit(job)
        await handler.reached[stage].wait()
        await rig.pipeline.cancel(job, "enough")
        assert rig.provider.live == []
        outcome = rig.observer.outcomes["job"]
    assert (outcome.status, outcome.cause, outcome.error) == ("cancelled", "cancelled", "enough")


@pytest.mark.parametrize("status", ["queued", "ready", "ran"])
async def test_cancel_in_a_queue(rig, status):
    stage = {"queued": "init", "ready": "run", "ran": "eval"}[status]
    async with rig.open_pipeline():
        workers = next(s.workers for s in rig.pipeline.stages if s.name == stage)
        gate = trio.Event()
        for n in range(workers):
            rig.pipeline.submit(Job(rig.spec(f"b{n}"), Scripted(**{stage: gate}), rig.resources, rig.observer))
        job = Job(rig.spec(), Scripted(), rig.resources, rig.observer)
        await trio.testing.wait_all_tasks_blocked()
        rig.pipeline.submit(job)
        await rig.observer.wait_status("job", status)
        await trio.testing.wait_all_tasks_blocked()
        await rig.pipeline.cancel(job, "enough")
        assert rig.observer.outcomes["job"].status == "cancelled"
        assert len(rig.provider.live) == (workers if stage != "eval" else 0)
        gate.set()
        await rig.pipeline.wait_idle()


async def test_cancel_twice_and_after_the_end(rig):
    handler = Scripted(run="hang")
    async with rig.open_pipeline():
        job = Job(rig.spec(), handler, rig.resources, rig.observer)
        rig.pipeline.submit(job)
        await handler.reached["run"].wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.pipeline.cancel, job, "first")
            nursery.start_soon(rig.pipeline.cancel, job, "second")
        await rig.pipeline.cancel(job, "third")
    assert rig.observer.outcomes["job"].error in ("first", "second")


async def test_eval_jobs_overtake_training_jobs_that_wait(rig):
    gate = trio.Event()
    async with rig.open_pipeline():
        for n in range(4):
            rig.pipeline.submit(Job(rig.spec(f"b{n}"), Scripted(init=gate), rig.resources, rig.observer))
        await trio.testing.wait_all_tasks_blocked()
        for name, priority in [("t1", "train"), ("t2", "train"), ("e1", "eval")]:
            rig.pipeline.submit(Job(rig.spec(name, priority=priority), Scripted(), rig.resources, rig.observer))
        gate.set()
        await rig.pipeline.wait_idle()
    entered = [job_id for job_id, status in rig.observer.statuses if status == "init" and not job_id.startswith("b")]
    assert entered == ["e1", "t1", "t2"]


async def test_sessions_share_the_workers_by_weight(rig):
    rig.config = msgspec.structs.replace(
        rig.config,
        stages=msgspec.structs.replace(rig.config.stages, init_workers=1),
        admission=AdmissionConfig(session_weights={"heavy": 3.0}),
    )
    gate, heavy, light = trio.Event(), type(rig.observer)(), type(rig.observer)()
    heavy.session_id, light.session_id, light.statuses = "heavy", "light", heavy.statuses
    async with rig.open_pipeline():
        rig.pipeline.submit(Job(rig.spec("first"), Scripted(init=gate), rig.resources, rig.observer))
        await trio.testing.wait_all_tasks_blocked()
        for n in range(12):
            rig.pipeline.submit(Job(rig.spec(f"l{n}"), Scripted(), rig.resources, light))
            rig.pipeline.submit(Job(rig.spec(f"h{n}"), Scripted(), rig.resources, heavy))
        gate.set()
        await rig.pipeline.wait_idle()
    entered = "".join(job_id[0] for job_id, status in heavy.statuses if status == "init")
    assert (entered[:8].count("h"), entered[:16].count("h")) == (6, 12), entered


async def test_the_shutdown_ends_every_job_once(rig):
    async with rig.open_pipeline():
        for n in range(60):
            stage = ("init", "run", "eval")[n % 3]
            rig.pipeline.submit(Job(rig.spec(f"j{n}"), Scripted(**{stage: "hang"}), rig.resources, rig.observer))
        await trio.testing.wait_all_tasks_blocked()
    assert len(rig.observer.outcomes) == 60
    assert {outcome.status for outcome in rig.observer.outcomes.values()} == {"cancelled"}
    assert {outcome.error for outcome in rig.observer.outcomes.values()} == {"the node is shutting down"}
    with pytest.raises(Draining):  # nobody would run it, or end it
        rig.pipeline.submit(Job(rig.spec("late"), Scripted(), rig.resources, rig.observer), promised=True)
    assert rig.pipeline.live.get("late") is None


async def test_a_full_queue_takes_nothing(rig):
    rig.config = msgspec.structs.replace(
        rig.config, stages=msgspec.structs.replace(rig.config.stages, init_queue=1, init_workers=1)
    )
    async with rig.open_pipeline():
        hanging = Job(rig.spec("a"), Scripted(init="hang"), rig.resources, rig.observer)
        rig.pipeline.submit(hanging)
        await trio.testing.wait_all_tasks_blocked()
        rig.pipeline.submit(Job(rig.spec("b"), Scripted(), rig.resources, rig.observer))
        with pytest.raises(trio.WouldBlock):
            rig.pipeline.submit(Job(rig.spec("c"), Scripted(), rig.resources, rig.observer))
        assert rig.pipeline.live.get("c") is None


class BadHooks(Scripted):
    def on_error(self, context, stage, error):
        raise RuntimeError("in on_error")

    def final_result(self, context, outcome):
        raise RuntimeError("in final_result")


@pytest.mark.parametrize("does", [{}, {"run": ValueError("x")}])
async def test_hooks_that_fail_are_the_handlers_fault_and_do_not_end_the_node(rig, does):
    async with rig.open_pipeline():
        outcome = await outcome_of(rig, BadHooks(**does))
        assert (await outcome_of(rig, Scripted(), job_id="next")).status == "completed"
    assert (outcome.status, outcome.cause, outcome.reward) == ("failed", "handler", None)
    assert "final_result" in outcome.error


async def test_the_handler_has_the_last_word_on_the_cause(rig):
    class Renames(Scripted):
        def on_error(self, context, stage, error):
            assert stage == "run"
            assert re.fullmatch(r"in stage run: ValueError: x \(.*test_pipeline\.py:\d+\)", str(error))
            return EvaluationError("really the evaluator")

    async with rig.open_pipeline():
        outcome = await outcome_of(rig, Renames(run=ValueError("x")))
    assert outcome.cause == "evaluator"


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_a_score_that_is_no_number_is_no_score(rig, reward):
    async with rig.open_pipeline():
        outcome = await outcome_of(rig, Scripted(reward=reward))
    assert (outcome.status, outcome.cause, outcome.reward) == ("failed", "evaluator", None)


async def test_our_own_bug_ends_the_node_loudly(rig):
    with pytest.RaisesGroup(InternalError, flatten_subgroups=True, allow_unwrapped=True):
        async with rig.open_pipeline():
            rig.pipeline.submit(Job(rig.spec(), Scripted(run=InternalError("bug")), rig.resources, rig.observer))
            await trio.sleep_forever()


async def test_a_job_without_a_sandbox(rig):
    async with rig.open_pipeline():
        outcome = await outcome_of(rig, Scripted(spec=None))
    assert outcome.status == "completed"
    assert rig.provider.opened_total == 0


async def test_a_job_that_fails_midway_keeps_its_partial_trajectory(rig):
    rig.says = ['{"name": "ipython", "arguments": {"code": "6*7"}}']
    async with rig.open_pipeline():
        original = rig.script

        def script(prompt):
            rig.engine.inject("drop_logprobs")
            return original(prompt)

        rig.engine._script = script
        outcome = await outcome_of(rig, MathHandler())
    assert (outcome.status, outcome.cause) == ("failed", "inference")
    assert len(outcome.trajectory.turns) == 1
    assert outcome.timing != Timing()
