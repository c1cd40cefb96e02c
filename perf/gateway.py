"""The gateway for programs with a model API: calls per second, latency, memory, and tokens compared with other rules.

    python -m perf.peers setup gateway lightning       # once: the peers' environments
    python -m perf.gateway [--quick] [--json FILE]

The gateway runs in a separate process. Its engine is a script in that process, and then a fake engine over HTTP. The
programs are callers in this process. Each holds dialogues of ten turns by Chat Completions in short messages, and again
after a document of 2,000 tokens. The peers, rllm-model-gateway and agentlightning, pass the same dialogues to the Chat
Completions of the fake engine, which does not render templates. The other rules are in `perf.gateway_rules`.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from perf.chat_families import write_family_model
from perf.gateway_rules import ScriptedEngine, new_context, scores
from perf.harness import (
    Bar,
    Bars,
    Case,
    Lines,
    Options,
    Report,
    Rows,
    caption_of,
    measure_interleaved,
    run_benchmark,
    tell,
)
from perf.node import open_gateway as open_rllm
from perf.peers.environments import PEERS, PeerUnavailable
from perf.peers.process import free_port, open_peer_server
from perf.processes import Child, open_child
from prorl_ipc.nursery import open_single_nursery
from prorl_trio.agent.gateway import open_gateway
from prorl_trio.agent.said import Answer, Question, Said
from prorl_trio.chat.format import ChatFormat
from prorl_trio.config import ListenConfig
from prorl_trio.edges.gateway.app import GatewayApp, GatewayTable
from prorl_trio.edges.gateway.serve import serve_gateway
from prorl_trio.http.client import HttpClient
from prorl_trio.http.connection import HttpLimits
from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.testing.fake_engine import FakeEngine, FakeEngineConfig, open_look_alike
from prorl_trio.testing.fake_http import Answer as HttpAnswer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from perf.gateway_rules import Score
    from prorl_trio.testing.fake_http import HttpCall

CALLERS: Final = 32
TURNS: Final = 10
OPEN_SESSIONS, OPEN_TURNS = 1_000, 20
DOCUMENT_TOKENS: Final = 2_000
TURN_TEXT: Final = "I have looked at it, and shall look at more of it."
SECRET: Final = "sk-0123456789abcdef0123456789abcdef"
WIRE: Final = "wire"
MAX_MODEL_LEN: Final = 100_000
MIB: Final = 2**20
BYTES_PER_TOKEN: Final = 9
CALL_TIMEOUT_S: Final = 60.0
AT_LEAST: Final = {"wire.short.calls_per_cpu_s": 1000.0, "scripted.document.calls_per_cpu_s": 300.0}
AT_MOST: Final = {"latency.added_p50_ms": 2.0, "memory.sessions_mib": 300.0, "memory.growth": 2.5} | {
    f"tokens.ours.{what}": 0.0 for what in ("false_context", "lost", "doubled")
}
CHAT_ANSWER: Final = msgspec.json.encode(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "fake-model",
        "prompt_token_ids": [65] * 20,
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": TURN_TEXT},
                "token_ids": [65] * 15,
                "logprobs": {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}] * 15},
            }
        ],
        "usage": {"prompt_tokens": 20, "completion_tokens": 15, "total_tokens": 35},
    }
)
HEADERS: Final = [("Content-Type", "application/json"), ("Authorization", f"Bearer {SECRET}")]


class Scale(msgspec.Struct, frozen=True):
    """The sizes of the benchmark. `dialogues`: number per caller, in the measured part."""

    dialogues: int
    peer_dialogues: int
    singles: int
    sessions: int


QUICK: Final = Scale(dialogues=2, peer_dialogues=1, singles=40, sessions=10)
FULL: Final = Scale(dialogues=20, peer_dialogues=5, singles=400, sessions=200)


# ---------------------------------------------------------------- the measured process


@asynccontextmanager
async def serve_sessions(folder: str, engine_url: str, sessions: int) -> AsyncIterator[str]:
    """Serve the gateways of `sessions` rollouts, by their numbers, at one port; yield its URL.

    Without `engine_url` the engine is a script in this process. With `WIRE`, the API has no dialogue behind it.
    """
    chat = await trio.to_thread.run_sync(ChatFormat.load, Path(folder))
    backends, table = Backends(made_by(VllmClient)), GatewayTable()
    ids = [*chat.codec.encode(TURN_TEXT), chat.end_of_turn_id]
    engine: Any = backends if engine_url.startswith("http") else ScriptedEngine(lambda _: ids)
    if engine is backends:
        await backends.add(engine_url)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(backends.aclose)
        for number in range(sessions):
            gateway: Any = SaysTheSame()
            if engine_url != WIRE:
                gateway = await stack.enter_async_context(open_gateway(new_context(chat, engine, str(number))))
            table.add(str(number), gateway, SECRET)
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery = await stack.enter_async_context(open_single_nursery())
        nursery.start_soon(serve_gateway, GatewayApp(table, "policy", table.tally), listener, ListenConfig())
        gc.freeze()
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel("measured")


class SaysTheSame:
    """A replacement of a gateway: a dialogue without tokens."""

    async def ask(self, question: Question) -> Answer:
        await trio.lowlevel.checkpoint()
        used = len(question.messages)
        key, text = f"t{used}", TURN_TEXT
        return Answer(
            key=key, text=text, reasoning="", calls=[], finish_reason="stop", prompt_tokens=used, completion_tokens=9
        )


@asynccontextmanager
async def hold_sessions(folder: str) -> AsyncIterator[list[float]]:
    """Hold dialogues in `OPEN_SESSIONS` rollouts at once. Yield MiB beyond their tokens, at each half of their turns.

    All clients send and share the same messages, which are not counted.
    """
    chat = await trio.to_thread.run_sync(ChatFormat.load, Path(folder))
    engine = ScriptedEngine(lambda text: [*chat.codec.encode(text), chat.end_of_turn_id])
    history = [Said("system", "You are a careful software engineer."), Said("user", "Look at this.")]
    used: list[float] = []
    async with AsyncExitStack() as stack:
        before = _rss_bytes()
        contexts = [new_context(chat, engine, str(number)) for number in range(OPEN_SESSIONS)]
        gateways = [await stack.enter_async_context(open_gateway(context)) for context in contexts]
        for turn in range(1, OPEN_TURNS + 1):
            for gateway in gateways:
                answer = await gateway.ask(Question(messages=history))
            history = [*history, Said("assistant", answer.text), Said("user", f"And now at number {turn}.")]
            if turn % (OPEN_TURNS // 2) == 0:
                gc.collect()
                tokens = sum(len(context.conversation) for context in contexts if context.conversation is not None)
                used.append((_rss_bytes() - before - BYTES_PER_TOKEN * tokens) / MIB)
        yield used


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------- callers


class Caller:
    """A program with its own session."""

    def __init__(self, http: HttpClient, prefix: str, opening: str) -> None:
        self._http, self._path, self._opening = http, f"{prefix}/v1/chat/completions", opening
        self._dialogues = 0
        self.begin()

    def begin(self) -> None:
        self._dialogues += 1
        self._messages = [{"role": "user", "content": f"Task {self._dialogues}. {self._opening}"}]

    async def ask(self) -> None:
        body = msgspec.json.encode({"model": "m", "messages": self._messages})
        response = await self._http.request("POST", self._path, body=body, headers=HEADERS, timeout_s=CALL_TIMEOUT_S)
        if response.status != 200:
            raise PeerUnavailable(f"{self._path} was answered with {response.status}: {response.body[:200]!r}")
        self._messages.append(msgspec.json.decode(response.body)["choices"][0]["message"])
        self._messages.append({"role": "user", "content": f"And now at number {len(self._messages)}."})


async def call_rate(
    http: HttpClient, child: Child, first: int, opening: str, dialogues: int, prefix: str = "/s/{}"
) -> dict[str, float]:
    """Hold dialogues in `CALLERS` sessions from number `first` on, after an uncounted dialogue in each."""
    callers = [Caller(http, prefix.format(first + number), opening) for number in range(CALLERS)]

    async def work(caller: Caller, times: int) -> None:
        for _ in range(times):
            for _ in range(TURNS):
                await caller.ask()
            caller.begin()

    for times in (1, dialogues):
        cpu_s, started_s = child.cpu_s(), time.perf_counter()
        async with open_single_nursery() as nursery:
            for caller in callers:
                nursery.start_soon(work, caller, times)
    calls = CALLERS * TURNS * dialogues
    cpu_s, wall_s = child.cpu_s() - cpu_s, time.perf_counter() - started_s
    return {"calls_per_cpu_s": calls / cpu_s, "cpu_ms": 1e3 * cpu_s / calls, "calls_per_s": calls / wall_s}


async def latencies(http: HttpClient, engine_url: str, session: int, rounds: int) -> list[Any]:
    """Time single calls: through the gateway, and to the engine alone."""
    caller, turns = Caller(http, f"/s/{session}", "Look."), iter(range(10**9))
    engine = HttpClient(engine_url)
    body = msgspec.json.encode(
        {"model": "fake-model", "prompt": [65] * 100, "max_tokens": 200, "logprobs": 0, "return_token_ids": True}
    )

    async def through() -> None:
        if next(turns) % TURNS == 0:
            caller.begin()
        await caller.ask()

    async def straight() -> None:
        headers = HEADERS[:1]
        await engine.request("POST", "/v1/completions", body=body, headers=headers, timeout_s=CALL_TIMEOUT_S)

    cases = [
        Case(name="latency.gateway", run=through, floor="latency.engine"),
        Case(name="latency.engine", run=straight),
    ]
    try:
        return await measure_interleaved(cases, rounds=rounds, warm_up_rounds=5)
    finally:
        engine.close()


# ---------------------------------------------------------------- the benchmark


async def benchmark(options: Options) -> Report:
    """Run all measurements."""
    scale = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="perf-gateway-") as name:
        folder = Path(name)
        model = write_family_model(folder / "model", "qwen2.5")
        chat = await trio.to_thread.run_sync(ChatFormat.load, model)
        tell("programs at the gateway")
        metrics, series, engine_notes = await _served(folder, chat, scale)
        tell(f"{OPEN_SESSIONS} open sessions")
        async with open_child(hold_sessions, str(model), ready=list[float], timeout_s=600) as (_, used):
            half, whole = used
        metrics |= {"memory.sessions_mib": whole, "memory.growth": whole / half}
        tell("tokens, by our gateway and by the rules of others")
        found = await scores(chat, scale.sessions, requests=30)
    metrics |= {f"tokens.{who}.{what}": float(value) for who, each in found.items() for what, value in _named(each)}
    return Report(
        title="The gateway",
        series=series,
        more_metrics={name: value for name, value in metrics.items() if not name.startswith("tokens.")},
        detail_metrics={name: value for name, value in metrics.items() if name.startswith("tokens.")},
        at_least=AT_LEAST,
        at_most=AT_MOST,
        tables=[_table(found)],
        figures=_figures(metrics),
        notes=[*caption_of("gateway"), *engine_notes],
    )


async def _served(folder: Path, chat: ChatFormat, scale: Scale) -> tuple[dict[str, float], list[Any], list[str]]:
    """Return rates and latencies, and a note if the peer was skipped."""
    metrics: dict[str, float] = {}
    model, series = str(folder / "model"), list[Any]()
    openings = {"short": "Look.", "document": document(chat)}
    async with open_child(serve_engine, model, ready=str) as (_, engine):
        for kind, engine_url in (("wire", WIRE), ("scripted", ""), ("http", engine)):
            sessions = 2 * CALLERS + 1
            async with open_child(serve_sessions, model, engine_url, sessions, ready=str) as (child, url):
                http = HttpClient(url, limits=HttpLimits(max_connections=CALLERS))
                try:
                    for number, (name, opening) in enumerate(openings.items()):
                        rates = await call_rate(http, child, number * CALLERS, opening, scale.dialogues)
                        metrics |= {f"{kind}.{name}.{what}": value for what, value in rates.items()}
                    if kind == "http":
                        series = await latencies(http, engine, 2 * CALLERS, scale.singles)
                        metrics["memory.process_mib"] = child.rss_bytes() / MIB
                finally:
                    http.close()
        through, straight = (each.percentile(50) for each in series)
        metrics["latency.added_p50_ms"] = through - straight
        notes = []
        for name, peer, prefix in (
            ("rllm", open_rllm, "/sessions/{}"),
            ("lightning", open_lightning, "/rollout/r{}/attempt/a"),
        ):
            tell(f"the same dialogues through {name}")
            try:
                async with peer(engine, folder) as (url, child):
                    metrics |= await _through_peer(name, url, child, prefix, openings, scale)
            except PeerUnavailable as exc:
                notes.append(f"{name} is left out: {exc}")
    return metrics, series, notes


async def _through_peer(
    name: str, url: str, child: Child, prefix: str, openings: dict[str, str], scale: Scale
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    http = HttpClient(url, limits=HttpLimits(max_connections=CALLERS))
    try:
        for number, (kind, opening) in enumerate(openings.items()):
            rates = await call_rate(http, child, number * CALLERS, opening, scale.peer_dialogues, prefix)
            metrics |= {f"{name}.{kind}.{what}": value for what, value in rates.items()}
    finally:
        http.close()
    return metrics


@asynccontextmanager
async def open_lightning(engine_url: str, folder: Path) -> AsyncIterator[tuple[str, Child]]:
    """Serve agentlightning's proxy in front of the engine. It ends with the block.

    Raises:
        PeerUnavailable: it is not installed, or does not become ready.
    """
    port = free_port()
    url, script = f"http://127.0.0.1:{port}", Path(__file__).parent / "peers" / "lightning.py"
    async with open_peer_server(
        PEERS["lightning"],
        [str(script), str(port), engine_url],
        url=url,
        folder=folder,
        health="/health/liveliness",
        variables={"LITELLM_MASTER_KEY": SECRET},
    ) as process:
        yield url, Child(process)


class ChatEngine(FakeEngine):
    """A fake engine that also answers Chat Completions, with the same turn to everything, in vLLM's format."""

    async def _answer(self, call: HttpCall) -> HttpAnswer:
        if call.path != "/v1/chat/completions":
            return await super()._answer(call)
        await trio.lowlevel.checkpoint()
        return HttpAnswer(200, CHAT_ANSWER)


