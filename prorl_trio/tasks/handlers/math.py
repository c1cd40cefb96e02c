"""Mathematics: an agent with IPython, a final answer in `finish` or `\\boxed{}`, a reward of 1 or 0."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from prorl_trio.agent.fences import MAX_BLOCKS, PYTHON, fenced_blocks
from prorl_trio.agent.loop import run_agent
from prorl_trio.agent.style import AgentStyle
from prorl_trio.agent.written_calls import CodeBlocks, JsonCalls, WrittenStyle
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation, worded
from prorl_trio.tasks.handlers.final_answer import extract_boxed, last_number
from prorl_trio.tasks.handlers.lost_backslash import check_backslashes
from prorl_trio.tasks.handlers.restoring import restored_text
from prorl_trio.tools import FinishTool, IpythonTool, ThinkTool, ToolSet
from prorl_trio.types.errors import HostileAnswer, SandboxUnavailable, malformed_job
from prorl_trio.types.models import ChatMessage, ToolCall

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.agent.context import Resources, RolloutContext
    from prorl_trio.chat.conversation import ParsedTurn
    from prorl_trio.types.models import Recorded

SCORER = "prorl_trio.tasks.handlers.math_scorer:score"
"""Given by name, so that the node does not import its dependencies (mpmath)."""
WARM_UP_TIMEOUT_S = 60.0
MAX_IMPLIED_CALLS = 1

SYSTEM_PROMPT = "You solve mathematical problems step by step and check every calculation with Python."

INSTRUCTION = """\
Use Python for the calculations: call the ipython tool, or write a ```python block that prints the result; you will \
see its output. When you know the answer, call finish with it, or write it as \\boxed{answer}: a number or an \
expression, nothing else."""

FOR_PROGRAMS = """\
When you know the answer, write it as \\boxed{answer} in your last message: a number or an expression, nothing else."""

NUDGE = "Continue. Compute with the ipython tool, or give the final answer as \\boxed{answer}."


class MathPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`TaskInstance.payload` of a mathematical problem.

    Attributes:
        question: the problem.
        answer: only the gold answer (`18`, `\\frac{1}{2}`), not a worked solution; or a list of accepted answers.
        system_prompt: replaces the handler's own.
        instruction: follows the question in the user's message; replaces the handler's own.
        describe_tools: False: the prompt does not list the tools, for a policy that was trained to write blocks of
            Python.
        plain_answer: True: a message without a call ends the rollout if it contains a number. Without a box, the last
            number is the answer. For a policy that does not use boxes.
        think: True: adds the tool `think`, which does nothing; `details["thoughts"]` counts its calls.
        style: how the policy writes calls. `tools`: in its model family's syntax, or in blocks of Python, of which only
            the first is run. `json`: as JSON objects anywhere in its text. `code`: as blocks of Python, which are all
            run. With `json` and `code` the first invalid call is answered with an error message, and the next turn with
            an invalid call ends the rollout; `details["format_errors"]` counts these calls.
    """

    question: str
    answer: str | list[str]
    system_prompt: str = SYSTEM_PROMPT
    instruction: str = INSTRUCTION
    describe_tools: bool = True
    plain_answer: bool = False
    think: bool = False
    style: Literal["tools", "json", "code"] = "tools"

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise ValueError("question is empty")
        if not self.golds or not all(map(str.strip, self.golds)):
            raise ValueError("answer is empty")

    @property
    def golds(self) -> list[str]:
        """Return all accepted answers."""
        return [self.answer] if isinstance(self.answer, str) else self.answer


class MathHandler(AgentHandler):
    """GSM8K-like and competition problems with a checkable final answer."""

    name = "math"
    gold_check = "prorl_trio.tasks.handlers.math_scorer:check_gold"

    async def prepare(self, resources: Resources) -> None:
        """Start one scoring process, because its imports take half a second."""
        await resources.scorers.prewarm(SCORER)

    def validate(self, payload: Mapping[str, Any]) -> None:
        _payload(payload)
        check_backslashes(payload)

    def sandbox_spec(self, context: RolloutContext) -> SandboxSpec:
        """Return the node's default image, without a network unless the node allows it."""
        sandbox = context.resources.config.sandbox
        return SandboxSpec(
            image=sandbox.image,
            network=sandbox.network,
            start_timeout_s=sandbox.start_timeout_s,
            prestart_bash=False,
            prestart_ipython=True,
            limits=sandbox.limits,
        )

    async def init(self, context: RolloutContext) -> None:
        """Start the IPython shell, so that the agent's first cell is not charged for it."""
        assert context.sandbox is not None
        with context.waiting("start of IPython", "sandbox"):
            result = await context.sandbox.ipython("None", timeout_s=WARM_UP_TIMEOUT_S)
        if result.error is not None or result.timed_out:
            what = result.error.traceback if result.error is not None else f"no answer in {WARM_UP_TIMEOUT_S:g} s"
            raise SandboxUnavailable(f"IPython does not start in the sandbox: {what}")

    async def run(self, context: RolloutContext) -> None:
        """See `prorl_trio.agent.loop.run_agent`."""
        payload = _payload(context.spec.instance.payload)
        instruction = worded(context, payload.instruction, INSTRUCTION, FOR_PROGRAMS)
        messages = [
            ChatMessage(role="system", content=payload.system_prompt),
            ChatMessage(role="user", content=f"{payload.question}\n\n{instruction}".strip()),
        ]
        tools = ToolSet(
            [IpythonTool(), *([ThinkTool()] if payload.think else []), FinishTool()],
            max_observation_chars=context.resources.config.agent.max_observation_chars,
            described=payload.describe_tools,
        )
        await run_agent(context, messages, tools, _style(payload, tools))

    async def eval(self, context: RolloutContext) -> Evaluation:
        """Return 1.0 if the final answer equals a gold answer, else 0.0. A failure of the scorer also gets 0.0."""
        payload = _payload(context.spec.instance.payload)
        counts = _counts(context, payload)
        if context.answer is None:
            return Evaluation(reward=0.0, details={"answer": None, "gold": payload.answer, **counts})
        verdict: dict[str, Any] = {}
        for gold in payload.golds:
            verdict = await _compare(context, context.answer, gold)
            if verdict["equal"]:
                break
        return Evaluation(
            reward=1.0 if verdict["equal"] else 0.0,
            details={"answer": context.answer, "gold": payload.answer, **counts, **verdict},
        )

    def restore(self, context: RolloutContext, recorded: Recorded) -> None:
        """Restore the answer. See `AgentHandler.restore`."""
        context.answer = restored_text(recorded, "answer")

    def gradable(self, context: RolloutContext) -> dict[str, Any]:
        """Return the answer. See `AgentHandler.gradable`."""
        return {"answer": context.answer}


def _counts(context: RolloutContext, payload: MathPayload) -> dict[str, int]:
    """Return the number of calls of `think` and the number of invalid calls, if the payload enables them."""
    calls = [call for turn in context.turns for call in turn.tool_calls]
    counts = (
        {"thoughts": sum(call.name == ThinkTool.name and not call.error for call in calls)} if payload.think else {}
    )
    return counts if payload.style == "tools" else {**counts, "format_errors": sum(bool(call.error) for call in calls)}


def _style(payload: MathPayload, tools: ToolSet) -> AgentStyle:
    plain = _MathStyle(plain_answer=payload.plain_answer)
    match payload.style:
        case "json":
            return WrittenStyle(JsonCalls(tools), plain)
        case "code":
            return WrittenStyle(CodeBlocks(dict.fromkeys(PYTHON, (IpythonTool.name, "code"))), plain)
        case "tools":
            return plain


async def _compare(context: RolloutContext, answer: str, gold: str) -> dict[str, Any]:
    """Return the scorer's comparison of an answer with one gold answer."""
    try:
        return await context.resources.scorers.score(
            SCORER,
            {"answer": answer, "gold": gold},
            timeout_s=context.resources.config.agent.tool_timeout_s,
            harmless={"answer": gold, "gold": gold},
        )
    except HostileAnswer as exc:
        context.log_evaluation(f"{exc}\n")
        return {"equal": False, "scorer": str(exc)}


class _MathStyle(AgentStyle):
    """Small models often write a fenced block instead of a tool call; it is executed.

    `\\boxed{}` is the final answer.
    """

    def __init__(self, *, plain_answer: bool) -> None:
        self._plain_answer = plain_answer

    def implied_calls(self, parsed: ParsedTurn) -> list[ToolCall]:
        looked_at = islice(fenced_blocks(parsed.content), MAX_BLOCKS)
        blocks = (each for each in looked_at if each.language in PYTHON and each.closed)
        calls = [
            ToolCall(name="ipython", arguments={"code": block.code}, raw=block.raw)
            for block in islice(blocks, MAX_IMPLIED_CALLS)
            if block.code.strip()
        ]
        return [] if calls and extract_boxed(parsed.content) is not None else calls

    def final_answer(self, parsed: ParsedTurn) -> str | None:
        boxed = extract_boxed(parsed.content)
        return last_number(parsed.content) if boxed is None and self._plain_answer else boxed

    def nudge(self) -> str:
        return NUDGE


def _payload(payload: Mapping[str, Any]) -> MathPayload:
    try:
        return msgspec.convert(payload, MathPayload)
    except msgspec.ValidationError as exc:
        raise malformed_job(exc, prefix="$.instance.payload") from exc
