"""A vLLM look-alike for tests: a real HTTP server on loopback, with scripted tokens, latency and faults.

It offers the endpoints that `VllmClient` uses, and aborts a completion when its client disconnects, as vLLM does. It
passes the same contract suite as the real server.

Example:
    async with open_fake_engine(script=lambda prompt: ([17, 2], [-0.1, -0.2], "stop")) as engine:
        client = VllmClient(engine.url)
        await client.probe(timeout_s=5)
"""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import trio
from tokenizers import Tokenizer

from prorl_ipc.nursery import single_exception
from prorl_trio.testing.fake_answers import (
    DONE,
    Fault,
    completion_answer,
    completion_event,
    error_answer,
    error_body,
    sse,
    usage_event,
)
from prorl_trio.testing.fake_http import Answer, HttpCall, Send, serve_http
from prorl_trio.testing.fake_sampling import FakeRequest, Sampled, Script, default_script, sample, short_instance

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from prorl_trio.types.models import FinishReason

MAX_CONNECTIONS = 4096
TOKENIZER_CALLS = (("POST", "/tokenize"), ("POST", "/detokenize"))


class FakeEngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The server's description of itself, and its times: `first_token_s`, then `per_token_s` for each further token.

    `development`: it supports pauses, new weights and names for weights, like vLLM in development mode. `adapters`: it
    supports LoRA adapters. `tokenizer_file`: the `tokenizer.json` of its model; empty: the server does not expose its
    tokenizer. With a tokenizer and without a script, completions obey the required grammar; a custom script must do
    that itself. A stream has `tokens_per_event` in each event: a real engine's has more if its client or its core is
    slow.
    """

    model: str = "fake-model"
    max_model_len: int = 2048
    vocab_size: int = 1000
    end_of_turn_id: int = 2
    version: str = "0.0.fake"
    policy_version: str = "0"
    first_token_s: float = 0.0
    per_token_s: float = 0.0
    tokens_per_event: int = 1
    development: bool = False
    adapters: bool = False
    tokenizer_file: str = ""


class FakeEngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of completions, faults and connections.

    They are the running completions, their maximum, the finished completions, and the aborted ones among these; the
    injected faults; and the open connections.
    """

    running: int
    running_peak: int
    completions_total: int
    aborted_total: int
    faults_total: int
    connections: int


_Fake = TypeVar("_Fake", bound="FakeEngine")


