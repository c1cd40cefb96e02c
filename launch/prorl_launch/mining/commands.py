"""`prorl-trio tasks`: mine task sets from a package index."""

from __future__ import annotations

import os
import textwrap
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import trio
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from prorl_ipc.nursery import single_exception
from prorl_launch.mining.environments import LocalBench, find_uv
from prorl_launch.mining.index import index_settings, normal_name
from prorl_launch.mining.miner import Miner, MiningLimits, Wanted
from prorl_launch.mining.nearest import PUBLISHED_ROWS, build_published
from prorl_launch.mining.rows import Gold, load_tasks, read_gold, read_rows, save_task, write_lines
from prorl_launch.mining.verification import CHECKS, verify_row, verify_rows
from prorl_trio.client.terminal import Console, one_line, say
from prorl_trio.config import SandboxConfig
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.images.layers import find_layer
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.tasks.sets.mined import MINED_ROWS, mined_set_folder
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_launch.mining.rows import MinedTask


_MIB: Final = 1024 * 1024
_JOBS: Final = click.IntRange(1, 64)
GOLD: Final = "gold.jsonl"
MAX_REASON_CHARS: Final = 400

MINED_SETS: Final[dict[str, tuple[Wanted, ...]]] = {
    "sdist-swe": (
        Wanted("xmltodict", 6),
        Wanted("sqlparse", 6),
        Wanted("tomlkit", 6, ("pyyaml",)),
        Wanted("mistune", 6),
        Wanted("h11", 4),
        Wanted("cachetools", 6),
        Wanted("marshmallow", 6),
        Wanted("humanize", 6),
        Wanted("inflect", 4),
    ),
}


@click.group()
def tasks() -> None:
    """Mine, verify and export tasks made from package releases.

    A task describes the changes of a release, or one hunk. The tests of that release decide whether it is solved. The
    index is the one configured for pip.
    """


@tasks.command()
@click.argument("name", metavar="SET")
@click.argument("packages", nargs=-1, metavar="[PACKAGE]...")
@click.option(
    "--pairs", type=click.IntRange(min=1), default=4, show_default=True, help="Number of newest release pairs."
)
@click.option(
    "--hunks", type=click.IntRange(min=0), default=8, show_default=True, help="Candidates to try per release."
)
@click.option("--per-package", type=click.IntRange(min=1), default=6, show_default=True, help="Most tasks per package.")
@click.option("--require", multiple=True, help="Extra requirements of the tests. Repeatable.")
@click.option(
    "--jobs", type=_JOBS, default=os.cpu_count() or 1, help="Candidates at a time. Default: the number of cores."
)
def mine(
    name: str, packages: tuple[str, ...], pairs: int, hunks: int, per_package: int, require: tuple[str, ...], jobs: int
) -> None:
    """Mine packages into the task set SET. By default, use the packages of a built-in SET (sdist-swe).

    Candidates that were tried before are skipped, so the same command resumes an interrupted one. Refused candidates
    are stored with the reason.
    """
    if not packages and name not in MINED_SETS:
        raise click.UsageError(f"name the packages of {name}; only {', '.join(MINED_SETS)} has some by itself")
    wanted = [Wanted(normal_name(each), pairs, require) for each in packages] or [*MINED_SETS[name]]
    limits = MiningLimits(hunks=hunks, per_package=per_package)
    folder = mined_set_folder(name)
    find_uv()  # report a missing uv now, not at the first candidate
    settings = index_settings()
    console = Console()

    async def run() -> list[str]:
        with _bar(console) as bar:
            line = bar.add_task("candidates", total=None)

            def ended(task: MinedTask) -> None:
                bar.advance(line)
                said = " ".join(task.reason.split())
                reason = f": {textwrap.shorten(said, MAX_REASON_CHARS, placeholder=' ...')}" if said else ""
                bar.console.print(one_line(f"{task.status} {task.instance_id}{reason}"), soft_wrap=True)

            async with _open_bench(jobs) as bench:
                miner = Miner(bench, folder, settings, limits=limits, jobs=jobs, on_ended=ended)
                return await miner.mine(wanted)

    try:
        problems = trio.run(run)
    finally:
        verified = _write_set(folder)
    families = {task.row.family for task in verified if task.row is not None}
    console.print(f"{len(verified)} verified tasks of {len(families)} packages: {folder / MINED_ROWS}", soft_wrap=True)
    for problem in problems:
        say(f"error: {problem}", color="red", err=True)
    if problems:
        raise click.ClickException(f"{len(problems)} of {len(wanted)} packages were not mined to their end")


