"""The working context of a job's handler: the instance, the sandbox, the model's side, and the record so far."""

from __future__ import annotations

import logging
import math
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import trio

from prorl_trio.agent.activity import Activity
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.token_memory import RolloutTokens, TokenMemory
from prorl_trio.sandbox.host import MAX_PAUSE_S
from prorl_trio.sandbox.images.store import is_reference
from prorl_trio.sandbox.use import Use
from prorl_trio.types.errors import BudgetExceeded, SandboxUnavailable, TooManyDialogues
from prorl_trio.types.models import Trajectory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from prorl_trio.agent.activity import Charge
    from prorl_trio.agent.external import ExternalAgents
    from prorl_trio.agent.scoring import ScorerPool
    from prorl_trio.chat.format import ChatFormat
    from prorl_trio.config import NodeConfig
    from prorl_trio.inference.pool.pool import Backends
    from prorl_trio.sandbox.host import HostedSandbox, SandboxHost
    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.search.service import Search
    from prorl_trio.types.models import Echo, JobSpec, Segment, SegmentReason, StopReason, Turn

logger = logging.getLogger(__name__)

MAX_EVALUATION_LOG_CHARS: Final = 64 * 1024
"""Limit of characters in `Outcome.evaluation_log`; a longer log loses its middle."""
UNKNOWN_CONTEXT_TOKENS: Final = 32_768
"""Assumed context length without backends."""

MAX_DIALOGUES: Final = 1024
"""Maximum number of dialogues per rollout, which stops a policy that asks for agents without end."""


class Origin(NamedTuple):
    """The origin of a dialogue: it begins with `shared` tokens of segment `segment` of the dialogue `asker`.

    `agent` and `agent_type` as in `Segment`.
    """

    asker: int
    segment: int
    reason: SegmentReason = "sub_agent"
    shared: int = 0
    agent: str = ""
    agent_type: str = ""


class _Dialogue(NamedTuple):
    """`origin` is None for the first dialogue."""

    conversation: Conversation
    origin: Origin | None


class Dialogues:
    """The dialogues in order of their start; number 0 is the task's own."""

    def __init__(self) -> None:
        self._all: list[_Dialogue] = []
        self._turns: list[tuple[int, Turn]] = []
        self._versions: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def begin(self, conversation: Conversation, origin: Origin | None = None) -> int:
        self._all.append(_Dialogue(conversation, origin))
        return len(self._all) - 1

    def asked_in(self, asker: int) -> Origin:
        """Return the origin of a dialogue that the agent of `asker` begins now, in its current segment."""
        return Origin(asker, self._all[asker].conversation.segment)

    def record(self, turn: Turn, dialogue: int = 0) -> None:
        """Record a turn of `dialogue`, whose segment is counted within the dialogue."""
        self._turns.append((dialogue, turn))

    def note_version(self, policy_version: str) -> None:
        self._versions[policy_version] = None

    @property
    def policy_versions(self) -> list[str]:
        """Return every version under which tokens were sampled, each once, in the order of first use."""
        return list(self._versions)

    @property
    def prefix_breaks(self) -> int:
        return sum(each.conversation.prefix_breaks for each in self._all)

    @property
    def drift_tokens(self) -> int:
        return sum(each.conversation.drift_tokens for each in self._all)

    def assemble(self, segments_of: Callable[[Conversation], list[Segment]]) -> tuple[list[Segment], list[Turn]]:
        """Return the segments of all dialogues one after the other, and the turns in the order of recording.

        Turns and parents of segments get consecutive numbers. The first segment of a dialogue with an origin has the
        origin as its parent.
        """
        segments: list[Segment] = []
        firsts: list[int] = []
        for conversation, origin in self._all:
            first = len(segments)
            firsts.append(first)
            for segment in segments_of(conversation):
                if origin is not None and segment.parent is None:
                    asker, asked_in, reason, shared, agent, agent_type = origin
                    parent = firsts[asker] + asked_in
                    segment = msgspec.structs.replace(
                        segment, parent=parent, reason=reason, shared=shared, agent=agent, agent_type=agent_type
                    )
                elif first and segment.parent is not None:
                    segment = msgspec.structs.replace(segment, parent=first + segment.parent)
                segments.append(segment)
        return segments, [_moved(turn, firsts[dialogue]) for dialogue, turn in self._turns]


def _moved(turn: Turn, first: int) -> Turn:
    return msgspec.structs.replace(turn, segment=first + turn.segment) if first else turn


