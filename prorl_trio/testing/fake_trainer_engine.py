"""A trainer's own engine for tests, with the API of a ProRL Agent server: the fake engine behind `/generate`.

Example:
    async with open_fake_trainer_engine() as engine:
        client = TrainerEngineClient(engine.url, context_tokens=2048)
        await client.probe(timeout_s=5)
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import trio

from prorl_trio.testing.fake_engine import FakeEngine, FakeEngineConfig, open_look_alike
from prorl_trio.testing.fake_http import Answer, HttpCall

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.testing.fake_sampling import Script


class FakeTrainerEngine(FakeEngine):
    """The running server, with only `/generate`. Sampling, holding, aborting and counting come from the fake engine.

    Attributes:
        tells_logprobs: its answers contain log-probabilities.
    """

    tells_logprobs: bool = True

    async def _answer(self, call: HttpCall) -> Answer:
        if (call.method, call.path) != ("POST", "/generate"):
            await trio.lowlevel.checkpoint()
            return Answer(404, b'{"detail":"Not Found"}')
        asked = msgspec.json.decode(call.body)
        if "prompt_ids" not in asked:
            await trio.lowlevel.checkpoint()
            return Answer(400, b'{"detail":"request body missing \'prompt_ids\'"}')
        prompt = asked.pop("prompt_ids")
        body = {**asked, "model": self.config.model, "prompt": prompt, "return_token_ids": True, "logprobs": 0}
        as_vllm = HttpCall("POST", "/v1/completions", call.headers, msgspec.json.encode(body))
        answer = await self._complete(as_vllm)
        try:
            choice = msgspec.json.decode(answer.body)["choices"][0]
        except (msgspec.DecodeError, KeyError):  # an error or an injected fault
            return answer
        logprobs = choice["logprobs"] if self.tells_logprobs else None
        told = {"response_ids": choice["token_ids"], "logprobs": logprobs and logprobs["token_logprobs"]}
        return msgspec.structs.replace(answer, body=msgspec.json.encode(told))


@asynccontextmanager
async def open_fake_trainer_engine(
    *, script: Script | None = None, config: FakeEngineConfig | None = None
) -> AsyncIterator[FakeTrainerEngine]:
    """Serve a fake of a trainer's engine. See `open_look_alike`."""
    async with open_look_alike(FakeTrainerEngine, script, config, port=0) as engine:
        yield engine
