from __future__ import annotations

import copy
import pickle
from array import array

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_trio.types.models import (
    Budgets,
    JobSpec,
    Outcome,
    PolicySpan,
    SamplingParams,
    Segment,
    TaskInstance,
    Timing,
    Trajectory,
    Turn,
)

INT32 = st.integers(0, 2**31 - 1)
TOKENS = st.lists(st.tuples(INT32, st.floats(-100, 0, width=32), st.integers(0, 1)))


@given(TOKENS)
def test_segments_survive_the_wire_bit_for_bit(tokens):
    ids, logprobs, mask = [t[0] for t in tokens], [t[1] for t in tokens], [t[2] for t in tokens]
    span = PolicySpan(start=0, end=len(ids), policy_version="7", engine="vllm 0.32")
    segment = Segment.from_arrays(ids, logprobs, mask, [span])
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(segment), type=Segment)
    assert again == segment
    assert again.token_ids.tolist() == ids
    assert again.logprobs.tolist() == np.asarray(logprobs, dtype=np.float32).tolist()
    assert again.loss_mask.tolist() == mask
    assert (again.token_ids.dtype, again.logprobs.dtype, again.loss_mask.dtype) == (np.int32, np.float32, np.uint8)
    assert len(again) == len(ids)


def test_nine_bytes_a_token():
    n = 32_768
    segment = Segment.from_arrays(range(n), np.zeros(n), np.ones(n), [])
    trajectory = Trajectory(segments=[segment], turns=[], stop_reason="finished")
    assert len(msgspec.msgpack.encode(trajectory)) < 9.1 * n


def test_arrays_of_different_length_are_refused():
    with pytest.raises(ValueError, match="2 ids, 1 logprobs, 2 mask"):
        Segment.from_arrays([1, 2], [0.0], [1, 1], [])


def test_views_are_read_only():
    segment = Segment.from_arrays([1], [0.0], [1], [])
    with pytest.raises(ValueError, match="read-only"):
        segment.token_ids[0] = 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingParams(temperature=-1), "temperature"),
        (lambda: SamplingParams(top_p=0), "top_p"),
        (lambda: SamplingParams(max_output_tokens=0), "max_output_tokens"),
        (lambda: Budgets(run_s=0), "run_s"),
        (lambda: Budgets(eval_s=float("nan")), "eval_s"),
    ],
)
def test_values_out_of_range_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("field", "value"), [("job_id", ""), ("job_id", "x" * 201), ("max_turns", 0)])
def test_a_bad_spec_is_refused_on_decoding_with_its_field(field, value):
    spec = {"job_id": "a", "instance": {"instance_id": "i", "handler": "math", "payload": {}}, field: value}
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(spec, JobSpec)


def test_unknown_fields_are_refused():
    with pytest.raises(msgspec.ValidationError, match="rollouts"):
        msgspec.convert({"instance_id": "i", "handler": "math", "payload": {}, "rollouts": 3}, TaskInstance)


def outcome_of(tokens):
    segment = Segment.from_arrays(range(tokens), np.full(tokens, -0.5), np.ones(tokens), [])
    return Outcome(
        job_id="j",
        instance_id="i",
        group_id="g",
        status="completed",
        reward=1.0,
        cause=None,
        error="",
        trajectory=Trajectory(segments=[segment], turns=[], stop_reason="finished"),
        details={},
        timing=Timing(),
    )


def arrays_of(outcome):
    segment = outcome.trajectory.segments[0]
    return [segment.token_ids, segment.logprobs, segment.loss_mask]


def test_decoding_copies_no_token():
    message = msgspec.msgpack.encode({"cursor": 1, "outcome": outcome_of(32_768)})

    class Frame(msgspec.Struct):
        cursor: int
        outcome: msgspec.Raw

    raw = msgspec.msgpack.decode(message, type=Frame).outcome
    outcome = msgspec.msgpack.decode(raw, type=Outcome)
    whole = np.frombuffer(message, np.uint8)
    assert all(np.shares_memory(whole, part) for part in arrays_of(outcome))
    assert outcome == outcome_of(32_768)