class FakeEngine:
    """The running server. Created by `open_fake_engine`.

    Attributes:
        paused: the mode of the current pause, or None. Requests are held during a pause; with `abort` it answers
            running ones with their tokens so far.
        weights: the folder of the current weights; empty after a failed load.
        bad_folders: folders that fail to load.
        weight_version: the last name given to the weights.
        adapters: folders of the loaded LoRA adapters, by name.
    """

    paused: str | None = None
    weight_version: str = ""

    def __init__(self, url: str, config: FakeEngineConfig, script: Script | None) -> None:
        self.url = url
        self.config = config
        self.weights = config.model
        self.bad_folders: set[str] = set()
        self.adapters: dict[str, str] = {}
        self.requests: deque[FakeRequest] = deque(maxlen=1000)
        """The latest completion requests, oldest first."""
        self.request_ids: deque[str] = deque(maxlen=1000)
        """Their `X-Request-Id` headers."""
        self.script_error: BaseException | None = None
        """The script's exception, which has ended the server."""
        self._fallback = default_script(config.vocab_size, config.end_of_turn_id)
        self._script = script or self._fallback
        self._faults: deque[Fault] = deque()
        self._gate = trio.Event()
        self._gate.set()
        self._sampling: set[trio.CancelScope] = set()
        self._abort_rounds = 0
        self._changed = trio.lowlevel.ParkingLot()
        self._connections = 0
        self._running = 0
        self._running_peak = 0
        self._completions_total = 0
        self._aborted_total = 0
        self._faults_total = 0

    @property
    def stats(self) -> FakeEngineStatistics:
        return FakeEngineStatistics(
            running=self._running,
            running_peak=self._running_peak,
            completions_total=self._completions_total,
            aborted_total=self._aborted_total,
            faults_total=self._faults_total,
            connections=self._connections,
        )

    def inject(self, fault: Fault, times: int = 1) -> None:
        """Inject `fault` into the next `times` completions without a fault; faults are used in order of injection."""
        self._faults.extend([fault] * times)

    def hold(self) -> None:
        """Answer no completion until `release`; completions keep running."""
        if self._gate.is_set():
            self._gate = trio.Event()

    def release(self) -> None:
        """End `hold`."""
        self._gate.set()

    def begin_pause(self, mode: str) -> None:
        """Pause, as the API does."""
        self.paused = mode
        if mode == "abort":
            self.abort_all()
        self.hold()

    def end_pause(self) -> None:
        """Resume, as the API does."""
        self.paused = None
        self.release()

    def abort_all(self) -> None:
        """End all running completions with their tokens so far and finish reason `abort`."""
        self._abort_rounds += 1
        for scope in self._sampling:
            scope.cancel()

    async def wait_until(self, condition: Callable[[FakeEngineStatistics], bool]) -> FakeEngineStatistics:
        """Return the first statistics that fulfil `condition`, checked after every change. Waits without limit."""
        await trio.lowlevel.checkpoint()
        while not condition(self.stats):
            await self._changed.park()
        return self.stats

    # ------------------------------------------------------------ serving

    async def serve_connection(self, stream: trio.SocketStream) -> None:
        """Serve one client. Clients beyond `MAX_CONNECTIONS` are rejected."""
        if self._connections >= MAX_CONNECTIONS:
            await stream.aclose()
            return
        self._connections += 1
        try:
            await serve_http(stream, self._answer)
        finally:
            self._connections -= 1
            self._changed.unpark_all()

    async def _answer(self, call: HttpCall) -> Answer:
        if (call.method, call.path) == ("POST", "/v1/completions"):
            return await self._complete(call)
        await trio.lowlevel.checkpoint()
        if call.path == "/inference/v1/generate":  # like vLLM without --enable-scale-out
            return error_answer(403, "Scale-out endpoints are disabled.")
        config = self.config
        card = {"id": config.model, "object": "model", "root": config.model, "max_model_len": config.max_model_len}
        bodies: dict[tuple[str, str], Any] = {
            ("GET", "/health"): {},
            ("GET", "/version"): {"version": config.version},
            ("GET", "/v1/models"): {"object": "list", "data": [card]},
            ("GET", "/weight_info"): {"weight_version": self.weight_version or config.policy_version},
        }
        if config.development:
            bodies["GET", "/is_paused"] = {"is_paused": self.paused is not None}
        if (call.method, call.path) in bodies:
            return Answer(200, msgspec.json.encode(bodies[call.method, call.path]))
        if (call.method, call.path) == ("GET", "/metrics"):
            metrics = f'vllm:num_requests_running{{engine="0"}} {self._running}.0\nvllm:num_requests_waiting 0.0\n'
            return Answer(200, metrics.encode(), "text/plain")
        if (call.method, call.path) in TOKENIZER_CALLS and config.tokenizer_file:
            return self._tokenizer_answer(call, "prompt")
        if config.adapters and call.path.endswith("load_lora_adapter"):
            return self._change_adapters(call)
        if config.development and call.method == "POST":
            return self._develop(*call.path.partition("?mode=")[::2], call.body)
        return error_answer(404, "Not Found")

    def _tokenizer_answer(self, call: HttpCall, text_field: str) -> Answer:
        """Answer `/tokenize`, or `/detokenize` with the text in `text_field`."""
        asked = msgspec.json.decode(call.body)
        tokenizer = Tokenizer.from_file(self.config.tokenizer_file)
        if call.path == "/tokenize":
            ids = tokenizer.encode(asked["prompt"], add_special_tokens=asked.get("add_special_tokens", True)).ids
            return Answer(200, msgspec.json.encode({"tokens": ids, "count": len(ids)}))
        text = tokenizer.decode(asked["tokens"], skip_special_tokens=False)
        return Answer(200, msgspec.json.encode({text_field: text}))

    def _change_adapters(self, call: HttpCall) -> Answer:
        if call.method != "POST":
            return error_answer(405, "Method Not Allowed")
        told = msgspec.json.decode(call.body)
        name = told["lora_name"]
        if call.path.endswith("unload_lora_adapter"):
            if self.adapters.pop(name, None) is None:
                return error_answer(404, f"The lora adapter '{name}' cannot be found.")
        elif name in self.adapters:
            return error_answer(400, f"The lora adapter '{name}' has already been loaded.")
        elif told["lora_path"] in self.bad_folders:
            return error_answer(404, f"No adapter found for {told['lora_path']}")
        else:
            self.adapters[name] = told["lora_path"]
        return Answer(200, b"done", "text/plain")

    def _develop(self, path: str, mode: str, body: bytes) -> Answer:
        """Answer calls offered only in development mode. A pause does not wait for running completions."""
        told = msgspec.json.decode(body) if body else {}
        match path:
            case "/pause":
                self.begin_pause(mode)
            case "/resume":
                self.end_pause()
            case "/update_weight_version":
                self.weight_version = told["new_version"]
            case "/collective_rpc":
                folder = told["kwargs"]["weights_path"]
                self.weights = "" if folder in self.bad_folders else folder
                if not self.weights:
                    return error_answer(500, f"no weights could be loaded from {folder}")
            case "/reset_prefix_cache":
                pass
            case _:
                return error_answer(404, "Not Found")
        return Answer(200, b"{}")

    async def _complete(self, call: HttpCall) -> Answer:
        await trio.lowlevel.checkpoint()
        try:
            request = msgspec.json.decode(call.body, type=FakeRequest)
        except msgspec.MsgspecError as exc:
            return error_answer(400, str(exc))
        self.requests.append(request)
        self.request_ids.append(call.headers.get("x-request-id", ""))
        if (refusal := self._refusal(request)) is not None:
            return refusal
        fault = self._faults.popleft() if self._faults else None
        self._faults_total += fault is not None
        if request.stream and fault not in ("hang", "server_error", "reset_before_headers"):
            return Answer(200, b"", "text/event-stream", stream=partial(self._stream, request, fault))
        with self._one_running():
            if fault == "hang":
                await trio.sleep_forever()
            if fault == "server_error":
                return error_answer(500, "Internal server error")
            return completion_answer(request, await self._take_time(self._run_script(request)), fault)

    def _refusal(self, request: FakeRequest) -> Answer | None:
        config = self.config
        if request.model != config.model and request.model not in self.adapters:
            return error_answer(404, f"The model `{request.model}` does not exist.")
        if not request.prompt:
            return error_answer(400, "Either prompt or prompt_embeds must be provided and non-empty.")
        if request.structured_outputs is not None:
            try:
                short_instance(msgspec.json.decode(request.structured_outputs.structural_tag)["format"])
            except LookupError as exc:
                return error_answer(400, f"Invalid grammar specification: {exc}")
        if len(request.prompt) >= config.max_model_len:
            return error_answer(
                400,
                f"This model's maximum context length is {config.max_model_len} tokens. However, your prompt contains "
                f"{len(request.prompt)} input tokens. Please reduce the length of the input prompt.",
            )
        return None

    @contextmanager
    def _one_running(self) -> Iterator[None]:
        """Count a completion; an exception that leaves the block marks it as aborted."""
        self._running += 1
        self._running_peak = max(self._running_peak, self._running)
        self._changed.unpark_all()
        whole = False
        try:
            yield
            whole = True
        finally:
            self._running -= 1
            self._completions_total += 1
            self._aborted_total += not whole
            self._changed.unpark_all()

    async def _stream(self, request: FakeRequest, fault: Fault | None, send: Send) -> bool:
        """Send a completion as it is sampled; return True if the connection must break in the middle."""
        with self._one_running():
            sampled, step, abort_rounds = self._run_script(request), self.config.tokens_per_event, self._abort_rounds
            for start in range(0, len(sampled.token_ids), step):
                if start >= len(sampled.token_ids) // 2:
                    if fault == "reset_after_headers":
                        return True
                    if fault == "engine_error":
                        await send(sse(error_body(500, "the engine died")))
                        return False
                end = min(start + step, len(sampled.token_ids))
                piece = await self._take_time(Sampled(sampled.token_ids[start:end], [], "stop"), first=not start)
                if self._abort_rounds != abort_rounds:
                    end = start + (len(piece.token_ids) if piece.finish_reason == "abort" else 0)
                    sampled = Sampled(sampled.token_ids[:end], sampled.logprobs[:end], "abort")
                event = self._event(request, sampled, start, end, fault)
                await send(event * (2 if fault == "repeated_event" and start == step else 1))
                if sampled.finish_reason == "abort":
                    break
            if fault != "no_done":
                await send(self._last_event(request, sampled, fault) + DONE)
            return False

    def _event(self, request: FakeRequest, sampled: Sampled, start: int, end: int, fault: Fault | None) -> bytes:
        return completion_event(request, sampled, start, end, fault)

    def _last_event(self, request: FakeRequest, sampled: Sampled, fault: Fault | None) -> bytes:
        return usage_event(request, sampled, fault)

    def _run_script(self, request: FakeRequest) -> Sampled:
        room = self.config.max_model_len - len(request.prompt)
        request = msgspec.structs.replace(request, max_tokens=min(request.max_tokens, room))
        script = self._script
        if script is self._fallback and request.structured_outputs is not None and self.config.tokenizer_file:
            script = partial(self._in_form, request.structured_outputs.structural_tag)
        try:
            return sample(request, script, self._fallback)
        except BaseException as exc:
            self.script_error = exc
            raise

    def _in_form(self, structural_tag: str, _prompt: list[int]) -> tuple[list[int], list[float], FinishReason]:
        text = short_instance(msgspec.json.decode(structural_tag)["format"])
        ids = Tokenizer.from_file(self.config.tokenizer_file).encode(text, add_special_tokens=False).ids
        ids.append(self.config.end_of_turn_id)
        return ids, [-0.5] * len(ids), "stop"

    async def _take_time(self, sampled: Sampled, *, first: bool = True) -> Sampled:
        """Return the sample after its simulated time, or at `abort_all`.

        `first`: it contains the first token.
        """
        per_token_s = self.config.per_token_s
        begin_s = self.config.first_token_s if first else per_token_s
        started_s = trio.current_time()
        with trio.CancelScope() as scope:
            self._sampling.add(scope)
            try:
                await self._gate.wait()
                await trio.sleep(begin_s + per_token_s * (len(sampled.token_ids) - 1))
            finally:
                self._sampling.discard(scope)
        if not scope.cancelled_caught:
            return sampled
        late_s = trio.current_time() - started_s - begin_s
        count = 0 if late_s < 0 or not per_token_s else 1 + int(late_s / per_token_s)
        return Sampled(sampled.token_ids[:count], sampled.logprobs[:count], "abort")


