"""An outcome for a trainer on the node's own host: everything but the token arrays, and references to those."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from ipc.session import OutcomeRefFrame
from prorl_trio.types.errors import ProtocolError
from prorl_trio.types.models import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ipc.arena_memory import TokenArrays
    from ipc.arena_wire import ArenaRef
    from prorl_trio.types.models import Segment

__all__ = ["Mapped", "join_outcome", "split_outcome"]

_NOTHING = memoryview(b"")
_encode = msgspec.msgpack.Encoder().encode
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class Mapped(Protocol):
    """A mapped arena: `ipc.arena_socket.MappedArena`, or the node's own `ipc.arena_memory.ArenaMemory`."""

    def view(self, ref: ArenaRef) -> TokenArrays:
        """The tokens of `ref`."""
        ...

    def check(self, ref: ArenaRef) -> object:
        """Raise StaleReference if they are gone."""
        ...


class _MappedIds(np.ndarray[Any, np.dtype[np.int32]]):
    """Token ids in an arena, which know whether they are still there: `Segment.check` asks them."""

    check: Callable[[], object]


def split_outcome(cursor: int, outcome: Outcome, refs: Sequence[ArenaRef]) -> OutcomeRefFrame:
    """The frame that carries `outcome`, whose segments' arrays are where `refs` say, one for each segment, in order.

    Raises:
        ValueError: there are not as many references as segments, or one is of another length.
    """
    trajectory = outcome.trajectory
    lengths = [] if trajectory is None else [len(segment) for segment in trajectory.segments]
    if lengths != [ref.length for ref in refs]:
        raise ValueError(f"segments of {lengths} tokens, references to {[ref.length for ref in refs]}")
    if trajectory is not None:
        empty = [
            msgspec.structs.replace(segment, token_ids_le=_NOTHING, logprobs_le=_NOTHING, loss_mask_le=_NOTHING)
            for segment in trajectory.segments
        ]
        outcome = msgspec.structs.replace(outcome, trajectory=msgspec.structs.replace(trajectory, segments=empty))
    encoded = msgspec.Raw(_encode(outcome))
    return OutcomeRefFrame(cursor=cursor, job_id=outcome.job_id, outcome=encoded, segments=list(refs))


def join_outcome(frame: OutcomeRefFrame, mapped: Mapped) -> Outcome:
    """The whole outcome. Its arrays are views of the arena, and stay what they are until it is acknowledged.

    `Outcome.check` tells whether they are still that, `Outcome.detached` makes one that owns its memory.

    Raises:
        StaleReference: its tokens are gone.
        ProtocolViolation: a reference is none into this arena.
        ProtocolError: the outcome cannot be read, or the references do not belong to it.
    """
    try:
        outcome = _decode_outcome(frame.outcome)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"outcome {frame.cursor} of job {frame.job_id!r} cannot be read: {exc}") from None
    trajectory = outcome.trajectory
    segments = [] if trajectory is None else trajectory.segments
    if len(segments) != len(frame.segments) or any(map(len, segments)):
        counts = f"{len(segments)} segments and {len(frame.segments)} references"
        raise ProtocolError(f"outcome {frame.cursor} of job {frame.job_id!r} has {counts}, or arrays beside references")
    if trajectory is None:
        return outcome
    whole = [_over_arena(segment, ref, mapped) for segment, ref in zip(segments, frame.segments, strict=True)]
    return msgspec.structs.replace(outcome, trajectory=msgspec.structs.replace(trajectory, segments=whole))


def _over_arena(segment: Segment, ref: ArenaRef, mapped: Mapped) -> Segment:
    arrays = mapped.view(ref)
    token_ids = arrays.token_ids.view(_MappedIds)
    token_ids.check = partial(mapped.check, ref)
    return msgspec.structs.replace(
        segment, token_ids_le=token_ids.data, logprobs_le=arrays.logprobs.data, loss_mask_le=arrays.loss_mask.data
    )
