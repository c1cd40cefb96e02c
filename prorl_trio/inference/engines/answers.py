"""Validation of an engine's answer: ids and log-probabilities must be usable for training, and counts must agree."""

from __future__ import annotations

import re
from array import array
from typing import TYPE_CHECKING, Annotated

import msgspec

from prorl_trio.inference.engines.protocol import Completion, EngineInfo, Guide, TokenSink, span_of
from prorl_trio.types.models import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.types.models import FinishReason, LogprobKind

MAX_LOGPROB = 1e-3
"""A log-softmax in low precision may round to just above 0."""

CLAMPED_LOGPROB = -9999.0
"""vLLM's value for minus infinity: the sampled token had probability 0, so it cannot be trained on."""

CERTAIN_LOGPROB = -1e-5
"""After a nonsense prompt, a model's log-probability of its next token always lies below this."""

HOT_TOLERANCE = 0.15
"""Tolerance between two runs of a bfloat16 engine. Doubling the temperature changes an uncertain token by more."""

MAX_ERROR_CHARS = 1000

REFUSED_STATUSES = frozenset({400, 413, 422})
"""The request is invalid; these statuses are unrelated to the engine's health."""

UNNAMED = "0"
"""The version of unnamed weights. vLLM and SGLang call it `default`."""

_NOT_SAID = (msgspec.Raw(), msgspec.Raw(b"null"))

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Logprob = Annotated[float, msgspec.Meta(gt=CLAMPED_LOGPROB, le=MAX_LOGPROB)]

_FINISH_REASONS: dict[str | None, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "tool_call": "tool_call",
}
_CONTEXT_LIMIT = re.compile(r"(?:maximum (?:context|model) length|context length)\D*(\d+)")


class Tokenized(msgspec.Struct, frozen=True):
    """The answer of `POST /tokenize`, for vLLM and SGLang."""

    tokens: list[TokenId]


class ErrorDetail(msgspec.Struct, frozen=True):
    """The server's error message."""

    message: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of an error response."""

    error: ErrorDetail


class ContractBroken(ValueError):
    """The engine's answer cannot be trusted token for token. The message contains the reason."""


class NotStreamed(ContractBroken):
    """The engine did not stream although a stream was requested."""


