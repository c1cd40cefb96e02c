"""The domain: jobs that are submitted, outcomes that are returned, and the record of a rollout. Frozen, wire-ready.

The record has token-exact segments, turns, and the trajectory that contains both. Token arrays are raw little-endian
bytes on the wire (`token_ids` int32, `logprobs` float32, `loss_mask` uint8: 9 bytes a token) and read-only numpy views
in Python, without a copy.
"""

from __future__ import annotations

from collections import Counter
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from prorl_trio.types.errors import ErrorCode, FailureCause

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


Stage = Literal["init", "run", "eval"]
TerminalStatus = Literal[
    "completed",  # the rollout was scored
    "failed",  # an error ended it; see `cause`
    "cancelled",  # on request, or by its group's policy
    "timed_out",  # a budget was exhausted
]
Status = Literal[
    "queued",  # waiting for INIT
    "init",  # its sandbox is being prepared
    "ready",  # waiting for RUN
    "run",  # the agent is working
    "ran",  # waiting for EVAL
    "eval",  # being scored
    TerminalStatus,
]
"""The status of a job: a stage, or a wait for one; then exactly one terminal status."""

PRIORITY: Final = {"eval": 0, "train": 1}
"""The rank of a job's priority in every queue; lower ranks precede."""

StopReason = Literal[
    "finished",  # the agent called `finish` or gave its final answer
    "max_turns",  # `max_turns` was reached
    "context_budget",  # the context or the token budget has no room for another turn
    "no_tool_call",  # the policy gave neither a tool call nor an answer, after all reminders
    "no_end_of_turn",  # the last turn reached `max_output_tokens` without a call or an answer
    "parse_error",  # the calls of the last turn were unreadable, at `max_turns` or after repeated error reports
    "agent_budget",  # `agent_s` was exhausted
    "program_error",  # the agent program ended with an error
    "aborted",  # a failure or a cancel ended it early
]
"""Why the agent's loop ended. Not the engine's `FinishReason`."""

FinishReason = Literal[
    "stop",  # an end-of-turn token was sampled
    "length",  # `max_output_tokens` or the end of the context was reached
    "abort",  # the engine aborted it
    "tool_call",  # the node stopped it after a complete tool call
]
"""Why sampling one completion ended."""

LogprobKind = Literal[
    "raw",  # the model's own distribution: temperature 1, no truncation
    "processed",  # the distribution after temperature, `top_p` and `top_k`
    "unknown",  # the engine does not report it
]
"""The distribution that an engine's log-probabilities refer to."""

SegmentReason = Literal[
    "template_rewrite",  # the template renders earlier turns differently, for example without old reasoning
    "compaction",  # the dialogue was shortened
    "sub_agent",  # another agent was called
    "side_call",  # the program made a request outside its dialogue, for example for a title or a summary
    "rewrite",  # the program changed the policy's words or its own earlier words
    "tools_changed",  # the program, or an MCP server, offered different tools
    "branch",  # the program continued from an earlier turn
    "retry",  # a step was retried
]
"""Why a segment does not simply continue its parent."""
ASIDE: Final = ("sub_agent", "side_call")
"""Reasons of segments that are not part of their parent's work."""

Echo = Literal[
    "exact",
    "keyed",
    "respelled",
    "reasoning_dropped",
    "compaction",
    "sub_agent",
    "side_call",
    "rewrite",
    "tools_changed",
    "branch",
]
"""How a turn of the policy returned in a later request of a program: unchanged; altered, but with the key served with
it; spelled differently; without its reasoning; or not at all, so that a segment began, for its reason."""

ToolOutcome = Literal[
    "ok",  # it succeeded; a command exited with 0
    "error",  # it failed, exited with a nonzero code, or its arguments were refused
    "timed_out",  # it exceeded its time limit
    "running",  # a command is still running, and can be continued
    "unknown",  # the tool does not exist
    "malformed",  # it could not be parsed; see its `error`
    "not_run",  # the rollout had already ended
    "crashed",  # the tool has a bug; the node's log has the traceback
]
"""The result of a tool call, as a closed set."""

OUT_OF_BAND_PROTOCOL = 5
"""The first pickle protocol with out-of-band buffers (PEP 574)."""


