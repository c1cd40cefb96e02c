"""Who used the time up decides: infrastructure never makes a reward of 0, and a policy never gets rid of one."""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

from prorl_trio.agent.loop import run_agent, run_sub_agent
from prorl_trio.pipeline.job import Job
from prorl_trio.tasks.handlers.base import Evaluation
from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.tools import FinishTool, Observation, Tool, ToolSet
from prorl_trio.types.backends import PauseBackends, ResumeBackends
from prorl_trio.types.errors import SandboxLost
from prorl_trio.types.models import Budgets, ChatMessage, SamplingParams

pytestmark = pytest.mark.timeout(60)

AGENT_S = 0.6
LONGER_S = 0.9
RIGHT = r"It is \boxed{42}."
CALL = '<tool_call>{"name": "ipython", "arguments": {"code": "6*7"}}</tool_call>'


class Plain(MathHandler):
    """With an evaluation that needs no scoring process."""

    async def eval(self, context):
        await trio.lowlevel.checkpoint()
        return Evaluation(reward=float(context.answer == "42"), details={})


@asynccontextmanager
async def running(rig, handler=None, **fields):
    """A job that has come to RUN; on leaving the block its outcome is there."""
    fields = {"budgets": Budgets(agent_s=AGENT_S), "max_turns": 50, **fields}
    with trio.fail_after(45):
        async with rig.open_pipeline():
            job = Job(rig.spec(**fields), handler or Plain(), rig.resources, rig.observer)
            yield job
            await job.finished.wait()


# ---------------------------------------------------------------- what is not the policy's


async def slow_lease(rig, submit):
    rig.resources.backends.drain(rig.engine.url)
    await submit()
    await trio.sleep(LONGER_S)
    await rig.resources.backends.add(rig.engine.url)


async def pause_before_a_completion(rig, submit):
    await rig.resources.backends.operate(PauseBackends("wait", 5))
    await submit()
    while not rig.resources.backends.admission.waiting:
        await trio.lowlevel.checkpoint()
    await trio.sleep(LONGER_S)
    await rig.resources.backends.operate(ResumeBackends("1"))


async def weights_that_are_moved_in_the_middle_of_a_completion(rig, submit, mode="keep"):
    rig.engine.config = msgspec.structs.replace(rig.engine.config, per_token_s=0.005)
    await submit()
    await rig.engine.wait_until(lambda stats: stats.running == 1)
    await rig.resources.backends.operate(PauseBackends(mode, 5))
    rig.engine.hold()
    await trio.sleep(LONGER_S)
    rig.engine.release()
    await rig.resources.backends.operate(ResumeBackends("1"))


async def weights_that_are_moved_where_completions_are_aborted(rig, submit):
    await weights_that_are_moved_in_the_middle_of_a_completion(rig, submit, "abort")


async def engine_with_a_queue(rig, submit):
    rig.engine.hold()
    await submit()
    await rig.engine.wait_until(lambda stats: stats.running == 1)
    await trio.sleep(LONGER_S)
    rig.engine.release()


@pytest.mark.parametrize(
    "wait",
    [
        slow_lease,
        pause_before_a_completion,
        weights_that_are_moved_in_the_middle_of_a_completion,
        weights_that_are_moved_where_completions_are_aborted,
        engine_with_a_queue,
    ],
    ids=lambda wait: wait.__name__,
)
async def test_waits_of_the_infrastructure_are_not_the_policys(rig, wait):
    rig.says = [RIGHT] * 3  # an aborted completion is asked for again
    async with running(rig) as job:

        async def submit():
            rig.pipeline.submit(job)
            await rig.observer.wait_status("job", "run")

        await wait(rig, submit)
    outcome = rig.observer.outcomes["job"]
    assert (outcome.status, outcome.error) == ("completed", "")
    assert outcome.trajectory.stop_reason == "finished"


async def hangs(rig):
    rig.engine.inject("hang", 99)


async def hangs_in_the_middle(rig):
    """Its first token comes, and no other one."""
    rig.engine.config = msgspec.structs.replace(rig.engine.config, per_token_s=3600.0)


async def answers_500(rig):
    rig.engine.inject("server_error", 99)


async def resets_connections(rig):
    rig.engine.inject("reset_before_headers", 99)


async def is_gone(rig):
    await rig.resources.backends.remove(rig.engine.url)


@pytest.mark.parametrize("break_it", [hangs, hangs_in_the_middle, answers_500, resets_connections, is_gone])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_never_answers_gives_no_reward(rig, break_it, stream):
    rig.config = msgspec.structs.replace(
        rig.config, backends=msgspec.structs.replace(rig.config.backends, stream=stream, lease_timeout_s=0.2)
    )
    rig.says = [RIGHT]
    async with running(rig, budgets=Budgets(agent_s=0.05, run_s=0.5)) as job:
        await break_it(rig)
        rig.pipeline.submit(job)
    outcome = rig.observer.outcomes["job"]
    assert outcome.status in ("failed", "timed_out")
    assert (outcome.cause, outcome.reward) == ("inference", None)


# ---------------------------------------------------------------- what is the policy's


class Sleepy(Plain):
    """Cells take their time."""

    def __init__(self, cell_s):
        self.cell_s = cell_s

    async def run(self, context):
        async def slow(*args, **kwargs):
            await trio.sleep(self.cell_s)
            return await cell(*args, **kwargs)

        cell, context.sandbox.ipython = context.sandbox.ipython, slow
        await super().run(context)


