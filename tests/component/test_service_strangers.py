"""Who may come in at the node's WebSocket edge, and what those do who may not: raw frames over loopback."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio_websocket import ConnectionClosed

from prorl_ipc.session import (
    SESSION_PROTOCOL_VERSION,
    SessionRefused,
    SessionWelcome,
    StatusRequest,
)
from prorl_trio.config import ListenConfig
from prorl_trio.config.secrets import load_token
from prorl_trio.edges.auth import Door
from prorl_trio.edges.serve import serve_edges
from prorl_trio.types.errors import ConfigError
from support.fake_service import TOKEN, open_service
from support.raw_trainer import encode, raw_trainer
from support.sessions import sessions_in

if TYPE_CHECKING:
    from support.fake_node import FakeNode

DEADLINE_S = 20


async def test_a_welcome_says_who_and_what(deadline: None, node: FakeNode):
    async with open_service(node) as service, raw_trainer(service) as trainer:
        welcome = await trainer.hello("mine")
    assert welcome == SessionWelcome(
        version=SESSION_PROTOCOL_VERSION, node_id="fake-node", session_id="mine", resumed=False, pending=0
    )


@pytest.mark.parametrize(
    ("hello", "code", "message"),
    [
        ({"token": "wrong"}, "token", "wrong token"),
        ({"token": ""}, "token", "wrong token"),
        ({"version": 99}, "version", "speaks version 1, not 99"),
        ({"session_id": ""}, "protocol", "session_id must have 1 to 200 characters, got 0"),
        ({"resume_after": -1}, "protocol", "resume_after must be a cursor"),
    ],
)
async def test_a_refusal_comes_as_a_frame_before_the_close(
    deadline: None, node: FakeNode, hello: dict[str, Any], code: str, message: str
):
    async with open_service(node) as service, raw_trainer(service) as trainer:
        refused = await trainer.hello(**hello)
        assert isinstance(refused, SessionRefused)
        assert refused.code == code
        assert message in refused.message
        reason = await trainer.closed()
    assert reason.code in (1002, 1008)
    assert reason.reason == refused.message[:120]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"", "not a frame"),
        (b"\xc1garbage", "not a frame"),
        (b"\x91" * 50_000, "not a frame"),
        (b"\x83\xa4type\xaaAddBackend\xaarequest_id\x01\xa3url\xa2\xff\xfe", "not a frame"),
        ("text", "got a text message"),
        (encode(StatusRequest(request_id=1)), "the first frame must be SessionHello, got StatusRequest"),
        (encode({"type": "SessionHello", "version": 1, "token": TOKEN, "session_id": "s", "extra": 1}), "extra"),
    ],
    ids=["empty", "garbage", "deep", "utf8", "text", "order", "unknown field"],
)
async def test_strangers_that_talk_nonsense_are_told_so(deadline: None, node: FakeNode, message: bytes | str, why: str):
    async with open_service(node) as service:
        async with raw_trainer(service) as trainer:
            await trainer.socket.send_message(message)
            refused = await trainer.receive()
            assert (refused.code, why in refused.message) == ("protocol", True), refused
            assert (await trainer.closed()).code == 1002
        async with raw_trainer(service) as trainer:  # and the next one is served
            assert isinstance(await trainer.hello(), SessionWelcome)


@pytest.mark.parametrize("size", [0, 1, 100, 300_000])
async def test_bytes_that_are_not_websocket_do_no_harm(deadline: None, node: FakeNode, size: int):
    async with open_service(node) as service:
        for junk in (os.urandom(size), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n" * size):
            stream = await trio.open_tcp_stream(service.host, service.port)
            async with stream:
                try:
                    await stream.send_all(junk)
                    await stream.send_eof()
                    while await stream.receive_some():
                        pass
                except trio.BrokenResourceError:
                    pass
        async with raw_trainer(service) as trainer:
            assert isinstance(await trainer.hello(), SessionWelcome)


async def test_junk_frames_after_the_websocket_handshake_do_no_harm(deadline: None, node: FakeNode):
    async with open_service(node) as service:
        for junk in (os.urandom(500), b"\x82\x7f" + b"\xff" * 8 + b"x" * 100, b"\x88\x02\x03\xe8", b"\x89\xff" * 20):
            async with raw_trainer(service) as trainer:
                await trainer.hello()
                await trainer.socket._stream.send_all(junk)
                await trainer.socket._stream.aclose()
        async with raw_trainer(service) as trainer:
            assert isinstance(await trainer.hello(), SessionWelcome)


async def test_a_stranger_that_says_nothing_is_shown_out(deadline: None, node: FakeNode):
    async with open_service(node, handshake_timeout_s=0.1) as service:
        async with raw_trainer(service) as trainer:
            refused = await trainer.receive()
            assert (refused.code, refused.message) == ("protocol", "no SessionHello within 0.1 s")
        async with await trio.open_tcp_stream(service.host, service.port) as stream:
            assert await stream.receive_some() == b""


async def test_a_stranger_cannot_fill_memory(deadline: None, node: FakeNode):
    async with open_service(node, handshake_timeout_s=0.3) as service, raw_trainer(service) as trainer:
        with pytest.raises(ConnectionClosed):
            await trainer.socket.send_message(bytes(32 * 1024 * 1024))


async def test_the_oldest_of_too_many_strangers_makes_room(deadline: None, node: FakeNode):
    async with open_service(node, max_sessions=1, max_unauthenticated=1) as service, raw_trainer(service) as one:
        await one.hello("one")
        async with await trio.open_tcp_stream(service.host, service.port) as stream, raw_trainer(service) as two:
            assert await stream.receive_some() == b""
            refused = await two.hello("two")
        assert refused.code == "admission"
        assert "1 sessions, its limit" in refused.message


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ({"token": ""}, "listen.token is empty"),
        ({"token": "t", "host": "192.0.2.1"}, r"cannot bind 192\.0\.2\.1:0"),
        ({"token": "t", "host": "a" * 70}, "listen.host: 'a*' is no host name"),
        ({"token": "t", "host": "ä..b"}, "listen.host: 'ä..b' is no host name"),
        ({"token": "t", "port": 70_000}, "listen.port must be"),
        ({"token": "t", "heartbeat_interval_s": 5, "heartbeat_timeout_s": 5}, "heartbeat_interval_s"),
    ],
)
async def test_a_configuration_that_cannot_work_is_refused(
    node: FakeNode, listen: dict[str, Any], message: str, nursery: trio.Nursery
):
    config = ListenConfig(**{"port": 0, **listen})
    with trio.fail_after(DEADLINE_S), pytest.raises(ConfigError, match=message):
        await serve_edges(node, config, Door(load_token(config)), sessions=sessions_in(nursery))
