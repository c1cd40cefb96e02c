"""Tasks in a shell: an agent with bash and an editor, and the task's own verifiers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
import trio

from prorl_trio.agent.loop import run_agent
from prorl_trio.agent.style import AgentStyle
from prorl_trio.grading.verifier import again_if_killed
from prorl_trio.handlers.base import AgentHandler, Evaluation
from prorl_trio.handlers.shell.artifacts import MAX_KEPT_CHARS
from prorl_trio.handlers.shell.environment import (
    begin_step,
    make_ready,
    make_root_layer,
    noticing_kills,
    spec_of,
    start_shell,
)
from prorl_trio.handlers.shell.payload import HOME, read_payload
from prorl_trio.handlers.shell.steps import Progress, StepRecord, is_unanswered, meets, reward_of
from prorl_trio.handlers.shell.verification import Case, verify
from prorl_trio.tools import BashTool, EditorTool, FinishTool, ToolSet
from prorl_trio.types.errors import EvaluationError, HandlerError, MalformedJob, SandboxCallFailed, SandboxUnavailable
from prorl_trio.types.models import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.agent.context import Resources, RolloutContext
    from prorl_trio.handlers.shell.payload import Environment, ShellPayload, Solution, Step
    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.tools.base import Observation
    from prorl_trio.types.models import Recorded


NUDGE: Final = "Go on with the tools. When the task is done, call finish."

MAX_LOG_BYTES: Final = 64 * 1024


async def run_solution(context: RolloutContext, solution: Solution, environment: Environment) -> None:
    """Run a solution where the agent would work, for as long as the agent might. Its verifier says what it is worth.

    Its output is in the evaluation's log. How it ends does not matter, as in Harbor.

    Raises:
        HandlerError: the sandbox does not take it.
    """
    assert context.sandbox is not None
    config = context.resources.config
    timeout_s = config.budgets.of_agent(context.spec.budgets)
    try:
        for path, file in solution.files.items():
            mode = file.mode | 0o111 if path == solution.script else file.mode
            await context.sandbox.write_file(path, file.content, mode=mode)
        with context.standing_in_line("the solution", "handler", at_most_s=timeout_s):
            result = await context.sandbox.exec(
                ["/bin/sh", "-c", solution.script],
                timeout_s=timeout_s,
                cwd=environment.workdir or HOME,
                env={"DEBIAN_FRONTEND": "noninteractive", **solution.env},
                max_output_bytes=MAX_LOG_BYTES,
            )
    except (OSError, SandboxCallFailed) as exc:
        raise HandlerError(f"{solution.script} cannot be run: {exc}") from exc
    for said in (result.stdout, result.stderr):
        context.log_evaluation(said.decode(errors="replace"))
    if result.timed_out:
        context.log_evaluation(f"{solution.script} had no end in {timeout_s:g} s\n")


class ShellHandler(AgentHandler):
    """Tasks of Harbor's folders, and whatever a script in a sandbox can check.

    `RolloutContext.handler_state` is the `Progress` of the rollout. The agent is told of a step when it has finished
    the one before, which is graded then, in RUN; the one that it works on at its end is graded in EVAL.
    """

    name = "shell"
    after_run = "keep"  # artefacts are in it, and a shared verifier works there

    def __init__(self) -> None:
        self._has_network = True
        self._root_layer = Path()

    async def prepare(self, resources: Resources) -> None:
        """Make the layer under which `/` of the host's image can be written."""
        self._has_network = resources.config.sandbox.network
        self._root_layer = await trio.to_thread.run_sync(make_root_layer)

    def validate(self, payload: Mapping[str, Any]) -> None:
        """See `AgentHandler.validate`. A task that needs a network is refused by a node that gives none."""
        task = read_payload(payload)
        asked = [("environment", task.environment)]
        for number, step in enumerate(task.steps):
            if step.verifier.environment is not None:
                asked.append((f"steps[{number}].verifier.environment", step.verifier.environment))
        for field, environment in asked:
            if environment.network and not self._has_network:
                raise MalformedJob(
                    "the task asks for a network, and this node gives sandboxes none: set sandbox.network in its "
                    "node.toml, or network_mode in the task",
                    f"$.instance.payload.{field}",
                )

    def sandbox_spec(self, context: RolloutContext) -> SandboxSpec:
        """The task's environment, within the node's limits."""
        environment = read_payload(context.spec.instance.payload).environment
        return spec_of(environment, context.resources.config.sandbox, self._root_layer)

    async def init(self, context: RolloutContext) -> None:
        """Build the environment and the first step's, and start the shell in its working directory."""
        assert context.sandbox is not None
        task = read_payload(context.spec.instance.payload)
        with context.waiting("build of the environment", "sandbox"):
            await make_ready(context.sandbox, task.environment)
            await start_shell(context.sandbox, task.environment)
            await begin_step(context.sandbox, task.steps[0], task.environment, verified_here=False)
        context.handler_state = Progress(steps=[StepRecord(name=task.steps[0].name)])

    async def run(self, context: RolloutContext) -> None:
        """See `prorl_trio.agent.loop.run_agent`. Where the task brings its solution, that is run, and nobody asked."""
        task = read_payload(context.spec.instance.payload)
        if task.agent_timeout_s is not None:
            asked = context.spec.budgets
            agent_s = min(task.agent_timeout_s, asked.agent_s or task.agent_timeout_s)
            budgets = msgspec.structs.replace(asked, agent_s=agent_s)
            context.spec = msgspec.structs.replace(context.spec, budgets=budgets)
        if task.steps[0].solution is not None:
            await self._solve(context, task)
            return
        messages = [
            ChatMessage(role="system", content=task.system_prompt),
            ChatMessage(role="user", content=task.steps[0].instruction),
        ]
        tools = ToolSet(
            [BashTool(), EditorTool(), _StepEndTool() if len(task.steps) > 1 else FinishTool()],
            max_observation_chars=context.resources.config.agent.max_observation_chars,
        )
        await run_agent(context, messages, tools, _ShellStyle(), after_answer=partial(self._next_step, context, task))
        last: StepRecord = context.handler_state.steps[-1]
        if not last.is_graded:
            last.answer = context.answer

    async def _solve(self, context: RolloutContext, task: ShellPayload) -> None:
        """Run the task's own solutions, step by step."""
        for step in task.steps:
            assert step.solution is not None
            await run_solution(context, step.solution, task.environment)
            if await self._next_step(context, task, "") is None:
                break

    async def _next_step(self, context: RolloutContext, task: ShellPayload, answer: str) -> list[ChatMessage] | None:
        """Grade the step that the agent has finished, and begin the next one; None if there is none.

        Raises:
            EvaluationError, SandboxUnavailable, SandboxLost: there is no verdict, or the next step cannot be begun, and
                not for anything that the agent has done.
        """
        progress: Progress = context.handler_state
        number, record = len(progress.steps), progress.steps[-1]
        if number == len(task.steps):
            return None
        record.answer = answer
        with context.evaluating(f"step {record.name}"):
            await self._grade(context, task, task.steps[number - 1], record)
            progress.gated = not record.spoilt and not meets(task.steps[number - 1], record)
            if progress.gated or record.spoilt:
                return None
            begun = StepRecord(name=task.steps[number].name)
            begun.spoilt = await self._begin(context, task, number)
            progress.steps.append(begun)
        if begun.spoilt:
            return None
        return [ChatMessage(role="user", content=task.steps[number].instruction)]

    async def _begin(self, context: RolloutContext, task: ShellPayload, number: int) -> str:
        """Make the agent's sandbox ready for a step; return how the agent has made that impossible, if it has."""
        step, verified_here = task.steps[number], not task.steps[number - 1].verifier.separate

        async def begin(sandbox: Sandbox) -> None:
            await begin_step(sandbox, step, task.environment, verified_here=verified_here)

        async def begin_with_the_agents(*, last_try: bool) -> None:
            assert context.sandbox is not None
            with noticing_kills(last_try=last_try):
                await begin(context.sandbox)

        try:
            await again_if_killed(context, begin_with_the_agents)
        except SandboxUnavailable as exc:
            async with context.open_sandbox(self.sandbox_spec(context)) as fresh:
                await make_ready(fresh, task.environment)
                await begin(fresh)
            return f"the step could not begin where the agent had been: {exc}"
        return ""

    async def eval(self, context: RolloutContext) -> Evaluation:
        """Return the reward of all steps; where one wants an answer, none is 0.0 at once."""
        task, progress = read_payload(context.spec.instance.payload), context.handler_state
        blocked = False
        for number, (step, record) in enumerate(zip(task.steps, progress.steps, strict=False), start=1):
            if not record.is_graded:
                await self._grade(context, task, step, record)
            blocked = not record.spoilt and not meets(step, record)
            if blocked and number < len(progress.steps):  # graded again, and worse than before
                progress.steps, progress.gated = progress.steps[:number], True
                break
        if progress.gated and not blocked:
            raise EvaluationError(
                f"step {progress.steps[-1].name} has its min_reward now, and had it not when it was recorded: nobody "
                "knows what the agent would have done in the steps after it"
            )
        reward, rewards = reward_of(task.steps, progress, task.reward_strategy)
        details = {"resolved": reward >= 1.0, "rewards": rewards, **progress.details()}
        return Evaluation(reward=reward, details=details)

    async def _grade(self, context: RolloutContext, task: ShellPayload, step: Step, record: StepRecord) -> None:
        if is_unanswered(step, record):
            record.rewards = {"reward": 0.0}
            return
        node = context.resources.config.sandbox
        own = spec_of(step.verifier.environment or task.environment, node, self._root_layer)
        kept = sum(len(each.artifacts or "") for each in context.handler_state.steps)
        agents = self.sandbox_spec(context)
        is_counted = task.reward_strategy == "mean" or step is task.steps[-1]
        case = Case(step.verifier, task.environment, agents, own, MAX_KEPT_CHARS - kept, is_counted)
        await verify(context, case, record)

    def gradable(self, context: RolloutContext) -> dict[str, Any]:
        """The steps so far, with artefacts. See `AgentHandler.gradable`."""
        progress: Progress | None = context.handler_state
        return {} if progress is None else progress.details(is_over=False)

    def restore(self, context: RolloutContext, recorded: Recorded) -> None:
        """Restore the steps that were reached, where their verifiers have sandboxes of their own."""
        context.handler_state = Progress.restored(read_payload(context.spec.instance.payload), recorded.details)


class _ShellStyle(AgentStyle):
    def nudge(self) -> str:
        return NUDGE


class _StepEndTool(FinishTool):
    """Ends a step of several."""

    description = "Say that you are done with what was asked for last. You may then be asked for more."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The answer, or what you have done."}},
        "required": ["answer"],
    }

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """See `FinishTool.call`."""
        ended = await super().call(arguments, sandbox, timeout_s=timeout_s)
        return ended.with_text("This step has ended.")
