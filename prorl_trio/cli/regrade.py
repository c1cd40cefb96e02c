"""`prorl-trio regrade`: grade the rollouts of a recorded run again, without sampling."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prorl_trio.cli.connection import connection_options, with_client
from prorl_trio.cli.exit_codes import EXIT_INTERRUPTED, EXIT_JOBS_CUT
from prorl_trio.client.terminal import Console, one_line, say_json
from prorl_trio.runs import progress
from prorl_trio.runs.evaluation.folder import PLAN, TASKS, open_evaluation, read_plan
from prorl_trio.runs.evaluation.regrade import Regrading
from prorl_trio.runs.evaluation.run import do_missing
from prorl_trio.runs.evaluation.shown import print_report, write_report
from prorl_trio.runs.recording import (
    RUN_INFO,
    TRAJECTORIES,
    OutcomeFile,
    read_outcomes,
    read_run_info,
    run_folder,
    write_json,
)
from prorl_trio.tasks.sets import load_task_set
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.cli.connection import Node
    from prorl_trio.client import RolloutClient
    from prorl_trio.runs.evaluation.regrade import RegradeSummary
    from prorl_trio.types.models import Outcome, TaskInstance

SUMMARY = "regrade.json"
MAX_LINES = 20
"""Maximum number of rollouts to list for each kind."""


@click.command()
@connection_options
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--tasks", help="Grade with the tasks of this set or JSONL file, by instance_id. [the run's tasks]")
@click.option("--out", type=click.Path(path_type=Path), help="Record below this folder. [the folder of RUN]")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON; other output goes to standard error.")
def regrade(node: Node, run: Path, tasks: str | None, out: Path | None, as_json: bool) -> None:
    """Grade the rollouts of a recorded run again, without sampling.

    RUN is a folder written by `eval`, `submit` or `demo`. The node runs only the EVAL stage. A new folder receives all
    rollouts, with new rewards for the regraded ones. A rollout that cannot be graded is copied unchanged and listed
    with the reason: it never reached EVAL, its task is missing, or its handler cannot restore it. For an evaluation,
    the scores are recomputed.

    \b
    Exit codes:
        0    every rollout was graded
        1    the node, the run or the tasks cannot be used
        3    some rollouts were not graded
        130  interrupted

    \b
        prorl-trio regrade runs/20260101-120000
        prorl-trio regrade runs/20260101-120000 --tasks mended.jsonl
    """
    outcomes, instances = read_outcomes(run / TRAJECTORIES), _instances(run, tasks)
    people = Console(stderr=True) if as_json else progress.console
    regrading = Regrading(outcomes, instances)

    async def work(client: RolloutClient) -> bool:
        with progress.open_bar(len(regrading.todo()), out=people) as bar:
            return await do_missing(client, regrading, bar.ended)

    is_over = with_client(node, work, uuid.uuid4().hex)
    summary = regrading.summary()
    folder = run_folder(out or run.absolute().parent)
    write_json(folder / SUMMARY, summary)
    _record(run, folder, regrading.merged(), instances, people)
    _print(summary, folder, people)
    if as_json:
        say_json(summary)
    if not is_over:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(EXIT_JOBS_CUT if summary.not_regraded else 0)


def _instances(run: Path, tasks: str | None) -> list[TaskInstance]:
    """Return the tasks to grade with. Raises ConfigError if the run does not record them."""
    if tasks is not None:
        return load_task_set(tasks)
    if (run / TASKS).exists():
        return load_task_set(str(run / TASKS), check=False)
    info = read_run_info(run)
    if info is None or not info.tasks:
        raise ConfigError(f"{run} does not say of which tasks it is: name them by --tasks")
    return load_task_set(info.tasks, check=False, skip_bad=True)


def _record(
    run: Path, folder: Path, outcomes: Sequence[Outcome], instances: Sequence[TaskInstance], people: Console
) -> None:
    """Write the outcomes to `folder`. For an evaluation, also write and print its report."""
    if (run / PLAN).exists():
        changed = {instance.instance_id: instance for instance in instances}
        its_own = [changed.get(each.instance_id, each) for each in load_task_set(str(run / TASKS), check=False)]
        with open_evaluation(folder, (read_plan(run), its_own)) as evaluation:
            for outcome in outcomes:
                evaluation.record(outcome)
            print_report(evaluation, write_report(evaluation)[0], people)
        return
    if (info := read_run_info(run)) is not None:
        write_json(folder / RUN_INFO, info)
    with OutcomeFile(folder / TRAJECTORIES) as file:
        for outcome in outcomes:
            file.append(outcome)


def _print(summary: RegradeSummary, folder: Path, people: Console) -> None:
    means = ["-" if mean is None else f"{mean:.3f}" for mean in (summary.reward_mean_before, summary.reward_mean_after)]
    lines = [
        f"{summary.regraded} of {summary.outcomes} rollouts were graded again; {len(summary.changed)} have another "
        f"reward; mean reward {means[0]} before, {means[1]} now"
    ]
    lines += [f"{each.job_id}: {each.before} -> {each.after}" for each in summary.changed[:MAX_LINES]]
    lines += [f"not graded: {job_id}: {why}" for job_id, why in list(summary.not_regraded.items())[:MAX_LINES]]
    for line in [*map(one_line, lines), f"recorded in {folder}; all that changed, or was not graded, in {SUMMARY}"]:
        people.print(line, markup=False, highlight=False, soft_wrap=True)
