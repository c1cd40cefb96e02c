"""`perf.balance_vllm`, on look-alikes of vLLM."""

from __future__ import annotations

import msgspec
import pytest
import trio

from perf.balance_vllm import STRATEGIES, WORK, EngineCounts, balance_vllm, compare, read_counts
from perf.harness import Options
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine

pytestmark = pytest.mark.alone

SMALL = msgspec.structs.replace(WORK, instances=4, rollouts=2, turns_p50=1, max_turns=2, tool_s_p50=0.001)
PAGE = """
# HELP vllm:prefix_cache_hits_total Prefix cache hits, in terms of number of cached tokens.
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 30.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 40.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 2e1
vllm:generation_tokens_total{engine="0"} 7
vllm:generation_tokens_created{engine="0"} 99
"""


def test_counts_are_read_from_the_metrics_page():
    counts = read_counts(PAGE)
    assert counts == EngineCounts(sampled=7, queries=60, hits=30)
    assert read_counts("nothing") == EngineCounts(0, 0, 0)
    assert counts.since(EngineCounts(sampled=2, queries=10, hits=5)) == EngineCounts(5, 50, 25)


async def test_each_strategy_runs_the_batch_with_ids_of_its_own():
    config = FakeEngineConfig(vocab_size=49_152, max_model_len=8192)
    with trio.fail_after(60):
        async with open_fake_engine(config=config) as one, open_fake_engine(config=config) as other:
            report = await compare([one.url, other.url], SMALL)
            first_ids = [
                {request.prompt[0] // 1000 for request in engine.requests if not request.ignore_eos}
                for engine in (one, other)
            ]
    metrics = report.metrics()
    assert first_ids == [{1, 2, 3}] * 2
    assert metrics["balance_vllm.rollouts"] == 8
    assert {f"balance_vllm.{strategy}.makespan_s" for strategy in STRATEGIES} <= metrics.keys()
    assert metrics["balance_vllm.least_over_static_split"] > 0


async def test_seeds_change_the_batch_and_the_order():
    config = FakeEngineConfig(vocab_size=49_152, max_model_len=8192)
    with trio.fail_after(60):
        async with open_fake_engine(config=config) as one, open_fake_engine(config=config) as other:
            report = await compare([one.url, other.url], SMALL, seeds=2)
    metrics = report.metrics()
    assert metrics["balance_vllm.seeds"] == 2
    assert metrics["balance_vllm.rollouts"] == 16


async def test_one_server_is_too_few(monkeypatch):
    monkeypatch.setenv("PRORL_VLLM_URLS", "http://127.0.0.1:1, ")
    with pytest.raises(SystemExit, match="two vLLM servers or more"):
        await balance_vllm(Options(quick=True, json_path=None))


async def test_without_servers_and_without_an_engine_it_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.delenv("PRORL_VLLM_URLS", raising=False)
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    with pytest.raises(SystemExit, match="make engine"):
        await balance_vllm(Options(quick=True, json_path=None))
