"""A Tinker look-alike for tests: the fake engine behind the sampling part of the Tinker API, in JSON and protobuf.

Example:
    async with open_fake_tinker() as server:
        client = TinkerClient(server.url)
        await client.probe(timeout_s=5)
"""

from __future__ import annotations

from array import array
from collections import deque
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.testing.fake_engine import FakeEngine, FakeEngineConfig, open_look_alike
from prorl_trio.testing.fake_http import Answer, HttpCall

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.testing.fake_sampling import Script

PROTO = "application/x-protobuf"
_STOP_REASONS = {"stop": 0, "length": 1}


class FakeFuture:
    """A sample that runs, or its result: an answer with a JSON body."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.answer: Answer | None = None


class FakeTinker(FakeEngine):
    """The running server. Sampling, holding and counting come from the fake engine.

    Attributes:
        api_key: required in each request; empty: none.
        poll_s: a poll is answered after this time, by status 408 or (`asks_again`) a request to poll again.
        speaks_proto: results are protobuf, if the client accepts that.
        tells_logprobs: results have log-probabilities.
        busy: the number of samples to reject with status 429.
        losing: the number of futures to lose, when their results are requested.
        checkpoints: the weights that were saved for sampling, as paths.
        sampled_from: the weights of the latest samples; the base model's name for its own.
        cancelled: ids of the futures that a client has cancelled.
        sessions, samplers: the sessions, and the weights of each sampling session.
        polled: set at the next poll that ends without a result, and then replaced.
    """

    api_key: str = ""
    poll_s: float = 30.0
    asks_again: bool = False
    speaks_proto: bool = True
    tells_logprobs: bool = True
    busy: int = 0
    losing: int = 0
    nursery: trio.Nursery

    def __init__(self, url: str, config: FakeEngineConfig, script: Script | None) -> None:
        super().__init__(url, config, script)
        self.checkpoints: set[str] = set()
        self.sampled_from: deque[str] = deque(maxlen=1000)
        self.cancelled: list[str] = []
        self.sessions: set[str] = set()
        self.samplers: dict[str, str] = {}
        self.polled = trio.Event()
        self._futures: dict[str, FakeFuture] = {}
        self._by_seq_id: dict[tuple[str, int], str] = {}
        self._numbers = count()

    def restart(self) -> None:
        """Forget all sessions, sampling sessions and futures, as a restarted server does. Checkpoints stay."""
        for future in self._futures.values():
            future.scope.cancel()
        for known in (self.sessions, self.samplers, self._futures, self._by_seq_id):
            known.clear()

    async def _answer(self, call: HttpCall) -> Answer:
        await trio.lowlevel.checkpoint()
        if self.api_key and call.headers.get("x-api-key") != self.api_key:
            return Answer(401, b'{"detail":"Invalid API key"}')
        if call.path == "/api/v1/get_server_capabilities":
            card = {"model_name": self.config.model, "max_context_length": self.config.max_model_len or None}
            return _json({"supported_models": [card]})
        asked = msgspec.json.decode(call.body) if call.headers.get("content-type") == "application/json" else {}
        match call.method, call.path.removeprefix("/api/v1/"):
            case "POST", "create_session":
                self.sessions.add(session := f"session-{next(self._numbers)}")
                return _json({"type": "create_session", "session_id": session})
            case "POST", "session_heartbeat":
                if asked["session_id"] not in self.sessions:
                    return _error(404, "Session not found")
                return _json({"type": "session_heartbeat"})
            case "POST", "create_sampling_session":
                if asked["session_id"] not in self.sessions:
                    return _error(404, "Session not found")
                self.samplers[sampler := f"sampler-{next(self._numbers)}"] = (
                    asked.get("model_path") or asked["base_model"]
                )
                return _json({"type": "create_sampling_session", "sampling_session_id": sampler})
            case "POST", "asample":
                return self._begin(asked, call)
            case "POST", "retrieve_future":
                return await self._retrieve(asked["request_id"], call)
            case "POST", "cancel_future":
                if (future := self._futures.get(asked["request_id"])) is not None:
                    self.cancelled.append(asked["request_id"])
                    future.scope.cancel()
                return _json({"status": "ok"})
        return _error(404, "Not Found")

    def _begin(self, asked: dict[str, Any], call: HttpCall) -> Answer:
        """Begin a sample, unless the server is busy. A repeated request gets the future that it already has."""
        if self.busy:
            self.busy -= 1
            return _error(429, "Too many samples in flight")
        weights = self.samplers.get(asked["sampling_session_id"])
        if weights is None or (weights != self.config.model and weights not in self.checkpoints):
            return _error(404, "Sampling session or checkpoint not found")
        key = (asked["sampling_session_id"], asked["seq_id"])
        if key not in self._by_seq_id:
            self._by_seq_id[key] = str(next(self._numbers))
            self._futures[self._by_seq_id[key]] = future = FakeFuture()
            self.sampled_from.append(weights)
            self.nursery.start_soon(self._sample, asked, call, future)
        request_id = self._by_seq_id[key]
        return _json({"request_id": request_id, "sample_sequence_ids": [f"{request_id}-0"]})

    async def _sample(self, asked: dict[str, Any], call: HttpCall, future: FakeFuture) -> None:
        sampling = asked["sampling_params"]
        stop = sampling["stop"]
        body = {
            "model": self.config.model,
            "prompt": [token for chunk in asked["prompt"]["chunks"] for token in chunk["tokens"]],
            "max_tokens": sampling["max_tokens"],
            "stop_token_ids": stop or [],
            "ignore_eos": stop == [],
            "return_token_ids": True,
            "logprobs": 0,
        }
        with future.scope:
            as_vllm = HttpCall("POST", "/v1/completions", call.headers, msgspec.json.encode(body))
            answer = await self._complete(as_vllm)
            future.answer = msgspec.structs.replace(answer, body=self._result(answer.body))
        future.ended.set()

    def _result(self, body: bytes) -> bytes:
        try:
            completion = msgspec.json.decode(body)
        except msgspec.DecodeError:  # an injected fault
            return body
        if "error" in completion:
            code, message = completion["error"]["code"], completion["error"]["message"]
            return msgspec.json.encode({"error": message, "category": "server" if code >= 500 else "user"})
        choice = completion["choices"][0]
        sequence = {"stop_reason": choice["finish_reason"], "tokens": choice["token_ids"]}
        if choice["logprobs"] is not None and self.tells_logprobs:
            sequence["logprobs"] = choice["logprobs"]["token_logprobs"]
        return msgspec.json.encode({"type": "sample", "sequences": [sequence]})

    async def _retrieve(self, request_id: str, call: HttpCall) -> Answer:
        future = self._futures.get(request_id)
        if future is not None and self.losing:
            self.losing -= 1
            self._futures.pop(request_id).scope.cancel()
            future = None
        if future is None:
            return _error(410, "unknown or expired request")
        with trio.move_on_after(self.poll_s):
            await future.ended.wait()
        if future.answer is None:
            self.polled.set()
            self.polled = trio.Event()
            if future.scope.cancel_called:
                return _json({"error": "the request was cancelled", "category": "server"})
            if self.asks_again:
                return _json({"type": "try_again", "request_id": request_id, "queue_state": "active"})
            return _error(408, "Timeout waiting for result")
        answer = msgspec.structs.replace(future.answer, status=200)
        if PROTO not in call.headers.get("accept", "") or not self.speaks_proto:
            return answer
        try:
            sequence = msgspec.json.decode(answer.body)["sequences"][0]
            return msgspec.structs.replace(answer, body=sample_message(sequence), content_type=PROTO)
        except (msgspec.DecodeError, KeyError, TypeError):  # a failure, or an injected fault
            return answer


def sample_message(sequence: dict[str, Any]) -> bytes:
    """Return a protobuf `SampleResponse` with one sequence. Raises TypeError for numbers that it cannot hold."""
    fields = bytes((1 << 3, _STOP_REASONS.get(sequence["stop_reason"], 7)))
    fields += message_field(2, array("i", sequence["tokens"]).tobytes())
    if "logprobs" in sequence:
        fields += message_field(3, array("f", sequence["logprobs"]).tobytes())
    return message_field(1, fields)


def message_field(number: int, value: bytes) -> bytes:
    """Return a field of a protobuf message that holds bytes, text or another message."""
    key, length, encoded = number << 3 | 2, len(value), bytearray()
    while length >= 0x80:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes((key, *encoded, length)) + value


def _json(content: object) -> Answer:
    return Answer(200, msgspec.json.encode(content))


def _error(status: int, detail: str) -> Answer:
    return Answer(status, msgspec.json.encode({"detail": detail}))


@asynccontextmanager
async def open_fake_tinker(
    *, script: Script | None = None, config: FakeEngineConfig | None = None, kind: type[FakeTinker] = FakeTinker
) -> AsyncIterator[FakeTinker]:
    """Serve a fake Tinker server. See `open_look_alike`. `max_model_len` 0: it does not report its context length."""
    async with open_look_alike(kind, script, config, port=0) as server, open_single_nursery() as server.nursery:
        yield server
        server.nursery.cancel_scope.cancel()
