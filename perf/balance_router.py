"""The part of `perf.balance` with vllm-router: a batch on simulated engines over HTTP, placed by each of its policies.

The batch is placed once by the node's own pool, and then through vllm-router. In both cases the same client makes the
calls from the same pool, with the router as its only backend. Everything runs `SPEED_UP` times as fast as in reality.
"""

from __future__ import annotations

import tempfile
from array import array
from collections import defaultdict
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec
import trio

from perf.batch import HEAVY, TOTALS, Batch, BatchRun, Strategy, Work, batch_metrics, pool_of, run_of
from perf.harness import Report, caption_of, rows_of, tell
from perf.peers.environments import PEERS, PeerUnavailable
from perf.peers.process import free_port, open_peer_server
from perf.processes import open_child
from perf.training import ENGINE
from prorl_ipc.nursery import open_single_nursery
from prorl_trio.http.client import HttpClient
from prorl_trio.http.connection import HttpError, HttpLimits
from prorl_trio.inference.engines.protocol import Completion, CompletionRequest, EngineClient, EngineInfo
from prorl_trio.simulation.config import Distribution, EngineModel
from prorl_trio.simulation.engine import SimulatedEngine
from prorl_trio.testing.fake_http import Answer, HttpCall, serve_http
from prorl_trio.types.errors import BackendError
from prorl_trio.types.models import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

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
    HEAVY, instances=32, rollouts=4, turns_p50=10.0, tool_s_p50=HEAVY.tool_s_p50 / SPEED_UP
)
CALL_TIMEOUT_S: Final = 600.0


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A way of placing calls: by the node's pool, or by vllm-router.

    Attributes:
        name: name in tables and metrics.
        strategy: strategy of the node's pool.
        policy: policy of vllm-router, which is then the pool's only backend; empty: no router.
        ends_sessions: the router is notified of the end of a rollout.
    """

    name: str
    strategy: Strategy = "least_in_flight"
    policy: str = ""
    ends_sessions: bool = False


OURS: Final = (Way(name="least_in_flight"), Way(name="static_split", strategy="static_split"))
ROUTED: Final = (
    Way(name="sticky_least_loaded", policy="sticky_least_loaded", ends_sessions=True),
    Way(name="cache_aware", policy="cache_aware"),
    Way(name="sticky_untold", policy="sticky_least_loaded"),
    *(Way(name=policy, policy=policy) for policy in ("consistent_hash", "power_of_two", "round_robin", "random")),
)
"""All policies of the router except `kv_aware`, which needs the engines' KV events. Its best one comes first."""
QUICK_INSTANCES: Final = 16
QUICK_SEEDS, SEEDS = 1, 2
QUICK_WAYS: Final = (OURS[0], ROUTED[0])
TITLE: Final = f"{BACKENDS} engines over HTTP, {WORKERS} rollouts at once"
DEFAULT_POLICY: Final = "cache_aware"


# ---------------------------------------------------------------- engines, in a process of their own


@asynccontextmanager
async def serve_engines(count: int, model: dict[str, Any]) -> AsyncIterator[list[str]]:
    """Serve simulated engines behind vLLM's `/v1/completions`; yield their URLs.

    A prompt is identified by its first token, so prompts of two rollouts must not share it.
    """
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(open_single_nursery())
        urls = []
        for number in range(count):
            engine = SimulatedEngine(
                f"engine {number}", msgspec.convert(model, EngineModel), failure_rate=0.0, seed=str(number)
            )
            await stack.enter_async_context(engine.open())
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            serve = partial(serve_http, handle=partial(_answer, engine))
            nursery.start_soon(trio.serve_listeners, serve, listeners)
            urls.append(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}")
        yield urls
        nursery.cancel_scope.cancel()


