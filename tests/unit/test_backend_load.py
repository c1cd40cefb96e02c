"""What engines say of their load, and what is made of it (pure, and with clients that only pretend)."""

from __future__ import annotations

from contextlib import asynccontextmanager
from random import Random

import pytest
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.config import HealthConfig, LoadConfig
from prorl_trio.inference.engines.load_report import LoadReader, LoadReport
from prorl_trio.inference.engines.protocol import Completion, EngineClient, EngineInfo, made_by
from prorl_trio.inference.pool.backend import ConcurrencyLimit, LoadEstimate
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.types.errors import BackendError
from support.completions import asked, begun

A, B, C = "http://a:1", "http://b:1", "http://c:1"
POLICY = LoadConfig(interval_s=1, skew_margin_s=2, skew_ratio=1.5)

VLLM = b"""
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m {odd} name"} 16.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
vllm:prompt_tokens_total{engine="0",model_name="m"} 1e+06
vllm:request_prefill_kv_computed_tokens_bucket{engine="0",le="1.0",model_name="m"} 0.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="m"} 300000.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 30.0
"""
OLD_VLLM = b"""vllm:num_requests_running{model_name="m"} 1
vllm:num_requests_waiting{model_name="m"} 0
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:prompt_tokens_total{model_name="m"} 1000
vllm:gpu_prefix_cache_hits_total{model_name="m"} 600
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m"} 5.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.28
sglang:prompt_tokens_total{model_name="m"} 8000
sglang:cached_tokens_total{model_name="m"} 5000
sglang:time_to_first_token_seconds_sum{model_name="m"} 10
"""


def read_load(page):
    reader = LoadReader()
    assert not reader.feed(page)
    return reader.load()


def test_what_each_engine_calls_it():
    assert read_load(VLLM) == LoadReport(
        running=20, waiting=3, kv_usage=0.75, preemptions_total=2, prefill_tokens_total=300_000, prefill_s_total=30
    )
    assert read_load(OLD_VLLM) == LoadReport(running=1, waiting=0, kv_usage=0.5, prefill_tokens_total=400)
    assert read_load(SGLANG) == LoadReport(
        running=5, waiting=2, kv_usage=0.28, prefill_tokens_total=3000, prefill_s_total=10
    )


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"\xff\x00 not a page",
        b"vllm:num_requests_running 1\n",
        b"vllm:num_requests_running e\nvllm:num_requests_waiting +-\n",
        b"vllm:num_requests_running 1e999\nvllm:num_requests_waiting 1\n",
    ],
)
def test_a_page_that_does_not_say(page):
    assert read_load(page) is None


def load_of(running=8, waiting=0, *, kv=0.5, preemptions=0, tokens=0, seconds=0.0):
    return LoadReport(
        running=running,
        waiting=waiting,
        kv_usage=kv,
        preemptions_total=preemptions,
        prefill_tokens_total=tokens,
        prefill_s_total=seconds,
    )


def test_the_wait_by_littles_law_and_the_prefix_by_the_measured_rate():
    estimate = LoadEstimate()
    assert (estimate.wait_s, estimate.entry_s(100, estimate)) == (None, None)
    estimate.reported(load_of(waiting=8, tokens=10_000, seconds=10), 0.95)
    assert estimate.wait_s is None  # how long its service takes is not known
    estimate.call_ended(20)
    assert estimate.wait_s == 10
    assert estimate.entry_s(3000, estimate) == 13
    estimate.task_moved(-1)
    assert estimate.wait_s == pytest.approx(7 * 10 / 8)
    estimate.reported(load_of(tokens=12_000, seconds=10.5), 0.95)
    assert (estimate.wait_s, estimate.prefill_tokens_per_s) == (0, 4000)
    estimate.reported(load_of(tokens=12_010, seconds=99), 0.95)  # too few tokens to tell
    assert estimate.prefill_tokens_per_s == 4000
    estimate.reported(load_of(tokens=1000, seconds=1), 0.95)  # it was started again
    assert estimate.prefill_tokens_per_s == 1000
    estimate.reported(None, 0.95)
    assert (estimate.wait_s, estimate.entry_s(1, estimate)) == (None, None)


