"""An engine with a pause of its own and a name for its weights, and a watched pool of such, for virtual time."""

from __future__ import annotations

from array import array
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Any, cast

import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.config import HealthConfig, LoadConfig
from prorl_trio.inference.engines.protocol import Completion, EngineClient, EngineInfo, made_by
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.types.errors import BackendError
from prorl_trio.types.models import PolicySpan
from support.completions import asked, begun

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.inference.engines.load_report import LoadReport
    from prorl_trio.inference.engines.protocol import CompletionRequest
    from prorl_trio.inference.pool.backend import BackendStatistics
    from prorl_trio.inference.pool.lease import Lease
    from prorl_trio.types.backends import PauseMode
    from prorl_trio.types.models import FinishReason

A, B, C = "http://a:1", "http://b:1", "http://c:1"
HEALTH = HealthConfig(interval_s=10, open_after_failures=2, close_after_successes=2)


class PausableEngine(EngineClient):
    """Has a pause of its own, during which it samples nothing, and a name for its weights.

    `says`, if there is one, is what its next completions end as; `lies`, what it calls its weights when it is asked.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.label = "0"
        self.weights = "first"
        self.max_model_len = 99
        self.running = trio.Event()
        self.running.set()
        self.silent: set[str] = set()
        self.broken: set[str] = set()
        self.tells_versions = True
        self.lies = ""
        self.adapters: dict[str, str] = {}
        self.adapter = ""
        self.says: list[tuple[list[int], FinishReason]] = []
        self.prompts: list[list[int]] = []
        self.told: list[str] = []
        self.load_report: LoadReport | None = None
        self.call_s = 1.0

    async def probe(self, *, timeout_s: float) -> EngineInfo:
        """See `EngineClient.probe`."""
        await self._reach("probe", timeout_s)
        await self._sample(timeout_s)
        return EngineInfo(
            url=self.url,
            model="m",
            max_model_len=self.max_model_len,
            engine="fake",
            policy_version=self.label,
            label=self.label,
            weights=self.weights if self.label == "0" else "",
        )

    async def generate(self, request: CompletionRequest) -> Completion:
        """See `EngineClient.generate`. Takes `call_s`."""
        await self._reach("generate", request.timeout_s)
        self.prompts.append(list(request.prompt_token_ids))
        label = self.label
        await trio.sleep(self.call_s)
        await self._sample(request.timeout_s)
        ids, reason = self.says.pop(0) if self.says else ([7], "stop")
        spans = [PolicySpan(start=0, end=len(ids), policy_version=label, engine="fake")] if ids else []
        return Completion(
            token_ids=array("i", ids),
            logprobs=array("f", [-0.5] * len(ids)),
            finish_reason=reason,
            policy_version=label,
            engine="fake",
            spans=spans,
            versions_told=self.tells_versions and bool(ids),
            label=label if self.tells_versions else "",
        )

    async def load(self, *, timeout_s: float) -> LoadReport | None:
        """See `EngineClient.load`."""
        del timeout_s
        await trio.lowlevel.checkpoint()
        return self.load_report

    async def pause(self, mode: PauseMode, *, timeout_s: float) -> bool:
        """See `EngineClient.pause`."""
        await self._reach("pause", timeout_s)
        self.told.append(mode)
        self.running = trio.Event()
        return True

    async def label_weights(self, policy_version: str, *, timeout_s: float) -> bool:
        """See `EngineClient.label_weights`."""
        await self._reach("label", timeout_s)
        self.label = policy_version
        return True

    async def read_label(self, *, timeout_s: float) -> str:
        """See `EngineClient.read_label`."""
        await self._reach("read label", timeout_s)
        return self.lies or self.label

    async def load_weights(self, folder: str, *, timeout_s: float) -> bool:
        """See `EngineClient.load_weights`. Takes `call_s`; a failure leaves none."""
        self.told.append(f"load {folder}")
        former, self.weights = self.weights, ""
        if "no weights" in self.broken:
            self.weights = former
            return False
        await trio.sleep(self.call_s)
        await self._reach("load", timeout_s)
        await self._reach(f"load {folder}", timeout_s)
        self.weights = folder
        return True

    async def load_adapter(self, name: str, folder: str, *, timeout_s: float) -> bool:
        """See `EngineClient.load_adapter`."""
        await self._reach("load adapter", timeout_s)
        if "no adapters" in self.broken:
            return False
        self.adapters[name] = folder
        return True

    async def unload_adapter(self, name: str, *, timeout_s: float) -> None:
        """See `EngineClient.unload_adapter`."""
        await self._reach("unload adapter", timeout_s)
        self.adapters.pop(name, None)

    def use_adapter(self, name: str) -> None:
        """See `EngineClient.use_adapter`."""
        self.adapter = name

    async def resume(self, *, timeout_s: float) -> None:
        """See `EngineClient.resume`."""
        await self._reach("resume", timeout_s)
        self.told.append("resume")
        self.running.set()

    async def aclose(self) -> None:
        """Nothing is open."""
        await trio.lowlevel.checkpoint()

    async def _reach(self, what: str, timeout_s: float) -> None:
        await trio.lowlevel.checkpoint()
        if what in self.silent:
            await trio.sleep(timeout_s)
            raise BackendError(f"{self.url}: no answer", retryable=True)
        if what in self.broken:
            raise BackendError(f"{self.url}: out of order", retryable=True)

    async def _sample(self, timeout_s: float) -> None:
        with trio.move_on_after(timeout_s):
            await self.running.wait()
            return
        raise BackendError(f"{self.url}: no answer", retryable=True)


class Pool:
    """Watched backends."""

    def __init__(self, **options: Any) -> None:
        self.engines = {url: PausableEngine(url) for url in (A, B, C)}
        options = {"health": HEALTH, "load": LoadConfig(interval_s=0), "random": Random(0), **options}
        self.backends = Backends(made_by(self.engines.__getitem__), probe_timeout_s=5, **options)

    def out(self) -> set[str]:
        """URLs of those that are suspended."""
        listed = cast("list[BackendStatistics]", self.backends.statistics()["backends"])
        return {each.url for each in listed if each.suspended}


@asynccontextmanager
async def open_pool(*urls: str, **options: Any) -> AsyncIterator[Pool]:
    """With `urls` in it, and watched."""
    pool = Pool(**options)
    for url in urls:
        await pool.backends.add(url)
    with trio.fail_after(5000):
        async with open_single_nursery() as nursery:
            nursery.start_soon(pool.backends.watch)
            yield pool
            nursery.cancel_scope.cancel()
            with trio.move_on_after(60, shield=True):
                await pool.backends.aclose()


async def complete(lease: Lease, tokens: int = 8) -> Completion:
    """A completion of a prompt of three tokens."""
    return await lease.attempt(begun(asked(max_tokens=tokens, timeout_s=30)))


def versions(completion: Completion) -> list[tuple[str, int, int]]:
    """Of its spans, with their start and end."""
    return [(span.policy_version, span.start, span.end) for span in completion.spans]