class Prompt(msgspec.Struct, frozen=True):
    """A prompt's ids in the form in which an engine gets them.

    Thousands of prompts wait for completions at once. A list of ids takes seven times the memory, is traversed by each
    garbage collection, and would be parsed again from the echoed prompt.

    Attributes:
        text: a JSON list of ids, without spaces.
        tokens: number of ids.
    """

    text: msgspec.Raw
    tokens: int

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> Prompt:
        """Return the same ids as a prompt."""
        ids = token_ids.tolist() if isinstance(token_ids, array) else list(token_ids)
        return cls(msgspec.Raw(msgspec.json.encode(ids)), len(ids))

    def check(self, read: msgspec.Raw) -> None:
        """Check that the engine has read this prompt. `read` is the echoed prompt as JSON; null or empty without echo.

        Raises:
            ContractBroken: the engine read another prompt.
        """
        if read == self.text or read in _NOT_SAID:
            return
        try:
            ids = msgspec.json.decode(read, type=list[int])
        except msgspec.MsgspecError as exc:
            raise ContractBroken(f"the prompt it says it has read is no list of ids: {exc}") from exc
        if Prompt.of(ids) != self:  # the JSON contains spaces
            raise ContractBroken(
                f"it drops token ids or changes them: sent a prompt of {self.tokens}, it read one of {len(ids)}"
            )


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A request sent to the engine described by `info`; answers are checked against it. See `CompletionRequest`.

    `probing`: sample past the end of turn, and do not retry. `adapter`: the LoRA adapter to sample with; empty for
    none.
    """

    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int
    info: EngineInfo
    request_id: str = "prorl-probe"
    timeout_s: float = 60.0
    cache_salt: str = ""
    sink: TokenSink | None = None
    guide: Guide | None = None
    probing: bool = False
    adapter: str = ""


def checked_completion(
    wanted: Wanted,
    *,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    sampled: int,
    finish_reason: str | None,
    versions: Sequence[tuple[str, int, int]] = (),
    label: str = "",
    dropped: int = 0,
) -> Completion:
    """Return the completion if all its parts agree.

    `sampled` is the engine's own count. `versions` are its runs of `(version of the weights, start, end)`, if it
    reports them. `label` is the version at the end, for engines that report only that. For `dropped` see `Completion`.

    Raises:
        ContractBroken: the parts disagree.
    """
    if not len(token_ids) == len(logprobs) == sampled:
        raise ContractBroken(
            f"it drops token ids or logprobs: counts differ: {len(token_ids)} ids, {len(logprobs)} logprobs, "
            f"{sampled} in its usage"
        )
    reason = _FINISH_REASONS.get(finish_reason)
    if reason is None:
        raise ContractBroken(f"unknown finish_reason {finish_reason!r}")
    if sampled > wanted.max_tokens or (sampled == 0 and reason != "abort"):
        raise ContractBroken(f"asked for 1 to {wanted.max_tokens} tokens, it sampled {sampled} ({reason})")
    info, told = wanted.info, bool(versions)
    if not versions:
        versions = [(info.policy_version, 0, sampled)] if sampled else []
    elif [start for _, start, _ in versions] + [sampled] != [0] + [end for _, _, end in versions]:
        raise ContractBroken(f"its weight versions do not cover {sampled} tokens one after the other: {versions}")
    spans = [
        span_of(info, wanted.sampling, wanted.guide, start, end, version)
        for version, start, end in versions
        if start < end
    ]
    return Completion(
        token_ids=token_ids if isinstance(token_ids, array) else array("i", token_ids),
        logprobs=logprobs if isinstance(logprobs, array) else array("f", logprobs),
        finish_reason=reason,
        policy_version=info.policy_version,
        engine=info.engine,
        spans=spans,
        versions_told=told,
        label=versions[-1][0] if told else label,
        dropped_tokens=dropped,
    )


def logprob_kind(plain: Sequence[float], hot: Sequence[float]) -> LogprobKind:
    """Return the distribution that log-probabilities refer to, given samples with `top_k` 1 after a nonsense prompt.

    `top_k` 1 leaves a single token; a log-probability of 0 means `processed`. The kind is also `processed` if the value
    for the same first token changes with the temperature, which is 1 in `plain` and 2 in `hot`.
    """
    if min(plain) >= CERTAIN_LOGPROB or abs(plain[0] - hot[0]) > HOT_TOLERANCE:
        return "processed"
    return "raw"


def label_of(told: str | None) -> str:
    """Return an engine's name for its weights: empty if it reports none, `0` if the weights are unnamed."""
    return UNNAMED if told == "default" else told or ""


def error_message(body: bytes) -> str:
    """Return the server's message in an error response, or the beginning of any other body."""
    try:
        message = msgspec.json.decode(body, type=ErrorBody).error.message
    except msgspec.MsgspecError:
        message = body[: 4 * MAX_ERROR_CHARS].decode("utf-8", "replace")
    return message[:MAX_ERROR_CHARS].strip() or "no message"


def is_refusal(error: bytes) -> bool:
    """Return whether an error inside a stream is due to the request rather than the engine."""
    try:
        told = msgspec.json.decode(error)
        return told.get("error", told).get("code") in REFUSED_STATUSES
    except (msgspec.DecodeError, AttributeError, TypeError):
        return False


def context_limit(message: str) -> int | None:
    """Return the context length (in tokens) that an error message reports as exceeded, else None."""
    match = _CONTEXT_LIMIT.search(message)
    return int(match[1]) if match else None
