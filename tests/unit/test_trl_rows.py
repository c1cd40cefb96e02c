"""The rows that TRL is given of a rollout: the recorded tokens, bit for bit, nothing it could not train with."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from prorl_trio.integrations.trl.logprobs import LogprobsRefused
from prorl_trio.integrations.trl.rollout_func import TaskLookup
from prorl_trio.integrations.trl.rows import advantages_of, completion_of, placeholder, rows_of
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import Outcome, PolicySpan, Segment, TaskInstance, Timing, Trajectory

FILLER = 9


def segment(ids, mask, logprobs, *versions, **span):
    """A segment whose sampled tokens are shared out among `versions`."""
    sampled = [place for place, one in enumerate(mask) if one]
    parts = np.array_split(sampled, len(versions)) if versions else []
    spans = [
        PolicySpan(start=int(part[0]), end=int(part[-1]) + 1, policy_version=version, engine="fake 1", **span)
        for part, version in zip(parts, versions, strict=True)
        if len(part)
    ]
    return Segment.from_arrays(ids, logprobs, mask, spans)


def outcome(*segments, trajectory=True, reward=1.0):
    record = Trajectory(segments=list(segments), turns=[], stop_reason="finished") if trajectory else None
    return Outcome(
        job_id="job",
        instance_id="q",
        group_id="g",
        status="completed",
        reward=reward,
        cause=None,
        error="",
        trajectory=record,
        details={},
        timing=Timing(),
    )


def after(one, parent, reason):
    return msgspec.structs.replace(one, parent=parent, reason=reason)


FIRST = segment([1, 2, 3, 4, 5], [0, 0, 1, 0, 1], [0, 0, -0.1, 0, -0.3], "4", "5")
SECOND = segment([1, 7, 8], [0, 1, 1], [0, -1.25, -2.5], "5")
NOTHING = segment([1, 2], [0, 0], [0, 0])


def test_a_row_for_each_segment_bit_for_bit():
    first, second = rows_of(outcome(FIRST, NOTHING, SECOND))
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert first.mask.tolist() == [0, 0, 1, 0, 1]
    assert first.logprobs.tobytes() == FIRST.logprobs.tobytes()
    assert first.versions == ("4", "5")
    assert second.token_ids.tolist() == [1, 7, 8]
    assert (first.token_ids.dtype, first.mask.dtype, first.logprobs.dtype) == (np.int64, np.int64, np.float32)
    assert first.logprobs.flags.writeable, "torch warns of memory that it must not write to"


def test_rollouts_without_a_sampled_token_have_no_row_but_a_placeholder_that_teaches_nothing():
    assert rows_of(outcome(NOTHING)) == rows_of(outcome(trajectory=False)) == []
    row = placeholder(FILLER)
    assert row.token_ids.tolist() == [FILLER, FILLER]
    assert row.mask.tolist() == [0, 1]
    assert row.versions == ()


@pytest.mark.parametrize("aside", [[], ["sub_agent"], ["side_call", "sub_agent"]])
def test_a_completion_is_the_last_segment_of_the_tasks_own_work_from_its_first_sampled_token(aside):
    own = [FIRST, after(SECOND, 0, "rewrite"), after(NOTHING, 1, "compaction")]
    found = completion_of(outcome(*own, *(after(FIRST, 0, reason) for reason in aside)), FILLER)
    assert (found.prompt_ids, found.completion_ids, found.mask) == ([1], [7, 8], [1, 1])
    assert found.logprobs == [-1.25, -2.5]
    assert found.left_out == 2 + 2 * len(aside)
    alone = completion_of(outcome(FIRST), FILLER)
    assert (alone.prompt_ids, alone.completion_ids, alone.mask) == ([1, 2], [3, 4, 5], [1, 0, 1])
    assert np.array(alone.logprobs, np.float32).tobytes() == FIRST.logprobs[2:].tobytes()
    assert alone.left_out == 0


@pytest.mark.parametrize("given", [outcome(NOTHING), outcome(trajectory=False), outcome()])
def test_a_completion_has_a_masked_token_where_nothing_was_sampled(given):
    assert completion_of(given, FILLER) == ([FILLER], [FILLER], [0], [0.0], 0)


@pytest.mark.parametrize(
    ("span", "why"),
    [
        ({"temperature": 0.7}, "temperature 0.7"),
        ({"temperature": 0.0}, "temperature 0"),
        ({"top_p": 0.9}, "top_p 0.9"),
        ({"top_k": 20}, "top_k 20"),
        ({"logprob_kind": "processed"}, "processed log-probabilities"),
        ({"logprob_kind": "unknown"}, "unknown log-probabilities"),
    ],
)
def test_other_log_probabilities_are_refused_and_the_tokens_named(span, why):
    bent = outcome(FIRST, segment([1, 2, 3], [0, 1, 1], [0, -1, -2], "5", **span))
    for read in (rows_of, lambda given: completion_of(given, FILLER)):
        with pytest.raises(LogprobsRefused, match=f"job job, segment 1, tokens 1 to 3 were recorded with {why}"):
            read(bent)


def test_advantages_are_those_of_the_papers():
    rewards = np.array([1, 0, 0, 1, 1], np.float32)
    grpo = advantages_of(rewards, scale=True)
    assert np.allclose(grpo, (rewards - 0.6) / rewards.std(), atol=1e-6)
    assert np.allclose(advantages_of(rewards, scale=False), rewards - np.float32(0.6), atol=1e-6)
    assert not advantages_of(np.ones(4, np.float32), scale=True).any()


# ---------------------------------------------------------------- prompts


def instance_of(row):
    return TaskInstance(instance_id=row["id"], handler="math", payload={"answer": row["answer"]})


def test_tasks_are_found_by_text_and_by_messages():
    chat = [{"role": "user", "content": "b?"}]
    rows = [{"prompt": "a?", "id": "a", "answer": 1}, {"prompt": chat, "id": "b", "answer": 2}]
    lookup = TaskLookup(rows, instance_of)
    assert len(lookup) == 2
    assert lookup("a?").instance_id == "a"
    assert lookup([{"content": "b?", "role": "user"}]).instance_id == "b", "the order of keys says nothing"
    with pytest.raises(ConfigError, match=r"no row of the dataset has this prompt: 'c\?'"):
        lookup("c?")


def test_prompts_that_do_not_tell_tasks_apart_are_refused():
    twice = [{"prompt": "a?", "id": "a", "answer": 1}, {"prompt": "a?", "id": "a", "answer": 1}]
    assert len(TaskLookup(twice, instance_of)) == 1
    copy = TaskLookup([twice[0], {"prompt": "a?", "id": "b", "answer": 1}], instance_of)
    assert copy("a?").instance_id == "a", "a copy under another id is the same task"
    with pytest.raises(ConfigError, match="instances 'a' and 'b' have the same prompt"):
        TaskLookup([twice[0], {"prompt": "a?", "id": "b", "answer": 2}], instance_of)
    with pytest.raises(ConfigError, match="row 0 of the dataset has no `prompt`"):
        TaskLookup([{"id": "a", "answer": 1}], instance_of)