# The states of a job from its submission to its acknowledgement, and the order of its stages. Pure.
#
# promised -> stored -> queued -> init -> ready -> run -> ran -> eval -> ended -> offered -> acknowledged
#
# The pipeline knows the stages, the ledger its own states, a session all states: `prorl_trio.sessions.job`.

JobState = Literal[
    "promised",
    "stored",
    "queued",
    "init",
    "ready",
    "run",
    "ran",
    "eval",
    "ended",
    "offered",
    "acknowledged",
    "refused",
    "requeued",
    "forgotten",
]
"""The state of a job.

`promised`: it has a place, and is being stored. `stored`: it is in the ledger, but not yet on the node. Then follow the
stages, with the waits `queued`, `ready` and `ran`. `ended`: its one outcome is being stored. `offered`: the outcome is
stored, and is sent on every connection until it is `acknowledged`. `refused`: it was not accepted, or the ledger did
not store its outcome. `requeued`: the node's end interrupted it, and the next start runs it again. `forgotten`: it was
dropped on purpose.
"""
StoredState = Literal["stored", "offered", "acknowledged"]
"""The states in the ledger: a job without an outcome, a job with one, and an id that is remembered for a while."""

TERMINAL: Final[frozenset[Status]] = frozenset({"completed", "failed", "cancelled", "timed_out"})
"""The statuses of outcomes."""
LINES: Final[frozenset[Status]] = frozenset({"queued", "ready", "ran"})
"""The stages in which a job waits for a worker."""
STAGES: Final[dict[Status, Status]] = {
    "queued": "init",
    "init": "ready",
    "ready": "run",
    "run": "ran",
    "ran": "eval",
    "eval": "completed",
}
"""The stages of an attempt, in order, each with its successor on success."""

Message = dict[str, Any]
"""`role`, `content` and further fields that templates read: `name`, `tool_call_id`, `tool_calls`, and reasoning as
`thinking` and `reasoning_content`. Content from outside has been marked."""

ToolSchema = dict[str, Any]
"""A function's JSON schema in OpenAI's format."""


def may_follow(status: Status, to: Status) -> bool:
    """Return whether `to` may follow within an attempt: the next stage, or a terminal status other than success."""
    return status in STAGES and (to == STAGES[status] or (to in TERMINAL and to != "completed"))


class _Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the domain: immutable, strict about unknown fields."""


class ToolCall(_Model, frozen=True):
    """A tool call that the policy made.

    Attributes:
        name: name of the tool.
        arguments: its arguments; empty if the call could not be parsed.
        raw: text of the call, as sampled.
        error: parse error; empty if the call could be parsed.
        id: id that the policy sampled; empty for most model families.
    """

    name: str
    arguments: dict[str, Any]
    raw: str
    error: str = ""
    id: str = ""


class ToolResult(_Model, frozen=True, omit_defaults=True):
    """The result of a call, in addition to the observation that the policy read.

    Attributes:
        outcome: result of the call; omitted if `ok`.
        exit_code: exit code of a command that ended; omitted otherwise.
    """

    outcome: ToolOutcome = "ok"
    exit_code: int | None = None


class ChatMessage(_Model, frozen=True):
    """A message as chat templates know it.

    Attributes:
        role: role of the speaker.
        content: text of the message.
        name: name of the tool, for role `tool`.
        tool_call_id: id of the call that a message of role `tool` answers. Results of sampled calls need none: they are
            in the order of the calls.
        tool_calls: calls in an assistant message of the opening. Sampled calls are in `Turn.tool_calls`.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] = []


_UNCHANGED: Final = 1.0
"""Temperature and `top_p` that leave the distribution alone."""
_RAW: Final = "raw"


Constraint = Literal[
    "json",  # the turn is JSON, or JSON of a schema
    "calls",  # the turn is calls of tools
]
"""The form that an engine enforced on a turn, by masking all other tokens."""


