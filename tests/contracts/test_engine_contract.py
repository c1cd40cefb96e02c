"""The engine contract over the fake engines, and (slow) over a real vLLM: ours, or the one that PRORL_VLLM_URL names.

The real one's /tokenize renders the prompt with the model's own template.
"""

from __future__ import annotations

import os
import re

import msgspec
import pytest
import trio

pytest.register_assert_rewrite("prorl_trio.testing.engine_contract")

from prorl_launch.paths import model_dir  # noqa: E402
from prorl_trio.http.client import HttpClient  # noqa: E402
from prorl_trio.inference.engines.registry import EngineRegistry  # noqa: E402
from prorl_trio.inference.engines.vllm import VllmClient  # noqa: E402
from prorl_trio.testing.engine_contract import EngineContract, EngineUnderTest  # noqa: E402
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine  # noqa: E402
from prorl_trio.testing.fake_sglang import open_fake_sglang  # noqa: E402
from prorl_trio.testing.fake_tinker import open_fake_tinker  # noqa: E402
from prorl_trio.testing.fake_trainer_engine import open_fake_trainer_engine  # noqa: E402
from prorl_trio.testing.tiny_model import make_tiny_model  # noqa: E402

POLL_S = 0.05
CHECKPOINT = "tinker://run/sampler_weights/1"


def of_fake(fake, client, *, streams=True, weights_folder=None, pauses=True, adapter_folder=None):
    """The facts of a fake engine that the contract needs."""

    async def count_finished() -> int:
        await trio.lowlevel.checkpoint()
        return fake.stats.completions_total - fake.stats.aborted_total

    return EngineUnderTest(
        client=client,
        prompt_token_ids=[11, 12, 13, 14, 15, 16, 17, 18, 19],
        end_of_turn_id=fake.config.end_of_turn_id,
        wait_running=lambda condition: fake.wait_until(lambda stats: condition(stats.running)),
        count_finished=count_finished,
        streams=streams,
        weights_folder=weights_folder,
        pauses=pauses,
        adapter_folder=adapter_folder,
        tokenizer_file=fake.config.tokenizer_file or None,
    )


class TestFakeEngine(EngineContract):
    @pytest.fixture
    async def engine(self):
        async with open_fake_engine(config=FakeEngineConfig(per_token_s=0.002)) as fake:
            client = VllmClient(fake.url)
            yield of_fake(fake, client)
            await client.aclose()


def with_tokenizer(folder, **others):
    """A fake engine's configuration, with the tokenizer of a tiny model."""
    end_of_turn_id = make_tiny_model(folder).end_of_turn_id
    file = str(folder / "tokenizer.json")
    return FakeEngineConfig(per_token_s=0.002, end_of_turn_id=end_of_turn_id, tokenizer_file=file, **others)


class TestFakeEngineInDevelopmentMode(EngineContract):
    @pytest.fixture
    async def engine(self, tmp_path):
        async with open_fake_engine(config=with_tokenizer(tmp_path, development=True, adapters=True)) as fake:
            client = VllmClient(fake.url)
            yield of_fake(fake, client, weights_folder="/weights", adapter_folder="/adapter")
            await client.aclose()


class TestFakeSglang(EngineContract):
    @pytest.fixture
    async def engine(self, tmp_path):
        async with open_fake_sglang(config=with_tokenizer(tmp_path, adapters=True)) as fake:
            client = await EngineRegistry().finder("auto")(fake.url, 5)
            yield of_fake(fake, client, adapter_folder="/adapter")
            await client.aclose()


class TestFakeTrainerEngine(EngineContract):
    @pytest.fixture
    async def engine(self):
        async with open_fake_trainer_engine(config=FakeEngineConfig(per_token_s=0.002)) as fake:
            client = await EngineRegistry().finder("auto", context_tokens=fake.config.max_model_len)(fake.url, 5)
            yield of_fake(fake, client, streams=False)
            await client.aclose()


@pytest.mark.parametrize("speaks_proto", [True, False], ids=["protobuf", "json"])
class TestFakeTinker(EngineContract):
    @pytest.fixture
    async def engine(self, speaks_proto):
        async with open_fake_tinker(config=FakeEngineConfig(per_token_s=0.002)) as fake:
            fake.checkpoints, fake.speaks_proto, fake.poll_s = {CHECKPOINT}, speaks_proto, 0.5
            client = await EngineRegistry().finder("auto")(fake.url, 5)
            yield of_fake(fake, client, streams=False, weights_folder=CHECKPOINT, pauses=False)
            await client.aclose()


class Rendered(msgspec.Struct):
    tokens: list[int]


@pytest.mark.slow
class TestRealVllm(EngineContract):
    @pytest.fixture
    async def engine(self, vllm_url):
        http = HttpClient(vllm_url)
        client = VllmClient(vllm_url)

        async def render(*messages: dict[str, str], generation_prompt: bool) -> list[int]:
            body = {"messages": messages, "add_generation_prompt": generation_prompt}
            response = await http.request(
                "POST",
                "/tokenize",
                body=msgspec.json.encode(body),
                headers=[("Content-Type", "application/json")],
                timeout_s=30,
            )
            assert response.status == 200, response.body
            return msgspec.json.decode(response.body, type=Rendered).tokens

        async def metric(pattern: bytes) -> int:
            response = await http.request("GET", "/metrics", timeout_s=10)
            values = re.findall(rb"^" + pattern + rb" ([0-9.]+)", response.body, re.MULTILINE)
            assert values
            return int(sum(map(float, values)))

        async def count_running() -> int:
            return await metric(rb"vllm:num_requests_(?:running|waiting)\{[^}]*\}")

        async def count_finished() -> int:
            return await metric(rb'vllm:request_success_total\{[^}]*finished_reason="(?:stop|length)"[^}]*\}')

        async def wait_running(condition) -> None:
            while True:  # the engine is another process: it has no event for us
                if condition(await count_running()):
                    return
                await trio.sleep(POLL_S)

        question = {"role": "user", "content": "What is the capital of France?"}
        prompt = await render(question, generation_prompt=True)
        # How this small model answers a question is a matter of its processor's rounding; what it repeats is not.
        repeat = {"role": "user", "content": "Repeat: red green blue yellow"}
        repeated = {"role": "assistant", "content": "red green blue yellow"}
        answered = await render(question, {"role": "assistant", "content": "X"}, generation_prompt=False)
        assert answered[: len(prompt)] == prompt
        end_of_turn_id = answered[len(prompt) + 1]  # after the one token of "X"
        yield EngineUnderTest(
            client=client,
            prompt_token_ids=prompt,
            certain_prompt_token_ids=await render(repeat, repeated, repeat, generation_prompt=True),
            end_of_turn_id=end_of_turn_id,
            wait_running=wait_running,
            count_finished=count_finished,
            tokenizer_file=None if "PRORL_VLLM_URL" in os.environ else str(model_dir() / "tokenizer.json"),
        )
        await client.aclose()
        http.close()
