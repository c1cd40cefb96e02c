"""The RUN loop: policy call -> tool calls -> observations -> next turn, until the agent is done or a limit is met."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import trio

from prorl_trio.errors import BackendError, ContextLengthExceeded
from prorl_trio.inference.partial import PartialCompletion
from prorl_trio.models import PRIORITY, ChatMessage, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.chat import ParsedTurn
    from prorl_trio.inference.engine import Completion
    from prorl_trio.inference.pool import BackendLease
    from prorl_trio.models import StopReason, ToolCall
    from prorl_trio.rollout import RolloutContext
    from prorl_trio.tools import ToolSet

__all__ = ["MIN_TURN_TOKENS", "AgentStyle", "run_agent"]

MAX_PAUSE_S = 3600.0
"""A pause of the backends is charged to no budget, up to this."""
MIN_TURN_TOKENS = 16
"""A turn with less room than this in the context is not begun."""


class AgentStyle(Protocol):
    """What differs between agents: how a turn without a formal tool call is read, and what reminds the policy."""

    def implied_calls(self, parsed: ParsedTurn) -> list[ToolCall]:
        """Calls a turn without formal ones still asks for (a fenced code block, say). Usually none."""
        ...

    def final_answer(self, parsed: ParsedTurn) -> str | None:
        """The final answer if the turn gives one in its text (`\\boxed{42}`, say), else None."""
        ...

    def nudge(self) -> str:
        """The user message after a turn with neither call nor answer."""
        ...


async def run_agent(
    context: RolloutContext, messages: Sequence[ChatMessage], tools: ToolSet, style: AgentStyle
) -> None:
    """Work on `messages` until the agent is done; everything is recorded in `context` turn by turn.

    All calls of the task go to one backend, leased for the whole loop and released whatever happens; no budget is
    charged for the wait for one. Sets `context.stop_reason`, and `context.answer` if the agent gave one. When the
    budget `agent_s` is used up, counted from the lease, the loop ends with `agent_budget`: the call in flight is
    aborted, and what was recorded is the agent's work. Cancellation, too, aborts it and leaves what was recorded.

    Raises:
        ContextLengthExceeded: the first prompt does not fit, so there is nothing to record.
        BackendError, SandboxLost, TokenDrift: infrastructure failed.
    """
    resources = context.resources
    conversation = await trio.to_thread.run_sync(resources.chat_format.open, messages, tools.schemas())
    conversation.keep_in(context.tokens)
    context.conversation = conversation
    async with AsyncExitStack() as stack:
        lease = await _lease(context, stack)
        limit = resources.config.agent.max_trajectory_tokens or lease.info.max_model_len
        limit = min(limit, lease.info.max_model_len)
        if len(conversation) + 1 > limit:
            raise ContextLengthExceeded(len(conversation), limit)
        agent_s = context.spec.budgets.agent_s or resources.config.budgets.agent_s
        with trio.move_on_after(agent_s) as budget:
            context.stop_reason = await _loop(context, lease, limit, tools, style)
        if budget.cancelled_caught:
            context.stop_reason = "agent_budget"


async def _lease(context: RolloutContext, stack: AsyncExitStack) -> BackendLease:
    backends, at_most_s = context.resources.backends, context.resources.config.backends.lease_timeout_s
    job_id, priority = context.spec.job_id, PRIORITY[context.spec.priority]
    waiting = partial(context.standing_in_line, charge="inference", at_most_s=at_most_s)
    with trio.move_on_after(at_most_s):
        return await stack.enter_async_context(backends.lease(job_id, priority, waiting))
    raise BackendError(
        f"job {job_id} waited {at_most_s:g} s (backends.lease_timeout_s) for {backends.shortage()}", retryable=True
    )


async def _loop(
    context: RolloutContext, lease: BackendLease, limit: int, tools: ToolSet, style: AgentStyle
) -> StopReason:
    conversation = context.conversation
    assert conversation is not None
    nudges_left = context.resources.config.agent.max_nudges
    for turn in range(context.spec.max_turns):
        room = limit - len(conversation)
        if turn and room < MIN_TURN_TOKENS:
            return "context_budget"
        started_s = trio.current_time()
        completion = await _sample(context, lease, turn, room)
        sampled_s = trio.current_time()
        parsed = conversation.add_completion(
            completion.token_ids,
            completion.logprobs,
            policy_version=completion.policy_version,
            engine=completion.engine,
            spans=completion.spans,
        )
        calls = parsed.tool_calls or style.implied_calls(parsed)
        sampled = conversation.completion_ranges[-1]
        observations: list[str] = []
        try:
            await _act(context, calls, tools, observations)
        finally:
            # Also where a tool is cut short: the tokens are in the trajectory, and so is their turn.
            context.record(
                Turn(
                    segment=sampled.segment,
                    completion_start=sampled.start,
                    completion_end=sampled.end,
                    text=parsed.text,
                    finish_reason=completion.finish_reason,
                    tool_calls=calls,
                    observations=observations,
                    inference_s=sampled_s - started_s,
                    tools_s=trio.current_time() - sampled_s,
                )
            )
        if context.answer is None and not calls:
            context.answer = style.final_answer(parsed)
        if context.answer is not None:
            return "finished"
        if calls:
            replies = [
                ChatMessage(role="tool", content=text, name=call.name)
                for call, text in zip(calls, observations, strict=True)
            ]
        elif nudges_left:
            nudges_left -= 1
            replies = [ChatMessage(role="user", content=style.nudge())]
        else:
            return "no_tool_call"
        if turn + 1 < context.spec.max_turns:
            conversation.add_messages(replies)
    return "max_turns"


async def _sample(context: RolloutContext, lease: BackendLease, turn: int, room: int) -> Completion:
    """One completion; when its backend fails for good, another one goes on. Nothing received is ever sampled again."""
    conversation = context.conversation
    assert conversation is not None
    request_timeout_s = context.resources.config.backends.request_timeout_s
    asked = context.spec.sampling
    stops = [*asked.stop_token_ids, *context.resources.chat_format.stop_token_ids]
    sampling = msgspec.structs.replace(asked, stop_token_ids=stops)
    so_far = PartialCompletion(
        conversation.prompt_token_ids(),
        sampling,
        min(sampling.max_output_tokens, room),
        stop=conversation.ends_with_tool_call if context.resources.config.agent.stop_at_tool_call else None,
        stream=context.resources.config.backends.stream,
    )
    for attempt in ("first", "repinned"):
        try:
            with context.waiting(f"backend {lease.url}: completion", "inference"):
                completion = await lease.complete(
                    so_far,
                    request_id=f"{context.spec.job_id}-t{turn}-{attempt}",
                    timeout_s=request_timeout_s,
                    waiting=partial(context.standing_in_line, charge="inference", at_most_s=MAX_PAUSE_S),
                )
        except BackendError as exc:
            if attempt == "repinned" or not exc.retryable or not lease.repin():
                raise
        else:
            context.activity.progress()
            return completion
    raise AssertionError("unreachable")


async def _act(context: RolloutContext, calls: Sequence[ToolCall], tools: ToolSet, observations: list[str]) -> None:
    """Carry the calls out in order, each result into `observations`; after one that ends the episode none is run."""
    for call in calls:
        if context.answer is not None:
            observations.append("Not run: the task had ended.")
            continue
        with context.waiting(f"tool {call.name}", "sandbox"):
            observation = await tools.call(
                call, context.sandbox, timeout_s=context.resources.config.agent.tool_timeout_s
            )
        context.activity.progress()
        observations.append(observation.text)
        context.answer = observation.answer
