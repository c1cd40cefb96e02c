"""A policy update in the middle of a completion, on a real vLLM: pause, other weights, resume. The trainer has the
WebSocket alone: its node serves no REST, and nobody else talks to the engine. Then the other ways to new weights:
tensors in hand, a transfer of the trainer's own, a LoRA adapter. Before it all, vLLM reads turns as the gateway does.

In float32, so that what differs is the weights: in bfloat16 the two implementations alone differ by 0.05 to 0.07.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import trio

from prorl_launch.paths import engine_python, import_path, model_dir
from prorl_launch.vllm import open_vllm
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.client import PolicyUpdateFailed, connect
from prorl_trio.config import ModelConfig, NodeConfig, SandboxConfig
from prorl_trio.node.core import open_node
from prorl_trio.tasks.handlers.registry import HandlerRegistry
from prorl_trio.types.models import ChatMessage, SamplingParams
from prorl_trio.weights.model_folder import ModelFolder
from support.completions import asked, begun
from support.derender import SERVER_ARGS, check_derender
from support.fake_service import TOKEN, open_service
from support.skips import because

pytestmark = [pytest.mark.alone, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("changed_weights.py")
TOKENS_BEFORE = 24
TOKENS = 80
CALL_S = 400.0
AGREES = 0.05
GREEDY = SamplingParams(temperature=0.0)
"""A sampled story may end by itself before the pause."""
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

    partial = begun(asked(prompt, TOKENS, sampling=GREEDY, request_id=mode, timeout_s=CALL_S), stop=look)

    async def sample():
        async with node.backends.lease(mode) as lease:
            got.append(await lease.attempt(partial))
        enough.set()

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
        async with client.policy_update("never", mode="wait", timeout_s=CALL_S) as update:
            await update.load_folder("/no/such/weights", check="none")
    assert list(caught.value.failed) == [url]
    (backend,) = (await client.list_backends()).pool["backends"]
    assert (backend["url"], backend["suspended"], backend["error"]) == (url, False, "")
    return await sample(node, prompt, "after")


async def sample(node, prompt, name):
    async with node.backends.lease(name) as lease:
        return await lease.attempt(
            begun(asked(prompt, TOKENS_BEFORE, sampling=GREEDY, request_id=name, timeout_s=CALL_S))
        )


async def update_with_tensors(node, client, prompt, old):
    """The tensors of the old model, as a trainer in float32 has them in hand."""
    async with client.policy_update("v3", timeout_s=CALL_S) as update:
        await update.load_state_dict(in_float32(old))
    (folder,) = [each.engine.weights for each in node.backends._placement.backends()]
    assert folder.startswith("/dev/shm/")
    assert (Path(folder) / "tokenizer.json").exists()
    return await sample(node, prompt, "tensors")


async def update_by_own_means(node, client, url, prompt, new):
    """Do as a trainer with a transfer of its own: the trainer tells the engine, and the node asks it."""

    def tell(path, body):
        request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            assert answer.status == 200

    async def move(version, *, named):
        async with client.policy_update(version, timeout_s=CALL_S) as update, update.transfer():
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(new)}}
            await trio.to_thread.run_sync(tell, "/collective_rpc", reload)
            if named:
                await trio.to_thread.run_sync(tell, "/update_weight_version", {"new_version": version})

    with pytest.raises(PolicyUpdateFailed, match="it says that its weights are v3, and not v4"):
        await move("v4", named=False)
    before = await sample(node, prompt, "before")
    await move("v4", named=True)
    return before, await sample(node, prompt, "after")


async def update_to_adapter(node, client, prompt, folder, old):
    """The adapter is of the old model, so that comes first; then the adapter alone moves."""
    async with client.policy_update("v5", timeout_s=CALL_S) as update:
        await update.load_folder(old)
    async with client.policy_update("v6", timeout_s=CALL_S) as update:
        await update.load_adapter("policy", folder)
    return await sample(node, prompt, "adapter")


def in_float32(folder):
    """Yield the tensors of a bfloat16 model, of which numpy knows the bits."""
    for name, tensor in ModelFolder.read(folder).tensors.items():
        assert tensor.type.dtype == "BF16"
        bits = np.fromfile(tensor.path, "<u2", offset=tensor.offset, count=math.prod(tensor.type.shape))
        yield name, (bits.astype("<u4") << 16).view(np.float32).reshape(tensor.type.shape)


async def test_two_versions_in_one_completion_and_logprobs_of_the_weights_that_sampled(tmp_path, monkeypatch):
    if not engine_python().exists():
        pytest.skip(because("the CPU engine is not set up", "make engine"))
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    old, new = model_dir(), tmp_path / "new"
    chat = await trio.to_thread.run_sync(ChatFormat.load, old)
    prompt = Conversation(chat, QUESTION).prompt_token_ids()
    with trio.fail_after(900):
        await trainer("change", old, tmp_path, *import_path().split(os.pathsep), Path(np.__file__).parents[1])
        async with open_vllm(
            engine_python(),
            old,
            log_file=tmp_path / "vllm.log",
            dtype="float32",
            extra_args=[*SERVER_ARGS, "--enable-lora", "--max-lora-rank", "8"],
        ) as server:
            await check_derender(server.url)  # needs no update, but a server with these options
            config = NodeConfig(model=ModelConfig(path=str(old)), sandbox=SandboxConfig(provider="process"))
            async with (
                open_node(config, HandlerRegistry([])) as node,
                open_service(node) as service,
                connect(service.url, TOKEN) as client,
            ):
                await client.add_backend(server.url)
                (info,) = node.backends.list()
                assert (info.api, info.pausable, info.prefix_caching) == ("/inference/v1/generate", True, True)
                assert (info.logprob_kind, info.weights, info.model_folder) == ("raw", str(old), str(old))
                aborted = await sample_across(node, client, "abort", new, "v1", prompt)
                kept = await sample_across(node, client, "keep", old, "v2", prompt)
                after = await fail_to_update(node, client, server.url, prompt)
                tensors = await update_with_tensors(node, client, prompt, old)
                named = tmp_path / "written"  # it names the output layer; whoever moves weights alone sees to that
                restored, moved = await update_by_own_means(node, client, server.url, prompt, named)
                adapted = await update_to_adapter(node, client, prompt, tmp_path / "adapter", old)
                whole = {"v2": after, "v3": tensors, "v4": moved, "v6": adapted}
                assert {each.spans[0].policy_version: each for each in whole.values()} == whole
                assert [span.policy_version for span in restored.spans] == ["v3"]
    assert not list(Path("/dev/shm").glob("prorl-weights-*"))
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
    sampled_by = [(after, old), (tensors, old), (restored, old), (moved, new), (adapted, tmp_path / "merged")]
    cases += [case(model, prompt, completion, 0, len(completion.token_ids)) for completion, model in sampled_by]
    cases.append(case(old, prompt, aborted, switch, len(aborted.token_ids)))
    cases.append(case(old, prompt, adapted, 0, len(adapted.token_ids)))
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    *agreeing, wrong, without_adapter = json.loads(await trainer("compare", tmp_path / "cases.json"))
    assert max(agreeing) < AGREES < min(wrong, without_adapter), (agreeing, wrong, without_adapter)


def case(model, prompt, completion, start, end):
    """The tokens from `start` to `end`, to be held against `model`."""
    return {
        "model": str(model),
        "token_ids": [*prompt, *completion.token_ids],
        "start": len(prompt) + start,
        "logprobs": completion.logprobs[start:end].tolist(),
    }
