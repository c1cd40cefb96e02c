"""An SGLang server as an engine, over its own `/generate`: token ids in, token ids and log-probabilities out.

It follows SGLang's documented API, and is tested against `prorl_trio.testing.fake_sglang`, not the real server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, get_args

import msgspec

from prorl_trio.http.client import RETRYABLE_STATUSES
from prorl_trio.inference.engines.answers import (
    REFUSED_STATUSES,
    UNNAMED,
    ContractBroken,
    Logprob,
    TokenId,
    Tokenized,
    Wanted,
    checked_completion,
    context_limit,
    label_of,
)
from prorl_trio.inference.engines.completion_stream import StreamPart
from prorl_trio.inference.engines.http_engine import (
    PROBE_PROMPT,
    PROBE_TOKENS,
    ControlCall,
    HttpEngineClient,
)
from prorl_trio.inference.engines.protocol import Completion, EngineInfo, RequestRefused
from prorl_trio.inference.engines.vllm_api import ModelList, VersionRun, runs_of, served_model
from prorl_trio.types.backends import PauseMode
from prorl_trio.types.errors import BackendError, ContextLengthExceeded

if TYPE_CHECKING:
    from collections.abc import Sequence

GENERATE: Final = "/generate"
MODEL_INFO: Final = ("/model_info", "/get_model_info")
SERVER_INFO: Final = ("/server_info", "/get_server_info")
"""The current name of the endpoint, and its name in older servers."""


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling_params`. Neutral values are sent too, because a server may take other defaults from the model."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int]
    ignore_eos: bool
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    skip_special_tokens: bool = False
    no_stop_trim: bool = True
    structural_tag: str | msgspec.UnsetType = msgspec.UNSET


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /generate`. `extra_key` keeps prefixes apart, `lora_path` names an adapter.

    `rid` is omitted, because the server refuses a repeated one.
    """

    input_ids: msgspec.Raw
    sampling_params: SamplingFields
    return_logprob: bool = True
    stream: bool = False
    extra_key: str | msgspec.UnsetType = msgspec.UNSET
    lora_path: str | msgspec.UnsetType = msgspec.UNSET


class FinishedBecause(msgspec.Struct, frozen=True):
    """`type` is `stop`, `length` or `abort`. An abort with a `status_code` is an error, described in `message`."""

    type: str
    message: str | None = None
    status_code: int | None = None


class MetaInfo(msgspec.Struct, frozen=True):
    """`output_token_logprobs`: the log-probability, the id, and the text or null, of each sampled token.

    In a stream `completion_tokens` counts all tokens so far. The log-probabilities also cover all tokens so far, or
    only new tokens from a server with `--incremental-streaming-output`. Only the last event contains a `finish_reason`.

    `weight_version` is the name of the weights when this was sent; `weight_versions` are the runs of all tokens so far.
    Older servers report only `weight_version`, or neither.
    """

    completion_tokens: int
    finish_reason: FinishedBecause | None = None
    output_token_logprobs: list[tuple[Logprob, TokenId, Any]] | None = None
    weight_version: str | None = None
    weight_versions: list[VersionRun] | None = None


class GenerateResponse(msgspec.Struct, frozen=True):
    """The answer of `POST /generate`, or an event of a streamed one.

    `output_ids` cover all tokens so far or only new ones, but not always like the log-probabilities. Servers with
    `--stream-output`, an older name, send new ids with the log-probabilities of all tokens.
    """

    meta_info: MetaInfo
    output_ids: list[TokenId] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """The answer of `POST /detokenize`."""

    text: str


class ModelInfo(msgspec.Struct, frozen=True):
    """The answer of `GET /model_info`."""

    model_path: str
    weight_version: str | None = None


class ServerInfo(msgspec.Struct, frozen=True):
    """The fields that we need from the answer of `GET /server_info`."""

    version: str = ""
    disable_radix_cache: bool | None = None