@pytest.mark.parametrize(
    ("cell_s", "turns", "agent_s", "run_s"),
    [(3600.0, 1, AGENT_S, None), (0.05, 50, AGENT_S, None), (0.2, 50, 2.0, 1.5)],
)
async def test_slow_tools_end_as_the_policys_own_doing(rig, cell_s, turns, agent_s, run_s):
    """One that never ends, or many small ones; also where the stage has less time than they take."""
    rig.says = [CALL] * 60
    async with running(rig, Sleepy(cell_s), budgets=Budgets(agent_s=agent_s, run_s=run_s)) as job:
        rig.pipeline.submit(job)
    outcome = rig.observer.outcomes["job"]
    assert (outcome.status, outcome.reward, outcome.cause) == ("completed", 0.0, None), outcome.error
    assert outcome.trajectory.stop_reason == "agent_budget"
    assert 1 <= len(outcome.trajectory.turns) <= turns


async def test_a_job_that_limits_its_run_alone_limits_its_agent(rig):
    rig.says = [CALL]
    async with running(rig, Sleepy(3600.0), budgets=Budgets(run_s=1.5)) as job:
        rig.pipeline.submit(job)
    outcome = rig.observer.outcomes["job"]
    assert (outcome.status, outcome.reward, outcome.trajectory.stop_reason) == ("completed", 0.0, "agent_budget")


async def test_endless_generation_ends_as_the_policys_own_doing_with_its_tokens(rig):
    rig.says = ["so " * 1000]
    async with running(rig, sampling=SamplingParams(max_output_tokens=3000)) as job:
        rig.engine.config = msgspec.structs.replace(rig.engine.config, per_token_s=0.005)
        rig.pipeline.submit(job)
    outcome = rig.observer.outcomes["job"]
    assert (outcome.status, outcome.reward, outcome.cause) == ("completed", 0.0, None), outcome.error
    trajectory = outcome.trajectory
    assert trajectory.stop_reason == "agent_budget"
    (turn,) = trajectory.turns
    assert turn.finish_reason == "abort"
    assert ("so " * 1000).startswith(turn.text)
    assert 0 < turn.completion_end - turn.completion_start == int(trajectory.segments[0].loss_mask.sum())


async def test_infrastructure_that_fails_within_a_tool_gives_no_reward(rig):
    class Loses(Plain):
        async def run(self, context):
            async def lose(*_args, **_kwargs):
                raise SandboxLost("gone")

            context.sandbox.ipython = lose
            await super().run(context)

    rig.says = [CALL]
    async with running(rig, Loses()) as job:
        rig.pipeline.submit(job)
    outcome = rig.observer.outcomes["job"]
    assert (outcome.status, outcome.cause, outcome.reward) == ("failed", "sandbox", None)


class AskTool(Tool):
    """Asks another agent."""

    name = "ask"
    description = "Ask."
    parameters = {"type": "object", "properties": {}}  # noqa: RUF012

    def __init__(self, context):
        self.context = context

    async def call(self, arguments, sandbox, *, timeout_s):
        tools = ToolSet([FinishTool()], max_observation_chars=99)
        end = await run_sub_agent(self.context, [ChatMessage(role="user", content="?")], tools, max_turns=2)
        return Observation(text=str(end.answer))


class Asks(Plain):
    async def run(self, context):
        tools = ToolSet([AskTool(context), FinishTool()], max_observation_chars=99)
        await run_agent(context, [ChatMessage(role="user", content="?")], tools)


async def test_what_another_agent_waits_for_is_not_charged_to_the_tool_that_asked_it(rig):
    finish = '<tool_call>{"name": "finish", "arguments": {"answer": "42"}}</tool_call>'
    rig.says = ['<tool_call>{"name": "ask", "arguments": {}}</tool_call>', finish, finish]
    async with running(rig, Asks()) as job:
        script = rig.engine._script

        def then_pause(prompt):
            if len(rig.says) == 2:  # the other agent's own completion
                rig.engine.hold()
            return script(prompt)

        rig.engine._script = then_pause
        rig.pipeline.submit(job)
        while len(rig.says) > 1:
            await trio.lowlevel.checkpoint()
        await trio.sleep(LONGER_S)
        rig.engine.release()
    outcome = rig.observer.outcomes["job"]
    assert (outcome.status, outcome.reward) == ("completed", 1.0), outcome.error
    assert outcome.trajectory.stop_reason == "finished"


# ---------------------------------------------------------------- an evaluation in the middle of RUN


class Steps(Plain):
    """Evaluates for a while in RUN, twice, and then works within what is left of `run_s`."""

    async def run(self, context):
        for _ in range(2):
            with context.evaluating("a step"):
                await trio.sleep(0.3)
        left_s.append(context.stage_left_s())
        context.answer = "42"


left_s = []


async def test_an_evaluation_in_the_middle_of_run_is_charged_to_its_own_budget(rig):
    left_s.clear()
    async with running(rig, Steps(), budgets=Budgets(run_s=0.5, eval_s=5)) as job:
        rig.pipeline.submit(job)
    assert rig.observer.outcomes["job"].status == "completed"
    assert 0 < left_s[0] <= 0.5
    async with running(rig, Steps(), budgets=Budgets(run_s=5, eval_s=0.1), job_id="slow") as job:
        rig.pipeline.submit(job)
    outcome = rig.observer.outcomes["slow"]
    assert (outcome.status, outcome.cause, outcome.error_code) == ("timed_out", "evaluator", "evaluator_timeout")
