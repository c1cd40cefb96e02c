from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import trio

from perf import delivery
from perf.harness import Options

pytestmark = pytest.mark.alone


def children():
    """Of all threads: trio starts processes in one that is not this."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


async def test_every_way_delivers_and_nothing_is_left(monkeypatch, tmp_path):
    loads = {"LARGE": delivery.Load(tokens=8192, pass_outcomes=8), "SMALL": delivery.Load(tokens=512, pass_outcomes=32)}
    for name, value in {"QUICK_ROUNDS": 3, "OUTCOMES": 4, **loads}.items():
        monkeypatch.setattr(delivery, name, value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before, fds_before = children(), len(os.listdir("/proc/self/fd"))
    with trio.fail_after(60):
        report = await delivery.benchmark(Options(quick=True, json_path=None))
    metrics = report.metrics()
    del report  # its cases hold the mapping
    assert metrics["deliver.shm_arrays_copied"] == 0
    assert metrics["deliver.shm_bytes_per_token"] < 0.1
    assert 9 < metrics["wire.bytes_per_token"] < 9.1
    assert metrics["deliver.json_bytes_per_token"] > 20
    assert metrics["deliver.shm_mb_s"] > 3 * metrics["deliver.json_mb_s"] > 0
    assert metrics["deliver.ws_mb_s"] > 3 * metrics["deliver.json_mb_s"]
    assert metrics["deliver.shm_small_mb_s"] > 0
    assert metrics["deliver.ws_small_mb_s"] > 0
    assert metrics["wire.encode.p50_ms"] > 0
    assert children() == before
    assert not list(tmp_path.iterdir())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= fds_before