@tasks.command()
@click.argument("rows", metavar="FILE_OR_SET")
@click.option(
    "--gold", type=click.Path(path_type=Path), help="File of gold patches. Default: gold.jsonl beside the rows."
)
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first N rows.")
@click.option("--jobs", type=_JOBS, default=os.cpu_count() or 1, help="Rows at a time. Default: the number of cores.")
@click.option(
    "--results",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSONL file for the results, one line per row. Rows in the file are not run again.",
)
def verify(rows: str, gold: Path | None, limit: int | None, jobs: int, results: Path | None) -> None:
    """Run each row's tests before a change and with the gold patch, twice, and with changes that must not solve it.

    These are an empty patch, a patch that edits the tests, and hacks that a policy may try. The hacks are skips and
    expected failures in the code, forged reports, early exits, configuration, plug-ins and their own modules. Tests are
    graded as on a node. Exit code 1 if a check of a row failed, or could not be made.
    """
    path = mined_set_folder(rows) / MINED_ROWS if (mined_set_folder(rows) / MINED_ROWS).is_file() else Path(rows)
    found = read_rows(path)[:limit]
    patches = read_gold(gold or path.with_name(GOLD))
    console = Console()

    async def run() -> dict[str, dict[str, str]]:
        with _bar(console) as bar:
            line = bar.add_task("rows", total=len(found))
            async with _open_bench(jobs) as bench:
                return await verify_rows(
                    found,
                    lambda row: verify_row(bench, row, patches[row.instance_id].encode()),
                    jobs=jobs,
                    results=results,
                    on_ended=lambda: bar.advance(line),
                )

    missing = sorted({row.instance_id for row in found} - set(patches))
    if missing:
        raise ConfigError(f"{len(missing)} rows have no gold patch, the first is {missing[0]}")
    checked = trio.run(run)
    table = Table("row", "check", "what was wrong")
    wrong = set()
    for instance_id, verdicts in checked.items():
        for check, verdict in verdicts.items():
            if verdict != "right":
                wrong.add(instance_id)
                table.add_row(*map(one_line, (instance_id, check, verdict)))
    if wrong:
        console.print(table)
        raise click.ClickException(f"{len(wrong)} of {len(found)} rows are not as they must be")
    console.print(f"{len(checked)} rows: {', '.join(CHECKS)}: all right")


@tasks.command()
@click.option("--set", "name", default="sdist-published", show_default=True, help="Name of the new set.")
def published(name: str) -> None:
    """Port published rows (of SWE-Gym, SWE-rebench) to the nearest source archive, and verify them there.

    The rows are read from a wheel. If it is missing, the error contains the command that downloads it. Each row is
    labelled with its archive, and refused if a test's result differs from the row.
    """
    folder, settings = mined_set_folder(name), index_settings()

    async def run() -> list[MinedTask]:
        async with _open_bench(1) as bench:
            return [await build_published(each, bench, settings) for each in PUBLISHED_ROWS]

    for task in trio.run(run):
        save_task(task, folder)
        say(f"{task.status} {task.instance_id} {task.reason}".rstrip())
    say(f"{len(_write_set(folder))} verified tasks: {folder / MINED_ROWS}")


@tasks.command()
@click.argument("name", metavar="SET")
@click.option("--to", type=click.Path(path_type=Path), required=True, help="JSONL file for `submit` and `eval`.")
@click.option("--gold", type=click.Path(path_type=Path), help="File for the gold patches. No agent may read it.")
def export(name: str, to: Path, gold: Path | None) -> None:
    """Write the verified rows of a mined set, and print the layers that a node needs for them."""
    verified = [task for task in load_tasks(mined_set_folder(name)).values() if task.row is not None]
    if not verified:
        raise click.ClickException(f"{name} has no verified task: prorl-trio tasks mine {name}")
    write_lines(to, (task.row for task in verified))
    if gold is not None:
        write_lines(gold, (Gold(instance_id=task.instance_id, patch=task.gold) for task in verified))
    say(f"{to}: {len(verified)} tasks. A node needs these layers in its store:")
    for digest in sorted({layer for task in verified if task.row for layer in task.row.payload["layers"]}):
        layer = find_layer(digest)
        size = "missing here" if layer is None else f"{layer.record.size_bytes / _MIB:.1f} MiB"
        say(f"{digest}  {size}")


def _write_set(folder: Path) -> list[MinedTask]:
    verified = [task for task in load_tasks(folder).values() if task.row is not None]
    if verified:
        write_lines(folder / MINED_ROWS, (task.row for task in verified))
        write_lines(folder / GOLD, (Gold(instance_id=task.instance_id, patch=task.gold) for task in verified))
    return verified


def _bar(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console)


@asynccontextmanager
async def _open_bench(jobs: int) -> AsyncIterator[LocalBench]:
    config = SandboxConfig()
    provider = await choose_provider(config)
    with single_exception():
        async with open_sandbox_host(provider, max_concurrent_starts=jobs) as host:
            yield LocalBench(host, config)
