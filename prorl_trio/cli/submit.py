"""`prorl-trio submit`: run rollouts on a node and record them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prorl_trio.cli.connection import connection_options, with_client
from prorl_trio.cli.exit_codes import EXIT_JOBS_CUT
from prorl_trio.cli.task_files import TASKS_HELP, agent_option, load_tasks, skip_bad_option
from prorl_trio.runs.collect import make_jobs
from prorl_trio.runs.progress import run_jobs
from prorl_trio.runs.recording import run_folder
from prorl_trio.types.models import SamplingParams

if TYPE_CHECKING:
    from prorl_trio.cli.connection import Node


@click.command()
@connection_options
@click.option(
    "--tasks",
    required=True,
    help=TASKS_HELP,
)
@click.option(
    "--specs",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON file that describes how published repositories run their tests.",
)
@skip_bad_option
@click.option("--limit", type=click.IntRange(min=1), help="Submit only the first N instances.")
@click.option("--rollouts", type=click.IntRange(min=1), default=1, show_default=True, help="Rollouts per instance.")
@click.option("--max-turns", type=click.IntRange(min=1), default=4, show_default=True, help="Per rollout.")
@agent_option
@click.option("--max-output-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Per turn.")
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Sampling temperature."
)
@click.option("--model", default="", help="Model folder, with which `show` decodes tokens.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Record below this folder."
)
def submit(
    node: Node,
    tasks: str,
    specs: Path | None,
    skip_bad: bool,
    limit: int | None,
    rollouts: int,
    max_turns: int,
    agent: str | None,
    max_output_tokens: int,
    temperature: float,
    model: str,
    out: Path,
) -> None:
    """Submit rollouts to a node and record their outcomes. Wait for all rollouts and print a summary.

    Before submitting, the command reads every row of the task file and grades each gold answer against itself. A file
    with unusable rows is refused as a whole, unless --skip-bad omits these rows. The node repeats the check for each
    submitted task. It reports the tasks that it rejects and runs all others.

    \b
    Exit codes:
        0  every rollout completed, whatever its reward
        1  the node or the task file cannot be used
        3  some rollouts were rejected or did not complete; the reasons are printed

    \b
    Each line of a JSONL task file:
        {"instance_id": "1", "handler": "math", "payload": {"question": "1+1?", "answer": "2"}}
    """
    sampling = SamplingParams(temperature=temperature, max_output_tokens=max_output_tokens)
    instances = load_tasks(tasks, specs=specs, skip_bad=skip_bad, limit=limit).instances
    jobs = make_jobs(instances, rollouts=rollouts, sampling=sampling, max_turns=max_turns, agent=agent)
    summary = with_client(node, lambda client: run_jobs(client, jobs, run_folder(out), model=model, tasks=tasks))
    sys.exit(0 if summary.completed == summary.jobs and not summary.rejected else EXIT_JOBS_CUT)
