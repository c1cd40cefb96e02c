"""`prorl-trio eval`: every rollout sampled once, whatever happens; nothing without a score left out."""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
from functools import partial

import msgspec
import pytest
import trio
from click.testing import CliRunner

from prorl_trio.cli import main
from prorl_trio.client import connect
from prorl_trio.runs.evaluation.folder import open_evaluation
from prorl_trio.runs.evaluation.run import EvaluationPlan, do_missing
from prorl_trio.runs.evaluation.shown import write_report
from prorl_trio.runs.recording import read_outcomes
from prorl_trio.types.errors import ConfigError, MalformedJob
from prorl_trio.types.models import SamplingParams, TaskInstance
from support.fake_node import FakeNode, make_outcome
from support.fake_service import TOKEN, open_service

pytestmark = pytest.mark.timeout(60)

TASKS = [
    TaskInstance(instance_id=f"task {n}", handler="fake", payload={"n": n}, family="even" if n % 2 == 0 else "odd")
    for n in range(4)
]
PLAN = EvaluationPlan(
    evaluation_id="e",
    session_id="s",
    tasks="some",
    rollouts=3,
    ks=(1, 3),
    sampling=SamplingParams(temperature=0.5),
    max_turns=2,
)


def mixed(spec):
    """Even tasks are solved; of the others one fails, one times out, one is wrong."""
    outcome = make_outcome(spec)
    number = int(spec.job_id.split("-")[3])
    if spec.instance.payload["n"] % 2 == 0:
        return outcome
    status = ("failed", "timed_out", "completed")[number]
    if status == "completed":
        return msgspec.structs.replace(outcome, reward=0.0)
    return msgspec.structs.replace(outcome, status=status, reward=None, cause="sandbox", error="no disk")


class Picky(FakeNode):
    """Rejects the task 3."""

    def check(self, spec, sink, ahead):
        if spec.instance.payload["n"] == 3:
            raise MalformedJob("no such task", path="$.instance.payload.n")
        super().check(spec, sink, ahead)


async def sampled(node, path, *, new=True, on_outcome=lambda outcome: None):
    """Evaluate, or go on with what is at `path`; return whether it came to its end, and its report."""
    path.mkdir(exist_ok=True)
    with trio.fail_after(30), open_evaluation(path, (PLAN, TASKS) if new else None) as folder:
        async with open_service(node) as service, connect(service.url, TOKEN, session_id=PLAN.session_id) as client:
            over = await do_missing(client, folder, on_outcome)
        return over, json.loads(write_report(folder)[1])


def job_ids(node):
    return [spec.job_id for spec in node.submitted]


async def test_every_rollout_is_sampled_once_and_what_has_no_score_is_told(tmp_path):
    node = FakeNode(mixed)
    over, report = await sampled(node, tmp_path / "run")
    assert over
    assert len(set(job_ids(node))) == len(job_ids(node)) == 12
    assert {(spec.priority, spec.max_turns, spec.sampling.temperature) for spec in node.submitted} == {("eval", 2, 0.5)}
    assert (report["graded"], report["failed"], report["timed_out"], report["missing"]) == (8, 2, 2, 0)
    assert (report["pass@1"], report["pass@1_if_failed"], report["pass@1_if_passed"]) == (
        0.5,
        0.5,
        pytest.approx((1 + 1 + 2 / 3 + 2 / 3) / 4),
    )
    assert (report["odd/pass@3"], report["odd/pass@3_tasks"], report["even/pass@3"]) == (None, 0, 1.0)
    assert all(not isinstance(value, dict | list) for value in report.values())


async def test_going_on_samples_what_is_missing_and_nothing_twice(tmp_path):
    node, path = FakeNode(mixed), tmp_path / "run"
    with open_evaluation_of(path) as folder:
        for spec in folder.todo()[:5]:
            folder.record(mixed(spec))
    over, report = await sampled(node, path, new=False)
    assert over
    assert len(job_ids(node)) == 7
    assert (report["rollouts"], report["graded"], report["missing"]) == (12, 8, 0)
    again = FakeNode(mixed)
    assert await sampled(again, path, new=False) == (True, report)
    assert not job_ids(again)


def open_evaluation_of(path):
    path.mkdir()
    return open_evaluation(path, (PLAN, TASKS))


async def test_what_a_killed_process_left_at_work_is_waited_for(tmp_path):
    """The node works on, and its outcomes are those of the next process."""
    node, path = FakeNode(), tmp_path / "run"
    with trio.fail_after(30):
        async with open_service(node) as service:
            with open_evaluation_of(path) as folder, trio.CancelScope() as killed:
                async with connect(service.url, TOKEN, session_id=PLAN.session_id) as client:
                    await client.submit(folder.todo())
                    killed.cancel()
            assert len(node.live) == 12
            with open_evaluation(path, None) as folder:
                async with connect(service.url, TOKEN, session_id=PLAN.session_id) as client, trio.open_nursery() as n:

                    @n.start_soon
                    async def finish():
                        for spec in list(node.submitted):
                            node.finish(spec.job_id, mixed(spec))

                    assert await do_missing(client, folder, lambda outcome: None)
            assert len(node.submitted) == 12
    assert len(read_outcomes(path / "trajectories.msgpack")) == 12


