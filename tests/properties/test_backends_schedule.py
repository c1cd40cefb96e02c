"""The pool under any schedule of tasks, cancels and changes of its backends, in virtual time.

Nothing is lost or counted twice, no room is left while somebody waits, and everybody is served within a bound.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import get_args

import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.config import HealthConfig, LoadConfig
from prorl_trio.inference.engines.load_report import LoadReport
from prorl_trio.inference.engines.protocol import Completion, EngineClient, EngineInfo, made_by
from prorl_trio.inference.pool.balancer import MAX_PASSED_OVER
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.types.backends import PauseBackends, PauseMode, ResumeBackends
from prorl_trio.types.errors import BackendError, BackendsBusy, PauseTimeout
from support.completions import asked, begun

URLS = [f"http://host{index}:8000" for index in range(4)]
PRIORITIES = 3
REPORT_S = 1.0


class WildClient(EngineClient):
    """Its load and its health are what the schedule says; a call takes a second."""

    def __init__(self, url):
        self.url = url
        self.says = LoadReport(running=0, waiting=0)
        self.ill = False
        self.breaks = False
        self.closed = False
        self.calls = []
        self.slow_s = 0.0
        self.label = "0"
        self.goes_on = trio.Event()
        self.goes_on.set()
        self.refused_to_go_on = False

    async def probe(self, *, timeout_s):
        await self.answer()
        await self.goes_on.wait()
        return EngineInfo(
            url=self.url, model="m", max_model_len=9, engine="fake", policy_version=self.label, label=self.label
        )

    async def load(self, *, timeout_s):
        await self.answer()
        return self.says

    async def pause(self, mode, *, timeout_s):
        await self.answer()
        if self.goes_on.is_set():
            self.goes_on = trio.Event()
        return True

    async def label_weights(self, policy_version, *, timeout_s):
        await self.answer()
        self.label = policy_version
        return True

    async def resume(self, *, timeout_s):
        self.refused_to_go_on = self.ill
        await self.answer()
        self.goes_on.set()

    async def answer(self):
        assert not self.closed
        await trio.sleep(self.slow_s)
        if self.ill:
            raise BackendError(f"{self.url}: down", retryable=True)

    async def generate(self, request):
        assert not self.closed
        self.calls.append((trio.current_time(), request.request_id, self.url))
        if self.breaks:
            raise BackendError(f"{self.url}: it drops logprobs", retryable=False)
        await trio.sleep(1)
        with trio.move_on_after(request.timeout_s):
            await self.goes_on.wait()
        if self.ill or not self.goes_on.is_set():
            raise BackendError(f"{self.url}: down", retryable=True)
        return Completion(token_ids=[1], logprobs=[0.0], finish_reason="stop", policy_version="0", engine="fake")

    async def aclose(self):
        await trio.lowlevel.checkpoint()
        self.closed = True


class World:
    """The pool, and the tasks of the schedule as they are known from outside."""

    def __init__(self, limit, seed):
        self.clients = []
        self.ill = set()
        self.breaking = set()
        self.backends = Backends(
            made_by(self.client),
            max_tasks_per_backend=limit,
            health=HealthConfig(interval_s=3, open_after_failures=1, close_after_successes=1),
            load=LoadConfig(interval_s=REPORT_S, skew_margin_s=0.5, skew_ratio=1, min_tasks=1, decrease_factor=0.5),
            random=Random(seed),
        )
        self.scopes = {}
        self.waiting = {}
        self.holding = {}
        self.ends = {}
        self.served = 0
        self.bounds = {}

    def client(self, url):
        client = WildClient(url)
        client.ill, client.breaks = url in self.ill, url in self.breaking
        self.clients.append(client)
        return client

    async def task(self, task_id, priority):
        """A rollout: completions with its backend until the schedule ends it, or cancels it."""
        place = sum(other == priority for other in self.waiting.values())
        self.waiting[task_id] = priority
        self.bounds[task_id] = self.served + (place + 1) * (MAX_PASSED_OVER + PRIORITIES)
        with self.scopes[task_id]:
            try:
                async with self.backends.lease(task_id, priority) as lease:
                    del self.waiting[task_id]
                    self.served += 1
                    assert self.served <= self.bounds[task_id] + 1, f"{task_id} was passed over too often"
                    self.holding[task_id] = lease
                    try:
                        while not self.ends[task_id].is_set():
                            try:
                                await lease.attempt(begun(asked([1] * 10, 1, request_id=task_id, timeout_s=9)))
                            except BackendError as exc:
                                if not exc.retryable:
                                    return
                                lease.repin()
                                await trio.sleep(0.1)
                    finally:
                        del self.holding[task_id]
            finally:
                self.waiting.pop(task_id, None)

    async def attempt(self, change, *args):
        """Meanwhile the schedule goes on: changes overtake one another."""
        with suppress(BackendError, BackendsBusy, PauseTimeout):
            await change(*args)

    def count_switches(self):
        """How often a task's call went to another URL than its call before."""
        homes, switches = {}, 0
        for _, task_id, url in sorted(call for client in self.clients for call in client.calls):
            switches += homes.setdefault(task_id, url) != url
            homes[task_id] = url
        return switches

    def check(self):
        assert self.count_switches() <= sum(self.backends.statistics()["moves"].values()), "moved, and not recorded"
        statistics = self.backends.statistics()
        rows = statistics["backends"]
        assert statistics["open_leases"] == len(self.holding) == sum(row.in_flight for row in rows)
        assert statistics["waiting"] == len(self.waiting)
        for row in rows:
            assert row.in_flight >= 0
            if row.state != "removed":
                holders = [lease for lease in self.holding.values() if lease.url == row.url]
                removed = sum(other.in_flight for other in rows if other.url == row.url and other.state == "removed")
                assert row.in_flight == len(holders) - removed
        if self.waiting:
            open_rows = [row for row in rows if row.state == "active" and not row.suspended]
            assert all(0 < row.max_tasks <= row.in_flight for row in open_rows), "room, and somebody waits"
        listed = {row.url for row in rows if row.state != "down"}
        assert listed <= {client.url for client in self.clients if not client.closed}


