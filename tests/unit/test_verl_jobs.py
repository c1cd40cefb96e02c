"""Jobs for verl: the task of a data row, verl's sampling, which log-probabilities compare, and what is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from prorl_trio.integrations.verl.jobs import JobTemplate, Sampling, loaded, plain, sampling_of, task_of_row
from prorl_trio.integrations.verl.rows import RowLimits
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import JobSpec, PolicySpan, TaskInstance

LIMITS = RowLimits(100, 50)
TRAINED = Sampling(temperature=1.0, top_p=1.0, top_k=0)
VERLS = {"temperature": 1.0, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
MATH = {
    "uid": "u1",
    "data_source": "gsm8k",
    "index": np.int64(4),
    "raw_prompt": np.array([{"role": "user", "content": "6 * 7?"}], dtype=object),
    "reward_model": {"style": "rule", "ground_truth": np.int64(42)},
}


def template(**fields):
    return JobTemplate(fields, LIMITS, task_of_row)


def test_a_job_of_a_row_has_its_group_its_task_and_verls_sampling():
    sampling = sampling_of({**VERLS, "temperature": np.float64(0.7), "top_k": 20})
    spec = template(max_turns=3, sampling={"max_output_tokens": 9}, tags={"a": "b"}).spec_of(
        {**MATH, "session_id": 2}, sampling
    )
    assert spec.instance == TaskInstance(
        instance_id="gsm8k-4", handler="math", payload={"question": "6 * 7?", "answer": "42"}
    )
    assert (spec.group_id, spec.max_turns, spec.tags) == ("u1", 3, {"a": "b"})
    assert spec.job_id.startswith("u1-2-")
    assert (spec.sampling.temperature, spec.sampling.top_k, spec.sampling.max_output_tokens) == (0.7, 20, 9)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=JobSpec) == spec


def test_what_is_not_said_lets_a_turn_fill_the_row_and_tries_again():
    spec = template().spec_of(MATH, TRAINED)
    assert (spec.sampling.max_output_tokens, spec.max_trajectory_tokens, spec.retry.max_attempts) == (50, 150, 3)
    assert template(retry={"max_attempts": 1}).spec_of(MATH, TRAINED).retry.max_attempts == 1


def test_no_two_rollouts_have_one_id_even_of_a_prompt_that_is_issued_again():
    same = [template().spec_of({**MATH, "session_id": 0}, TRAINED) for _ in range(50)]
    assert len({spec.job_id for spec in same}) == 50
    assert {spec.group_id for spec in same} == {"u1"}
    nameless = template().spec_of({**MATH, "uid": None}, TRAINED)
    assert nameless.group_id


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"job_id": "x"}, r"job\.job_id"),
        ({"sampling": {"temperature": 0.5}}, r"actor_rollout_ref\.rollout\.temperature"),
        ({"max_turn": 3}, "unknown field `max_turn`"),
        ({"max_turns": 0}, "max_turns must be >= 1"),
        ({"budgets": {"agent_s": "long"}}, r"\$\.budgets\.agent_s"),
    ],
)
def test_a_wrong_job_is_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        template(**fields)


def test_the_task_of_a_row_is_the_one_it_holds():
    task = {"instance_id": "a", "handler": "shell", "payload": {"n": np.int64(3), "all": np.array([1, 2])}}
    row = {**MATH, "extra_info": {"task": task, "index": 3}}
    assert task_of_row(row) == TaskInstance(instance_id="a", handler="shell", payload={"n": 3, "all": [1, 2]})
    asked = {**MATH, "extra_info": {"question": "How many?", "index": 9}}
    assert task_of_row(asked).payload["question"] == "How many?"
    assert task_of_row(asked).instance_id == "gsm8k-9"
    with pytest.raises(ConfigError, match=r"extra_info\.task of a row"):
        task_of_row({"extra_info": {"task": {"handler": "math"}}})
    with pytest.raises(ConfigError, match="task: package"):
        task_of_row({"raw_prompt": MATH["raw_prompt"]})


def test_numpy_goes_all_the_way_down():
    assert plain({"a": np.array([{"b": np.float32(0.5)}], dtype=object), "c": (np.bool_(True),)}) == {
        "a": [{"b": 0.5}],
        "c": [True],
    }


def test_what_a_node_cannot_sample_is_refused():
    assert sampling_of(VERLS) == TRAINED
    with pytest.raises(ConfigError, match=r"repetition_penalty is 1\.1"):
        sampling_of({**VERLS, "repetition_penalty": 1.1})
    with pytest.raises(ConfigError, match="do not know: min_p"):
        sampling_of({**VERLS, "min_p": 0.1})


@pytest.mark.parametrize(
    ("trained", "span", "tells"),
    [
        ({}, {}, True),
        ({}, {"logprob_kind": "processed"}, True),
        ({}, {"logprob_kind": "unknown"}, True),
        ({}, {"temperature": 0.5}, True),  # the raw ones are of temperature 1, whatever it was sampled at
        ({}, {"temperature": 0.5, "logprob_kind": "processed"}, False),
        ({}, {"temperature": 0.5, "logprob_kind": "unknown"}, False),
        ({"temperature": 0.5}, {"temperature": 0.5}, False),
        ({"temperature": 0.5}, {"temperature": 0.5, "logprob_kind": "processed"}, True),
        ({"temperature": 0.5}, {"temperature": 0.5, "logprob_kind": "unknown"}, False),
        ({}, {"top_p": 0.9}, False),
        ({}, {"top_k": 5}, False),
        ({"top_p": 0.9}, {"top_p": 0.9, "logprob_kind": "processed"}, False),
    ],
)
def test_log_probabilities_that_compare_with_the_trainers(trained, span, tells):
    sampled = PolicySpan(start=0, end=1, policy_version="1", engine="e", **span)
    assert msgspec.structs.replace(TRAINED, **trained).tells(sampled) == tells


def test_what_is_named_is_found_or_named_as_missing():
    assert loaded("prorl_trio.integrations.verl.jobs:task_of_row") is task_of_row
    for wrong in ("no_such_module:x", "prorl_trio.integrations.verl.jobs:no_such_name", "words"):
        with pytest.raises(ConfigError, match=r"package\.module:name"):
            loaded(wrong)
