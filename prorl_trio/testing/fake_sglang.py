"""An SGLang look-alike for tests: the fake engine behind SGLang's documented API. Not checked against a real server.

Example:
    async with open_fake_sglang() as engine:
        client = SglangClient(engine.url)
        await client.probe(timeout_s=5)
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import trio

from prorl_trio.testing.fake_answers import completion_event, sse
from prorl_trio.testing.fake_engine import TOKENIZER_CALLS, FakeEngine, FakeEngineConfig, open_look_alike
from prorl_trio.testing.fake_http import Answer, HttpCall
from prorl_trio.testing.fake_sampling import Sampled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.testing.fake_answers import Fault
    from prorl_trio.testing.fake_sampling import FakeRequest, Script


class FakeSglang(FakeEngine):
    """The running server. Sampling, holding, aborting and counting come from the fake engine.

    Attributes:
        weight_version: the last value from `/update_weight_version`. It is in each answer and event.
        incremental: events contain only new tokens, as with `--incremental-streaming-output`; otherwise all tokens so
            far. `ids`: only the ids are new ones, as with the older `--stream-output`.
    """

    incremental: bool | Literal["ids"] = False
    weight_version: str = "default"

    async def _answer(self, call: HttpCall) -> Answer:
        if (call.method, call.path) == ("POST", "/generate"):
            return await self._generate(call)
        await trio.lowlevel.checkpoint()
        config = self.config
        card = {"id": config.model, "object": "model", "max_model_len": config.max_model_len}
        got: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"object": "list", "data": [card]},
            "/model_info": {"model_path": config.model, "is_generation": True, "weight_version": self.weight_version},
            "/server_info": {"version": config.version, "disable_radix_cache": False},
        }
        if call.method == "GET" and call.path in got:
            return Answer(200, msgspec.json.encode(got[call.path]))
        if (call.method, call.path) in TOKENIZER_CALLS and config.tokenizer_file:
            return self._tokenizer_answer(call, "text")
        if config.adapters and call.path.endswith("load_lora_adapter"):
            return self._change_adapters(call)
        if call.method == "POST" and (told := self._control(call)) is not None:
            return Answer(200, msgspec.json.encode(told))
        return Answer(404, b'{"detail":"Not Found"}')

    def _control(self, call: HttpCall) -> dict[str, Any] | None:
        if call.path == "/pause_generation":
            self.begin_pause(msgspec.json.decode(call.body)["mode"])
        elif call.path == "/continue_generation":
            self.end_pause()
        elif call.path == "/update_weight_version":
            self.weight_version = msgspec.json.decode(call.body)["new_version"]
        else:
            return None
        return {"status": "ok", "success": True}

    async def _generate(self, call: HttpCall) -> Answer:
        asked = msgspec.json.decode(call.body)
        sampling = asked["sampling_params"]
        body = {
            "model": asked.get("lora_path", self.config.model),
            "prompt": asked["input_ids"],
            "max_tokens": sampling["max_new_tokens"],
            "stop_token_ids": sampling["stop_token_ids"],
            "ignore_eos": sampling["ignore_eos"],
            "return_token_ids": True,
            "logprobs": 0 if asked.get("return_logprob") else None,
            "stream": asked.get("stream", False),
            "cache_salt": asked.get("extra_key", ""),
        }
        if "structural_tag" in sampling:
            body["structured_outputs"] = {"structural_tag": sampling["structural_tag"]}
        as_vllm = HttpCall("POST", "/v1/completions", call.headers, msgspec.json.encode(body))
        answer = await self._complete(as_vllm)
        if answer.status != 200 or answer.stream is not None:
            return answer
        try:
            completion = msgspec.json.decode(answer.body)
        except msgspec.DecodeError:  # an injected fault
            return answer
        return msgspec.structs.replace(answer, body=msgspec.json.encode(self._as_sglang(completion)))

    def _event(self, request: FakeRequest, sampled: Sampled, start: int, end: int, fault: Fault | None) -> bytes:
        first = start if self.incremental is True else 0
        so_far = Sampled(sampled.token_ids[:end], sampled.logprobs[:end], sampled.finish_reason)
        event = completion_event(request, so_far, first, end, fault).removeprefix(b"data: ").rstrip()
        try:
            told = msgspec.json.decode(event)
        except msgspec.DecodeError:
            return sse(event)
        if end < len(sampled.token_ids):
            told["choices"][0]["finish_reason"] = None
        told["usage"] = {"prompt_tokens": len(request.prompt), "completion_tokens": end + (fault == "usage_mismatch")}
        answer = self._as_sglang(told)
        if self.incremental == "ids":
            answer["output_ids"] = answer["output_ids"][start:]
        return sse(msgspec.json.encode(answer))

    def _as_sglang(self, completion: dict[str, Any]) -> dict[str, Any]:
        choice = completion["choices"][0]
        ids, logprobs, reason = choice["token_ids"], choice["logprobs"], choice["finish_reason"]
        meta = {
            "finish_reason": reason and {"type": reason},
            "completion_tokens": completion["usage"]["completion_tokens"],
            "prompt_tokens": completion["usage"]["prompt_tokens"],
            "weight_version": self.weight_version,
        }
        if logprobs is not None:
            values = logprobs["token_logprobs"]
            meta["output_token_logprobs"] = [
                [value, token_id, None] for value, token_id in zip(values, ids or [], strict=False)
            ]
        return {"text": "", "output_ids": ids, "meta_info": meta}

    def _last_event(self, request: FakeRequest, sampled: Sampled, fault: Fault | None) -> bytes:
        del request, sampled, fault
        return b""


@asynccontextmanager
async def open_fake_sglang(
    *, script: Script | None = None, config: FakeEngineConfig | None = None
) -> AsyncIterator[FakeSglang]:
    """Serve a fake SGLang. See `open_look_alike`."""
    async with open_look_alike(FakeSglang, script, config, port=0) as engine:
        yield engine
