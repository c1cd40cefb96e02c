"""The client for a backend: of the engine that the configuration names, or that answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

import trio

from prorl_trio.inference.engines.engine import Completion, EngineClient, EngineInfo, TokenSink
from prorl_trio.inference.engines.sglang import SglangClient
from prorl_trio.inference.engines.trainer_engine import TrainerEngineClient
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from random import Random
    from typing import Unpack

    from prorl_trio.inference.engines.engine import PauseMode
    from prorl_trio.inference.engines.engine_load import EngineLoad
    from prorl_trio.inference.engines.http_engine import HttpEngineClient, OnCall
    from prorl_trio.inference.engines.retries import RetryPolicy
    from prorl_trio.types.models import SamplingParams

__all__ = ["AutoClient", "EngineKind", "engine_client"]

EngineKind = Literal["auto", "vllm", "sglang", "prorl"]


class ClientOptions(TypedDict, total=False):
    """See `HttpEngineClient`."""

    max_connections: int
    retry: RetryPolicy | None
    random: Random | None
    on_call: OnCall | None


def engine_client(
    kind: EngineKind, url: str, *, context_tokens: int = 0, **options: Unpack[ClientOptions]
) -> EngineClient:
    """A client that has sent nothing yet. `context_tokens`: of an engine that does not say how long a context may be.

    Raises:
        BackendError: `url` is not an origin.
    """
    match kind:
        case "auto":
            return AutoClient(url, context_tokens=context_tokens, **options)
        case "prorl":
            return TrainerEngineClient(url, context_tokens=context_tokens, **options)
        case "sglang":
            return SglangClient(url, **options)
        case "vllm":
            return VllmClient(url, **options)


class AutoClient(EngineClient):
    """An SGLang or a vLLM server, or a trainer's own engine: each probe finds out which."""

    def __init__(self, url: str, *, context_tokens: int = 0, **options: Unpack[ClientOptions]) -> None:
        """As `engine_client`."""
        self._sglang = SglangClient(url, **options)
        self._vllm = VllmClient(url, **options)
        self._trainers = TrainerEngineClient(url, context_tokens=context_tokens, **options)
        self._chosen: HttpEngineClient = self._vllm
        self.url = self._vllm.url

    def __repr__(self) -> str:
        return f"<AutoClient: {self._chosen!r}>"

    async def probe(self, *, timeout_s: float) -> EngineInfo:
        """See `EngineClient.probe`. A server that is none of them is taken for a vLLM that is not fit.

        Until one succeeds, calls go to what the last one that did found.
        """
        with trio.move_on_after(timeout_s):
            there: HttpEngineClient = self._vllm
            if await self._sglang.is_there(timeout_s):
                there = self._sglang
            elif not await self._vllm.is_there(timeout_s) and await self._trainers.is_there(timeout_s):
                there = self._trainers
            info = await there.probe(timeout_s=timeout_s)
            self._chosen = there
            return info
        raise BackendError(f"{self.url}: the probe took more than {timeout_s:g} s", retryable=True)

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        max_tokens: int,
        request_id: str,
        timeout_s: float,
        cache_salt: str = "",
        sink: TokenSink | None = None,
    ) -> Completion:
        """See `HttpEngineClient.generate`."""
        call = self._chosen.generate(
            prompt_token_ids,
            sampling,
            max_tokens=max_tokens,
            request_id=request_id,
            timeout_s=timeout_s,
            cache_salt=cache_salt,
            sink=sink,
        )
        del prompt_token_ids  # see `HttpEngineClient.generate`
        return await call

    async def load(self, *, timeout_s: float) -> EngineLoad | None:
        """See `EngineClient.load`."""
        return await self._chosen.load(timeout_s=timeout_s)

    async def pause(self, mode: PauseMode, *, timeout_s: float) -> bool:
        """See `EngineClient.pause`."""
        return await self._chosen.pause(mode, timeout_s=timeout_s)

    async def label_weights(self, policy_version: str, *, timeout_s: float) -> bool:
        """See `EngineClient.label_weights`."""
        return await self._chosen.label_weights(policy_version, timeout_s=timeout_s)

    async def load_weights(self, folder: str, *, timeout_s: float) -> bool:
        """See `EngineClient.load_weights`."""
        return await self._chosen.load_weights(folder, timeout_s=timeout_s)

    async def resume(self, *, timeout_s: float) -> None:
        """See `EngineClient.resume`."""
        await self._chosen.resume(timeout_s=timeout_s)

    async def aclose(self) -> None:
        """Close the connections of all. Idempotent."""
        await self._sglang.aclose()
        await self._vllm.aclose()
        await self._trainers.aclose()
