"""The loop of docs/agents.md, as it is printed there, trains through the program that is printed above it."""

from __future__ import annotations

import os
import re
import sys
from itertools import count
from pathlib import Path

import pytest
import trio

from prorl_trio.tasks.handlers.math import MathHandler
from support.quick_node import load_example

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
AGENT, LOOP = re.findall(r"```python\n(.*?)```", PAGE.partition("## Train through it")[2], re.DOTALL)[:2]
LINES = 24

pytestmark = pytest.mark.timeout(120)


def drafts_and_checks():
    """A policy that drafts an answer, and when it is asked to check, is right every second time."""
    checks = count()

    def policy(prompt):
        first, second = map(int, re.findall(r"(\d+) \* (\d+)\?", prompt)[-1])
        return rf"\boxed{{{first * second + next(checks) % 2}}}" if "Check each step" in prompt else "Hm."

    return policy


async def test_a_loop_trains_through_a_program_of_ones_own(tmp_path):
    code = [line for line in LOOP.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(code) <= LINES
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "loop.py").write_text(LOOP)
    node = load_example().open_local_node(drafts_and_checks(), [MathHandler()], provider="process")
    with trio.fail_after(100):
        async with node as node:
            env = {"PRORL_URL": node.url, "PRORL_TOKEN": node.token, "AGENT": str(tmp_path / "agent.py")}
            done = await trio.run_process(
                [sys.executable, str(tmp_path / "loop.py")],
                env={**os.environ, **env},
                capture_stdout=True,
                capture_stderr=True,
                check=False,
            )
    assert done.returncode == 0, done.stderr.decode()
    first, second = done.stdout.decode().splitlines()
    assert re.fullmatch(r"step 1: 8 rows of 8 rollouts, reward 0\.\d+", first)
    assert second.startswith("step 2: 8 rows of 8 rollouts, reward 0.")
