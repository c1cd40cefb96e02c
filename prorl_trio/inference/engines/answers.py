"""The checks of an engine's answer before it is believed: ids and log-probabilities for training, equal counts."""

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
"""vLLM's word for minus infinity: a sampled token of probability 0, so nothing to train on."""

CERTAIN_LOGPROB = -1e-5
"""A model that is given a nonsense prompt is never surer of its next token than this."""

HOT_TOLERANCE = 0.15
"""Between two runs of a bfloat16 engine. Twice the temperature moves an uncertain token by more."""

MAX_ERROR_CHARS = 1000

REFUSED_STATUSES = frozenset({400, 413, 422})
"""What was asked for is no valid request: it says nothing of the engine's health."""

UNNAMED = "0"
"""The version of weights that nobody gave a name. vLLM and SGLang call it `default`."""

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
    """The answer of `POST /tokenize`, of vLLM and SGLang."""

    tokens: list[TokenId]


class ErrorDetail(msgspec.Struct, frozen=True):
    """The words of a server."""

    message: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of an error answer."""

    error: ErrorDetail


class ContractBroken(ValueError):
    """An answer that cannot be trusted token for token. The message says why."""


class NotStreamed(ContractBroken):
    """An answer in one piece, or none at all, to a request for a stream."""


class Prompt(msgspec.Struct, frozen=True):
    """A prompt's ids as an engine gets them.

    Thousands wait for their completions at once, and a list of ids is seven times as large, has to be walked through by
    each search for garbage, and to be made again from what is sent back.

    Attributes:
        text: a JSON list of ids, without spaces.
        tokens: how many.
    """

    text: msgspec.Raw
    tokens: int

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> Prompt:
        """Return the same ids as a prompt."""
        ids = token_ids.tolist() if isinstance(token_ids, array) else list(token_ids)
        return cls(msgspec.Raw(msgspec.json.encode(ids)), len(ids))

    def check(self, read: msgspec.Raw) -> None:
        """Check that the engine has read this prompt: `read` is the JSON of the one it says; nothing, or null, if none.

        Raises:
            ContractBroken: it is another one.
        """
        if read == self.text or read in _NOT_SAID:
            return
        try:
            ids = msgspec.json.decode(read, type=list[int])
        except msgspec.MsgspecError as exc:
            raise ContractBroken(f"the prompt it says it has read is no list of ids: {exc}") from exc
        if Prompt.of(ids) != self:  # where there are spaces in it
            raise ContractBroken(
                f"it drops token ids or changes them: sent a prompt of {self.tokens}, it read one of {len(ids)}"
            )


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it goes to the engine that `info` is known of, to hold the answer against. See `CompletionRequest`.

    `probing`: sample past the end of turn, and send nothing a second time. `adapter`: the LoRA adapter to sample with;
    empty: none.
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
    """Return the completion, if everything about it agrees.

    `sampled` is the engine's own count; `versions` are its runs of `(version of the weights, start, end)`, if it tells,
    and `label` the version at the end, if it tells no more than that; `dropped` see `Completion`.

    Raises:
        ContractBroken: it does not.
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
    """Return which distribution log-probabilities are of that were sampled with `top_k` 1 after a nonsense prompt.

    Of what `top_k` left there is one token, of log-probability 0: these are `processed`. So are those that change, for
    the same first token, with the temperature: 1 in `plain`, 2 in `hot`.
    """
    if min(plain) >= CERTAIN_LOGPROB or abs(plain[0] - hot[0]) > HOT_TOLERANCE:
        return "processed"
    return "raw"


def label_of(told: str | None) -> str:
    """Return an engine's name for its weights: nothing if it says nothing, `0` if nobody gave them a name."""
    return UNNAMED if told == "default" else told or ""


def error_message(body: bytes) -> str:
    """Return the server's own words in an error answer, or the beginning of whatever else it sent."""
    try:
        message = msgspec.json.decode(body, type=ErrorBody).error.message
    except msgspec.MsgspecError:
        message = body[: 4 * MAX_ERROR_CHARS].decode("utf-8", "replace")
    return message[:MAX_ERROR_CHARS].strip() or "no message"


def is_refusal(error: bytes) -> bool:
    """Return whether an error that came inside a stream is one of the request, and not of the engine."""
    try:
        told = msgspec.json.decode(error)
        return told.get("error", told).get("code") in REFUSED_STATUSES
    except (msgspec.DecodeError, AttributeError, TypeError):
        return False


def context_limit(message: str) -> int | None:
    """Return the context length, in tokens, that an error message says was exceeded, else None."""
    match = _CONTEXT_LIMIT.search(message)
    return int(match[1]) if match else None