def test_an_engine_that_nothing_is_known_of_is_taken_for_one_as_fast_and_as_large():
    here, idle = LoadEstimate(), LoadEstimate()
    idle.reported(LoadReport(running=1, waiting=0), 0.95)
    here.reported(LoadReport(running=4, waiting=9), 0.95)
    here.call_ended(10)
    assert idle.entry_s(500, here) is None
    here.reported(load_of(running=4, waiting=9, tokens=1000, seconds=1), 0.95)
    costs = []
    for _ in range(5):
        costs.append(idle.entry_s(500, here))
        idle.task_moved(1)
    assert costs == [0.5, 0.5, 0.5, 0.5, pytest.approx(0.5 + 10 * 4 / 13)]
    idle.task_moved(-9)
    assert idle.entry_s(500, here) == 0.5


def test_pressure_is_a_full_cache_or_a_preemption():
    estimate = LoadEstimate()
    pressed = []
    for kv, preemptions in [(0.5, 7), (0.96, 7), (0.5, 8), (0.5, 8)]:
        estimate.reported(load_of(kv=kv, preemptions=preemptions), 0.95)
        pressed.append(estimate.pressed)
    assert pressed == [False, True, True, False]


def test_the_limit_falls_by_a_factor_and_rises_one_by_one_where_it_binds():
    policy, limit, seen = LoadConfig(min_tasks=4, decrease_factor=0.5), ConcurrencyLimit(), []
    for pressed, in_flight in [
        (False, 100),  # no pressure yet, no limit
        (True, 100),
        (True, 90),  # it had no time to work
        (True, 50),
        (False, 20),  # nobody runs into it
        (False, 25),
        (False, 26),
        (True, 1),
        (True, 0),
    ]:
        limit.adapt(policy, pressed=pressed, in_flight=in_flight)
        seen.append(limit.tasks)
    assert seen == [0, 50, 50, 25, 25, 26, 27, 4, 4]
    assert (limit.within(0), limit.within(3), limit.within(9)) == (4, 3, 4)
    assert (ConcurrencyLimit().within(0), ConcurrencyLimit().within(7)) == (0, 7)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("interval_s", -1, "must be >= 0"),
        ("skew_ratio", 0.5, "must be >= 1"),
        ("min_tasks", 0, "must be >= 1"),
        ("decrease_factor", 1.0, "below 1"),
    ],
)
def test_a_policy_that_cannot_be(field, value, why):
    with pytest.raises(ValueError, match=f"{field} .*{why}"):
        LoadConfig(**{field: value})


# ---------------------------------------------------------------- in the pool


class LoadClient(EngineClient):
    """Says `says` of its load, or fails if that is an error; a call takes `call_s`."""

    def __init__(self, url):
        self.url = url
        self.says = None
        self.call_s = 10.0
        self.calls = 0

    async def probe(self, *, timeout_s):
        await trio.lowlevel.checkpoint()
        return EngineInfo(url=self.url, model="m", max_model_len=9, engine="fake", policy_version="0")

    async def load(self, *, timeout_s):
        await trio.lowlevel.checkpoint()
        if isinstance(self.says, BackendError):
            raise self.says
        return self.says

    async def generate(self, request):
        self.calls += 1
        await trio.sleep(self.call_s)
        return Completion(token_ids=[1], logprobs=[0.0], finish_reason="stop", policy_version="0", engine="fake")

    async def aclose(self):
        await trio.lowlevel.checkpoint()


class Pool:
    """Watched backends."""

    def __init__(self, urls, **options):
        self.clients = {url: LoadClient(url) for url in urls}
        options = {"load": POLICY, "health": HealthConfig(interval_s=0), "random": Random(0), **options}
        self.backends = Backends(made_by(self.clients.__getitem__), **options)

    def of(self, url):
        return next(each for each in self.backends.statistics()["backends"] if each.url == url)

    @property
    def moves(self):
        return self.backends.statistics()["moves"]


