"""The memory in which the tokens of rollouts are recorded: the node's arena, or private memory.

A rollout reserves room for its longest possible trajectory before it starts, so that it never waits for room while it
runs. A rollout without a reservation, or beyond it while the arena is full, uses private memory, and is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import trio

from prorl_ipc.arena_memory import TokenArrays
from prorl_ipc.errors import ArenaFull

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from prorl_ipc.arena import Arena, TokenBuffer

FIRST_PRIVATE_TOKENS: Final = 1024


class PrivateTokens:
    """A `prorl_ipc.arena.TokenBuffer` in private memory of this process, which is freed with its last view."""

    def __init__(self) -> None:
        self._length = 0
        self._whole = _allocate(FIRST_PRIVATE_TOKENS)

    def __len__(self) -> int:
        return self._length

    def arrays(self) -> TokenArrays:
        """Read-only views of the current tokens."""
        return self._whole.first(self._length)

    def append(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.int32],
        logprobs: Sequence[float] | npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Add tokens: sampled ones with their `logprobs`, others without. Amortised O(N)."""
        start, end = self._length, self._length + len(token_ids)
        if end > len(self._whole.token_ids):
            self._whole = _grown(self._whole, max(end, 2 * start), start)
        ids, all_logprobs, loss_mask = self._whole
        ids[start:end] = token_ids
        all_logprobs[start:end] = 0.0 if logprobs is None else logprobs
        loss_mask[start:end] = logprobs is not None
        self._length = end

    @classmethod
    def copy_of(cls, arrays: TokenArrays) -> PrivateTokens:
        """Return a copy of the current contents of `arrays`."""
        copy = cls()
        copy._whole, copy._length = _grown(arrays, 2 * len(arrays.token_ids), len(arrays.token_ids)), len(arrays[0])
        return copy


