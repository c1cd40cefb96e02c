"""A trainer's own engine with the API of the ProRL Agent server: only `POST /generate` with `prompt_ids`.

It reports neither its model nor its context length nor finish reasons. The client checks the contents of an answer; the
rest comes from the node's configuration.
"""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from prorl_trio.http.connection import HttpError
from prorl_trio.inference.engines.answers import (
    UNNAMED,
    ContractBroken,
    Logprob,
    Prompt,
    TokenId,
    Wanted,
    checked_completion,
)
from prorl_trio.inference.engines.http_engine import JSON_CONTENT, PROBE_PROMPT, PROBE_TOKENS, HttpEngineClient
from prorl_trio.inference.engines.protocol import Completion, EngineInfo

GENERATE: Final = "/generate"
NAME: Final = "prorl"
"""The engine's name in spans, because it does not report one."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /generate`: the prompt, and parameters of vLLM's `SamplingParams`.

    Neutral values are omitted, as in that server's own client, because other servers may support fewer fields.
    """

    prompt_ids: msgspec.Raw
    max_tokens: int
    temperature: float | msgspec.UnsetType = msgspec.UNSET
    top_p: float | msgspec.UnsetType = msgspec.UNSET
    top_k: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False


class GenerateAnswer(msgspec.Struct, frozen=True):
    """Its answer. `logprobs` are the natural logarithms of the sampled tokens' probabilities."""

    response_ids: list[TokenId]
    logprobs: list[Logprob] | None = None


class _SampledIds(msgspec.Struct, frozen=True):
    """The field that distinguishes such an answer from others."""

    response_ids: list[TokenId]


class TrainerEngineClient(HttpEngineClient):
    """A client of one server. The server does not report its context length, so every probe needs `context_tokens`."""

    may_scale_logprobs: ClassVar[bool] = True

    async def is_there(self, *, timeout_s: float) -> bool:
        """See `EngineClient.is_there`. Sends a request for two tokens."""
        request = GenerateRequest(prompt_ids=Prompt.of(PROBE_PROMPT).text, max_tokens=PROBE_TOKENS)
        try:
            response = await self._http.request(
                "POST", GENERATE, body=msgspec.json.encode(request), headers=[JSON_CONTENT], timeout_s=timeout_s
            )
        except HttpError as exc:
            raise self._failed(exc) from exc
        try:
            msgspec.json.decode(response.body, type=_SampledIds)
        except msgspec.MsgspecError:
            return False
        return response.status == 200

    async def _ask_info(self, timeout_s: float) -> EngineInfo:
        if self._context_tokens < len(PROBE_PROMPT) + PROBE_TOKENS:
            raise self._unfit(
                "it does not say how long a context may be; set backends.max_model_len to what it was started with"
            )
        return EngineInfo(
            url=self.url,
            model=NAME,
            max_model_len=self._context_tokens,
            engine=NAME,
            policy_version=UNNAMED,
            api=GENERATE,
        )

    async def _complete(self, wanted: Wanted) -> Completion:
        sampling = wanted.sampling  # the API lacks a salt, and cannot stream
        request = GenerateRequest(
            prompt_ids=wanted.prompt.text,
            max_tokens=wanted.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=wanted.probing,
        )
        response = await self._post(GENERATE, msgspec.json.encode(request), wanted)
        return _completion(response.body, wanted)


def _completion(body: bytes, wanted: Wanted) -> Completion:
    """Return the completion in an answer.

    It finished on its own if it is shorter than requested, or ends with a stop token.

    Raises:
        ContractBroken: the answer cannot be trusted.
    """
    try:
        answer = msgspec.json.decode(body, type=GenerateAnswer)
    except msgspec.MsgspecError as exc:
        raise ContractBroken(f"the answer of {GENERATE} is no list of response_ids to train on: {exc}") from exc
    token_ids = answer.response_ids
    if answer.logprobs is None:
        raise ContractBroken("it drops log-probabilities (no logprobs in the answer)")
    stopped = len(token_ids) < wanted.max_tokens or token_ids[-1] in wanted.sampling.stop_token_ids
    return checked_completion(
        wanted,
        token_ids=token_ids,
        logprobs=answer.logprobs,
        sampled=len(token_ids),
        finish_reason="stop" if stopped else "length",
    )