async def test_an_interrupt_cancels_what_runs_and_what_was_cancelled_is_sampled_when_it_goes_on(tmp_path):
    node, path = FakeNode(lambda spec: mixed(spec) if spec.instance.payload["n"] == 0 else None), tmp_path / "run"
    seen = []

    def interrupt(outcome):
        seen.append(outcome.job_id)
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)

    over, report = await sampled(node, path, on_outcome=interrupt)
    assert not over
    assert not node.live
    assert (report["graded"], report["cancelled"]) == (3, 9)
    whole = FakeNode(mixed)
    over, report = await sampled(whole, path, new=False)
    assert over
    assert len(job_ids(whole)) == 9
    assert not set(job_ids(whole)) & set(job_ids(node))
    assert (report["graded"], report["cancelled"], report["failed"]) == (8, 0, 2)
    with open_evaluation(path, None) as folder:
        assert (
            sorted(each.status for each in folder.last_outcomes)
            == ["completed"] * 8 + ["failed"] * 2 + ["timed_out"] * 2
        )


async def test_a_rejected_task_is_told_and_the_others_are_sampled(tmp_path):
    node = Picky(mixed)
    over, report = await sampled(node, tmp_path / "run")
    assert over
    assert (report["rollouts"], report["graded"], report["rejected"]) == (12, 7, 3)


def test_two_processes_do_not_work_on_one_evaluation(tmp_path):
    with open_evaluation_of(tmp_path / "run"), pytest.raises(ConfigError, match="another process"):
        open_evaluation(tmp_path / "run", None).__enter__()


def test_a_folder_without_an_evaluation_is_named(tmp_path):
    with pytest.raises(ConfigError, match="lock"):
        open_evaluation(tmp_path, None).__enter__()
    (tmp_path / "lock").touch()
    with pytest.raises(ConfigError, match="holds no evaluation"):
        open_evaluation(tmp_path, None).__enter__()


# ---------------------------------------------------------------- the command


def write_tasks(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b"\n".join(map(msgspec.json.encode, TASKS)))
    return str(file)


async def command(service, *arguments):
    env = {"PRORL_TOKEN": TOKEN, "PRORL_URL": service.url, "COLUMNS": "200"}
    call = partial(CliRunner().invoke, main, ["eval", *arguments], env=env)
    with trio.fail_after(40):
        return await trio.to_thread.run_sync(call)


async def test_the_command_prints_a_table_or_flat_json(tmp_path):
    async with open_service(FakeNode(mixed)) as service:
        options = ("--tasks", write_tasks(tmp_path), "--n", "3", "--temperature", "1", "--out", str(tmp_path / "runs"))
        result = await command(service, *options)
        assert result.exit_code == 3, result.output
        rows = [line.split() for line in result.stdout.splitlines()]
        assert ["all", "4", "12", "8", "2", "2", "0", "0", "0"] in rows
        assert ["odd", "2", "6", "2", "2", "2", "0", "0", "0"] in rows
        (row,) = [row for row in rows if row[:2] == ["all", "pass@1"]]
        assert (row[2:4], row[-3:]) == (["4", "50.0"], ["50.0", "..", "83.3"])
        assert ["odd", "pass@3", "0", "-", "-", "..", "-", "0.0", "..", "100.0"] in rows
        assert "4 x sandbox: no disk" in result.stdout
        (folder,) = (tmp_path / "runs").iterdir()
        result = await command(service, "--resume", str(folder), "--json")
        assert result.exit_code == 3
        assert json.loads(result.stdout)["even/pass@1"] == 1.0
        assert json.loads((folder / "report.json").read_bytes()) == json.loads(result.stdout)
        assert "12 of 12 rollouts are recorded" in result.stderr


async def test_graded_rewards_are_shown_and_counted_as_correct_from_the_reward_that_is_asked_for(tmp_path):
    def judged(spec):
        return msgspec.structs.replace(make_outcome(spec), reward=0.75 if spec.instance.payload["n"] else 0.25)

    async with open_service(FakeNode(judged)) as service:
        options = ("--tasks", write_tasks(tmp_path), "--out", str(tmp_path / "runs"))
        result = await command(service, *options, "--correct-from", "0.5")
        rows = [line.split() for line in result.stdout.splitlines()]
        assert ["all", "reward", "4", "0.625", "0.219", "..", "0.908"] in rows
        assert ["all", "pass@1", "4", "75.0", "30.1", "..", "95.4", "75.0", "..", "75.0"] in rows
        assert "correct: from a reward of 0.5" in result.stdout
        (folder,) = (tmp_path / "runs").iterdir()
        report = json.loads((folder / "report.json").read_bytes())
        assert (report["correct_from"], report["reward_mean"], report["even/pass@1"]) == (0.5, 0.625, 0.5)
        result = await command(service, "--resume", str(folder), "--json")
        assert json.loads(result.stdout) == report, "it is kept"
        result = await command(service, "--resume", str(folder), "--correct-from", "1", "--json")
        assert json.loads(result.stdout)["pass@1"] == 0.0


