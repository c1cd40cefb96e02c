"""Rows of NeMo Gym as jobs, and outcomes as its answers: contiguous tokens, and no reward where there is none."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_trio.integrations.nemo_gym.answers import FAILURE_CLASS, answer_of
from prorl_trio.integrations.nemo_gym.jobs import JobTemplate, RowRefused
from prorl_trio.tasks.handlers.nemo_gym.items import items_of, replies_of
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import (
    ChatMessage,
    Outcome,
    PolicySpan,
    Segment,
    Timing,
    ToolCall,
    Trajectory,
    Turn,
)

PARAMS = {"input": "What?"}
ROW = {"responses_create_params": PARAMS, "prorl": {"handler": "math", "payload": {"question": "What?"}}, "mark": [1]}


def turn(start, end, text="Hm.<|im_end|>", segment=0, calls=(), observations=(), finish="stop", messages=()):
    return Turn(
        segment=segment, completion_start=start, completion_end=end, text=text, finish_reason=finish,
        tool_calls=list(calls), observations=list(observations), inference_s=0.0, tools_s=0.0, messages=list(messages),
    )  # fmt: skip


def segment(length, sampled, parent=None, reason=None, constrained=()):
    spans = [
        PolicySpan(start=a, end=b, policy_version="3", engine="e", constraint="json" if (a, b) in constrained else None)
        for a, b in sampled
    ]
    mask = [int(any(a <= place < b for a, b in sampled)) for place in range(length)]
    logprobs = [-(place % 7) / 8 * bit for place, bit in enumerate(mask)]
    return Segment.from_arrays(range(100, 100 + length), logprobs, mask, spans, parent=parent, reason=reason)


def outcome(segments=(), turns=(), reward=1.0, cause=None, status="completed"):
    trajectory = Trajectory(segments=list(segments), turns=list(turns), stop_reason="finished") if segments else None
    return Outcome(
        job_id="j", instance_id="i", group_id="g", status=status, reward=reward, cause=cause, error="why",
        trajectory=trajectory, details={}, timing=Timing(), error_code=cause and "node",
    )  # fmt: skip


def trained(answer):
    """The message log of NeMo RL, with its assertion: prompts and completions that follow one another."""
    seen, log = [], []
    for item in answer["response"]["output"]:
        if "generation_token_ids" not in item:
            continue
        prompt, sampled = item["prompt_token_ids"], item["generation_token_ids"]
        assert seen == prompt[: len(seen)], "Non-contiguous messages found!"
        assert len(item["generation_log_probs"]) == len(sampled)
        log += [prompt[len(seen) :], sampled]
        seen = [*prompt, *sampled]
    return log


def test_a_turn_has_its_tokens_on_its_last_item():
    call = ToolCall(name="add", arguments={"a": 1}, raw="<call/>")
    first = turn(4, 7, "<think>So.</think>\nI add. <call/><|im_end|>", calls=[call], observations=["2"])
    last = turn(9, 11, "Two.<|im_end|>", messages=[ChatMessage(role="user", content="And?")])
    answer = answer_of(outcome([segment(11, [(4, 7), (9, 11)])], [first, last]), ROW)
    output = answer["response"]["output"]
    assert [item["type"] for item in output] == [
        "reasoning", "message", "function_call", "function_call_output", "message", "message",
    ]  # fmt: skip
    assert [bool(item.get("generation_token_ids")) for item in output] == [False, False, True, False, False, True]
    assert (output[4]["role"], output[4]["content"], output[5]["content"][0]["text"]) == ("user", "And?", "Two.")
    assert trained(answer) == [[100, 101, 102, 103], [104, 105, 106], [107, 108], [109, 110]]
    assert output[5]["generation_log_probs"] == [-2 / 8, -3 / 8]
    assert answer["reward"] == 1.0
    assert {key: answer[key] for key in ROW} == ROW
    assert json.loads(msgspec.json.encode(answer))["response"]["usage"]["output_tokens"] == 5


def test_the_last_segment_of_the_task_is_delivered_and_the_others_are_counted():
    segments = [
        segment(6, [(3, 6)]),
        segment(8, [(5, 8)], parent=0, reason="compaction"),
        segment(9, [(2, 9)], parent=1, reason="sub_agent"),
    ]
    turns = [turn(3, 6, segment=0), turn(2, 9, segment=2), turn(5, 8, segment=1)]
    answer = answer_of(outcome(segments, turns), ROW)
    assert trained(answer) == [[100, 101, 102, 103, 104], [105, 106, 107]]
    assert [item["id"] for item in answer["response"]["output"]] == ["msg_2"]
    assert (answer["prorl_segment"], answer["prorl_other_segments"], answer["prorl_other_sampled_tokens"]) == (
        1,
        "1 first, 1 sub_agent",
        10,
    )
    assert answer["response"]["metadata"]["prorl_other_segments"] == "1 first, 1 sub_agent"
    assert all(isinstance(value, str) for value in answer["response"]["metadata"].values())


def test_a_turn_in_an_enforced_form_is_not_trained_on():
    """Its log-probabilities are those of another distribution."""
    segments = [segment(9, [(3, 5), (7, 9)], constrained=[(3, 5)])]
    answer = answer_of(outcome(segments, [turn(3, 5), turn(7, 9)]), ROW)
    assert trained(answer) == [[100, 101, 102, 103, 104, 105, 106], [107, 108]]
    assert answer["prorl_other_sampled_tokens"] == 0


@pytest.mark.parametrize("cause", ["sandbox", "inference", "evaluator", "handler", "cancelled", "node"])
def test_a_failure_of_the_infrastructure_is_no_reward_of_zero(cause):
    failed = outcome([segment(4, [(2, 4)])], [turn(2, 4)], reward=None, cause=cause, status="failed")
    answer = answer_of(failed, ROW)
    assert (answer["reward"], answer[FAILURE_CLASS], answer["error_message"]) == (None, cause, "why")
    assert trained(answer) == [], "it could be trained on"


def test_a_row_of_a_file_of_failures_is_a_row():
    failed = answer_of(outcome(reward=None, cause="node", status="failed"), ROW)
    answer = answer_of(outcome([segment(4, [(2, 4)])], [turn(2, 4)]), failed | {"_ng_failure_terminal": True})
    assert (answer["reward"], [key for key in answer if key.startswith("_ng") or "error" in key]) == (1.0, [])


def test_a_fault_of_the_policy_is_a_reward_of_zero():
    answer = answer_of(
        outcome([segment(4, [(2, 4)])], [turn(2, 4)], reward=0.0, cause="agent_fault", status="failed"), ROW
    )
    assert (answer["reward"], answer["prorl_cause"], FAILURE_CLASS in answer) == (0.0, "agent_fault", False)
    assert trained(answer) == [[100, 101], [102, 103]]


def test_a_rollout_without_tokens_has_no_items():
    answer = answer_of(outcome(reward=0.0, cause="agent_budget", status="timed_out"), ROW)
    assert (answer["response"]["output"], answer["prorl_turns"]) == ([], 0)


@pytest.mark.parametrize(
    ("text", "finish", "reasoning", "said"),
    [
        ("<think>a</think>b<|im_end|>", "stop", "a", "b"),
        ("a</think>\n\nb<|eot_id|>", "stop", "a", "b"),
        ("<think>a", "length", "a", None),
        ("b<｜end▁of▁sentence｜>", "stop", "", "b"),
        ("b<end_of_turn>\n", "stop", "", "b"),
        ("b<|im_end|>", "length", "", "b<|im_end|>"),
        ("<|im_end|>", "stop", "", ""),
        ("", "length", "", ""),
    ],
)  # fmt: skip
def test_what_a_turn_says(text, finish, reasoning, said):
    items = items_of(turn(0, 1, text, finish=finish), 0)
    found = [item["summary"][0]["text"] for item in items if item["type"] == "reasoning"]
    assert "".join(found) == reasoning
    assert [item["content"][0]["text"] for item in items if item["type"] == "message"] == (
        [] if said is None else [said]
    )


def test_a_call_that_could_not_be_read_stays_text():
    bad = ToolCall(name="add", arguments={}, raw="<tool_call>{", error="no JSON")
    failed = turn(0, 1, "<tool_call>{<|im_end|>", calls=[bad], observations=["Error: no JSON"])
    (item,) = items_of(failed, 0)
    assert item["content"][0]["text"] == "<tool_call>{"
    assert replies_of(failed, 0) == [{"type": "message", "role": "user", "content": "Error: no JSON"}]


@given(st.text(max_size=200), st.sampled_from(["stop", "length", "abort", "tool_call"]))
def test_any_text_is_an_item(text, finish):
    items = items_of(turn(0, 1, text, finish=finish), 0)
    assert items
    assert msgspec.json.decode(msgspec.json.encode(items)) == items


def test_a_job_takes_task_sampling_and_agent_of_its_row():
    template = JobTemplate({"max_turns": 3, "sampling": {"temperature": 0.5}, "agent": "codex"})
    params = {**PARAMS, "temperature": 0.7, "top_p": 0.9, "max_output_tokens": 77}
    params["metadata"] = {"extra_body": json.dumps({"seed": 1, "top_k": -1})}
    rows = [{**ROW, "responses_create_params": params, "_ng_task_index": 4, "_ng_rollout_index": n} for n in (0, 1)]
    one, other = map(template.spec_of, rows)
    assert (one.instance.handler, one.instance.payload, one.instance.instance_id) == (
        "math",
        {"question": "What?"},
        "row-4",
    )
    assert (one.sampling.temperature, one.sampling.top_p, one.sampling.top_k) == (0.7, 0.9, 0)
    assert (one.sampling.max_output_tokens, one.max_turns, one.agent.preset) == (77, 3, "codex")
    assert one.group_id == other.group_id
    assert one.job_id != other.job_id
    own = template.spec_of({**ROW, "prorl": {**ROW["prorl"], "agent": {"command": ["mine"]}, "instance_id": "x"}})
    assert (own.agent.command, own.sampling.temperature, own.instance.instance_id) == (["mine"], 0.5, "x")


def test_a_row_without_a_task_is_one_of_the_resources_server():
    row = {"responses_create_params": PARAMS, "expected": 3, "_ng_task_index": 0}
    spec = JobTemplate({}, "counter").spec_of(row)
    assert spec.instance.payload == {"server": "counter", "row": {"responses_create_params": PARAMS, "expected": 3}}
    with pytest.raises(RowRefused, match="no field 'prorl'"):
        JobTemplate({}).spec_of(row)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prorl": {"handler": "math"}},
        {"prorl": {"handler": "math", "payload": {}, "job_id": "mine"}},
        {"prorl": {"handler": "math", "payload": {"n": 2**70}}},
        {"prorl": {"handler": "math", "payload": {"n": "\ud800"}}},
        {"prorl": {"handler": "math", "payload": {}, "agent": {"preset": "a", "external": True}}},
        {"prorl": "math"},
        {"responses_create_params": {"input": "", "temperature": "hot"}},
        {"responses_create_params": {"input": "", "temperature": -1}},
        {"responses_create_params": {"input": "", "max_output_tokens": 0}},
        {"responses_create_params": {"input": "", "metadata": {"extra_body": "{"}}},
        {"responses_create_params": {"input": "", "metadata": {"extra_body": "[]"}}},
        {"responses_create_params": {"input": "", "metadata": {"extra_body": 3}}},
        {"responses_create_params": {"input": "", "metadata": {"chat_template_kwargs": "{}"}}},
        {"responses_create_params": {"input": "", "metadata": {"extra_body": '{"min_p": 0.1}'}}},
    ],
)  # fmt: skip
def test_a_wrong_row_is_refused(wrong):
    with pytest.raises(RowRefused):
        JobTemplate({}).spec_of({**ROW, **wrong})


@pytest.mark.parametrize("fields", [{"job_id": "x"}, {"instance": {}}, {"max_turn": 3}, {"max_turns": 0}])
def test_a_wrong_template_is_refused(fields):
    with pytest.raises(ConfigError, match="job"):
        JobTemplate(fields)
