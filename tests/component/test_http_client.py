"""The HTTP client and its pool of connections, against servers that do as they should."""

from __future__ import annotations

import os
import ssl

import pytest
import trio
import trio.testing
import trustme

from prorl_trio.http.client import ClientClosed, HttpClient, HttpLimits, TooManyWaiting
from prorl_trio.http.connection import ConnectFailed
from support.cancel_sweep import cancel_sweep
from support.scripted_http import OK, answering, echo, serving


async def get(client, timeout_s=5.0, body=b""):
    return await client.request("POST", "/x", body=body, timeout_s=timeout_s)


# ---------------------------------------------------------------- the good cases


async def test_requests_share_a_kept_alive_connection():
    with trio.fail_after(10):
        async with serving(echo) as server:
            client = HttpClient(server.origin)
            for index in range(5):
                response = await get(client, body=b"body %d" % index)
                assert (response.status, response.body) == (200, b"body %d" % index)
            assert server.connections == 1
            assert client.statistics().opened_total == 1
            assert client.statistics().idle == 1
            assert server.requests[0].startswith(b"POST /x HTTP/1.1\r\n")
            client.close()
            await server.wait(lambda: server.open == 0)


async def test_chunked_and_informational_and_headers():
    answer = (
        b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 404 Not Found\r\nX-Thing: One\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    with trio.fail_after(10):
        async with serving(answering(answer, answer)) as server:
            client = HttpClient(server.origin)
            for _ in range(2):
                response = await get(client)
                assert (response.status, response.body, response.headers["x-thing"]) == (404, b"abcde", "One")
            assert server.connections == 1
            client.close()


async def test_a_body_that_ends_with_the_connection_is_complete_and_not_reused():
    with trio.fail_after(10):
        async with serving(answering(b"HTTP/1.0 200 OK\r\n\r\nall of it")) as server:
            client = HttpClient(server.origin)
            assert (await get(client)).body == b"all of it"
            assert (await get(client)).body == b"all of it"
            assert server.connections == 2
            assert client.statistics().stale_total == 0
            client.close()


async def test_an_error_answer_counts_although_the_request_was_not_read():
    async def refuse(peer):
        await peer.stream.receive_some(100)
        await peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig")
        await peer.stream.send_eof()
        while await peer.stream.receive_some():  # an RST would overtake the answer
            pass

    with trio.fail_after(10):
        async with serving(refuse) as server:
            client = HttpClient(server.origin)
            response = await get(client, body=b"x" * 4_000_000)
            assert (response.status, response.body) == (413, b"big")
            assert client.statistics().idle == 0
            client.close()


# ---------------------------------------------------------------- the pool


async def test_connections_are_bounded_and_waiting_is_first_come_first_served():
    gate = trio.Event()

    async def gated(peer):
        while (body := await peer.read_request()) is not None:
            await gate.wait()
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    with trio.fail_after(10):
        async with serving(gated) as server:
            client = HttpClient(server.origin, limits=HttpLimits(max_connections=1))
            async with trio.open_nursery() as nursery:
                for index in range(6):
                    nursery.start_soon(get, client, 5.0, b"%d" % index)
                    await trio.testing.wait_all_tasks_blocked()
                await server.wait(lambda: server.requests)
                assert (client.statistics().busy, client.statistics().waiting) == (1, 5)
                assert "busy 1, idle 0, waiting 5, at most 1" in repr(client)
                gate.set()
            assert [request[-1:] for request in server.requests] == [b"0", b"1", b"2", b"3", b"4", b"5"]
            assert server.connections == 1
            client.close()


async def test_two_thousand_waiting_requests_are_served():
    with trio.fail_after(60):
        async with serving(echo) as server:
            client = HttpClient(server.origin, limits=HttpLimits(max_connections=8))
            async with trio.open_nursery() as nursery:
                for _ in range(2000):
                    nursery.start_soon(get, client, 50.0)
            assert len(server.requests) == 2000
            assert server.connections <= 8
            assert client.statistics().busy == 0
            client.close()


async def test_one_more_than_the_waiting_limit_is_refused():
    with trio.fail_after(10):
        async with serving(answering(then_close=False)) as server, trio.open_nursery() as nursery:
            client = HttpClient(server.origin, limits=HttpLimits(max_connections=1, max_waiting_requests=2))
            for _ in range(3):
                nursery.start_soon(get, client)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(TooManyWaiting, match="2 requests wait for one of 1 connections"):
                await get(client)
            nursery.cancel_scope.cancel()
        assert client.statistics().waiting == 0


async def test_an_expired_connection_is_not_used_again():
    with trio.fail_after(10):
        async with serving(echo) as server:
            client = HttpClient(server.origin, limits=HttpLimits(keep_alive_s=0.0))
            await get(client)
            await get(client)
            assert server.connections == 2
            assert client.statistics().stale_total == 0
            client.close()


# ---------------------------------------------------------------- cancel and close


async def test_cancel_closes_the_connection_at_once():
    with trio.fail_after(10):
        async with serving(answering(then_close=False)) as server:
            client = HttpClient(server.origin)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(get, client)
                await server.wait(lambda: server.open == 1)
                nursery.cancel_scope.cancel()
            assert (client.statistics().busy, client.statistics().idle) == (0, 0)
            await server.wait(lambda: server.open == 0)


async def test_cancel_while_waiting_gives_no_slot_away():
    gate = trio.Event()

    async def gated(peer):
        while await peer.read_request() is not None:
            await gate.wait()
            await peer.send(OK)

    with trio.fail_after(10):
        async with serving(gated) as server:
            client = HttpClient(server.origin, limits=HttpLimits(max_connections=1))
            async with trio.open_nursery() as outer:
                outer.start_soon(get, client)
                await server.wait(lambda: server.requests)
                async with trio.open_nursery() as inner:
                    for _ in range(3):
                        inner.start_soon(get, client)
                    await trio.testing.wait_all_tasks_blocked()
                    assert client.statistics().waiting == 3
                    inner.cancel_scope.cancel()
                assert client.statistics().waiting == 0
                gate.set()
                await get(client)
            client.close()


async def test_close_fails_requests_in_flight_waiting_and_later():
    lost = []

    async def fails(client):
        with pytest.raises(ClientClosed, match="the client is closed") as caught:
            await get(client)
        lost.append(caught.value)

    with trio.fail_after(10):
        async with serving(answering(then_close=False)) as server:
            client = HttpClient(server.origin, limits=HttpLimits(max_connections=2))
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(fails, client)
                await server.wait(lambda: server.open == 2)
                await trio.testing.wait_all_tasks_blocked()
                client.close()
                client.close()
            await fails(client)
            assert len(lost) == 5
            assert server.connections == 2
            assert "closed" in repr(client)
            await server.wait(lambda: server.open == 0)


async def test_cancelled_at_any_step_nothing_is_left():
    fds = len(os.listdir("/proc/self/fd"))
    with trio.fail_after(30):
        async with serving(echo) as server:
            client = HttpClient(server.origin, limits=HttpLimits(max_connections=1))

            async def two_requests():
                for _ in range(2):
                    await get(client, body=b"x" * 100_000)

            async def check(run):
                nonlocal client
                assert client.statistics().busy == 0
                assert (await get(client, body=b"again")).body == b"again"
                client.close()
                await server.wait(lambda: server.open == 0)
                client = HttpClient(server.origin, limits=HttpLimits(max_connections=1))

            assert await cancel_sweep(two_requests, check) > 10
    assert len(os.listdir("/proc/self/fd")) == fds


# ---------------------------------------------------------------- TLS


async def test_https():
    authority, certified = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(certified)
    authority.configure_trust(trust := ssl.create_default_context())
    with trio.fail_after(20):
        async with serving(echo, tls=certified) as server:
            trusting = HttpClient(server.origin, ssl_context=trust)
            for _ in range(3):
                assert (await get(trusting, body=b"secret")).body == b"secret"
            assert server.connections == 1
            trusting.close()
            with pytest.raises(ConnectFailed, match="CERTIFICATE_VERIFY_FAILED"):
                await get(HttpClient(server.origin))
