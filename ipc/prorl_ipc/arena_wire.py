"""The frames on the arena's socket, and the reference that stands for tokens in the arena. Text: PROTOCOL.md."""

from __future__ import annotations

from typing import Literal

import msgspec

ARENA_PROTOCOL_VERSION = 1


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Base of every frame: immutable, tagged with its class name, strict."""


class ArenaRef(_Frame, frozen=True):
    """A reference to the tokens of one segment. `offset` in bytes; `capacity` and `length` in tokens."""

    arena_id: str
    offset: int
    capacity: int
    length: int
    generation: int


class ArenaHello(_Frame, frozen=True):
    """First frame of a reader."""

    version: int
    token: str


class ArenaOffer(_Frame, frozen=True):
    """The arena; its descriptor, read-only, comes with the first byte.

    The reader is `reader_id` while the connection lasts.
    """

    version: int
    arena_id: str
    size_bytes: int
    reader_id: str


class ArenaRefused(_Frame, frozen=True):
    """The node refuses the reader and closes the connection.

    `user`: it runs as another user; `admission`: there are too many.
    """

    code: Literal["version", "user", "token", "protocol", "admission"]
    message: str


ArenaFrame = ArenaHello | ArenaOffer | ArenaRefused
