"""The turns of a dialogue: messages are rendered, an answer is sampled through the lease, and both are recorded.

It is used by our own loop (`agent/loop.py`), and by the gateway for a foreign program.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import trio

from prorl_ipc.nursery import only_cancelled
from prorl_trio.inference.engines.protocol import CompletionRequest
from prorl_trio.inference.pool.partial import PartialCompletion
from prorl_trio.threads import run_sync
from prorl_trio.types.errors import BackendError, ContextLengthExceeded, StaleTrajectory
from prorl_trio.types.models import PRIORITY, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AsyncExitStack

    from prorl_trio.agent.budget import AgentBudget
    from prorl_trio.agent.context import Origin, RolloutContext
    from prorl_trio.chat.conversation import Conversation, ParsedTurn
    from prorl_trio.inference.engines.protocol import Completion, Guide
    from prorl_trio.inference.pool.lease import Lease
    from prorl_trio.tools.base import Observation
    from prorl_trio.types.models import ChatMessage, SegmentReason, StopReason, ToolCall, ToolSchema

MAX_PAUSE_S = 3600.0
"""Longest pause of the backends that is charged to no budget."""
MIN_TURN_TOKENS = 16
"""Minimum room in the context, in tokens, for a turn to begin."""
LONG_TURN_TOKENS = 4096
"""Turns of this length are decoded in a thread, because they would block the loop for 5 ms and more."""
STOP_TAIL_TOKENS = 8
"""Tokens decoded in addition to one token per character of a stop text: each token has at least one byte."""
KEEP_S = 30.0
"""Time limit for decoding a turn, also after a cancel, so that sampled tokens are recorded."""


class SampledTurn(NamedTuple):
    """A turn that was sampled and added to the dialogue, but not yet recorded.

    `heard` are the messages to the policy before it. The times are trio's clock, at the request and at the answer.
    """

    completion: Completion
    parsed: ParsedTurn
    heard: Sequence[ChatMessage]
    started_s: float
    sampled_s: float


@dataclass(slots=True)
class Turns:
    """The turns of one dialogue of a rollout. Not for concurrent use.

    Attributes:
        context: the rollout in whose trajectory they are recorded.
        lease: the backend that samples them.
        budget: charged for the time of sampling.
        conversation: the tokens, which grow by `sample`, `say` and `go_on_from`.
        said: messages to the policy since its last turn, without tool results.
        dialogue: the number of the dialogue in the rollout.
        keeps_cut: partial turns are recorded after any cancel, and not only at the end of the budget.
    """

    context: RolloutContext
    lease: Lease
    budget: AgentBudget
    conversation: Conversation
    said: Sequence[ChatMessage] = ()
    dialogue: int = 0
    keeps_cut: bool = False
    _prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self._prompt_tokens = len(self.conversation)

    @property
    def context_tokens(self) -> int:
        """Return the most tokens that any dialogue of the rollout may have."""
        context = self.context
        return context.resources.max_trajectory_tokens(context.spec, self.lease.info.max_model_len)

    @property
    def limit(self) -> int:
        """Maximum tokens of the dialogue, and so of each segment of the trajectory."""
        most = self.context.spec.max_completion_tokens
        return self.context_tokens if most is None else min(self.context_tokens, self._prompt_tokens + most)

    @property
    def room(self) -> int:
        """Number of tokens that still fit into the dialogue."""
        return self.limit - len(self.conversation)

    def begin(self, origin: Origin | None = None) -> None:
        """Record the dialogue from now on. Raises ContextLengthExceeded if not even one token fits."""
        if self.room < 1:
            raise ContextLengthExceeded(len(self.conversation), self.limit)
        self.dialogue = self.context.begin_dialogue(self.conversation, origin)

    def say(self, messages: Sequence[ChatMessage]) -> int:
        """Add messages after the policy's turn; return by how many tokens they exceed the room for another turn.

        If they exceed it, nothing is added. Errors as `Conversation.add_messages`.
        """
        at_most = self.limit - MIN_TURN_TOKENS
        return max(0, self.conversation.add_messages(messages, at_most=at_most) - at_most)

    def go_on_from(self, messages: Sequence[ChatMessage], reason: SegmentReason) -> None:
        """Continue with another dialogue, in a new segment. Errors as `Conversation.continue_from`."""
        self.conversation.continue_from(messages, reason, at_most=self.context_tokens - 1)
        self._prompt_tokens = len(self.conversation)
        self.said = messages

    def change_tools(self, tools: Sequence[ToolSchema]) -> bool:
        """Offer other tools, in a new segment; return False if there is no room for them, and change nothing.

        The outcome has every tool that was offered, in its latest form. Errors as `Conversation.change_tools`.
        """
        before = len(self.conversation)
        if not self.conversation.change_tools(tools, at_most=self.context_tokens - MIN_TURN_TOKENS):
            return False
        self._prompt_tokens += len(self.conversation) - before
        known = {each["function"]["name"]: each for each in (*self.context.tools, *tools)}
        self.context.tools = list(known.values())
        return True

    async def sample(
        self, turn: int, at_most: int | None = None, stops: Sequence[str] = (), guide: Guide | None = None
    ) -> SampledTurn:
        """Sample the turn of that number, and add it to the dialogue; pauses are not charged.

        If the agent's budget ends, the sampled part is recorded as a turn that was cut. The turn has at most `at_most`
        tokens, ends at the first of the texts `stops`, and has the form of `guide`.

        Raises:
            RequestRefused: the engine refuses the request, for example its form.
            StaleTrajectory: its tokens would not match the earlier ones, or the weights of the trainer.
            BackendError, TokenDrift: infrastructure failed.
        """
        context, started_s, so_far = self.context, trio.current_time(), self._completion(turn, at_most, stops, guide)
        heard, self.said = self.said, ()
        try:
            completion = await self.lease.complete(
                so_far,
                waiting=partial(context.standing_in_line, charge="inference", at_most_s=MAX_PAUSE_S),
                calling=lambda what: context.waiting(self._named(turn, what), charge="inference"),
                produced=self.budget.produced,
            )
            context.activity.progress()
        except BaseException as exc:
            if only_cancelled(exc) and (self.keeps_cut or self.budget.used_up) and len(so_far):
                cut = so_far.whole("abort")
                parsed = await self._keep(cut)  # noqa: ASYNC102 - it shields itself
                self.record(SampledTurn(cut, parsed, heard, started_s, trio.current_time()))
            raise
        sampled_s = trio.current_time()
        return SampledTurn(completion, await self._keep(completion), heard, started_s, sampled_s)

    def record(
        self, turn: SampledTurn, calls: list[ToolCall] | None = None, observations: Sequence[Observation] = ()
    ) -> None:
        """Record a turn with the results of its calls. `calls` None: the calls that were parsed from it."""
        completion, place = turn.completion, self.conversation.completion_ranges[-1]
        self.context.record(
            Turn(
                segment=place.segment,
                completion_start=place.start,
                completion_end=place.end,
                text=turn.parsed.text,
                finish_reason=completion.finish_reason,
                tool_calls=turn.parsed.tool_calls if calls is None else calls,
                observations=[observation.text for observation in observations],
                inference_s=turn.sampled_s - turn.started_s,
                tools_s=trio.current_time() - turn.sampled_s,
                dropped_tokens=completion.dropped_tokens,
                messages=list(turn.heard),
                tool_results=[observation.result for observation in observations],
            ),
            self.dialogue,
        )

    def cut_short(self, turn: SampledTurn) -> StopReason | None:
        """Return why a turn without a call ends the dialogue: it was cut by the context or by its own limit."""
        if turn.completion.finish_reason != "length":
            return None
        return "context_budget" if self.room < MIN_TURN_TOKENS else "no_end_of_turn"

    def check_staleness(self, newest: str, sampled_under: Sequence[str] = ()) -> None:
        """Raise StaleTrajectory if tokens of version `newest` do not match the earlier tokens.

        Also raise it if any tokens do not match the weights that the trainer has announced.
        """
        bound = self.context.resources.config.agent.staleness_bound(self.context.spec)
        if bound is None:
            return
        backends = self.context.resources.backends
        for older in (*self.context.dialogues.policy_versions, *sampled_under, newest):
            for newer in (newest, backends.policy_version):
                updates = backends.versions.updates(older, newer)
                if updates > bound:
                    is_agents = updates - self.budget.updates_in_tools <= bound
                    raise StaleTrajectory(older, newer, updates, bound, is_agents=is_agents)

    def has_stale_tokens(self, bound: int) -> bool:
        """Return whether more than `bound` updates lie between two sampled tokens."""
        versions, sampled = self.context.resources.backends.versions, self.context.dialogues.policy_versions
        return any(versions.updates(older, newer) > bound for older in sampled for newer in sampled)

    def _named(self, turn: int, what: str) -> str:
        """Return the name of a turn's wait, with its dialogue if a program has several at once."""
        return f"dialogue {self.dialogue}, turn {turn}: {what}" if self.keeps_cut else what

    def _completion(
        self, turn: int, at_most: int | None, texts: Sequence[str], guide: Guide | None
    ) -> PartialCompletion:
        spec, config = self.context.spec, self.context.resources.config
        stops = [*spec.sampling.stop_token_ids, *self.context.resources.chat_format.stop_token_ids]
        who = f"{spec.job_id}-s{self.dialogue}" if self.dialogue else spec.job_id
        return PartialCompletion(
            CompletionRequest(
                prompt_token_ids=self.conversation.prompt_array(),
                sampling=msgspec.structs.replace(spec.sampling, stop_token_ids=stops),
                max_tokens=min(filter(None, (at_most, spec.sampling.max_output_tokens, self.room))),
                request_id=f"{who}-t{turn}",
                timeout_s=config.backends.request_timeout_s,
                guide=guide,
            ),
            stop=self._stop(texts),
            stream=config.backends.stream,
            slice_tokens=config.backends.slice_tokens,
            admit=self.check_staleness,
        )

    def _stop(self, texts: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
        """Return a predicate for sampled tokens: a call is complete, or one of `texts` occurs."""
        at_call = self.context.resources.config.agent.stop_at_tool_call
        if not texts:
            return self.conversation.ends_with_tool_call if at_call else None
        chat_format, tail = self.context.resources.chat_format, max(map(len, texts)) + STOP_TAIL_TOKENS

        def is_enough(token_ids: Sequence[int]) -> bool:
            said = chat_format.decode(token_ids[-tail:])
            return any(text in said for text in texts) or (at_call and self.conversation.ends_with_tool_call(token_ids))

        return is_enough

    async def _keep(self, completion: Completion) -> ParsedTurn:
        """Add the sampled tokens to the dialogue, and return the parsed turn. Shielded from cancellation."""
        for span in completion.spans:
            self.context.dialogues.note_version(span.policy_version)
        self.context.sampled_tokens += len(completion.token_ids)
        add = partial(
            self.conversation.add_completion,
            completion.token_ids,
            completion.logprobs,
            policy_version=completion.policy_version,
            engine=completion.engine,
            spans=completion.spans,
        )
        if len(completion.token_ids) < LONG_TURN_TOKENS:
            return add()
        with trio.move_on_after(KEEP_S, shield=True):
            return await run_sync(add)
        return add()  # no thread was available


async def lease_backend(context: RolloutContext, stack: AsyncExitStack) -> Lease:
    """Wait for a backend for the whole task and return its lease, which ends when `stack` is closed.

    The wait is charged to no budget. If a backend has room, `backends.lease_timeout_s` may be 0.

    Raises:
        BackendError: none was available within `backends.lease_timeout_s`; the message has the cause.
    """
    backends, at_most_s = context.resources.backends, context.resources.config.backends.lease_timeout_s
    job_id, priority = context.spec.job_id, PRIORITY[context.spec.priority]
    scope = trio.CancelScope()
    waits_until_s: float | None = None

    @contextmanager
    def waiting(what: str) -> Iterator[None]:
        nonlocal waits_until_s
        if waits_until_s is None:
            scope.deadline = waits_until_s = trio.current_time() + at_most_s
        with context.standing_in_line(what, "inference", at_most_s=at_most_s):
            yield

    with scope:
        return await stack.enter_async_context(backends.lease(job_id, priority, waiting))
    raise BackendError(
        f"job {job_id} waited {at_most_s:g} s (backends.lease_timeout_s) for {backends.shortage()}", retryable=True
    )