def steps():
    url = st.sampled_from(URLS)
    load = st.builds(
        LoadReport,
        running=st.integers(0, 8),
        waiting=st.integers(0, 8),
        kv_usage=st.sampled_from([None, 0.5, 0.99]),
        prefill_tokens_total=st.just(1000.0),
        prefill_s_total=st.just(1.0),
    )
    return st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(0, PRIORITIES - 1)),
            st.tuples(st.just("submit"), st.integers(0, PRIORITIES - 1)),
            st.tuples(st.sampled_from(["end", "cancel"]), st.integers(0, 99)),
            st.tuples(st.sampled_from(["drain", "remove", "expect", "fall ill", "recover", "break", "mend"]), url),
            st.tuples(st.just("add"), url, st.sampled_from([None, 0.5, 3.0])),
            st.tuples(st.just("slow"), url, st.sampled_from([0.0, 0.5, 1.5])),
            st.tuples(st.just("pause"), st.sampled_from(get_args(PauseMode)), st.sampled_from([0.2, 2.0, 9.0])),
            st.tuples(st.just("resume"), st.sampled_from([None, "1", "2"])),
            st.tuples(st.just("weigh"), url, st.sampled_from([0.5, 1.0, 3.0])),
            st.tuples(st.just("report"), url, st.one_of(st.none(), load)),
            st.tuples(st.just("limit"), st.integers(0, 3)),
            st.tuples(st.just("clear")),
            st.tuples(st.just("pass"), st.sampled_from([0.05, 1.0, 4.0, 40.0])),
        ),
        max_size=30,
    )


async def play(world, nursery, step):
    what, *args = step
    backends = world.backends
    try:
        match what:
            case "submit":
                task_id = f"t{len(world.scopes)}"
                world.scopes[task_id], world.ends[task_id] = trio.CancelScope(), trio.Event()
                nursery.start_soon(world.task, task_id, *args)
            case "end" | "cancel":
                alive = [*world.holding] if what == "end" else [*world.holding, *world.waiting]
                if alive:
                    task_id = alive[args[0] % len(alive)]
                    world.ends[task_id].set() if what == "end" else world.scopes[task_id].cancel()
            case "fall ill" | "recover":
                (world.ill.add if what == "fall ill" else world.ill.discard)(args[0])
                for client in world.clients:
                    client.ill = client.url in world.ill
            case "break" | "mend":
                (world.breaking.add if what == "break" else world.breaking.discard)(args[0])
                for client in world.clients:
                    client.breaks = client.url in world.breaking
            case "report":
                for client in world.clients:
                    if client.url == args[0]:
                        client.says = args[1]
            case "slow":
                for client in world.clients:
                    client.slow_s = args[1] if client.url == args[0] else client.slow_s
            case "drain" | "expect" | "weigh":
                getattr(backends, what)(*args)
            case "add" | "remove" | "clear":
                nursery.start_soon(world.attempt, getattr(backends, what), *args)
            case "pause":
                mode, timeout_s = args
                nursery.start_soon(world.attempt, backends.operate, PauseBackends(mode=mode, timeout_s=timeout_s))
            case "resume":
                nursery.start_soon(world.attempt, backends.operate, ResumeBackends(policy_version=args[0]))
            case "limit":
                backends.limit_tasks(*args)
            case "pass":
                await trio.sleep(*args)
    except BackendError:
        if what not in ("drain", "weigh"):
            raise


@settings(max_examples=40, deadline=None)
@given(steps(), st.integers(0, 2), st.integers(0, 999))
def test_conserved_and_served_under_any_schedule(schedule, limit, seed):
    async def run():
        world = World(limit, seed)
        with trio.fail_after(100_000):
            async with open_single_nursery() as outer:
                outer.start_soon(world.backends.watch)
                async with trio.open_nursery() as nursery:
                    for step in schedule:
                        await play(world, nursery, step)
                        await trio.testing.wait_all_tasks_blocked()
                        world.check()
                    # With one backend that is well, everybody is served in the end.
                    world.ill.clear()
                    for client in world.clients:
                        client.ill, client.breaks, client.says, client.slow_s = False, False, None, 0.0
                    await trio.sleep(60)  # what is under way ends
                    await world.backends.operate(ResumeBackends())
                    for ends in world.ends.values():
                        ends.set()
                    await world.backends.add(URLS[0])
                assert not world.waiting
                assert not world.holding
                assert world.backends.statistics()["open_leases"] == 0
                outer.cancel_scope.cancel()
            await world.backends.clear()
            assert world.backends.statistics()["backends"] == []
            assert all(client.closed for client in world.clients)
            for client in world.clients:
                assert client.goes_on.is_set() or client.refused_to_go_on, "left paused, and nobody will resume it"

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))
