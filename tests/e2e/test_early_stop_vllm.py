"""What an early stop saves on a real vLLM, by the engine's own count of the tokens it sampled.

It is off by default (`agent.stop_at_tool_call`): a policy that ends its turn after a call saves one token by it, while
each of its tokens then comes in an event of its own; one that goes on to make up the result saves all of that.
"""

from __future__ import annotations

import re

import pytest
import trio

from prorl_launch.paths import model_dir
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.http.client import HttpClient
from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.types.models import ChatMessage
from support.completions import asked, begun

pytestmark = pytest.mark.slow

POLL_S = 0.05
CALL_S = 400.0
AT_ONCE = 4
ENOUGH = 8
MAX_TOKENS = 160
STORY = [ChatMessage(role="user", content="Tell me a long story about a fox and a lighthouse.")]


async def test_an_engine_that_is_stopped_samples_little_more(vllm_url):
    chat = await trio.to_thread.run_sync(ChatFormat.load, model_dir())
    prompt = Conversation(chat, STORY).prompt_token_ids()
    http, backends, got = HttpClient(vllm_url), Backends(made_by(VllmClient)), []

    async def metric(name):
        response = await http.request("GET", "/metrics", timeout_s=CALL_S)
        values = re.findall(rb"^vllm:" + name + rb"\{[^}]*\} ([0-9.e+]+)", response.body, re.MULTILINE)
        assert values
        return sum(map(float, values))

    async def sample(index):
        async with backends.lease(f"task-{index}") as lease:
            request = asked(prompt, MAX_TOKENS, request_id=f"stop-{index}", timeout_s=CALL_S)
            got.append(await lease.attempt(begun(request, stop=lambda ids: len(ids) >= ENOUGH)))

    with trio.fail_after(2 * CALL_S):
        await backends.add(vllm_url)
        before = await metric(rb"generation_tokens_total")
        async with trio.open_nursery() as nursery:
            for index in range(AT_ONCE):
                nursery.start_soon(sample, index)
        while await metric(rb"num_requests_(?:running|waiting)"):  # it is another process: it has no event for us
            await trio.sleep(POLL_S)
        sampled = await metric(rb"generation_tokens_total") - before
        await backends.aclose()
        http.close()
    assert [completion.finish_reason for completion in got] == ["tool_call"] * AT_ONCE
    assert all(len(completion.token_ids) == len(completion.logprobs) == ENOUGH for completion in got)
    assert AT_ONCE * ENOUGH <= sampled < AT_ONCE * MAX_TOKENS / 2, (
        f"{sampled:.0f} tokens sampled for {AT_ONCE * ENOUGH}"
    )
