"""A backend that fails each call at once has the least to do: it must not draw the tasks of the others."""

from __future__ import annotations

from random import Random

import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.config import HealthConfig, LoadConfig
from prorl_trio.inference.engines.protocol import Completion, EngineClient, EngineInfo, made_by
from prorl_trio.inference.pool.backend import MAX_DOUBLINGS
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.types.errors import BackendError
from support.completions import asked, begun

HEALTH = HealthConfig(interval_s=10, open_after_failures=3, close_after_successes=2)


class Client(EngineClient):
    """Answers probes; a call takes a second, or fails at once."""

    def __init__(self, url):
        self.url = url
        self.breaks = False

    async def probe(self, *, timeout_s):
        await trio.lowlevel.checkpoint()
        return EngineInfo(url=self.url, model="m", max_model_len=9, engine="fake", policy_version="0")

    async def generate(self, request):
        if self.breaks:
            await trio.lowlevel.checkpoint()
            raise BackendError(f"{self.url}: it drops logprobs", retryable=False)
        await trio.sleep(1)
        return Completion(token_ids=[1], logprobs=[0.0], finish_reason="stop", policy_version="0", engine="fake")

    async def aclose(self):
        await trio.lowlevel.checkpoint()


def most_harmed(seconds):
    """Three, and one more each time that its probes let it in again, which takes longer each time."""
    harmed, at_s, doublings = HEALTH.open_after_failures, 0.0, 0
    while True:
        at_s += (HEALTH.close_after_successes << doublings) * HEALTH.interval_s - HEALTH.interval_s
        if at_s > seconds:
            return harmed
        harmed, doublings = harmed + 1, min(doublings + 1, MAX_DOUBLINGS)


@settings(max_examples=40, deadline=None)
@given(
    others=st.integers(1, 4),
    tasks=st.integers(50, 150),
    calls=st.integers(1, 8),
    gap_s=st.floats(0.05, 12),
    seed=st.integers(0, 999),
)
def test_a_bounded_number_of_tasks_is_harmed(others, tasks, calls, gap_s, seed):
    async def run():
        clients = {f"http://host{index}:1": Client(f"http://host{index}:1") for index in range(others + 1)}
        backends = Backends(
            made_by(clients.__getitem__), health=HEALTH, load=LoadConfig(interval_s=0), random=Random(seed)
        )
        for url in clients:
            await backends.add(url)
        hole = clients["http://host0:1"]
        hole.breaks = True
        harmed = 0

        async def task(name):
            nonlocal harmed
            async with backends.lease(name) as lease:
                try:
                    for _ in range(calls):
                        await lease.complete(begun(asked([1], 1, request_id=name, timeout_s=9)))
                except BackendError:
                    harmed += 1

        with trio.fail_after(100_000):
            async with open_single_nursery() as watching:
                watching.start_soon(backends.watch)
                async with trio.open_nursery() as nursery:
                    for index in range(tasks):
                        nursery.start_soon(task, f"t{index}")
                        await trio.sleep(gap_s)
                watching.cancel_scope.cancel()
        assert harmed <= most_harmed(tasks * gap_s + calls), "it drew the tasks of others"
        await backends.aclose()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))