@asynccontextmanager
async def open_fake_engine(
    *,
    script: Script | None = None,
    config: FakeEngineConfig | None = None,
    port: int = 0,
) -> AsyncIterator[FakeEngine]:
    """Serve on 127.0.0.1 for the duration of the block; then every connection is closed at once.

    Args:
        script: returns the sampled tokens; by default see `default_script`. Its exceptions end the block as the test's
            error.
        config: the server's description of itself.
        port: 0 chooses a free port.
    """
    async with open_look_alike(FakeEngine, script, config, port) as engine:
        yield engine


@asynccontextmanager
async def open_look_alike(
    kind: type[_Fake], script: Script | None, config: FakeEngineConfig | None, port: int
) -> AsyncIterator[_Fake]:
    """Serve a look-alike of another server. See `open_fake_engine`."""
    listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")
    address = listeners[0].socket.getsockname()
    engine = kind(f"http://127.0.0.1:{address[1]}", config or FakeEngineConfig(), script)
    try:
        with single_exception():
            async with trio.open_nursery() as nursery:
                await nursery.start(trio.serve_listeners, engine.serve_connection, listeners)
                yield engine
                nursery.cancel_scope.cancel()
    finally:
        if engine.script_error is not None:  # the root cause of any other error
            raise engine.script_error from None
