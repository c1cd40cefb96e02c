"""The handshake of the RPC, and peers that do not keep to the protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from prorl_ipc.channel import Channel
from prorl_ipc.client import open_rpc_client
from prorl_ipc.errors import ChannelBroken, HandshakeRefused, ProtocolViolation
from prorl_ipc.sandbox_calls import Ping, Pong
from prorl_ipc.server import serve_rpc
from prorl_ipc.wire import (
    PROTOCOL_VERSION,
    Cancel,
    Chunk,
    Hello,
    Refused,
    Request,
    Result,
    decode_envelope,
    encode_body,
    encode_envelope,
)

if TYPE_CHECKING:
    from collections.abc import Callable

from support.scripted_rpc import (
    TOKEN,
    Actions,
    Do,
    Done,
    call,
    raw_client,
    scripted_server,
    serving,
    stream_pair,
)

both_kinds = pytest.mark.parametrize("kind", ["memory", "socket"])


# ---------------------------------------------------------------- handshake


@both_kinds
async def test_a_wrong_token_is_refused_on_both_sides(kind: str):
    actions = Actions()
    ours, theirs = stream_pair(kind)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                with pytest.raises(HandshakeRefused, match="wrong token") as caught:
                    await serve_rpc(theirs, actions.handle, token=TOKEN)
                assert caught.value.code == "token"

            nursery.start_soon(serve)
            with pytest.raises(HandshakeRefused, match="wrong token") as caught:
                async with open_rpc_client(ours, token="änother"):
                    raise AssertionError
            assert caught.value.code == "token"


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (encode_envelope(Hello(version=PROTOCOL_VERSION + 1, token=TOKEN)), "version"),
        (encode_envelope(Request(id=1, timeout_s=1, body=encode_body(Ping()))), "protocol"),
        (b"GET / HTTP/1.1\r\n\r\n", "protocol"),
        (msgspec.msgpack.encode({"type": "Hello", "version": 1, "token": TOKEN, "extra": 1}), "protocol"),
        (b"", "protocol"),
        (encode_envelope(Hello(version=PROTOCOL_VERSION, token="abc")).replace(b"abc", b"\xff\xfe\xfd"), "protocol"),
    ],
)
async def test_a_bad_hello_is_refused_with_a_reason(payload: bytes, code: str):
    ours, theirs = memory_stream_pair()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                with pytest.raises(HandshakeRefused) as caught:
                    await serve_rpc(theirs, Actions().handle, token=TOKEN)
                assert caught.value.code == code

            nursery.start_soon(serve)
            channel = Channel(ours)
            await channel.send(payload)
            answer = decode_envelope(await channel.receive())
            assert isinstance(answer, Refused)
            assert answer.code == code
            with pytest.raises(ChannelBroken):
                await channel.receive()


async def test_a_silent_peer_is_given_up_on_by_either_side():
    ours, theirs = memory_stream_pair()
    with trio.fail_after(10):
        with pytest.raises(ChannelBroken, match=r"no answer to the handshake within 0\.02 s"):
            async with open_rpc_client(ours, token=TOKEN, handshake_timeout_s=0.02):
                raise AssertionError
        ours, theirs = memory_stream_pair()
        with pytest.raises(ChannelBroken, match=r"no handshake within 0\.02 s"):
            await serve_rpc(theirs, Actions().handle, token=TOKEN, handshake_timeout_s=0.02)
        with pytest.raises(ChannelBroken):
            await Channel(ours).receive()


async def test_an_empty_token_is_a_mistake():
    _ours, theirs = memory_stream_pair()
    with pytest.raises(ValueError, match="token must not be empty"):
        await serve_rpc(theirs, Actions().handle, token="")


# ---------------------------------------------------------------- violations


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        msgspec.msgpack.encode({"type": "Unknown"}),
        msgspec.msgpack.encode([1, 2]),
        b"\x91" * 100_000,
        b"\x83\xa4type\xa6Result\xa2id\x01\xa4body" + b"\x91" * 100_000,
        encode_envelope(Hello(version=PROTOCOL_VERSION, token="abc")).replace(b"abc", b"\xff\xfe\xfd"),
        encode_envelope(Hello(version=PROTOCOL_VERSION, token=TOKEN)),
        encode_envelope(Result(id=1, body=encode_body(Ping()))),
    ],
)
async def test_garbage_after_the_handshake_ends_the_connection_with_a_violation(payload: bytes):
    actions = Actions()
    async with raw_client(actions, violates="not an envelope|a client does not send") as channel:
        request = Request(id=9, timeout_s=20, body=encode_body(Do(what="sleep_for_ever")))
        await channel.send(encode_envelope(request))
        await wait_all_tasks_blocked()
        await channel.send(payload)
        with pytest.raises(ChannelBroken):
            await channel.receive()
    assert actions.ended == ["cancelled"]


async def test_reusing_the_id_of_a_running_call_is_a_violation():
    async with raw_client(Actions(), violates="call id 4 is in use") as channel:
        request = encode_envelope(Request(id=4, timeout_s=20, body=encode_body(Do(what="sleep_for_ever"))))
        await channel.send(request)
        await channel.send(request)
        with pytest.raises(ChannelBroken):
            await channel.receive()


async def test_a_cancel_for_an_unknown_call_is_ignored():
    async with raw_client(Actions()) as channel:
        await channel.send(encode_envelope(Cancel(id=99)))
        await channel.send(encode_envelope(Request(id=1, timeout_s=5, body=encode_body(Do(what="echo")))))
        assert isinstance(decode_envelope(await channel.receive()), Result)


@pytest.mark.parametrize(
    "make",
    [
        lambda _id: b"\xc1",
        lambda _id: encode_envelope(Ping()),  # type: ignore[arg-type]
        lambda _id: encode_envelope(Cancel(id=_id)),
        lambda _id: encode_envelope(Result(id=_id + 1, body=encode_body(Done(text="")))),
        lambda _id: encode_envelope(Chunk(id=_id + 1, stream="", data=b"")),
    ],
)
async def test_a_client_breaks_a_connection_that_is_not_the_protocol(make: Callable[[int], bytes]):
    async with scripted_server() as (client, channel), trio.open_nursery() as nursery:

        async def answer() -> None:
            request = decode_envelope(await channel.receive())
            assert isinstance(request, Request)
            await channel.send(make(request.id))

        nursery.start_soon(answer)
        with pytest.raises(ChannelBroken):
            await call(client, "echo")
        assert client.closed


async def test_an_answer_of_another_type_is_a_violation():
    async with serving("memory", Actions()) as client:
        with pytest.raises(ProtocolViolation, match=r"the answer to Do is not a Pong: Invalid value 'Done'"):
            await client.call(Do(what="echo"), Pong, timeout_s=5)
        assert client.closed
