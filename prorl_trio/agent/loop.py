"""The RUN loop: policy call -> tool calls -> observations -> next turn, until the agent is done or a limit is met."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import trio

from prorl_ipc.turnstile import pass_turnstile
from prorl_trio.agent.budget import AgentBudget
from prorl_trio.agent.program import run_program
from prorl_trio.agent.style import PLAIN, AgentStyle
from prorl_trio.agent.turns import MIN_TURN_TOKENS, Turns, lease_backend
from prorl_trio.chat.conversation import Conversation
from prorl_trio.threads import run_sync
from prorl_trio.tools.base import Observation
from prorl_trio.tools.fitting import fit_texts
from prorl_trio.types.errors import StaleTrajectory
from prorl_trio.types.models import AgentProgram, ChatMessage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_trio.agent.budget import ToolTime
    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.agent.style import AfterAnswer
    from prorl_trio.agent.turns import SampledTurn
    from prorl_trio.tools import ToolSet
    from prorl_trio.types.models import SegmentReason, StopReason, ToolCall


LONG_REPLY_CHARS = 16_000
"""Replies of this length are rendered and encoded in a thread."""
LONG_DIALOGUE_TOKENS = 16_000
"""Replies in a longer dialogue are, too: some templates are rendered over all of it."""
MAX_FITTINGS = 4
"""Attempts to fit observations to the room that is left, before the loop ends for lack of it."""


class NewDialogue(NamedTuple):
    """A beginning from which an agent goes on in place of its dialogue so far, which stays recorded as it is.

    A new segment begins, whose parent is the one before, with `reason`: `compaction` where `messages` are a shorter
    form of what was said, `template_rewrite` where old reasoning was taken out of them, `retry` where a step is to be
    tried again from where it began.
    """

    messages: Sequence[ChatMessage]
    reason: SegmentReason


BeforeTurn = Callable[[Conversation, int], Awaitable[NewDialogue | None]]
"""Asked before each turn but the first, with the dialogue so far, whose length is in tokens, and the tokens that there
is room for after it. None: go on as it is. What was said is in `RolloutContext.turns`. A summary may be asked of the
policy itself, by `run_sub_agent`."""


class AgentEnd(NamedTuple):
    """The end of an agent's work, and its answer, if it gave one."""

    stop_reason: StopReason
    answer: str | None


async def run_agent(
    context: RolloutContext,
    messages: Sequence[ChatMessage],
    tools: ToolSet,
    style: AgentStyle = PLAIN,
    *,
    before_turn: BeforeTurn | None = None,
    after_answer: AfterAnswer | None = None,
) -> None:
    """Work on `messages` until the agent is done; everything is recorded in `context` turn by turn.

    All calls of the task go to one backend, leased for the whole loop and released whatever happens; no budget is
    charged for the wait for one. Sets `context.stop_reason`, and `context.answer` if the agent gave one. When the
    budget `agent_s` is used up (see `agent.budget`), the loop ends with `agent_budget`: the call in flight is aborted,
    and what was recorded is the agent's work, the tokens of that call included. It ends in the same way before a turn
    that would be too stale because of the time that the agent's tools have taken. Cancellation, too, aborts it and
    leaves what was recorded.

    Where the job names a program as its agent, that works on `messages` instead, with tools of its own: see
    `prorl_trio.agent.program.run_program`.

    Raises:
        ContextLengthExceeded: the first prompt does not fit, so there is nothing to record; or one of `before_turn`.
        StaleTrajectory: the weights changed too often meanwhile, and not for the time of the agent's tools; or there
            are tokens already that are too stale.
        BackendError, SandboxLost, TokenDrift: infrastructure failed.
    """
    resources = context.resources
    if isinstance(context.spec.agent, AgentProgram):  # a name has become one
        await run_program(context, context.spec.agent, messages, style, after_answer)
        return
    context.tools = tools.schemas()
    begin = partial(Conversation, at_most=resources.max_trajectory_tokens(context.spec))
    conversation = await run_sync(begin, resources.chat_format, messages, context.tools)
    async with AsyncExitStack() as stack:
        lease = await lease_backend(context, stack)
        if (bound := resources.config.agent.staleness_bound(context.spec)) is not None:
            lease.freshen(bound)
        budget = AgentBudget(context, resources.config.budgets.of_agent(context.spec.budgets))
        turns = Turns(context, lease, budget, conversation, said=messages)
        turns.begin()
        agent = _Agent(turns, tools, style, before_turn, after_answer)
        try:
            with budget.scope:
                context.stop_reason = await agent.work(context.spec.max_turns)
            if budget.scope.cancelled_caught:
                context.stop_reason = "agent_budget"
        except StaleTrajectory as exc:
            if exc.cause != "agent_budget" or turns.has_stale_tokens(exc.max_staleness):
                raise
            context.stop_reason = "agent_budget"
        finally:
            context.answer = agent.answer


