"""Envelopes to bytes and back. Bodies stay opaque (`msgspec.Raw`); who makes a call or handles it knows their types."""

from __future__ import annotations

import msgspec

from prorl_ipc.errors import ProtocolViolation, Unencodable
from prorl_ipc.portable_text import portable
from prorl_ipc.wire import Envelope

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of msgspec for bytes that are not what they should be: also text that is not UTF-8, and endless
nesting."""

_NO_WIRE_FORM = (ValueError, OverflowError, RecursionError)
"""Exceptions of msgspec for values beyond msgpack's: integers of more than 64 bits, text with lone surrogates
(`UnicodeEncodeError`), deep nesting, and sizes beyond 32 bits."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(Envelope)


def encode_body(body: msgspec.Struct) -> msgspec.Raw:
    """`body` as the opaque part of an envelope.

    Raises:
        TypeError: it holds a value that msgpack has no form for.
        Unencodable: it holds a value that does not fit: an integer beyond 64 bits, or text that UTF-8 has no form for.
    """
    return msgspec.Raw(_encode(body))


def encode_reply(body: msgspec.Struct) -> msgspec.Raw:
    """Encode a body as `encode_body` does, but spell out text that UTF-8 has no form for.

    Such texts are paths and errors: the system has bytes for them that are no text. Errors as `encode_body`.
    """
    try:
        return encode_body(body)
    except Unencodable as exc:
        if not isinstance(exc.__cause__, UnicodeEncodeError):
            raise
        # Rare, so only now is every text looked at.
        return msgspec.Raw(_encode(portable(msgspec.to_builtins(body, builtin_types=(bytes, bytearray)))))


def _encode(value: object) -> bytes:
    try:
        return _encoder.encode(value)
    except _NO_WIRE_FORM as exc:
        raise Unencodable(f"a value that cannot be sent: {exc}") from exc


def encode_envelope(envelope: Envelope) -> bytes:
    """The payload of one frame."""
    return _encoder.encode(envelope)


def decode_envelope(payload: bytes) -> Envelope:
    """Decode the payload of a frame.

    Raises:
        ProtocolViolation: it is not msgpack, no known envelope, or has a wrong or unknown field (named by its path).
    """
    try:
        return _decoder.decode(payload)
    except UNDECODABLE as exc:
        raise ProtocolViolation(f"not an envelope of this protocol: {exc}") from exc
