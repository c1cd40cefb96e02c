from __future__ import annotations

import os
import shutil

import pytest
import trio

from perf import node
from perf.harness import Options
from perf.node_rig import _most_at_once
from perf.peers.environments import PEERS

REQUIRED = [
    "turn.cpu_ms",
    "rollout.cpu_ms",
    "rollouts.concurrent",
    "rollouts.rss_mib",
    "stall.p50_ms",
    "stall.p99_ms",
    "stall.cpu_p99_ms",
    "accept.p50_ms",
    "deliver.p50_ms",
    "process_per_job.rollout_cpu_ms",
    "process_per_job.rollout_mib",
    "engine.calls_per_s",
]

pytestmark = [pytest.mark.alone, pytest.mark.timeout(120)]


async def test_every_figure_is_there_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "ROLLOUTS", 12)
    monkeypatch.setattr(node, "PARTS", ())
    monkeypatch.setattr(node, "QUICK", node.Scale(turns=2, engine_s=0.5, singles=3, processes=1, gateway_calls=32))
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "no-peers"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fds_before = len(os.listdir("/proc/self/fd"))
    with trio.fail_after(100):
        report = await node.benchmark(Options(quick=True, json_path=None))
    metrics = report.metrics()
    assert [name for name in REQUIRED if not metrics.get(name, 0) > 0] == []
    assert 2 <= metrics["rollouts.concurrent"] <= 12
    assert metrics["rollouts.rss_mib"] < node.RSS_MAX_MIB
    assert any(note.startswith("left out: ") and "peers setup gateway" in note for note in report.notes)
    assert len(os.listdir("/proc/self/fd")) <= fds_before
    shutil.rmtree(tmp_path / "no-peers", ignore_errors=True)
    assert list(tmp_path.iterdir()) == []


def test_how_many_were_there_at_once():
    assert _most_at_once([(0, 2), (1, 3), (2, 4), (5, 6)]) == 2
    assert _most_at_once([]) == 0


def test_the_gateway_is_a_peer_of_its_own():
    assert PEERS["gateway"].requirements == ("rllm-model-gateway==0.1.0",)
