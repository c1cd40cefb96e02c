"""EVAL alone, of what an earlier rollout left."""

from __future__ import annotations

import msgspec
import pytest
import trio

from prorl_trio.pipeline.job import Job
from prorl_trio.runs.evaluation.regrade import Regrading
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.types.errors import EvaluationError, NotRestorable
from prorl_trio.types.models import Outcome, Recorded, TaskInstance
from support.fake_node import make_outcome, make_spec

pytestmark = pytest.mark.timeout(60)

ANSWERED = Recorded(details={"answer": "42"}, stop_reason="finished")


async def outcome_of(rig, handler, **fields):
    job = Job(rig.spec(**fields), handler, rig.resources, rig.observer)
    rig.pipeline.submit(job)
    await job.finished.wait()
    return rig.observer.outcomes[job.spec.job_id]


async def test_the_node_does_eval_alone(rig):
    async with rig.open_pipeline():
        requests = len(rig.engine.requests)
        outcome = await outcome_of(rig, MathHandler(), recorded=ANSWERED)
        assert len(rig.engine.requests) == requests
    assert (outcome.status, outcome.reward, outcome.details["answer"], outcome.trajectory) == (
        "completed",
        1.0,
        "42",
        None,
    )
    assert [status for _, status in rig.observer.statuses] == ["queued", "ran", "eval", "completed"]
    assert rig.provider.opened_total == 0
    assert outcome.timing.run_s == outcome.timing.init_s == 0.0


async def test_the_outcome_says_that_it_was_regraded_and_others_do_not_have_the_field(rig):
    rig.says = [r"\boxed{42}"]
    async with rig.open_pipeline():
        sampled = await outcome_of(rig, MathHandler())
        regraded = await outcome_of(rig, MathHandler(), job_id="again", recorded=ANSWERED)
    assert regraded.regraded is True
    assert b"regraded" not in msgspec.msgpack.encode(sampled)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(regraded), type=Outcome).regraded is True


@pytest.mark.parametrize(
    ("details", "reward"), [({"answer": None}, 0.0), ({"answer": "41"}, 0.0), ({"answer": "84/2"}, 1.0)]
)
async def test_what_the_agent_gave_is_graded_as_it_was(rig, details, reward):
    async with rig.open_pipeline():
        outcome = await outcome_of(rig, MathHandler(), recorded=Recorded(details=details, stop_reason="max_turns"))
    assert (outcome.status, outcome.reward) == ("completed", reward)


class Unrestorable(AgentHandler):
    """Counts its evaluations, and fails at the first `failures`; does not say how it is restored."""

    name = "math"

    def __init__(self, failures=0):
        self.failures = failures

    def validate(self, payload):
        pass

    def sandbox_spec(self, context):
        return None

    async def run(self, context):
        context.answer = "six"
        await trio.lowlevel.checkpoint()

    async def eval(self, context):
        await trio.lowlevel.checkpoint()
        self.failures -= 1
        if self.failures >= 0:
            raise EvaluationError("the scorer is broken")
        return Evaluation(reward=1.0, details={"answer": context.answer, "turns": len(context.turns)})


class Restorable(Unrestorable):
    """Says how it is restored."""

    def gradable(self, context):
        return {"answer": context.answer}

    def restore(self, context, recorded):
        if "answer" not in recorded.details:
            raise NotRestorable("there is no answer")
        context.answer = recorded.details["answer"]


@pytest.mark.parametrize(
    ("handler", "recorded"),
    [
        (Unrestorable(), ANSWERED),
        (Restorable(), Recorded(details={}, stop_reason="aborted")),
        (MathHandler(), Recorded(details={"answer": 42}, stop_reason="finished")),
    ],
)
async def test_what_cannot_be_restored_has_no_reward_and_says_why(rig, handler, recorded):
    async with rig.open_pipeline():
        outcome = await outcome_of(rig, handler, recorded=recorded)
    assert (outcome.status, outcome.reward, outcome.cause, outcome.error_code) == (
        "failed",
        None,
        "handler",
        "not_restorable",
    )


