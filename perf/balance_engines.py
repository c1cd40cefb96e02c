"""Simulated engines behind vLLM's `/v1/completions`, in a process of their own, for a router to place calls on.

    python -m perf.balance_engines COUNT MODEL

MODEL is an `EngineModel` as JSON. A prompt is known again by its first token: prompts of two rollouts must not share
it. Ends with its standard input.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

import msgspec
import trio

from ipc.nursery import open_single_nursery
from perf.children import raise_file_limit, say_ready
from prorl_trio.inference.engines.protocol import CompletionRequest
from prorl_trio.simulation.config import EngineModel
from prorl_trio.simulation.engine import SimulatedEngine
from prorl_trio.testing.fake_http import Answer, HttpCall, serve_http
from prorl_trio.types.models import SamplingParams

__all__ = ["CompletionCall", "EngineTotals", "EngineUrls"]

SAMPLING: Final = SamplingParams()
CALL_TIMEOUT_S: Final = 3600.0


class EngineUrls(msgspec.Struct, frozen=True):
    """The URLs of the engines."""

    urls: list[str]


class EngineTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one engine since its start: `GET /totals`."""

    completions: int
    tokens_sampled: int
    prompt_tokens: int
    prefix_hits_tokens: int


class CompletionCall(msgspec.Struct, frozen=True):
    """`POST /v1/completions`."""

    model: str
    prompt: list[int]
    max_tokens: int


async def _main(count: int, model: EngineModel) -> None:
    raise_file_limit()
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(open_single_nursery())
        urls = []
        for number in range(count):
            engine = await stack.enter_async_context(
                SimulatedEngine(f"engine {number}", model, failure_rate=0.0, seed=str(number)).open()
            )
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            handle = partial(_answer, engine)
            nursery.start_soon(trio.serve_listeners, partial(serve_http, handle=handle), listeners)
            urls.append(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}")
        say_ready(EngineUrls(urls))
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


async def _answer(engine: SimulatedEngine, call: HttpCall) -> Answer:
    await trio.lowlevel.checkpoint()
    match call.method, call.path:
        case "POST", "/v1/completions":
            return await _complete(engine, msgspec.json.decode(call.body, type=CompletionCall))
        case "GET", "/health":
            return Answer(200, b"{}")
        case "GET", "/v1/models":
            return Answer(200, b'{"object":"list","data":[{"id":"simulated","object":"model"}]}')
        case "GET", "/totals":
            totals = EngineTotals(
                completions=engine.completions,
                tokens_sampled=engine.tokens_sampled,
                prompt_tokens=engine.prompt_tokens,
                prefix_hits_tokens=engine.prefix_hits_tokens,
            )
            return Answer(200, msgspec.json.encode(totals))
    return Answer(404, b'{"error":{"message":"Not Found"}}')


async def _complete(engine: SimulatedEngine, wanted: CompletionCall) -> Answer:
    completion = await engine.generate(
        CompletionRequest(
            prompt_token_ids=wanted.prompt,
            sampling=SAMPLING,
            max_tokens=wanted.max_tokens,
            request_id=f"{wanted.prompt[0]}-t",
            timeout_s=CALL_TIMEOUT_S,
        )
    )
    ids = completion.token_ids.tolist()
    choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": ids, "logprobs": None}
    usage = {"prompt_tokens": len(wanted.prompt), "completion_tokens": len(ids)}
    answer = {"id": "cmpl-simulated", "object": "text_completion", "model": wanted.model, "choices": [choice]}
    return Answer(200, msgspec.json.encode(answer | {"usage": usage}))


if __name__ == "__main__":
    trio.run(_main, int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=EngineModel))
