"""Science and engineering: an agent with search, bash and IPython, and a short answer that a scoring process grades."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.agent.loop import asking_service, run_agent
from prorl_trio.agent.style import AgentStyle
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation, worded
from prorl_trio.tasks.handlers.final_answer import extract_boxed
from prorl_trio.tasks.handlers.lost_backslash import check_backslashes
from prorl_trio.tasks.handlers.restoring import restored_text
from prorl_trio.tasks.handlers.stem.generated import REFUSED, SOLVED, check_family
from prorl_trio.tasks.handlers.stem.payload import (
    FOR_PROGRAMS,
    INSTRUCTION,
    Generated,
    Number,
    ShortAnswer,
    StemPayload,
    read_payload,
)
from prorl_trio.tasks.handlers.stem.stated import place_of_box
from prorl_trio.tools import BashTool, FinishTool, IpythonTool, SearchTool, ToolSet
from prorl_trio.types.errors import HostileAnswer, MalformedJob, NotRestorable, SandboxUnavailable
from prorl_trio.types.models import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.agent.context import Resources, RolloutContext
    from prorl_trio.chat.conversation import ParsedTurn
    from prorl_trio.tasks.handlers.stem.payload import Grader, ToolName
    from prorl_trio.tools import Tool
    from prorl_trio.types.models import Recorded

SCORER: Final = "prorl_trio.tasks.handlers.stem.scorer:score"
VERIFIER: Final = "prorl_trio.tasks.handlers.stem.verifier:score"
"""Given by name, so that the node does not import its dependencies (pint, reasoning-gym)."""
WARM_UP_TIMEOUT_S: Final = 60.0
MAX_ANSWER_CHARS: Final = 20_000
"""A longer answer is wrong without being graded."""
MAX_SHOWN_CHARS: Final = 500
MAX_UNIT_CHARS: Final = 100
"""Characters kept after a box, which may contain its unit."""
NUDGE: Final = "Continue: use a tool, or give the final answer as \\boxed{answer}."


class StemHandler(AgentHandler):
    """Questions answered with a choice, a number with its unit, or a few words; tasks of reasoning-gym."""

    name = "stem"
    gold_check = "prorl_trio.tasks.handlers.stem.scorer:check_gold"

    def __init__(self) -> None:
        self._search_is_there: bool | None = None

    async def prepare(self, resources: Resources) -> None:
        """Record whether the node offers search."""
        self._search_is_there = resources.search is not None

    def validate(self, payload: Mapping[str, Any]) -> None:
        """See `AgentHandler.validate`. After `prepare`, a node also refuses tasks whose requirements it lacks."""
        found = read_payload(payload)
        check_backslashes(payload)
        _check_family(found.grader)
        if self._search_is_there is None:
            return
        _check_packages(found.grader)
        if "search" in (found.tools or ()) and not self._search_is_there:
            raise MalformedJob(
                "this node has no search: set search.backend in its node.toml, or leave `tools` out",
                "$.instance.payload.tools",
            )

    def sandbox_spec(self, context: RolloutContext) -> SandboxSpec | None:
        """Return the node's default image; None for a task with neither bash nor IPython."""
        tools = self._tools(read_payload(context.spec.instance.payload))
        if not {"bash", "ipython"} & set(tools):
            return None
        sandbox = context.resources.config.sandbox
        return SandboxSpec(
            image=sandbox.image,
            network=sandbox.network,
            start_timeout_s=sandbox.start_timeout_s,
            prestart_bash="bash" in tools,
            prestart_ipython="ipython" in tools,
            limits=sandbox.limits,
        )

    async def init(self, context: RolloutContext) -> None:
        """Start the IPython shell, so that the agent's first cell is not charged for it."""
        if context.sandbox is None or "ipython" not in self._tools(read_payload(context.spec.instance.payload)):
            return
        with context.waiting("start of IPython", "sandbox"):
            result = await context.sandbox.ipython("None", timeout_s=WARM_UP_TIMEOUT_S)
        if result.error is not None or result.timed_out:
            what = result.error.traceback if result.error is not None else f"no answer in {WARM_UP_TIMEOUT_S:g} s"
            raise SandboxUnavailable(f"IPython does not start in the sandbox: {what}")

    async def run(self, context: RolloutContext) -> None:
        """See `prorl_trio.agent.loop.run_agent`."""
        payload = read_payload(context.spec.instance.payload)
        tools = ToolSet(
            [*self._make_tools(context, payload), FinishTool()],
            max_observation_chars=context.resources.config.agent.max_observation_chars,
            described=payload.describe_tools,
        )
        instruction = worded(context, payload.instruction, INSTRUCTION, FOR_PROGRAMS)
        messages = [
            ChatMessage(role="system", content=payload.system_prompt),
            ChatMessage(role="user", content=payload.prompt(instruction)),
        ]
        await run_agent(context, messages, tools, _StemStyle(keeps_unit=isinstance(payload.grader, Number)))

    async def eval(self, context: RolloutContext) -> Evaluation:
        """Return 1.0 for a correct answer, else 0.0, also if the answer is missing or crashes the scorer."""
        payload, answer = read_payload(context.spec.instance.payload), context.answer
        searches = sum(call.name == "search" for turn in context.turns for call in turn.tool_calls)
        details = {**_kept(answer), "searches": searches}
        if answer is None or not answer.strip():
            return Evaluation(reward=0.0, details={**details, "answer": None})
        if len(answer) > MAX_ANSWER_CHARS:
            return Evaluation(reward=0.0, details=details)
        reward, verdict = await _grade(context, payload, answer)
        return Evaluation(reward=reward, details={**details, **verdict})

    def gradable(self, context: RolloutContext) -> dict[str, Any]:
        """Return the answer. See `AgentHandler.gradable`."""
        return _kept(context.answer)

    def restore(self, context: RolloutContext, recorded: Recorded) -> None:
        """Restore the answer; an answer that was too long stays so. See `AgentHandler.restore`."""
        answer, chars = restored_text(recorded, "answer"), recorded.details.get("answer_chars", 0)
        if not isinstance(chars, int):
            raise NotRestorable(f"details.answer_chars is {chars!r}, and no number")
        too_long = answer is not None and chars > MAX_ANSWER_CHARS
        context.answer = (answer or "").ljust(MAX_ANSWER_CHARS + 1, ".") if too_long else answer

    def _tools(self, payload: StemPayload) -> list[ToolName]:
        if payload.tools is not None:
            return payload.tools
        return ["search", "bash", "ipython"] if self._search_is_there else ["bash", "ipython"]

    def _make_tools(self, context: RolloutContext, payload: StemPayload) -> list[Tool]:
        made: list[Tool] = []
        for name in dict.fromkeys(self._tools(payload)):
            if name == "search":
                search = context.resources.search
                assert search is not None
                made.append(SearchTool(search, partial(asking_service, context, "search")))
            else:
                made.append(BashTool() if name == "bash" else IpythonTool())
        return made


