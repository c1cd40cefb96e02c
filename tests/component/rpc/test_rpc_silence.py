"""A call that has no answer asks whether its peer can have run: what it could not do does not count."""

from __future__ import annotations

import math

import msgspec
import pytest
import trio
import trio.testing

from prorl_ipc.client import CANCEL_GRACE_S, SILENCE_S, open_rpc_client
from prorl_ipc.errors import CallTimedOut
from prorl_ipc.server import serve_rpc


class Do(msgspec.Struct, tag=True):
    takes_s: float


class Done(msgspec.Struct, tag=True):
    pass


async def handle(body, context):
    await trio.sleep(msgspec.msgpack.decode(body, type=Do).takes_s)
    return Done()


async def excuse(seconds):
    await trio.lowlevel.checkpoint()
    return seconds


async def call(takes_s, timeout_s, excused):
    """How a call ended, and after which time."""
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: serve_rpc(theirs, handle, token="t"))
        async with open_rpc_client(ours, token="t") as rpc:
            since_s, ended = trio.current_time(), "answered"
            try:
                await rpc.call(Do(takes_s), Done, timeout_s=timeout_s, on_silence=lambda: excuse(excused))
            except CallTimedOut:
                ended = "timed out"
            took_s = trio.current_time() - since_s
        nursery.cancel_scope.cancel()
    return ended, took_s


@pytest.mark.parametrize(
    ("takes_s", "excused_s", "ended", "took_s"),
    [
        (0.4, 0.0, "answered", 0.4),
        (3.2, 0.0, "answered", 3.2),
        (60.0, 0.0, "timed out", 4.0),
        (60.0, -math.inf, "timed out", SILENCE_S),
    ],
)
async def test_what_is_excused_does_not_count(takes_s, excused_s, ended, took_s, autojump_clock):
    assert await call(takes_s, 4.0, excused_s) == (ended, pytest.approx(took_s))


async def test_a_peer_that_is_given_up_gets_no_grace(autojump_clock):
    ours, theirs = trio.testing.memory_stream_pair()

    async def deaf(body, context):
        with trio.CancelScope(shield=True):
            await trio.sleep(100)

    for seconds, took_s in ((0.0, 4.0 + CANCEL_GRACE_S), (-math.inf, SILENCE_S)):
        ours, theirs = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: serve_rpc(theirs, deaf, token="t"))  # noqa: B023 - it has begun
            async with open_rpc_client(ours, token="t") as rpc:
                since_s = trio.current_time()
                with pytest.raises(CallTimedOut):
                    await rpc.call(Do(1.0), Done, timeout_s=4.0, on_silence=lambda: excuse(seconds))  # noqa: B023
                assert trio.current_time() - since_s == pytest.approx(took_s)
                assert rpc.closed
            nursery.cancel_scope.cancel()
