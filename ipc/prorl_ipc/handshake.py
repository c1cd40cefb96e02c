"""The handshake of an RPC connection: the first frame in each direction, which authenticates the client."""

from __future__ import annotations

import hmac
import os
from typing import TYPE_CHECKING

import trio

from prorl_ipc.errors import ChannelBroken, HandshakeRefused, ProtocolViolation
from prorl_ipc.wire import PROTOCOL_VERSION, Hello, HelloOk, Refused, decode_envelope, encode_envelope

if TYPE_CHECKING:
    from prorl_ipc.channel import Channel

HANDSHAKE_TIMEOUT_S = 5.0
"""Default time, in seconds, for the other side's part of the handshake."""


def token_matches(expected: bytes, offered: str | bytes) -> bool:
    """Return whether the offered token equals the expected one. Compares in constant time.

    Every listener of the project compares tokens here. A string is compared as UTF-8.
    """
    return hmac.compare_digest(expected, offered if isinstance(offered, bytes) else offered.encode())


async def offer_handshake(channel: Channel, *, token: str, timeout_s: float) -> int:
    """Perform the client's part and return the server's process id. On an error the caller closes the channel.

    Raises:
        HandshakeRefused: wrong token, or another protocol version.
        ChannelBroken: the server ended the connection, or did not answer within `timeout_s`.
        ProtocolViolation: the server sent an invalid answer.
    """
    try:
        with trio.fail_after(timeout_s):
            await channel.send(encode_envelope(Hello(version=PROTOCOL_VERSION, token=token)))
            answer = decode_envelope(await channel.receive())
    except trio.TooSlowError:
        raise ChannelBroken(f"no answer to the handshake within {timeout_s:g} s") from None
    match answer:
        case HelloOk(version=version, pid=pid):
            if version != PROTOCOL_VERSION:
                raise HandshakeRefused("version", f"the peer speaks version {version}, this side {PROTOCOL_VERSION}")
            return pid
        case Refused(code=code, message=message):
            raise HandshakeRefused(code, message)
        case _:
            raise ProtocolViolation(f"expected HelloOk or Refused, got {type(answer).__name__}")


async def take_handshake(channel: Channel, *, token: str, timeout_s: float) -> None:
    """Perform the server's part. On an error the caller closes the channel.

    Raises:
        HandshakeRefused: the client has a wrong token or another version, or did not begin with `Hello`. It was
            notified.
        ChannelBroken: the client left, or did not finish within `timeout_s`.
        FrameTooLarge: its first frame exceeds the maximum.
    """
    try:
        with trio.fail_after(timeout_s):
            refused = _refusal_of(await channel.receive(), token)
            await channel.send(encode_envelope(refused or HelloOk(version=PROTOCOL_VERSION, pid=os.getpid())))
    except trio.TooSlowError:
        raise ChannelBroken(f"no handshake within {timeout_s:g} s") from None
    if refused is not None:
        raise HandshakeRefused(refused.code, refused.message)


def _refusal_of(payload: bytes, token: str) -> Refused | None:
    try:
        hello = decode_envelope(payload)
    except ProtocolViolation as exc:
        return Refused(code="protocol", message=str(exc))
    if not isinstance(hello, Hello):
        return Refused(code="protocol", message=f"a connection begins with Hello, not {type(hello).__name__}")
    if hello.version != PROTOCOL_VERSION:
        return Refused(code="version", message=f"this side speaks version {PROTOCOL_VERSION}, not {hello.version}")
    if not token_matches(token.encode(), hello.token):
        return Refused(code="token", message="wrong token")
    return None
