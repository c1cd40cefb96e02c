"""Groups as Atropos takes them: `prorl_trio.integrations.atropos.environment`."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from prorl_trio.integrations.atropos import scored_data
from prorl_trio.sampling import Group
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import Outcome, PolicySpan, Segment, TaskInstance, Timing, Trajectory


def segment(ids, sampled, **span):
    mask = np.isin(np.arange(len(ids)), sampled).astype("u1")
    logprobs = np.where(mask, -np.arange(1, len(ids) + 1, dtype="f4") / np.float32(3), 0)
    spans = [PolicySpan(start=min(sampled), end=max(sampled) + 1, policy_version="3", engine="vllm", **span)]
    return Segment.from_arrays(ids, logprobs, mask, spans)


def outcome(number, *segments, reward=1.0):
    trajectory = Trajectory(segments=list(segments), turns=[], stop_reason="finished")
    return Outcome(
        job_id=f"j{number}", instance_id="q", group_id="g", status="completed", reward=reward, cause=None, error="",
        trajectory=trajectory, details={}, timing=Timing(),
    )  # fmt: skip


def group(*outcomes):
    instance = TaskInstance(instance_id="q", handler="math", payload={})
    correct = [bool(outcome.reward) for outcome in outcomes]
    return Group(
        number=0, group_id="g", instance=instance, outcomes=list(outcomes), correct=correct, submitted_version="0",
        staleness=0,
    )  # fmt: skip


def test_masks_have_ids_and_log_probabilities_survive_json_bit_for_bit():
    first, second = segment([5, 6, 7, 8], [2, 3]), segment([5, 6, 9], [2])
    (part,) = scored_data(group(outcome(0, first), outcome(1, second, reward=0.25)), env_id=4)
    assert (part.tokens, part.env_id) == ([[5, 6, 7, 8], [5, 6, 9]], 4)
    assert part.masks == [[-100, -100, 7, 8], [-100, -100, 9]]
    assert part.scores == [1.0, 0.25]
    assert [override["job_id"] for override in part.overrides] == ["j0", "j1"]
    assert part.overrides[0]["policy_versions"] == ["3"]
    sent = msgspec.json.decode(msgspec.json.encode(part))["inference_logprobs"]
    for row, recorded in zip(sent, (first, second), strict=True):
        where = recorded.loss_mask == 1
        assert np.array(row, "f4")[where].tobytes() == recorded.logprobs[where].tobytes()
        assert set(np.array(row)[~where]) == {1.0}


def test_each_segment_is_a_row_of_a_part_of_equal_size_with_all_scores():
    one, two = segment([1, 2, 3], [2]), segment([4, 5, 6, 7], [1, 3])
    parts = scored_data(group(outcome(0, one), outcome(1, one, two, reward=0.0)), env_id=0)
    assert [part.scores for part in parts] == [[1.0, 0.0]] * 2
    assert [part.group_overrides for part in parts] == [{"group_id": "g", "part": 0}, {"group_id": "g", "part": 1}]
    assert parts[1].tokens == [[1, 2, 3], [4, 5, 6, 7]]
    assert parts[1].masks == [[-100] * 3, [-100, 5, -100, 7]]
    assert parts[1].inference_logprobs[0] == [1.0] * 3


def test_a_rollout_that_was_spoilt_before_its_first_token_keeps_its_score_and_weighs_nothing():
    silent = msgspec.structs.replace(outcome(1, reward=0.0), trajectory=None)
    (part,) = scored_data(group(silent, outcome(0, segment([1, 2, 3], [2]))), env_id=0)
    assert part.scores == [0.0, 1.0]
    assert part.masks == [[-100] * 3, [-100, -100, 3]]
    assert part.inference_logprobs[0] == [1.0] * 3
    assert [override["job_id"] for override in part.overrides] == ["j1", "j0"]
    with pytest.raises(ValueError, match="no rollout of group g has a token"):
        scored_data(group(silent, silent), env_id=0)


@pytest.mark.parametrize("span", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 20}])
def test_log_probabilities_of_another_distribution_are_refused(span):
    with pytest.raises(ConfigError, match="processed_logprobs"):
        scored_data(group(outcome(0, segment([1, 2], [1])), outcome(1, segment([1, 2], [1], **span))), env_id=0)


def test_the_temperature_of_processed_ones_is_told():
    hot = segment([1, 2], [1], temperature=0.7, logprob_kind="processed")
    (part,) = scored_data(group(outcome(0, hot), outcome(1, hot)), env_id=0)
    assert part.generation_params == {"temperature": 0.7}
    with pytest.raises(ConfigError, match="several temperatures"):
        scored_data(group(outcome(0, hot), outcome(1, segment([1, 2], [1]))), env_id=0)


def test_a_rollout_without_a_reward_is_never_sent():
    with pytest.raises(ValueError, match="j1"):
        scored_data(group(outcome(0, segment([1, 2], [1])), outcome(1, reward=None)), env_id=0)
