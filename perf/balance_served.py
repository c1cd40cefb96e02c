"""A batch on simulated engines over HTTP: placed by the node's own pool, or by vllm-router in between.

Either way calls are made by the same client from the same pool: to the router as to its only backend. Everything runs
`SPEED_UP` times as fast as it would.
"""

from __future__ import annotations

import tempfile
from array import array
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec
import trio

from perf.balance_batch import HEAVY, Batch, Work
from perf.balance_engines import CompletionCall, EngineTotals, EngineUrls
from perf.balance_world import ENGINE
from perf.children import open_child
from perf.peers.environments import PEERS
from perf.peers.server import free_port, open_peer_server
from prorl_trio.config import Strategy
from prorl_trio.http.client import HttpClient, HttpError, HttpLimits
from prorl_trio.inference.engines.protocol import Completion, CompletionRequest, EngineClient, EngineInfo, made_by
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.simulation.config import Distribution
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


__all__ = ["OURS", "ROUTED", "Placement", "ServedRun", "run_served"]

SPEED_UP: Final = 40
BACKENDS: Final = 4
WORKERS: Final = 32
MODEL: Final = msgspec.structs.replace(
    ENGINE,
    kv_tokens=ENGINE.kv_tokens // 2,  # for 8 rollouts each, of the 16 in the simulated batch
    prefill_tokens_per_s=ENGINE.prefill_tokens_per_s * SPEED_UP,
    tokens_per_s=Distribution(value=(ENGINE.tokens_per_s.value or 0.0) * SPEED_UP),
    max_tokens_per_s=ENGINE.max_tokens_per_s * SPEED_UP,
)
WORK: Final = msgspec.structs.replace(
    HEAVY,
    instances=32,
    rollouts=4,
    turns_p50=10.0,
    tool_s_p50=HEAVY.tool_s_p50 / SPEED_UP,
)
CALL_TIMEOUT_S: Final = 600.0
CLOSE_TIMEOUT_S: Final = 5.0


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """A way of placing calls: by the node's pool, or by vllm-router.

    Attributes:
        name: for tables and metrics.
        strategy: of the node's pool.
        policy: of vllm-router, which is then the pool's only backend; empty: no router.
        ends_sessions: the router is told when a rollout has ended.
    """

    name: str
    strategy: Strategy = "least_in_flight"
    policy: str = ""
    ends_sessions: bool = False


OURS: Final = (Placement(name="least_in_flight"), Placement(name="static_split", strategy="static_split"))
ROUTED: Final = (
    Placement(name="sticky_least_loaded", policy="sticky_least_loaded", ends_sessions=True),
    Placement(name="cache_aware", policy="cache_aware"),
    Placement(name="sticky_untold", policy="sticky_least_loaded"),
    Placement(name="consistent_hash", policy="consistent_hash"),
    Placement(name="power_of_two", policy="power_of_two"),
    Placement(name="round_robin", policy="round_robin"),
    Placement(name="random", policy="random"),
)
"""All policies of the router but `kv_aware`, which needs the engines' KV events. What it does best comes first."""


class ServedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, as if not sped up.

    Attributes:
        makespan_s: of the batch. `completed`: rollouts. `calls`: completions.
        busiest_over_mean: tokens sampled by the engine with most, over the mean of all.
        prefix_hit_rate: share of prompt tokens that an engine had in its cache.
    """

    makespan_s: float
    completed: int
    calls: int
    busiest_over_mean: float
    prefix_hit_rate: float

    @property
    def rollouts_per_s(self) -> float:
        """Throughput of the step."""
        return self.completed / self.makespan_s


class ServedEngine(EngineClient):
    """A simulated engine over HTTP, or a router before some. Calls name their task in `X-Session-ID`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = HttpClient(url, limits=HttpLimits(max_connections=2 * WORKERS))

    async def probe(self, *, timeout_s: float) -> EngineInfo:
        """See `EngineClient.probe`. Always fit."""
        del timeout_s
        await trio.lowlevel.checkpoint()
        return EngineInfo(
            url=self.url, model="simulated", max_model_len=MODEL.kv_tokens, engine="simulated", policy_version="0"
        )

    async def generate(self, request: CompletionRequest) -> Completion:
        """See `EngineClient.generate`. Samples nothing, and retries nothing."""
        max_tokens = request.max_tokens
        call = CompletionCall(model="simulated", prompt=list(request.prompt_token_ids), max_tokens=max_tokens)
        session = ("X-Session-ID", request.request_id.rpartition("-t")[0])
        headers = [("Content-Type", "application/json"), session]
        timeout_s = min(request.timeout_s, CALL_TIMEOUT_S)
        await self._ask("POST", "/v1/completions", headers, msgspec.json.encode(call), timeout_s)
        return Completion(
            token_ids=array("i", bytes(4 * max_tokens)),
            logprobs=array("f", bytes(4 * max_tokens)),
            finish_reason="stop",
            policy_version="0",
            engine="simulated",
        )

    async def end_session(self, task_id: str) -> None:
        """Tell a router that no more calls of this task come."""
        await self._ask("POST", f"/finish_session?session_id={quote(task_id)}", [], b"", CALL_TIMEOUT_S)

    async def totals(self) -> EngineTotals:
        """Return what the engine did; a router does not know."""
        return msgspec.json.decode(await self._ask("GET", "/totals", [], b"", CALL_TIMEOUT_S), type=EngineTotals)

    async def aclose(self) -> None:
        """Close the connections."""
        self._http.close()
        await trio.lowlevel.checkpoint()

    async def _ask(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes, timeout_s: float
    ) -> bytes:
        try:
            response = await self._http.request(method, path, body=body, headers=headers, timeout_s=timeout_s)
        except HttpError as exc:
            raise BackendError(f"{self.url}: {exc}", retryable=True) from exc
        if response.status != 200:
            said = f"status {response.status}: {response.body[:200]!r}"
            raise BackendError(f"{self.url}: {method} {path} was answered by {said}", retryable=True)
        return response.body


async def run_served(placement: Placement, seed: int, *, work: Work = WORK) -> ServedRun:
    """Start engines, and the router if there is one, run the batch, and end them.

    Raises:
        PeerUnavailable: the router is not installed, or does not start.
        BackendError: a call failed twice.
    """
    async with AsyncExitStack() as stack:
        arguments = [str(BACKENDS), msgspec.json.encode(MODEL).decode()]
        _, engines = await stack.enter_async_context(open_child("perf.balance_engines", arguments, EngineUrls))
        urls = engines.urls
        if placement.policy:
            urls = [await stack.enter_async_context(_open_router(placement.policy, engines.urls))]
        backends = Backends(made_by(ServedEngine), strategy=placement.strategy, random=Random(f"{seed} ties"))
        stack.push_async_callback(backends.aclose)
        for url in urls:
            await backends.add(url)
        router = ServedEngine(urls[0])
        stack.push_async_callback(router.aclose)
        batch = Batch(
            work,
            seed,
            backends=backends,
            urls=urls,
            strategy=placement.strategy,
            ended=router.end_session if placement.ends_sessions else None,
        )
        began_s = trio.current_time()
        await batch.run(WORKERS)
        makespan_s = trio.current_time() - began_s
        totals = [await _totals(url) for url in engines.urls]
    sampled = [engine.tokens_sampled for engine in totals]
    return ServedRun(
        makespan_s=makespan_s * SPEED_UP,
        completed=batch.completed,
        calls=sum(engine.completions for engine in totals),
        busiest_over_mean=max(sampled) * len(sampled) / sum(sampled),
        prefix_hit_rate=sum(engine.prefix_hits_tokens for engine in totals)
        / sum(engine.prompt_tokens for engine in totals),
    )


async def _totals(url: str) -> EngineTotals:
    engine = ServedEngine(url)
    try:
        return await engine.totals()
    finally:
        with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await engine.aclose()


@asynccontextmanager
async def _open_router(policy: str, engine_urls: list[str]) -> AsyncIterator[str]:
    """vllm-router with its own defaults but for the policy; it looks for its engines every second as it starts."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = ["-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", "warning"]
    arguments += ["--policy", policy, "--worker-startup-check-interval", "1", "--worker-urls", *engine_urls]
    with tempfile.TemporaryDirectory(prefix="prorl-balance-") as folder:
        async with open_peer_server(PEERS["vllm-router"], arguments, url=url, folder=Path(folder)):
            yield url