class PolicySpan(_Model, frozen=True, omit_defaults=True):
    """Consecutive tokens of a segment that were sampled in the same way. Fields at their default are omitted.

    Attributes:
        start: index of the first token in the segment.
        end: index after the last token.
        policy_version: version of the weights.
        engine: name and version of the engine, such as `vllm 0.32.0`.
        temperature, top_p, top_k: as in `SamplingParams`.
        logprob_kind: distribution that the log-probabilities refer to.
        constraint: the form that the engine enforced; omitted if none. Tokens outside the form were masked, and vLLM's
            log-probabilities refer to the remaining distribution. `Segment.free_mask` excludes these tokens.
    """

    start: int
    end: int
    policy_version: str
    engine: str
    temperature: float = _UNCHANGED
    top_p: float = _UNCHANGED
    top_k: int = 0
    logprob_kind: LogprobKind = _RAW
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        # msgspec leaves out a default by identity: an equal value from elsewhere would travel with every span.
        if self.temperature == _UNCHANGED:
            msgspec.structs.force_setattr(self, "temperature", _UNCHANGED)
        if self.top_p == _UNCHANGED:
            msgspec.structs.force_setattr(self, "top_p", _UNCHANGED)
        if self.logprob_kind == _RAW:
            msgspec.structs.force_setattr(self, "logprob_kind", _RAW)


class Segment(_Model, frozen=True):
    """Parallel arrays over one unbroken token sequence of length T, prompt included.

    The arrays are views of the memory that they came in: the message of an outcome, the node's arena, or an array of
    your own. `copy.deepcopy` makes a copy that owns its memory; so does pickling, unless out of band (PEP 574).

    Attributes:
        token_ids: int32 [T], 4 T bytes. Exactly the ids that the engine received and returned.
        logprobs: float32 [T], 4 T bytes. The engine's log-probability (natural log) of each sampled token; 0.0
            elsewhere.
        loss_mask: uint8 [T], T bytes. 1 exactly where the policy sampled the token, 0 on prompts and observations.
        spans: runs of sampled tokens, in order.
        parent: index of the segment that this one continues; None for the first.
        reason: reason why it is not part of its parent; None without a parent.
        shared: number of leading tokens that equal the parent's. Their mask is 0 here, because they are trained on in
            the parent.
        agent: name of the speaker, as the agent program reports it; empty if not reported, and for the node's agent.
        agent_type: type of that agent, as the program reports it.
    """

    token_ids_le: memoryview = msgspec.field(name="token_ids")
    logprobs_le: memoryview = msgspec.field(name="logprobs")
    loss_mask_le: memoryview = msgspec.field(name="loss_mask")
    spans: list[PolicySpan]
    parent: int | None = None
    reason: SegmentReason | None = None
    shared: int = 0
    agent: str = ""
    agent_type: str = ""

    def __post_init__(self) -> None:
        for name in ("token_ids_le", "logprobs_le", "loss_mask_le"):
            msgspec.structs.force_setattr(self, name, _flat(getattr(self, name)))
        n = len(self.loss_mask_le)
        if len(self.token_ids_le) != 4 * n or len(self.logprobs_le) != 4 * n:
            raise ValueError(
                f"arrays of a segment differ in length: {len(self.token_ids_le) / 4:g} ids, "
                f"{len(self.logprobs_le) / 4:g} logprobs, {n} mask"
            )

    @classmethod
    def from_arrays(
        cls,
        token_ids: Sequence[int] | npt.NDArray[np.int32],
        logprobs: Sequence[float] | npt.NDArray[np.float32],
        loss_mask: Sequence[int] | npt.NDArray[np.uint8],
        spans: list[PolicySpan],
        *,
        parent: int | None = None,
        reason: SegmentReason | None = None,
        shared: int = 0,
    ) -> Segment:
        """Build from sequences of equal length T, by a copy. Raises ValueError if they differ."""
        return cls(
            token_ids_le=memoryview(np.asarray(token_ids, dtype="<i4").tobytes()),
            logprobs_le=memoryview(np.asarray(logprobs, dtype="<f4").tobytes()),
            loss_mask_le=memoryview(np.asarray(loss_mask, dtype="u1").tobytes()),
            spans=spans,
            parent=parent,
            reason=reason,
            shared=shared,
        )

    @classmethod
    def over_arrays(
        cls,
        token_ids: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        loss_mask: npt.NDArray[np.uint8],
        spans: list[PolicySpan],
        *,
        parent: int | None = None,
        reason: SegmentReason | None = None,
        shared: int = 0,
    ) -> Segment:
        """Build over contiguous arrays of equal length T, without a copy. Raises ValueError if they differ."""
        return cls(
            token_ids_le=token_ids.data,
            logprobs_le=logprobs.data,
            loss_mask_le=loss_mask.data,
            spans=spans,
            parent=parent,
            reason=reason,
            shared=shared,
        )

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """Return the ids: int32 [T], a read-only view."""
        return np.frombuffer(self.token_ids_le, dtype="<i4")

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Return the log-probabilities: float32 [T], a read-only view."""
        return np.frombuffer(self.logprobs_le, dtype="<f4")

    @property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """Return the mask: uint8 [T], a read-only view."""
        return np.frombuffer(self.loss_mask_le, dtype="u1")

    @property
    def free_mask(self) -> npt.NDArray[np.uint8]:
        """Return `loss_mask` without tokens of an enforced form, whose distribution was not the policy's: uint8 [T]."""
        constrained = [span for span in self.spans if span.constraint is not None]
        if not constrained:
            return self.loss_mask
        mask = self.loss_mask.copy()
        for span in constrained:
            mask[span.start : span.end] = 0
        return mask

    def __len__(self) -> int:
        return len(self.loss_mask_le)

    def check(self) -> None:
        """Raise StaleReference if the arrays are a node's memory that has been reused.

        Data read since then may be wrong. Other arrays are always valid.
        """
        check = getattr(self.token_ids_le.obj, "check", None)
        if check is not None:
            check()

    def detached(self) -> Segment:
        """Return a copy that owns its memory.

        Raises:
            StaleReference: as in `check`.
        """
        copy = msgspec.structs.replace(
            self,
            token_ids_le=memoryview(self.token_ids_le.tobytes()),
            logprobs_le=memoryview(self.logprobs_le.tobytes()),
            loss_mask_le=memoryview(self.loss_mask_le.tobytes()),
        )
        self.check()
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Segment], tuple[Any, ...]]:
        arrays = (self.token_ids_le, self.logprobs_le, self.loss_mask_le)
        rest = (self.spans, self.parent, self.reason, self.shared, self.agent, self.agent_type)
        if protocol >= OUT_OF_BAND_PROTOCOL:
            return _segment, (*map(PickleBuffer, arrays), *rest)
        return _segment, (*(array.tobytes() for array in arrays), *rest)


