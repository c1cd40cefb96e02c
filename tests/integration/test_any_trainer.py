"""The programs of docs/any-trainer.md, as they are printed there, against a whole node with a made-up policy."""

from __future__ import annotations

import os
import re
import sys
from itertools import count
from pathlib import Path

import pytest
import trio

from prorl_trio.tasks.sets import load_task_set
from support.atropos import AtroposTrainer, atropos_python, open_atropos
from support.quick_node import open_quick_node
from support.tiny_weights import make_model

PAGE = (Path(__file__).parents[2] / "docs" / "any-trainer.md").read_text()
LOOP, ATROPOS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LINES = 30

pytestmark = pytest.mark.timeout(120)


async def run(program, folder, **env):
    """Return what a program prints."""
    (folder / "program.py").write_text(program)
    done = await trio.run_process(
        [sys.executable, str(folder / "program.py")],
        env={**os.environ, **env},
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


async def test_a_loop_of_ones_own(tmp_path):
    code = [line for line in LOOP.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(code) <= LINES
    with trio.fail_after(100):
        async with open_quick_node() as node:
            folders = {name: str(make_model(tmp_path / name)) for name in ("MODEL", "WEIGHTS")}
            env = {"PRORL_URL": node.url, "PRORL_TOKEN": node.token, **folders}
            first, second = await run(LOOP, tmp_path, **env)
    assert re.fullmatch(r"step 1: 12 rollouts, reward 0\.\d+, loss -?[\d.]+", first)
    assert second.startswith("step 2: 12 rollouts, reward 0.")


async def test_an_environment_of_atropos(tmp_path):
    python = atropos_python()
    batches = []
    with trio.fail_after(100):
        async with open_quick_node(right_now_and_then()) as node, open_atropos(python, tmp_path / "atropos.log") as url:
            trainer = AtroposTrainer(url)
            await trainer.register(batch_size=32, num_steps=2)

            async def take_two():
                batches.extend([await trainer.wait_batch() for _ in range(2)])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(take_two)
                env = {"PRORL_URL": node.url, "PRORL_TOKEN": node.token, "ATROPOS_URL": url}
                (said,) = await run(ATROPOS, tmp_path, **env)
            trainer.close()
    assert "unsure=0" in said
    assert [len(batch) for batch in batches] == [4, 4]
    assert all(0 < sum(group["scores"]) < 8 for batch in batches for group in batch)


def right_now_and_then():
    """A policy for the task set `sums`: every second answer is right."""
    answers = {task.payload["question"]: task.payload["answer"] for task in load_task_set("sums")}
    turns = count()

    def policy(prompt):
        answer = next(answer for question, answer in answers.items() if question in prompt)
        return f"It is {int(answer) + next(turns) % 2}."

    return policy
