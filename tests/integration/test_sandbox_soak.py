"""A thousand sandboxes one after another, and two hundred at once: nothing grows, nothing is left."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import trio

from perf.sandboxes import Start, measure_live
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.registry import PROVIDERS
from prorl_trio.sandbox.reaper import descendants
from prorl_trio.sandbox.warm_pool import WarmLimits

pytestmark = pytest.mark.soak

IN_A_ROW, AT_A_TIME, WARM_UP = 1_000, 20, 60
LIVE_AT_ONCE = 200
MAX_RSS_GROWTH_MIB = 16.0
"""Over the thousand, after a warm-up: allocators keep some of what they once had."""

MAX_MIB_EACH = 64.0
SOAK_TIMEOUT_S = 1_500.0
LIVE_TIMEOUT_S = 400.0
SPEC = SandboxSpec(start_timeout_s=120.0)


@pytest.fixture(params=["bubblewrap", "apptainer"])
async def provider_name(request):
    report = await PROVIDERS[request.param]().probe()
    if not report.usable:
        pytest.skip(f"{request.param} cannot run here: {report.problem}. What to do: {report.remedy}")
    return request.param


def look(base):
    gc.collect()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "processes": len(descendants(os.getpid())),
        "mounts": [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(base) in line],
        "folders": sorted(map(str, base.iterdir())),
        "threads": trio.to_thread.current_default_thread_limiter().borrowed_tokens,
    }


def rss_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def open_and_close(provider, count):
    """`count` sandboxes, `AT_A_TIME`, through a host of their own. Half of the opens may find a warm one."""
    left = iter(range(count))

    async def work(host):
        for number in left:
            sandbox = await host.open(SPEC)
            assert (await sandbox.bash(f"echo {number}", timeout_s=60)).output == f"{number}\n"
            await sandbox.aclose()

    async with open_sandbox_host(provider, warm=WarmLimits(max_warm=4)) as host:
        async with trio.open_nursery() as nursery:
            for _ in range(AT_A_TIME):
                nursery.start_soon(work, host)
        await host.wait_stocked()
        statistics = host.statistics()
    assert statistics["live"] == statistics["starting"] == 0
    assert statistics["warm_dead_total"] == statistics["failed_total"] == 0
    assert statistics["started_total"] >= count


async def test_a_thousand_in_a_row(provider_name, tmp_path, record_property):
    provider = PROVIDERS[provider_name](tmp_path)
    with trio.fail_after(SOAK_TIMEOUT_S):
        await open_and_close(provider, WARM_UP)
        before, before_mib = look(tmp_path), rss_mib()
        await open_and_close(provider, IN_A_ROW)
        after, after_mib = look(tmp_path), rss_mib()
    record_property("rss_growth_mib", round(after_mib - before_mib, 2))
    assert after == before
    assert after["folders"] == []
    assert after_mib - before_mib < MAX_RSS_GROWTH_MIB


async def test_two_hundred_at_once(provider_name, tmp_path, record_property):
    before = look(tmp_path)
    with trio.fail_after(LIVE_TIMEOUT_S):
        metrics = await measure_live(Start("live", PROVIDERS[provider_name](tmp_path), "host", ""), LIVE_AT_ONCE)
    for name, value in metrics.items():
        record_property(name, value)
    assert metrics["count"] == LIVE_AT_ONCE
    assert metrics["mib_max"] < MAX_MIB_EACH
    assert look(tmp_path) == before