def _segment(
    token_ids: Any,
    logprobs: Any,
    loss_mask: Any,
    spans: list[PolicySpan],
    parent: int | None = None,
    reason: SegmentReason | None = None,
    shared: int = 0,
    agent: str = "",
    agent_type: str = "",
) -> Segment:
    """Make a segment from a pickle; the arrays are any bytes-like objects."""
    return Segment(
        token_ids_le=token_ids,
        logprobs_le=logprobs,
        loss_mask_le=loss_mask,
        spans=spans,
        parent=parent,
        reason=reason,
        shared=shared,
        agent=agent,
        agent_type=agent_type,
    )


def _flat(buffer: Any) -> memoryview:
    """Return the bytes of a contiguous buffer, read-only."""
    view = memoryview(buffer)
    if view.format != "B" or view.ndim != 1:
        view = view.cast("B") if view.nbytes else memoryview(b"")
    return view.toreadonly()


class Turn(_Model, frozen=True, omit_defaults=True):
    """An action of the policy and its observations.

    Attributes:
        segment: index of its segment; token positions are indices into that segment.
        completion_start: index of the first sampled token of the turn.
        completion_end: index after the last sampled token.
        text: text of the completion.
        finish_reason: reason why sampling ended.
        tool_calls: tool calls in the completion.
        observations: one answer per call, in order; fewer if the rollout ended early.
        inference_s: seconds of sampling.
        tools_s: seconds in tools.
        dropped_tokens: number of tokens received after a complete tool call, which are not recorded.
        messages: messages to the policy before this turn, except the observations of the previous turn: the opening
            of its dialogue, or a reminder. Their tokens lie between the completions.
        tool_results: one result per observation.
    """

    segment: int
    completion_start: int
    completion_end: int
    text: str
    finish_reason: FinishReason
    tool_calls: list[ToolCall]
    observations: list[str]
    inference_s: float
    tools_s: float
    dropped_tokens: int = 0
    messages: list[ChatMessage] = []
    tool_results: list[ToolResult] = []


