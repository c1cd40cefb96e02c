from __future__ import annotations

import pytest

from perf import mcp
from perf.harness import Options

pytestmark = [pytest.mark.alone, pytest.mark.timeout(60)]


async def test_the_benchmark_of_mcp_measures_both_places_beside_a_bare_session(monkeypatch):
    monkeypatch.setattr(mcp, "QUICK_ROUNDS", 60)
    metrics = (await mcp.benchmark(Options(quick=True, json_path=None))).metrics()
    for place in ("node", "sandbox"):
        assert metrics[f"mcp.{place}.p50_ms"] > 0
        assert metrics[f"mcp.{place}_overhead_ms"] < mcp.MAX_OVERHEAD_MS
    assert metrics["mcp.bare.p50_ms"] > 0