class SegmentTokens:
    """The tokens of one growing segment. `RolloutTokens.open_segment` creates it."""

    def __init__(self, buffer: TokenBuffer | None, memory: TokenMemory | None) -> None:
        self._shared = buffer
        self._memory = memory
        self._private = PrivateTokens() if buffer is None else None

    def __len__(self) -> int:
        return len(self._buffer)

    @property
    def _buffer(self) -> TokenBuffer | PrivateTokens:
        buffer = self._shared if self._private is None else self._private
        assert buffer is not None
        return buffer

    def arrays(self) -> TokenArrays:
        """Read-only views, valid until the next `append`, `seal` or `release`.

        Raises:
            StaleReference: the tokens were in the arena, and were released.
        """
        return self._buffer.arrays()

    def append(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.int32],
        logprobs: Sequence[float] | npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Add tokens: sampled ones with their `logprobs` (mask 1), others without (mask 0). All or nothing.

        Errors as `TokenBuffer.append`, except a lack of room.
        """
        try:
            self._buffer.append(token_ids, logprobs)
        except ArenaFull:
            assert self._shared is not None
            assert self._memory is not None
            self._memory.make_room()  # outcomes waiting there for a trainer are sent as frames instead
            try:
                self._buffer.append(token_ids, logprobs)
            except ArenaFull:
                self._memory.spilled_total += 1
                self._private = PrivateTokens.copy_of(self._shared.arrays())
                self._shared.release()
                self._shared = None
                self._private.append(token_ids, logprobs)

    def seal(self) -> None:
        """Return unused memory to the arena; nothing may be appended afterwards. Earlier views end. Idempotent."""
        if self._shared is not None:
            self._shared.seal()

    def release(self) -> None:
        """Release the tokens. Idempotent.

        Pinned tokens in the arena live on.
        """
        if self._shared is not None:
            self._shared.release()


class RolloutTokens:
    """All tokens of one attempt at a rollout.

    Made by `TokenMemory.reserve`, or `RolloutTokens()` for private memory only. The requester must call `release`.
    """

    def __init__(self, memory: TokenMemory | None = None, reserved: TokenBuffer | None = None) -> None:
        self._memory = memory
        self._reserved = reserved
        self._reserved_tokens = 0 if memory is None or reserved is None else memory.tokens_of(reserved)
        self._segments: list[SegmentTokens] = []

    def open_segment(self) -> SegmentTokens:
        """Return memory for a new segment.

        The first segment uses the reservation; later ones use free room of the arena, or private memory.
        """
        buffer, self._reserved = self._reserved, None
        if buffer is None and self._memory is not None and self._reserved_tokens:
            buffer = self._memory.open_nowait(self._reserved_tokens)
        segment = SegmentTokens(buffer, self._memory)
        self._segments.append(segment)
        return segment

    def release(self) -> None:
        """Release the memory of all segments, at the end of the attempt. Idempotent; never fails.

        Tokens that are still needed must have been copied or pinned.
        """
        if self._reserved is not None:
            self._reserved.release()
            self._reserved = None
        for segment in self._segments:
            segment.release()


class TokenMemory:
    """Reserves room for rollouts. One per node, for its loop's thread; without an arena all memory is private.

    Attributes:
        make_room: called when there is no room, to free memory that is not essential.
    """

    def __init__(self, arena: Arena | None = None, make_room: Callable[[], None] = lambda: None) -> None:
        self.arena = arena
        self.make_room = make_room
        self.spilled_total = 0
        self._private_total = 0
        self._waiting = 0

    async def reserve(self, tokens: int, *, timeout_s: float) -> RolloutTokens:
        """Wait for room for a rollout of `tokens`, for at most `timeout_s`; then use private memory.

        Private memory is used at once if the whole arena is smaller. When cancelled, nothing was reserved. Needs an
        arena.
        """
        self._waiting += 1
        try:
            with trio.move_on_after(timeout_s):
                return RolloutTokens(self, await self._wait_buffer(tokens))
        except ArenaFull:  # too small even when empty
            pass
        finally:
            self._waiting -= 1
        self._private_total += 1
        return RolloutTokens()

    async def _wait_buffer(self, tokens: int) -> TokenBuffer:
        assert self.arena is not None
        await trio.lowlevel.checkpoint()
        while (buffer := self._open(tokens)) is None:
            await self.arena.wait_room(tokens)
        return buffer

    def open_nowait(self, tokens: int) -> TokenBuffer | None:
        """Return a buffer for `tokens` if there is room now; otherwise None, counted in `spilled_total`."""
        buffer = self._open(tokens)
        self.spilled_total += buffer is None
        return buffer

    def tokens_of(self, buffer: TokenBuffer) -> int:
        assert self.arena is not None
        return buffer.blocks * self.arena.memory.block_tokens

    def statistics(self) -> dict[str, int]:
        """Return live figures: the arena's, if there is one, and the rollouts'.

        `waiting` rollouts wait for room. In total, `private_total` rollouts got no room, and `spilled_total` segments
        outgrew theirs while the arena was full.
        """
        own = {"waiting": self._waiting, "private_total": self._private_total, "spilled_total": self.spilled_total}
        if self.arena is None:
            return own
        return {"size_bytes": self.arena.size_bytes, **msgspec.structs.asdict(self.arena.statistics()), **own}

    def _open(self, tokens: int) -> TokenBuffer | None:
        assert self.arena is not None
        if not self.arena.has_room(tokens):
            self.make_room()
        return self.arena.open_nowait(tokens, reserve=True) if self.arena.has_room(tokens) else None


def _allocate(tokens: int) -> TokenArrays:
    return TokenArrays(np.empty(tokens, np.int32), np.empty(tokens, np.float32), np.empty(tokens, np.uint8))


def _grown(arrays: TokenArrays, tokens: int, used: int) -> TokenArrays:
    larger = _allocate(max(FIRST_PRIVATE_TOKENS, tokens))
    larger.token_ids[:used] = arrays.token_ids[:used]
    larger.logprobs[:used] = arrays.logprobs[:used]
    larger.loss_mask[:used] = arrays.loss_mask[:used]
    return larger