class Trajectory(_Model, frozen=True):
    """The whole record of a rollout, token-exact.

    Attributes:
        segments: segments of the task's agent in order, then the segments of each agent that it called.
        turns: actions of the policy.
        stop_reason: reason why the agent's loop ended.
        prefix_breaks: number of segments begun because a prompt lost its prefix.
        drift_tokens: number of recorded tokens that differ from the tokens sent and sampled. 0, or the job has failed.
        undelivered_tokens: number of sampled tokens in no segment. Any value except 0 is a bug.
        tools: functions offered to the task's agent, in the format of chat templates.
        echoes: number of turns by the way they returned in later requests of a program: `exact`, `keyed`, `respelled`,
            `reasoning_dropped`, or the reason of a new segment. Empty for the node's own agent.
    """

    segments: list[Segment]
    turns: list[Turn]
    stop_reason: StopReason
    prefix_breaks: int = 0
    drift_tokens: int = 0
    undelivered_tokens: int = 0
    tools: list[dict[str, Any]] = []
    echoes: dict[Echo, int] = {}

    @property
    def own_segments(self) -> list[int]:
        """Return the indices of the segments of the task's own work, without called agents and side calls.

        A program may begin with a dialogue outside of the task, for example for a title. Of several segments without a
        parent, the one with most turns in its work is the task's.
        """
        firsts: list[int] = []
        for index, segment in enumerate(self.segments):
            goes_on = segment.parent is not None and segment.reason not in ASIDE and segment.parent < index
            firsts.append(firsts[segment.parent] if goes_on and segment.parent is not None else index)
        turns = Counter(firsts[turn.segment] for turn in self.turns)
        roots = [index for index, segment in enumerate(self.segments) if segment.parent is None]
        own = max(roots, key=lambda index: turns[index], default=0)
        return [index for index, first in enumerate(firsts) if first == own]

    @property
    def policy_versions(self) -> list[str]:
        """Return every version that it was sampled under, each once.

        The oldest comes first if all are integers. Otherwise the versions of the task's own agent come in the order of
        first use, followed by versions of other agents only.
        """
        versions = dict.fromkeys(span.policy_version for segment in self.segments for span in segment.spans)
        return sorted(versions, key=int) if all(map(str.isdecimal, versions)) else list(versions)

    @property
    def staleness(self) -> int:
        """Return the number of policy updates between its oldest and its newest token; 0 with a single version.

        It is the difference of integer versions. Other versions are counted as they occur, which may miss updates.
        """
        versions = self.policy_versions
        if versions and all(map(str.isdecimal, versions)):
            return int(versions[-1]) - int(versions[0])
        return max(0, len(versions) - 1)