async def run_sub_agent(
    context: RolloutContext,
    messages: Sequence[ChatMessage],
    tools: ToolSet,
    style: AgentStyle = PLAIN,
    *,
    max_turns: int,
    before_turn: BeforeTurn | None = None,
) -> AgentEnd:
    """Have another agent, of the same policy, work on `messages`, in the middle of a `run_agent`; return how it ended.

    It is called by what `run_agent` calls: a tool that was made with the `context`, or `before_turn`. It works on the
    backend, and within the budgets, of the agent that asks; several may work at once, in tasks of a nursery. Its
    dialogue is a segment of its own in the trajectory, whose parent is the segment that it was asked in, with the
    reason `sub_agent`; its turns are recorded as they come, that is before the turn that asked.

    Raises:
        TooManyDialogues: see `context.MAX_DIALOGUES`.
        RuntimeError: it was not called from within the `run_agent` of this rollout.
        Otherwise as `run_agent`.
    """
    asker = _at_work.get()
    if asker is None or asker.turns.context is not context:
        raise RuntimeError("run_sub_agent works inside run_agent only: there is no backend to call")
    chat_format = context.resources.chat_format
    begin = partial(Conversation, at_most=asker.turns.context_tokens)
    conversation = await run_sync(begin, chat_format, messages, tools.schemas())
    turns = Turns(context, asker.turns.lease, asker.turns.budget, conversation, said=messages)
    turns.begin(context.dialogues.asked_in(asker.turns.dialogue))
    agent = _Agent(turns, tools, style, before_turn, None)
    try:
        with asker.tool_time.given_away() if asker.tool_time is not None else nullcontext():
            return AgentEnd(await agent.work(max_turns), agent.answer)
    finally:
        conversation.seal()


@contextmanager
def asking_service(context: RolloutContext, what: str) -> Iterator[None]:
    """Wait, in a tool of the agent at work, for a service of the node's: a search, say.

    What a service takes to answer is charged to the agent, as the time of its tools is. The time of one that fails (an
    exception leaves the block), or hangs until a budget ends the wait, is charged to the stage, and is nobody's doing.

    Raises:
        RuntimeError: it was not called from within the `run_agent` of this rollout.
    """
    asker = _at_work.get()
    if asker is None or asker.turns.context is not context or asker.tool_time is None:
        raise RuntimeError("asking_service works inside a tool's call only")
    since_s = trio.current_time()
    with asker.tool_time.given_away():
        with context.waiting(what, "node"):
            yield
        asker.turns.budget.produced(since_s)


_at_work: ContextVar[_Agent | None] = ContextVar("_at_work", default=None)
"""The innermost agent, for whom it calls."""


class _Taken(NamedTuple):
    """A turn that was taken. `fits`: there was room to reply to it. `results`: what its calls returned."""

    turn: SampledTurn
    calls: list[ToolCall]
    fits: bool
    results: list[str]


def _understood(calls: Sequence[ToolCall]) -> bool:
    return any(not call.error for call in calls)