async def _answer(engine: SimulatedEngine, call: HttpCall) -> Answer:
    await trio.lowlevel.checkpoint()
    match call.method, call.path:
        case "POST", "/v1/completions":
            return await _complete(engine, msgspec.json.decode(call.body))
        case "GET", "/health":
            return Answer(200, b"{}")
        case "GET", "/v1/models":
            return Answer(200, b'{"object":"list","data":[{"id":"simulated","object":"model"}]}')
        case "GET", "/totals":
            return Answer(200, msgspec.json.encode({name: getattr(engine, name) for name in TOTALS}))
    return Answer(404, b'{"error":{"message":"Not Found"}}')


async def _complete(engine: SimulatedEngine, wanted: dict[str, Any]) -> Answer:
    prompt = wanted["prompt"]
    completion = await engine.generate(
        CompletionRequest(
            prompt_token_ids=prompt,
            sampling=SamplingParams(),
            max_tokens=wanted["max_tokens"],
            request_id=f"{prompt[0]}-t",
            timeout_s=CALL_TIMEOUT_S,
        )
    )
    ids = completion.token_ids.tolist()
    choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": ids, "logprobs": None}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
    answer = {"id": "cmpl-simulated", "object": "text_completion", "model": "simulated", "choices": [choice]}
    return Answer(200, msgspec.json.encode(answer | {"usage": usage}))


# ---------------------------------------------------------------- a run


class ServedEngine(EngineClient):
    """A simulated engine over HTTP, or a router before several engines. Calls name their task in `X-Session-ID`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = HttpClient(url, limits=HttpLimits(max_connections=2 * WORKERS))

    async def probe(self, *, timeout_s: float) -> EngineInfo:
        """Return its description; it is always fit."""
        del timeout_s
        await trio.lowlevel.checkpoint()
        return EngineInfo(
            url=self.url, model="simulated", max_model_len=MODEL.kv_tokens, engine="simulated", policy_version="0"
        )

    async def generate(self, request: CompletionRequest) -> Completion:
        """Wait for the simulated sampling time, without retries."""
        max_tokens = request.max_tokens
        call = {"model": "simulated", "prompt": list(request.prompt_token_ids), "max_tokens": max_tokens}
        headers = [("Content-Type", "application/json"), ("X-Session-ID", request.request_id.rpartition("-t")[0])]
        timeout_s = min(request.timeout_s, CALL_TIMEOUT_S)
        await self.ask("POST", "/v1/completions", headers, msgspec.json.encode(call), timeout_s)
        return Completion(
            token_ids=array("i", bytes(4 * max_tokens)),
            logprobs=array("f", bytes(4 * max_tokens)),
            finish_reason="stop",
            policy_version="0",
            engine="simulated",
        )

    async def end_session(self, task_id: str) -> None:
        """Notify a router that this task has ended."""
        await self.ask("POST", f"/finish_session?session_id={quote(task_id)}")

    async def aclose(self) -> None:
        self.http.close()
        await trio.lowlevel.checkpoint()

    async def ask(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[str, str]] = (),
        body: bytes = b"",
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> bytes:
        """Return the body of an answer. Raises BackendError for any status other than 200."""
        try:
            response = await self.http.request(method, path, body=body, headers=list(headers), timeout_s=timeout_s)
        except HttpError as exc:
            raise BackendError(f"{self.url}: {exc}", retryable=True) from exc
        if response.status != 200:
            said = f"status {response.status}: {response.body[:200]!r}"
            raise BackendError(f"{self.url}: {method} {path} was answered by {said}", retryable=True)
        return response.body


async def run_served(way: Way, seed: int, *, work: Work = WORK) -> BatchRun:
    """Start engines, and the router if needed, run the batch, and stop them. Times are converted to real speed.

    Raises:
        PeerUnavailable: the router is not installed, or does not start.
        BackendError: a call failed twice.
    """
    async with AsyncExitStack() as stack:
        child = open_child(serve_engines, BACKENDS, msgspec.to_builtins(MODEL), ready=list[str])
        _, engines = await stack.enter_async_context(child)
        urls = [await stack.enter_async_context(_open_router(way.policy, engines))] if way.policy else engines
        backends = pool_of(ServedEngine, way.strategy, Random(f"{seed} ties"))
        stack.push_async_callback(backends.aclose)
        for url in urls:
            await backends.add(url)
        router = ServedEngine(urls[0])
        stack.push_async_callback(router.aclose)
        ended = router.end_session if way.ends_sessions else None
        batch = Batch(work, seed, backends=backends, urls=urls, strategy=way.strategy, ended=ended)
        began_s = trio.current_time()
        await batch.run(WORKERS)
        makespan_s = trio.current_time() - began_s
        return run_of(batch, makespan_s * SPEED_UP, [await _totals(url) for url in engines])


async def _totals(url: str) -> dict[str, int]:
    engine = ServedEngine(url)
    try:
        totals: dict[str, int] = msgspec.json.decode(await engine.ask("GET", "/totals"))
        return totals
    finally:
        engine.http.close()


@asynccontextmanager
async def _open_router(policy: str, engine_urls: list[str]) -> AsyncIterator[str]:
    """Start vllm-router with its defaults except for the policy. It polls its engines every second during its start."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = ["-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", "warning"]
    arguments += ["--policy", policy, "--worker-startup-check-interval", "1", "--worker-urls", *engine_urls]
    with tempfile.TemporaryDirectory(prefix="prorl-balance-") as folder:
        async with open_peer_server(PEERS["vllm-router"], arguments, url=url, folder=Path(folder)):
            yield url


