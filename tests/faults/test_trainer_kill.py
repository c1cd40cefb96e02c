"""A trainer that is killed in a policy update: the node puts the old version back, and nothing of it is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trio

from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from support.fake_node import FakeNode
from support.fake_service import TOKEN, open_service
from support.tiny_weights import make_model

pytestmark = pytest.mark.timeout(90)

DEADLINE_S = 60
TRAINER = """
import sys, time
import numpy as np
from prorl_trio.client import BlockingClient, policy_update
from prorl_trio.weights import store
from safetensors.numpy import load_file

policy_update.LEASE_S, store.AFTER_KILL_S = 3.0, 8
url, token, model, folder = sys.argv[1:]
state = load_file(model + "/model.safetensors")
with BlockingClient(url, token) as client:
    with client.policy_update("1") as update:
        update.load_state_dict(state, folder)
    with client.policy_update("2") as update:
        update.load_state_dict(state, folder)
        print("loaded", flush=True)
        time.sleep(3600)
"""


async def test_the_old_weights_come_back_from_their_folder_which_then_goes(tmp_path):
    model, shared = make_model(tmp_path / "model"), tmp_path / "shared"
    shared.mkdir()
    config = FakeEngineConfig(development=True, model=str(model))
    with trio.fail_after(DEADLINE_S):
        async with open_fake_engine(config=config) as engine, trio.open_nursery() as nursery:
            node = FakeNode()
            node.backends = Backends(made_by(VllmClient))
            await node.backends.add(engine.url)
            nursery.start_soon(node.backends.watch)
            async with open_service(node) as service:
                argv = [sys.executable, "-c", TRAINER, service.url, TOKEN, str(model), str(shared)]
                trainer = await trio.lowlevel.open_process(argv, stdout=subprocess.PIPE)
                assert trainer.stdout is not None
                async with trainer.stdout:
                    assert await trainer.stdout.receive_some() == b"loaded\n"
                assert Path(engine.weights).name == "2"
                assert node.backends.admission.closed
                trainer.kill()
                await trainer.wait()
                while node.backends.admission.closed:
                    await trio.sleep(0.05)
                assert Path(engine.weights).name == "1"
                assert (node.backends.policy_version, engine.weight_version, engine.paused) == ("1", "1", None)
                while list(shared.iterdir()):
                    await trio.sleep(0.05)
            await node.backends.aclose()
            nursery.cancel_scope.cancel()
