"""Groups, evaluations and the commands, which are built on a client, work over a fleet as over one node."""

from __future__ import annotations

import json
from collections import Counter

import msgspec
import pytest
from click.testing import CliRunner

from prorl_trio.cli import main
from prorl_trio.client import BlockingClient
from prorl_trio.runs.evaluation.folder import open_evaluation
from prorl_trio.runs.evaluation.run import EvaluationPlan, do_missing
from prorl_trio.runs.evaluation.shown import write_report
from prorl_trio.sampling import GroupRules, JobTemplate, open_groups
from prorl_trio.types.models import SamplingParams, TaskInstance
from support.fake_fleet import open_fake_fleet
from support.fake_node import make_outcome, make_spec
from support.fleet_head import fleet_in_thread, head_quickly, open_client
from support.sampled import make_rollout, make_task

pytestmark = pytest.mark.timeout(120)


def mixed(spec):
    """Two rollouts of each group are right, and two are not."""
    return make_rollout(spec, float(int(spec.job_id.split("-")[-2]) % 2))


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    head_quickly(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "f"


async def test_groups_are_sampled_over_all_nodes_and_go_on_when_one_is_lost(folder, tmp_path):
    rules = GroupRules(size=4, groups_per_step=3, max_staleness=1)
    template = JobTemplate(sampling=SamplingParams(max_output_tokens=7))
    async with open_fake_fleet(folder, "a", "b", on_submit=mixed) as fleet, open_client(folder) as (client, _head):
        tasks = [make_task(n) for n in range(10)]
        async with open_groups(client, tasks, rules, folder=tmp_path / "groups", job=template) as groups:
            for step in range(1, 5):
                batch = await groups.take()
                assert [group.rewards.tolist() for group in batch.groups] == [[0, 1, 0, 1]] * 3
                await groups.advance(str(step))
                if step == 2:
                    assert fleet["a"].node.submitted
                    await fleet["a"].kill()
        assert client.cursor >= 48
    trained = Counter(spec.job_id for member in fleet.nodes.values() for spec in member.node.submitted)
    assert len(trained) >= 48


async def test_an_evaluation_is_spread_and_goes_on_over_other_nodes(folder, tmp_path):
    tasks = [TaskInstance(instance_id=f"task {n}", handler="fake", payload={"n": n}) for n in range(6)]
    plan = EvaluationPlan(
        evaluation_id="e",
        session_id="s",
        tasks="some",
        rollouts=4,
        ks=(1, 4),
        sampling=SamplingParams(temperature=0.5),
        max_turns=2,
    )
    (tmp_path / "run").mkdir()
    async with open_fake_fleet(folder, "a", "b", on_submit=make_outcome) as fleet:
        with open_evaluation(tmp_path / "run", (plan, tasks)) as evaluation:
            async with open_client(folder, session_id="s") as (client, _head):
                assert await do_missing(client, evaluation, lambda _: None)
            report = json.loads(write_report(evaluation)[1])
        assert (report["rollouts"], report["graded"]) == (24, 24)
        assert all(member.node.submitted for member in fleet.nodes.values())


def test_the_commands_take_a_fleet(folder, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    lines = [TaskInstance(instance_id=f"t{n}", handler="fake", payload={}) for n in range(20)]
    tasks.write_bytes(b"".join(msgspec.json.encode(task) + b"\n" for task in lines))
    with fleet_in_thread(folder, "a", "b", on_submit=make_outcome) as fleet:
        done = run("submit", "--fleet", str(folder), "--tasks", str(tasks), "--out", str(tmp_path / "runs"))
        assert done.exit_code == 0, done.output
        assert sorted(len(member.node.submitted) for member in fleet.nodes.values()) == [10, 10]
        scored = run("eval", "--fleet", str(folder), "--tasks", str(tasks), "--out", str(tmp_path / "evals"), "--json")
        assert scored.exit_code == 0, scored.output
        assert json.loads(scored.stdout)["graded"] == 20
        shown = run("top", "--once", "--fleet", str(folder))
        assert shown.output.startswith("head ")


def test_an_operator_cancels_on_every_node(folder):
    with fleet_in_thread(folder, "a", "b"), BlockingClient(fleet=folder) as client:
        client.submit([make_spec(f"job-{n}") for n in range(8)])
        shown = run("top", "--once", "--fleet", str(folder))
        (session,) = [line.split() for line in shown.output.splitlines() if client.session_id in line]
        assert session[2] == "8"
        some = run("cancel", "--fleet", str(folder), "job-1", "job-2", "job-3")
        assert some.output.splitlines() == [f"cancelled job-{n}" for n in (1, 2, 3)]
        unknown = run("cancel", "--fleet", str(folder), "nobody's")
        assert unknown.exit_code == 1
        assert "nobody's" in unknown.output
        rest = run("cancel", "--fleet", str(folder), "--all")
        assert len(rest.output.splitlines()) == 5
        assert Counter(outcome.status for outcome in client.results()) == {"cancelled": 8}
