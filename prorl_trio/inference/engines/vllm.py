"""A vLLM server as an engine: token ids in, token ids and log-probabilities out, every count checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, get_args

import msgspec
import trio

from prorl_trio.inference.engines.answers import UNNAMED, Tokenized, label_of
from prorl_trio.inference.engines.http_engine import PROBE_PROMPT, PROBE_TOKENS, ControlCall, HttpEngineClient
from prorl_trio.inference.engines.protocol import Completion, EngineInfo, EnginePaused
from prorl_trio.inference.engines.vllm_api import (
    COMPLETIONS,
    GENERATE,
    Detokenized,
    ModelList,
    PauseInfo,
    Version,
    WeightInfo,
    completion_of,
    completion_request,
    prefix_caching,
    read_event,
    served_model,
)
from prorl_trio.types.backends import PauseMode
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.inference.engines.answers import Wanted


class VllmClient(HttpEngineClient):
    """A client of one vLLM server.

    Completions come from `/inference/v1/generate` if the server offers it, otherwise from `/v1/completions`. Pauses
    require development mode (`VLLM_SERVER_DEV_MODE=1`). Adapters require `--enable-lora` and
    `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`.
    """

    pause_calls: ClassVar = {mode: ControlCall(f"/pause?mode={mode}") for mode in get_args(PauseMode)}
    resume_call: ClassVar = ControlCall("/resume")
    adapter_calls: ClassVar = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")

    async def is_there(self, *, timeout_s: float) -> bool:
        """See `EngineClient.is_there`. Recognises vLLM's list of models."""
        return served_model(await self._get_json("/v1/models", ModelList, timeout_s)) is not None

    async def tokenize(self, text: str, *, timeout_s: float) -> list[int] | None:
        asked: dict[str, object] = {"prompt": text, "add_special_tokens": False}
        answer = await self._ask_tokenizer("/tokenize", asked, Tokenized, timeout_s)
        return None if answer is None else answer.tokens

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float) -> str | None:
        answer = await self._ask_tokenizer("/detokenize", {"tokens": list(token_ids)}, Detokenized, timeout_s)
        return None if answer is None else answer.prompt

    async def label_weights(self, policy_version: str, *, timeout_s: float) -> bool:
        """See `EngineClient.label_weights`. Only in development mode."""
        if self._info is None or not self._info.pausable:
            await trio.lowlevel.checkpoint()
            return False
        return await self._control("/update_weight_version", timeout_s, {"new_version": policy_version})

    async def read_label(self, *, timeout_s: float) -> str:
        """See `EngineClient.read_label`. Only in development mode."""
        weights = await self._get_json("/weight_info", WeightInfo, timeout_s)
        return label_of(weights.weight_version if weights else None)

    async def load_weights(self, folder: str, *, timeout_s: float) -> bool:
        """See `EngineClient.load_weights`. Only in development mode.

        Afterwards vLLM reports `folder` as its model's location, whether or not loading succeeded.
        """
        started_s = trio.current_time()
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        if not await self._control("/collective_rpc", timeout_s, reload):
            return False
        # Cache entries retained by a pause with `keep` stay while in use; prompts of a later version miss them.
        left_s = max(0.0, started_s + timeout_s - trio.current_time())
        await self._control("/reset_prefix_cache", left_s)
        return True

    async def _ask_info(self, timeout_s: float) -> EngineInfo:
        models = await self._get_json("/v1/models", ModelList, timeout_s)
        card = served_model(models)
        if card is None:
            raise self._unfit("it lists no model at /v1/models; is it a vLLM server?")
        if card.max_model_len is None or card.max_model_len < len(PROBE_PROMPT) + PROBE_TOKENS:
            raise self._unfit(f"it reports a max_model_len of {card.max_model_len}")
        pause = await self._get_json("/is_paused", PauseInfo, timeout_s)
        if pause is not None and pause.is_paused:
            raise EnginePaused(f"{self.url}: it is paused, and samples nothing before a POST {self.url}/resume")
        version = await self._get_json("/version", Version, timeout_s)
        weights = await self._get_json("/weight_info", WeightInfo, timeout_s)
        metrics = await self._get("/metrics", timeout_s)
        label = label_of(weights.weight_version if weights else None)
        # Weights loaded since the start have a name, but their folder is not reported.
        origin = card.root or "" if label == UNNAMED else ""
        info = EngineInfo(
            url=self.url,
            model=card.id,
            max_model_len=card.max_model_len,
            engine=f"vllm {version.version}" if version else "vllm",
            policy_version=label or UNNAMED,
            label=label,
            api=GENERATE,
            pausable=weights is not None,
            prefix_caching=None if metrics is None else prefix_caching(metrics),
            weights=origin,
            model_folder=card.root or "",
            guides=True,
        )
        # Only a valid request is conclusive: routers refuse invalid ones themselves, and forward this one to servers
        # without the endpoint. Servers of other versions use another form.
        try:
            told = (await self._sample_probe(info, timeout_s)).label
        except BackendError as exc:
            if exc.retryable:
                raise
            return msgspec.structs.replace(info, api=COMPLETIONS)  # its answer gives the reason if that is unfit too
        return msgspec.structs.replace(info, label=told or label, policy_version=told or label or UNNAMED)

    async def _complete(self, wanted: Wanted) -> Completion:
        return await self._ask(wanted.info.api, completion_request(wanted), wanted, completion_of, read_event)
