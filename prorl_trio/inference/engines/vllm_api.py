"""The part of vLLM's HTTP API that we use, without I/O.

Requests are exact. Answers may contain unknown fields, but every count and number needed for training is checked.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from prorl_trio.inference.engines.answers import ContractBroken, Logprob, TokenId, Wanted, checked_completion, label_of
from prorl_trio.inference.engines.completion_stream import StreamPart

if TYPE_CHECKING:
    from prorl_trio.inference.engines.protocol import Completion

COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
"""An endpoint of servers started with `--enable-scale-out`: it reports the version of the weights for each token."""

_PREFIX_CACHING = re.compile(rb'vllm:cache_config_info\{[^}]*enable_prefix_caching="(True|False)"')


class StructuredOutputs(msgspec.Struct, frozen=True):
    """The required grammar of a completion, in one of vLLM's formats."""

    structural_tag: str


class _Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters, as both endpoints name them.

    The penalties and `min_p` are sent although neutral. vLLM takes omitted values from the model's own
    `generation_config.json` (Qwen2.5's has a repetition penalty), and the sampled distribution would silently differ
    from the trainer's. `logprobs` 0 requests the values of the sampled tokens without alternatives. `seed` is omitted
    because it crashes a CPU engine.
    """

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
    skip_special_tokens: bool = False
    structured_outputs: StructuredOutputs | msgspec.UnsetType = msgspec.UNSET


class StreamOptions(msgspec.Struct, frozen=True):
    """Request the engine's own count in each part of a stream, so that an early stop loses or doubles no token."""

    include_usage: bool = True
    continuous_usage_stats: bool = True


class CompletionsBody(_Sampling, frozen=True, kw_only=True):
    """`POST /v1/completions`. See `_Sampling` for neutral values."""

    model: str
    prompt: msgspec.Raw
    return_token_ids: bool = True
    stream: bool = False
    stream_options: StreamOptions | msgspec.UnsetType = msgspec.UNSET
    cache_salt: str | msgspec.UnsetType = msgspec.UNSET


class GenerateSampling(_Sampling, frozen=True, kw_only=True):
    """The same parameters without text, which is never read."""

    detokenize: bool = False


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /inference/v1/generate`."""

    model: str
    token_ids: msgspec.Raw
    sampling_params: GenerateSampling
    return_token_ids: bool = True
    stream: bool = False
    stream_options: StreamOptions | msgspec.UnsetType = msgspec.UNSET
    cache_salt: str | msgspec.UnsetType = msgspec.UNSET


class LogprobEntry(msgspec.Struct, frozen=True):
    """A sampled token of `/inference/v1/generate`."""

    token_id: TokenId
    logprob: Logprob


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    """Natural log of each sampled token's probability: `token_logprobs` from one endpoint, `content` from the other."""

    token_logprobs: list[Logprob] | None = None
    content: list[LogprobEntry] | None = None


class VersionRun(msgspec.Struct, frozen=True):
    """Sampled tokens `start` to `end` (exclusive) come from weights with that label."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True):
    """A continuation or a part of it. The ids are null if the engine does not support `return_token_ids`."""

    finish_reason: str | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    logprobs: ChoiceLogprobs | None = None
    weight_versions: list[VersionRun] | None = None


class Usage(msgspec.Struct, frozen=True):
    """The engine's own count of sampled tokens."""

    completion_tokens: int


class AnswerPart(msgspec.Struct, frozen=True):
    """The answer of either endpoint, or one part of a streamed answer.

    The last part contains only the total usage; in other parts the usage covers all tokens so far.
    """

    choices: list[Choice]
    usage: Usage | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


class ModelCard(msgspec.Struct, frozen=True):
    """A served model.

    `max_model_len`, and `root`, the folder or name it was started with, are vLLM's own additions to the OpenAI format.
    """

    id: str
    root: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/models`."""

    data: list[ModelCard]


def served_model(models: ModelList | None) -> ModelCard | None:
    """Return the policy's card: the first card with a length.

    Adapters may be listed before it, but their cards lack a length.
    """
    cards = [] if models is None else models.data
    return next(iter([card for card in cards if card.max_model_len is not None] or cards), None)


class Detokenized(msgspec.Struct, frozen=True):
    """The answer of `POST /detokenize`."""

    prompt: str


class Version(msgspec.Struct, frozen=True):
    """The answer of `GET /version`."""

    version: str


class PauseInfo(msgspec.Struct, frozen=True):
    """The answer of `GET /is_paused`, available only in development mode."""

    is_paused: bool


class WeightInfo(msgspec.Struct, frozen=True):
    """The answer of `GET /weight_info`, available only in development mode."""

    weight_version: str | None = None


def completion_request(wanted: Wanted) -> bytes:
    """Return the JSON body that requests one continuation at the engine's completion path."""
    model, prompt, sampling = wanted.adapter or wanted.info.model, wanted.prompt.text, wanted.sampling
    how: dict[str, Any] = {
        "max_tokens": wanted.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": wanted.probing,
    }
    if wanted.guide is not None:
        how["structured_outputs"] = StructuredOutputs(wanted.guide.structural_tag)
    rest: dict[str, Any] = {"stream": wanted.sink is not None}
    if wanted.sink is not None:
        rest["stream_options"] = StreamOptions()
    if wanted.cache_salt:
        rest["cache_salt"] = wanted.cache_salt
    body: CompletionsBody | GenerateBody
    if wanted.info.api == GENERATE:
        body = GenerateBody(model=model, token_ids=prompt, sampling_params=GenerateSampling(**how), **rest)
    else:
        body = CompletionsBody(model=model, prompt=prompt, **how, **rest)
    return msgspec.json.encode(body)


def read_answer(body: bytes, wanted: Wanted) -> AnswerPart:
    """Decode an answer or a part of a streamed one, and make all checks that need no other part.

    Raises:
        ContractBroken: it is malformed, or the engine read another prompt than was sent.
    """
    try:
        part = msgspec.json.decode(body, type=AnswerPart)
    except msgspec.MsgspecError as exc:
        raise ContractBroken(f"the answer is not a completion to train on: {exc}") from exc
    if len(part.choices) > 1:
        raise ContractBroken(f"asked for 1 continuation, got {len(part.choices)}")
    for choice in part.choices:
        wanted.prompt.check(part.prompt_token_ids)
        wanted.prompt.check(choice.prompt_token_ids)
    return part


def read_event(data: bytes, wanted: Wanted, _before: int) -> StreamPart:
    """Decode one event of a streamed answer, which contains only new tokens.

    Raises:
        ContractBroken: as `read_answer` and `tokens_of`.
    """
    part = read_answer(data, wanted)
    sampled = None if part.usage is None else part.usage.completion_tokens
    if not part.choices:
        return StreamPart([], [], None, sampled)
    choice = part.choices[0]
    # The event with only the finish reason has neither.
    token_ids, logprobs = tokens_of(choice) if choice.token_ids else ([], [])
    return StreamPart(token_ids, logprobs, choice.finish_reason, sampled, runs_of(choice.weight_versions))


def tokens_of(choice: Choice) -> tuple[list[int], list[float]]:
    """Return its ids and log-probabilities.

    Raises:
        ContractBroken: either is missing, or they belong to different tokens.
    """
    token_ids, logprobs = choice.token_ids, choice.logprobs
    if token_ids is None:
        raise ContractBroken("it drops token ids (no token_ids in the answer): it needs vLLM's return_token_ids")
    if logprobs is None or (logprobs.token_logprobs is None and logprobs.content is None):
        raise ContractBroken("it drops log-probabilities (no logprobs in the answer)")
    if logprobs.content is None:
        return token_ids, logprobs.token_logprobs or []
    if [entry.token_id for entry in logprobs.content] != token_ids:
        raise ContractBroken("it drops token ids or logprobs: the log-probabilities are of other tokens")
    return token_ids, [entry.logprob for entry in logprobs.content]


def completion_of(body: bytes, wanted: Wanted) -> Completion:
    """Decode a whole answer.

    Raises:
        ContractBroken: as `read_answer`, or counts or log-probabilities do not match the request.
    """
    part = read_answer(body, wanted)
    if len(part.choices) != 1 or part.usage is None:
        raise ContractBroken(f"asked for 1 continuation and its usage, got {len(part.choices)} continuations")
    choice = part.choices[0]
    token_ids, logprobs = tokens_of(choice)
    return checked_completion(
        wanted,
        token_ids=token_ids,
        logprobs=logprobs,
        sampled=part.usage.completion_tokens,
        finish_reason=choice.finish_reason,
        versions=runs_of(choice.weight_versions),
    )


def runs_of(told: list[VersionRun] | None) -> list[tuple[str, int, int]]:
    """Return the runs in the form that `checked_completion` expects."""
    return [(label_of(run.version), run.start, run.end) for run in told or ()]


def prefix_caching(metrics: bytes) -> bool | None:
    """Return whether the engine reuses prefixes according to its metrics; None if they do not report it."""
    at = metrics.find(b"\nvllm:cache_config_info{") + 1
    match = _PREFIX_CACHING.match(metrics, at)
    return match[1] == b"True" if match else None