async def test_a_failure_is_shown_by_its_reason(tmp_path):
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    raise error\nValueError: bad gold'

    def broken(spec):
        errors = [f"scorer s failed: {trace}", f"scorer s failed: ValueError: bad gold\n{trace}"]
        error = errors[spec.instance.payload["n"] % 2]
        return msgspec.structs.replace(make_outcome(spec), status="failed", reward=None, cause="evaluator", error=error)

    async with open_service(FakeNode(broken)) as service:
        result = await command(service, "--tasks", write_tasks(tmp_path), "--out", str(tmp_path / "runs"))
    assert "4 x evaluator: scorer s failed: ValueError: bad gold\n" in result.stdout


async def test_a_whole_evaluation_has_the_exit_code_0(tmp_path):
    node = FakeNode(make_outcome)
    async with open_service(node) as service:
        result = await command(service, "--tasks", write_tasks(tmp_path), "--limit", "2", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert [spec.sampling.temperature for spec in node.submitted] == [0.0, 0.0]
    assert ["all", "pass@1", "2", "100.0", "34.2", "..", "100.0", "100.0", "..", "100.0"] in [
        line.split() for line in result.stdout.splitlines()
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--tasks"),
        (("--tasks", "sums", "--n", "2"), "--temperature"),
        (("--tasks", "sums", "--k", "2"), "--n 2"),
        (("--resume", ".", "--n", "2"), "leave --n out"),
    ],
)
def test_wrong_usage_is_told(arguments, message):
    result = CliRunner().invoke(main, ["eval", *arguments], env={"PRORL_TOKEN": TOKEN})
    assert result.exit_code == 2
    assert message in result.stderr


class Shell(FakeNode):
    """Takes tasks of the handler `shell`."""

    def check(self, spec, sink, ahead):
        assert spec.instance.handler == "shell"


async def test_the_solutions_of_a_folder_are_run_and_those_that_earn_too_little_named(tmp_path):
    def solved(spec):
        solution = spec.instance.payload["steps"][0]["solution"]["files"]["/solution/solve.sh"]["content"]
        right = base64.b64decode(solution) == b"right"
        return msgspec.structs.replace(make_outcome(spec), reward=float(right), evaluation_log="line\nno such file\n")

    for name in ("good", "bad"):
        content = {"task.toml": "", "instruction.md": "Do it.", "environment/Dockerfile": "FROM host\n"}
        content |= {"tests/test.sh": "true", "solution/solve.sh": "right" if name == "good" else "wrong"}
        for path, text in content.items():
            (tmp_path / "tasks" / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tasks" / name / path).write_text(text)
    runs = ("--out", str(tmp_path / "runs"))
    async with open_service(Shell(solved)) as service:
        result = await command(service, "--tasks", str(tmp_path / "tasks"), "--oracle", *runs)
        assert result.exit_code == 3, result.output
        assert "bad: its solution earned 0\n    line\n    no such file\n" in result.stdout
        assert "good: its solution" not in result.stdout
        result = await command(service, "--tasks", str(tmp_path / "tasks" / "good"), "--oracle", "--n", "2", *runs)
        assert result.exit_code == 0, result.output
        result = await command(service, "--tasks", write_tasks(tmp_path), "--oracle", *runs)
        assert (result.exit_code, "brings no solutions" in result.stderr) == (1, True)


async def test_ctrl_c_cleans_up_and_says_how_to_go_on(tmp_path):
    node = FakeNode(lambda spec: make_outcome(spec) if spec.instance.payload["n"] == 0 else None)
    arguments = ["eval", "--tasks", write_tasks(tmp_path), "--out", str(tmp_path / "runs")]
    with trio.fail_after(50):
        async with open_service(node) as service, trio.open_nursery() as nursery:
            env = {**os.environ, "PRORL_TOKEN": TOKEN, "PRORL_URL": service.url}
            program = [sys.executable, "-m", "prorl_trio.cli", *arguments]
            process = await nursery.start(
                partial(trio.run_process, program, env=env, check=False, capture_stdout=True, capture_stderr=True)
            )
            await node.wait_live(3)
            process.send_signal(signal.SIGINT)
            await process.wait()
            assert not node.live
        assert process.returncode == 130
        (folder,) = (tmp_path / "runs").iterdir()
        report = json.loads((folder / "report.json").read_bytes())
        assert (report["graded"], report["cancelled"]) == (1, 3)
