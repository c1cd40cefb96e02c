"""The example solutions of `agentbench-os` and of Harbor folders, through a node."""

from __future__ import annotations

import json
import re

import pytest

from prorl_trio.tasks.sets import load_task_set
from prorl_trio.tasks.sets.agentbench import AGENTBENCH, agentbench_rows, example_of
from support.code_policy import call, fetch_wheel
from support.gold_runs import outcomes_of
from support.shares import ALL, part_of

pytestmark = pytest.mark.slow
WRONG, WRONG_OF_A_PART = 14, 4
"""Examples, of 109 and of a third, that may fail: they need accounts, sudo, a /usr to write to, or other processes."""


class SolvesByExample:
    """Runs the example of the task whose description is in the prompt, and answers with what it prints."""

    def __init__(self, examples):
        self._examples = examples

    def __call__(self, prompt):
        example = next((code for text, code in self._examples.items() if text in prompt), None)
        if example is None:
            return call("finish", answer="")
        if "<tool_response>" not in prompt:
            return call(
                "bash",
                command=f"cat > /tmp/.e.sh <<'END-OF-EXAMPLE'\n{example}\nEND-OF-EXAMPLE\nbash /tmp/.e.sh 2>/dev/null",
            )
        said = re.findall(r"<tool_response>\n?(.*?)\n?</tool_response>", prompt, re.DOTALL)[-1]
        return call("finish", answer=re.sub(r"\n?\[.*\]\s*$", "", said).strip())


async def test_examples_of_agentbench_earn_their_reward():
    fetch_wheel(AGENTBENCH)
    examples = {row["description"]: example_of(row) for row in agentbench_rows()}
    instances = load_task_set("agentbench-os")
    assert len(instances) == 109
    instances = part_of(instances, 3)
    outcomes = await outcomes_of(SolvesByExample(examples), instances, timeout_s=1500)
    wrong = {name: outcome.error or outcome.details for name, outcome in outcomes.items() if outcome.reward != 1.0}
    assert len(wrong) <= (WRONG if ALL else WRONG_OF_A_PART), json.dumps(wrong, default=str, indent=1)


async def test_no_answer_earns_nothing():
    fetch_wheel(AGENTBENCH)
    instances = load_task_set("agentbench-os")
    instances = [each for each in instances if "answer_path" in each.payload["steps"][0]["verifier"]][:4]
    outcomes = await outcomes_of(SolvesByExample({}), instances, timeout_s=300)
    assert [outcome.reward for outcome in outcomes.values()] == [0.0] * 4