class BoundedText:
    """Collects text; beyond `max_chars` the middle is dropped and counted."""

    def __init__(self, max_chars: int) -> None:
        self._head_room = max_chars // 2
        self._max_tail = max_chars - max_chars // 2
        self._head = ""
        self._tail = ""
        self._dropped = 0

    def append(self, text: str) -> None:
        self._head += text[: self._head_room]
        rest = text[self._head_room :]
        self._head_room = max(0, self._head_room - len(text))
        tail = self._tail + rest
        cut = max(0, len(tail) - self._max_tail)
        self._dropped += cut
        self._tail = tail[cut:]

    def __str__(self) -> str:
        if not self._dropped:
            return self._head + self._tail
        return f"{self._head}\n[... {self._dropped} characters left out ...]\n{self._tail}"


class Address(NamedTuple):
    """The address of a gateway for a program: the URL, without the path of an API, and the program's key.

    The key is a secret if other rollouts share the URL.
    """

    url: str
    key: str


@dataclass(slots=True, kw_only=True)
class Resources:
    """The resources that all jobs of a node share.

    The node owns and closes them. It replaces `config` on a reload, so read it each time.
    """

    config: NodeConfig
    chat_format: ChatFormat
    backends: Backends
    scorers: ScorerPool
    tokens: TokenMemory = field(default_factory=TokenMemory)
    search: Search | None = None
    """The search service; None if the node has none."""
    serve_gateway: Callable[..., AbstractAsyncContextManager[Address]] | None = None
    """Serve the `Gateway` of a rollout to its sandbox, or to remote programs if the sandbox is None, during a block.

    It is None if this node runs no programs.
    """
    external_agents: ExternalAgents | None = None
    """The table of remote agents; None if the node accepts none."""

    def max_trajectory_tokens(self, spec: JobSpec, longest: int | None = None) -> int:
        """Return the longest context that a rollout may have, in tokens.

        It is the minimum of the rollout's own limit, the node's, and `longest`, the limit of its engine. Without a
        limit it is the longest context of all engines while the rollout lacks an engine.
        """
        limits = list(filter(None, (spec.max_trajectory_tokens, self.config.agent.max_trajectory_tokens, longest)))
        return min(limits) if limits else self._longest_context()

    def _longest_context(self) -> int:
        return max((info.max_model_len for info in self.backends.list()), default=UNKNOWN_CONTEXT_TOKENS)


