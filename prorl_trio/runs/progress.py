"""A run shown at a terminal: a progress bar, then the final table."""

from __future__ import annotations

import shlex
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import click
import trio
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from prorl_trio.client.terminal import Console, one_line
from prorl_trio.runs.collect import collect, describe_rejection
from prorl_trio.runs.recording import TRAJECTORIES, RunInfo
from prorl_trio.runs.report import errors, group_table, summary_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from prorl_ipc.session import Rejected
    from prorl_trio.client import RolloutClient
    from prorl_trio.runs.recording import Summary
    from prorl_trio.types.models import JobSpec, Outcome

console = Console()
"""Console that commands print to, for people."""

MAX_REJECTIONS = 10
"""Limit of the rejected jobs that are printed with their reasons."""
SAID_EVERY_S = 30.0
"""Interval between progress lines where there is no terminal for a bar."""


class RolloutBar:
    """A progress bar of rollouts; where there is no terminal, a line every `SAID_EVERY_S`."""

    def __init__(self, progress: Progress, total: int, done: int) -> None:
        self._progress = progress
        self._bar = progress.add_task("rollouts", total=total, completed=done, last="")
        self._total, self._ended = total, done
        self._said_s = trio.current_time()

    def expect(self, total: int) -> None:
        """Expect so many rollouts in all from now on."""
        self._total = total
        self._progress.update(self._bar, total=total)

    def ended(self, outcome: Outcome) -> None:
        """Show that one has ended, and how."""
        self._ended += 1
        reward = "" if outcome.reward is None else f" reward {outcome.reward:g}"
        last = one_line(f"{outcome.instance_id}: {outcome.status}{reward}").plain
        self._progress.update(self._bar, advance=1, last=last)
        out = self._progress.console
        if not out.is_terminal and trio.current_time() >= self._said_s + SAID_EVERY_S:
            self._said_s = trio.current_time()
            said = f"{self._ended} of {self._total} rollouts; {last}"
            out.print(said, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def open_bar(total: int, *, done: int = 0, out: Console | None = None) -> Iterator[RolloutBar]:
    """Show the progress of `total` rollouts, of which some are `done`, on `out` or the commands' console."""
    columns = (
        TextColumn("rollouts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}", markup=False),
    )
    with Progress(*columns, console=out or console) as progress:
        yield RolloutBar(progress, total, done)


async def warn_if_unready(client: RolloutClient, out: Console | None = None) -> None:
    """Print why no backend of the node takes rollouts now, if none does."""
    for line in _unready(await client.status()):
        (out or console).print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


async def run_jobs(client: RolloutClient, specs: list[JobSpec], folder: Path, *, model: str, tasks: str) -> Summary:
    """Submit jobs, show a progress bar, record outcomes in `folder`, print the final tables; return the summary.

    First prints a warning if no backend takes rollouts, because the jobs will wait then. Without a terminal, prints a
    line every `SAID_EVERY_S` instead of the bar. Raises what `collect` raises, and cancels jobs as it does.
    """
    await warn_if_unready(client)
    info = RunInfo(model=model, tasks=tasks, started=folder.name)
    with open_bar(len(specs)) as bar:
        rejections: list[Rejected] = []

        def reject(rejected: Sequence[Rejected]) -> None:
            rejections.extend(rejected)
            bar.expect(len(specs) - len(rejected))
            _say(f"{len(rejected)} of {len(specs)} jobs were rejected; the other {len(specs) - len(rejected)} are run")

        summary, outcomes = await collect(client, specs, folder, info, bar.ended, reject)
    if groups := _groups(specs, outcomes):
        console.print(group_table(groups))
    console.print(summary_table(summary, outcomes))
    for line in errors(outcomes):
        _say(line)
    for rejected in rejections[:MAX_REJECTIONS]:
        _say(one_line(describe_rejection(rejected)).plain)
    if len(rejections) > MAX_REJECTIONS:
        _say(f"{len(rejections) - MAX_REJECTIONS} more were rejected")
    show_one = f"prorl-trio show {shlex.quote(str(folder / TRAJECTORIES))} JOB_ID"
    console.print(f"recorded in {folder}; look at one with: {show_one}", markup=False, highlight=False, soft_wrap=True)
    view_all = f"prorl-trio view {shlex.quote(str(folder))}"
    console.print(f"look at all in a browser with: {view_all}", markup=False, highlight=False, soft_wrap=True)
    return summary


def page(parts: Sequence[RenderableType], *, pager: bool | None = None) -> None:
    """Print `parts`, through a pager if `pager` is True.

    By default (None), use the pager if the output goes to a terminal and is as long as its window or longer.
    """
    with console.capture() as capture:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, Text))
    text = capture.get()
    if pager or (pager is None and console.is_terminal and _lines(text) >= console.height):
        click.echo_via_pager(text, color=True)
    else:
        console.file.write(text)
        console.file.flush()


def _lines(text: str) -> int:
    """Return the number of terminal lines that `text` takes, with long lines wrapped."""
    return sum(1 + max(0, len(line) - 1) // console.width for line in text.splitlines())


def _groups(specs: Sequence[JobSpec], outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    """Return the outcomes of each group of two rollouts or more, named by its question, in the order of `specs`."""
    names = {spec.group_id: str(spec.instance.payload.get("question", spec.instance.instance_id)) for spec in specs}
    groups: dict[str, list[Outcome]] = {group_id: [] for group_id in names}
    for outcome in sorted(outcomes, key=attrgetter("job_id")):
        groups[outcome.group_id].append(outcome)
    return [(names[group_id], group) for group_id, group in groups.items() if len(group) > 1]


def _say(problem: str) -> None:
    console.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)


def _unready(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that say why no backend takes rollouts now, from a node's `status`.

    Yields nothing if a backend does, or if the status does not tell.
    """
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