def _check_family(grader: Grader) -> None:
    if isinstance(grader, Generated) and grader.family in REFUSED:
        raise MalformedJob(
            f"reasoning-gym's family {grader.family} is refused: {REFUSED[grader.family]}",
            "$.instance.payload.grader.family",
        )


def _check_packages(grader: Grader) -> None:
    """Raise MalformedJob if this node lacks a package needed to grade such answers."""
    if isinstance(grader, Generated):
        try:
            check_family(grader.family)
        except ValueError as exc:
            raise MalformedJob(str(exc), "$.instance.payload.grader.family") from exc
    if isinstance(grader, Number) and grader.unit and find_spec("pint") is None:
        raise MalformedJob(
            "this node cannot read units: pip install 'prorl-trio[stem]' there", "$.instance.payload.grader.unit"
        )


def _kept(answer: str | None) -> dict[str, Any]:
    """Return the recorded form of an answer: complete, so that it can be graded again, unless it is too long."""
    if answer is None or len(answer) <= MAX_ANSWER_CHARS:
        return {"answer": answer}
    return {"answer": answer[:MAX_SHOWN_CHARS], "answer_chars": len(answer)}


async def _grade(context: RolloutContext, payload: StemPayload, answer: str) -> tuple[float, dict[str, Any]]:
    """Return the reward of an answer, and the grader's details."""
    grader = payload.grader
    if isinstance(grader, Generated):
        task = {"family": grader.family, "seed": grader.seed, "version": grader.version, "question": payload.question}
        verdict = await _score(context, VERIFIER, {**task, "answer": answer}, {**task, "answer": None})
        value = verdict.get("score", 0.0)
        solved = value >= SOLVED
        return (value if grader.partial_credit else float(solved)), {"equal": solved, **verdict}
    told = msgspec.to_builtins(grader)
    gold = _gold(grader)
    verdict = await _score(context, SCORER, {"grader": told, "answer": answer}, {"grader": told, "answer": gold})
    return float(verdict["equal"]), {"gold": grader.answer, **verdict}


def _gold(grader: Any) -> str:
    if isinstance(grader, ShortAnswer):
        return grader.golds[0]
    return f"{grader.answer} {grader.unit}".strip() if isinstance(grader, Number) else grader.answer


async def _score(
    context: RolloutContext, scorer: str, payload: dict[str, Any], harmless: dict[str, Any]
) -> dict[str, Any]:
    try:
        return await context.resources.scorers.score(
            scorer, payload, timeout_s=context.resources.config.agent.tool_timeout_s, harmless=harmless
        )
    except HostileAnswer as exc:
        context.log_evaluation(f"{exc}\n")
        return {"equal": False, "scorer": str(exc)}


class _StemStyle(AgentStyle):
    """`\\boxed{}` is the final answer; for a quantity, with the rest of its line, which may contain the unit."""

    def __init__(self, *, keeps_unit: bool) -> None:
        self._keeps_unit = keeps_unit

    def final_answer(self, parsed: ParsedTurn) -> str | None:
        boxed = extract_boxed(parsed.content)
        if boxed is None or not self._keeps_unit:
            return boxed
        behind = parsed.content[place_of_box(parsed.content, boxed)[1] :].removeprefix("}").partition("\n")[0]
        return f"\\boxed{{{boxed}}}{behind[:MAX_UNIT_CHARS]}"

    def nudge(self) -> str:
        return NUDGE