async def test_a_rollout_whose_evaluation_failed_is_graded_when_the_evaluator_is_mended(rig):
    async with rig.open_pipeline():
        failed = await outcome_of(rig, Restorable(failures=1))
        assert (failed.status, failed.reward, failed.details) == ("failed", None, {"answer": "six"})
        recorded = Recorded(details=failed.details, stop_reason="finished")
        graded = await outcome_of(rig, Restorable(), job_id="again", recorded=recorded)
        assert (graded.reward, graded.details["answer"]) == (1.0, "six")
        lost = await outcome_of(rig, Unrestorable(failures=1), job_id="lost")
        assert lost.details == {}


async def test_an_evaluation_that_the_infrastructure_failed_is_tried_again(rig):
    handler = Restorable(failures=1)
    retry = {"max_attempts": 2, "causes": ("evaluator",), "backoff_s": 0.0}
    async with rig.open_pipeline():
        spec = rig.spec(recorded=ANSWERED)
        outcome = await outcome_of(rig, handler, recorded=ANSWERED, retry=msgspec.convert(retry, type(spec.retry)))
    assert (outcome.status, outcome.attempt, outcome.details["answer"]) == ("completed", 2, "42")
    line = ["queued", "ran", "eval", "queued", "eval", "completed"]
    assert [status for _, status in rig.observer.statuses] == line


async def test_one_that_waits_for_eval_can_be_cancelled(rig):
    gate = trio.Event()

    class Slow(Restorable):
        async def eval(self, context):
            await gate.wait()

    async with rig.open_pipeline():
        rig.pipeline.resize("eval", 1)
        jobs = [
            Job(rig.spec(name, recorded=ANSWERED), Slow(), rig.resources, rig.observer) for name in ("first", "second")
        ]
        for job in jobs:
            rig.pipeline.submit(job)
        await rig.observer.wait_status("first", "eval")
        for job in reversed(jobs):
            await rig.pipeline.cancel(job, "enough")
    assert {outcome.status for outcome in rig.observer.outcomes.values()} == {"cancelled"}


def test_rollouts_that_cannot_be_graded_are_as_they_were_and_are_named():
    done = msgspec.structs.replace(make_outcome(make_spec("done")), details={"answer": "1"})
    unknown = msgspec.structs.replace(done, job_id="unknown", instance_id="no such")
    lost = msgspec.structs.replace(
        done, job_id="lost", status="failed", cause="sandbox", reward=None, trajectory=None, details={}
    )
    cut = msgspec.structs.replace(done, job_id="cut", status="timed_out", cause="inference", reward=None, details={})
    broken = msgspec.structs.replace(done, job_id="broken")
    stopped = msgspec.structs.replace(done, job_id="stopped", status="cancelled", cause="cancelled", reward=None)
    task = TaskInstance(instance_id=done.instance_id, handler="fake", payload={})
    regrading = Regrading([done, unknown, lost, cut, broken, stopped], [task])
    first, last = regrading.todo()
    assert (first.recorded.details, first.recorded.stop_reason, first.priority) == ({"answer": "1"}, "finished", "eval")
    new = msgspec.structs.replace(done, job_id=first.job_id, reward=0.0, details={"answer": "1", "gold": "2"})
    assert regrading.record(new)
    assert not regrading.record(new)
    assert [job.job_id for job in regrading.todo()] == [last.job_id]
    failed = msgspec.structs.replace(lost, job_id=last.job_id, cause="handler", error="it is not there")
    regrading.record(failed)
    summary = regrading.summary()
    assert (summary.outcomes, summary.regraded) == (6, 1)
    assert [(each.job_id, each.before, each.after) for each in summary.changed] == [("done", 1.0, 0.0)]
    assert summary.not_regraded == {
        "unknown": "there is no task 'no such' in the task set",
        "lost": "nothing was sampled (failed, sandbox)",
        "cut": "it ended before its evaluation (timed_out, inference)",
        "broken": "failed, handler: it is not there",
        "stopped": "it was cancelled",
    }
    merged = regrading.merged()
    assert merged[1:] == [unknown, lost, cut, broken, stopped]
    assert merged[0] == msgspec.structs.replace(done, reward=0.0, details=new.details, regraded=True)