@asynccontextmanager
async def serve_engine(folder: str) -> AsyncIterator[str]:
    """Serve a fake engine of that model with a constant answer."""
    chat = await trio.to_thread.run_sync(ChatFormat.load, Path(folder))
    ids = [*chat.codec.encode(TURN_TEXT), chat.end_of_turn_id]
    config = FakeEngineConfig(
        vocab_size=chat.vocab_size, end_of_turn_id=chat.end_of_turn_id, max_model_len=MAX_MODEL_LEN
    )
    async with open_look_alike(ChatEngine, lambda _: (ids, [-0.5] * len(ids), "stop"), config, 0) as engine:
        yield engine.url


def document(chat: ChatFormat) -> str:
    """Return a text of `DOCUMENT_TOKENS` tokens."""
    words = (
        "The parser reads a line of the file and returns its value, or None where a test has failed in src/lexer.py. "
    )
    each = len(chat.codec.encode(words))
    return words * (DOCUMENT_TOKENS // each)


def _named(found: Score) -> list[tuple[str, int]]:
    return list(zip(found._fields, found, strict=True))


def _table(found: dict[str, Score]) -> Rows:
    rows = [[who, *(f"{value:,}" for value in each)] for who, each in found.items()]
    headings = ["rule", "sampled tokens", "trained in a false context", "lost", "trained twice", "rows"]
    return Rows(title="Tokens of sessions with edited histories", headings=headings, rows=rows)


def _figures(metrics: dict[str, float]) -> list[Bars | Lines]:
    kinds = [(kind, name) for kind in ("wire", "scripted", "http") for name in ("short", "document")]
    bars = [
        Bar(label=f"ours, {kind} engine, {name}", value=metrics[f"{kind}.{name}.calls_per_cpu_s"])
        for kind, name in kinds
    ]
    bars += [
        Bar(label=f"{peer}, {name}", value=metrics[f"{peer}.{name}.calls_per_cpu_s"], role="peer")
        for peer in ("rllm", "lightning")
        for name in ("short", "document")
        if f"{peer}.{name}.calls_per_cpu_s" in metrics
    ]
    return [Bars(title="Calls of programs in a second of a core", unit="calls", bars=bars)]


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark))
