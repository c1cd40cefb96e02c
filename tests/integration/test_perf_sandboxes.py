"""The benchmark of sandboxes in small: it measures what it says, and leaves nothing."""

from __future__ import annotations

import os

import pytest
import trio

from perf import sandboxes
from perf.harness import CannotRun, Options
from prorl_trio.sandbox.reaper import descendants
from support.skips import because

pytestmark = pytest.mark.alone


async def test_it_measures_what_it_says(monkeypatch):
    monkeypatch.setattr(sandboxes, "QUICK", sandboxes.Size(rounds=1, warm_opens=2, live=3, uploads=1, images=4))
    try:
        with trio.fail_after(180):
            report = await sandboxes.benchmark(Options(quick=True, json_path=None))
    except CannotRun as exc:
        pytest.skip(because(str(exc), "prorl-trio doctor"))
    metrics = report.metrics()
    for series in report.series:
        assert series.samples
        assert metrics[f"{series.case.name}.p50_ms"] > 0
    assert {"warm.p50_ms", "live.mib_each"} < set(metrics)
    assert metrics["live.count"] == 3
    assert (metrics["inits.images"], metrics["inits.failed"]) == (4, 0)
    layered = {"cold.layers.x_floor", "cold.bwrap_layers.x_floor"} & set(metrics)
    assert layered
    assert metrics["environment.upload.x_floor"] > 1
    assert 1 < metrics["live.mib_each"] <= metrics["live.mib_max"] < 500
    assert descendants(os.getpid()) == set()
