"""The RUN loop: policy call -> tool calls -> observations -> next turn, until the end or a limit."""

from __future__ import annotations

import logging
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
from prorl_trio.agent.mcp import open_servers
from prorl_trio.agent.program import run_program
from prorl_trio.agent.style import PLAIN, AgentStyle
from prorl_trio.agent.turns import MIN_TURN_TOKENS, Turns, lease_backend
from prorl_trio.chat.conversation import Conversation
from prorl_trio.threads import run_sync
from prorl_trio.tools.base import Observation
from prorl_trio.tools.fitting import fit_texts
from prorl_trio.types.errors import HandlerError, StaleTrajectory
from prorl_trio.types.models import AgentProgram, ChatMessage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_trio.agent.budget import ToolTime
    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.agent.style import AfterAnswer
    from prorl_trio.agent.turns import SampledTurn
    from prorl_trio.tools import ToolSet
    from prorl_trio.tools.mcp.sessions import McpServers
    from prorl_trio.types.models import SegmentReason, StopReason, ToolCall


logger = logging.getLogger(__name__)

LONG_REPLY_CHARS = 16_000
"""Replies of this length are rendered and encoded in a thread."""
LONG_DIALOGUE_TOKENS = 16_000
"""In longer dialogues, all replies are rendered in a thread: some templates render the whole dialogue."""
MAX_FITTINGS = 4
"""Attempts to fit observations into the remaining room, before the loop ends."""


class NewDialogue(NamedTuple):
    """A beginning from which an agent continues instead of its dialogue so far, which stays recorded unchanged.

    A new segment begins, whose parent is the previous segment, with `reason`. It is `compaction` if `messages`
    summarise the dialogue, `template_rewrite` if old reasoning was removed, `retry` if a step is retried from its
    beginning.
    """

    messages: Sequence[ChatMessage]
    reason: SegmentReason


BeforeTurn = Callable[[Conversation, int], Awaitable[NewDialogue | None]]
"""Called before each turn but the first, with the dialogue so far, and its remaining room in tokens. None: continue
unchanged. `RolloutContext.turns` has the previous turns. It may ask the policy itself for a summary with
`run_sub_agent`."""


class AgentEnd(NamedTuple):
    """The end of an agent's work, with its answer, if any."""

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
    """Work on `messages` until the agent is done; every turn is recorded in `context`.

    All calls of the task use one backend, leased for the whole loop and always released; waiting for a backend is
    charged to no budget. Sets `context.stop_reason`, and `context.answer` if there is an answer. When the budget
    `agent_s` is used up (see `agent.budget`), the loop ends with `agent_budget`: the call in flight is aborted, and its
    tokens are part of the recorded work. The loop also ends this way before a turn that would be too stale because of
    the time that the agent's tools have taken. Cancellation aborts the call in flight as well, and leaves the record.

    If the job names a program as its agent, the program works on `messages` instead, with its own tools: see
    `prorl_trio.agent.program.run_program`.

    Raises:
        ContextLengthExceeded: the first prompt, or a prompt of `before_turn`, does not fit.
        StaleTrajectory: the weights changed too often, and not because of the time of the agent's tools; or recorded
            tokens are already too stale.
        BackendError, SandboxLost, TokenDrift: infrastructure failed.
    """
    resources = context.resources
    if isinstance(context.spec.agent, AgentProgram):  # a name was resolved to it
        await run_program(context, context.spec.agent, messages, style, after_answer)
        return
    async with open_servers(context) as servers, AsyncExitStack() as stack:
        offered = tools.with_more(servers.tools) if servers is not None else tools
        context.tools = offered.schemas()
        begin = partial(Conversation, at_most=resources.max_trajectory_tokens(context.spec))
        conversation = await run_sync(begin, resources.chat_format, messages, context.tools)
        lease = await lease_backend(context, stack)
        if (bound := resources.config.agent.staleness_bound(context.spec)) is not None:
            lease.freshen(bound)
        budget = AgentBudget(context, resources.config.budgets.of_agent(context.spec.budgets))
        turns = Turns(context, lease, budget, conversation, said=messages)
        turns.begin()
        agent = _Agent(turns, offered, style, before_turn, after_answer, own_tools=tools, servers=servers)
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
    """Run another agent of the same policy on `messages` within a `run_agent`; return its end.

    A tool that was made with the `context`, or `before_turn`, may call it. The agent uses the backend and the budgets
    of its caller. Several may run concurrently in tasks of a nursery. Its dialogue is a separate segment of the
    trajectory. The parent is the caller's current segment, with the reason `sub_agent`. Its turns are recorded as they
    arrive, which is before the turn that called it.

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
    """Wait, in a tool of the running agent, for a service of the node, such as a search.

    The time of a successful answer is charged to the agent, like the time of its tools. If the service fails (an
    exception leaves the block), or hangs until a budget ends the wait, the time is charged to the stage, without blame.

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
"""The innermost running agent, on whose behalf calls are made."""


