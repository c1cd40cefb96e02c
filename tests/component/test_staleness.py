"""A trajectory that the policy's updates leave behind: told, ended, or run again, as its job says."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import pytest
import trio

from prorl_trio.agent.loop import run_agent
from prorl_trio.config import AgentConfig, BackendConfig, StagesConfig
from prorl_trio.pipeline.job import Job
from prorl_trio.tasks.handlers.base import Evaluation
from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.testing.fake_engine import open_fake_engine
from prorl_trio.tools import FinishTool, Observation, Tool, ToolSet
from prorl_trio.types.backends import PauseBackends, ResumeBackends
from prorl_trio.types.models import ChatMessage, JobSpec, RetryPolicy, TaskInstance

pytestmark = pytest.mark.timeout(30)

UPDATE = '<tool_call>{"name": "update", "arguments": {}}</tool_call>'
FINISH = '<tool_call>{"name": "finish", "arguments": {"answer": "42"}}</tool_call>'


class UpdateTool(Tool):
    """The trainer, as it were: new weights between two turns."""

    name = "update"
    description = "Change the weights."
    parameters: ClassVar = {"type": "object", "properties": {}}

    def __init__(self, backends, versions):
        self.backends, self.versions = backends, versions

    async def call(self, arguments, sandbox, *, timeout_s):
        await self.change()
        return Observation(text="done")

    async def change(self):
        for version in self.versions.pop(0) if self.versions else ():
            await self.backends.operate(ResumeBackends(version))


class NoTool(UpdateTool):
    """Changes nothing."""

    def __init__(self):
        super().__init__(None, [])


class Updated(MathHandler):
    """An agent between whose turns the weights are changed: `versions` has those of each update.

    `in_tools`: they change while its tool is at work, and not while it waits for its next turn.
    """

    def __init__(self, *versions, in_tools=False):
        self.versions = list(versions)
        self.in_tools = in_tools
        self.attempts = 0

    async def run(self, context):
        self.attempts += 1
        update = UpdateTool(context.resources.backends, self.versions)

        async def before_turn(conversation, room):
            await update.change()

        tools = ToolSet([update if self.in_tools else NoTool(), FinishTool()], max_observation_chars=99)
        hook = None if self.in_tools else before_turn
        await run_agent(context, [ChatMessage(role="user", content="?")], tools, before_turn=hook)

    async def eval(self, context):
        await trio.lowlevel.checkpoint()
        return Evaluation(reward=float(context.answer == "42"), details={})


async def outcome_of(rig, handler, says, **fields):
    rig.says = list(says)
    with trio.fail_after(20):
        async with rig.open_pipeline():
            rig.pipeline.submit(Job(rig.spec(**fields), handler, rig.resources, rig.observer))
            await rig.pipeline.wait_idle()
    return rig.observer.outcomes["job"]


async def test_without_a_bound_the_outcome_says_how_stale_it_is(rig):
    outcome = await outcome_of(rig, Updated(["1"], ["2", "3"]), [UPDATE, UPDATE, FINISH])
    assert (outcome.status, outcome.reward) == ("completed", 1.0), outcome.error
    assert (outcome.trajectory.policy_versions, outcome.trajectory.staleness) == (["0", "1", "3"], 3)


@pytest.mark.parametrize(
    ("versions", "bound", "status"),
    [
        ((["1"], ["2"]), 2, "completed"),
        ((["1"], ["3"]), 2, "failed"),
        ((["8"], ["8"]), 7, "failed"),
        ((["a"], ["b"]), 2, "completed"),
        ((["a", "b"], ["c"]), 2, "failed"),  # three updates, of which it met two
        ((["1"], ["0"]), 0, "failed"),
    ],
)
async def test_a_bound_is_kept_to(rig, versions, bound, status):
    outcome = await outcome_of(rig, Updated(*versions), [UPDATE, UPDATE, FINISH], max_staleness=bound)
    assert outcome.status == status, outcome.error
    if status == "failed":
        assert (outcome.cause, outcome.error_code, outcome.reward) == ("inference", "stale", None)
        assert f"max_staleness is {bound}" in outcome.error
        assert outcome.trajectory.staleness <= bound, "nothing was sampled that is too stale"
        assert 1 <= len(outcome.trajectory.turns) < 3


@pytest.mark.parametrize(
    ("versions", "bound"), [((["1"], ["3"]), 2), ((["8"],), 7), ((["a", "b"], ["c"]), 2), ((["1"],), 0)]
)
async def test_who_is_too_stale_for_the_time_of_its_tools_is_graded_as_it_is(rig, versions, bound):
    """Else a policy would be dropped whenever it sleeps. It is not run again, and has no token that is too stale."""
    handler, retry = Updated(*versions, in_tools=True), RetryPolicy(max_attempts=3, backoff_s=0.0)
    says = [UPDATE] * len(versions) + [FINISH]
    outcome = await outcome_of(rig, handler, says, max_staleness=bound, retry=retry)
    assert (outcome.status, outcome.reward, outcome.attempt) == ("completed", 0.0, 1), outcome.error
    assert outcome.trajectory.stop_reason == "agent_budget"
    assert outcome.trajectory.staleness <= bound
    assert len(outcome.trajectory.turns) == len(versions)


async def test_updates_beside_tools_count_for_nobody_but_us(rig):
    """Two updates came while it waited for its turn, and one in its tool: without that one, it is too stale as well."""

    class Both(Updated):
        async def run(self, context):
            backends, update = context.resources.backends, UpdateTool(context.resources.backends, [["1"]])

            async def before_turn(conversation, room):
                await backends.operate(ResumeBackends("2"))
                await backends.operate(ResumeBackends("3"))

            tools = ToolSet([update, FinishTool()], max_observation_chars=99)
            await run_agent(context, [ChatMessage(role="user", content="?")], tools, before_turn=before_turn)

    outcome = await outcome_of(rig, Both(), [UPDATE, FINISH], max_staleness=1)
    assert (outcome.status, outcome.cause, outcome.reward) == ("failed", "inference", None), outcome.error


async def test_tokens_that_are_too_stale_for_the_time_of_tools_are_no_completed_trajectory(rig):
    """An update in the tool, and another in the middle of the completion after it."""
    rig.config = msgspec.structs.replace(rig.config, backends=BackendConfig(stream=True))
    rig.says = [UPDATE, FINISH]
    with trio.fail_after(20):
        async with rig.open_pipeline():
            backends, engine = rig.resources.backends, rig.engine
            engine.config = msgspec.structs.replace(engine.config, per_token_s=0.01)
            handler = Updated(["1"], in_tools=True)
            rig.pipeline.submit(Job(rig.spec(max_staleness=1), handler, rig.resources, rig.observer))
            while handler.versions:
                await trio.sleep(0.01)
            await engine.wait_until(lambda stats: stats.running == 1)
            await trio.sleep(0.2)
            await backends.operate(PauseBackends("keep", 10))
            await backends.operate(ResumeBackends("2"))
            await rig.pipeline.wait_idle()
    outcome = rig.observer.outcomes["job"]
    assert (outcome.status, outcome.cause, outcome.error_code) == ("failed", "agent_budget", "stale"), outcome.error
    assert (outcome.reward, outcome.trajectory.staleness) == (0.0, 2)


async def test_the_node_has_a_bound_for_jobs_that_have_none(rig):
    rig.config = msgspec.structs.replace(rig.config, agent=AgentConfig(max_staleness=0))
    outcome = await outcome_of(rig, Updated(["1"]), [UPDATE, FINISH])
    assert (outcome.status, outcome.error_code) == ("failed", "stale")


async def test_a_job_may_have_more_than_the_node_allows_by_itself(rig):
    rig.config = msgspec.structs.replace(rig.config, agent=AgentConfig(max_staleness=0))
    outcome = await outcome_of(rig, Updated(["1"]), [UPDATE, FINISH], max_staleness=1)
    assert outcome.status == "completed", outcome.error


async def test_a_stale_one_is_run_again_with_the_new_weights_if_its_policy_says_so(rig):
    handler = Updated(["1"])
    retry = RetryPolicy(max_attempts=2, backoff_s=0.0)
    outcome = await outcome_of(rig, handler, [UPDATE, FINISH], max_staleness=0, retry=retry)
    assert (outcome.status, outcome.attempt, handler.attempts) == ("completed", 2, 2), outcome.error
    assert [(record.cause, record.error_code) for record in outcome.attempts] == [("inference", "stale")]
    assert outcome.trajectory.policy_versions == ["1"]


@pytest.mark.parametrize(("mode", "turns"), [("abort", 0), ("keep", 1)])
async def test_weights_that_change_in_the_middle_of_a_completion_count(rig, mode, turns):
    """Aborted, it is not gone on with; kept, it is over when it is found out."""
    rig.config = msgspec.structs.replace(rig.config, backends=BackendConfig(stream=True))
    rig.says = [FINISH]
    with trio.fail_after(20):
        async with rig.open_pipeline():
            backends, engine = rig.resources.backends, rig.engine
            engine.config = msgspec.structs.replace(engine.config, per_token_s=0.01)
            rig.pipeline.submit(Job(rig.spec(max_staleness=0), Updated(), rig.resources, rig.observer))
            await engine.wait_until(lambda stats: stats.running == 1)
            await trio.sleep(0.2)
            await backends.operate(PauseBackends(mode, 10))
            await backends.operate(ResumeBackends("1"))
            await rig.pipeline.wait_idle()
    outcome = rig.observer.outcomes["job"]
    assert (outcome.status, outcome.error_code) == ("failed", "stale"), outcome.error
    recorded = outcome.trajectory.turns if outcome.trajectory else []
    assert len(recorded) == turns
    if turns:
        assert outcome.trajectory.policy_versions == ["0", "1"]


async def test_a_backend_that_is_behind_the_trainer_makes_a_rollout_stale_however_alike_its_tokens(rig):
    class Behind(Updated):
        async def run(self, context):
            backends = context.resources.backends

            async def before_turn(conversation, room):
                if conversation.completion_ranges:
                    await backends.operate(ResumeBackends("5"))
                    (backend,) = backends._placement.backends()
                    backend.engine.info = msgspec.structs.replace(backend.info, policy_version="0", label="0")

            tools = ToolSet([NoTool(), FinishTool()], max_observation_chars=99)
            await run_agent(context, [ChatMessage(role="user", content="?")], tools, before_turn=before_turn)

    outcome = await outcome_of(rig, Behind(), [UPDATE, FINISH], max_staleness=1)
    assert (outcome.status, outcome.error_code) == ("failed", "stale"), outcome.error
    assert len(outcome.trajectory.turns) == 1


async def test_a_job_waits_where_every_backend_has_weights_that_are_too_old(rig):
    """It is not begun, and so not ended: it runs as soon as there are newer ones."""
    rig.says = [FINISH]
    with trio.fail_after(20):
        async with rig.open_pipeline():
            backends = rig.resources.backends
            await backends.operate(ResumeBackends("5"))
            (backend,) = backends._placement.backends()
            backend.engine.info = msgspec.structs.replace(backend.info, policy_version="3", label="3")
            rig.pipeline.submit(Job(rig.spec("first", max_staleness=1), Updated(), rig.resources, rig.observer))
            rig.pipeline.submit(Job(rig.spec("second", max_staleness=2), Updated(), rig.resources, rig.observer))
            await trio.testing.wait_all_tasks_blocked()
            assert rig.observer.statuses == [("first", "queued"), ("second", "queued")], "the oldest first"
            await backends.operate(ResumeBackends("6"))
            await rig.pipeline.wait_idle()
    outcomes = rig.observer.outcomes
    assert {job_id: outcome.status for job_id, outcome in outcomes.items()} == dict.fromkeys(
        ("first", "second"), "completed"
    )
    assert outcomes["first"].trajectory.policy_versions == ["6"]


async def test_no_more_begin_than_the_trainer_takes_in_time(rig):
    """With a bound of 1 and two rollouts for an update, four may begin before the first update."""
    rig.config = msgspec.structs.replace(
        rig.config,
        agent=AgentConfig(max_staleness=1, rollouts_per_update=2),
        stages=StagesConfig(init_workers=1),  # so that they come to RUN in their order
    )
    rig.says = [FINISH] * 9
    with trio.fail_after(20):
        async with rig.open_pipeline():
            jobs = [Job(rig.spec(f"j{n}"), Updated(), rig.resources, rig.observer) for n in range(7)]
            for job in jobs:
                rig.pipeline.submit(job)
            scored = Job(rig.spec("scored", priority="eval"), Updated(), rig.resources, rig.observer)
            rig.pipeline.submit(scored)
            for job in (scored, *jobs[:4]):
                await job.finished.wait()
            await trio.testing.wait_all_tasks_blocked()
            assert set(rig.observer.outcomes) == {"scored", "j0", "j1", "j2", "j3"}
            await rig.resources.backends.operate(ResumeBackends("1"))
            for job in jobs[4:6]:
                await job.finished.wait()
            await trio.testing.wait_all_tasks_blocked()
            assert not jobs[6].finished.is_set()
            await rig.resources.backends.operate(ResumeBackends("1"))
            await trio.testing.wait_all_tasks_blocked()
            assert not jobs[6].finished.is_set(), "it is the same version"
            await rig.resources.backends.operate(ResumeBackends("2"))
            await rig.pipeline.wait_idle()
    assert {outcome.status for outcome in rig.observer.outcomes.values()} == {"completed"}


async def test_a_job_goes_to_the_backend_with_weights_that_are_new_enough(rig):
    rig.says = [FINISH] * 4
    with trio.fail_after(20):
        async with rig.open_pipeline(), open_fake_engine(config=rig.engine.config, script=rig.script) as other:
            backends = rig.resources.backends
            await backends.add(other.url, weight=100)
            await backends.operate(ResumeBackends("5"))
            late = backends._placement.get(other.url)
            late.engine.info = msgspec.structs.replace(late.info, policy_version="3", label="3")
            other.requests.clear()
            rig.pipeline.submit(Job(rig.spec(max_staleness=1), Updated(), rig.resources, rig.observer))
            await rig.pipeline.wait_idle()
            assert backends.statistics()["moves"] == {"stale": 1}
            assert not other.requests
    assert rig.observer.outcomes["job"].trajectory.policy_versions == ["5"]


def test_a_bound_is_not_negative():
    with pytest.raises(ValueError, match="max_staleness must be >= 0, got -1"):
        JobSpec(job_id="j", instance=TaskInstance(instance_id="i", handler="h", payload={}), max_staleness=-1)