@asynccontextmanager
async def open_pool(*urls, **options):
    pool = Pool(urls, **options)
    for url in urls:
        await pool.backends.add(url)
    with trio.fail_after(10_000):
        async with open_single_nursery() as nursery:
            nursery.start_soon(pool.backends.watch)
            yield pool
            nursery.cancel_scope.cancel()


async def complete(lease, tokens=1000):
    await lease.attempt(begun(asked([1] * tokens, 1, timeout_s=500)))


async def test_a_task_moves_when_reading_its_prefix_elsewhere_is_cheaper_than_waiting(autojump_clock):
    async with open_pool(A, B) as pool, pool.backends.lease("t") as lease:
        home, other = lease.url, ({A, B} - {lease.url}).pop()
        pool.clients[home].says = load_of(waiting=8, tokens=10_000, seconds=10)
        pool.clients[other].says = load_of()
        await trio.sleep(2.5)
        await complete(lease)
        assert lease.url == home  # how long calls take is not known before the first
        await complete(lease, 3000)
        assert lease.url == home  # waits 5 s; there 3 s for the prefix: 2 + 1.5 * 3 is more
        await complete(lease, 1000)
        assert lease.url == other
        assert pool.moves == {"skew": 1}
        assert pool.of(home).wait_s == pytest.approx(5)
        assert pool.of(home).prefill_tokens_per_s == 1000


async def test_it_does_not_move_where_that_is_full_draining_unknown_or_as_busy(autojump_clock):
    async with open_pool(A, B) as pool, pool.backends.lease("t") as lease, pool.backends.lease("u") as neighbour:
        home, other = lease.url, neighbour.url
        pool.clients[home].says = load_of(waiting=80, tokens=10_000, seconds=1)
        await complete(lease)
        for says in (None, BackendError("no page", retryable=True), pool.clients[home].says):
            pool.clients[other].says = says
            await trio.sleep(2)
            await complete(lease)
        pool.clients[other].says = load_of()
        pool.backends.limit_tasks(1)
        await trio.sleep(2)
        await complete(lease)
        pool.backends.limit_tasks(0)
        pool.backends.drain(other)
        await trio.sleep(2)
        await complete(lease)
        assert (lease.url, pool.moves) == (home, {})
        await pool.backends.add(other)
        await complete(lease)
        assert (lease.url, pool.moves) == (other, {"skew": 1})


async def test_at_most_once_a_turn_and_not_in_the_middle_of_one(autojump_clock):
    async with open_pool(A, B) as pool, pool.backends.lease("t") as lease:
        home = lease.url
        await complete(lease)
        for client in pool.clients.values():
            client.says = load_of(tokens=10_000, seconds=1)
        turn = begun(asked([1, 2], 1, timeout_s=500))
        with trio.move_on_after(5):  # cut off in its first attempt
            await lease.attempt(turn)
        pool.clients[home].says = load_of(waiting=80, tokens=10_000, seconds=1)
        await trio.sleep(2)
        await lease.attempt(turn)
        assert lease.url == home
        await complete(lease)
        assert lease.url != home


async def test_many_at_once_do_not_flood_the_one_with_less_to_do(autojump_clock):
    """40 wait at A and none at B, and all begin a turn before the next report: those that moved are counted."""
    async with open_pool(A) as pool, trio.open_nursery() as nursery:
        pool.clients[A].says = load_of(running=40, waiting=40, tokens=10_000, seconds=1)
        ended = 0

        async def task(name):
            nonlocal ended
            async with pool.backends.lease(name) as lease:
                await complete(lease)
                await trio.sleep_until(15.0)
                await complete(lease)
                ended += 1

        for index in range(80):
            nursery.start_soon(task, f"t{index}")
        await trio.sleep(12)
        pool.clients[B] = LoadClient(B)
        pool.clients[B].says = load_of(running=0)
        await pool.backends.add(B)
        await trio.sleep(6)
        moved = pool.moves["skew"]
        assert 20 <= moved <= 40, moved
        assert pool.of(B).in_flight == moved
    assert ended == 80


