"""Rows for SkyRL: segments of a rollout together and in order, its last one marked, failures out of the baseline."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_trio.integrations.skyrl.jobs import row_of, sampling_and_limit, spec_of, task_of_prompt
from prorl_trio.integrations.skyrl.output import output_of
from prorl_trio.integrations.verl.jobs import JobTemplate
from prorl_trio.integrations.verl.rows import RowLimits
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import Outcome, PolicySpan, Segment, Timing, Trajectory

VLLM = {  # as skyrl 0.4 makes them for its backend `vllm`
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 64,
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
}


MEMBERS = st.sampled_from([(reward, count) for reward in (None, 0.0, 1.0) for count in (1, 2, 3)])
"""Reward and segments of a rollout."""


def segment(number, version="3", parent=None, reason=None):
    """Three tokens of a prompt, two sampled, one of a tool, one sampled; `number` tells them from other segments'."""
    mask = [0, 0, 0, 1, 1, 0, 1]
    spans = [PolicySpan(start=start, end=end, policy_version=version, engine="e") for start, end in ((3, 5), (6, 7))]
    logprobs = [-0.5 * bit for bit in mask]
    return Segment.from_arrays(
        range(100 * number, 100 * number + 7), logprobs, mask, spans, parent=parent, reason=reason
    )


def outcome(reward, *segments, stop_reason="finished"):
    return Outcome(
        job_id="j",
        instance_id="i",
        group_id="g",
        status="completed" if reward is not None else "failed",
        reward=reward,
        cause=None if reward is not None else "sandbox",
        error="",
        trajectory=Trajectory(segments=list(segments), turns=[], stop_reason=stop_reason) if segments else None,
        details={},
        timing=Timing(init_s=1.0, run_s=2.0, eval_s=4.0, queued_run_s=8.0),
    )


def ids(*names):
    return [SimpleNamespace(instance_id=name[0], repetition_id=int(name[1:])) for name in names]


def advantages(output):
    """What SkyRL's step-wise GRPO gives each row, without the division by the deviation."""
    last = np.array(output["is_last_step"])
    groups = np.array([each.instance_id for each in output["trajectory_ids"]])
    rewards = np.array(output["rewards"])
    means = {group: rewards[last & (groups == group)].mean() for group in set(groups)}
    own = np.array([rewards[index] - means[groups[index]] for index in np.flatnonzero(last)])
    return own[np.concatenate([[0], np.cumsum(last[:-1])])]


def test_the_segments_of_a_rollout_are_rows_together_and_the_last_is_marked():
    two = outcome(1.0, segment(1, "3"), segment(2, "4", parent=0, reason="compaction"))
    output = output_of(ids("a0", "a1"), [two, outcome(0.0, segment(3))], pad_token_id=0, trains=True)
    assert output["prompt_token_ids"] == [[100, 101, 102], [200, 201, 202], [300, 301, 302]]
    assert output["response_ids"] == [[103, 104, 105, 106], [203, 204, 205, 206], [303, 304, 305, 306]]
    assert output["loss_masks"] == [[1, 1, 0, 1]] * 3
    assert output["rollout_logprobs"] == [[-0.5, -0.5, 0.0, -0.5]] * 3
    assert output["is_last_step"] == [False, True, True]
    assert [each.repetition_id for each in output["trajectory_ids"]] == [0, 0, 1]
    assert output["rewards"] == [1.0, 1.0, 0.0]
    assert output["trajectory_generation_times"] == [7.0] * 3
    assert output["rollout_metrics"] == {
        "generate/failed_rollouts": 0,
        "generate/groups_without_baseline": 0,
        "generate/segments": 3,
        "policy/min_version": 3,
        "policy/max_version": 4,
    }
    assert advantages(output).tolist() == [0.5, 0.5, -0.5]


def test_segments_of_sub_agents_come_before_the_agents_own():
    """SkyRL takes the last row for the end of the rollout."""
    made = outcome(1.0, segment(1), segment(2, parent=0, reason="sub_agent"))
    output = output_of(ids("a0"), [made], pad_token_id=0, trains=True)
    assert [tokens[0] for tokens in output["prompt_token_ids"]] == [200, 100]


def test_a_rollout_without_a_reward_is_left_out_of_its_groups_baseline():
    outcomes = [outcome(1.0, segment(1)), outcome(None, segment(2)), outcome(0.0, segment(3)), outcome(0.0, segment(4))]
    output = output_of(ids("a0", "a1", "a2", "a3"), outcomes, pad_token_id=0, trains=True)
    assert [each.repetition_id for each in output["trajectory_ids"]] == [0, 2, 3]
    assert np.allclose(advantages(output), [2 / 3, -1 / 3, -1 / 3])
    assert output["rollout_metrics"]["generate/failed_rollouts"] == 1
    assert all(map(any, output["loss_masks"]))


def test_a_group_without_any_reward_keeps_its_place_and_trains_nothing():
    outcomes = [outcome(None, segment(1)), outcome(None), outcome(1.0, segment(2)), outcome(0.0, segment(3))]
    output = output_of(ids("a0", "a1", "b0", "b1"), outcomes, pad_token_id=9, trains=True)
    assert [each.instance_id for each in output["trajectory_ids"]] == ["a", "b", "b"]
    assert (output["prompt_token_ids"][0], output["response_ids"][0]) == (list(range(100, 107)), [9])
    assert [sum(mask) for mask in output["loss_masks"]] == [0, 3, 3]
    assert output["is_last_step"] == [True, True, True]


