"""An outcome for a trainer on the node's own host: references replace the token arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from prorl_ipc.arena_memory import SealedArray
from prorl_ipc.session import OutcomeRefFrame
from prorl_ipc.wire import UNDECODABLE
from prorl_trio.types.errors import ProtocolError
from prorl_trio.types.models import Outcome, Segment, Trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_ipc.arena_memory import ArenaRef, TokenArrays

_NOTHING = memoryview(b"")
_encode = msgspec.msgpack.Encoder().encode
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class Mapped(Protocol):
    """A mapped arena: `prorl_ipc.arena_socket.MappedArena`, or the node's own `prorl_ipc.arena_memory.ArenaMemory`."""

    def view(self, ref: ArenaRef) -> TokenArrays:
        """Return the tokens of `ref`, without a copy."""
        ...


def refs_of(outcome: Outcome) -> list[ArenaRef] | None:
    """Return references to the tokens of each segment; None if any segment lacks one, or without a trajectory."""
    if not isinstance(outcome.trajectory, Trajectory):  # a handler may have put anything there
        return None
    refs = [_ref_of(segment) for segment in outcome.trajectory.segments]
    return None if None in refs else [ref for ref in refs if ref is not None]


def _ref_of(segment: object) -> ArenaRef | None:
    """Return the one reference shared by all three arrays, if it covers the whole segment."""
    if not isinstance(segment, Segment):
        return None
    behind = (segment.token_ids_le.obj, segment.logprobs_le.obj, segment.loss_mask_le.obj)
    ref, *others = [array.ref if isinstance(array, SealedArray) else None for array in behind]
    return ref if ref is not None and ref.length == len(segment) and others == [ref, ref] else None


def split_outcome(cursor: int, outcome: Outcome, refs: Sequence[ArenaRef]) -> OutcomeRefFrame:
    """Return the frame that carries `outcome` without its arrays. `refs` has one reference for each segment.

    Raises:
        ValueError: the number of references, or a length, differs from the segments.
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
    """Return the whole outcome. Its arrays are views of the arena, valid until it is acknowledged.

    `Outcome.check` raises if they are invalid, and `Outcome.detached` returns a copy that owns its memory.

    Raises:
        StaleReference: its tokens are gone.
        ProtocolViolation: a reference is not into this arena.
        ProtocolError: the outcome cannot be decoded, or does not match the references.
    """
    try:
        outcome = _decode_outcome(frame.outcome)
    except UNDECODABLE as exc:
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
    token_ids, logprobs, loss_mask = (array.data for array in mapped.view(ref))
    return msgspec.structs.replace(segment, token_ids_le=token_ids, logprobs_le=logprobs, loss_mask_le=loss_mask)
