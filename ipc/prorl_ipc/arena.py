"""The node's arena: the token arrays of its live and undelivered trajectories, in memory that other processes can map.

It is for one thread, the node's loop. Only `wait_room` waits.
"""

from __future__ import annotations

import mmap
import os
import secrets
from bisect import bisect_left, bisect_right
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import trio

from prorl_ipc.arena_memory import ArenaMemory, ArenaRef, TokenArrays, create_memory
from prorl_ipc.errors import ArenaFull, StaleReference

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt


BLOCK_TOKENS: Final = 4096
KEEP_FREE_BYTES: Final = 16 * 1024 * 1024
"""Memory is returned to the system when this many bytes have been freed since the last time."""
MAX_DEFAULT_BYTES: Final = 1024**3
DEFAULT_MEMORY_SHARE: Final = 0.1
_CGROUP_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Blocks:
    """Runs of consecutive blocks, allocated first-fit from either end and merged with free neighbours on release.

    Attributes:
        total: number of blocks.
        free: number of free blocks.
        high_water: maximum number of blocks used at once.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self.high_water = 0
        self._starts = [0] if total else []
        self._ends = [total] if total else []

    def runs(self) -> Iterator[tuple[int, int]]:
        """Return the free runs in order, as (first block, block after the last)."""
        return zip(self._starts, self._ends, strict=True)

    @property
    def largest_free_run(self) -> int:
        """Return the length of the largest free run in blocks; 0 without a free block."""
        return max((end - start for start, end in self.runs()), default=0)

    def take(self, count: int, *, from_end: bool = False, below: int | None = None) -> int | None:
        """Take `count` >= 1 consecutive blocks. Return the first, or None if there is no such run.

        The first run that fits is taken, or the last with `from_end`. With `below`, it must begin before that block.
        """
        order = range(len(self._starts))
        for index in reversed(order) if from_end else order:
            start, end = self._starts[index], self._ends[index]
            if below is not None and start >= below:
                return None
            if end - start >= count:
                return self._cut(index, count, from_end=from_end)
        return None

    def _cut(self, index: int, count: int, *, from_end: bool) -> int:
        start, end = self._starts[index], self._ends[index]
        if end - start == count:
            del self._starts[index], self._ends[index]
        elif from_end:
            self._ends[index] = end - count
        else:
            self._starts[index] = start + count
        self.free -= count
        self.high_water = max(self.high_water, self.total - self.free)
        return end - count if from_end else start

    def give_back(self, first: int, count: int) -> None:
        """Free `count` >= 1 taken blocks, from `first` on.

        Raises:
            ValueError: a block is outside of the arena, or already free. Nothing was changed.
        """
        end = first + count
        index = bisect_right(self._starts, first)
        free_before = index > 0 and self._ends[index - 1] > first
        free_after = bisect_left(self._starts, end) > index
        if count < 1 or first < 0 or end > self.total or free_before or free_after:
            raise ValueError(f"blocks {first} to {end - 1} of {self.total} are not all taken")
        joins_before = index > 0 and self._ends[index - 1] == first
        joins_after = index < len(self._starts) and self._starts[index] == end
        if joins_before and joins_after:
            self._ends[index - 1] = self._ends.pop(index)
            del self._starts[index]
        elif joins_before:
            self._ends[index - 1] = end
        elif joins_after:
            self._starts[index] = first
        else:
            self._starts.insert(index, first)
            self._ends.insert(index, end)
        self.free += count


class ArenaStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of an arena.

    Attributes:
        blocks_used: blocks in runs that are not freed yet; `blocks_pinned` have a reader.
        high_water_blocks: maximum number of blocks used at once.
        committed_bytes: memory that the system holds for the arena now.
    """

    block_bytes: int
    blocks_free: int
    blocks_used: int
    blocks_pinned: int
    largest_free_run_blocks: int
    high_water_blocks: int
    buffers_open: int
    buffers_sealed: int
    readers: int
    committed_bytes: int


