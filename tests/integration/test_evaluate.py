"""`prorl-trio eval` and `prorl-trio regrade` against a whole node, by the commands of docs/evaluate.md."""

from __future__ import annotations

import json
import re
import shlex
from functools import partial
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner

from prorl_trio.cli import main
from prorl_trio.runs.recording import read_outcomes
from support.quick_node import open_quick_node

PAGE = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
TASKS = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0]

pytestmark = pytest.mark.timeout(180)


class Policy:
    """Right at 6 * 7, and wrong at all else; counts what is sampled."""

    sampled = 0

    def __call__(self, prompt):
        self.sampled += 1
        return r"It is \boxed{42}."


async def run(command, node, *, code=0):
    """Run a command of the page, in this process; return what it prints."""
    env = {"PRORL_URL": node.url, "PRORL_TOKEN": node.token}
    call = partial(CliRunner().invoke, main, shlex.split(command)[1:], env=env)
    result = await trio.to_thread.run_sync(call)
    assert result.exit_code == code, (command, result.output, result.exception)
    return result.stdout


def folders():
    return sorted(Path("runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def rewards(folder):
    return {outcome.job_id: outcome.reward for outcome in read_outcomes(folder / "trajectories.msgpack")}


async def test_the_commands_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text(TASKS)
    Path("mended.jsonl").write_text(TASKS.replace("204", "42"))
    evaluate, resume, regrade, mended = COMMANDS
    policy = Policy()
    with trio.fail_after(150):
        async with open_quick_node(policy) as node:
            await run(evaluate, node)
            (first,) = folders()
            report = json.loads((first / "report.json").read_bytes())
            assert policy.sampled == report["rollouts"] == report["graded"] == 8
            assert (report["pass@1"], report["easy/pass@4"], report["hard/pass@4"]) == (0.5, 1.0, 0.0)
            name = "runs/20260101-120000"
            assert name in resume
            await run(resume.replace(name, str(first)), node)
            same = json.loads(await run(regrade.replace(name, str(first)) + " --json", node))
            assert (same["regraded"], same["changed"], same["not_regraded"]) == (8, [], {})
            assert rewards(folders()[-1]) == rewards(first)
            printed = await run(mended.replace(name, str(first)), node)
            assert (
                "8 of 8 rollouts were graded again; 4 have another reward; mean reward 0.500 before, 1.000 now"
                in printed
            )
            assert set(rewards(folders()[-1]).values()) == {1.0}
            assert json.loads((folders()[-1] / "report.json").read_bytes())["hard/pass@4"] == 1.0
            assert all(outcome.regraded for outcome in read_outcomes(folders()[-1] / "trajectories.msgpack"))
            assert policy.sampled == 8, "nothing was sampled again"


async def test_a_run_of_submit_is_graded_again_and_what_cannot_be_is_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text(TASKS)
    with trio.fail_after(150):
        async with open_quick_node(Policy()) as node:
            await run("prorl-trio submit --tasks tasks.jsonl", node)
            (first,) = folders()
            Path("tasks.jsonl").write_text(TASKS.splitlines()[0])
            printed = await run(f"prorl-trio regrade {first}", node, code=3)
            assert "1 of 2 rollouts were graded again; 0 have another reward" in printed
            assert "there is no task 'q2' in the task set" in printed
    assert rewards(folders()[-1]) == rewards(first)
    regraded = [outcome.regraded for outcome in read_outcomes(folders()[-1] / "trajectories.msgpack")]
    assert sorted(map(bool, regraded)) == [False, True]


async def test_rows_that_cannot_be_graded_refuse_the_file_or_are_left_out_and_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = {"instance_id": "q3", "handler": "math", "payload": {"question": "?", "answer": "notfound"}}
    Path("tasks.jsonl").write_text(TASKS + json.dumps(bad) + "\n")
    policy = Policy()
    with trio.fail_after(150):
        async with open_quick_node(policy) as node:
            await run("prorl-trio eval --tasks tasks.jsonl", node, code=1)
            assert policy.sampled == 0
            printed = await run("prorl-trio eval --tasks tasks.jsonl --skip-bad", node)
            assert "1 rows of tasks.jsonl could not be used, and are in no figure" in printed
            (first,) = folders()
            again = json.loads(await run(f"prorl-trio eval --resume {first} --json", node))
            graded = json.loads(await run(f"prorl-trio regrade {first} --json", node))
    assert (again["tasks"], again["rows_left_out"], again["reward_mean"], graded["regraded"]) == (2, 1, 0.5, 2)
    assert json.loads((folders()[-1] / "report.json").read_bytes())["rows_left_out"] == 1
    assert policy.sampled == 2


async def test_partial_rewards_count_from_the_reward_that_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text(TASKS)
    with trio.fail_after(150):
        async with open_quick_node(Policy()) as node:
            report = json.loads(await run("prorl-trio eval --tasks tasks.jsonl --correct-from 0 --json", node))
            (first,) = folders()
            counted = json.loads(await run(f"prorl-trio eval --resume {first} --correct-from 0.5 --json", node))
    assert (report["reward_mean"], report["pass@1"], report["correct_from"]) == (0.5, 1.0, 0.0)
    assert (counted["reward_mean"], counted["pass@1"], counted["correct_from"]) == (0.5, 0.5, 0.5)
