"""`perf.cancellation` and `perf.faults` in small, over real nodes and sandboxes."""

from __future__ import annotations

import pytest
import trio

from perf import cancellation
from perf.faults import measure_delivery
from perf.harness import Options

pytestmark = [pytest.mark.alone, pytest.mark.timeout(450)]


async def test_a_cancel_is_timed_until_nothing_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cancellation, "QUICK_ROUNDS", 2)
    monkeypatch.setattr(cancellation, "WARM_UP_ROUNDS", 0)
    with trio.fail_after(400):
        report = await cancellation.benchmark(Options(quick=True, json_path=None))
    samples = {series.case.name: series.samples for series in report.series}
    assert {name: len(taken) for name, taken in samples.items()} == {
        "cancel.sampling": 2,
        "cancel.tool": 2,
        "cancel.request": 2,
    }
    assert min(samples["cancel.request"]) < min(samples["cancel.tool"]) < 60_000


async def test_a_node_that_is_killed_delivers_each_job_once(tmp_path):
    with trio.fail_after(400):
        delivered = await measure_delivery(tmp_path, jobs=8, kills=1)
    assert [delivered[name] for name in ("jobs", "kills", "failed", "lost", "doubled")] == [8, 1, 0, 0, 0]
    assert delivered["wall_s"] > delivered["down_s"] > 0