class TokenBuffer:
    """The arrays of one segment as it grows. Made by `Arena.open_nowait`, whose caller must call `release`.

    It is open for `append` until `seal`; afterwards `ref` names it. Its memory is freed when it is released and no
    reader has it pinned. Views are valid until then; views of an open buffer only until the next `append` or `seal`.
    """

    def __init__(self, arena: Arena, blocks: int, *, reserved: bool) -> None:
        self._arena = arena
        self._length = 0
        self._reserved = reserved
        self._released = False
        self._ref: ArenaRef | None = None
        self._readers: set[str] = set()
        self._adopt(arena._begin(blocks, from_end=reserved), blocks)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        state = "released" if self._released else "sealed" if self._ref is not None else "open"
        return f"<TokenBuffer {state}, {self._length} tokens, {len(self._readers)} readers>"

    @property
    def ref(self) -> ArenaRef | None:
        """Return the reference to the tokens; None while the buffer is open."""
        return self._ref

    @property
    def released(self) -> bool:
        """Return True after `release` was called; readers may still have the buffer pinned."""
        return self._released

    def arrays(self) -> TokenArrays:
        """Return read-only views of the T tokens so far.

        Raises:
            StaleReference: the buffer was released.
        """
        self._expect_held()
        return self._whole.first(self._length) if self._ref is None else self._arena.memory.view(self._ref)

    def append(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.int32],
        logprobs: Sequence[float] | npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Append N tokens: sampled ones with their N `logprobs` (mask 1), others without (mask 0, logprob 0.0).

        All or nothing. Amortised O(N): the capacity doubles, or grows just enough where doubling fails.

        Raises:
            ArenaFull: it cannot grow now.
            ValueError: the counts differ, or the buffer is sealed.
            OverflowError: a token id does not fit into int32.
            TypeError: the ids are an array of another type.
            StaleReference: the buffer was released.
        """
        self._expect_held()
        if self._ref is not None:
            raise ValueError("a sealed buffer takes no more tokens")
        if logprobs is not None and len(logprobs) != len(token_ids):
            raise ValueError(f"{len(token_ids)} token ids and {len(logprobs)} logprobs; they must be as many")
        if isinstance(token_ids, np.ndarray) and token_ids.dtype != np.int32:
            raise TypeError(f"token ids are int32, not {token_ids.dtype}: numpy would cut them off silently")
        start, end = self._length, self._length + len(token_ids)
        self._make_room(end)
        ids, all_logprobs, loss_mask = self._whole
        ids[start:end] = token_ids
        all_logprobs[start:end] = 0.0 if logprobs is None else logprobs
        loss_mask[start:end] = logprobs is not None
        self._length = end

    def fill(self, arrays: TokenArrays) -> None:
        """Copy arrays that fit the present capacity into an empty buffer, and seal it."""
        self._length = len(arrays.token_ids)
        self._copy_from(arrays)
        self.seal()

    def seal(self) -> ArenaRef:
        """End the writing, shrink to the blocks needed, and return the reference to the tokens. Idempotent.

        The tokens may move: a reservation comes from the arena's end, and sealed tokens are packed at its beginning.

        Raises:
            StaleReference: the buffer was released.
        """
        self._expect_held()
        if self._ref is None:
            if not (self._reserved and self._pack()):
                self._shrink()
            self._arena.memory.set_length(self._first, self._length)
            self._ref = self._arena._sealed(self, self._first, self._capacity, self._generation)
        return self._ref

    def release(self) -> None:
        """Free the memory as soon as no reader has it pinned. Idempotent and never raises, for use in a `finally`."""
        if not self._released:
            self._released = True
            self._free_if_unused()

    # ------------------------------------------------------------ for the arena

    @property
    def blocks(self) -> int:
        """Return the current number of blocks."""
        return self._blocks

    @property
    def pinned(self) -> bool:
        """Return True while a reader has the buffer pinned."""
        return bool(self._readers)

    def pin(self, reader_id: str) -> None:
        """Pin the tokens for a reader."""
        self._readers.add(reader_id)

    def unpin(self, reader_id: str) -> None:
        """End a reader's pin."""
        if reader_id in self._readers:
            self._readers.remove(reader_id)
            self._free_if_unused()

    # ------------------------------------------------------------ inside

    @property
    def _capacity(self) -> int:
        return self._blocks * self._arena.memory.block_tokens

    def _adopt(self, run: tuple[int, int], blocks: int) -> None:
        self._first, self._generation = run
        self._blocks = blocks
        memory = self._arena.memory
        self._whole = memory.arrays(memory.offset_of(self._first), self._capacity)

    def _make_room(self, tokens: int) -> None:
        if tokens <= self._capacity:
            return
        needed = self._arena.blocks_for(tokens)
        wanted = max(needed, 2 * self._blocks)
        try:
            run = self._arena._begin(wanted, from_end=self._reserved)
        except ArenaFull:
            if wanted == needed:
                raise
            wanted = needed
            run = self._arena._begin(needed, from_end=self._reserved)
        self._move(run, wanted)

    def _pack(self) -> bool:
        """Move to a free run nearer to the arena's beginning, if there is one. Return whether it moved."""
        needed = self._arena.blocks_for(self._length)
        run = self._arena._begin_below(needed, self._first)
        if run is not None:
            self._move(run, needed)
        return run is not None

    def _move(self, run: tuple[int, int], blocks: int) -> None:
        before, first, had = self._whole, self._first, self._blocks
        self._adopt(run, blocks)
        self._copy_from(before)
        self._arena._end(first, had)

    def _shrink(self) -> None:
        needed = self._arena.blocks_for(self._length)
        if needed == self._blocks:
            return
        spare = self._blocks - needed
        before = self._whole
        self._adopt((self._first, self._generation), needed)
        self._copy_from(before)
        self._arena._trim(self._first + needed, spare)

    def _copy_from(self, before: TokenArrays) -> None:
        """Copy in an order that also moves arrays safely towards the beginning of their own run."""
        self._whole.token_ids[: self._length] = before.token_ids[: self._length]
        self._whole.logprobs[: self._length] = before.logprobs[: self._length]
        self._whole.loss_mask[: self._length] = before.loss_mask[: self._length]

    def _free_if_unused(self) -> None:
        if self._released and not self._readers:
            self._arena._forget(self, self._first)
            self._arena._end(self._first, self._blocks)

    def _expect_held(self) -> None:
        if self._released:
            raise StaleReference("the buffer was released")