class SglangClient(HttpEngineClient):
    """A client of one SGLang server. Adapters require a server with `--enable-lora`."""

    may_scale_logprobs: ClassVar[bool] = True
    # `retract` requeues requests and discards their cache entries from the old weights; these are recomputed.
    pause_calls: ClassVar = {
        mode: ControlCall("/pause_generation", {"mode": "abort" if mode == "abort" else "retract"})
        for mode in get_args(PauseMode)
    }
    resume_call: ClassVar = ControlCall("/continue_generation", {})
    adapter_calls: ClassVar = ("/load_lora_adapter", "/unload_lora_adapter")

    async def is_there(self, *, timeout_s: float) -> bool:
        """See `EngineClient.is_there`. Uses SGLang's own endpoints."""
        return await self._first(MODEL_INFO, ModelInfo, timeout_s) is not None

    async def tokenize(self, text: str, *, timeout_s: float) -> list[int] | None:
        """See `EngineClient.tokenize`. Not available with `--skip-tokenizer-init`."""
        asked: dict[str, object] = {"prompt": text, "add_special_tokens": False}
        answer = await self._ask_tokenizer("/tokenize", asked, Tokenized, timeout_s)
        return None if answer is None else answer.tokens

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float) -> str | None:
        asked: dict[str, object] = {"tokens": list(token_ids), "skip_special_tokens": False}
        answer = await self._ask_tokenizer("/detokenize", asked, Detokenized, timeout_s)
        return None if answer is None else answer.text

    async def label_weights(self, policy_version: str, *, timeout_s: float) -> bool:
        # By default the server aborts all requests here.
        body = {"new_version": policy_version, "abort_all_requests": False}
        return await self._control("/update_weight_version", timeout_s, body)

    async def read_label(self, *, timeout_s: float) -> str:
        model = await self._first(MODEL_INFO, ModelInfo, timeout_s)
        return label_of(model.weight_version if model else None)

    async def _ask_info(self, timeout_s: float) -> EngineInfo:
        model = await self._first(MODEL_INFO, ModelInfo, timeout_s)
        models = await self._get_json("/v1/models", ModelList, timeout_s)
        card = served_model(models)
        if model is None or card is None:
            raise self._unfit("it has no /model_info or lists no model; is it an SGLang server?")
        if card.max_model_len is None or card.max_model_len < len(PROBE_PROMPT) + PROBE_TOKENS:
            raise self._unfit(f"it reports a max_model_len of {card.max_model_len}")
        server = await self._first(SERVER_INFO, ServerInfo, timeout_s) or ServerInfo()
        label = label_of(model.weight_version)
        return EngineInfo(
            url=self.url,
            model=card.id,
            max_model_len=card.max_model_len,
            engine=f"sglang {server.version}".strip(),
            policy_version=label or UNNAMED,
            label=label,
            api=GENERATE,
            pausable=True,
            prefix_caching=None if server.disable_radix_cache is None else not server.disable_radix_cache,
            model_folder=model.model_path,
            guides=True,
        )

    async def _first(self, paths: tuple[str, ...], kind: type[Any], timeout_s: float) -> Any:
        for path in paths:
            if (answer := await self._get_json(path, kind, timeout_s)) is not None:
                return answer
        return None

    async def _complete(self, wanted: Wanted) -> Completion:
        return await self._ask(GENERATE, _request(wanted), wanted, _completion, _event)


def _request(wanted: Wanted) -> bytes:
    sampling = wanted.sampling
    return msgspec.json.encode(
        GenerateRequest(
            input_ids=wanted.prompt.text,
            sampling_params=SamplingFields(
                max_new_tokens=wanted.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or -1,
                stop_token_ids=sampling.stop_token_ids,
                ignore_eos=wanted.probing,
                structural_tag=msgspec.UNSET if wanted.guide is None else wanted.guide.structural_tag,
            ),
            stream=wanted.sink is not None,
            extra_key=wanted.cache_salt or msgspec.UNSET,
            lora_path=wanted.adapter or msgspec.UNSET,
        )
    )


def _completion(body: bytes, wanted: Wanted) -> Completion:
    answer = _decode(body, wanted)
    meta, (token_ids, logprobs) = answer.meta_info, _tokens(answer, 0)
    return checked_completion(
        wanted,
        token_ids=token_ids,
        logprobs=logprobs,
        sampled=meta.completion_tokens,
        finish_reason=meta.finish_reason.type if meta.finish_reason else None,
        versions=runs_of(meta.weight_versions),
        label=label_of(meta.weight_version),
    )


def _event(data: bytes, wanted: Wanted, before: int) -> StreamPart:
    answer = _decode(data, wanted)
    meta, (token_ids, logprobs) = answer.meta_info, _tokens(answer, before)
    reason = meta.finish_reason.type if meta.finish_reason else None
    runs, label = runs_of(meta.weight_versions), label_of(meta.weight_version)
    return StreamPart(token_ids, logprobs, reason, meta.completion_tokens, runs, label)


def _decode(body: bytes, wanted: Wanted) -> GenerateResponse:
    """Decode it. Raises BackendError or ContextLengthExceeded if the answer or event reports an error."""
    try:
        answer = msgspec.json.decode(body, type=GenerateResponse)
    except msgspec.MsgspecError as exc:
        raise ContractBroken(f"the answer is not a completion to train on: {exc}") from exc
    reason = answer.meta_info.finish_reason
    if reason is not None and reason.status_code is not None:
        message = reason.message or "no message"
        if reason.status_code == 400 and (limit := context_limit(message)) is not None:
            raise ContextLengthExceeded(wanted.prompt.tokens, limit)
        said = f"{wanted.info.url}: the engine aborted with status {reason.status_code}: {message}"
        if reason.status_code in REFUSED_STATUSES:
            raise RequestRefused(said)
        raise BackendError(said, retryable=reason.status_code in RETRYABLE_STATUSES)
    return answer


def _tokens(answer: GenerateResponse, before: int) -> tuple[list[int], list[float]]:
    """Return the ids and log-probabilities after the first `before` tokens."""
    told, ids, count = answer.meta_info.output_token_logprobs, answer.output_ids, answer.meta_info.completion_tokens
    if told is None:
        raise ContractBroken("it drops log-probabilities (no output_token_logprobs in the answer)")
    if len(told) == count:  # covers all tokens so far
        told = told[before:]
    if ids is not None and len(ids) == count:
        ids = ids[before:]
    token_ids = [token_id for _, token_id, _ in told]
    if ids is not None and ids != token_ids:
        raise ContractBroken(f"it drops token ids or logprobs: {len(ids)} ids, logprobs of {len(token_ids)} others")
    return token_ids, [logprob for logprob, _, _ in told]
