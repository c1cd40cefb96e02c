"""The layout of an arena in memory, the same for the node that writes it and for the processes that map it.

    header       one page: magic, version, geometry, arena id
    table        16 bytes a block: generation u64, length u64 (of the run that begins there, in tokens)
    blocks       9 bytes a token each; a run of blocks holds token_ids i32, logprobs f32 and loss_mask u8 of its
                 capacity, one array after the other

A generation is odd while a run begins at its block, and grows at each beginning and each end. A reference is valid
exactly while it has its block's generation. All integers are little-endian.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from prorl_ipc.errors import ProtocolViolation, StaleReference

TOKEN_BYTES: Final = 9
ARENA_LAYOUT_VERSION: Final = 1
_MAGIC: Final = b"prorlmem"
_HEADER: Final = struct.Struct("<8sIIQ32s")
_TABLE_ENTRY_BYTES: Final = 16
_ALIGNMENT_TOKENS: Final = 4
_TOKEN_ID, _LOGPROB, _MASK = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")
_SEALS: Final = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK

ARENA_PROTOCOL_VERSION = 1


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Base of every frame: immutable, tagged with its class name, strict."""


class ArenaRef(_Frame, frozen=True):
    """A reference to the tokens of one segment. `offset` is in bytes, `capacity` and `length` in tokens."""

    arena_id: str
    offset: int
    capacity: int
    length: int
    generation: int


class ArenaHello(_Frame, frozen=True):
    """First frame of a reader. `token` is the token of the trainer session."""

    version: int
    token: str


class ArenaOffer(_Frame, frozen=True):
    """The arena. Its read-only descriptor is sent with the first byte.

    `reader_id` identifies the reader during the connection.
    """

    version: int
    arena_id: str
    size_bytes: int
    reader_id: str


class ArenaRefused(_Frame, frozen=True):
    """The node refuses the reader and closes the connection.

    `user`: the reader runs as another user. `admission`: too many readers are connected.
    """

    code: Literal["version", "user", "token", "protocol", "admission"]
    message: str


ArenaFrame = ArenaHello | ArenaOffer | ArenaRefused


