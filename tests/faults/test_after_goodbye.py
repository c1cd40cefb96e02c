"""What comes after our Close: a peer that is told to go and goes on sending harms its own connection, and no other."""

from __future__ import annotations

import os
import random
from contextlib import suppress

import msgspec
import pytest
import trio

from prorl_ipc.session import HeartbeatPing, SessionHello, StatusRequest
from prorl_trio.client import connect
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_service import TOKEN, open_service

pytestmark = pytest.mark.timeout(120)

ROUNDS = 60
HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
CLOSE_FRAME = 0x88
encode = msgspec.msgpack.encode


def frame(first_byte: int, payload: bytes = b"") -> bytes:
    """One masked frame; the mask is zero."""
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return bytes([first_byte]) + length + bytes(4) + payload


PIECES = {
    "ping": frame(0x89, b"still here"),
    "pong": frame(0x8A),
    "close": frame(CLOSE_FRAME, b"\x03\xe8"),
    "close without a code": frame(CLOSE_FRAME),
    "close with a wrong code": frame(CLOSE_FRAME, b"\x00\x01"),
    "heartbeat": frame(0x82, encode(HeartbeatPing(nonce=1))),
    "request": frame(0x82, encode(StatusRequest(request_id=1))),
    "text": frame(0x81, b"hello"),
    "text that is none": frame(0x81, b"\xff\xfe"),
    "first part": frame(0x02, b"a"),
    "next part": frame(0x80, b"b"),
    "half a header": b"\x82",
    "half a frame": frame(0x82, b"x" * 100)[:50],
    "unmasked": b"\x89\x00",
    "reserved": frame(0x8F),
    "reserved bits": frame(0xF2),
    "long ping": b"\x89\xfe\xff\xff" + bytes(4) + b"x" * 0xFFFF,
    "huge": b"\x82\xff" + b"\x7f" * 8 + bytes(4),
    "garbage": os.urandom(300),
    "http": HANDSHAKE,
}


async def open_session(service, session_id):
    """A raw connection with this session, past its welcome."""
    hello = encode(SessionHello(version=1, token=TOKEN, session_id=session_id))
    stream = await trio.open_tcp_stream(service.host, service.port)
    await stream.send_all(HANDSHAKE)
    await until(stream, b"\r\n\r\n")
    await stream.send_all(frame(0x82, hello))
    await until(stream, b"SessionWelcome")
    return stream


async def until(stream, words):
    seen = b""
    while words not in seen:
        seen += await stream.receive_some() or pytest.fail(f"{words!r} did not come, but {seen!r}")


async def replace(service, session_id, old):
    """Have another connection take the session over; returns when the old one was told."""
    async with await open_session(service, session_id):
        await until(old, b"\x88\x30\x03\xf0another connection has taken this session over")


async def ping_on(stream):
    while True:
        await stream.send_all(PIECES["ping"])
        await trio.sleep(0.001)


async def works(service, job_id):
    async with connect(service.url, TOKEN) as client:
        await client.submit([make_spec(job_id)])
        return [outcome.job_id async for outcome in client.results(1)] == [job_id]


def open_answering_service():
    return open_service(FakeNode(on_submit=make_outcome))


@pytest.mark.parametrize("piece", PIECES)
async def test_what_is_sent_after_our_close_harms_nobody_else(piece):
    with trio.fail_after(60):
        async with open_answering_service() as service:
            async with await open_session(service, "s") as old:
                await replace(service, "s", old)
                with suppress(trio.BrokenResourceError):
                    for _ in range(3):
                        await old.send_all(PIECES[piece])
                        await trio.testing.wait_all_tasks_blocked()
            assert await works(service, "after")
            assert not service.stopped.is_set()


async def test_a_peer_that_pings_on_is_read_out_and_then_left():
    with trio.fail_after(60):
        async with open_answering_service() as service, await open_session(service, "s") as old:
            await replace(service, "s", old)
            with pytest.raises(trio.BrokenResourceError):
                await ping_on(old)
            assert await works(service, "after")


async def test_any_mixture_after_our_close_harms_nobody_else():
    choose = random.Random(20)
    with trio.fail_after(100):
        async with open_answering_service() as service:
            for number in range(ROUNDS):
                async with await open_session(service, f"s-{number}") as old:
                    await replace(service, f"s-{number}", old)
                    with suppress(trio.BrokenResourceError):
                        for piece in choose.choices(list(PIECES.values()), k=choose.randint(1, 6)):
                            end = choose.randint(1, len(piece)) if choose.random() < 0.2 else len(piece)
                            await old.send_all(piece[:end])
                        if choose.random() < 0.5:
                            await old.send_eof()
                if number % 10 == 0:
                    assert await works(service, f"after {number}")
            assert await works(service, "at last")
            assert not service.stopped.is_set()
