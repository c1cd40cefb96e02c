"""The envelope: the structs of the RPC on the Unix socket between a node and a sandbox daemon. Text: PROTOCOL.md.

Msgpack by msgspec, a tagged union that refuses unknown fields. It is what the RPC understands; its bodies are opaque
`msgspec.Raw`. What travels in them is in `sandbox_calls` and `file_calls`.

Sizes are bytes, times are seconds. Times on the wire are relative (a budget, not a clock reading).
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL_VERSION = 1
"""Changes with every incompatible change of a struct below. Peers of different versions refuse each other."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Default maximum of one frame's payload."""


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Base of every struct here: immutable, tagged with its class name, strict."""


class Hello(_Wire, frozen=True):
    """First frame of a connection, client to server."""

    version: int
    token: str


class HelloOk(_Wire, frozen=True):
    """The server accepts. `pid` is the server's, in its own PID namespace."""

    version: int
    pid: int


class Refused(_Wire, frozen=True):
    """The server refuses and closes. `code` is `version`, `token` or `protocol`."""

    code: Literal["version", "token", "protocol"]
    message: str


class Request(_Wire, frozen=True):
    """A call. `id` is unique on this connection and never reused; `timeout_s` is what is left of its budget.

    After `timeout_s` the server cancels the handler and answers `Failure(code="timeout")`.
    """

    id: int
    timeout_s: float
    body: msgspec.Raw


class Cancel(_Wire, frozen=True):
    """Stop call `id`.

    It is still answered, by `Failure(code="cancelled")` unless its result was already sent. A cancel for an unknown or
    answered id is ignored.
    """

    id: int


class Chunk(_Wire, frozen=True):
    """A piece of streamed output of call `id`, before its answer. `stream` names which."""

    id: int
    stream: str
    data: bytes


class Result(_Wire, frozen=True):
    """Call `id` succeeded. Its last frame."""

    id: int
    body: msgspec.Raw


class Failure(_Wire, frozen=True):
    """Call `id` failed. Its last frame. `code` is machine-readable (`timeout`, `cancelled`, `bad_request`, ...)."""

    id: int
    code: str
    message: str


Envelope = Hello | HelloOk | Refused | Request | Cancel | Chunk | Result | Failure
