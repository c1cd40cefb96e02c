"""Registration of backends and leases on them, with clients that only pretend."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
import trio
import trio.testing

from prorl_trio.inference.engines.protocol import EngineClient, EngineInfo, made_by
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.types.errors import BackendError
from support.cancel_sweep import cancel_sweep

A, B, C = "http://a:1", "http://b:1", "http://c:1"

OPEN = {"paused": False, "waiting": 0, "completions_in_flight": 0}
NOTHING = {
    "open_leases": 0,
    "waiting": 0,
    "moves": {},
    "admission": OPEN,
    "updating": "",
    "versions": [],
    "configured": [],
    "backends": [],
}


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

    async def generate(self, request):
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
    return Backends(made_by(clients), random=Random(0))


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
    assert backends.statistics() == NOTHING


async def test_statistics_can_be_sent(backends):
    await backends.add(A)
    async with backends.lease("t"):
        packed = msgspec.msgpack.decode(msgspec.msgpack.encode(backends.statistics()))
    assert packed == {
        "open_leases": 1,
        "admission": OPEN,
        "updating": "",
        "versions": [],
        "configured": [],
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
                "policy_version": "0",
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

    backends = Backends(made_by(failing))
    with pytest.raises(BackendError, match="drops token ids"):
        await backends.add(A)
    assert (backends.list(), clients[A].closed) == ((), 1)
    backends = Backends(made_by(hanging))
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

    backends = Backends(made_by(slow))
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
    backends = Backends(made_by(clients), max_backends=2)
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
    assert backends.statistics() == NOTHING


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
    backends = Backends(made_by(clients), random=Random(0))

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
    backends = Backends(made_by(FakeClient), max_tasks_per_backend=1)
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
