"""The HTTP client against raw loopback servers that do what servers do, and what they should not."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
from contextlib import asynccontextmanager
from shutil import which

import pytest
import trio
import trio.testing

from prorl_trio.inference.http import (
    ClientClosed,
    ConnectFailed,
    ConnectionLost,
    HttpClient,
    HttpLimits,
    RequestTimedOut,
    ResponseMalformed,
    ResponseTooLarge,
    TooManyWaiting,
)
from prorl_trio.testing.cancel_sweep import cancel_sweep

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class RawServer:
    """Runs `script(connection)` for each connection; counts connections and requests."""

    def __init__(self, script):
        self.script = script
        self.connections = 0
        self.open = 0
        self.requests: list[bytes] = []
        self.origin = ""
        self.changed = trio.lowlevel.ParkingLot()

    async def handle(self, stream):
        await trio.lowlevel.checkpoint()
        self.connections += 1
        self.open += 1
        self.changed.unpark_all()
        try:
            await self.script(Peer(self, stream, self.connections))
        except trio.BrokenResourceError:
            pass
        finally:
            self.open -= 1
            self.changed.unpark_all()

    async def wait(self, condition):
        await trio.lowlevel.checkpoint()
        while not condition():
            await self.changed.park()


class Peer:
    """The server's end of one connection. `number` counts from 1."""

    def __init__(self, server, stream, number):
        self.server = server
        self.stream = stream
        self.number = number
        self.buffer = b""

    async def read_request(self) -> bytes | None:
        """One request with its body, or None when the client has closed."""
        await trio.lowlevel.checkpoint()
        while b"\r\n\r\n" not in self.buffer:
            received = await self.stream.receive_some()
            if not received:
                return None
            self.buffer += received
        head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(self.buffer) < length:
            received = await self.stream.receive_some()
            if not received:
                return None
            self.buffer += received
        body, self.buffer = self.buffer[:length], self.buffer[length:]
        self.server.requests.append(head + b"\r\n\r\n" + body)
        self.server.changed.unpark_all()
        return body

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)


async def echo(peer):
    while (body := await peer.read_request()) is not None:
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


@asynccontextmanager
async def serving(script, tls=None):
    server = RawServer(script)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    if tls is not None:
        listeners = [trio.SSLListener(listeners[0], tls, https_compatible=True)]
        port = listeners[0].transport_listener.socket.getsockname()[1]
    else:
        port = listeners[0].socket.getsockname()[1]
    server.origin = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, server.handle, listeners)
        yield server
        nursery.cancel_scope.cancel()


def answering(*answers: bytes, then_close: bool = True):
    """A script that gives each request of a connection the next of `answers`."""

    async def script(peer):
        await trio.lowlevel.checkpoint()
        for answer in answers:
            if await peer.read_request() is None:
                return
            await peer.send(answer)
        while not then_close and await peer.stream.receive_some():
            pass

    return script


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


@pytest.mark.skipif(which("openssl") is None, reason="makes its certificate with the openssl command")
async def test_https(tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=loopback"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    await trio.run_process(command, stderr=subprocess.DEVNULL)
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_context.load_cert_chain(certificate, key)
    with trio.fail_after(20):
        async with serving(echo, tls=server_context) as server:
            trusting = HttpClient(server.origin, ssl_context=ssl.create_default_context(cafile=str(certificate)))
            for _ in range(3):
                assert (await get(trusting, body=b"secret")).body == b"secret"
            assert server.connections == 1
            trusting.close()
            with pytest.raises(ConnectFailed, match="CERTIFICATE_VERIFY_FAILED"):
                await get(HttpClient(server.origin))