@dataclass(slots=True, kw_only=True)
class RolloutContext:
    """The working state of a job. It belongs to the job's current stage; two tasks never use it concurrently.

    `sandbox` is set from INIT until the handler's `after_run` releases it; `is_layered` means that it contains the
    agent of a preset. `conversation`, `dialogues`, `turns`, `sampled_tokens` and `stop_reason` grow while the agent
    runs, so that a failure leaves a partial trajectory. `conversation` belongs to the task's own agent; `dialogues`
    includes the agents that it called. `tools` are the tools offered to the task's own agent. `answer` is the agent's
    final answer; `given_reward` is the grade that a remote agent received from its own caller. `handler_state` belongs
    to the handler, and persists between stages. `tokens` is the memory of the conversation, released when the attempt
    has ended and its outcome is delivered. Observers see `activity`; `on_turn` is called with each recorded turn. The
    pipeline sets `sandboxes`, the source of sandboxes, `stage_scope`, the scope of the current stage, and
    `uncharged_s`, its seconds that no budget is charged for. `on_standstill` functions are called with the seconds for
    which a sandbox of the job was suspended. Each agent with running tools excludes these seconds from its own budget.
    """

    spec: JobSpec
    resources: Resources
    sandbox: Sandbox | None = None
    is_layered: bool = False
    conversation: Conversation | None = None
    tokens: RolloutTokens = field(default_factory=RolloutTokens)
    dialogues: Dialogues = field(default_factory=Dialogues)
    turns: list[Turn] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    echoes: Counter[Echo] = field(default_factory=Counter)
    sampled_tokens: int = 0
    stop_reason: StopReason = "aborted"
    answer: str | None = None
    given_reward: float | None = None
    handler_state: Any = None
    activity: Activity = field(default_factory=Activity)
    on_turn: Callable[[Turn], None] | None = None
    evaluation_log: BoundedText = field(default_factory=lambda: BoundedText(MAX_EVALUATION_LOG_CHARS))
    sandboxes: SandboxHost | None = None
    stage_scope: trio.CancelScope | None = None
    uncharged_s: float = 0.0
    on_standstill: list[Callable[[float], None]] = field(default_factory=list)
    _tools_at_work: int = 0
    _stage: Literal["run", "eval"] = "run"
    _agents_s: float = math.inf
    _agents_used_s: float = 0.0
    _lines: int = 0
    _line_since_s: float = 0.0
    _line_deadline_s: float = math.inf

    def waiting(self, what: str, charge: Charge = "handler") -> AbstractContextManager[None]:
        """Show the job's wait to observers: `with context.waiting("tool bash", "sandbox"): ...`.

        If a budget is exceeded, and most of its time was spent in such blocks, `charge` is the cause.
        """
        return self.activity.waiting(what, charge)

    @asynccontextmanager
    async def open_sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """Open an unused sandbox in addition to the agent's; it is removed when the block exits.

        For evaluators, because the agent has left nothing in it. Open it after the agent has finished with an answer:
        opening it during RUN doubles the live sandboxes to save the half second of a start. The time and the effects of
        a program that runs there are charged to the agent, except in a `waiting` block for the evaluator.

        Raises:
            SandboxUnavailable: it does not start.
        """
        sandbox = await self.start_sandbox(spec)
        try:
            yield sandbox
        finally:
            await sandbox.aclose()  # noqa: ASYNC102 - it shields itself

    async def start_sandbox(self, spec: SandboxSpec) -> HostedSandbox:
        """Return an unused sandbox that lives until its `aclose`. Errors as `open_sandbox`."""
        if self.sandboxes is None:
            raise SandboxUnavailable("there are no sandboxes before INIT, and none where no node runs the job")
        if is_reference(spec.image):
            at_most_s = self.resources.config.sandbox.images.timeout_s
            with self.standing_in_line(f"image {spec.image}", "sandbox", at_most_s=at_most_s):
                try:
                    await self.sandboxes.wait_image(spec.image)
                except SandboxUnavailable as exc:
                    if not exc.of_machine:  # else `open` retries when the machine can start processes again
                        raise
        in_line = partial(self.standing_in_line, charge="sandbox", at_most_s=MAX_PAUSE_S)
        with self.waiting(f"sandbox start (image {spec.image})", "sandbox"):
            sandbox = await self.sandboxes.open(spec, in_line)
        sandbox.on_standstill(self._stood_still)
        sandbox.use = Use(self)
        self.activity.progress()
        return sandbox

    @contextmanager
    def standing_in_line(self, what: str, charge: Charge, *, at_most_s: float) -> Iterator[None]:
        """Wait in line without charging the stage's budget or the job's total.

        The caller limits the wait to `at_most_s`. Blocks may overlap; their common time counts once.
        """
        scope, now_s = self.stage_scope, trio.current_time()
        # The wait's duration is unknown: the deadline is postponed by the maximum, and reset to the time
        # that was left when the last of the overlapping waits has ended.
        if not self._lines:
            self._line_since_s, self._line_deadline_s = now_s, math.inf if scope is None else scope.deadline
        self._lines += 1
        if scope is not None:
            scope.deadline = max(scope.deadline, self._line_deadline_s + (now_s - self._line_since_s) + at_most_s)
        try:
            with self.activity.waiting(what, charge, is_charged=False):
                yield
        finally:
            self._lines -= 1
            if not self._lines:
                waited_s = trio.current_time() - self._line_since_s
                self.uncharged_s += waited_s
                if scope is not None:
                    scope.deadline = self._line_deadline_s + waited_s

    def leave_uncharged(self, seconds: float) -> None:
        """Exclude past seconds from all charges, like the time of `standing_in_line`."""
        if seconds and not self._lines:
            self.uncharged_s += seconds
            if self.stage_scope is not None:
                self.stage_scope.deadline += seconds

    def _stood_still(self, seconds: float) -> None:
        """Postpone all budgets by the seconds in which a sandbox of the job was suspended."""
        if self._lines:
            if self.stage_scope is not None:
                self.stage_scope.deadline += seconds
        else:
            self.leave_uncharged(seconds)
        for leave_out in set(self.on_standstill):
            leave_out(seconds)

    @contextmanager
    def evaluating(self, what: str) -> Iterator[None]:
        """Evaluate a part of the work during RUN, within the job's `eval_s` and without charging the stage.

        So a policy that slows its evaluation down does not make its rollout `timed_out`. Must not be used inside
        `standing_in_line`.

        Raises:
            BudgetExceeded: the block took longer, and was cancelled.
        """
        assert not self._lines, "the stage waits in line"
        asked_s = self.spec.budgets.eval_s
        budget_s = self.resources.config.budgets.eval_s if asked_s is None else asked_s
        outer, uncharged_s, left_s = self.stage_scope, self.uncharged_s, self.stage_left_s()
        since_s = trio.current_time()
        self.stage_scope, self.uncharged_s = trio.CancelScope(deadline=since_s + budget_s), 0.0
        if outer is not None:
            outer.deadline = math.inf
        try:
            with self.stage_scope as scope, self.waiting(what, "evaluator"):
                yield
        finally:
            took_s, waited_s = trio.current_time() - since_s, self.uncharged_s
            self.stage_scope, self.uncharged_s = outer, uncharged_s + took_s
            if outer is not None:
                outer.deadline = trio.current_time() + left_s
        if scope.cancelled_caught:
            raise BudgetExceeded("eval", budget_s, took_s - waited_s, "evaluator")

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Run a tool of the policy during the block: its requests to sandboxes are the policy's acts."""
        self._tools_at_work += 1
        try:
            yield
        finally:
            self._tools_at_work -= 1

    @property
    def is_acting(self) -> bool:
        return self._tools_at_work > 0

    @property
    def may_run_answers(self) -> bool:
        charge = self.activity.waiting_charge
        return charge == "agent_budget" or (charge is None and bool(self.turns))

    @contextmanager
    def on_agents_time(self, what: str) -> Iterator[None]:
        """Charge the block to the policy and not to the stage. In a stage, the limit is the stage's budget for this.

        Has no effect where the time is already accounted for (`standing_in_line`), for example by the agent's own
        budget.

        Raises:
            BudgetExceeded: the limit is reached, and the block was cancelled.
        """
        if self._lines or self.stage_scope is None:
            yield
            return
        since_s, left_s = trio.current_time(), self._agents_s - self._agents_used_s
        line = self.standing_in_line(what, "agent_budget", at_most_s=left_s)
        with line, trio.CancelScope(deadline=since_s + left_s) as scope:

            def leave_out(seconds: float) -> None:
                self._agents_used_s -= seconds
                scope.deadline += seconds

            self.on_standstill.append(leave_out)
            try:
                yield
            finally:
                self.on_standstill.remove(leave_out)
                self._agents_used_s += trio.current_time() - since_s
        if scope.cancelled_caught:
            raise BudgetExceeded(self._stage, self._agents_s, self._agents_used_s, "agent_budget")

    def stage_left_s(self) -> float:
        """Return the remaining seconds of the stage's budget; infinite outside a stage."""
        return math.inf if self.stage_scope is None else self.stage_scope.deadline - trio.current_time()

    def begin_stage(self, scope: trio.CancelScope, own: Charge) -> None:
        """Count the time of a new stage from zero; time without other waits is charged to `own`."""
        self.stage_scope, self.uncharged_s, self._lines = scope, 0.0, 0
        self._stage = "eval" if own == "evaluator" else "run"
        self._agents_s, self._agents_used_s = self.stage_left_s(), 0.0
        self.activity.begin_stage(own)

    def log_evaluation(self, text: str) -> None:
        """Append to the evaluator's log, which reaches the trainer however the evaluation ends.

        Lone surrogates, which cannot be sent, become question marks.
        """
        self.evaluation_log.append(text.encode(errors="replace").decode())

    def begin_dialogue(self, conversation: Conversation, origin: Origin | None = None) -> int:
        """Record `conversation` as a new dialogue and return its number; its tokens use the rollout's memory.

        With `origin` None it becomes the conversation of the task's agent.

        Raises:
            TooManyDialogues: there are `MAX_DIALOGUES` already.
        """
        if len(self.dialogues) >= MAX_DIALOGUES:
            raise TooManyDialogues(f"a rollout may ask {MAX_DIALOGUES - 1} other agents; this one asks for more")
        conversation.keep_in(self.tokens)
        if origin is None:
            self.conversation = conversation
        return self.dialogues.begin(conversation, origin)

    def record(self, turn: Turn, dialogue: int = 0) -> None:
        """Record a turn of the policy with its observations, in `dialogue`, and call `on_turn` with it."""
        self.turns.append(turn)
        self.dialogues.record(turn, dialogue)
        self.activity.progress()
        if self.on_turn is not None:
            self.on_turn(turn)

    def trajectory(self) -> Trajectory | None:
        """Return a copy of the trajectory recorded so far; None before the first completion."""
        return self._trajectory(Conversation.segments) if self.turns and self.dialogues else None

    def sealed_trajectory(self) -> Trajectory | None:
        """Return the trajectory without a copy: its arrays are views of `tokens`, valid until they are released.

        No recording is possible afterwards.
        """
        trajectory = self._trajectory(Conversation.seal) if self.dialogues else None
        return trajectory if self.turns else None

    def _trajectory(self, segments_of: Callable[[Conversation], list[Segment]]) -> Trajectory:
        segments, turns = self.dialogues.assemble(segments_of)
        undelivered = self.sampled_tokens - sum(int(np.count_nonzero(segment.loss_mask)) for segment in segments)
        if undelivered:
            told = "job %s: %d of %d sampled tokens are in no segment"
            logger.error(told, self.spec.job_id, undelivered, self.sampled_tokens)
        return Trajectory(
            segments=segments,
            turns=turns,
            stop_reason=self.stop_reason,
            prefix_breaks=self.dialogues.prefix_breaks,
            drift_tokens=self.dialogues.drift_tokens,
            undelivered_tokens=undelivered,
            tools=self.tools,
            echoes=dict(self.echoes),
        )
