"""A run as a person at a terminal sees it: a progress bar, then the final table."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import trio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from prorl_trio.client.collect import collect
from prorl_trio.client.recording import TRAJECTORIES, RunInfo
from prorl_trio.report import errors, summary_table
from prorl_trio.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from prorl_trio.client import RolloutClient
    from prorl_trio.client.recording import Summary
    from prorl_trio.models import JobSpec, Outcome

__all__ = ["console", "run_jobs"]

console = Console()
"""Where commands print for people."""

SAID_EVERY_S = 30.0
"""How far a run is, where there is no terminal to draw a bar on."""


async def run_jobs(client: RolloutClient, specs: list[JobSpec], folder: Path, *, model: str, tasks: str) -> Summary:
    """Submit, show a progress bar (a line every `SAID_EVERY_S` where there is no terminal), record in `folder`, print
    the final table. See `client.collect.collect`.

    Says so first where no backend takes rollouts, because they will wait then.
    """
    for line in _unready(await client.status()):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    info = RunInfo(model=model, tasks=tasks, started=folder.name)
    columns = (
        TextColumn("rollouts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}", markup=False),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("rollouts", total=len(specs), last="")
        ended, said_s = 0, trio.current_time()

        def show(outcome: Outcome) -> None:
            nonlocal ended, said_s
            ended += 1
            reward = "" if outcome.reward is None else f" reward {outcome.reward:g}"
            last = one_line(f"{outcome.instance_id}: {outcome.status}{reward}").plain
            progress.update(bar, advance=1, last=last)
            if not console.is_terminal and trio.current_time() >= said_s + SAID_EVERY_S:
                said_s = trio.current_time()
                console.print(
                    f"{ended} of {len(specs)} rollouts; {last}", markup=False, highlight=False, soft_wrap=True
                )

        summary, outcomes = await collect(client, specs, folder, info, show)
    console.print(summary_table(summary, outcomes))
    for line in errors(outcomes):
        console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    show_one = f"prorl-trio show {shlex.quote(str(folder / TRAJECTORIES))} JOB_ID"
    console.print(f"recorded in {folder}; look at one with: {show_one}", markup=False, highlight=False, soft_wrap=True)
    return summary


def _unready(report: Mapping[str, Any]) -> Iterator[str]:
    """Why a node's backends take no rollouts now, from its `status`. Nothing if one does, or the node does not say."""
    pool = report.get("backends")
    if not isinstance(pool, dict):
        return
    backends = pool.get("backends", [])
    if any(backend.get("state") == "active" and not backend.get("suspended") for backend in backends):
        return
    yield "no backend of the node takes rollouts now, so they wait for one" + (":" if backends else "; it has none")
    for backend in backends:
        why = backend.get("error") or ("suspended" if backend.get("suspended") else backend.get("state"))
        yield one_line(f"  {backend.get('url')}: {why}").plain
