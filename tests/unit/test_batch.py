from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_trio import Outcome, PaddedBatch, Segment, Trajectory, pad_batch
from prorl_trio.types.batch import NOT_SAMPLED
from prorl_trio.types.models import PolicySpan, Timing

PAD = 99


def trajectory(*segments):
    return Trajectory(segments=list(segments), turns=[], stop_reason="finished")


def outcome(job_id, recorded):
    return Outcome(
        job_id=job_id,
        instance_id="i",
        group_id="g",
        status="completed" if recorded else "failed",
        reward=None,
        cause=None,
        error="",
        trajectory=recorded,
        details={},
        timing=Timing(),
    )


def segment(prompt, *completions):
    """A prompt of so many tokens, then (count, version) sampled ones."""
    mask, spans = [0] * prompt, []
    for count, version in completions:
        spans.append(PolicySpan(start=len(mask), end=len(mask) + count, policy_version=version, engine="e"))
        mask += [1] * count
    ids = [k + 1 for k in range(len(mask))]
    return Segment.from_arrays(ids, [-0.5 * sampled for sampled in mask], mask, spans)


SEGMENTS = st.builds(
    lambda prompt, completions: segment(prompt, *completions),
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["v1", "v2", "v3"])), max_size=3),
)
TRAJECTORIES = st.lists(SEGMENTS, max_size=3).map(lambda segments: trajectory(*segments))
ITEMS = st.lists(
    st.one_of(TRAJECTORIES, st.builds(outcome, st.sampled_from(["a", "b"]), st.none() | TRAJECTORIES)), max_size=5
)


def naive(items, max_len, side):
    """The same with lists of numbers."""
    versions, rows = [], []
    for number, item in enumerate(items):
        recorded = item.trajectory if isinstance(item, Outcome) else item
        for index, part in enumerate(recorded.segments if recorded else []):
            by_token = [NOT_SAMPLED] * len(part)
            for span in part.spans:
                if span.policy_version not in versions:
                    versions.append(span.policy_version)
                by_token[span.start : span.end] = [versions.index(span.policy_version)] * (span.end - span.start)
            job_id = item.job_id if isinstance(item, Outcome) else ""
            columns = [part.token_ids.tolist(), part.logprobs.tolist(), part.loss_mask.tolist(), by_token]
            rows.append((number, index, job_id, [column[:max_len] for column in columns]))
    width = max((len(columns[0]) for *_, columns in rows), default=0) if max_len is None else max_len
    padded = []
    for pad, k in ((PAD, 0), (0.0, 1), (0, 2), (NOT_SAMPLED, 3)):
        lines = [(columns[k], [pad] * (width - len(columns[k]))) for *_, columns in rows]
        padded.append([line + fill if side == "right" else fill + line for line, fill in lines])
    return rows, versions, padded


@given(ITEMS, st.sampled_from(["left", "right"]), st.none() | st.integers(0, 12), st.booleans())
def test_as_a_naive_reference(items, side, max_len, reuse):
    rows, versions, (ids, logprobs, mask, version) = naive(items, max_len, side)
    out = pad_batch([trajectory(*[segment(40)] * 20)], pad_token_id=5) if reuse else None
    batch = pad_batch(items, pad_token_id=PAD, max_len=max_len, side=side, truncate=True, out=out)
    assert batch.token_ids.tolist() == ids
    assert batch.logprobs.tolist() == logprobs
    assert batch.loss_mask.tolist() == mask
    assert batch.policy_version.tolist() == version
    assert batch.attention_mask.sum(axis=1).tolist() == batch.lengths.tolist() == [len(r[3][0]) for r in rows]
    assert ((batch.attention_mask == 1) | (batch.token_ids == PAD)).all()
    assert list(zip(batch.item.tolist(), batch.segment.tolist(), batch.job_ids, strict=True)) == [r[:3] for r in rows]
    assert batch.policy_versions == versions
    assert len(batch) == len(rows)
    if reuse and rows and batch.token_ids.size:
        assert np.shares_memory(batch.token_ids, out.token_ids)


def test_shapes_and_dtypes():
    batch = pad_batch([trajectory(segment(2, (3, "v1")), segment(4))], pad_token_id=PAD, max_len=8, side="left")
    assert isinstance(batch, PaddedBatch)
    expected = {
        "token_ids": np.int32,
        "logprobs": np.float32,
        "loss_mask": np.uint8,
        "attention_mask": np.uint8,
        "policy_version": np.int32,
    }
    for name, dtype in expected.items():
        assert getattr(batch, name).dtype == dtype
        assert getattr(batch, name).shape == (2, 8)
    for name in ("lengths", "item", "segment"):
        assert (getattr(batch, name).dtype, getattr(batch, name).shape) == (np.int32, (2,))
    assert batch.token_ids.tolist()[1] == [PAD] * 4 + [1, 2, 3, 4]
    assert pad_batch([], pad_token_id=PAD, token_dtype=np.int64).token_ids.dtype == np.int64


def test_nothing_is_cut_off_silently():
    items = [outcome("short", trajectory(segment(1))), outcome("long", trajectory(segment(2), segment(3)))]
    with pytest.raises(ValueError, match=r"segment 1 of item 1 \(job 'long'\) has 3 tokens, max_len is 2"):
        pad_batch(items, pad_token_id=PAD, max_len=2, truncate=False)
    batch = pad_batch(items, pad_token_id=PAD, max_len=2)
    assert (batch.lengths.tolist(), batch.truncated.tolist()) == ([1, 2, 2], [0, 0, 1])
    again = pad_batch(items[:1], pad_token_id=PAD, max_len=2, out=batch)
    assert again.truncated.tolist() == [0] * len(again)


@pytest.mark.parametrize("shape", [(1, 40), (9, 3)])
def test_what_does_not_fit_into_out_is_refused(shape):
    rows, width = shape
    out = pad_batch([trajectory(*[segment(width)] * rows)], pad_token_id=PAD)
    with pytest.raises(ValueError, match="does not fit into out"):
        pad_batch([trajectory(segment(4), segment(4))], pad_token_id=PAD, out=out)


@given(ITEMS)
def test_rollouts_weigh_the_same_whatever_their_segments(items):
    batch = pad_batch(items, pad_token_id=PAD)
    weighed = (batch.loss_mask * batch.rollout_weights[:, None]).sum(axis=1)
    for number, item in enumerate(items):
        recorded = item.trajectory if isinstance(item, Outcome) else item
        sampled = sum(int(segment.loss_mask.sum()) for segment in recorded.segments) if recorded else 0
        assert weighed[batch.item == number].sum() == pytest.approx(1.0 if sampled else 0.0)
    assert (batch.rollout_weights.dtype, batch.rollout_weights.shape) == (np.float32, (len(batch),))
