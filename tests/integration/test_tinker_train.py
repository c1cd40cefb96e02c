"""Tinker's own SDK: it samples from the fake server as from a real one, and the example trains through it."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tomllib
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio

from prorl_trio.config import NodeConfig
from prorl_trio.node.parts import engine_finder
from prorl_trio.testing.fake_engine import FakeEngineConfig
from prorl_trio.testing.fake_tinker import open_fake_tinker
from support.quick_node import AnswersOnly, load_example
from support.tinker_sdk import TrainingServer, tinker_packages

ROOT = Path(__file__).parents[2]
SAMPLE = """
from tinker import ModelInput, SamplingParams, ServiceClient
client = ServiceClient().create_sampling_client(base_model="fake-model")
how = SamplingParams(max_tokens=8, temperature=1.0, stop=[2])
[sequence] = client.sample(ModelInput.from_ints([5, 6]), 1, how).result().sequences
print(sequence.tokens, sequence.logprobs, sequence.stop_reason)
"""

PAGE = (ROOT / "docs" / "tinker.md").read_text()
"""The guide: its commands and settings are tried here."""
[COMMAND] = re.findall(r"^python (examples/.*)$", PAGE, re.MULTILINE)
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
RL = {"target_tokens", "logprobs", "advantages"}
LOSSES = {"ppo": (CLIP, RL), "importance_sampling": ({}, RL), "cross_entropy": ({}, {"target_tokens", "weights"})}
TRAIN = f"import tinker_train; [tinker_train.main('fake-model', loss) for loss in {list(LOSSES)[1:]}]"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def packages():
    return tinker_packages()


async def run(packages, server, *argv, **env):
    """Return what a program prints that uses the SDK."""
    env = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-key", "TINKER_TELEMETRY": "0", **env}
    path = os.pathsep.join(map(str, (ROOT, ROOT / "ipc", ROOT / "examples", packages)))
    done = await trio.run_process(
        [sys.executable, *argv],
        env={**os.environ, **env, "PYTHONPATH": path},
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def test_the_guides_node_is_a_node():
    [node] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    backends = msgspec.convert(tomllib.loads(node), NodeConfig).backends
    backends = msgspec.structs.replace(backends, tinker=msgspec.structs.replace(backends.tinker, api_key_file=""))
    engine_finder(backends, None)


async def test_the_sdk_samples_from_the_fake_server_as_from_a_real_one(packages):
    def script(_prompt):
        return [7, 8, 2], [-0.5, -0.25, -0.125], "stop"

    async with open_fake_tinker(script=script, kind=TrainingServer, config=FakeEngineConfig()) as server:
        server.api_key = "tml-key"
        with trio.fail_after(60):
            assert await run(packages, server, "-c", SAMPLE) == ["[7, 8, 2] [-0.5, -0.25, -0.125] stop"]
        assert server.requests[-1].prompt == [5, 6]


@asynccontextmanager
async def open_node():
    """A node with a made-up policy behind the server that also trains."""
    example, servers = load_example(), []

    @asynccontextmanager
    async def open_engine(**how):
        async with open_fake_tinker(kind=TrainingServer, **how) as server:
            servers.append(server)
            yield server

    example.open_fake_engine = open_engine
    async with example.open_local_node(example.guess, [AnswersOnly()], provider="process") as node:
        yield node, servers[0]


async def test_the_example_trains_on_exactly_what_was_sampled_with_each_loss(packages):
    async with open_node() as (node, server):
        env = {"PRORL_URL": node.url, "PRORL_TOKEN": node.token}
        with trio.fail_after(100):
            program, _, loss = shlex.split(COMMAND)
            said = await run(packages, server, str(ROOT / program), "fake-model", loss, **env)
            said += await run(packages, server, "-c", TRAIN, **env)
    assert len(said) == 2 * len(LOSSES)
    assert said[0].startswith("step 1: 8 rollouts, reward 0.")
    assert "'loss:sum': 0.5" in said[1]
    assert server.steps == [1e-4] * len(said)
    assert server.checkpoints == {f"tinker://run/sampler_weights/step-{step}" for step in range(3)}
    assert server.sampled_from[-1] == "tinker://run/sampler_weights/step-2"
    sampled = {tuple(request.prompt) for request in server.requests}
    assert [trained[0] for trained in server.trained] == [loss for loss in LOSSES for _ in range(2)]
    for loss, settings, data in server.trained:
        expected, inputs = LOSSES[loss]
        assert settings == expected
        for tokens, values in data:
            check_datum(tokens, values, inputs, sampled)
        weights = [values.get("advantages", values.get("weights")) for _, values in data]
        if loss != "cross_entropy":
            assert abs(sum(map(np.sum, weights))) < 1, "advantages of a batch are divided by its tokens"
            assert 0.5 < sum(np.abs(weight).sum() for weight in weights) < 1.5


def check_datum(tokens, values, inputs, sampled):
    """Position t predicts token t + 1; only what was sampled has a weight, and a log-probability."""
    assert values.keys() == inputs
    assert values["target_tokens"][:-1].tolist() == tokens[1:]
    weight = values.get("advantages", values.get("weights"))
    assert len(weight) == len(tokens)
    own = np.flatnonzero(weight)
    if "logprobs" in values:
        assert np.flatnonzero(values["logprobs"]).tolist() == own.tolist()
        assert (values["logprobs"] <= 0).all()
    if len(own):  # before the first weight is the prompt of the sample
        assert tuple(tokens[: own[0] + 1]) in sampled
        assert own.tolist() == list(range(own[0], len(tokens)))
        assert len(set(weight[own].tolist())) == 1
