"""verl's own agent loop workers, V1 and V0, whose rollouts a real node does: rows, failures, steps, and a kill."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import trio

from support.verl_rig import PLAN, STEP, check_row, open_rig, verl_python

pytestmark = pytest.mark.timeout(280)


async def test_rows_are_what_the_node_recorded_through_a_kill_and_a_policy_update(tmp_path):
    verl_python()
    with trio.fail_after(270):
        async with open_rig(tmp_path) as rig, trio.open_nursery() as nursery:
            found = {}

            async def verl(*, task_status):  # noqa: ASYNC128 - run_verl does
                found.update(await rig.run_verl("workers", task_status=task_status))

            await nursery.start(verl)
            await rig.engine.wait_until(lambda stats: stats.running >= 1)
            rig.engine.hold()  # an observer is not told twice: none is to end before the kill
            await rig.restart()
            rig.engine.requests.clear()
            await rig.engine.wait_until(lambda _: any(is_second_turn(rig, asked) for asked in rig.engine.requests))
            await trio.to_thread.run_sync(partial(rig.engines.begin_update, STEP + 1))
            await trio.to_thread.run_sync(rig.engines.finish_update)
    check_v1(found["v1"], rig)
    check_v0(found["v0"], rig)
    assert found["refused"]["truncated"].startswith("ConfigError: rollout.top_p=0.9")
    assert "raw log-probabilities of tokens sampled at temperature 0.5" in found["refused"]["hot"]
    assert found["refused"]["penalty"].startswith("ConfigError: repetition_penalty is 1.5")
    assert "the node's tokenizer has other tokens than verl's" in found["refused"]["tokenizer"]
    assert set(found["task_runner"]) == {"sync", "colocate_async", "separate_async"}
    assert all(name.startswith("Node") for name in found["task_runner"].values())
    check_hooks(found["hooks"])
    assert rig.doubled == []


def check_hooks(done):
    """Weights move, and servers sleep, only while the node holds completions back; then the step is their version."""
    asleep = [["sleep_replicas", "held back"], ["train", "held back"]]
    for mode, steps in done.items():
        expected = [["update_weights", 0, "open"]]  # nothing is registered yet
        for step in (1, 2):
            resumes = [["resume_generation_replicas", "held back"]] if mode == "colocate_async" else []
            expected += [["abort_replicas", "held back"]] if mode == "colocate_async" else []
            expected += [["train", "open"]] if mode == "separate_async" else asleep
            expected += [["update_weights", step, "held back"], *resumes, ["version", [str(step)], "open"]]
        assert steps == expected, mode


def is_second_turn(rig, asked):
    return "Go on" in rig.tiny.decode(asked.prompt)


def check_v1(found, rig):
    statuses = {f"prompt{n}": "failure" if task.get("fails") else "finished" for n, task in enumerate(PLAN["tasks"])}
    assert found["statuses"] == statuses
    segments = [1, 1, 2, 0, 1]
    keys = {f"prompt{n}_{member}_{i}" for n, count in enumerate(segments) for member in range(2) for i in range(count)}
    assert set(found["rows"]) == keys
    steps = [check_row(row, rig.recorded[row["extra"]["job_id"]], PLAN) for row in found["rows"].values()]
    assert {STEP, STEP + 1} in steps, "a row that began before the policy update, and ended after it"
    last = found["rows"]["prompt2_0_1"]
    assert (last["extra"]["segment"], last["extra"]["segments"], last["num_turns"]) == (1, 2, 4)
    long = found["rows"]["prompt4_0_0"]
    assert len(long["prompts"]) == PLAN["prompt_length"]
    assert len(long["responses"]) == PLAN["response_length"]
    assert long["extra"]["reward_extra_info"]["cut_tokens"] > 0


def check_v0(found, rig):
    tensors = {name: np.array(values) for name, values in found["tensors"].items()}
    width = PLAN["prompt_length"], PLAN["response_length"]
    assert (tensors["prompts"].shape[1], tensors["responses"].shape[1]) == width
    assert found["said"]["has_reward"] == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert tensors["rm_scores"].sum(1).tolist() == found["said"]["acc"] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert tensors["response_mask"][3].sum() == 0, "nothing is trained of a rollout without a reward"
    assert found["said"]["min_global_steps"] == [STEP + 1] * 3 + [None, STEP + 1]
    for number in (0, 1, 2, 4):
        outcome = rig.recorded[found["said"]["job_id"][number]]
        segment = outcome.trajectory.segments[-1]
        start = min(int(np.flatnonzero(segment.loss_mask)[0]), width[0])
        ids = segment.token_ids[start : start + width[1]]
        real = tensors["attention_mask"][number]
        assert tensors["input_ids"][number][real == 1].tolist() == segment.token_ids[: start + len(ids)].tolist()
        mask = tensors["response_mask"][number][: len(ids)]
        assert mask.tolist() == segment.loss_mask[start : start + len(ids)].tolist()
        logprobs = np.float32(tensors["rollout_log_probs"][number][: len(ids)])
        assert logprobs.tolist() == segment.logprobs[start : start + len(ids)].tolist()