# ---------------------------------------------------------------- the report


async def measure_router(*, quick: bool) -> Report:
    """Return metrics, a table and notes; only a note if vllm-router is not installed."""
    ways = QUICK_WAYS if quick else (*OURS, *ROUTED)
    work = msgspec.structs.replace(WORK, instances=QUICK_INSTANCES) if quick else WORK
    runs: defaultdict[Way, list[BatchRun]] = defaultdict(list)
    try:
        for seed in range(QUICK_SEEDS if quick else SEEDS):
            for way in ways if seed % 2 == 0 else reversed(ways):
                tell(f"over HTTP, seed {seed}: {way.name}{' by vllm-router' if way.policy else ''}")
                runs[way].append(await run_served(way, seed, work=work))
    except PeerUnavailable as exc:
        return Report(title=TITLE, notes=[f"left out: {exc}"])
    return router_report({way: runs[way] for way in ways})


def router_report(runs: dict[Way, list[BatchRun]]) -> Report:
    """Report on the runs of each way by seed, starting with ours."""
    names = {f"{'router.' if way.policy else ''}{way.name}": way for way in runs}
    metrics = batch_metrics("balance.http", {name: runs[way] for name, way in names.items()}, runs[OURS[0]])
    routed = {way.name: metrics[f"balance.http.{name}.least_over"] for name, way in names.items() if way.policy}
    best = min(routed, key=routed.__getitem__)
    shown = {"balance.http.least_over_router_best": routed[best]}
    if DEFAULT_POLICY in routed:
        shown["balance.http.least_over_router_default"] = routed[DEFAULT_POLICY]
    columns: dict[str, Callable[[str], str] | str] = {
        "placed by": lambda name: f"{'vllm-router: ' if names[name].policy else ''}{names[name].name}",
        "makespan": "{makespan_s:.0f} s",
        "busiest/mean tokens": "{busiest_over_mean:.2f}",
        "prefix hits": "{prefix_hit_rate:.1%}",
        "least_in_flight is faster by": "{least_over:.2f} x",
    }
    return Report(
        title=TITLE,
        more_metrics=shown,
        detail_metrics=metrics,
        tables=[rows_of(f"{TITLE}, mean over seeds", names, columns, metrics=metrics, of="balance.http")],
        notes=caption_of("balance_router", speed_up=SPEED_UP, router=PEERS["vllm-router"].title, best=best),
    )
