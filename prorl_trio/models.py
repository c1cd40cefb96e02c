"""The domain: what is submitted, what is recorded, what is returned. Frozen msgspec Structs, wire-ready.

Token arrays are raw little-endian bytes on the wire (`token_ids` int32, `logprobs` float32, `loss_mask` uint8: 9 bytes
a token) and read-only numpy views in Python, without a copy.
"""

from __future__ import annotations

from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from prorl_trio.errors import ErrorCode, FailureCause

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prorl_trio.batch import PaddedBatch

__all__ = [
    "PRIORITY",
    "AttemptRecord",
    "Budgets",
    "ChatMessage",
    "FinishReason",
    "GroupPolicy",
    "JobSpec",
    "LogprobKind",
    "Outcome",
    "PolicySpan",
    "RetryPolicy",
    "SamplingParams",
    "Segment",
    "SegmentReason",
    "Stage",
    "Status",
    "StopReason",
    "TaskInstance",
    "TerminalStatus",
    "Timing",
    "ToolCall",
    "Trajectory",
    "Turn",
]

Stage = Literal["init", "run", "eval"]
TerminalStatus = Literal["completed", "failed", "cancelled", "timed_out"]
Status = Literal["queued", "init", "ready", "run", "ran", "eval", "completed", "failed", "cancelled", "timed_out"]
"""`queued` waits for INIT, `ready` for RUN, `ran` for EVAL; then exactly one terminal status."""

StopReason = Literal[
    "finished",  # the agent called `finish`, or gave its final answer
    "max_turns",
    "context_budget",  # no room for another turn in the context or token budget
    "no_tool_call",  # no tool call and no answer, after the nudges allowed
    "agent_budget",  # the agent's time ran out
    "aborted",  # the rollout was cut short by a failure or a cancel
]
"""Why the agent's loop ended. Not the engine's `FinishReason`."""

FinishReason = Literal["stop", "length", "abort", "tool_call"]
"""Why sampling one completion ended: end-of-turn token, token limit, aborted by the engine; or the node stopped it, as
a tool call was complete."""

LogprobKind = Literal["raw", "processed", "unknown"]
"""Of which distribution an engine's log-probabilities are: the model's own (temperature 1, nothing cut off), or what
temperature, `top_p` and `top_k` made of it."""

SegmentReason = Literal["template_rewrite", "compaction", "sub_agent", "retry"]
"""Why a segment does not continue the one before it: the template renders earlier turns otherwise (it drops old
reasoning, say); the dialogue was shortened; another agent was asked; a step is tried again."""

OUT_OF_BAND_PROTOCOL = 5
"""Of pickles that may carry buffers beside themselves (PEP 574)."""


PRIORITY: Final = {"eval": 0, "train": 1}
"""The place of a job's priority in any line; lower goes first."""


class _Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the domain: immutable, strict about unknown fields."""


class SamplingParams(_Model, frozen=True):
    """How the policy is sampled. Defaults sample the raw distribution, which policy-gradient training needs.

    `max_output_tokens` limits one turn. `stop_token_ids` end a turn besides the family's end-of-turn token.
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
    """Seconds a job may spend in each stage, and in all of them together. Time in queues is not charged. None takes the
    node's default.

    `init_s`, `run_s`, `eval_s` and `total_s` guard the infrastructure: where one is used up, the job has `timed_out`,
    with a cause that says where the time went, and no reward. `agent_s` is the policy's: when it is used up, the
    agent's loop ends (`stop_reason` `agent_budget`), and what it did is evaluated as ever.
    `total_s` spans all attempts.
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
    """When the rest of a group is cancelled, so that a straggler does not hold it up. All its rollouts say the same.

    Attributes:
        size: rollouts of the group.
        min_completed: once so many are `completed`, the others are cancelled; 0: never.
        deadline_s: so long after the first one was accepted, those that are not over are cancelled; None: never.
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
    """Whether a rollout that failed is run again as a whole: from a fresh sandbox, with an empty conversation.

    `max_attempts` counts the first one. `causes` are those that are retried, none of the policy's own. Before attempt n
    + 1 the job waits `backoff_s` * 2 ** (n - 1), at most 60 s.
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
    """One task of a task set. `handler` names who can do it; `payload` is that handler's own, validated by it."""

    instance_id: str
    handler: str
    payload: dict[str, Any]


