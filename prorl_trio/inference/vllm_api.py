"""The part of vLLM's HTTP API that we use, without I/O: requests are exact, answers lenient to unknown fields and
strict about every count and number that training relies on."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import msgspec

from prorl_trio.inference.engine import Completion, EngineInfo

if TYPE_CHECKING:
    from prorl_trio.models import FinishReason, SamplingParams

__all__ = [
    "CompletionRequest",
    "CompletionResponse",
    "ContractBroken",
    "ModelList",
    "Version",
    "WeightInfo",
    "completion_request",
    "context_limit",
    "error_message",
    "read_completion",
]

MAX_LOGPROB = 1e-3
"""A log-softmax in low precision may round to just above 0."""

CLAMPED_LOGPROB = -9999.0
"""What vLLM sends for minus infinity: a sampled token of probability 0, so nothing to train on."""

MAX_ERROR_CHARS = 1000

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Logprob = Annotated[float, msgspec.Meta(gt=CLAMPED_LOGPROB, le=MAX_LOGPROB)]

_FINISH_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_CONTEXT_LIMIT = re.compile(r"maximum (?:context|model) length\D*(\d+)")


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/completions`.

    The penalties and `min_p` are sent although neutral: what a request leaves out, vLLM takes from the model's own
    `generation_config.json` (Qwen2.5's has a repetition penalty), and the sampled distribution would silently not be
    the trainer's. `logprobs` 0 asks for those of the sampled tokens and no alternatives. No `seed`: a CPU engine dies
    of it.
    """

    model: str
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int]
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    logprobs: int = 0
    return_token_ids: bool = True
    skip_special_tokens: bool = False
    stream: bool = False


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    """`token_logprobs`: natural log of each sampled token's probability."""

    token_logprobs: list[Logprob]


class Choice(msgspec.Struct, frozen=True):
    """One continuation. The token ids are null from an engine that does not know `return_token_ids`."""

    finish_reason: str | None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    logprobs: ChoiceLogprobs | None = None


class Usage(msgspec.Struct, frozen=True):
    """The engine's own count of sampled tokens."""

    completion_tokens: int


class CompletionResponse(msgspec.Struct, frozen=True):
    """The answer of `POST /v1/completions`."""

    choices: list[Choice]
    usage: Usage


class ModelCard(msgspec.Struct, frozen=True):
    """A served model. `max_model_len` is vLLM's own addition to the OpenAI format."""

    id: str
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/models`."""

    data: list[ModelCard]


class Version(msgspec.Struct, frozen=True):
    """The answer of `GET /version`."""

    version: str


class WeightInfo(msgspec.Struct, frozen=True):
    """The answer of `GET /weight_info`, which only a server in development mode has."""

    weight_version: str | None = None


class ErrorDetail(msgspec.Struct, frozen=True):
    """The server's words."""

    message: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of an error answer."""

    error: ErrorDetail


class ContractBroken(ValueError):
    """An answer that cannot be trusted token for token. The message says why."""


def completion_request(
    model: str, prompt_token_ids: list[int], sampling: SamplingParams, *, max_tokens: int, ignore_eos: bool = False
) -> bytes:
    """The JSON body that asks for one continuation."""
    return msgspec.json.encode(
        CompletionRequest(
            model=model,
            prompt=prompt_token_ids,
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=ignore_eos,
        )
    )


def read_completion(body: bytes, prompt_token_ids: list[int], max_tokens: int, info: EngineInfo) -> Completion:
    """Decode and check one answer.

    Raises:
        ContractBroken: it is malformed; or prompt ids, counts or log-probabilities are not what was asked for.
    """
    try:
        answer = msgspec.json.decode(body, type=CompletionResponse)
    except msgspec.MsgspecError as exc:
        raise ContractBroken(f"the answer is not a completion to train on: {exc}") from exc
    if len(answer.choices) != 1:
        raise ContractBroken(f"asked for 1 continuation, got {len(answer.choices)}")
    choice = answer.choices[0]
    token_ids = choice.token_ids
    if token_ids is None:
        raise ContractBroken("it drops token ids (no token_ids in the answer): it needs vLLM's return_token_ids")
    if choice.logprobs is None:
        raise ContractBroken("it drops log-probabilities (no logprobs in the answer)")
    logprobs = choice.logprobs.token_logprobs
    if choice.prompt_token_ids is not None and choice.prompt_token_ids != prompt_token_ids:
        raise ContractBroken(
            f"it drops token ids or changes them: sent a prompt of {len(prompt_token_ids)}, "
            f"it read one of {len(choice.prompt_token_ids)}"
        )
    sampled = answer.usage.completion_tokens
    if not len(token_ids) == len(logprobs) == sampled:
        raise ContractBroken(
            f"it drops token ids or logprobs: counts differ: {len(token_ids)} ids, {len(logprobs)} logprobs, "
            f"{sampled} in its usage"
        )
    finish_reason = _FINISH_REASONS.get(choice.finish_reason)
    if finish_reason is None:
        raise ContractBroken(f"unknown finish_reason {choice.finish_reason!r}")
    if sampled > max_tokens or (sampled == 0 and finish_reason != "abort"):
        raise ContractBroken(f"asked for 1 to {max_tokens} tokens, it sampled {sampled} ({finish_reason})")
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=finish_reason,
        policy_version=info.policy_version,
        engine=info.engine,
    )


def error_message(body: bytes) -> str:
    """The server's own words in an error answer, or the beginning of whatever else it sent."""
    try:
        message = msgspec.json.decode(body, type=ErrorBody).error.message
    except msgspec.MsgspecError:
        message = body[: 4 * MAX_ERROR_CHARS].decode("utf-8", "replace")
    return message[:MAX_ERROR_CHARS].strip() or "no message"


def context_limit(message: str) -> int | None:
    """The context length that an error message says was exceeded, in tokens; None if it is about something else."""
    match = _CONTEXT_LIMIT.search(message)
    return int(match[1]) if match else None
