from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from perf import tools
from perf.harness import Options

if TYPE_CHECKING:
    import pytest

REQUIRED = [
    *(f"bash.{case}.p{percent}_ms" for case in ("true", "bin_true", "pipe", "output_1mb") for percent in (50, 95)),
    *(f"bash.floor_{case}.p{percent}_ms" for case in ("true", "bin_true", "pipe") for percent in (50, 95)),
    *(f"ipython.{case}.p{percent}_ms" for case in ("assign", "print", "floor") for percent in (50, 95)),
    *(f"uds.rpc.p{percent}_us" for percent in (50, 95)),
]


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


async def test_the_tools_benchmark_measures_everything_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(tools, "QUICK_ROUNDS", 2)
    monkeypatch.setattr(tools, "WARM_UP_ROUNDS", 1)
    monkeypatch.setattr(tools, "LARGE_EVERY", 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = children()
    fds_before = len(os.listdir("/proc/self/fd"))
    with trio.fail_after(60):
        report = await tools.benchmark(Options(quick=True, json_path=None))
    metrics = report.metrics()
    assert not [name for name in REQUIRED if name not in metrics]
    assert all(value > 0 for value in metrics.values())
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) <= fds_before
    assert not list(tmp_path.iterdir())
