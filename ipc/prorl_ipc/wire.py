"""The envelope: the structs of the RPC on the Unix socket between a node and a sandbox daemon. Text: PROTOCOL.md.

It is msgpack by msgspec, a tagged union that refuses unknown fields. The RPC treats bodies as opaque `msgspec.Raw`;
their structs are in `sandbox_calls` and `file_calls`.

Sizes are bytes, times are seconds. Times on the wire are relative (a budget, not a clock reading).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from prorl_ipc.errors import ProtocolViolation, Unencodable
from prorl_ipc.portable_text import portable

PROTOCOL_VERSION = 1
"""Changes with every incompatible change of a struct below. Peers of different versions refuse each other."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Default maximum of one frame's payload."""

UNDECODABLE = (msgspec.DecodeError, ValueError, RecursionError)
"""Exceptions of msgspec for invalid bytes, including text that is not UTF-8 and endless nesting."""

_NO_WIRE_FORM = (ValueError, OverflowError, RecursionError)
"""Exceptions of msgspec for values that msgpack cannot represent: integers of more than 64 bits, text with lone
surrogates (`UnicodeEncodeError`), deep nesting, and sizes beyond 32 bits."""


def encode_body(body: msgspec.Struct) -> msgspec.Raw:
    """Return `body` as the opaque part of an envelope.

    Raises:
        TypeError: it contains a value of a type that msgpack lacks.
        Unencodable: it contains an integer beyond 64 bits, or text that UTF-8 cannot encode.
    """
    return msgspec.Raw(_encode(body))


def encode_reply(body: msgspec.Struct) -> msgspec.Raw:
    """Encode a body as `encode_body` does, but escape text that UTF-8 cannot encode.

    Such texts are paths and errors, whose bytes may not be UTF-8. Errors as `encode_body`.
    """
    try:
        return encode_body(body)
    except Unencodable as exc:
        if not isinstance(exc.__cause__, UnicodeEncodeError):
            raise
        # Rare, so every text is checked only now.
        return msgspec.Raw(_encode(portable(msgspec.to_builtins(body, builtin_types=(bytes, bytearray)))))


def _encode(value: object) -> bytes:
    try:
        return _encoder.encode(value)
    except _NO_WIRE_FORM as exc:
        raise Unencodable(f"a value that cannot be sent: {exc}") from exc


def encode_envelope(envelope: Envelope) -> bytes:
    """Return the payload of one frame."""
    return _encoder.encode(envelope)


def decode_envelope(payload: bytes) -> Envelope:
    """Decode the payload of a frame.

    Raises:
        ProtocolViolation: it is not msgpack or not a known envelope, or has a wrong or unknown field (named by its
            path).
    """
    try:
        return _decoder.decode(payload)
    except UNDECODABLE as exc:
        raise ProtocolViolation(f"not an envelope of this protocol: {exc}") from exc


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Base of every struct here: immutable, tagged with its class name, strict."""


class Hello(_Wire, frozen=True):
    """First frame of a connection, client to server."""

    version: int
    token: str


class HelloOk(_Wire, frozen=True):
    """The server accepts. `pid` is the server's process id, in its own PID namespace."""

    version: int
    pid: int


class Refused(_Wire, frozen=True):
    """The server refuses and closes: a different version, a wrong token, or a first frame that is not `Hello`."""

    code: Literal["version", "token", "protocol"]
    message: str


class Request(_Wire, frozen=True):
    """A call. `id` is unique on this connection and never reused; `timeout_s` is the rest of its budget.

    After `timeout_s` the server cancels the handler and answers `Failure(code="timeout")`.
    """

    id: int
    timeout_s: float
    body: msgspec.Raw


class Cancel(_Wire, frozen=True):
    """Cancel call `id`.

    The call is still answered, by `Failure(code="cancelled")` unless its result was already sent. A cancel of an
    unknown or answered id is ignored.
    """

    id: int


class Chunk(_Wire, frozen=True):
    """A piece of streamed output of call `id`, before its answer. `stream` names the stream."""

    id: int
    stream: str
    data: bytes


class Result(_Wire, frozen=True):
    """Call `id` succeeded. This is its last frame."""

    id: int
    body: msgspec.Raw


class Failure(_Wire, frozen=True):
    """Call `id` failed. This is its last frame. `code` is machine-readable (`timeout`, `cancelled`, ...)."""

    id: int
    code: str
    message: str


Envelope = Hello | HelloOk | Refused | Request | Cancel | Chunk | Result | Failure

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(Envelope)
