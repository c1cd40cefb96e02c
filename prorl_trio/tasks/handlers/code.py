"""Code: an agent with bash, IPython and an editor writes a module, which is graded in a separate sandbox."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.agent.loop import run_agent
from prorl_trio.agent.style import AgentStyle
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.grading import SOLUTION_PATH, CodeTests, grade_code
from prorl_trio.tasks.grading.verifier import again_if_killed
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation, worded
from prorl_trio.tasks.handlers.restoring import restored_text
from prorl_trio.tools import BashTool, EditorTool, FinishTool, IpythonTool, ToolSet
from prorl_trio.types.errors import HostileAnswer, SandboxCallFailed, SandboxUnavailable, malformed_job
from prorl_trio.types.models import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.types.models import Recorded

FOLDER: Final = os.path.dirname(SOLUTION_PATH)
FOLDER_TIMEOUT_S: Final = 30.0
MAX_SOLUTION_BYTES: Final = 512 * 1024
"""Longer solutions are treated as no solution."""

SYSTEM_PROMPT: Final = "You are a careful programmer. You write Python, run it, and test it before you are done."

INSTRUCTION: Final = f"""\
Write the complete solution to {SOLUTION_PATH}, try it, and call finish when it is right. Hidden tests decide. Only \
that file counts; without one, the code that you give to finish."""

FOR_PROGRAMS: Final = f"""\
Write the complete solution to {SOLUTION_PATH}, and try it. Hidden tests decide. Only that file counts; without one, \
the code in your last message."""

NUDGE: Final = f"Go on with the tools. When {SOLUTION_PATH} is right, call finish."

CHOOSER: Final = "prorl_trio.tasks.handlers.code_answer:choose"
"""Given by name, because it parses the policy's text and must run in a process that can be killed."""
FENCES: Final = ("```", "~~~")


class CodePayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`TaskInstance.payload` of a problem to solve in Python.

    Attributes:
        prompt: the problem.
        tests: tests that the solution must pass; `kind` selects their type (see `prorl_trio.tasks.grading.code_tests`).
            The agent never sees them.
        starter: the initial content of the solution's file; empty for no file.
        partial_credit: the reward is the fraction of passed tests instead of 1 for all and 0 otherwise.
        image: for the sandboxes of the agent and the verifier; empty selects the node's default.
        system_prompt: replaces the handler's own.
        instruction: follows the problem in the user's message; replaces the handler's own.
    """

    prompt: str
    tests: CodeTests
    starter: str = ""
    partial_credit: bool = False
    image: str = ""
    system_prompt: str = SYSTEM_PROMPT
    instruction: str = INSTRUCTION

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ValueError("prompt is empty")


class CodeHandler(AgentHandler):
    """Problems like HumanEval, LiveCodeBench and BigCodeBench: one module, graded by tests."""

    name = "code"

    def validate(self, payload: Mapping[str, Any]) -> None:
        _payload(payload)

    def sandbox_spec(self, context: RolloutContext) -> SandboxSpec:
        """Return the instance's image or the node's default, without a network unless the node allows it."""
        sandbox = context.resources.config.sandbox
        return SandboxSpec(
            image=_payload(context.spec.instance.payload).image or sandbox.image,
            network=sandbox.network,
            start_timeout_s=sandbox.start_timeout_s,
            limits=sandbox.limits,
        )

    async def init(self, context: RolloutContext) -> None:
        """Write the solution's initial file, or at least create its folder."""
        assert context.sandbox is not None
        starter = _payload(context.spec.instance.payload).starter
        if starter:
            await context.sandbox.write_file(SOLUTION_PATH, starter.encode(errors="replace"))
            return
        made = await context.sandbox.exec(["mkdir", "-p", FOLDER], timeout_s=FOLDER_TIMEOUT_S)
        if made.exit_code != 0:
            said = made.stderr.decode(errors="replace").strip()
            raise SandboxUnavailable(f"image {self.sandbox_spec(context).image}: {FOLDER} cannot be made: {said}")

    async def run(self, context: RolloutContext) -> None:
        """Let the agent work, and read its solution from its sandbox."""
        payload = _payload(context.spec.instance.payload)
        instruction = worded(context, payload.instruction, INSTRUCTION, FOR_PROGRAMS)
        messages = [
            ChatMessage(role="system", content=payload.system_prompt),
            ChatMessage(role="user", content=f"{payload.prompt}\n\n{instruction}".strip()),
        ]
        tools = ToolSet(
            [BashTool(), IpythonTool(), EditorTool(), FinishTool()],
            max_observation_chars=context.resources.config.agent.max_observation_chars,
        )
        await run_agent(context, messages, tools, _CodeStyle())
        await self.collect(context)

    async def collect(self, context: RolloutContext) -> None:
        """Set `answer` to the solution: the file if the agent changed it, else the code passed to finish."""
        assert context.sandbox is not None
        starter = _payload(context.spec.instance.payload).starter
        finished = context.answer
        context.answer = None
        try:
            written = await context.sandbox.read_file(SOLUTION_PATH, max_bytes=MAX_SOLUTION_BYTES)
        except (OSError, ValueError, SandboxCallFailed) as exc:  # whatever is there now, the policy made it
            context.log_evaluation(f"{SOLUTION_PATH}: {exc}\n")
        else:
            text = written.decode(errors="replace")
            if text.strip() and text.strip() != starter.strip():
                context.answer = text
        if context.answer is None and finished is not None and len(finished) <= MAX_SOLUTION_BYTES:
            context.answer = await self._program_in(context, finished)
        if context.answer is not None and not context.answer.strip():
            context.answer = None

    async def _program_in(self, context: RolloutContext, finished: str) -> str:
        """Return the program in the text passed to finish. See `code_answer.program_in`."""
        if not any(fence in finished for fence in FENCES):
            return finished
        names = _payload(context.spec.instance.payload).tests.asked_names
        try:
            chosen = await context.resources.scorers.score(
                CHOOSER,
                {"answer": finished, "names": names},
                timeout_s=context.resources.config.agent.tool_timeout_s,
                harmless={"answer": "```python\npass\n```", "names": names},
            )
        except HostileAnswer as exc:
            context.log_evaluation(f"{exc}\n")
            return ""
        return str(chosen["code"])

    async def eval(self, context: RolloutContext) -> Evaluation:
        """Return 1.0 if all tests pass, else 0.0, or the fraction that passes; 0.0 at once without a solution."""
        payload = _payload(context.spec.instance.payload)
        if context.answer is None:
            return Evaluation(reward=0.0, details={"solution": None, "resolved": False})
        grade = partial(
            grade_code,
            context,
            context.answer,
            payload.tests,
            self.sandbox_spec(context),
            all_tests=payload.partial_credit,
        )
        verdict = await again_if_killed(context, grade)
        for test in verdict.tests:
            if test.status != "passed":
                context.log_evaluation(f"{test.test_id}: {test.status} {test.message}\n")
        reward = verdict.fraction if payload.partial_credit else float(verdict.resolved)
        return Evaluation(reward=reward, details={"solution": context.answer, **verdict.details()})

    def restore(self, context: RolloutContext, recorded: Recorded) -> None:
        """Restore the solution. See `AgentHandler.restore`."""
        context.answer = restored_text(recorded, "solution")

    def gradable(self, context: RolloutContext) -> dict[str, Any]:
        """Return the solution. See `AgentHandler.gradable`."""
        return {"solution": context.answer}


class _CodeStyle(AgentStyle):
    def nudge(self) -> str:
        return NUDGE


def _payload(payload: Mapping[str, Any]) -> CodePayload:
    try:
        return msgspec.convert(payload, CodePayload)
    except msgspec.ValidationError as exc:
        raise malformed_job(exc, prefix="$.instance.payload") from exc