class JobSpec(_Model, frozen=True):
    """One rollout to do. `job_id` is the submitter's and idempotent; rollouts of one instance share `group_id`.

    `keep_partial`: an outcome other than `completed` carries what was recorded until then. `group` needs a `group_id`.
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

    def __post_init__(self) -> None:
        if not 1 <= len(self.job_id) <= 200:
            raise ValueError(f"job_id must have 1 to 200 characters, got {len(self.job_id)}")
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be >= 1, got {self.max_turns}")
        if self.group is not None and not self.group_id:
            raise ValueError("group needs a group_id")


class ToolCall(_Model, frozen=True):
    """One call the policy made. `error` is set when its text could not be parsed: then `arguments` is empty."""

    name: str
    arguments: dict[str, Any]
    raw: str
    error: str = ""


class ChatMessage(_Model, frozen=True):
    """A message as chat templates know it. `name` is the tool's, for role `tool`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None


class PolicySpan(_Model, frozen=True, omit_defaults=True):
    """Tokens `start` (inclusive) to `end` (exclusive) of a segment were sampled in one way.

    Attributes:
        policy_version: of the weights.
        engine: its name and version, `vllm 0.32.0`.
        temperature, top_p, top_k: see `SamplingParams`.
        logprob_kind: what the recorded log-probabilities are of.
    """

    start: int
    end: int
    policy_version: str
    engine: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    logprob_kind: LogprobKind = "raw"


class Segment(_Model, frozen=True):
    """Parallel arrays over one unbroken token sequence of length T, prompt included.

    The arrays are views of whatever memory they came in: the message an outcome was decoded from, the node's arena, an
    array of your own. `copy.deepcopy` makes one that owns its memory; so does pickling, unless out of band (PEP 574).

    Attributes:
        token_ids: int32 [T]. Bit for bit what the engine received and returned.
        logprobs: float32 [T]. The engine's log-probability (natural log) of each sampled token; 0.0 elsewhere.
        loss_mask: uint8 [T]. 1 exactly where the policy sampled the token, 0 on prompts and observations.
        spans: run-length policy versions over the sampled tokens.
        parent: index of the segment of the trajectory that this one goes on from; None for the first.
        reason: why it does not simply continue its parent; None where there is none.
    """

    token_ids_le: memoryview = msgspec.field(name="token_ids")
    logprobs_le: memoryview = msgspec.field(name="logprobs")
    loss_mask_le: memoryview = msgspec.field(name="loss_mask")
    spans: list[PolicySpan]
    parent: int | None = None
    reason: SegmentReason | None = None

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
    ) -> Segment:
        """Build from sequences of equal length T, by a copy. Raises ValueError if they differ."""
        return cls(
            token_ids_le=memoryview(np.asarray(token_ids, dtype="<i4").tobytes()),
            logprobs_le=memoryview(np.asarray(logprobs, dtype="<f4").tobytes()),
            loss_mask_le=memoryview(np.asarray(loss_mask, dtype="u1").tobytes()),
            spans=spans,
            parent=parent,
            reason=reason,
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
    ) -> Segment:
        """Build over contiguous arrays of equal length T, without a copy. Raises ValueError if they differ."""
        return cls(
            token_ids_le=token_ids.data,
            logprobs_le=logprobs.data,
            loss_mask_le=loss_mask.data,
            spans=spans,
            parent=parent,
            reason=reason,
        )

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """int32 [T], a read-only view."""
        return np.frombuffer(self.token_ids_le, dtype="<i4")

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """float32 [T], a read-only view."""
        return np.frombuffer(self.logprobs_le, dtype="<f4")

    @property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """uint8 [T], a read-only view."""
        return np.frombuffer(self.loss_mask_le, dtype="u1")

    def __len__(self) -> int:
        return len(self.loss_mask_le)

    def check(self) -> None:
        """Raise StaleReference if the arrays are a node's memory that it has taken back; whatever was read since then
        may be wrong. Does nothing where they are anything else."""
        check = getattr(self.token_ids_le.obj, "check", None)
        if check is not None:
            check()

    def detached(self) -> Segment:
        """A copy that owns its memory. Raises StaleReference as `check` does."""
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
        rest = (self.spans, self.parent, self.reason)
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
) -> Segment:
    """What a pickle calls; the arrays come as any bytes-like object."""
    return Segment(
        token_ids_le=token_ids,
        logprobs_le=logprobs,
        loss_mask_le=loss_mask,
        spans=spans,
        parent=parent,
        reason=reason,
    )


