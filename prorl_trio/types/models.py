"""The domain: jobs that are submitted and outcomes that are returned. Frozen Structs, wire-ready.

The record of a rollout is in `trajectory`, and named here as well.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from prorl_trio.types.errors import ErrorCode, FailureCause
from prorl_trio.types.trajectory import (
    ChatMessage,
    FinishReason,
    LogprobKind,
    PolicySpan,
    Segment,
    SegmentReason,
    StopReason,
    ToolCall,
    ToolOutcome,
    ToolResult,
    Trajectory,
    Turn,
)

Stage = Literal["init", "run", "eval"]
TerminalStatus = Literal["completed", "failed", "cancelled", "timed_out"]
Status = Literal["queued", "init", "ready", "run", "ran", "eval", "completed", "failed", "cancelled", "timed_out"]
"""`queued` waits for INIT, `ready` for RUN, `ran` for EVAL; then exactly one terminal status."""

PRIORITY: Final = {"eval": 0, "train": 1}
"""The place of a job's priority in any line; lower goes first."""


class _Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the domain: immutable, strict about unknown fields."""


class SamplingParams(_Model, frozen=True):
    """The way of sampling. Defaults sample the raw distribution, which policy-gradient training needs.

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
    """Seconds that a job may spend in each stage, and in all of them together.

    Time in queues is not charged. None takes the node's default.

    `init_s`, `run_s`, `eval_s` and `total_s` guard the infrastructure: where one is used up, the job has `timed_out`,
    with a cause that says where the time went, and no reward. `agent_s` is the policy's: when it is used up, the
    agent's loop ends (`stop_reason` `agent_budget`), and what it did is evaluated as ever.

    No second is charged twice. `agent_s` is charged while a tool works that the policy called, and while an engine
    produces its tokens; then no other budget is. Waits for a backend and pauses are charged to none. What is left of
    RUN is charged to `run_s`: calls that fail, hang, stall, wait in an engine's queue or are sent again, and the
    handler's own time. So RUN takes `run_s` + `agent_s` at most, waits aside, and no policy brings a time-out about.

    `total_s` spans all attempts; `agent_s` is of one. A job that says `run_s` alone has no more for its agent.
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
    """The rule by which the rest of a group is cancelled, so that a straggler does not hold it up.

    All rollouts of a group say the same.

    Attributes:
        size: rollouts of the group.
        min_completed: once so many are `completed`, the others are cancelled; 0: never. **Biased**: the fastest are
            kept, and long rollouts are rare among them, so what is trained on is not what the policy does. Without
            that bias: leave it 0 and bound what a rollout may spend by `budgets.agent_s` and
            `sampling.max_output_tokens`, whose end is evaluated and delivered; to save time, submit more groups than
            are trained on, and choose among whole groups by a rule that knows nothing of their length (the order of
            submission, say).
        deadline_s: when the group has been at work so long, those that are not over are cancelled; None: never. Time in
            queues does not count: the clock stands while any live rollout of the group waits for a worker. **Biased**
            as `min_completed` is, towards those that take less than that.
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
    """A task of a task set. `handler` names who can do it; `payload` is that handler's own, validated by it.

    `family` is the part of its task set that reports count it in (`aime25`, say); it changes nothing else.
    """

    instance_id: str
    handler: str
    payload: dict[str, Any]
    family: str = ""


class Recorded(_Model, frozen=True):
    """The part of a rollout's outcome by which it can be graded again: its `details`, how it ended, and its turns."""

    details: dict[str, Any]
    stop_reason: StopReason
    turns: list[Turn] = []


class JobSpec(_Model, frozen=True):
    """A rollout to do.

    `job_id` is the submitter's and idempotent; rollouts of one instance share `group_id`.

    `keep_partial`: an outcome other than `completed` carries what was recorded until then. `group` needs a `group_id`.

    `max_trajectory_tokens`: of each segment of its trajectory, prompt included; None, or more than the node's limit or
    the engine's context, takes that.

    `max_staleness`: policy updates that may lie between the first sampled token of its trajectory and the newest
    weights, be these what the next token is sampled by or what the trainer has announced (the last resume); None takes
    the node's bound, if it has one. It is kept where a rollout begins: the job waits in its queue, oldest first, while
    no backend has weights that are new enough, or (`agent.rollouts_per_update`) its trainer has too many ahead of it.
    What was not to be foreseen ends the attempt: before a completion that would exceed the bound, and after one that
    did, it is `failed`, with the cause `inference` and the code `stale`; `retry` says whether it is run again, then
    with the new weights from the start. If it would not be so without the updates that came while its own tools were at
    work, the agent's loop ends there (`stop_reason` `agent_budget`), and its work is graded; with a token that is too
    stale already it is `failed`, with the cause `agent_budget`, the code `stale` and a reward of 0. A rollout that is
    over waits as long as it has to: updates after its last token do not end it. Versions that are integers lie as far
    apart as they say; others as many updates as the node was told of between them.

    `recorded`: nothing is sampled; what an earlier rollout of the instance left is graded again, by EVAL alone.
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
    recorded: Recorded | None = None

    def __post_init__(self) -> None:
        if self.max_trajectory_tokens is not None and self.max_trajectory_tokens < 1:
            raise ValueError(f"max_trajectory_tokens must be >= 1, got {self.max_trajectory_tokens}")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"max_staleness must be >= 0, got {self.max_staleness}")
        if not 1 <= len(self.job_id) <= 200:
            raise ValueError(f"job_id must have 1 to 200 characters, got {len(self.job_id)}")
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be >= 1, got {self.max_turns}")
        if self.group is not None and not self.group_id:
            raise ValueError("group needs a group_id")


class Timing(_Model, frozen=True):
    """Seconds of a job by stage, on the monotonic clock. `queued_*_s` are waits, not charged to budgets."""

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
    `timing` is of the last one. `regraded` is True where nothing was sampled, but a recorded rollout graded again.
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
        """Raise StaleReference if its token arrays are a node's memory that it has taken back. See `Segment.check`."""
        if self.trajectory is not None:
            for segment in self.trajectory.segments:
                segment.check()

    def detached(self) -> Outcome:
        """Copy the outcome, token arrays included, so that it can be kept for as long as one likes.

        Raises:
            StaleReference: the node has taken the memory of the arrays back already.
        """
        if self.trajectory is None:
            return self
        segments = [segment.detached() for segment in self.trajectory.segments]
        return msgspec.structs.replace(self, trajectory=msgspec.structs.replace(self.trajectory, segments=segments))


class _Header(msgspec.Struct):
    """The fields of an encoded outcome that can be read without its tokens. All others are passed over."""

    job_id: str
    status: TerminalStatus
    error_code: ErrorCode | None = None
    attempt: int = 1


_decode_header = msgspec.msgpack.Decoder(_Header).decode
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class EncodedOutcome(msgspec.Struct, frozen=True):
    """An outcome as the bytes that are stored and sent, with the fields that decide what becomes of it."""

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
            msgspec.DecodeError: they encode none.
        """
        header = _decode_header(data)
        return cls(header.job_id, header.status, header.error_code, header.attempt, data)

    def decode(self) -> Outcome:
        """Return the whole outcome. Its arrays are views of the bytes."""
        return _decode_outcome(self.data)
