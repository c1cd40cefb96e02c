"""Warm sandboxes in the host, over the fake provider: handed out, looked at before, used once, replaced, evicted."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from prorl_trio.sandbox.host import TRIAL_DELAY_S, StartGates, open_sandbox_host
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.warm_pool import REFILL_BACKOFF_S, WarmLimits
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.types.errors import SandboxUnavailable
from support.cancel_sweep import cancel_sweep

SPEC = SandboxSpec()
START_S = 0.5
WARM = WarmLimits(max_warm=4, max_warm_per_image=4, max_refills=2, max_idle_s=60.0)


async def stocked(host):
    """Wait until nothing is starting. On the virtual clock: a start takes START_S there."""
    await trio.testing.wait_all_tasks_blocked()
    while host.statistics()["starting"]:
        await trio.sleep(START_S)
        await trio.testing.wait_all_tasks_blocked()


async def test_the_second_open_need_not_wait(autojump_clock):
    provider = FakeProvider(start_s=START_S)
    async with open_sandbox_host(provider, warm=WARM) as host:
        first = await host.open(SPEC)
        assert host.statistics()["warm_taken_total"] == 0
        await stocked(host)
        assert host.statistics()["warm"] >= 1
        began = trio.current_time()
        second = await host.open(SPEC)
        assert trio.current_time() == began
        assert host.statistics()["warm_taken_total"] == 1
        assert second.sandbox_id != first.sandbox_id
        assert host.statistics()["live"] == 2
        await first.aclose()
        await second.aclose()
        assert host.statistics()["live"] == 0
        assert len(provider.live) == host.statistics()["warm"]
    assert provider.live == []


async def test_every_wait_is_told_of(autojump_clock):
    told = []
    async with open_sandbox_host(
        FakeProvider(start_s=START_S), warm=WARM, on_open=lambda *wait: told.append(wait)
    ) as host:
        for _ in range(2):
            sandbox = await host.open(SPEC)
            await sandbox.aclose()
            await stocked(host)
    assert told == [("fake", "cold", START_S), ("fake", "warm", pytest.approx(0, abs=0.1))]


async def test_each_is_used_once(autojump_clock):
    async with open_sandbox_host(FakeProvider(start_s=START_S), warm=WARM) as host:
        seen = set()
        for _ in range(20):
            sandbox = await host.open(SPEC)
            assert (await sandbox.bash("echo $MARK; MARK=used", timeout_s=1)).output == "$MARK\n"
            seen.add(sandbox.sandbox_id)
            await sandbox.aclose()
            await trio.sleep(START_S)
        assert len(seen) == 20
        assert host.statistics()["warm_taken_total"] >= 18


async def test_a_dead_one_is_thrown_away_and_another_handed_out(autojump_clock):
    provider = FakeProvider(start_s=START_S)
    async with open_sandbox_host(provider, warm=WARM) as host:
        for _ in range(3):
            await (await host.open(SPEC)).aclose()
        await stocked(host)
        warm = list(provider.live)
        assert len(warm) >= 2
        warm[0].lose("it crashed")
        sandbox = await host.open(SPEC)
        assert sandbox.sandbox_id == warm[1].sandbox_id
        assert host.statistics()["warm_dead_total"] == 1
        await trio.testing.wait_all_tasks_blocked()
        assert warm[0] not in provider.live


async def test_where_all_are_dead_one_is_started(autojump_clock):
    provider = FakeProvider(start_s=START_S)
    async with open_sandbox_host(provider, warm=WARM) as host:
        await (await host.open(SPEC)).aclose()
        await stocked(host)
        dead = list(provider.live)
        for sandbox in dead:
            sandbox.lose("it crashed")
        sandbox = await host.open(SPEC)
        assert (await sandbox.bash("echo hi", timeout_s=1)).output == "hi\n"
        assert host.statistics()["warm_dead_total"] == len(dead)


async def test_one_that_dies_in_stock_is_replaced_before_anybody_comes(autojump_clock):
    provider = FakeProvider(start_s=START_S)
    async with open_sandbox_host(provider, warm=WARM) as host:
        await (await host.open(SPEC)).aclose()
        await stocked(host)
        before = list(provider.live)
        before[0].lose("it crashed")
        await trio.testing.wait_all_tasks_blocked()
        assert host.statistics()["warm_dead_total"] == 1
        assert provider.live == before[1:]
        await trio.sleep(REFILL_BACKOFF_S)
        await stocked(host)
        assert host.statistics()["warm"] == len(provider.live) == len(before)


async def test_ones_that_keep_dying_are_not_started_in_a_loop(autojump_clock):
    async def kill_all():
        while True:
            for sandbox in provider.live:
                sandbox.lose("it crashed")
            await trio.sleep(START_S)

    provider = FakeProvider(start_s=START_S)
    async with open_sandbox_host(provider, warm=WARM) as host, trio.open_nursery() as nursery:
        await (await host.open(SPEC)).aclose()
        nursery.start_soon(kill_all)
        await trio.sleep(WARM.max_idle_s)
        assert 4 <= provider.opened_total <= 12, "each wait is twice as long as the one before"
        nursery.cancel_scope.cancel()


async def test_one_that_dies_in_use_is_its_users(autojump_clock):
    provider = FakeProvider(start_s=START_S)
    async with open_sandbox_host(provider, warm=WARM) as host:
        await (await host.open(SPEC)).aclose()
        await stocked(host)
        sandbox = await host.open(SPEC)
        next(fake for fake in provider.live if fake.sandbox_id == sandbox.sandbox_id).lose("it crashed")
        await sandbox.wait_lost()
        await trio.testing.wait_all_tasks_blocked()
        assert host.statistics()["warm_dead_total"] == 0
        assert host.statistics()["live"] == 1
        await sandbox.aclose()
        assert host.statistics()["live"] == 0


async def test_one_that_does_not_answer_in_time_is_dead(autojump_clock):
    provider = FakeProvider(start_s=START_S)
    async with open_sandbox_host(provider, warm=WARM) as host:
        await (await host.open(SPEC)).aclose()
        await stocked(host)
        for sandbox in provider.live:
            sandbox.call_gate = trio.Event()
        hung = host.statistics()["warm"]
        await host.open(SPEC)
        assert host.statistics()["warm_dead_total"] == hung


async def test_specs_do_not_mix(autojump_clock):
    other = SandboxSpec(env={"MARK": "other"})
    async with open_sandbox_host(FakeProvider(start_s=START_S), warm=WARM) as host:
        await (await host.open(SPEC)).aclose()
        await stocked(host)
        sandbox = await host.open(other)
        assert (await sandbox.bash("echo $MARK", timeout_s=1)).output == "other\n"
        assert host.statistics()["warm_taken_total"] == 0


async def test_what_nobody_wants_is_ended(autojump_clock):
    provider = FakeProvider(start_s=START_S)
    async with open_sandbox_host(provider, warm=WARM) as host:
        await (await host.open(SPEC)).aclose()
        await stocked(host)
        assert provider.live
        await trio.sleep(WARM.max_idle_s + START_S)
        assert provider.live == []
        assert host.statistics()["warm"] == 0
        assert host.statistics()["warm_evicted_total"] >= 1


async def test_a_failed_start_in_advance_reaches_nobody_and_is_tried_again(autojump_clock):
    provider = FakeProvider(start_s=START_S)
    async with open_sandbox_host(provider, warm=WARM) as host:
        await trio.testing.wait_all_tasks_blocked()
        sandbox = await host.open(SPEC)
        provider.failures = [SandboxUnavailable("no such image")] * 2
        await stocked(host)
        assert host.statistics()["warm"] == 0
        await trio.sleep(2 * (TRIAL_DELAY_S + START_S))
        assert not host.why_paused  # a trial start has passed
        await trio.sleep(4 * REFILL_BACKOFF_S + START_S)
        await stocked(host)
        assert host.statistics()["warm"] >= 1
        assert host.statistics()["failed_total"] == 1  # the other one was a trial
        await sandbox.aclose()


async def test_starts_in_advance_pass_the_same_gates(autojump_clock):
    provider = FakeProvider(start_s=START_S)
    async with open_sandbox_host(provider, max_concurrent_starts=1, warm=WARM) as host:
        began = trio.current_time()
        await host.open(SPEC)
        await stocked(host)
        warm = host.statistics()["warm"]
        assert trio.current_time() - began >= (1 + warm) * START_S


@pytest.mark.parametrize(("images", "starts_at_once"), [(["a"] * 6, 2), (["a", "b"] * 6, 3)])
async def test_gates_per_image_and_per_node(images, starts_at_once, autojump_clock):
    gates = StartGates(3, 2)
    most = 0

    async def start(image):
        nonlocal most
        async with gates.enter(image):
            most = max(most, gates.starting)
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for image in images:
            nursery.start_soon(start, image)
    assert most == starts_at_once
    assert gates.starting == 0
    assert gates.images == frozenset()


async def test_who_waits_for_a_busy_image_holds_nobody_up(autojump_clock):
    gates = StartGates(2, 1)
    done = []

    async def start(image, seconds):
        async with gates.enter(image):
            await trio.sleep(seconds)
            done.append(image)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(start, "slow", 10)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(start, "quick", 1)
    assert done == ["quick", "slow", "slow", "slow"]


async def test_cancelled_at_any_step_nothing_is_lost(autojump_clock):
    """Open, use and close, warm and new, cancelled after every step: no sandbox, permit or count is left behind."""
    provider = FakeProvider(start_s=START_S)

    async def check(_run):
        await trio.testing.wait_all_tasks_blocked()
        statistics = host.statistics()
        assert statistics["live"] == 0
        await stocked(host)
        assert host._gates.starting == 0
        assert host._gates.images == frozenset()
        assert len(provider.live) == host.statistics()["warm"] <= WARM.max_warm

    async def operation():
        try:
            sandbox = await host.open(SPEC)
            await sandbox.bash("true", timeout_s=1)
            other = await host.open(other_spec)
            await other.aclose()
        finally:
            with trio.move_on_after(30, shield=True):
                for hosted in list(host._in_use):
                    await hosted.aclose()
                await trio.lowlevel.checkpoint()

    other_spec = SandboxSpec(env={"NOT": "warm"})
    async with open_sandbox_host(provider, warm=WARM) as host:
        runs = await cancel_sweep(operation, check)
    assert runs > 10
    assert provider.live == []


async def test_leaving_the_host_at_any_step_leaves_nothing(autojump_clock):
    async def operation():
        nonlocal provider
        provider = FakeProvider(start_s=START_S)
        async with open_sandbox_host(provider, warm=WARM) as host:
            for _ in range(2):
                sandbox = await host.open(SPEC)
                await stocked(host)
                await sandbox.aclose()

    async def check(_run):
        assert provider.live == []

    provider = FakeProvider()
    assert await cancel_sweep(operation, check) > 20