class TokenArrays(NamedTuple):
    """Three views of length T into an arena. Read-only unless stated otherwise; they keep the mapping alive."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    loss_mask: npt.NDArray[np.uint8]

    def first(self, length: int) -> TokenArrays:
        """Return read-only views of the first `length` tokens."""
        views = TokenArrays(self.token_ids[:length], self.logprobs[:length], self.loss_mask[:length])
        for view in views:
            view.flags.writeable = False
        return views


class SealedArray(np.ndarray[Any, np.dtype[Any]]):
    """An array over a whole sealed run, with the reference that names the run.

    It is the object behind the views of a segment and travels with them. The holder of a segment can thus find its
    tokens and check whether they are still valid. A slice lacks the reference.
    """

    ref: ArenaRef | None = None
    memory: ArenaMemory | None = None

    def check(self) -> None:
        """Raise StaleReference if the tokens are gone: data read since they went may be wrong."""
        if self.memory is not None and self.ref is not None:
            self.memory.check(self.ref)


class ArenaMemory:
    """A mapped arena. It is never unmapped beneath a view: the mapping ends with the last object that refers to it."""

    def __init__(self, mapping: mmap.mmap, *, writable: bool) -> None:
        magic, version, block_tokens, total_blocks, arena_id = _HEADER.unpack_from(mapping)
        if (magic, version) != (_MAGIC, ARENA_LAYOUT_VERSION):
            raise ProtocolViolation(
                f"not an arena of layout {ARENA_LAYOUT_VERSION}: it begins with {magic!r}, {version}"
            )
        self.arena_id: str = arena_id.decode("ascii")
        self.block_tokens: int = block_tokens
        self.total_blocks: int = total_blocks
        self.block_bytes: int = self.block_tokens * TOKEN_BYTES
        self.blocks_at: int = mmap.PAGESIZE + _table_bytes(self.total_blocks)
        if len(mapping) < self.blocks_at + self.total_blocks * self.block_bytes:
            raise ProtocolViolation(f"an arena of {self.total_blocks} blocks does not fit into {len(mapping)} bytes")
        self.mapping = mapping
        buffer: mmap.mmap | memoryview = mapping if writable else memoryview(mapping).toreadonly()
        self._table = np.frombuffer(buffer, "<u8", 2 * self.total_blocks, mmap.PAGESIZE).reshape(-1, 2)
        self._buffer = buffer

    def begin_run(self, block: int) -> int:
        """Begin a run at `block` and return its generation."""
        self._table[block] = (self._table[block, 0] + np.uint64(1), 0)
        return int(self._table[block, 0])

    def end_run(self, block: int) -> None:
        """End the run that begins at `block`: references to it are stale from now on."""
        self._table[block, 0] += np.uint64(1)

    def set_length(self, block: int, length: int) -> None:
        """Set the length, in tokens, of the run that begins at `block`."""
        self._table[block, 1] = length

    def offset_of(self, block: int) -> int:
        """Return the offset at which `block` begins, in bytes."""
        return self.blocks_at + block * self.block_bytes

    def arrays(self, offset: int, capacity: int) -> TokenArrays:
        """Return the whole run of `capacity` tokens at byte `offset`; writable if the mapping is."""
        return TokenArrays(
            np.frombuffer(self._buffer, _TOKEN_ID, capacity, offset),
            np.frombuffer(self._buffer, _LOGPROB, capacity, offset + 4 * capacity),
            np.frombuffer(self._buffer, _MASK, capacity, offset + 8 * capacity),
        )

    def check(self, ref: ArenaRef) -> int:
        """Return the block at which the run of `ref` begins.

        Raises:
            StaleReference: its tokens are gone.
            ProtocolViolation: it can never have been a reference into this arena.
        """
        if ref.arena_id != self.arena_id:
            raise StaleReference(f"the reference is into arena {ref.arena_id}, this is {self.arena_id}")
        block, beside = divmod(ref.offset - self.blocks_at, self.block_bytes)
        end = ref.offset + ref.capacity * TOKEN_BYTES
        if block < 0 or beside or not 0 <= ref.length <= ref.capacity or end > self.offset_of(self.total_blocks):
            raise ProtocolViolation(f"{ref} does not lie in the arena's {self.total_blocks} blocks")
        generation, length = (int(number) for number in self._table[block])
        if generation != ref.generation or length != ref.length:
            raise StaleReference(
                f"the tokens at {ref.offset} are of generation {generation}, the reference of {ref.generation}: "
                "they were acknowledged or released"
            )
        return block

    def view(self, ref: ArenaRef) -> TokenArrays:
        """Return the tokens of `ref`, without a copy. Errors as `check`."""
        self.check(ref)
        offset, capacity = ref.offset, ref.capacity
        return TokenArrays(
            self._sealed(ref, _TOKEN_ID, offset),
            self._sealed(ref, _LOGPROB, offset + 4 * capacity),
            self._sealed(ref, _MASK, offset + 8 * capacity),
        )

    def _sealed(self, ref: ArenaRef, dtype: np.dtype[Any], offset: int) -> SealedArray:
        array = SealedArray(ref.length, dtype, self._buffer, offset)
        array.flags.writeable = False
        array.ref, array.memory = ref, self
        return array


def create_memory(arena_id: str, size_bytes: int, block_tokens: int) -> tuple[int, ArenaMemory]:
    """Create an anonymous file of about `size_bytes`; return its descriptor, which the caller closes, and its mapping.

    It is a memfd, not a file in /dev/shm, because containers often have a /dev/shm of 64 MB. Its size is fixed, so that
    no reader is hit by SIGBUS. Memory is committed page by page as it is written.

    Raises:
        ValueError: `size_bytes` is too small for one block, or `block_tokens` is not a positive multiple of 4.
    """
    if block_tokens < 1 or block_tokens % _ALIGNMENT_TOKENS:
        raise ValueError(f"block_tokens must be a positive multiple of {_ALIGNMENT_TOKENS}, got {block_tokens}")
    block_bytes = block_tokens * TOKEN_BYTES
    total = (size_bytes - 2 * mmap.PAGESIZE) // (block_bytes + _TABLE_ENTRY_BYTES)
    if total < 1:
        raise ValueError(f"an arena of {size_bytes} bytes holds no block of {block_bytes} bytes; make it larger")
    size = mmap.PAGESIZE + _table_bytes(total) + total * block_bytes
    fd = os.memfd_create("prorl-trio-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        os.fchmod(fd, 0o400)
        os.pwrite(fd, _HEADER.pack(_MAGIC, ARENA_LAYOUT_VERSION, block_tokens, total, arena_id.encode("ascii")), 0)
        return fd, ArenaMemory(mmap.mmap(fd, size), writable=True)
    except BaseException:
        os.close(fd)
        raise


def map_memory(fd: int) -> ArenaMemory:
    """Map the arena behind `fd` for reading. `fd` may be closed afterwards.

    Raises:
        ProtocolViolation: it is not an arena, or its size could change beneath the views.
    """
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ProtocolViolation("the arena's size is not sealed")
        mapping = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ValueError) as exc:
        raise ProtocolViolation(f"the descriptor received is no arena: {exc}") from exc
    if len(mapping) < mmap.PAGESIZE:
        raise ProtocolViolation(f"an arena has at least one page, not {len(mapping)} bytes")
    return ArenaMemory(mapping, writable=False)


def _table_bytes(total_blocks: int) -> int:
    return -(-total_blocks * _TABLE_ENTRY_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
