"""A policy update in the middle of a completion, on a real vLLM: pause, other weights, resume. The trainer has the
WebSocket alone: its node serves no REST, and nobody else talks to the engine.

In float32, so that what differs is the weights: in bfloat16 the two implementations alone differ by 0.05 to 0.07.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import trio

from launch.paths import engine_python, model_dir
from launch.vllm import open_vllm
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.client import PolicyUpdateFailed, connect
from prorl_trio.config import ModelConfig, NodeConfig, SandboxConfig
from prorl_trio.handlers.registry import HandlerRegistry
from prorl_trio.node.core import open_node
from prorl_trio.types.models import ChatMessage
from support.completions import asked, begun
from support.fake_service import TOKEN, open_service
from support.skips import because

pytestmark = [pytest.mark.alone, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("changed_weights.py")
TOKENS_BEFORE = 24
TOKENS = 80
CALL_S = 400.0
AGREES = 0.05
QUESTION = [ChatMessage(role="user", content="Tell me a long story about a fox and a lighthouse.")]


async def trainer(*args):
    """What the trainer's own process does."""
    argv = [engine_python(), SCRIPT, *args]
    done = await trio.to_thread.run_sync(lambda: subprocess.run(argv, capture_output=True, text=True, check=False))
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


async def sample_across(node, client, mode, folder, version, prompt):
    """Pause a completion by `mode` after `TOKENS_BEFORE` tokens; let it go on with other weights."""
    enough, got = trio.Event(), []

    def look(token_ids):
        if len(token_ids) >= TOKENS_BEFORE:
            enough.set()
        return False

    partial = begun(asked(prompt, TOKENS, request_id=mode, timeout_s=CALL_S), stop=look)

    async def sample():
        async with node.backends.lease(mode) as lease:
            got.append(await lease.attempt(partial))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sample)
        await enough.wait()
        async with client.policy_update(version, mode=mode, timeout_s=CALL_S) as update:
            assert [backend.engine for backend in update.report.backends] == ["paused"]
            await update.load_folder(folder)
        assert [(backend.engine, backend.error) for backend in update.report.backends] == [("resumed", "")]
    return got[0]


async def fail_to_update(node, client, url, prompt):
    """A completion after an update to weights that are not there."""
    with pytest.raises(PolicyUpdateFailed, match=f"{url}: POST /collective_rpc") as caught:
        async with client.policy_update("v3", mode="wait", timeout_s=CALL_S) as update:
            await update.load_folder("/no/such/weights", check="none")
    assert list(caught.value.failed) == [url]
    (backend,) = (await client.list_backends()).pool["backends"]
    assert (backend["url"], backend["suspended"], backend["error"]) == (url, False, "")
    async with node.backends.lease("after") as lease:
        return await lease.attempt(begun(asked(prompt, TOKENS_BEFORE, request_id="after", timeout_s=CALL_S)))


async def test_two_versions_in_one_completion_and_logprobs_of_the_weights_that_sampled(tmp_path, monkeypatch):
    if not engine_python().exists():
        pytest.skip(because("the CPU engine is not set up", "make engine"))
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    old, new = model_dir(), tmp_path / "new"
    chat = await trio.to_thread.run_sync(ChatFormat.load, old)
    prompt = Conversation(chat, QUESTION).prompt_token_ids()
    with trio.fail_after(900):
        await trainer("change", old, new)
        async with open_vllm(
            engine_python(), old, log_file=tmp_path / "vllm.log", dtype="float32", extra_args=["--enable-scale-out"]
        ) as server:
            config = NodeConfig(model=ModelConfig(path=str(old)), sandbox=SandboxConfig(provider="process"))
            assert not config.rest.enabled
            async with (
                open_node(config, HandlerRegistry([])) as node,
                open_service(node) as service,
                connect(service.url, TOKEN) as client,
            ):
                await client.add_backend(server.url)
                (info,) = node.backends.list()
                assert (info.api, info.pausable, info.prefix_caching) == ("/inference/v1/generate", True, True)
                assert (info.logprob_kind, info.weights) == ("raw", str(old))
                aborted = await sample_across(node, client, "abort", new, "v1", prompt)
                kept = await sample_across(node, client, "keep", old, "v2", prompt)
                after = await fail_to_update(node, client, server.url, prompt)
                assert [span.policy_version for span in after.spans] == ["v2"]
    cases = []
    for completion, versions in ((aborted, ["0", "v1"]), (kept, ["v1", "v2"])):
        assert [span.policy_version for span in completion.spans] == versions
        first, second = completion.spans
        assert TOKENS_BEFORE <= first.end == second.start
        assert second.end == len(completion.token_ids) == len(completion.logprobs)
    # The prefix cache is salted by version, so that what continues an aborted completion knows only the new weights.
    # A kept one keeps what the old weights made of its beginning; so only its beginning is compared.
    switch = aborted.spans[0].end
    cases.append(case(old, prompt, aborted, 0, switch))
    cases.append(case(new, prompt, aborted, switch, len(aborted.token_ids)))
    cases.append(case(new, prompt, kept, 0, kept.spans[0].end))
    cases.append(case(old, prompt, after, 0, len(after.token_ids)))
    cases.append(case(old, prompt, aborted, switch, len(aborted.token_ids)))
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    *agreeing, wrong = json.loads(await trainer("compare", tmp_path / "cases.json"))
    assert max(agreeing) < AGREES < wrong, (agreeing, wrong)


def case(model, prompt, completion, start, end):
    """The tokens from `start` to `end`, to be held against `model`."""
    return {
        "model": str(model),
        "token_ids": prompt + completion.token_ids,
        "start": len(prompt) + start,
        "logprobs": completion.logprobs[start:end],
    }
