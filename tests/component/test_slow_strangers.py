"""Clients that dribble: each is gone when the time for a handshake is over, and disturbs nobody meanwhile."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
from trio_websocket import wrap_client_stream

from prorl_trio.client import connect
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_service import TOKEN, open_service

UPGRADE = b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-Long: " + b"a" * 100_000
MASKED_FRAME = b"\x82\xfe\xff\xff\x00\x00\x00\x00" + b"a" * 0xFFFF
LITTLE_PATIENCE_S = 0.2
TLS_HELLO = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + b"a" * 0x4000


pytestmark = pytest.mark.timeout(30)


async def dribble(stream, message):
    """Send a byte now and then until the other side has enough. Returns how many it took."""
    sent = 0

    async def cancel_at_end(scope):
        with suppress(trio.BrokenResourceError):
            while await stream.receive_some():
                pass
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_at_end, nursery.cancel_scope)
        with suppress(trio.BrokenResourceError):
            while True:
                await stream.send_all(message[sent : sent + 1])
                sent += 1
                await trio.sleep(0.005)
        nursery.cancel_scope.cancel()
    return sent


async def good_trainer(service):
    async with connect(service.url, TOKEN) as client:
        await client.submit([make_spec("j")])
        async for outcome in client.results(1):
            return outcome.status


def open_answering_service():
    return open_service(FakeNode(on_submit=make_outcome), handshake_timeout_s=LITTLE_PATIENCE_S)


async def test_a_handshake_that_dribbles_is_cut_off():
    async with open_answering_service() as service, trio.open_nursery() as nursery:
        took = []

        async def slow():
            async with await trio.open_tcp_stream(service.host, service.port) as stream:
                took.append(await dribble(stream, UPGRADE))

        for _ in range(5):
            nursery.start_soon(slow)
        assert await good_trainer(service) == "completed"
    assert len(took) == 5
    assert max(took) < len(UPGRADE)


async def test_a_hello_that_dribbles_is_cut_off():
    async with open_answering_service() as service, await trio.open_tcp_stream(service.host, service.port) as stream:
        async with trio.open_nursery() as nursery:
            socket = await wrap_client_stream(nursery, stream, service.host, "/")
            assert socket.path == "/"
            nursery.cancel_scope.cancel()
        assert 0 < await dribble(stream, MASKED_FRAME) < len(MASKED_FRAME)
        assert await good_trainer(service) == "completed"


async def test_a_tls_hello_that_dribbles_is_cut_off(tmp_path):
    trustme = pytest.importorskip("trustme")
    leaf = trustme.CA().issue_cert("127.0.0.1")
    leaf.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    (tmp_path / "both.pem").chmod(0o600)
    both = str(tmp_path / "both.pem")
    async with (
        open_service(FakeNode(), handshake_timeout_s=LITTLE_PATIENCE_S, tls_cert=both, tls_key=both) as service,
        await trio.open_tcp_stream(service.host, service.port) as stream,
    ):
        assert 0 < await dribble(stream, TLS_HELLO) < len(TLS_HELLO)


async def test_headers_without_end_are_not_kept():
    async with open_answering_service() as service, await trio.open_tcp_stream(service.host, service.port) as stream:
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(200 * UPGRADE)
        assert await good_trainer(service) == "completed"