class SamplingParams(_Model, frozen=True):
    """The way of sampling. Defaults sample the raw distribution, which policy-gradient training needs.

    Attributes:
        temperature: at least 0; 0 is greedy.
        top_p: above 0, at most 1.
        top_k: 0 disables it.
        max_output_tokens: tokens per turn, at least 1.
        stop_token_ids: ids that end a turn, in addition to the model family's end of turn.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_output_tokens: int = 512
    stop_token_ids: list[int] = []

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.max_output_tokens < 1:
            raise ValueError(f"max_output_tokens must be >= 1, got {self.max_output_tokens}")


class Budgets(_Model, frozen=True):
    """Seconds that a job may spend in each stage, and in all stages together.

    Time in queues is not charged. None takes the node's default.

    `init_s`, `run_s`, `eval_s` and `total_s` guard the infrastructure. When one is exhausted, the job has `timed_out`
    without a reward, and its cause names the largest consumer of time. `agent_s` is the policy's. When it is exhausted,
    the agent's loop ends (`stop_reason` `agent_budget`), and the work is evaluated.

    No second is charged twice. `agent_s` is charged while a tool called by the policy runs, and while an engine
    produces its tokens. Waits for a backend and pauses are charged to no budget. The rest of RUN is charged to `run_s`:
    calls that fail, hang, stall, queue in an engine or are retried, and the handler's own time. So RUN takes at most
    `run_s` + `agent_s`, without waits, and a policy cannot cause a time-out.

    Attributes:
        init_s: budget of INIT, which prepares the sandbox.
        run_s: budget of RUN, in which the agent works.
        eval_s: budget of EVAL, which scores.
        total_s: budget of all stages of all attempts.
        agent_s: the policy's own time in one attempt. When it is exhausted, the agent's loop ends (`agent_budget`) and
            the work is scored. None takes the node's value, but at most this job's `run_s`.
    """

    init_s: float | None = None
    run_s: float | None = None
    eval_s: float | None = None
    total_s: float | None = None
    agent_s: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0, got {value}")


class GroupPolicy(_Model, frozen=True):
    """The rule that cancels the rest of a group, so that a straggler does not delay it.

    It is equal in all jobs of the group.

    Attributes:
        size: number of rollouts in the group, at least 1.
        min_completed: number of `completed` rollouts after which the others are cancelled; 0: never. **Biased** towards
            short rollouts, because the fastest are kept. To avoid the bias, leave it 0 and limit rollouts by
            `budgets.agent_s` and `sampling.max_output_tokens`. To save time, submit more groups than needed, and choose
            whole groups by a rule that ignores their length, such as the order of submission.
        deadline_s: working time of the group, in seconds, after which its live rollouts are cancelled; None: never. The
            clock stops while any live rollout of the group waits for a worker. **Biased** in the same way.
    """

    size: int
    min_completed: int = 0
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be >= 1, got {self.size}")
        if not 0 <= self.min_completed <= self.size:
            raise ValueError(f"min_completed must be in [0, size], got {self.min_completed} of {self.size}")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise ValueError(f"deadline_s must be > 0, got {self.deadline_s}")


class RetryPolicy(_Model, frozen=True):
    """The rule by which a rollout that failed is run again, from a fresh sandbox and an empty conversation.

    Attributes:
        max_attempts: 1 to 100, including the first.
        causes: causes of failure that are retried.
        backoff_s: 0 to 60. Attempt n + 1 begins after a wait of `backoff_s` * 2^(n - 1), at most 60 s.
    """

    max_attempts: int = 1
    causes: tuple[Literal["sandbox", "inference", "evaluator", "handler", "node"], ...] = (
        "sandbox",
        "inference",
        "node",
    )
    backoff_s: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= 100:
            raise ValueError(f"max_attempts must be in [1, 100], got {self.max_attempts}")
        if not 0 <= self.backoff_s <= 60:
            raise ValueError(f"backoff_s must be in [0, 60], got {self.backoff_s}")


class TaskInstance(_Model, frozen=True):
    """A task of a task set.

    Attributes:
        instance_id: name of the task; returned with the outcome.
        handler: name of its handler: `math`, or another one installed on the node.
        payload: the handler's data, which the handler validates.
        family: part of the task set, such as `aime25`, by which reports group it.
    """

    instance_id: str
    handler: str
    payload: dict[str, Any]
    family: str = ""


class Recorded(_Model, frozen=True):
    """The part of a rollout's outcome that regrading needs.

    Attributes:
        details: the outcome's `details`.
        stop_reason: the trajectory's `stop_reason`.
        turns: the trajectory's `turns`; optional if the handler does not use them.
    """

    details: dict[str, Any]
    stop_reason: StopReason
    turns: list[Turn] = []


class AgentProgram(_Model, frozen=True):
    """A program that works on a task instead of the node's own loop. The policy answers its model requests.

    Exactly one of `preset`, `command` and `external` is set.

    Attributes:
        preset: name of an installed agent (`prorl-trio agents list`).
        command: program and arguments, run in the task's sandbox. The instruction replaces `{instruction}` in an
            argument, and otherwise is the standard input.
        external: the agent runs elsewhere and requests its work by `OpenAgent`. The rollout waits for at most
            `agent_s`.
        env: environment variables, in addition to those that SDKs read (docs/agents.md). `{url}` and `{key}` are
            replaced by the model's address and key.
        cwd: working directory; empty: that of shells.
        model: name of the model; empty: `policy`.
    """

    preset: str = ""
    command: list[str] = []
    external: bool = False
    env: dict[str, str] = {}
    cwd: str = ""
    model: str = ""

    @property
    def name(self) -> str:
        """Return its display name: its preset, its program, or `elsewhere`."""
        return self.preset or (self.command[0] if self.command else "elsewhere")

    def __post_init__(self) -> None:
        if bool(self.preset) + bool(self.command and self.command[0]) + self.external != 1:
            raise ValueError("an agent is either a preset or a command, or it is external")


class McpServer(_Model, frozen=True):
    """An MCP server that a job starts in its own sandbox (docs/mcp.md).

    Attributes:
        name: prefix of its tools' names.
        command: program and arguments.
        env: environment variables.
        tools: patterns of the offered tools; empty: all.
    """

    name: str
    command: list[str]
    env: dict[str, str] = {}
    tools: list[str] = []


class JobSpec(_Model, frozen=True):
    """A rollout to run.

    `max_staleness` is enforced where a rollout begins. The job waits in its queue, oldest first, until a backend has
    new enough weights and (`agent.rollouts_per_update`) few enough rollouts are ahead. Unforeseen updates end the
    attempt, before a completion that would exceed the bound and after one that did: it is `failed`, with the cause
    `inference` and the code `stale`, and `retry` decides whether it runs again. Updates that arrived while its own
    tools ran are the policy's. If only they exceed the bound, the agent's loop ends (`stop_reason` `agent_budget`) and
    the work is graded. With a token that already is too stale, it is `failed`, with the cause `agent_budget`, the code
    `stale` and a reward of 0. Updates after a rollout's last token do not count. Integer versions differ by their
    difference, other versions by the number of updates announced to the node between them.

    Attributes:
        job_id: id chosen by the submitter, 1 to 200 characters. Unique on the node while the job lives, and idempotent.
        instance: the task.
        group_id: id shared by the rollouts of one instance; empty: no group.
        sampling: sampling parameters of the policy.
        budgets: time budgets in seconds.
        max_turns: turns of the task's own agent, at least 1.
        priority: `eval` jobs precede `train` jobs.
        tags: the submitter's labels. They are returned with the outcome, and a cancel can select by them.
        keep_partial: include the trajectory recorded so far in an outcome that is not `completed`.
        group: rule that cancels the rest of the group; needs a `group_id`.
        retry: rule that runs the whole rollout again.
        max_staleness: maximum number of policy updates between the first sampled token and the newest weights, whether
            in use for the next token or announced by the trainer (the last resume). None: the node's limit.
        max_trajectory_tokens: maximum tokens per segment, prompt included. None takes the node's limit or the engine's
            context, which also cap larger values.
        max_completion_tokens: maximum tokens per segment after its opening prompt: sampled tokens, and the messages
            between turns. None: no limit of its own.
        recorded: an earlier rollout of the instance to grade again, by EVAL alone. Nothing is sampled.
        agent: a program that works on the task instead of the node's own loop. A text is its `preset`.
        mcp: MCP servers whose tools the agent uses in addition: names of the node's servers, or servers for the
            sandbox. None: the node's `mcp.default`.
    """

    job_id: str
    instance: TaskInstance
    group_id: str = ""
    sampling: SamplingParams = SamplingParams()
    budgets: Budgets = Budgets()
    max_turns: int = 8
    priority: Literal["train", "eval"] = "train"
    tags: dict[str, str] = {}
    keep_partial: bool = True
    group: GroupPolicy | None = None
    retry: RetryPolicy = RetryPolicy()
    max_staleness: int | None = None
    max_trajectory_tokens: int | None = None
    max_completion_tokens: int | None = None
    recorded: Recorded | None = None
    agent: AgentProgram | str | None = None
    mcp: list[McpServer | str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.agent, str):
            msgspec.structs.force_setattr(self, "agent", AgentProgram(preset=self.agent))
        for name in ("max_trajectory_tokens", "max_completion_tokens"):
            if (tokens := getattr(self, name)) is not None and tokens < 1:
                raise ValueError(f"{name} must be >= 1, got {tokens}")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"max_staleness must be >= 0, got {self.max_staleness}")
        if not 1 <= len(self.job_id) <= 200:
            raise ValueError(f"job_id must have 1 to 200 characters, got {len(self.job_id)}")
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be >= 1, got {self.max_turns}")
        if self.group is not None and not self.group_id:
            raise ValueError("group needs a group_id")

    @property
    def agent_name(self) -> str:
        """Return the display name of its program; empty for the node's own agent."""
        return self.agent.name if isinstance(self.agent, AgentProgram) else ""


