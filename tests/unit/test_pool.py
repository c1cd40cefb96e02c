"""Placement of tasks on backends (pure), and the registration and leases around it (with clients that only pretend)."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
import pytest
import trio
import trio.testing

from prorl_trio.errors import BackendError
from prorl_trio.inference.engine import EngineClient, EngineInfo
from prorl_trio.inference.pool import BackendPool, Backends
from prorl_trio.testing.cancel_sweep import cancel_sweep

A, B, C = "http://a:1", "http://b:1", "http://c:1"

OPEN = {"paused": False, "waiting": 0, "completions_in_flight": 0}


def pool_of(*urls, seed=0):
    pool = BackendPool(Random(seed))
    for url in urls:
        pool.add(url)
    return pool


def in_flight(pool):
    return {each.url: each.in_flight for each in pool.statistics()}


# ---------------------------------------------------------------- pure placement


def test_tasks_spread_evenly_and_stay():
    pool = pool_of(A, B, C)
    leases = [pool.assign(f"t{index}") for index in range(30)]
    assert in_flight(pool) == {A: 10, B: 10, C: 10}
    homes = [lease.backend for lease in leases]
    for lease in leases[:10]:
        pool.release(lease)
    assert [lease.backend for lease in leases] == homes


def test_the_least_loaded_takes_the_next():
    pool = pool_of(A, B)
    leases = [pool.assign(f"t{index}") for index in range(8)]
    for lease in leases:
        if lease.backend.url == B:
            pool.release(lease)
    assert [pool.assign(f"u{index}").backend.url for index in range(4)] == [B] * 4
    assert in_flight(pool) == {A: 4, B: 4}


def test_ties_are_broken_evenly_also_one_task_at_a_time():
    """One task after the other: each time all are idle, and each must be as likely as the others."""
    pool = pool_of(A, B, C, seed=5)
    homes = Counter()
    previous = None
    repeats = 0
    for index in range(3000):
        lease = pool.assign(f"t{index}")
        homes[lease.backend.url] += 1
        repeats += lease.backend is previous
        previous = lease.backend
        pool.release(lease)
    assert all(900 < count < 1100 for count in homes.values())
    assert 900 < repeats < 1100


def test_no_backend_no_lease():
    pool = BackendPool(Random(0))
    assert pool.assign("t") is None
    pool.add(A)
    pool.drain(A)
    assert pool.assign("t") is None
    assert pool.open_leases == 0


def test_a_drained_backend_keeps_its_tasks_and_can_come_back():
    pool = pool_of(A)
    lease = pool.assign("t")
    pool.drain(A)
    pool.drain(A)
    assert pool.statistics()[0].state == "draining"
    assert in_flight(pool) == {A: 1}
    pool.add(A)
    assert pool.assign("u").backend is lease.backend


def test_a_removed_backend_is_gone_with_its_last_task():
    pool = pool_of(A, B)
    leases = [pool.assign(f"t{index}") for index in range(4)]
    removed = pool.remove(A)
    assert {each.url: each.state for each in pool.statistics()} == {A: "removed", B: "active"}
    assert pool.get(A) is None
    for lease in leases:
        pool.release(lease)
    assert in_flight(pool) == {B: 0}
    assert removed.in_flight == 0


def test_the_url_of_a_removed_backend_may_be_added_again():
    pool = pool_of(A)
    old = pool.assign("t")
    pool.remove(A)
    new = pool.add(A)
    assert new is not old.backend
    assert pool.assign("u").backend is new
    pool.release(old)
    assert new.in_flight == 1


def test_move_takes_the_least_loaded_other():
    pool = pool_of(A, B, C)
    leases = {lease.backend.url: lease for lease in (pool.assign(f"t{index}") for index in range(3))}
    pool.release(leases[C])
    assert pool.move(leases[A])
    assert leases[A].backend.url == C
    assert in_flight(pool) == {A: 0, B: 1, C: 1}


def test_move_never_returns_to_where_it_failed():
    pool = pool_of(A, B)
    lease = pool.assign("t")
    first = lease.backend.url
    assert pool.move(lease)
    assert lease.backend.url != first
    alone = pool_of(A)
    only = alone.assign("t")
    assert not alone.move(only)
    assert in_flight(alone) == {A: 1}


def test_misuse_is_an_error_and_changes_nothing():
    pool = pool_of(A)
    lease = pool.assign("t")
    with pytest.raises(ValueError, match="already has a backend: http://a:1"):
        pool.assign("t")
    pool.release(lease)
    for misuse in (pool.release, pool.move):
        with pytest.raises(ValueError, match="is not open"):
            misuse(lease)
    with pytest.raises(KeyError):
        pool.remove(B)
    with pytest.raises(KeyError):
        pool.drain(B)
    assert in_flight(pool) == {A: 0}


def test_weights_share_the_tasks_and_change_while_they_run():
    pool = pool_of(A)
    pool.add(B, weight=3)
    for index in range(40):
        pool.assign(f"t{index}")
    assert in_flight(pool) == {A: 10, B: 30}
    pool.add(A, weight=3)
    assert Counter(pool.assign(f"u{index}").backend.url for index in range(20)) == {A: 20}
    with pytest.raises(ValueError, match="a weight must be > 0, got 0"):
        pool.add(A, weight=0)


def test_one_that_is_full_does_not_hold_up_another_with_room():
    pool = pool_of(A, B)
    pool.limit_one(pool.get(A), 1)
    homes = Counter(pool.assign(f"t{index}").backend.url for index in range(6))
    assert homes == {A: 1, B: 5}
    pool.limit(5)
    assert Counter(pool.assign(f"u{index}").backend.url for index in range(4)) == {A: 4}
    assert pool.assign("none has room") is None


def test_a_suspended_backend_gets_nothing_until_it_is_well():
    pool = pool_of(A, B)
    leases = [pool.assign(f"t{index}") for index in range(4)]
    ill = pool.get(A)
    pool.suspend(ill, suspended=True)
    assert pool.assign("u").backend.url == B
    moved = [lease for lease in leases if lease.backend is ill]
    assert all(pool.move(lease) for lease in moved)
    assert in_flight(pool) == {A: 0, B: 5}
    assert pool.moves == {"failure": 2}
    pool.suspend(ill, suspended=False)
    assert pool.assign("v").backend is ill


def test_one_added_late_takes_its_share_and_is_not_flooded():
    """A and B have 20 tasks each. As they end, one after the other, their successors go to C until it has as many."""
    flooded = {}
    for strategy in ("least_in_flight", "assignments_ever"):
        pool = BackendPool(Random(0), strategy=strategy)
        for url in (A, B):
            pool.add(url)
        running = [pool.assign(f"t{index}") for index in range(40)]
        pool.add(C)
        for index in range(200):
            pool.release(running.pop(0))
            running.append(pool.assign(f"u{index}"))
            flooded[strategy] = max(flooded.get(strategy, 0), in_flight(pool)[C])
        if strategy == "least_in_flight":
            assert sorted(in_flight(pool).values()) == [13, 13, 14]
    assert flooded["least_in_flight"] == 14
    assert flooded["assignments_ever"] >= 20


def test_the_strategies_to_compare_with():
    pool = BackendPool(Random(0), strategy="round_robin")
    for url in (A, B, C):
        pool.add(url)
    turns = [pool.assign(f"t{index}").backend.url for index in range(9)]
    assert turns == turns[:3] * 3
    assert set(turns) == {A, B, C}
    split = BackendPool(Random(0), 1, strategy="static_split")
    for url in (A, B):
        split.add(url)
    assert [split.assign(f"t{index}").backend.url for index in range(4)] == [A, B, A, B]
    ever = BackendPool(Random(0), strategy="assignments_ever")
    ever.add(A)
    for index in range(5):
        ever.release(ever.assign(f"t{index}"))
    ever.add(B)
    assert [ever.assign(f"u{index}").backend.url for index in range(5)] == [B] * 5
    with pytest.raises(ValueError, match="no strategy 'best'; there are least_in_flight"):
        BackendPool(Random(0), strategy="best")


# ---------------------------------------------------------------- registration and leases


class FakeClient(EngineClient):
    """Answers its probe when `ready` is set, by `error` if there is one."""

    def __init__(self, url):
        self.url = url
        self.ready = trio.Event()
        self.ready.set()
        self.error = None
        self.closed = 0
        self.probes = 0

    async def probe(self, *, timeout_s):
        self.probes += 1
        await self.ready.wait()
        if self.error:
            raise self.error
        return EngineInfo(url=self.url, model=f"m{self.probes}", max_model_len=9, engine="fake", policy_version="0")

    async def generate(self, prompt_token_ids, sampling, *, max_tokens, request_id, timeout_s):
        raise NotImplementedError

    async def aclose(self):
        self.closed += 1
        await trio.lowlevel.checkpoint()


class Clients(dict):
    """A client factory that remembers the latest client of each URL."""

    def __call__(self, url):
        self[url] = FakeClient(url)
        return self[url]


@pytest.fixture
def clients():
    return Clients()


@pytest.fixture
def backends(clients):
    return Backends(clients, random=Random(0))


async def test_added_listed_leased_removed(backends, clients, autojump_clock):
    info = await backends.add(A + "/")
    assert info.url == A
    assert backends.list() == (info,)
    async with backends.lease("t") as lease:
        assert (lease.task_id, lease.url, lease.info) == ("t", A, info)
        assert lease.client is clients[A]
        await backends.remove(A + "/")
        assert backends.list() == ()
        assert lease.client is clients[A]
        assert clients[A].closed == 0
    assert clients[A].closed == 1
    assert backends.statistics() == {"open_leases": 0, "waiting": 0, "moves": {}, "gate": OPEN, "backends": []}


async def test_statistics_can_be_sent(backends):
    await backends.add(A)
    async with backends.lease("t"):
        packed = msgspec.msgpack.decode(msgspec.msgpack.encode(backends.statistics()))
    assert packed == {
        "open_leases": 1,
        "gate": OPEN,
        "waiting": 0,
        "moves": {},
        "backends": [
            {
                "url": A,
                "state": "active",
                "in_flight": 1,
                "assigned_total": 1,
                "suspended": False,
                "weight": 1.0,
                "max_tasks": 0,
                "error": "",
                "engine_running": None,
                "engine_waiting": None,
                "kv_usage": None,
                "wait_s": None,
                "prefill_tokens_per_s": None,
            }
        ],
    }


async def test_a_failed_or_cancelled_probe_changes_nothing_and_closes_its_client(clients, autojump_clock):
    def failing(url):
        client = clients(url)
        client.error = BackendError("it drops token ids", retryable=False)
        return client

    def hanging(url):
        client = clients(url)
        client.ready = trio.Event()
        return client

    backends = Backends(failing)
    with pytest.raises(BackendError, match="drops token ids"):
        await backends.add(A)
    assert (backends.list(), clients[A].closed) == ((), 1)
    backends = Backends(hanging)
    with trio.move_on_after(1) as scope:
        await backends.add(A)
    assert scope.cancelled_caught
    assert (backends.list(), clients[A].closed) == ((), 1)


async def test_added_twice_it_is_one_backend_probed_again(backends, clients):
    await backends.add(A)
    first = clients[A]
    backends.drain(A)
    info = await backends.add(A)
    assert clients[A] is first
    assert (first.probes, first.closed) == (2, 0)
    assert backends.list() == (info,)
    async with backends.lease("t") as lease:
        assert lease.info.model == "m2"


async def test_added_twice_at_once_it_is_one_backend(clients, autojump_clock):
    made = []

    def slow(url):
        client = FakeClient(url)
        client.ready = trio.Event()
        made.append(client)
        return client

    backends = Backends(slow)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(backends.add, A)
        nursery.start_soon(backends.add, A)
        await trio.testing.wait_all_tasks_blocked()
        for client in made:
            client.ready.set()
    assert len(backends.list()) == 1
    assert sorted(client.closed for client in made) == [0, 1]


async def test_removed_while_probed_again_it_stays_removed(backends, clients, autojump_clock):
    await backends.add(A)
    clients[A].ready = trio.Event()

    async def add_again():
        with pytest.raises(BackendError, match="taken out while it was probed"):
            await backends.add(A)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(add_again)
        await trio.testing.wait_all_tasks_blocked()
        await backends.remove(A)
        clients[A].ready.set()
    assert backends.list() == ()


async def test_unknown_urls_and_too_many(clients):
    backends = Backends(clients, max_backends=2)
    await backends.add(A)
    await backends.add(B)
    with pytest.raises(BackendError, match="2 backends are registered"):
        await backends.add(C)
    assert clients[C].closed == 1
    with pytest.raises(BackendError, match=f"{C}: no such backend; registered: {A}, {B}"):
        await backends.remove(C)
    with pytest.raises(BackendError, match="no such backend"):
        backends.drain(C)


async def test_a_lease_waits_for_a_backend_and_no_longer_than_the_caller_lets_it(backends, autojump_clock):
    with trio.move_on_after(5) as scope:
        async with backends.lease("t"):
            pytest.fail("there is no backend")
    assert scope.cancelled_caught
    assert backends.statistics()["waiting"] == 0
    got = []

    async def take(task_id):
        async with backends.lease(task_id) as lease:
            got.append((task_id, lease.url))

    async with trio.open_nursery() as nursery:
        for index in range(3):
            nursery.start_soon(take, f"t{index}")
        await trio.testing.wait_all_tasks_blocked()
        assert backends.statistics()["waiting"] == 3
        assert "3 waiting" in repr(backends)
        await backends.add(A)
    assert sorted(got) == [("t0", A), ("t1", A), ("t2", A)]


async def test_a_lease_is_given_back_when_its_block_fails(backends):
    await backends.add(A)
    with pytest.raises(ZeroDivisionError):
        async with backends.lease("t"):
            raise ZeroDivisionError
    assert backends.statistics()["open_leases"] == 0


async def test_a_removed_backends_client_is_closed_also_when_the_last_task_is_cancelled(
    backends, clients, autojump_clock
):
    await backends.add(A)
    with trio.CancelScope() as scope:
        async with backends.lease("t"):
            await backends.remove(A)
            scope.cancel()
            await trio.sleep_forever()
    assert clients[A].closed == 1
    assert backends.statistics() == {"open_leases": 0, "waiting": 0, "moves": {}, "gate": OPEN, "backends": []}


async def test_repin_moves_to_another_backend(backends, clients):
    await backends.add(A)
    async with backends.lease("t") as lease:
        assert not lease.repin()
        assert lease.url == A
        await backends.add(B)
        assert lease.repin()
        assert (lease.url, lease.client, lease.info.url) == (B, clients[B], B)
        await backends.remove(A)
    assert (clients[A].closed, clients[B].closed) == (1, 0)


async def test_repin_away_from_a_removed_backend_closes_it_in_the_end(backends, clients):
    await backends.add(A)
    async with backends.lease("t") as lease:
        await backends.remove(A)
        await backends.add(B)
        assert lease.repin()
    assert (clients[A].closed, clients[B].closed) == (1, 0)


async def test_cancelled_at_any_step_no_lease_and_no_client_is_left(clients):
    backends = Backends(clients, random=Random(0))

    async def use():
        await backends.add(A)
        async with backends.lease("t") as lease:
            await backends.add(B)
            lease.repin()
            await trio.lowlevel.checkpoint()
            await backends.remove(lease.url)
        await backends.remove(backends.list()[0].url)

    async def check(run):
        assert backends.statistics()["open_leases"] == 0
        for info in backends.list():
            await backends.remove(info.url)
        assert backends.statistics()["backends"] == []
        assert all(client.closed == 1 for client in clients.values())

    assert await cancel_sweep(use, check) > 5


async def test_one_task_holds_one_lease(backends):
    await backends.add(A)
    async with backends.lease("t"):
        with pytest.raises(ValueError, match="already has a backend"):
            async with backends.lease("t"):
                pytest.fail("two leases")
    async with backends.lease("t"):
        pass


async def test_close_ends_everything(backends, clients, autojump_clock):
    async def waits():
        with pytest.raises(BackendError, match="the node is closing"):
            async with backends.lease("t"):
                pytest.fail("closed")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waits)
        await trio.testing.wait_all_tasks_blocked()
        await backends.aclose()
    await backends.aclose()
    await waits()
    with pytest.raises(BackendError, match="taken out while"):
        await backends.add(A)
    assert clients[A].closed == 1


async def test_close_under_cancellation_closes_every_client(backends, clients):
    for url in (A, B, C):
        await backends.add(url)
    with trio.CancelScope() as scope:
        scope.cancel()
        await backends.aclose()
    assert [clients[url].closed for url in (A, B, C)] == [1, 1, 1]


async def test_tasks_beyond_the_limit_wait_by_priority_and_nobody_overtakes():
    order = []

    async def task(name, priority):
        async with backends.lease(name, priority):
            order.append(name)
            await gate.wait()

    gate = trio.Event()
    backends = Backends(FakeClient, max_tasks_per_backend=1)
    with trio.fail_after(10):
        await backends.add("http://a")
        async with trio.open_nursery() as nursery:
            for name, priority in [("first", 1), ("t1", 1), ("t2", 1), ("e1", 0)]:
                nursery.start_soon(task, name, priority)
                await trio.testing.wait_all_tasks_blocked()
            assert order == ["first"]
            assert backends.statistics()["waiting"] == 3
            backends.limit_tasks(2)
            await trio.testing.wait_all_tasks_blocked()
            assert len(order) == 2
            gate.set()
        assert set(order) == {"first", "t1", "t2", "e1"}
        assert backends.statistics()["open_leases"] == 0
