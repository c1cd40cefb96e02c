"""A node in an allocation of Slurm's ends by itself before that does."""

from __future__ import annotations

import os
import time

import pytest
import trio

from prorl_trio.config import ListenConfig, ModelConfig, NodeConfig, SandboxConfig
from prorl_trio.config.fleet import FleetConfig
from prorl_trio.node.serve import serve_node
from prorl_trio.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.timeout(120)


async def test_a_node_drains_and_ends_before_its_allocation(tmp_path, monkeypatch, caplog):
    make_tiny_model(tmp_path / "model")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3))
    config = NodeConfig(
        model=ModelConfig(path=str(tmp_path / "model")),
        listen=ListenConfig(port=0, token="a-token-for-tests-0123456789"),
        fleet=FleetConfig(dir=str(tmp_path / "fleet"), end_margin_s=1.0),
        sandbox=SandboxConfig(provider="process"),
    )
    with trio.fail_after(110):
        assert await serve_node(config) is True
    assert "the node's allocation ends" in caplog.text
    assert os.listdir(tmp_path / "fleet") == []