@dataclass(slots=True)
class _Agent:
    """An agent at work, with what it has given as its answer."""

    turns: Turns
    tools: ToolSet
    style: AgentStyle
    before_turn: BeforeTurn | None
    after_answer: AfterAnswer | None
    answer: str | None = None
    nudges_left: int = 0
    reflections_left: float = math.inf
    tool_time: ToolTime | None = None
    """The time of the tool that is at work."""

    async def work(self, max_turns: int) -> StopReason:
        """Turn after turn, until the agent is done."""
        token = _at_work.set(self)
        try:
            return await self._take_turns(max_turns)
        finally:
            _at_work.reset(token)

    async def _take_turns(self, max_turns: int) -> StopReason:
        self.nudges_left = self.turns.context.resources.config.agent.max_nudges
        if self.style.max_reflections is not None:
            self.reflections_left = self.style.max_reflections
        for turn in range(max_turns):
            if turn:
                await self._look_back()
                if self.turns.room < MIN_TURN_TOKENS:
                    return "context_budget"
            taken = await self._take_turn(turn, is_last=turn + 1 == max_turns)
            if self.answer is not None:
                if ended := await self._go_on(taken, is_last=turn + 1 == max_turns):
                    return ended
                continue
            if not self._is_answered(taken.calls):
                return self._reason(taken, "no_tool_call")
            self.nudges_left -= not taken.calls
            self.reflections_left -= bool(taken.calls) and not _understood(taken.calls)
            if not taken.fits and not await self._look_back():
                return "context_budget"
        return self._reason(taken, "max_turns")

    def _reason(self, last: _Taken, otherwise: StopReason) -> StopReason:
        """Why the loop ends after the turn `last`: what was wrong with that one, if anything was."""
        if _understood(last.calls):
            return otherwise
        return self.turns.cut_short(last.turn) or ("parse_error" if last.calls else otherwise)

    async def _go_on(self, taken: _Taken, *, is_last: bool) -> StopReason | None:
        """Ask `after_answer`, and say what it says to the policy; return why the loop ends, if it does."""
        assert self.answer is not None
        told = await self.after_answer(self.answer) if self.after_answer is not None and not is_last else None
        if told is None:
            return "finished"
        self.answer, self.turns.said = None, told
        results = self._messages(taken.calls, taken.results) if taken.calls else []
        return "context_budget" if self.turns.say([*results, *told]) else None

    async def _look_back(self) -> bool:
        """Ask `before_turn`; whether it began another dialogue."""
        turns = self.turns
        new = await self.before_turn(turns.conversation, turns.room) if self.before_turn is not None else None
        if new is not None:
            turns.go_on_from(new.messages, new.reason)
        return new is not None

    async def _take_turn(self, turn: int, *, is_last: bool) -> _Taken:
        """Sample, do what was asked for, and say what came of it; recorded also where that is cut short."""
        sampled = await self.turns.sample(turn)
        parsed = sampled.parsed
        calls = parsed.tool_calls or self.style.implied_calls(parsed)
        observations: list[Observation] = []
        fits = True
        try:
            self.turns.check_staleness(sampled.completion.policy_version)
            await self._act(calls, observations)
            if self.answer is None and not calls:
                self.answer = self.style.final_answer(parsed)
            if self.answer is None and not is_last and self._is_answered(calls):
                fits = await self._reply(calls, observations)
        finally:
            self.turns.record(sampled, calls, observations)
        return _Taken(sampled, calls, fits, [each.text for each in observations])

    def _is_answered(self, calls: Sequence[ToolCall]) -> bool:
        """Return whether the policy gets an answer to its turn, or a reminder; if not, its loop is over."""
        return self.nudges_left > 0 if not calls else _understood(calls) or self.reflections_left > 0

    async def _reply(self, calls: Sequence[ToolCall], observations: list[Observation]) -> bool:
        """See `_reply_now`. In a thread where much is rendered and encoded."""
        characters = sum(len(observation.text) for observation in observations)
        if characters < LONG_REPLY_CHARS and len(self.turns.conversation) < LONG_DIALOGUE_TOKENS:
            return self._reply_now(calls, observations)
        return await run_sync(self._reply_now, calls, observations)

    def _reply_now(self, calls: Sequence[ToolCall], observations: list[Observation]) -> bool:
        """Say to the policy what came of its turn: results, or a reminder.

        The longest results are cut where there is no room for all, with room for another turn. `observations` are then
        what the policy was shown.

        False: not even that fits, and nothing was said.
        """
        turns, texts = self.turns, [observation.text for observation in observations]
        before, messages = len(turns.conversation), self._messages(calls, texts)
        too_many = turns.say(messages)
        if not calls and not too_many:
            turns.said = messages
        if not calls or not too_many:
            return not too_many
        codec = turns.context.resources.chat_format.codec
        reserved = max(MIN_TURN_TOKENS, min(turns.context.spec.sampling.max_output_tokens, turns.room // 2))
        room = turns.limit - reserved - before
        encoded = [codec.encode(codec.mark(text)) for text in texts]
        around = turns.limit - MIN_TURN_TOKENS + too_many - before - sum(map(len, encoded))
        for _ in range(MAX_FITTINGS):
            fitted = fit_texts(codec, texts, encoded, room - around)
            if fitted is None:
                break
            too_many = turns.say(self._messages(calls, fitted))
            if not too_many:
                observations[:] = map(Observation.with_text, observations, fitted)
                return True
            around += too_many  # cut texts are encoded otherwise where they were cut
        return False

    def _messages(self, calls: Sequence[ToolCall], texts: Sequence[str]) -> list[ChatMessage]:
        """Return the messages to the policy after its turn."""
        if not calls:
            return [ChatMessage(role="user", content=self.style.nudge())]
        return [ChatMessage(role="tool", content=text, name=call.name) for call, text in zip(calls, texts, strict=True)]

    async def _act(self, calls: Sequence[ToolCall], observations: list[Observation]) -> None:
        """Carry the calls out in order, each result into `observations`; none after one that ends the episode."""
        context = self.turns.context
        for call in calls:
            if self.answer is not None:
                observations.append(Observation(text="Not run: the answer came before it.", outcome="not_run"))
                continue
            with self.turns.budget.tool(call.name) as self.tool_time, context.acting():
                observation = await self.tools.call(
                    call, context.sandbox, timeout_s=context.resources.config.agent.tool_timeout_s
                )
            self.tool_time = None
            context.activity.progress()
            observations.append(observation)
            self.answer = observation.answer
            if self.answer is None:
                await pass_turnstile()  # before the reply is rendered, and the next turn begun
