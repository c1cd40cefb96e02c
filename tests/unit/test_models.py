from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_trio.models import Budgets, JobSpec, PolicySpan, SamplingParams, Segment, TaskInstance, Trajectory

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