class Timing(_Model, frozen=True):
    """Seconds of a job by stage, on the monotonic clock.

    Attributes:
        queued_init_s, queued_run_s, queued_eval_s: wait before the stage, charged to no budget.
        init_s, run_s, eval_s: time in the stage.
    """

    queued_init_s: float = 0.0
    init_s: float = 0.0
    queued_run_s: float = 0.0
    run_s: float = 0.0
    queued_eval_s: float = 0.0
    eval_s: float = 0.0


class AttemptRecord(_Model, frozen=True):
    """An attempt that failed and was followed by another.

    Attributes:
        attempt: its number, from 1.
        status, cause, error_code, error, timing: as in `Outcome`.
    """

    attempt: int
    status: Literal["failed", "timed_out"]
    cause: FailureCause
    error_code: ErrorCode
    error: str
    timing: Timing


class Outcome(_Model, frozen=True):
    """The one terminal record of a job.

    Attributes:
        job_id, instance_id, group_id, tags: as submitted.
        status: a terminal status.
        reward: the score; None, never 0, for every failure that the policy did not cause.
        cause: cause of the end; None exactly if `completed`.
        error: message for people; empty if `completed`.
        trajectory: recorded tokens and turns; partial or None on failure.
        details: further results of the handler.
        timing: times of the last attempt.
        error_code: exact failure; None exactly if `completed`.
        evaluation_log: output of the evaluator; the middle of a long one is omitted.
        attempt: number of the attempt that produced this outcome.
        attempts: earlier attempts, which failed.
        regraded: True if a recorded rollout was graded again and nothing was sampled; otherwise omitted.
    """

    job_id: str
    instance_id: str
    group_id: str
    status: TerminalStatus
    reward: float | None
    cause: FailureCause | None
    error: str
    trajectory: Trajectory | None
    details: dict[str, Any]
    timing: Timing
    tags: dict[str, str] = {}
    error_code: ErrorCode | None = None
    evaluation_log: str = ""
    attempt: int = 1
    attempts: list[AttemptRecord] = []
    regraded: bool | msgspec.UnsetType = msgspec.UNSET

    def check(self) -> None:
        """Raise StaleReference if its token arrays are a node's memory that has been reused. See `Segment.check`."""
        if self.trajectory is not None:
            for segment in self.trajectory.segments:
                segment.check()

    def detached(self) -> Outcome:
        """Return a copy, token arrays included, that stays valid.

        Raises:
            StaleReference: the node has already reused the memory of the arrays.
        """
        if self.trajectory is None:
            return self
        segments = [segment.detached() for segment in self.trajectory.segments]
        return msgspec.structs.replace(self, trajectory=msgspec.structs.replace(self.trajectory, segments=segments))


class _Header(msgspec.Struct):
    """The fields of an encoded outcome that are decoded without its tokens."""

    job_id: str
    status: TerminalStatus
    error_code: ErrorCode | None = None
    attempt: int = 1


_decode_header = msgspec.msgpack.Decoder(_Header).decode
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class EncodedOutcome(msgspec.Struct, frozen=True):
    """An outcome as the bytes that are stored and sent, with the fields that decide how it is handled."""

    job_id: str
    status: TerminalStatus
    error_code: ErrorCode | None
    attempt: int
    data: bytes

    @classmethod
    def of(cls, outcome: Outcome, data: bytes) -> EncodedOutcome:
        """Return an outcome with its bytes."""
        return cls(outcome.job_id, outcome.status, outcome.error_code, outcome.attempt, data)

    @classmethod
    def read(cls, data: bytes) -> EncodedOutcome:
        """Return the outcome that these bytes encode. Its token arrays are not decoded.

        Raises:
            msgspec.DecodeError: they do not encode an outcome.
        """
        header = _decode_header(data)
        return cls(header.job_id, header.status, header.error_code, header.attempt, data)

    def decode(self) -> Outcome:
        """Return the whole outcome. Its arrays are views of the bytes."""
        return _decode_outcome(self.data)
