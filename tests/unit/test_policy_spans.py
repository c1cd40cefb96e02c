"""What a span says of how its tokens were sampled, and what that costs on the wire."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from prorl_trio.types.models import PolicySpan, Segment, Trajectory

VLLM = "vllm 0.32.0"


def span(start, end, version, **more):
    return PolicySpan(start=start, end=end, policy_version=version, engine=VLLM, **more)


def segment(*spans, **more):
    count = max((each.end for each in spans), default=0)
    return Segment.from_arrays([1] * count, [-1.0] * count, [1] * count, list(spans), **more)


def test_a_span_of_the_raw_distribution_costs_no_more_than_its_run_and_version():
    raw, cut = span(0, 500, "7"), span(0, 500, "7", temperature=0.7, top_p=0.9, top_k=40, logprob_kind="processed")
    assert len(msgspec.msgpack.encode(raw)) <= 60
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(cut), type=PolicySpan) == cut
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=PolicySpan) == raw


def test_what_was_written_before_these_fields_is_read():
    old = {"start": 0, "end": 3, "policy_version": "1", "engine": VLLM}
    assert msgspec.convert(old, PolicySpan) == span(0, 3, "1")


@pytest.mark.parametrize(
    ("versions", "ordered", "staleness"),
    [
        (("3", "4", "9"), ["3", "4", "9"], 6),
        (("10", "9", "10"), ["9", "10"], 1),
        (("a", "b", "c"), ["a", "b", "c"], 2),
        (("0", "b", "b"), ["0", "b"], 1),
        (("7", "7", "7"), ["7"], 0),
    ],
)
def test_staleness_is_how_far_the_versions_lie_apart(versions, ordered, staleness):
    first, second, third = versions
    one = segment(span(0, 2, first), span(2, 5, second))
    two = segment(span(3, 6, third), parent=0, reason="compaction")
    trajectory = Trajectory(segments=[one, two], turns=[], stop_reason="finished")
    assert (trajectory.policy_versions, trajectory.staleness) == (ordered, staleness)


def test_what_was_not_sampled_is_not_stale():
    assert Trajectory(segments=[segment()], turns=[], stop_reason="finished").staleness == 0


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_pickled_segment_keeps_its_parent(protocol):
    before = segment(span(0, 2, "4"), parent=0, reason="template_rewrite")
    after = pickle.loads(pickle.dumps(before, protocol=protocol))
    assert (after.parent, after.reason, after.spans) == (0, "template_rewrite", before.spans)
