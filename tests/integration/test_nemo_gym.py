"""Real servers of NeMo Gym collect rollouts through a node, and their own code checks the results."""

from __future__ import annotations

import json
import re

import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.config import NemoGymConfig
from support.nemo_gym_rig import AGENT, SERVERS, gym_python, open_gym
from support.whole_node import TOKEN, open_service

pytestmark = [pytest.mark.timeout(300), pytest.mark.alone]

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
ANSWERS = {"pens": "72", "remainder": "9", "divisors": "24", "train": "75", "primes": "1"}
"""By a word of the question; the last one is wrong."""
SLOW = "Take your time."


def policy(prompt):
    """Solve what the rows ask for, so that each server has something to verify."""
    _, _, asked = prompt.partition("<|im_start|>user")
    results = asked.count("<tool_response>")
    if "synonym" in prompt:
        return CALL % ("extract_synonym_values", json.dumps({"synonym_values": [711, 407]})) if not results else "Done."
    if added := re.findall(r"(?:add) (\d+)", asked):
        adds = "\n".join(CALL % ("increment_counter", json.dumps({"count": int(each)})) for each in added)
        calls = ["<think>I add.</think>\n" + adds, CALL % ("get_counter_value", "{}")]
        return calls[results // 2] if results < 3 else "That is the count."
    if "weather" in prompt:
        return "It is cold." if results else CALL % ("get_weather", '{"city": "San Francisco"}')
    word = next(word for word in ANSWERS if word in asked)
    return f"<think>Easily.</think>\n\\boxed{{{ANSWERS[word]}}}"


def task_rows(python):
    """The first row of each of the wheel's servers, as a task of a node."""
    for name, server in SERVERS.items():
        path = next(python.parents[1].glob(f"lib/*/site-packages/resources_servers/{server}/data/example.jsonl"))
        row = json.loads(path.read_text().splitlines()[0])
        yield {**row, "prorl": {"instance_id": name, "handler": "nemo_gym", "payload": {"server": name, "row": row}}}


async def collect(rig, rows, name):
    """What `gym eval run` writes of these rows, by its files: rollouts, failures, metrics."""
    (rig.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = rig.gym(
        "eval", "run", "--no-serve", "+agent_name=prorl_trio_agent", f"+input_jsonl_fpath={name}.jsonl",
        f"+output_jsonl_fpath=out/{name}.jsonl",
    )  # fmt: skip
    await rig.run(*argv)
    found = [rig.folder / "out" / f"{name}{suffix}" for suffix in (".jsonl", "_failures.jsonl")]
    rollouts, failures = ([json.loads(line) for line in path.read_text().splitlines()] for path in found)
    (metrics,) = json.loads((rig.folder / "out" / f"{name}_aggregate_metrics.json").read_text())
    return rollouts, failures, metrics


async def test_gym_collects_rollouts_through_a_node():
    python = gym_python()
    async with open_gym(python, PRORL_TOKEN=TOKEN) as rig, trio.open_nursery() as nursery:
        servers = NemoGymConfig(servers={name: rig.url(name) for name in SERVERS} | {"gone": "http://127.0.0.1:1"})
        async with open_service(rig.folder, policy=policy, max_model_len=60_000, nemo_gym=servers) as (url, _, _):
            await nursery.start(rig.serve)
            examples = [json.loads(line) for line in (rig.folder / AGENT / "data/example.jsonl").open()]
            tasks = list(task_rows(python))
            lost = {**tasks[0], "prorl": {"handler": "nemo_gym", "payload": {"server": "gone", "row": tasks[0]}}}
            bare = {"responses_create_params": {"input": "What now?"}}
            unknown = {**bare, "prorl": {"handler": "no such", "payload": {}}}
            rollouts, failures, metrics = await collect(rig, [*examples, *tasks, lost, bare, unknown], "rows")
            checked = json.loads(
                (await rig.run(str(python), "-m", "support.nemo_gym_checks", "out/rows.jsonl")).splitlines()[-1]
            )
        nursery.cancel_scope.cancel()
    assert [rollout["reward"] for rollout in sorted(rollouts, key=lambda each: each["_ng_task_index"])][:5] == [
        1,
        1,
        1,
        1,
        0,
    ]
    import sys; sys.stderr.write(json.dumps([rollouts, failures, metrics, checked], indent=1))
