"""`prorl-trio eval`: estimate a policy's score on a task set, with confidence intervals."""

from __future__ import annotations

import math
import shlex
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from prorl_trio.cli.connection import connection_options, with_client
from prorl_trio.cli.exit_codes import EXIT_INTERRUPTED, EXIT_JOBS_CUT
from prorl_trio.cli.task_files import TASKS_HELP, agent_option, load_tasks, skip_bad_option
from prorl_trio.client.terminal import Console, say_json
from prorl_trio.runs import progress
from prorl_trio.runs.evaluation.folder import open_evaluation
from prorl_trio.runs.evaluation.run import EvaluationPlan, do_missing
from prorl_trio.runs.evaluation.shown import print_report, print_unsolved, write_report
from prorl_trio.runs.recording import run_folder
from prorl_trio.types.errors import ServiceError
from prorl_trio.types.models import SamplingParams

if TYPE_CHECKING:
    from prorl_trio.cli.connection import Node
    from prorl_trio.client import RolloutClient
    from prorl_trio.runs.evaluation.folder import EvaluationFolder
    from prorl_trio.types.models import TaskInstance

OF_THE_PLAN = (
    "tasks", "specs", "skip_bad", "oracle", "limit", "rollouts", "ks", "temperature", "top_p", "max_turns", "agent",
    "max_output_tokens", "attempts", "model", "out",
)  # fmt: skip
"""Options that define the evaluation. They cannot be combined with --resume, because the folder records them."""


