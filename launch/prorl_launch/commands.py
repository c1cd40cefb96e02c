"""`prorl-trio doctor` and `setup`: report installed and missing parts, and install them."""

from __future__ import annotations

import sys
from typing import Final, get_args

import click
import trio
from rich.table import Table

from prorl_ipc.portable_text import printable
from prorl_launch.doctor import Report, examine
from prorl_launch.environments import EngineKind
from prorl_launch.paths import default_engine
from prorl_launch.setup import set_up
from prorl_launch.slurm.doctor import examine_slurm
from prorl_trio.client.terminal import Console, say_json

_MARKS: Final = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "missing": "[red]missing[/red]"}


_PARTS: Final = {"engine": "engine", "runtime": "runtime", "trainers": "train", "apptainer": "apptainer"}
"""The parts of set-up, by their name in the command, with their internal name."""


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice([*_PARTS]), metavar="[engine|runtime|trainers|apptainer]...")
@click.option(
    "--engine",
    type=click.Choice(get_args(EngineKind)),
    default=default_engine,
    help="The build of vLLM and torch. Default: PRORL_ENGINE, else cpu.",
)
def setup(parts: tuple[str, ...], engine: EngineKind) -> None:
    """Install an engine, trainers or Apptainer.

    \b
    engine     vLLM in its own environment, and the demo's model: 3 minutes, 2.7 GB
    runtime    the Python of sandboxes in images other than `host`: 10 seconds, 100 MB
    trainers   the environment in which `prorl-trio learn` and TRL train: 2 minutes, 2.5 GB
    apptainer  the system package, on Debian and Ubuntu, by root or sudo

    By default, engine and runtime are installed. Complete parts are skipped, and interrupted ones are resumed.
    Everything except Apptainer is in the cache folder, ~/.cache/prorl-trio or PRORL_CACHE_DIR. Removing this folder
    uninstalls it.
    """
    sys.exit(set_up([_PARTS[part] for part in parts or ("engine", "runtime")], engine))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--no-engine", is_flag=True, help="Do not check for an engine and a model, because backends run elsewhere."
)
@click.option("--slurm", is_flag=True, help="Also check the requirements of a Slurm fleet, here or within a job.")
def doctor(as_json: bool, no_engine: bool, slurm: bool) -> None:
    """Report what is installed, what is missing, and how to fix it.

    Exit code 0 if a rollout can run on this machine, 1 otherwise.
    """
    report = trio.run(lambda: examine(default_engine(), with_engine=not no_engine))
    if slurm:
        more = examine_slurm()
        usable = report.usable and all(check.state != "missing" for check in more)
        report = Report(usable=usable, checks=[*report.checks, *more])
    if as_json:
        say_json(report)
    else:
        _print(report)
    sys.exit(0 if report.usable else 1)


def _print(report: Report) -> None:
    table = Table("what", "state")
    table.add_column("found", overflow="fold")
    for check in report.checks:
        table.add_row(check.name, _MARKS[check.state], _escape(check.detail))
    console = Console()
    console.print(table)
    for check in report.checks:
        if check.remedy:
            console.print(f"{_MARKS[check.state]} {check.name}. What to do: {_escape(check.remedy)}", soft_wrap=True)
    missing = ", ".join(check.name for check in report.checks if check.state == "missing")
    why = f"[red]no rollout can run here yet; missing: {_escape(missing)}[/red]"
    console.print("a rollout can run here" if report.usable else why)


def _escape(text: str) -> str:
    return printable(text).replace("[", r"\[")
