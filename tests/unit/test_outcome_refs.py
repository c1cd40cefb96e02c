from __future__ import annotations

import copy

import msgspec
import numpy as np
import pytest

from prorl_ipc.arena import open_arena
from prorl_ipc.errors import StaleReference
from prorl_ipc.session import OutcomeRefFrame, ServerFrame
from prorl_trio.types.batch import pad_batch
from prorl_trio.types.errors import ProtocolError
from prorl_trio.types.models import Outcome, PolicySpan, Segment, Timing, Trajectory
from prorl_trio.types.outcome_refs import join_outcome, refs_of, split_outcome


@pytest.fixture
def arena():
    with open_arena(1024 * 1024, block_tokens=256) as opened:
        yield opened


def outcome_of(trajectory):
    return Outcome(
        job_id="job",
        instance_id="i",
        group_id="g",
        status="completed",
        reward=0.5,
        cause=None,
        error="",
        trajectory=trajectory,
        details={"k": [1]},
        timing=Timing(run_s=1.5),
    )


def recorded(arena, *lengths):
    """A trajectory of segments with so many tokens, in the arena."""
    buffers = [arena.open_nowait() for _ in lengths]
    for buffer, length in zip(buffers, lengths, strict=True):
        buffer.append(range(length // 2))
        buffer.append(range(length - length // 2), [-0.5] * (length - length // 2))
        buffer.seal()
    segments = [
        Segment.over_arrays(
            *buffer.arrays(),
            [PolicySpan(start=len(buffer) // 2, end=len(buffer), policy_version="7", engine="e")],
        )
        for buffer in buffers
    ]
    return outcome_of(Trajectory(segments=segments, turns=[], stop_reason="finished")), buffers


def on_the_wire(frame):
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=ServerFrame)
    assert isinstance(again, OutcomeRefFrame)
    return again


def altered(outcome, **fields):
    (segment,) = outcome.trajectory.segments
    segments = [msgspec.structs.replace(segment, **fields)]
    return msgspec.structs.replace(outcome, trajectory=msgspec.structs.replace(outcome.trajectory, segments=segments))


def test_segments_know_where_their_tokens_are(arena):
    outcome, buffers = recorded(arena, 1000, 5)
    assert refs_of(outcome) == [buffer.ref for buffer in buffers]
    joined = join_outcome(split_outcome(1, outcome, refs_of(outcome)), arena.memory)
    assert refs_of(joined) == refs_of(outcome)


def test_what_is_not_all_of_a_buffer_is_nowhere(arena):
    outcome, _ = recorded(arena, 1000)
    other, _ = recorded(arena, 1000)
    (segment,), (foreign,) = outcome.trajectory.segments, other.trajectory.segments
    mask = memoryview(bytes(1000))
    half = {name: getattr(segment, name)[:size] for name, size in (("token_ids_le", 2000), ("logprobs_le", 2000))}
    assert refs_of(altered(outcome, parent=0, reason="retry")) == refs_of(outcome) is not None
    assert refs_of(altered(outcome, loss_mask_le=mask)) is None
    assert refs_of(altered(outcome, logprobs_le=foreign.logprobs_le)) is None
    assert refs_of(altered(outcome, **half, loss_mask_le=segment.loss_mask_le[:500])) is None
    assert refs_of(outcome.detached()) is None
    assert refs_of(msgspec.structs.replace(outcome, trajectory=None)) is None
    assert refs_of(msgspec.structs.replace(outcome, trajectory={"segments": []})) is None


def test_part_of_a_buffers_arrays_is_named_by_nothing(arena):
    _, (buffer,) = recorded(arena, 1000)
    part = Segment.over_arrays(*(array[:10] for array in buffer.arrays()), [])
    whole = Segment.over_arrays(*buffer.arrays(), [])
    buffer.release()
    part.check()
    with pytest.raises(StaleReference):
        whole.check()


@pytest.mark.parametrize("lengths", [(), (0,), (1000,), (5, 0, 700)])
def test_what_is_split_is_joined_again(arena, lengths):
    outcome, buffers = recorded(arena, *lengths)
    frame = on_the_wire(split_outcome(3, outcome, [buffer.ref for buffer in buffers]))
    assert (frame.cursor, frame.job_id) == (3, "job")
    assert join_outcome(frame, arena.memory) == outcome


def test_no_token_is_in_the_frame_and_none_is_copied(arena):
    outcome, buffers = recorded(arena, 20_000)
    frame = split_outcome(1, outcome, [buffers[0].ref])
    assert len(msgspec.msgpack.encode(frame)) < 1000
    segment = join_outcome(on_the_wire(frame), arena.memory).trajectory.segments[0]
    for ours, theirs in zip(buffers[0].arrays(), (segment.token_ids, segment.logprobs, segment.loss_mask), strict=True):
        assert ours.__array_interface__["data"][0] == theirs.__array_interface__["data"][0]
        assert not theirs.flags.writeable


def test_a_failure_without_a_trajectory_needs_no_reference(arena):
    outcome = outcome_of(None)
    assert join_outcome(on_the_wire(split_outcome(1, outcome, [])), arena.memory) == outcome


def test_a_deep_copy_stays_when_the_tokens_are_gone(arena):
    outcome, buffers = recorded(arena, 100)
    frame = split_outcome(1, outcome, [buffers[0].ref])
    kept = copy.deepcopy(join_outcome(frame, arena.memory))
    buffers[0].release()
    other = arena.open_nowait()
    other.append([7] * 100)
    assert kept.trajectory.segments[0].token_ids.tolist() == [*range(50), *range(50)]
    with pytest.raises(StaleReference):
        join_outcome(frame, arena.memory)


def test_references_that_do_not_fit_are_refused(arena):
    outcome, (first, second) = recorded(arena, 5, 6)
    with pytest.raises(ValueError, match=r"segments of \[5, 6\] tokens, references to \[5\]"):
        split_outcome(1, outcome, [first.ref])
    with pytest.raises(ValueError, match=r"references to \[6, 5\]"):
        split_outcome(1, outcome, [second.ref, first.ref])
    frame = split_outcome(1, outcome, [first.ref, second.ref])
    for forged in (
        msgspec.structs.replace(frame, segments=[first.ref]),
        msgspec.structs.replace(frame, outcome=msgspec.Raw(msgspec.msgpack.encode(outcome))),
        msgspec.structs.replace(frame, outcome=msgspec.Raw(b"\x90")),
    ):
        with pytest.raises(ProtocolError, match="outcome 1 of job 'job'"):
            join_outcome(forged, arena.memory)


def test_the_arrays_of_a_joined_outcome_are_a_batch_without_a_list(arena):
    outcome, buffers = recorded(arena, 300, 200)
    joined = join_outcome(split_outcome(1, outcome, [buffer.ref for buffer in buffers]), arena.memory)
    batch = pad_batch([joined.trajectory], pad_token_id=0)
    assert np.array_equal(batch.token_ids[0], outcome.trajectory.segments[0].token_ids)
    assert batch.lengths.tolist() == [300, 200]
