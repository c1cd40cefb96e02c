"""Whoever reads ipc/PROTOCOL.md can write a client: one that shares no code with us works on a whole node."""

from __future__ import annotations

import ast
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import trio

from prorl_trio.config import BackendConfig, ListenConfig, ModelConfig, NodeConfig
from prorl_trio.node.serve import serve_node
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.testing.tiny_model import make_tiny_model

STRANGER = Path(__file__).with_name("stranger.py")
DEADLINE_S = 60


def test_the_stranger_knows_nothing_of_us():
    tree = ast.parse(STRANGER.read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= {*sys.stdlib_module_names, "msgspec", "wsproto"}


@pytest.mark.timeout(90)
async def test_a_client_written_from_the_page_alone_gets_its_rollouts(tmp_path: Path):
    tiny = make_tiny_model(tmp_path / "model")
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text("a-token-for-tests-0123456789\n")
    endpoint_file = tmp_path / "endpoint.json"

    def script(_prompt: list[int]) -> tuple[list[int], list[float], str]:
        ids = tiny.turn(r"\boxed{42}")
        return ids, [-0.5] * len(ids), "stop"

    engine_config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000)
    with trio.fail_after(DEADLINE_S):
        async with open_fake_engine(script=script, config=engine_config) as engine, trio.open_nursery() as nursery:
            config = NodeConfig(
                model=ModelConfig(path=str(tmp_path / "model")),
                listen=ListenConfig(port=0, token_file=str(tmp_path / "token"), endpoint_file=str(endpoint_file)),
                backends=BackendConfig(urls=[engine.url]),
            )
            await nursery.start(partial(serve_node, config, provider=FakeProvider()))
            command = [sys.executable, "-I", str(STRANGER), str(endpoint_file), str(tmp_path / "token")]
            done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
            os.kill(os.getpid(), signal.SIGTERM)
    assert done.returncode == 0, done.stderr.decode()
    said = json.loads(done.stdout)
    assert (said["welcome"]["resumed"], said["again"]["resumed"]) == (False, True)
    assert said["answers"] == [
        ["Accepted", 0, None],
        ["Rejected", 1, "$.instance.payload.answer"],
        ["Accepted", 2, None],
    ]
    assert (said["joined"] > 0, said["unknown"], said["closed"]) == (True, ["a"], 1000)
    outcomes = sorted(said["outcomes"], key=lambda outcome: outcome["job_id"])
    assert [outcome.pop("tokens") > 20 for outcome in outcomes] == [True, True]
    ended = {"status": "completed", "reward": 1.0, "cause": None, "error_code": None}
    assert outcomes == [{"job_id": job_id, **ended} for job_id in ("a", "c")]