async def test_without_reports_tasks_stay_where_they_are(autojump_clock):
    async with open_pool(A, B, load=LoadConfig(interval_s=0)) as pool, pool.backends.lease("t") as lease:
        home = lease.url
        for client in pool.clients.values():
            client.says = load_of(tokens=10_000, seconds=1)
        pool.clients[home].says = load_of(waiting=80, tokens=10_000, seconds=1)
        for _ in range(3):
            await complete(lease)
        assert (lease.url, pool.moves) == (home, {})


async def test_a_full_cache_lowers_the_limit_of_that_backend_and_room_comes_back(autojump_clock):
    policy = LoadConfig(interval_s=1, min_tasks=2, decrease_factor=0.5, increase_tasks=2)
    async with open_pool(A, load=policy) as pool, trio.open_nursery() as nursery:
        gates = [trio.Event() for _ in range(14)]
        running = set()

        async def task(index):
            async with pool.backends.lease(f"t{index}"):
                running.add(index)
                await gates[index].wait()
            running.discard(index)

        for index in range(8):
            nursery.start_soon(task, index)
        await trio.sleep(0.5)
        pool.clients[A].says = load_of(kv=0.99)
        await trio.sleep(3)
        assert (pool.of(A).max_tasks, len(running)) == (4, 8)  # nobody is sent away, and it falls once
        for index in range(8, 12):
            nursery.start_soon(task, index)
        for index in range(4):
            gates[index].set()
        pool.clients[A].says = load_of(kv=0.5)
        await trio.sleep(0.1)
        assert (len(running), pool.backends.statistics()["waiting"]) == (4, 4)
        await trio.sleep(2)
        assert (pool.of(A).max_tasks, len(running)) == (8, 8)
        pool.backends.limit_tasks(5)
        assert pool.of(A).max_tasks == 5
        for gate in gates:
            gate.set()


async def test_an_engine_that_stops_reporting_keeps_its_limit(autojump_clock):
    async with open_pool(A, load=LoadConfig(interval_s=1)) as pool:
        pool.clients[A].says = load_of(kv=0.99)
        await trio.sleep(1.5)
        assert pool.of(A).max_tasks == 4
        pool.clients[A].says = BackendError("gone", retryable=True)
        await trio.sleep(5)
        assert (pool.of(A).max_tasks, pool.of(A).kv_usage) == (4, None)


async def test_another_policy_holds_from_now_on_and_what_is_turned_off_is_forgotten(autojump_clock):
    off = LoadConfig(interval_s=0)
    async with open_pool(A, B, load=off) as pool, pool.backends.lease("t") as lease:
        home, other = lease.url, ({A, B} - {lease.url}).pop()
        pool.clients[home].says = load_of(waiting=80, kv=0.99, tokens=10_000, seconds=1)
        pool.clients[other].says = load_of()
        await complete(lease)
        assert (pool.of(home).wait_s, pool.of(home).max_tasks) == (None, 0)
        pool.backends.adopt(HealthConfig(interval_s=0), POLICY)
        await trio.sleep(1.5)
        assert (pool.of(home).kv_usage, pool.of(home).max_tasks) == (0.99, 4)
        pool.backends.adopt(HealthConfig(interval_s=0), off)
        await trio.sleep(5)
        await complete(lease)
        assert (pool.of(home).kv_usage, pool.of(home).max_tasks) == (None, 0)
        assert (lease.url, pool.moves) == (home, {})
        pool.backends.adopt(HealthConfig(interval_s=0), LoadConfig(interval_s=1000))
        await trio.sleep(5)
        pool.backends.adopt(HealthConfig(interval_s=0), POLICY)  # does not wait for the rest of the long interval
        await trio.sleep(1.5)
        await complete(lease)
        await complete(lease)
        assert (lease.url, pool.moves) == (other, {"skew": 1})
