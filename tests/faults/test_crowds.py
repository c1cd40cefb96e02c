"""Crowds without a token keep nobody out: not from one address, not from many, not while they come again and again."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.edges.guard import Strangers, peer_of
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_rest import open_rest
from support.fake_service import TOKEN, open_service
from support.raw_trainer import raw_trainer

pytestmark = pytest.mark.timeout(60)

ONE = ["127.0.0.1"]
MANY = [f"127.0.0.{last}" for last in range(2, 60)]
UPGRADE = b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n"
SLOW_HEAD = b"GET /healthz HTTP/1.1\r\nHo"
SLOW_BODY = b"POST /v1/rollouts HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"


@asynccontextmanager
async def crowd(service, size, addresses, says):
    """So many connections that say this and no more; one that is closed comes again."""

    async def stay(address):
        while True:
            with suppress(trio.BrokenResourceError, OSError):
                async with await trio.open_tcp_stream(service.host, service.port, local_address=address) as stream:
                    await stream.send_all(says)
                    here.add(stream)
                    while await stream.receive_some():
                        pass
            await trio.sleep(5)

    here = set()
    async with trio.open_nursery() as nursery:
        for number in range(size):
            nursery.start_soon(stay, addresses[number % len(addresses)])
        while len(here) < size:
            await trio.sleep(0.01)
        yield
        nursery.cancel_scope.cancel()


async def work(service, job_id):
    async with connect(service.url, TOKEN) as client:
        await client.submit([make_spec(job_id)])
        return [outcome.job_id async for outcome in client.results(1)]


@pytest.mark.parametrize(
    ("addresses", "says"), [(ONE, b""), (ONE, UPGRADE), (MANY, b"")], ids=["silent", "slow", "many addresses"]
)
async def test_a_crowd_keeps_no_trainer_out(addresses, says):
    with trio.fail_after(50):
        async with (
            open_service(FakeNode(on_submit=make_outcome)) as service,
            raw_trainer(service) as known,
        ):
            assert (await known.hello("known")).resumed is False
            async with crowd(service, 160, addresses, says):
                for number in range(3):
                    assert await work(service, f"j-{number}") == [f"j-{number}"]
            assert len(await known.submit(make_spec("mine"))) == 1  # who is known, stays


@pytest.mark.parametrize(
    ("addresses", "says"), [(ONE, b""), (ONE, SLOW_HEAD), (MANY, SLOW_BODY)], ids=["silent", "slow head", "slow body"]
)
async def test_a_crowd_keeps_nobody_from_rest(addresses, says):
    node = FakeNode(on_submit=make_outcome)
    with trio.fail_after(50):
        async with open_rest(node) as rest, await rest.open_stream() as known:
            connection = await rest.send(known, "GET", "/v1/results?wait=3")
            async with crowd(rest, 300, addresses, says):
                for _ in range(3):
                    assert (await rest.call("GET", "/healthz")).status == 200
                    assert (await rest.call("GET", "/v1/results")).status == 200
            connection.receive_data(await known.receive_some())
            assert connection.next_event().status_code == 200  # who is known, was answered


async def test_connections_with_the_token_have_a_limit_of_their_own():
    with trio.fail_after(30):
        async with (
            open_rest(FakeNode(), max_connections=2) as rest,
            await rest.open_stream() as one,
            await rest.open_stream() as two,
        ):
            for stream in (one, two):
                await rest.send(stream, "GET", "/v1/results")
                assert b" 200" in await stream.receive_some()
            answer = await rest.call("GET", "/v1/results")
            assert (answer.status, answer.json()["error"]["code"]) == (429, "admission")
            assert "listen.max_connections" in answer.json()["error"]["message"]
            assert (await rest.call("GET", "/healthz")).status == 200


# ---------------------------------------------------------------- who makes room


def arrive(strangers, *peers):
    shown_out = []
    there = [strangers.arrive(peer, lambda n=n: shown_out.append(n)) for n, peer in enumerate(peers)]
    return there, shown_out


def test_room_is_made_by_the_peer_with_most_the_silent_and_the_oldest():
    strangers = Strangers(4)
    there, shown_out = arrive(strangers, "a", "b", "b", "b")
    there[1].progress = 1
    strangers.arrive("c", list)
    assert shown_out == [2]
    strangers.arrive("d", list)
    assert shown_out == [2, 3]
    for peer in "efgh":
        strangers.arrive(peer, list)
    assert shown_out == [2, 3, 0]
    assert (len(strangers), strangers.displaced_total) == (4, 6)


def test_who_is_served_makes_no_room():
    strangers = Strangers(2)
    there, shown_out = arrive(strangers, "a", "a")
    for stranger in there:
        stranger.serving = True
    strangers.arrive("a", list)
    assert (len(strangers), shown_out) == (3, [])
    for stranger in (*there, there[0]):
        strangers.leave(stranger)
    assert len(strangers) == 1


@pytest.mark.parametrize(
    ("family", "address", "peer"),
    [
        (trio.socket.AF_INET, ("192.0.2.7", 1), "192.0.2.7"),
        (trio.socket.AF_INET6, ("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::/64"),
        (trio.socket.AF_INET6, ("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        (trio.socket.AF_UNIX, "", "this host"),
    ],
)
def test_who_is_counted_together(family, address, peer):
    assert peer_of(SimpleNamespace(family=family, getpeername=lambda: address)) == peer
