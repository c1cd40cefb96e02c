"""The HTTP client against servers that end, stall, overflow or talk nonsense."""

from __future__ import annotations

import socket

import pytest
import trio

from prorl_trio.http.client import ConnectionLost, HttpClient, HttpLimits, RequestTimedOut
from prorl_trio.http.connection import ConnectFailed, ResponseMalformed, ResponseTooLarge
from support.scripted_http import OK, answering, serving


async def get(client, timeout_s=5.0, body=b""):
    return await client.request("POST", "/x", body=body, timeout_s=timeout_s)


# ---------------------------------------------------------------- connections that end


async def test_a_connection_closed_while_idle_is_not_used_again():
    with trio.fail_after(10):
        async with serving(answering(OK)) as server:
            client = HttpClient(server.origin)
            for _ in range(3):
                assert (await get(client)).body == b"ok"
                await server.wait(lambda: server.open == 0)
            assert server.connections == 3
            client.close()


async def test_a_kept_connection_that_ends_without_a_byte_is_replaced_once():
    async def script(peer):
        await peer.read_request()
        if peer.number == 2:
            return  # the replacement ends in silence, too
        await peer.send(OK)
        await peer.read_request()

    with trio.fail_after(10):
        async with serving(script) as server:
            client = HttpClient(server.origin)
            await get(client)
            with pytest.raises(ConnectionLost, match="after 0 bytes"):
                await get(client)
            assert (server.connections, len(server.requests)) == (2, 3)
            assert (await get(client)).body == b"ok"
            assert (await get(client)).body == b"ok"
            assert server.connections == 4
            client.close()


async def test_a_fresh_connection_that_ends_without_a_byte_is_an_error():
    with trio.fail_after(10):
        async with serving(answering(b"")) as server:
            client = HttpClient(server.origin)
            with pytest.raises(ConnectionLost) as caught:
                await get(client)
            assert caught.value.received_bytes == 0
            assert len(server.requests) == 1


@pytest.mark.parametrize("part", [b"H", b"HTTP/1.1 200 OK\r\n", OK[:-1]])
async def test_nothing_is_sent_twice_once_a_byte_came(part):
    with trio.fail_after(10):
        async with serving(answering(OK, part)) as server:
            client = HttpClient(server.origin)
            await get(client)
            with pytest.raises(ConnectionLost) as caught:
                await get(client)
            assert caught.value.received_bytes == len(part)
            assert (server.connections, len(server.requests)) == (1, 2)
            assert (client.statistics().busy, client.statistics().idle) == (0, 0)


async def test_refused_and_unreachable():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with trio.fail_after(10), pytest.raises(ConnectFailed, match="refused"):
            await get(HttpClient(f"http://127.0.0.1:{unused.getsockname()[1]}"))
    with trio.fail_after(30), pytest.raises(ConnectFailed, match=r"no-such-host\.invalid"):
        await get(HttpClient("http://no-such-host.invalid:80"), timeout_s=20)
    with trio.fail_after(30), pytest.raises(ConnectFailed, match=r"cannot connect to a\.\.b:80"):
        await get(HttpClient("http://a..b:80"), timeout_s=20)


async def test_connecting_has_its_own_timeout():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        callers = [socket.socket() for _ in range(4)]
        try:
            for caller in callers:  # fill the backlog: further connection attempts get no answer
                caller.setblocking(False)
                caller.connect_ex(full.getsockname())
            client = HttpClient(f"http://127.0.0.1:{full.getsockname()[1]}", limits=HttpLimits(connect_timeout_s=0.2))
            with trio.fail_after(10), pytest.raises(ConnectFailed, match=r"no answer within 0\.2 s"):
                await get(client)
        finally:
            for caller in callers:
                caller.close()


# ---------------------------------------------------------------- limits and nonsense


async def test_a_slow_answer_times_out_and_its_connection_is_closed():
    with trio.fail_after(10):
        async with serving(answering(b"HTTP/1.1 200 OK\r\n", then_close=False)) as server:
            client = HttpClient(server.origin)
            with pytest.raises(RequestTimedOut, match=r"not answered within 0\.1 s"):
                await get(client, timeout_s=0.1)
            await server.wait(lambda: server.open == 0)
            assert client.statistics().busy == 0


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1f4\r\n" + b"x" * 500 + b"\r\n",
    ],
)
async def test_a_response_beyond_the_limit_is_refused(answer):
    async def endless(peer):
        await peer.read_request()
        await peer.send(answer)
        while True:
            await peer.send(b"1f4\r\n" + b"x" * 500 + b"\r\n")

    with trio.fail_after(10):
        async with serving(endless) as server:
            client = HttpClient(server.origin, limits=HttpLimits(max_response_bytes=1000))
            with pytest.raises(ResponseTooLarge, match="exceeds the maximum of 1000"):
                await get(client)
            await server.wait(lambda: server.open == 0)


@pytest.mark.parametrize(
    "answer",
    [
        b"220 mail.example.org ESMTP\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000,
    ],
)
async def test_what_is_not_http_is_refused(answer):
    with trio.fail_after(10):
        async with serving(answering(answer, then_close=False)) as server:
            client = HttpClient(server.origin)
            with pytest.raises(ResponseMalformed, match=r"not an HTTP/1\.1 response"):
                await get(client)
            await server.wait(lambda: server.open == 0)


async def test_bytes_after_a_response_end_the_connection():
    with trio.fail_after(10):
        async with serving(
            answering(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", then_close=False)
        ) as server:
            client = HttpClient(server.origin)
            assert (await get(client)).body == b"ok"
            assert client.statistics().idle == 0
            assert (await get(client)).body == b"ok"
            assert server.connections == 2


@pytest.mark.parametrize(
    "origin",
    [
        "127.0.0.1:8000",
        "ftp://h:1",
        "http://",
        "http://h:1/v1",
        "http://h:1?x",
        "http://u:p@h:1",
        "http://h:port",
        "http://h:99999",
        "http://h\N{LATIN SMALL LETTER E WITH ACUTE}:1",
    ],
)
def test_what_is_not_an_origin_is_refused(origin):
    with pytest.raises(ValueError, match="is not an origin like"):
        HttpClient(origin)
