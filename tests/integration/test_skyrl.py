"""SkyRL itself: its validator, its advantages, and its asynchronous trainer simulator over a whole node."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio

from prorl_trio.config import NodeConfig
from prorl_trio.testing.fake_engine import open_fake_engine
from support.quick_node import load_example
from support.skyrl_rig import skyrl_python
from support.talk_node import Talk

PAGE = (Path(__file__).parents[2] / "docs" / "skyrl.md").read_text()
"""The guide: what is run here is what it shows."""
[ENTRY_POINT] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SETTINGS = re.findall(r"^    ((?:trainer|generator)\.\S+=\S+)", PAGE, re.MULTILINE)

pytestmark = pytest.mark.timeout(200)

RIGHT = {"question": "What now?", "answer": "42"}
TWICE = {"question": "What?", "answer": "42", "compact": True}
PLAN = {
    "entry_point": ENTRY_POINT,
    "settings": SETTINGS,
    "steps": 2,
    # Rewards and segments of each rollout of each group.
    "made": [
        [[1.0, 3], [0.0, 1], [0.0, 2]],
        [[1.0, 1], [None, 2], [0.0, 2]],
        [[None, 1], [None, 1]],
        [[1.0, 2], [None, 1]],
    ],
    "tasks": [TWICE | {"answer": str(41 + number % 2)} for number in range(6)],
    "evaluated": [RIGHT, RIGHT | {"answer": "41"}, RIGHT | {"fails": True}],
}


@asynccontextmanager
async def open_node():
    """A node with the handler `talk`, whose policy is right three times out of four, and the URL of its engine."""
    example, engines, answers = load_example(), [], Counter()

    @asynccontextmanager
    async def open_engine(**how):
        async with open_fake_engine(**how) as engine:
            engines.append(engine)
            yield engine

    def policy(prompt):
        if "In short" not in prompt and "now" not in prompt:
            return "Let me think."
        answers["given"] += 1
        return f"ANSWER {41 if answers['given'] % 4 == 0 and 'now' not in prompt else 42}"

    example.open_fake_engine = open_engine
    async with example.open_local_node(policy, [Talk()], provider="process") as node:
        yield node, engines[0].url


def test_the_guides_node_is_a_node():
    [node] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert msgspec.convert(tomllib.loads(node), NodeConfig).ledger.dir == "/var/lib/prorl"


async def test_its_validator_advantages_and_simulator_take_rollouts_of_many_segments(tmp_path):
    python, env = skyrl_python()
    async with open_node() as (node, engine):
        (tmp_path / "plan.json").write_text(json.dumps(PLAN | {"node": node.url, "engine": engine}))
        with trio.fail_after(180):
            done = await trio.run_process(
                [python, "-m", "support.skyrl_program", "plan.json", "result.json"],
                cwd=tmp_path,
                env={**os.environ, **env, "PRORL_TOKEN": node.token, "OMP_NUM_THREADS": "1"},
                capture_stdout=True,
                capture_stderr=True,
                check=False,
            )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    found = json.loads((tmp_path / "result.json").read_text())
    sys.stdout.write(f"SkyRL ran with Python {found['python']}\n")
    check_validated(found["validated"])
    for batch in found["batches"]:
        check_batch(batch)
    versions = [batch["metrics"]["policy/max_version"] for batch in found["batches"]]
    assert versions[0] == 0, "the version of the engines' first weights"
    assert versions[1] in (0, 1), "at most one step old"
    assert found["engines"] == ["pause", "resume"] * 3
    assert found["eval"]["eval/all/avg_score"] == 0.5, "the rollout that failed is no zero"
    assert found["no rewards"].startswith("NoRewards: none of 1 rollouts of an evaluation has a reward")
    assert found["whole"].startswith("generator.step_wise_trajectories=false")


def check_validated(found):
    assert found["groups"] == ["0"] * 6 + ["1"] * 3 + ["2"] + ["3"] * 2
    assert found["members"] == [0, 0, 0, 1, 2, 2, 0, 2, 2, 0, 0, 0]
    third = 1 / 3
    expected = [2 * third] * 3 + [-third] * 3 + [0.5] + [-0.5] * 2
    assert found["advantages"][:9] == pytest.approx(expected)
    assert found["trained"] == [3] * 9 + [0] * 3, "a group without a baseline trains nothing"
    assert found["logprobs"][0] == [-0.5, -0.25, -0.125]


def check_batch(batch):
    """Each rollout has two segments; both have the advantage of the rollout in its group of four."""
    assert batch["last"] == [False, True] * 8
    groups = Counter(batch["groups"])
    assert list(groups.values()) == [8, 8]
    assert all(count > 0 for count in batch["trained"])
    for group in groups:
        rows = [number for number, each in enumerate(batch["groups"]) if each == group]
        rewards = [batch["rewards"][number] for number in rows if batch["last"][number]]
        mean = sum(rewards) / len(rewards)
        expected = [reward - mean for reward in rewards for _ in range(2)]
        assert [batch["advantages"][number] for number in rows] == pytest.approx(expected, abs=1e-5)
    assert batch["metrics"]["generate/failed_rollouts"] == 0