def test_encoding_an_outcome_of_32k_tokens_is_a_copy_of_its_bytes():
    outcome = outcome_of(32_768)
    encoded = msgspec.msgpack.encode(outcome)
    assert len(encoded) < 9.1 * 32_768
    assert all(part.tobytes() in encoded for part in arrays_of(outcome))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)])
def test_any_bytes_like_object_will_do(kind):
    ids = kind(np.asarray([1, 2], "<i4").tobytes())
    segment = Segment(token_ids_le=ids, logprobs_le=array("f", [0.0, -1.0]), loss_mask_le=b"\0\1", spans=[])
    assert segment == Segment.from_arrays([1, 2], [0.0, -1.0], [0, 1], [])
    assert np.shares_memory(segment.token_ids, np.frombuffer(ids, np.uint8))
    assert not segment.token_ids.flags.writeable
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(segment), type=Segment) == segment
    assert msgspec.json.decode(msgspec.json.encode(segment), type=Segment) == segment


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_segment_over_arrays_is_a_view_of_them(tokens):
    ids, logprobs, mask = np.arange(tokens, dtype="i4"), np.zeros(tokens, "f4"), np.ones(tokens, "u1")
    segment = Segment.over_arrays(ids, logprobs, mask, [])
    assert segment == Segment.from_arrays(ids, logprobs, mask, [])
    assert len(segment) == tokens
    if tokens:
        ids[0] = 7
        assert segment.token_ids[0] == 7
        with pytest.raises((TypeError, ValueError, BufferError)):
            Segment.over_arrays(ids[::2], logprobs[::2], mask[::2], [])


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_outcomes_can_be_pickled(protocol):
    outcome = outcome_of(100)
    assert pickle.loads(pickle.dumps(outcome, protocol)) == outcome


def test_a_pickle_with_buffers_beside_it_copies_no_token():
    outcome = outcome_of(1000)
    buffers = []
    pickled = pickle.dumps(outcome, 5, buffer_callback=buffers.append)
    assert len(buffers) == 3
    assert len(pickled) < 1000
    again = pickle.loads(pickled, buffers=buffers)
    assert again == outcome
    assert all(map(np.shares_memory, arrays_of(again), arrays_of(outcome)))


def test_a_deep_copy_owns_its_memory():
    ids = np.arange(3, dtype="i4")
    segment = Segment.over_arrays(ids, np.zeros(3, "f4"), np.ones(3, "u1"), [])
    for again in (copy.deepcopy(segment), pickle.loads(pickle.dumps(segment))):
        assert again == segment
        assert not np.shares_memory(again.token_ids, ids)
    assert np.shares_memory(copy.copy(segment).token_ids, ids)


@pytest.mark.parametrize(
    ("lineage", "turns", "own"),
    [
        ([], [], []),
        ([(None, None)], [0, 0], [0]),
        (
            [(None, None), (0, "rewrite"), (0, "sub_agent"), (1, "branch"), (2, "compaction")],
            [0, 2, 4, 4, 3],
            [0, 1, 3],
        ),
        ([(None, None), (None, None), (1, "compaction")], [0, 1, 2], [1, 2]),  # a title, and then the task
        ([(None, None), (0, "side_call"), (1, "rewrite"), (0, "tools_changed")], [1, 1, 2], [0, 3]),
    ],
)
def test_the_tasks_own_segments_are_told_from_others(lineage, turns, own):
    one = Segment.from_arrays([1, 2], [0.0, -1.0], [0, 1], [PolicySpan(start=1, end=2, policy_version="0", engine="e")])
    segments = [msgspec.structs.replace(one, parent=parent, reason=reason) for parent, reason in lineage]
    taken = [
        Turn(segment=place, completion_start=1, completion_end=2, text="", finish_reason="stop", tool_calls=[],
             observations=[], inference_s=0.0, tools_s=0.0)
        for place in turns
    ]  # fmt: skip
    assert Trajectory(segments=segments, turns=taken, stop_reason="finished").own_segments == own
