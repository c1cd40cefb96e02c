"""A vLLM server as an engine: token ids in, token ids and log-probabilities out, every count checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from prorl_trio.inference.completion_stream import CompletionStream
from prorl_trio.inference.engine import Completion, EngineInfo, TokenSink
from prorl_trio.inference.http_engine import PROBE_PROMPT, PROBE_TOKENS, EndpointMissing, HttpEngineClient, OnCall
from prorl_trio.inference.retries import RetryPolicy
from prorl_trio.inference.vllm_api import (
    COMPLETIONS,
    GENERATE,
    ModelList,
    Version,
    WeightInfo,
    completion_of,
    completion_request,
    prefix_caching,
    read_answer,
    read_event,
)

if TYPE_CHECKING:
    from prorl_trio.inference.answers import Wanted
    from prorl_trio.inference.gate import PauseMode

__all__ = ["OnCall", "RetryPolicy", "VllmClient"]

UNLABELLED = "default"
"""What vLLM calls weights that nobody gave a version."""


class VllmClient(HttpEngineClient):
    """One vLLM server. Completions come from `/inference/v1/generate` where it has that, or `/v1/completions`."""

    async def pause(self, mode: PauseMode, *, timeout_s: float) -> bool:
        """See `EngineClient.pause`. Only a server in development mode (`VLLM_SERVER_DEV_MODE=1`) offers it.

        With `abort`, completions in flight are answered at once with what they have, and finish reason `abort`.
        """
        return await self._control(f"/pause?mode={mode}", timeout_s)

    async def label_weights(self, policy_version: str, *, timeout_s: float) -> None:
        """See `EngineClient.label_weights`. Only in development mode."""
        if self._info is not None and self._info.pausable:
            await self._control("/update_weight_version", timeout_s, {"new_version": policy_version})

    async def resume(self, *, timeout_s: float) -> None:
        """See `EngineClient.resume`."""
        await self._control("/resume", timeout_s)

    async def _ask_info(self, timeout_s: float) -> EngineInfo:
        models = await self._get_json("/v1/models", ModelList, timeout_s)
        if models is None or not models.data:
            raise self._unfit("it lists no model at /v1/models; is it a vLLM server?")
        card = models.data[0]
        if card.max_model_len is None or card.max_model_len < len(PROBE_PROMPT) + PROBE_TOKENS:
            raise self._unfit(f"it reports a max_model_len of {card.max_model_len}")
        version = await self._get_json("/version", Version, timeout_s)
        weights = await self._get_json("/weight_info", WeightInfo, timeout_s)
        metrics = await self._get("/metrics", timeout_s)
        label = weights.weight_version if weights else None
        info = EngineInfo(
            url=self.url,
            model=card.id,
            max_model_len=card.max_model_len,
            engine=f"vllm {version.version}" if version else "vllm",
            policy_version=label if label and label != UNLABELLED else "0",
            api=GENERATE,
            pausable=weights is not None,
            prefix_caching=None if metrics is None else prefix_caching(metrics),
        )
        # Only a request that is valid tells: routers refuse others themselves, and pass this on to servers without it.
        try:
            await self._sample_probe(info, timeout_s)
        except EndpointMissing:
            return msgspec.structs.replace(info, api=COMPLETIONS)
        return info

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
        path = wanted.info.api
        stream = None if sink is None else CompletionStream(wanted, sink, lambda data, _: read_event(data, wanted))
        response = await self._post(
            path,
            completion_request(wanted, path=path, cache_salt=cache_salt, stream=stream is not None, ignore_eos=probing),
            request_id=request_id,
            timeout_s=timeout_s,
            prompt_tokens=wanted.prompt.tokens,
            on_data=None if stream is None else stream.feed,
            once=probing,
        )
        return stream.completion() if stream is not None else completion_of(read_answer(response.body, wanted), wanted)
