"""Raw bytes at the REST port by the thousand: each connection is answered or closed, and nothing of ours stumbles."""

from __future__ import annotations

import logging
import random
from contextlib import suppress

import pytest
import trio

from support.fake_node import FakeNode, make_outcome
from support.fake_rest import TOKEN, open_rest

pytestmark = pytest.mark.timeout(300)

AT_ONCE = 40
INPUTS = [800, pytest.param(12_000, marks=pytest.mark.soak)]
MAX_BODY_BYTES = 4_000
AUTHORIZED = b"Authorization: Bearer " + TOKEN.encode() + b"\r\n"
STARTS = [
    b"GET /healthz HTTP/1.1\r\nHost: x\r\n",
    b"GET /v1/results?timeout_s=0.02 HTTP/1.1\r\nHost: x\r\n" + AUTHORIZED,
    b"GET /v1/status HTTP/1.1\r\nHost: x\r\n" + AUTHORIZED,
    b"GET /v1/events HTTP/1.1\r\nHost: x\r\n" + AUTHORIZED,
    b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n",
    b"POST /v1/rollouts HTTP/1.1\r\nHost: x\r\n" + AUTHORIZED,
    b"POST /v1/rollouts HTTP/1.1\r\nHost: x\r\n",
    b"POST /v1/backends/pause HTTP/1.0\r\n" + AUTHORIZED,
    b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n",
]
FIELDS = [
    b"Content-Length: 0\r\n",
    b"Content-Length: 2\r\n",
    b"Content-Length: 2\r\n",
    b"Content-Length: 2, 2\r\n",
    b"Content-Length: 3\r\n",
    b"Content-Length: +2\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 999999999999\r\n",
    b"Content-Length: " + b"9" * 40 + b"\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Transfer-Encoding : chunked\r\n",
    b"Expect: 100-continue\r\n",
    b"Connection: close\r\n",
    b"Connection: upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIA==\r\n",
    b"Host: y\r\n",
    b" folded\r\n",
    b"X: \x00\r\n",
    b"\xff\xfe: x\r\n",
    b"no colon\r\n",
]
CHUNKS = [b"2\r\n{}\r\n0\r\n\r\n", b"2\r\n{}", b"zz\r\n", b"ffffffffffff\r\n"]
BODIES = [b"", b"{}", b"{}{}", b"\x00" * 5_000, b"[" * 3_000, *CHUNKS]


def an_input(choose: random.Random) -> bytes:
    """Requests one after the other, most of them malformed."""
    sent = b""
    for _ in range(choose.choice([1, 1, 2, 3])):
        fields = b"".join(choose.choices(FIELDS, k=choose.choice([0, 1, 1, 2, 3])))
        request = choose.choice(STARTS) + fields + b"\r\n" + choose.choice(BODIES)
        if choose.random() < 0.3:
            place = choose.randrange(len(request))
            request = request[:place] + choose.randbytes(choose.randrange(4)) + request[place + choose.randrange(4) :]
        sent += request
    return sent


async def send(rest, content, choose):
    async with await rest.open_stream() as stream:
        with suppress(trio.BrokenResourceError), trio.move_on_after(0.15):
            half = choose.randrange(len(content) + 1)
            await stream.send_all(content[:half])
            if choose.random() < 0.3:
                await trio.lowlevel.checkpoint()
            await stream.send_all(content[half:])
            if choose.random() < 0.6:
                await stream.send_eof()
            if choose.random() < 0.8:
                while await stream.receive_some():
                    pass


@pytest.mark.parametrize("inputs", INPUTS)
async def test_no_input_makes_the_server_stumble(caplog, inputs):
    choose = random.Random(6)
    contents = iter([an_input(choose) for _ in range(inputs)])
    node = FakeNode(on_submit=make_outcome)
    with trio.fail_after(280), caplog.at_level(logging.WARNING):
        async with open_rest(node, max_body_bytes=MAX_BODY_BYTES, body_timeout_s=0.2, idle_timeout_s=0.5) as rest:

            async def work():
                for content in contents:
                    await send(rest, content, choose)

            async with trio.open_nursery() as nursery:
                for _ in range(AT_ONCE):
                    nursery.start_soon(work)
            assert (await rest.call("GET", "/healthz")).status == 200
    stumbled = [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert [logging.Formatter().format(record) for record in stumbled[:3]] == []


async def answer_to(rest, head, body=b""):
    """Its status, and what came after its head until the connection was closed."""
    async with await rest.open_stream() as stream:
        await stream.send_all(head + b"\r\n" + body)
        seen = b""
        with suppress(trio.BrokenResourceError):
            while chunk := await stream.receive_some():
                seen += chunk
        return int(seen.split(b" ")[1]), seen.partition(b"\r\n\r\n")[2]


POST = b"POST /v1/rollouts HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize("authorized", [b"", AUTHORIZED])
@pytest.mark.parametrize(
    ("fields", "status"),
    [
        pytest.param(b"Content-Length: 4001\r\n", 413, id="too long"),
        pytest.param(b"Content-Length: 4001\r\nExpect: 100-continue\r\n", 413, id="too long, and it waits"),
        pytest.param(b"Content-Length: 99999999999999999999\r\n", 413, id="far too long"),
        pytest.param(b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", 400, id="two ends"),
        pytest.param(b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n", 400, id="two ends, turned"),
        pytest.param(b"Content-Length: 2\r\nContent-Length: 2\r\n", 400, id="twice the same"),
        pytest.param(b"Content-Length: 2, 2\r\n", 400, id="twice in one"),
        pytest.param(b"Content-Length: 2\r\ncontent-length: 3\r\n", 400, id="two lengths"),
        pytest.param(b"Content-Length: 0x2\r\n", 400, id="no digits"),
        pytest.param(b"Content-Length: +2\r\n", 400, id="a sign"),
        pytest.param(b"Content-Length: \r\n", 400, id="empty"),
        pytest.param(b"Connection: upgrade\r\nUpgrade: websocket\r\n", 403, id="another protocol"),
    ],
)
async def test_a_head_that_says_enough_is_answered_before_any_body_comes(fields, status, authorized):
    with trio.fail_after(20):
        async with open_rest(FakeNode(), max_body_bytes=MAX_BODY_BYTES, body_timeout_s=60, idle_timeout_s=60) as rest:
            found, _ = await answer_to(rest, POST + authorized + fields)
    assert found == status


@pytest.mark.parametrize("body", [b"Content-Length: 2\r\n\r\nab", b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"])
async def test_a_websocket_handshake_with_a_body_is_refused(body):
    """A proxy would pass the body on as one; the node would read frames in it."""
    upgrade = (
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    )
    async with open_rest(FakeNode()) as rest, await rest.open_stream() as stream:
        await stream.send_all(upgrade + body)
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 400 ")
    async with open_rest(FakeNode()) as rest, await rest.open_stream() as stream:
        await stream.send_all(upgrade + b"Content-Length: 0\r\n\r\n")
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 101 ")


async def test_transfer_encoding_needs_http_1_1():
    async with open_rest(FakeNode()) as rest:
        head = POST.replace(b"1.1", b"1.0") + AUTHORIZED + b"Transfer-Encoding: chunked\r\n"
        assert (await answer_to(rest, head, CHUNKS[0]))[0] == 400


async def test_a_request_that_was_smuggled_in_a_body_is_not_read():
    async with open_rest(FakeNode()) as rest:
        head = POST + AUTHORIZED + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n"
        status, after = await answer_to(rest, head, b"0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status == 400
    assert b"HTTP/1.1" not in after
