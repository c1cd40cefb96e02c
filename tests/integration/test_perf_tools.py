from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from perf import tools, trace
from perf.harness import Options
from perf.trace import PEER_SYSTEMS

pytestmark = pytest.mark.alone

REQUIRED = [
    *(f"bash.{case}.p{percent}_ms" for case in ("true", "bin_true", "pipe", "output_1mb") for percent in (50, 95)),
    *(f"bash.floor_{case}.p{percent}_ms" for case in ("true", "bin_true", "pipe") for percent in (50, 95)),
    *(f"ipython.{case}.p{percent}_ms" for case in ("assign", "print", "floor") for percent in (50, 95)),
    *(f"{case}.p{percent}_us" for case in ("uds.rpc", "uds.tcp_rpc") for percent in (50, 95, 99)),
    "uds.tcp_over_uds",
    "trace.ours_over_pty",
    "trace.ours_over_pty_total",
    *(f"trace.{system}.total_s" for system in ("ours", "pty")),
]


def children() -> set[str]:
    """Of all threads: trio starts processes in one that is not this."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


async def test_the_tools_benchmark_measures_everything_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(tools, "QUICK_ROUNDS", 2)
    monkeypatch.setattr(tools, "WARM_UP_ROUNDS", 1)
    monkeypatch.setattr(tools, "LARGE_EVERY", 1)
    monkeypatch.setattr(trace, "QUICK_STEPS", 12)
    monkeypatch.setattr(trace, "QUICK_ROUNDS", 1)
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "no-peers"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = children()
    fds_before = len(os.listdir("/proc/self/fd"))
    with trio.fail_after(60):
        report = await tools.benchmark(Options(quick=True, json_path=None))
    metrics = report.metrics()
    assert not [name for name in REQUIRED if name not in metrics]
    assert all(metrics[name] > 0 for name in REQUIRED)
    assert {name: metrics[name] for name in ("trace.ours.wrong", "trace.pty.wrong")} == dict.fromkeys(
        ("trace.ours.wrong", "trace.pty.wrong"), 0
    )
    assert not [name for name in metrics if "tmux" in name or "swerex" in name or "zmq" in name]
    left_out = [note for note in report.notes if note.startswith("left out: ")]
    assert len(left_out) == len(PEER_SYSTEMS) + 1, "and Jupyter"
    assert all("python -m perf.peers setup" in note or "needs the program" in note for note in left_out)
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) <= fds_before
    assert not list(tmp_path.iterdir())