class Arena:
    """The arena of a node, one per node. Made by `open_arena`.

    Attributes:
        memory: the mapping, for the arena's socket and tests.
    """

    def __init__(self, fd: int, memory: ArenaMemory, keep_free_bytes: int) -> None:
        self.memory = memory
        self._fd = fd
        self._keep_free_bytes = keep_free_bytes
        self._blocks = Blocks(memory.total_blocks)
        self._open: set[TokenBuffer] = set()
        self._by_block: dict[int, TokenBuffer] = {}
        self._readers: set[str] = set()
        self._freed_bytes = 0
        self._room = trio.Event()

    @property
    def arena_id(self) -> str:
        """Return the arena's random id, so that references into other processes' arenas are detected."""
        return self.memory.arena_id

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that this number of tokens takes."""
        return max(1, -(-tokens // self.memory.block_tokens))

    def open_nowait(self, tokens: int = 1, *, reserve: bool = False) -> TokenBuffer:
        """Return a new buffer with initial room for `tokens`.

        With `reserve`, `tokens` is the expected maximum. The room then comes from the arena's end, away from small
        sealed runs, and is packed on sealing. Memory is still committed only as it is written.

        Raises:
            ArenaFull: there is not enough room now.
        """
        buffer = TokenBuffer(self, self.blocks_for(tokens), reserved=reserve)
        self._open.add(buffer)
        return buffer

    def copy_nowait(self, arrays: TokenArrays) -> TokenBuffer:
        """Return a sealed buffer with a copy of these arrays.

        Raises:
            ArenaFull: there is not enough room now.
        """
        buffer = self.open_nowait(len(arrays.token_ids))
        buffer.fill(arrays)
        return buffer

    async def wait_room(self, tokens: int) -> None:
        """Return when a buffer of `tokens` could be opened, without reserving it. A checkpoint.

        Raises:
            ArenaFull: the arena is smaller than that, so the wait would never end.
        """
        await trio.lowlevel.checkpoint()
        needed = self.blocks_for(tokens)
        if needed > self._blocks.total:
            raise self._full(tokens)
        while self._blocks.largest_free_run < needed:
            await self._room.wait()

    def has_room(self, tokens: int) -> bool:
        """Return True if a buffer of `tokens` could be opened now."""
        return self._blocks.largest_free_run >= self.blocks_for(tokens)

    # ------------------------------------------------------------ readers

    def add_reader(self) -> str:
        """Register a reader and return its new id. It may pin until `remove_reader`."""
        reader_id = secrets.token_hex(16)
        self._readers.add(reader_id)
        return reader_id

    def has_reader(self, reader_id: str) -> bool:
        """Return True if the reader is registered: its connection has not ended."""
        return reader_id in self._readers

    def remove_reader(self, reader_id: str) -> None:
        """Remove a reader and end all its pins. Idempotent."""
        self._readers.discard(reader_id)
        for buffer in list(self._by_block.values()):
            buffer.unpin(reader_id)

    def pin(self, ref: ArenaRef, reader_id: str) -> None:
        """Keep the tokens of `ref` for this reader, even after their buffer is released. Idempotent.

        Raises:
            StaleReference: the tokens are gone, or the reader is.
        """
        if reader_id not in self._readers:
            raise StaleReference(f"reader {reader_id!r} is gone")
        self._by_block[self.memory.check(ref)].pin(reader_id)

    def hold(self, ref: ArenaRef, holder: str) -> None:
        """Pin tokens for a holder in this process, which must call `unpin`. See `pin`.

        Raises:
            StaleReference: the tokens are gone.
        """
        self._by_block[self.memory.check(ref)].pin(holder)

    def has(self, ref: ArenaRef) -> bool:
        """Return whether the tokens of `ref` still exist."""
        try:
            self.memory.check(ref)
        except StaleReference:
            return False
        return True

    def unpin(self, ref: ArenaRef, reader_id: str) -> None:
        """End a reader's pin on `ref`. Idempotent; it does nothing if the tokens or the reader are gone."""
        if self.has(ref):
            self._by_block[self.memory.check(ref)].unpin(reader_id)

    def open_read_only(self) -> int:
        """Return a new, read-only descriptor of the arena. The caller closes it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def size_bytes(self) -> int:
        """Return the size of the whole mapping, in bytes."""
        return len(self.memory.mapping)

    def statistics(self) -> ArenaStatistics:
        """Return the current state."""
        return ArenaStatistics(
            block_bytes=self.memory.block_bytes,
            blocks_free=self._blocks.free,
            blocks_used=self._blocks.total - self._blocks.free,
            blocks_pinned=sum(buffer.blocks for buffer in self._by_block.values() if buffer.pinned),
            largest_free_run_blocks=self._blocks.largest_free_run,
            high_water_blocks=self._blocks.high_water,
            buffers_open=len(self._open),
            buffers_sealed=len(self._by_block),
            readers=len(self._readers),
            committed_bytes=os.fstat(self._fd).st_blocks * 512,
        )

    # ------------------------------------------------------------ for its buffers

    def _begin(self, blocks: int, *, from_end: bool) -> tuple[int, int]:
        first = self._blocks.take(blocks, from_end=from_end)
        if first is None:
            raise self._full(blocks * self.memory.block_tokens)
        return first, self.memory.begin_run(first)

    def _begin_below(self, blocks: int, limit: int) -> tuple[int, int] | None:
        first = self._blocks.take(blocks, below=limit)
        return None if first is None else (first, self.memory.begin_run(first))

    def _sealed(self, buffer: TokenBuffer, first: int, capacity: int, generation: int) -> ArenaRef:
        self._open.discard(buffer)
        self._by_block[first] = buffer
        return ArenaRef(
            arena_id=self.arena_id,
            offset=self.memory.offset_of(first),
            capacity=capacity,
            length=len(buffer),
            generation=generation,
        )

    def _forget(self, buffer: TokenBuffer, first: int) -> None:
        self._open.discard(buffer)
        if self._by_block.get(first) is buffer:
            del self._by_block[first]

    def _end(self, first: int, count: int) -> None:
        self.memory.end_run(first)
        self._trim(first, count)

    def _trim(self, first: int, count: int) -> None:
        self._blocks.give_back(first, count)
        self._freed_bytes += count * self.memory.block_bytes
        if self._freed_bytes > self._keep_free_bytes:
            self._freed_bytes = 0
            self._return_free_memory()
        self._room.set()
        self._room = trio.Event()

    def _return_free_memory(self) -> None:
        page = mmap.PAGESIZE
        for start, end in self._blocks.runs():
            first_page = -(-self.memory.offset_of(start) // page) * page
            size = self.memory.offset_of(end) // page * page - first_page
            if size > 0:
                # Some kernels (gVisor) cannot, and keep the memory. A release must not fail for that.
                with suppress(OSError):
                    self.memory.mapping.madvise(mmap.MADV_REMOVE, first_page, size)

    def _full(self, tokens: int) -> ArenaFull:
        return ArenaFull(tokens, self._blocks.largest_free_run * self.memory.block_tokens)


@contextmanager
def open_arena(
    size_bytes: int | None = None, *, block_tokens: int = BLOCK_TOKENS, keep_free_bytes: int = KEEP_FREE_BYTES
) -> Iterator[Arena]:
    """Open an arena of about `size_bytes` (`default_arena_bytes` if None). Its file is closed on leaving the block.

    Views stay valid: the memory is freed with the last view, here and in every reader.

    Raises:
        ValueError: the size is too small for one block, or `block_tokens` is not a positive multiple of 4.
        OSError: the system lacks a descriptor or address space for it.
    """
    size_bytes = default_arena_bytes() if size_bytes is None else size_bytes
    fd, memory = create_memory(secrets.token_hex(16), size_bytes, block_tokens)
    try:
        yield Arena(fd, memory, keep_free_bytes)
    finally:
        os.close(fd)


def default_arena_bytes() -> int:
    """Return 1 GiB, or a tenth of the memory this process may use, if that is less."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in _CGROUP_LIMITS:
        limit = Path(name)
        if limit.exists() and (text := limit.read_text().strip()).isdigit():
            memory_bytes = min(memory_bytes, int(text))
    return min(MAX_DEFAULT_BYTES, int(memory_bytes * DEFAULT_MEMORY_SHARE))
