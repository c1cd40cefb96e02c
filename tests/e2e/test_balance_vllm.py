"""`perf.balance_vllm` on two real servers, with caches too small for more rollouts than a server's share."""

from __future__ import annotations

import msgspec
import pytest
import trio

from perf.balance_vllm import STRATEGIES, WORK, compare, open_servers
from prorl_launch.paths import engine_python
from support.skips import because

pytestmark = pytest.mark.soak


async def test_every_strategy_ends_the_batch_and_the_figures_are_vllms(tmp_path, monkeypatch):
    if not engine_python().exists():
        pytest.skip(because("the CPU engine is not set up", "make engine"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    work = msgspec.structs.replace(WORK, instances=8)
    with trio.fail_after(1500):
        async with open_servers(tmp_path) as urls:
            report = await compare(urls, work)
    metrics = report.metrics()
    report.write_json(tmp_path / "balance_vllm.json")
    assert metrics["balance_vllm.rollouts"] == work.instances * work.rollouts
    for strategy in STRATEGIES:
        assert metrics[f"balance_vllm.{strategy}.makespan_s"] > 0
        assert 0 < metrics[f"balance_vllm.{strategy}.prefix_hit_rate"] < 1
    assert metrics["balance_vllm.least_in_flight.max_over_mean"] < 1.2
