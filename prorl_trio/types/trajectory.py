"""The record of a rollout: token-exact segments, turns, and the trajectory of both. Frozen Structs, wire-ready.

Token arrays are raw little-endian bytes on the wire (`token_ids` int32, `logprobs` float32, `loss_mask` uint8: 9 bytes
a token) and read-only numpy views in Python, without a copy.
"""

from __future__ import annotations

from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

StopReason = Literal[
    "finished",  # the agent called `finish`, or gave its final answer
    "max_turns",
    "context_budget",  # no room for another turn in the context or token budget
    "no_tool_call",  # no tool call and no answer, after the nudges allowed
    "no_end_of_turn",  # its last turn reached `max_output_tokens`, with neither call nor answer
    "parse_error",  # no call of its last turn could be understood: at `max_turns`, or told so often enough before
    "agent_budget",  # the agent's time ran out
    "aborted",  # the rollout was cut short by a failure or a cancel
]
"""Why the agent's loop ended. Not the engine's `FinishReason`."""

FinishReason = Literal["stop", "length", "abort", "tool_call"]
"""Why sampling one completion ended: end-of-turn token, token limit, aborted by the engine; or the node stopped it, as
a tool call was complete."""

LogprobKind = Literal["raw", "processed", "unknown"]
"""The distribution that an engine's log-probabilities are of: the model's own (temperature 1, nothing cut off), or what
temperature, `top_p` and `top_k` made of it."""

SegmentReason = Literal["template_rewrite", "compaction", "sub_agent", "retry"]
"""Why a segment does not continue the one before it: the template renders earlier turns otherwise (it drops old
reasoning, say); the dialogue was shortened; another agent was asked; a step is tried again."""

ToolOutcome = Literal[
    "ok",
    "error",  # it failed, or exited with another code than 0, or refused its arguments
    "timed_out",
    "running",  # a command that goes on, and may be followed up
    "unknown",  # there is no such tool
    "malformed",  # the call could not be parsed
    "not_run",  # the episode had ended
    "crashed",  # the tool itself failed, by a bug: the node's log has its traceback
]
"""The result of a tool call, as a closed set."""

OUT_OF_BAND_PROTOCOL = 5
"""The first pickle protocol that may carry buffers beside the pickle (PEP 574)."""


class _Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the domain: immutable, strict about unknown fields."""


class ToolCall(_Model, frozen=True):
    """A tool call that the policy made.

    `error` is set when its text could not be parsed: then `arguments` is empty.

    `id` is the one it was sampled with; most families write none.
    """

    name: str
    arguments: dict[str, Any]
    raw: str
    error: str = ""
    id: str = ""


class ToolResult(_Model, frozen=True, omit_defaults=True):
    """The result of a call, beside what the policy was shown of it. `exit_code` is the command's, where it has one."""

    outcome: ToolOutcome = "ok"
    exit_code: int | None = None


class ChatMessage(_Model, frozen=True):
    """A message as chat templates know it.

    Attributes:
        name: the tool's, for role `tool`.
        tool_call_id: of the call that a message of role `tool` answers. Results of sampled calls need none: they answer
            them in their order.
        tool_calls: what an assistant's message of the opening called; those that are sampled speak for themselves.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] = []


_UNCHANGED: Final = 1.0
"""Temperature and `top_p` that leave the distribution alone."""
_RAW: Final = "raw"


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
    temperature: float = _UNCHANGED
    top_p: float = _UNCHANGED
    top_k: int = 0
    logprob_kind: LogprobKind = _RAW

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
        """Raise StaleReference if the arrays are a node's memory that it has taken back.

        Whatever was read since then may be wrong. Does nothing where they are anything else.
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
    """Make a segment from a pickle; the arrays come as any bytes-like object."""
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


class Turn(_Model, frozen=True, omit_defaults=True):
    """An action of the policy and what came back. Token positions index the segment.

    `observations` answer `tool_calls` one by one; there are fewer where the rollout was cut short in the middle.
    `tool_results` say of each of them how it went.

    `completion_start` (inclusive) to `completion_end` (exclusive) are the sampled tokens of this turn.

    `dropped_tokens` had come from the engine when it was stopped at a complete tool call, and are not recorded.

    `messages` were said to the policy before it, besides the observations of the turn before: the opening of its
    dialogue, or a reminder. Their tokens lie between the completions.
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

    `prefix_breaks` counts segments begun because a prompt lost its prefix.

    `drift_tokens` are recorded ones that were found to differ from what was sent and sampled: 0, or the job has failed.
    `segments` are those of the task's own agent in their order, then those of each agent that it asked.
    `tools` are the functions that the task's own agent was offered, as chat templates take them.
    """

    segments: list[Segment]
    turns: list[Turn]
    stop_reason: StopReason
    prefix_breaks: int = 0
    drift_tokens: int = 0
    tools: list[dict[str, Any]] = []

    @property
    def policy_versions(self) -> list[str]:
        """Return every version it was sampled under, each once.

        The oldest comes first where all are integers. Otherwise the task's own agent's come in the order of first use,
        and then those that only others used.
        """
        versions = dict.fromkeys(span.policy_version for segment in self.segments for span in segment.spans)
        return sorted(versions, key=int) if all(map(str.isdecimal, versions)) else list(versions)

    @property
    def staleness(self) -> int:
        """Policy updates between its oldest and its newest token, 0 where all of it is of one version.

        The difference of versions that are integers. Of others those that it met, which may be fewer than there were.
        """
        versions = self.policy_versions
        if versions and all(map(str.isdecimal, versions)):
            return int(versions[-1]) - int(versions[0])
        return max(0, len(versions) - 1)
