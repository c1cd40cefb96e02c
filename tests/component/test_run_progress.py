"""What `prorl-trio submit` shows: why rollouts would wait, hostile ids as text, a command that can be pasted."""

from __future__ import annotations

import io
import shlex
from functools import partial

import msgspec
import pytest
import trio
from click.testing import CliRunner
from rich.console import Console

from prorl_trio.cli import main
from prorl_trio.client import connect
from prorl_trio.runs import progress
from prorl_trio.runs.recording import read_outcomes
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_service import TOKEN, open_service


class Node(FakeNode):
    """Its jobs complete at once."""

    def __init__(self, backends, complete=make_outcome):
        super().__init__(complete)
        self.said = backends

    def statistics(self):
        report = {**super().statistics(), "backends": {"backends": self.said}}
        return {name: said for name, said in report.items() if name != "backends" or self.said is not None}


async def shown(monkeypatch, folder, backends, *job_ids):
    """What a run prints, on a terminal of 60 columns."""
    console = Console(file=io.StringIO(), width=60)
    monkeypatch.setattr(progress, "console", console)
    folder.mkdir()
    with trio.fail_after(30):
        async with open_service(Node(backends)) as service, connect(service.url, TOKEN) as client:
            specs = [make_spec(job_id) for job_id in job_ids]
            summary = await progress.run_jobs(client, specs, folder, model="", tasks="t")
    assert summary.completed == len(job_ids)
    return console.file.getvalue()


DOWN = {"url": "http://a:1", "state": "down", "error": "http://a:1: Connection \x1b[2J refused"}
BUSY = {"url": "http://b:1", "state": "active", "suspended": True}


@pytest.mark.parametrize(
    ("backends", "lines"),
    [
        ([], ["no backend of the node takes rollouts now, so they wait for one; it has none"]),
        (
            [DOWN, BUSY],
            [
                "no backend of the node takes rollouts now, so they wait for one:",
                "  http://a:1: http://a:1: Connection \\x1b[2J refused",
                "  http://b:1: suspended",
            ],
        ),
        ([DOWN, {"url": "http://c:1", "state": "active"}], []),
        (None, []),
    ],
)
async def test_it_is_said_when_rollouts_would_wait_for_a_backend(monkeypatch, tmp_path, backends, lines):
    text = await shown(monkeypatch, tmp_path / "run", backends, "a")
    head = [line for line in text.splitlines() if "backend" in line or line.startswith("  http")]
    assert head == lines


def half_of_them(spec):
    """The first rollout is completed, the second is not."""
    if spec.job_id.endswith("-0"):
        return make_outcome(spec)
    return msgspec.structs.replace(
        make_outcome(spec), status="failed", reward=None, cause="inference", error="no", trajectory=None
    )


@pytest.mark.parametrize(("complete", "code"), [(make_outcome, 0), (half_of_them, 3)])
async def test_the_exit_code_says_whether_all_were_completed(tmp_path, complete, code):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"instance_id": "i", "handler": "fake", "payload": {}}\n')
    argv = ["submit", "--tasks", str(tasks), "--rollouts", "2", "--out", str(tmp_path / "run")]
    with trio.fail_after(60):
        async with open_service(Node(None, complete)) as service:
            env = {"PRORL_TOKEN": TOKEN}
            invoke = partial(CliRunner().invoke, main, [*argv, "--url", service.url], env=env)
            result = await trio.to_thread.run_sync(invoke)
    assert result.exit_code == code, result.output


async def test_without_a_terminal_it_says_from_time_to_time_how_far_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "SAID_EVERY_S", 0.0)
    lines = (await shown(monkeypatch, tmp_path / "run", None, "a", "b")).splitlines()
    assert [line for line in lines if " of 2 rollouts; " in line] == [
        f"{count} of 2 rollouts; instance of {job}: completed reward 1" for count, job in ((1, "a"), (2, "b"))
    ]


async def test_ids_are_text_and_the_command_to_look_at_one_can_be_pasted(monkeypatch, tmp_path):
    folder = tmp_path / ("a folder [bold] with a name that is longer than the terminal " * 2)
    text = await shown(monkeypatch, folder, None, "[/bold]", "\x1b[2J")
    assert "\x1b[2J" not in text
    command = text.partition("look at one with: ")[2].splitlines()[0]
    assert shlex.split(command) == ["prorl-trio", "show", f"{folder}/trajectories.msgpack", "JOB_ID"]


async def submitted(tmp_path, tasks, *options):
    """What `submit` says of a task file, and the node that it asked."""
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks))
    node = Node(None)
    with trio.fail_after(30):
        async with open_service(node) as service:
            command = ["submit", "--tasks", str(tmp_path / "tasks.jsonl"), "--out", str(tmp_path / "runs"), *options]
            env = {"PRORL_TOKEN": TOKEN, "PRORL_URL": service.url}
            result = await trio.to_thread.run_sync(partial(CliRunner().invoke, main, command, env=env))
    return result, node


def a_task(name, handler="fake"):
    return f'{{"instance_id": "{name}", "handler": "{handler}", "payload": {{}}}}'


async def test_tasks_that_the_node_rejects_are_named_and_the_others_are_run(monkeypatch, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(progress, "console", console)
    result, node = await submitted(tmp_path, [a_task("a"), a_task("b", "nobody"), a_task("c")])
    assert result.exit_code == 3
    said = console.file.getvalue()
    assert "1 of 3 jobs were rejected; the other 2 are run" in said
    assert "-b-0 was rejected (unknown_handler): no handler 'nobody'; there is: fake" in said
    assert [spec.instance.instance_id for spec in node.submitted] == ["a", "c"]
    (folder,) = (tmp_path / "runs").iterdir()
    assert [outcome.instance_id for outcome in read_outcomes(folder / "trajectories.msgpack")] == ["a", "c"]
    summary = msgspec.json.decode((folder / "summary.json").read_bytes())
    assert (summary["jobs"], summary["completed"], summary["rejected"]) == (2, 2, 1)


async def test_where_every_task_is_rejected_that_is_the_error(monkeypatch, tmp_path):
    result, node = await submitted(tmp_path, [a_task("a", "nobody"), a_task("b", "nobody")])
    assert result.exit_code == 1
    assert "error: every job was rejected; job " in result.stderr
    assert "no handler 'nobody'" in result.stderr
    assert node.submitted == []


async def test_a_task_file_with_a_bad_line_submits_nothing_and_says_so(tmp_path):
    result, node = await submitted(tmp_path, [a_task("a"), "{", a_task("c")])
    assert result.exit_code == 1
    assert "line 2: " in result.stderr
    assert "use the other 2 rows with --skip-bad" in result.stderr
    assert node.submitted == []


async def test_rows_that_cannot_be_used_are_left_out_on_demand_and_named(tmp_path):
    result, node = await submitted(tmp_path, [a_task("a"), "{", a_task("c"), a_task("a")], "--skip-bad")
    assert result.exit_code == 0
    assert "tasks.jsonl: 2 of 4 rows are left out:" in result.stderr
    assert "line 2: it is not valid JSON" in result.stderr
    assert "line 4, field `instance_id`: 'a' is the id of line 1 as well" in result.stderr
    assert [spec.instance.instance_id for spec in node.submitted] == ["a", "c"]