def _flat(buffer: Any) -> memoryview:
    """The bytes of a contiguous buffer, read-only."""
    view = memoryview(buffer)
    if view.format != "B" or view.ndim != 1:
        view = view.cast("B") if view.nbytes else memoryview(b"")
    return view.toreadonly()


class Turn(_Model, frozen=True):
    """One action of the policy and what came back. Token positions index the segment.

    `observations` answer `tool_calls` one by one; there are fewer where the rollout was cut short in the middle.

    `completion_start` (inclusive) to `completion_end` (exclusive) are the sampled tokens of this turn.
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


class Trajectory(_Model, frozen=True):
    """What the policy did, token-exact. `prefix_breaks` counts segments begun because a prompt lost its prefix."""

    segments: list[Segment]
    turns: list[Turn]
    stop_reason: StopReason
    prefix_breaks: int = 0

    @property
    def policy_versions(self) -> list[str]:
        """Every version it was sampled under, each once, in the order of first use: the oldest first."""
        return list(dict.fromkeys(span.policy_version for segment in self.segments for span in segment.spans))

    @property
    def staleness(self) -> int:
        """Policy updates between its first and its last sampled token: 0 where all of it is of one version."""
        return max(0, len(self.policy_versions) - 1)

    def to_padded(
        self,
        *,
        pad_token_id: int,
        max_len: int | None = None,
        side: Literal["left", "right"] = "right",
        truncate: bool = False,
    ) -> PaddedBatch:
        """Its segments as [segments, time] arrays: `prorl_trio.batch.pad_batch` of this trajectory alone."""
        from prorl_trio.batch import pad_batch

        return pad_batch([self], pad_token_id=pad_token_id, max_len=max_len, side=side, truncate=truncate)


class Timing(_Model, frozen=True):
    """Where a job's time went, in seconds on the monotonic clock. `queued_*_s` are waits, not charged to budgets."""

    queued_init_s: float = 0.0
    init_s: float = 0.0
    queued_run_s: float = 0.0
    run_s: float = 0.0
    queued_eval_s: float = 0.0
    eval_s: float = 0.0


class AttemptRecord(_Model, frozen=True):
    """An attempt that failed and was followed by another."""

    attempt: int
    status: Literal["failed", "timed_out"]
    cause: FailureCause
    error_code: ErrorCode
    error: str
    timing: Timing


class Outcome(_Model, frozen=True):
    """The one terminal record of a job.

    `reward` is None for every failure that is not the policy's own; never 0 in its place. `cause` is set unless
    `status` is `completed`, and `error_code` then says what exactly it was. `details` is the handler's (JSON-like),
    `evaluation_log` the evaluator's, its middle left out if it is long. `trajectory` may be partial or None on failure.
    `attempt` is the number of the attempt this is the outcome of, and `attempts` are those before it that failed;
    `timing` is of the last one.
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

    def check(self) -> None:
        """Raise StaleReference if its token arrays are a node's memory that it has taken back. See `Segment.check`."""
        if self.trajectory is not None:
            for segment in self.trajectory.segments:
                segment.check()

    def detached(self) -> Outcome:
        """The same with token arrays that own their memory, to be kept for as long as one likes.

        Raises:
            StaleReference: it came too late.
        """
        if self.trajectory is None:
            return self
        segments = [segment.detached() for segment in self.trajectory.segments]
        return msgspec.structs.replace(self, trajectory=msgspec.structs.replace(self.trajectory, segments=segments))
