"""A run as a person at a terminal sees it: a progress bar, then the final table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from prorl_trio.client.collect import collect
from prorl_trio.client.recording import RunInfo
from prorl_trio.report import summary_table

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_trio.client import RolloutClient
    from prorl_trio.client.recording import Summary
    from prorl_trio.models import JobSpec, Outcome

__all__ = ["console", "run_jobs"]

console = Console()
"""Where commands print for people."""


async def run_jobs(client: RolloutClient, specs: list[JobSpec], folder: Path, *, model: str, tasks: str) -> Summary:
    """Submit, show a progress bar, record in `folder`, print the final table. See `client.collect.collect`."""
    info = RunInfo(model=model, tasks=tasks, started=folder.name)
    columns = (
        TextColumn("rollouts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("rollouts", total=len(specs), last="")

        def show(outcome: Outcome) -> None:
            reward = "" if outcome.reward is None else f" reward {outcome.reward:g}"
            progress.update(bar, advance=1, last=f"{outcome.instance_id}: {outcome.status}{reward}")

        summary, outcomes = await collect(client, specs, folder, info, show)
    console.print(summary_table(summary, outcomes))
    console.print(f"recorded in {folder}; look at one with: prorl-trio show {folder}/trajectories.msgpack ID")
    return summary
