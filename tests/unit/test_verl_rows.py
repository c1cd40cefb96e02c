"""Rows for verl: what is a prompt and what a response, what is cut, and that every token keeps its place and number."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_trio.integrations.verl.rows import RowLimits, masked_row, rows_of, sampled_row, turns_of
from prorl_trio.types.models import ChatMessage, Outcome, PolicySpan, Segment, Timing, Trajectory, Turn


def segment(runs, *, parent=None, reason=None, version="3"):
    """Runs of tokens, (count, sampled); all ids and log-probabilities differ."""
    mask = [sampled for count, sampled in runs for _ in range(count)]
    spans, at = [], 0
    for count, sampled in runs:
        if sampled and count:
            spans.append(PolicySpan(start=at, end=at + count, policy_version=version, engine="e"))
        at += count
    logprobs = [-0.1 * (index + 1) / 3 * sampled for index, sampled in enumerate(mask)]
    return Segment.from_arrays(range(100, 100 + len(mask)), logprobs, mask, spans, parent=parent, reason=reason)


def outcome(*segments, turns=()):
    trajectory = Trajectory(segments=list(segments), turns=list(turns), stop_reason="finished") if segments else None
    return Outcome(
        job_id="j",
        instance_id="i",
        group_id="g",
        status="completed",
        reward=1.0,
        cause=None,
        error="",
        trajectory=trajectory,
        details={},
        timing=Timing(),
    )


def test_a_prompt_ends_where_sampling_begins_and_observations_are_masked():
    (row,) = rows_of(outcome(segment([(3, 0), (2, 1), (4, 0), (1, 1)])), RowLimits(10, 10))
    assert row.prompt_ids.tolist() == [100, 101, 102]
    assert row.response_ids.tolist() == list(range(103, 110))
    assert row.response_mask.tolist() == [1, 1, 0, 0, 0, 0, 1]
    assert (row.segment, row.cut, row.versions, row.sampled) == (0, 0, ["3"], 3)
    assert np.count_nonzero(row.logprobs) == 3


def test_a_prompt_too_long_goes_on_in_the_response_unsampled():
    (row,) = rows_of(outcome(segment([(6, 0), (2, 1)])), RowLimits(4, 10))
    assert row.prompt_ids.tolist() == [100, 101, 102, 103]
    assert row.response_ids.tolist() == [104, 105, 106, 107]
    assert row.response_mask.tolist() == [0, 0, 1, 1]


def test_a_response_is_cut_at_its_end_with_the_versions_of_what_is_cut():
    first, second = segment([(2, 0), (3, 1)]), segment([(3, 0), (2, 1)])
    spans = [
        PolicySpan(start=2, end=4, policy_version="3", engine="e"),
        PolicySpan(start=4, end=5, policy_version="4", engine="e"),
    ]
    swapped = Segment.from_arrays(first.token_ids, first.logprobs, first.loss_mask, spans)
    whole = sampled_row(swapped, 0, RowLimits(5, 3))
    cut = sampled_row(swapped, 0, RowLimits(5, 2))
    assert (whole.versions, whole.cut) == (["3", "4"], 0)
    assert (cut.versions, cut.cut, cut.response_mask.tolist()) == (["3"], 1, [1, 1])
    assert rows_of(outcome(second), RowLimits(1, 2)) == [], "nothing that was sampled is left"


def test_the_agents_own_segments_come_last():
    """The task's agent, its dialogue shortened once; one that it asked, whose dialogue was shortened, too."""
    runs = [(2, 0), (2, 1)]
    segments = [
        segment(runs),
        segment(runs, parent=0, reason="compaction"),
        segment(runs, parent=0, reason="sub_agent"),
        segment(runs, parent=2, reason="compaction"),
    ]
    assert [row.segment for row in rows_of(outcome(*segments), RowLimits(9, 9))] == [2, 3, 0, 1]


def test_nothing_is_trained_of_a_masked_row():
    limits = RowLimits(3, 5)
    row = masked_row(outcome(segment([(4, 0), (2, 1)])), 7, limits)
    assert (row.prompt_ids.tolist(), row.response_ids.tolist()) == ([100, 101, 102], [7])
    assert (row.sampled, row.versions, row.segment) == (0, [], -1)
    empty = masked_row(outcome(), 7, limits)
    assert (empty.prompt_ids.tolist(), empty.response_ids.tolist(), empty.sampled) == ([7], [7], 0)


def test_turns_are_counted_as_verl_counts_them():
    def turn(observations, *roles):
        return Turn(
            segment=0,
            completion_start=0,
            completion_end=1,
            text="",
            finish_reason="stop",
            tool_calls=[],
            observations=["x"] * observations,
            inference_s=0.0,
            tools_s=0.0,
            messages=[ChatMessage(role=role, content="") for role in roles],
        )

    turns = [turn(2, "system", "user"), turn(0), turn(1, "user")]
    assert turns_of(outcome(segment([(1, 0), (1, 1)]), turns=turns).trajectory) == 1 + 3 + 3 + 1
    assert turns_of(None) == 0


@given(
    runs=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 1)), min_size=1, max_size=6),
    prompt=st.integers(1, 8),
    response=st.integers(1, 8),
)
def test_every_row_fits_and_is_a_piece_of_its_segment(runs, prompt, response):
    made = segment([(1, 0), *runs])
    for row in rows_of(outcome(made), RowLimits(prompt, response)):
        assert 1 <= len(row.prompt_ids) <= prompt
        assert 1 <= len(row.response_ids) <= response
        length = len(row.prompt_ids) + len(row.response_ids)
        assert np.concatenate([row.prompt_ids, row.response_ids]).tolist() == made.token_ids[:length].tolist()
        assert not made.loss_mask[: len(row.prompt_ids)].any()
        assert row.response_mask.tolist() == made.loss_mask[len(row.prompt_ids) : length].tolist()
        assert row.logprobs.tolist() == made.logprobs[len(row.prompt_ids) : length].tolist()
        assert row.cut == len(made) - length


def test_a_row_without_a_prompt_is_no_row_of_a_node():
    """A segment begins with a prompt always; one token that was sampled, and nothing before it, is left out."""
    assert rows_of(outcome(segment([(1, 1)])), RowLimits(4, 4)) == []


@pytest.mark.parametrize("limits", [RowLimits(1, 1), RowLimits(100, 100)])
def test_arrays_keep_their_types(limits):
    (row,) = rows_of(outcome(segment([(1, 0), (2, 1)])), limits)
    types = [array.dtype for array in (row.prompt_ids, row.response_ids, row.response_mask, row.logprobs)]
    assert types == [np.int32, np.int32, np.uint8, np.float32]