def _no_nan(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """Refuse NaN: it passes click's range check, and no reward would reach it."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is no number", context, option)
    return value


@click.command()
@connection_options
@click.option("--tasks", help=TASKS_HELP)
@click.option(
    "--specs",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON file that describes how published repositories run their tests.",
)
@skip_bad_option
@click.option("--oracle", is_flag=True, help="Run the tasks' own solutions instead of a policy.")
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first N tasks.")
@click.option("--n", "rollouts", type=click.IntRange(min=1), default=1, show_default=True, help="Rollouts per task.")
@click.option(
    "--k", "ks", multiple=True, type=click.IntRange(min=1), help="Report pass@k for this k. Repeatable. [1 and N]"
)
@click.option("--temperature", type=click.FloatRange(min=0), help="Sampling temperature; 0 is greedy. [0 for --n 1]")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True)
@click.option("--max-turns", type=click.IntRange(min=1), default=8, show_default=True, help="Per rollout.")
@agent_option
@click.option("--max-output-tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Per turn.")
@click.option(
    "--attempts",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    help="Retries of a rollout whose infrastructure failed.",
)
@click.option(
    "--correct-from",
    type=click.FloatRange(-1e9, 1e9),
    callback=_no_nan,
    help="Smallest reward of a correct rollout, for pass@k; also with --resume. [1]",
)
@click.option("--model", default="", help="Model folder, with which `show` decodes tokens.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Record below this folder."
)
@click.option(
    "--resume", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Resume the run in this folder."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the figures as flat JSON; other output goes to standard error."
)
@click.pass_context
def eval(
    context: click.Context,
    /,
    node: Node,
    resume: Path | None,
    as_json: bool,
    out: Path,
    correct_from: float | None,
    **options: Any,
) -> None:
    """Score the policy on a task set. Report mean reward, pass@1 and pass@k with confidence intervals, by family.

    The node samples N rollouts of each task, and each rollout is recorded as soon as it ends. A rollout is correct if
    its reward is at least 1, or at least --correct-from. Pass@k is the unbiased estimate over the rollouts that have a
    reward. Rollouts without a reward (failed, timed out, cancelled, rejected by the node, or not run) are counted
    separately. The bounds are the scores if all of these rollouts had been wrong, or correct.

    Ctrl-C cancels the running rollouts, records the finished ones, and prints the command that resumes the evaluation.
    A resumed evaluation does not sample recorded rollouts again.

    With --oracle nothing is sampled, and the node needs no engine. For each task in a Harbor folder, solution/solve.sh
    runs where the agent would work, and the task's verifier scores it. Every task whose solution scores less than 1 is
    listed with the last lines of its verifier's log. The cause is the task, its environment on this node, or its
    solution.

    \b
    Exit codes:
        0    every rollout completed (with --oracle: and scored 1)
        1    the node or the task file cannot be used
        3    some rollouts did not complete or were rejected; the reasons are printed
        130  interrupted

    \b
        prorl-trio eval --tasks compmath
        prorl-trio eval --tasks compmath --agent codex --max-turns 30
        prorl-trio eval --tasks compmath --n 8 --temperature 0.6 --k 1 --k 4 --k 8
        prorl-trio eval --resume runs/20260101-120000
        prorl-trio eval --tasks my-harbor-tasks/ --oracle
    """
    if resume is None:
        new: tuple[EvaluationPlan, list[TaskInstance]] | None = _new_plan(**options)
    else:
        given = [name for name in OF_THE_PLAN if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            names = {option.name: option.opts[0] for option in context.command.params}
            raise click.UsageError(f"--resume goes on with what its folder says: leave {names[given[0]]} out")
        new = None
    people = Console(stderr=True) if as_json else progress.console
    with open_evaluation(resume or run_folder(out), new) as folder:
        if correct_from is not None:
            folder.count_correct_from(correct_from)
        try:
            is_over = with_client(node, lambda client: _run(client, folder, people), folder.plan.session_id)
        except ServiceError:
            write_report(folder)
            _say_how_to_go_on(folder, people)
            raise
        scores, encoded = write_report(folder)
        print_report(folder, scores, people)
        if as_json:
            say_json(encoded)
        if not is_over:
            _say_how_to_go_on(folder, people)
            sys.exit(EXIT_INTERRUPTED)
    every = scores[0]
    unsolved = folder.plan.oracle and print_unsolved(folder, people)
    sys.exit(0 if every.graded == every.rollouts and not unsolved else EXIT_JOBS_CUT)


def _say_how_to_go_on(folder: EvaluationFolder, people: Console) -> None:
    go_on = f"not over; go on with: prorl-trio eval --resume {shlex.quote(str(folder.path))}"
    people.print(go_on, style="yellow", markup=False, highlight=False, soft_wrap=True)


async def _run(client: RolloutClient, folder: EvaluationFolder, people: Console) -> bool:
    if not folder.plan.oracle:
        await progress.warn_if_unready(client, people)
    total, left = folder.plan.rollouts * len(folder.instances), len(folder.todo())
    if left < total:
        said = f"{total - left} of {total} rollouts are recorded in {folder.path}"
        people.print(said, markup=False, highlight=False, soft_wrap=True)
    with progress.open_bar(total, done=total - left, out=people) as bar:
        return await do_missing(client, folder, bar.ended)


def _new_plan(
    *,
    tasks: str | None,
    specs: Path | None,
    skip_bad: bool,
    oracle: bool,
    limit: int | None,
    rollouts: int,
    ks: tuple[int, ...],
    temperature: float | None,
    top_p: float,
    max_turns: int,
    agent: str | None,
    max_output_tokens: int,
    attempts: int,
    model: str,
) -> tuple[EvaluationPlan, list[TaskInstance]]:
    if tasks is None:
        raise click.UsageError("say what to evaluate on by --tasks, or what to go on with by --resume")
    if temperature is None and rollouts > 1 and not oracle:
        raise click.UsageError("greedy rollouts of a task are all alike: with --n say --temperature, too")
    if too_large := [k for k in ks if k > rollouts]:
        raise click.UsageError(f"pass@{too_large[0]} needs as many rollouts of a task: --n {too_large[0]}")
    found = load_tasks(tasks, specs=specs, solutions=oracle, skip_bad=skip_bad, limit=limit)
    plan = EvaluationPlan(
        evaluation_id=uuid.uuid4().hex[:8],
        session_id=uuid.uuid4().hex,
        tasks=tasks,
        rollouts=rollouts,
        ks=tuple(sorted(set(ks or (1, rollouts)))),
        sampling=SamplingParams(temperature=temperature or 0.0, top_p=top_p, max_output_tokens=max_output_tokens),
        max_turns=max_turns,
        attempts=attempts,
        model=model,
        oracle=oracle,
        left_out=len(found.refused),
        agent=agent or "",
    )
    return plan, found.instances