class _Taken(NamedTuple):
    """A completed turn. `fits`: there was room to reply to it. `results`: the results of its calls."""

    turn: SampledTurn
    calls: list[ToolCall]
    fits: bool
    results: list[str]


def _understood(calls: Sequence[ToolCall]) -> bool:
    return any(not call.error for call in calls)


@dataclass(slots=True)
class _Agent:
    """A running agent, with its answer."""

    turns: Turns
    tools: ToolSet
    style: AgentStyle
    before_turn: BeforeTurn | None
    after_answer: AfterAnswer | None
    answer: str | None = None
    nudges_left: int = 0
    reflections_left: float = math.inf
    tool_time: ToolTime | None = None
    """The time of the running tool."""
    own_tools: ToolSet | None = None
    servers: McpServers | None = None
    """MCP servers, whose tools are offered after the agent's own tools."""

    async def work(self, max_turns: int) -> StopReason:
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
                if not await self._renew_tools() or self.turns.room < MIN_TURN_TOKENS:
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
        """Return why the loop ends after the turn `last`: the turn's own problem, or `otherwise`."""
        if _understood(last.calls):
            return otherwise
        return self.turns.cut_short(last.turn) or ("parse_error" if last.calls else otherwise)

    async def _go_on(self, taken: _Taken, *, is_last: bool) -> StopReason | None:
        """Call `after_answer`, and add its messages to the dialogue; return why the loop ends, if it does."""
        assert self.answer is not None
        told = await self.after_answer(self.answer) if self.after_answer is not None and not is_last else None
        if told is None:
            return "finished"
        self.answer, self.turns.said = None, told
        results = self._messages(taken.calls, taken.results) if taken.calls else []
        return "context_budget" if self.turns.say([*results, *told]) else None

    async def _look_back(self) -> bool:
        turns = self.turns
        new = await self.before_turn(turns.conversation, turns.room) if self.before_turn is not None else None
        if new is not None:
            turns.go_on_from(new.messages, new.reason)
        return new is not None

    async def _renew_tools(self) -> bool:
        """Offer the changed tools of servers from now on; return whether there is room for them.

        The policy may own a server, so its time is the policy's, and tools that the template refuses are not offered.
        """
        servers, own_tools = self.servers, self.own_tools
        if servers is None or own_tools is None or not servers.have_changed:
            return True
        with self.turns.budget.tool("tools/list"), self.turns.context.acting():
            await servers.relist()
        tools = own_tools.with_more(servers.tools)
        if tools.schemas() == self.tools.schemas():
            return True
        try:
            has_room = await run_sync(self.turns.change_tools, tools.schemas())
        except HandlerError as exc:
            logger.warning("job %s: changed tools are not offered: %s", self.turns.context.spec.job_id, exc)
            return True
        self.tools = tools
        return has_room

    async def _take_turn(self, turn: int, *, is_last: bool) -> _Taken:
        """Sample a turn, carry out its calls, and reply; the turn is recorded even if this is cut short."""
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
        """Return whether the policy gets a reply to its turn, or a reminder; if not, its loop ends."""
        return self.nudges_left > 0 if not calls else _understood(calls) or self.reflections_left > 0

    async def _reply(self, calls: Sequence[ToolCall], observations: list[Observation]) -> bool:
        """Call `_reply_now`, in a thread if there is much to render and encode."""
        characters = sum(len(observation.text) for observation in observations)
        if characters < LONG_REPLY_CHARS and len(self.turns.conversation) < LONG_DIALOGUE_TOKENS:
            return self._reply_now(calls, observations)
        return await run_sync(self._reply_now, calls, observations)

    def _reply_now(self, calls: Sequence[ToolCall], observations: list[Observation]) -> bool:
        """Reply to the policy's turn with results or a reminder.

        If space is short, the longest results are cut so that another turn fits. `observations` are then changed to the
        text that the policy was shown.

        Return False if not even that fits; the dialogue is then unchanged.
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
            around += too_many  # cut texts encode differently at the cuts
        return False

    def _messages(self, calls: Sequence[ToolCall], texts: Sequence[str]) -> list[ChatMessage]:
        if not calls:
            return [ChatMessage(role="user", content=self.style.nudge())]
        return [ChatMessage(role="tool", content=text, name=call.name) for call, text in zip(calls, texts, strict=True)]

    async def _act(self, calls: Sequence[ToolCall], observations: list[Observation]) -> None:
        """Carry out calls in order, adding results to `observations`, until a call ends the episode."""
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
                await pass_turnstile()  # before the reply is rendered and the next turn begins
