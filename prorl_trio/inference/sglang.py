"""An SGLang server as an engine, over its own `/generate`: token ids in, token ids and log-probabilities out.

Written against SGLang's documented API, and tested against `prorl_trio.testing.fake_sglang`, not the real server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from prorl_trio.inference.answers import ContractBroken, Logprob, TokenId, Wanted, checked_completion
from prorl_trio.inference.completion_stream import CompletionStream, StreamPart
from prorl_trio.inference.engine import Completion, EngineInfo, TokenSink
from prorl_trio.inference.http_engine import PROBE_PROMPT, PROBE_TOKENS, HttpEngineClient
from prorl_trio.inference.vllm_api import ModelList

if TYPE_CHECKING:
    from prorl_trio.inference.gate import PauseMode

__all__ = ["SglangClient"]

GENERATE: Final = "/generate"
MODEL_INFO: Final = ("/model_info", "/get_model_info")
SERVER_INFO: Final = ("/server_info", "/get_server_info")
"""Each under its name of today and that of older servers."""
UNLABELLED: Final = "default"
PAUSE_MODES: Final[dict[PauseMode, str]] = {"wait": "retract", "abort": "abort", "keep": "retract"}
"""`retract` puts requests back in line and forgets what the old weights made of them, so that it is computed anew."""


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling_params`. Neutral values are sent too: a server may have other defaults, from the model's own config."""

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


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /generate`. `extra_key` keeps prefixes apart. No `rid`: a repeated one is refused."""

    input_ids: msgspec.Raw
    sampling_params: SamplingFields
    return_logprob: bool = True
    stream: bool = False
    extra_key: str | msgspec.UnsetType = msgspec.UNSET


class FinishedBecause(msgspec.Struct, frozen=True):
    """`type` is `stop`, `length` or `abort`."""

    type: str


class MetaInfo(msgspec.Struct, frozen=True):
    """`output_token_logprobs`: the log-probability, the id, and the text or null, of each sampled token.

    In a stream `completion_tokens` counts all so far. The log-probabilities are of all so far, too, or, of a server
    with `--incremental-streaming-output`, of the new ones. There is no `finish_reason` until the last event.
    """

    completion_tokens: int
    finish_reason: FinishedBecause | None = None
    output_token_logprobs: list[tuple[Logprob, TokenId, Any]] | None = None


class GenerateResponse(msgspec.Struct, frozen=True):
    """The answer of `POST /generate`, or an event of a streamed one."""

    meta_info: MetaInfo
    output_ids: list[TokenId] | None = None


class ModelInfo(msgspec.Struct, frozen=True):
    """The answer of `GET /model_info`."""

    model_path: str
    weight_version: str | None = None


class ServerInfo(msgspec.Struct, frozen=True):
    """What we need of the answer of `GET /server_info`."""

    version: str = ""
    disable_radix_cache: bool | None = None


class SglangClient(HttpEngineClient):
    """One SGLang server."""

    may_scale_logprobs: ClassVar[bool] = True

    async def is_there(self, timeout_s: float) -> bool:
        """Whether the server has SGLang's own endpoints. Errors as `probe`."""
        return await self._first(MODEL_INFO, ModelInfo, timeout_s) is not None

    async def pause(self, mode: PauseMode, *, timeout_s: float) -> bool:
        """See `EngineClient.pause`. With `abort`, completions in flight are answered with what they have."""
        return await self._control("/pause_generation", timeout_s, {"mode": PAUSE_MODES[mode]})

    async def label_weights(self, policy_version: str, *, timeout_s: float) -> None:
        """See `EngineClient.label_weights`."""
        # Unless it is told not to, the server aborts everything here.
        body = {"new_version": policy_version, "abort_all_requests": False}
        await self._control("/update_weight_version", timeout_s, body)

    async def resume(self, *, timeout_s: float) -> None:
        """See `EngineClient.resume`."""
        await self._control("/continue_generation", timeout_s, {})

    async def _ask_info(self, timeout_s: float) -> EngineInfo:
        model = await self._first(MODEL_INFO, ModelInfo, timeout_s)
        models = await self._get_json("/v1/models", ModelList, timeout_s)
        if model is None or models is None or not models.data:
            raise self._unfit("it has no /model_info or lists no model; is it an SGLang server?")
        card = models.data[0]
        if card.max_model_len is None or card.max_model_len < len(PROBE_PROMPT) + PROBE_TOKENS:
            raise self._unfit(f"it reports a max_model_len of {card.max_model_len}")
        server = await self._first(SERVER_INFO, ServerInfo, timeout_s) or ServerInfo()
        label = model.weight_version
        return EngineInfo(
            url=self.url,
            model=card.id,
            max_model_len=card.max_model_len,
            engine=f"sglang {server.version}".strip(),
            policy_version=label if label and label != UNLABELLED else "0",
            api=GENERATE,
            pausable=True,
            prefix_caching=None if server.disable_radix_cache is None else not server.disable_radix_cache,
        )

    async def _first(self, paths: tuple[str, ...], kind: type[Any], timeout_s: float) -> Any:
        for path in paths:
            if (answer := await self._get_json(path, kind, timeout_s)) is not None:
                return answer
        return None

    async def _complete(
        self,
        wanted: Wanted,
        *,
        request_id: str,
        timeout_s: float,
        cache_salt: str,
        sink: TokenSink | None,
        probing: bool = False,
    ) -> Completion:
        stream = None if sink is None else CompletionStream(wanted, sink, _event)
        response = await self._post(
            GENERATE,
            _request(wanted, cache_salt, stream=stream is not None, ignore_eos=probing),
            request_id=request_id,
            timeout_s=timeout_s,
            prompt_tokens=wanted.prompt.tokens,
            on_data=None if stream is None else stream.feed,
            once=probing,
        )
        return stream.completion() if stream is not None else _completion(response.body, wanted)


def _request(wanted: Wanted, cache_salt: str, *, stream: bool, ignore_eos: bool) -> bytes:
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
                ignore_eos=ignore_eos,
            ),
            stream=stream,
            extra_key=cache_salt or msgspec.UNSET,
        )
    )


def _completion(body: bytes, wanted: Wanted) -> Completion:
    answer = _decode(body)
    meta, (token_ids, logprobs) = answer.meta_info, _tokens(answer)
    return checked_completion(
        wanted,
        token_ids=token_ids,
        logprobs=logprobs,
        sampled=meta.completion_tokens,
        finish_reason=meta.finish_reason.type if meta.finish_reason else None,
    )


def _event(data: bytes, before: int) -> StreamPart:
    answer = _decode(data)
    meta, (token_ids, logprobs) = answer.meta_info, _tokens(answer)
    if len(token_ids) == meta.completion_tokens:  # of all so far
        token_ids, logprobs = token_ids[before:], logprobs[before:]
    reason = meta.finish_reason.type if meta.finish_reason else None
    return StreamPart(token_ids, logprobs, reason, meta.completion_tokens)


def _decode(body: bytes) -> GenerateResponse:
    try:
        return msgspec.json.decode(body, type=GenerateResponse)
    except msgspec.MsgspecError as exc:
        raise ContractBroken(f"the answer is not a completion to train on: {exc}") from exc


def _tokens(answer: GenerateResponse) -> tuple[list[int], list[float]]:
    """The ids and log-probabilities in it."""
    told = answer.meta_info.output_token_logprobs
    if told is None:
        raise ContractBroken("it drops log-probabilities (no output_token_logprobs in the answer)")
    token_ids = [token_id for _, token_id, _ in told]
    if answer.output_ids is not None and answer.output_ids != token_ids:
        raise ContractBroken(
            f"it drops token ids or logprobs: {len(answer.output_ids)} ids, logprobs of {len(token_ids)} others"
        )
    return token_ids, [logprob for logprob, _, _ in told]
