"""The sandbox host over the fake provider: ownership, the start gate, retries, cancellation at every step."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from prorl_trio.sandbox.host import MAX_START_ATTEMPTS, open_sandbox_host
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.types.errors import SandboxLost, SandboxUnavailable

SPEC = SandboxSpec()


async def test_opened_in_one_task_used_in_another_closed_in_a_third(autojump_clock):
    provider = FakeProvider()
    opened = []
    async with open_sandbox_host(provider) as host:
        async with trio.open_nursery() as first:

            async def open_it():
                opened.append(await host.open(SPEC))

            first.start_soon(open_it)
        (sandbox,) = opened
        assert (await sandbox.bash("echo hi", timeout_s=1)).output == "hi\n"
        async with trio.open_nursery() as third:
            third.start_soon(sandbox.aclose)  # another task than the one that opened it
            await trio.lowlevel.checkpoint()
        assert provider.live == []
        assert {name: count for name, count in host.statistics().items() if count} == {"started_total": 1}
        await sandbox.aclose()
        with pytest.raises(SandboxLost):
            await sandbox.bash("true", timeout_s=1)


async def test_leaving_the_host_ends_all(autojump_clock):
    provider = FakeProvider()
    async with open_sandbox_host(provider) as host:
        sandboxes = [await host.open(SPEC) for _ in range(3)]
        assert len(provider.live) == host.statistics()["live"] == 3
    assert provider.live == []
    for sandbox in sandboxes:
        await sandbox.aclose()
        assert "gone" in repr(sandbox)


async def test_an_action_in_flight_is_lost_when_the_sandbox_is_closed(autojump_clock):
    async with open_sandbox_host(FakeProvider()) as host, trio.open_nursery() as nursery:
        sandbox = await host.open(SPEC)

        async def act():
            with pytest.raises(SandboxLost):
                await sandbox.bash("sleep 1000", timeout_s=2000)

        nursery.start_soon(act)
        await trio.testing.wait_all_tasks_blocked()
        await sandbox.aclose()


async def test_the_gate_limits_concurrent_starts(autojump_clock):
    provider = FakeProvider(start_s=1.0)
    async with open_sandbox_host(provider, max_concurrent_starts=2) as host:
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(host.open, SPEC)
            await trio.testing.wait_all_tasks_blocked()
            assert host.statistics()["starting"] == 6
        assert trio.current_time() - start == pytest.approx(3.0)


async def test_a_busy_machine_is_tried_again(autojump_clock):
    busy = [SandboxUnavailable("no room", retryable=True) for _ in range(MAX_START_ATTEMPTS - 1)]
    async with open_sandbox_host(FakeProvider(failures=busy)) as host:
        await host.open(SPEC)
        assert host.statistics()["started_total"] == 1
        assert host.statistics()["failed_total"] == MAX_START_ATTEMPTS - 1


@pytest.mark.parametrize(
    ("failure", "attempts"),
    [
        (SandboxUnavailable("no room", retryable=True), MAX_START_ATTEMPTS),
        (SandboxUnavailable("resource temporarily unavailable"), 1),
    ],
)
async def test_a_failure_reaches_the_caller_and_nobody_else(failure, attempts, autojump_clock):
    provider = FakeProvider(failures=[failure] * attempts)
    async with open_sandbox_host(provider) as host:
        with pytest.raises(SandboxUnavailable, match=str(failure)):
            await host.open(SPEC)
        assert provider.failures == []
        other = await host.open(SPEC)
        assert (await other.bash("true", timeout_s=1)).exit_code == 0


async def test_an_error_in_the_block_comes_out_alone(autojump_clock):
    provider = FakeProvider()

    async def fail():
        async with open_sandbox_host(provider) as host:
            await host.open(SPEC)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await fail()
    assert provider.live == []


@pytest.mark.parametrize("moment_s", [0.0, 0.5, 0.999, 1.0, 1.001])
async def test_a_cancelled_open_leaves_nothing(moment_s, autojump_clock):
    provider = FakeProvider(start_s=1.0)
    async with open_sandbox_host(provider) as host:
        opened = None
        with trio.move_on_after(moment_s):
            opened = await host.open(SPEC)
        assert len(provider.live) == host.statistics()["live"] == (opened is not None)
        assert host.statistics()["starting"] == 0


async def test_a_cancelled_close_still_closes(autojump_clock):
    provider = FakeProvider()
    async with open_sandbox_host(provider) as host:
        sandbox = await host.open(SPEC)
        with trio.CancelScope() as scope:
            scope.cancel()
            await sandbox.aclose()
        assert scope.cancelled_caught
        assert provider.live == []
