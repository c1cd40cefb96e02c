"""`prorl-trio submit`: run rollouts on a node, and record them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prorl_trio.cli.connection import connection_options, with_client
from prorl_trio.cli.exit_codes import EXIT_JOBS_CUT
from prorl_trio.client.collect import make_jobs
from prorl_trio.client.progress import run_jobs
from prorl_trio.client.recording import run_folder
from prorl_trio.client.task_sets import TASK_SETS, load_task_set
from prorl_trio.types.models import SamplingParams

if TYPE_CHECKING:
    from prorl_trio.cli.connection import Node

__all__ = ["submit"]


@click.command()
@connection_options
@click.option(
    "--tasks",
    required=True,
    help=f"A task set ({', '.join(sorted(TASK_SETS))}), a JSONL file of tasks, or a folder of Harbor tasks.",
)
@click.option(
    "--specs",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON of how published repositories run their tests.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many instances.")
@click.option("--rollouts", type=click.IntRange(min=1), default=1, show_default=True, help="Rollouts per instance.")
@click.option("--max-turns", type=click.IntRange(min=1), default=4, show_default=True, help="Per rollout.")
@click.option("--max-output-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Per turn.")
@click.option("--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Of sampling.")
@click.option("--model", default="", help="Folder of the model, with which `show` turns tokens into text.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Folder of the records."
)
def submit(
    node: Node,
    tasks: str,
    specs: Path | None,
    limit: int | None,
    rollouts: int,
    max_turns: int,
    max_output_tokens: int,
    temperature: float,
    model: str,
    out: Path,
) -> None:
    """Submit rollouts to a node, and record what comes back. It waits for all of them and prints a summary.

    A task file with a line that cannot be read is refused as a whole, before anything is submitted. Then each task is
    checked by its handler on the node. Those that it rejects are named, and the others are run.

    Exit code: 0 all were completed, whatever their reward; 3 some were rejected or not completed, and it says why;
    1 the node or the task file cannot be used.

    \b
    Each line of a JSONL task file:
        {"instance_id": "1", "handler": "math", "payload": {"question": "1+1?", "answer": "2"}}
    """
    sampling = SamplingParams(temperature=temperature, max_output_tokens=max_output_tokens)
    jobs = make_jobs(
        load_task_set(tasks, specs=specs)[:limit], rollouts=rollouts, sampling=sampling, max_turns=max_turns
    )
    summary = with_client(node, lambda client: run_jobs(client, jobs, run_folder(out), model=model, tasks=tasks))
    sys.exit(0 if summary.completed == summary.jobs and not summary.rejected else EXIT_JOBS_CUT)
