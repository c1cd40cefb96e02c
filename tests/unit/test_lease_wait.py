"""The time that a rollout may wait for a backend: it begins with the wait, and is one for all waits."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from types import SimpleNamespace

import pytest
import trio

from prorl_trio.agent.turns import lease_backend
from prorl_trio.types.errors import BackendError


class Backends:
    """Backends of which each rollout waits for these seconds, one wait after another."""

    def __init__(self, *waits_s):
        self.waits_s = waits_s

    @asynccontextmanager
    async def lease(self, _task_id, _priority, waiting):
        await trio.lowlevel.checkpoint()
        for seconds in self.waits_s:
            with waiting("room"):
                await trio.sleep(seconds)
        yield "lease"

    def shortage(self):
        return "room"


@contextmanager
def standing_in_line(_what, _charge, *, at_most_s):
    assert at_most_s >= 0
    yield


def context(lease_timeout_s, *waits_s):
    config = SimpleNamespace(backends=SimpleNamespace(lease_timeout_s=lease_timeout_s))
    return SimpleNamespace(
        resources=SimpleNamespace(backends=Backends(*waits_s), config=config),
        spec=SimpleNamespace(job_id="a", priority="train"),
        standing_in_line=standing_in_line,
    )


@pytest.mark.parametrize(("timeout_s", "waits_s"), [(0.0, ()), (1e-9, ()), (5.0, (4.0,)), (5.0, (2.0, 2.0))])
async def test_a_backend_that_has_room_in_time_is_leased(autojump_clock, timeout_s, waits_s):
    async with AsyncExitStack() as stack:
        assert await lease_backend(context(timeout_s, *waits_s), stack) == "lease"


@pytest.mark.parametrize(("timeout_s", "waits_s"), [(0.0, (1.0,)), (5.0, (6.0,)), (5.0, (3.0, 3.0))])
async def test_a_longer_wait_ends_at_the_time_limit(autojump_clock, timeout_s, waits_s):
    begun_s = trio.current_time()
    async with AsyncExitStack() as stack:
        with pytest.raises(BackendError, match=rf"job a waited {timeout_s:g} s \(backends\.lease_timeout_s\) for room"):
            await lease_backend(context(timeout_s, *waits_s), stack)
    assert trio.current_time() - begun_s == pytest.approx(timeout_s)


async def test_a_lease_outlives_the_time_of_the_wait(autojump_clock):
    async with AsyncExitStack() as stack:
        await lease_backend(context(5.0, 4.0), stack)
        await trio.sleep(60)