def test_a_reward_that_is_left_alone_has_no_baseline_and_trains_nothing():
    """SkyRL's GRPO would take it for an advantage."""
    outcomes = [outcome(1.0, segment(1), segment(2, parent=0, reason="compaction")), outcome(None), outcome(None)]
    output = output_of(ids("a0", "a1", "a2"), outcomes, pad_token_id=0, trains=True)
    assert output["rewards"] == [1.0, 1.0]
    assert [sum(mask) for mask in output["loss_masks"]] == [0, 0]
    assert output["rollout_metrics"]["generate/groups_without_baseline"] == 1
    alone = output_of(ids("a0"), outcomes[:1], pad_token_id=0, trains=True)
    assert all(map(any, alone["loss_masks"])), "one rollout a prompt was asked for: there is no group"


def test_an_evaluation_has_no_rows_of_what_failed_and_masks_nothing():
    outcomes = [outcome(1.0, segment(1)), outcome(None), outcome(None)]
    output = output_of(ids("a0", "a1", "b0"), outcomes, pad_token_id=0, trains=False)
    assert [each.instance_id for each in output["trajectory_ids"]] == ["a"]
    assert output["loss_masks"] == [[1, 1, 0, 1]]


def test_a_rollout_with_a_reward_and_no_token_counts_in_the_baseline():
    output = output_of(ids("a0", "a1"), [outcome(0.0), outcome(1.0, segment(1))], pad_token_id=9, trains=True)
    assert (output["response_ids"][0], output["loss_masks"][0]) == ([9], [0])
    assert advantages(output).tolist() == [-0.5, 0.5]


@pytest.mark.parametrize(("ended", "reason"), [("finished", "stop"), ("max_turns", "length"), ("parse_error", "stop")])
def test_the_end_of_a_dialogue_is_a_stop_reason(ended, reason):
    output = output_of(ids("a0"), [outcome(1.0, segment(1), stop_reason=ended)], pad_token_id=0, trains=True)
    assert output["stop_reasons"] == [reason]


@given(st.lists(st.lists(MEMBERS, min_size=1, max_size=4), min_size=1, max_size=4))
def test_every_group_is_there_in_order_and_segments_change_no_advantage(groups):
    names, whole, first = [], [], []
    for number, members in enumerate(groups):
        for member, (reward, count) in enumerate(members):
            names.append(f"{number}{member}")
            parts = [
                segment(1 + at, parent=0 if at else None, reason="compaction" if at else None) for at in range(count)
            ]
            whole.append(outcome(reward, *parts))
            first.append(outcome(reward, parts[0]))
    output = output_of(ids(*names), whole, pad_token_id=0, trains=True)
    single = output_of(ids(*names), first, pad_token_id=0, trains=True)
    place = [(each.instance_id, each.repetition_id) for each in output["trajectory_ids"]]
    assert place == sorted(place)
    assert {group for group, _ in place} == {str(number) for number in range(len(groups))}
    assert len({len(column) for name, column in output.items() if name != "rollout_metrics"}) == 1
    last = np.array(output["is_last_step"])
    assert np.allclose(advantages(output)[last], advantages(single))


def test_sampling_is_translated_and_what_a_node_cannot_do_is_refused():
    sampling, limit = sampling_and_limit(VLLM)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, limit) == (0.7, 1.0, 0, 64)
    for name, value in (
        ("min_p", 0.1),
        ("stop", ["</s>"]),
        ("repetition_penalty", 1.1),
        ("best_of", 2),
        ("max_tokens", 0),
    ):
        with pytest.raises(ConfigError):
            sampling_and_limit(VLLM | {name: value})
    assert sampling_and_limit(VLLM | {"stop": []})[1] == 64


def test_an_evaluation_overtakes_training_with_its_own_sampling():
    template = JobTemplate({}, RowLimits(100, 28), task_of_prompt)
    row = row_of([{"role": "user", "content": "6 * 7?"}], "gsm8k", {"reward_spec": {"ground_truth": "42"}})
    [name] = ids("a3")
    trained = spec_of(template, row, name, VLLM, trains=True)
    evaluated = spec_of(template, row, name, VLLM | {"temperature": 0.0, "max_tokens": 9}, trains=False)
    assert (trained.priority, trained.group_id, trained.max_trajectory_tokens) == ("train", "a", 128)
    assert (trained.sampling.temperature, trained.sampling.max_output_tokens) == (0.7, 64)
    assert (evaluated.priority, evaluated.sampling.temperature, evaluated.sampling.max_output_tokens) == (
        "eval",
        0.0,
        9,
    )
    assert trained.job_id != spec_of(template, row, name, VLLM, trains=True).job_id
    payload = {"question": "6 * 7?", "answer": "42"}
    assert (trained.instance.handler, trained.instance.payload) == ("math", payload)


def test_a_row_may_hold_its_task_and_a_row_without_one_is_named():
    task = {"instance_id": "t", "handler": "shell", "payload": {"x": 1}}
    row = row_of("?", "any", {"task": task, "extra_info": None})
    assert msgspec.to_builtins(task_of_prompt({**row, "uid": "7"}))["payload"] == {"x": 1}
    with pytest.raises(ConfigError, match=r"prompt '7' has no column `task`"):
        task_of_prompt({**row_of([], "any", None), "uid": "7"})
