"""`prorl-trio simulate`: find the number of workers that a node needs, in simulated time."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.table import Table

from prorl_trio.client.terminal import say_json
from prorl_trio.runs.progress import console
from prorl_trio.simulation.config import SimulationConfig, load_simulation
from prorl_trio.simulation.run import (
    SIZES,
    SimulationReport,
    Sized,
    double_each,
    enough,
    resized,
    run_simulation,
    sweep,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@click.command()
@click.option("--config", "path", type=click.Path(path_type=Path), help="Path of sim.toml. Default: see below.")
@click.option("--seed", type=int, help="Overrides the configuration.")
@click.option("--jobs", type=click.IntRange(min=1), help="Overrides the configuration.")
@click.option(
    "--set", "fixed", multiple=True, metavar="NAME=VALUE", help="Override a field of the configuration. Repeatable."
)
@click.option(
    "--sweep", "swept", multiple=True, metavar="NAME=V1,V2,...", help="Simulate all combinations of these values."
)
@click.option("--double", is_flag=True, help="Also simulate twice the workers of each kind, to find the bottleneck.")
@click.option("--json", "as_json", is_flag=True, help="Print the reports as JSON.")
def simulate(
    path: Path | None,
    seed: int | None,
    jobs: int | None,
    fixed: tuple[str, ...],
    swept: tuple[str, ...],
    double: bool,
    as_json: bool,
) -> None:
    """Size a node on a laptop. The real pipeline runs minutes per second over a simulated engine and sandboxes.

    NAME is init_workers, run_workers, eval_workers, sandbox_starts, engines, or the path of any field, such as
    engine.max_batch or work.turns.p50. The same seed gives the same figures.

    \b
    A sim.toml. Omitted fields have the values below, or a node's defaults:
        jobs = 512
        [stages]                       # as in node.toml, like [sandbox], [budgets], [backends] and [agent]
        run_workers = 32
        [engine]                       # each of `count` backends
        count = 1
        max_batch = 64
        kv_tokens = 1_000_000
        prefill_tokens_per_s = 20_000
        tokens_per_s = { value = 60 }  # of a single completion that runs alone
        max_tokens_per_s = 2_500       # of all completions together
        speeds = []                    # of the first ones, as factors: [0.5] makes the first half as fast
        [work]                         # p50 and p95, or value, or percentiles = [[0, 0.1], [50, 2], [100, 9]]
        turns = { p50 = 8, p95 = 20 }
        tool_s = { p50 = 0.4, p95 = 6 }
        evaluation_s = { p50 = 4, p95 = 30 }
        [failures]                     # probabilities
        sandbox_start = 0.01
    """
    config = load_simulation(path) if path is not None else SimulationConfig()
    chosen = {name: value for name, value in (("seed", seed), ("jobs", jobs)) if value is not None}
    config = resized(config, chosen | dict(map(_setting, fixed)))
    with _quiet():
        if swept:
            _show_sweep(list(sweep(config, dict(map(_assignment, swept)))), as_json=as_json)
        else:
            report = run_simulation(config)
            _show_one(config, report, as_json=as_json)
            if double and not as_json:
                console.print(_sized_table(list(double_each(config)), "twice of one thing", report.jobs_per_h))


def _show_sweep(tried: Sequence[Sized], *, as_json: bool) -> None:
    if as_json:
        say_json(msgspec.json.encode(tried))
        return
    best = enough(tried)
    console.print(_sized_table(tried, "jobs an hour, against what is enough", best.report.jobs_per_h, best))
    limit = best.report.bottleneck
    more = limit in best.setting and best.setting[limit] == max(one.setting[limit] for one in tried)
    said = f"what limits then: {limit}{', and more of it was not tried' if more else ''}"
    console.print(f"enough: {_said(best)}; {said}", soft_wrap=True)


def _show_one(config: SimulationConfig, report: SimulationReport, *, as_json: bool) -> None:
    if as_json:
        say_json(msgspec.json.encode(report))
        return
    for table in (_use_table(report), _wait_table(report)):
        console.print(table)
    console.print(_summary(config, report))


def _setting(said: str) -> tuple[str, Any]:
    name, values = _assignment(said)
    if len(values) > 1:
        raise click.BadParameter(f"{said!r} sets several values; to try each, use --sweep")
    return name, values[0]


def _assignment(said: str) -> tuple[str, list[Any]]:
    name, equals, values = said.partition("=")
    if not equals or not values:
        raise click.BadParameter(f"{said!r} is not NAME=VALUE; NAME is a path, or one of {', '.join(SIZES)}")
    return name.strip(), [_value(value) for value in values.split(",")]


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text.strip())
    except msgspec.DecodeError:
        return text.strip()


def _summary(config: SimulationConfig, report: SimulationReport) -> str:
    failures = ", ".join(f"{count} {cause}" for cause, count in report.failures.items()) or "none"
    moves = ", ".join(f"{count} by {reason}" for reason, count in report.moves.items()) or "none"
    return (
        f"{report.jobs_per_h:,.0f} jobs/h; {report.tokens_per_s:,.0f} tokens/s, {report.turns_per_s:.1f} turns/s; "
        f"{config.jobs} jobs in {report.makespan_s:,.0f} s\n"
        f"completed: {report.completed}; failed: {failures}; retried: {report.retried}; "
        f"prefix cache hits: {100 * report.prefix_hit_rate:.0f} %; moved to another engine: {moves}\n"
        f"the bottleneck: {report.bottleneck}"
    )


def _use_table(report: SimulationReport) -> Table:
    table = Table(title="in use, between the first tenth of the jobs and the last")
    table.add_column("resource")
    for heading in ("capacity", "mean", "held up", "full"):
        table.add_column(heading, justify="right")
    for use in report.use:
        mark = "bold" if use.name == report.bottleneck else None
        held = f"{use.held:.1f}" if use.held > 0.05 else ""
        table.add_row(use.name, f"{use.capacity:g}", f"{use.mean:,.1f}", held, f"{100 * use.full:.0f} %", style=mark)
    return table


def _wait_table(report: SimulationReport) -> Table:
    table = Table(title="where completed jobs spent their time, s")
    table.add_column("")
    for heading in ("mean", "p50", "p95"):
        table.add_column(heading, justify="right")
    for name, wait in report.waits.items():
        table.add_row(name, f"{wait.mean_s:.1f}", f"{wait.p50_s:.1f}", f"{wait.p95_s:.1f}")
    return table


def _sized_table(tried: Sequence[Sized], title: str, than_jobs_per_h: float, chosen: Sized | None = None) -> Table:
    """Return a table of the sizes that were tried. The third column is relative to `than_jobs_per_h`."""
    table = Table(title=title)
    table.add_column("setting")
    for heading in ("jobs/h", "", "failed"):
        table.add_column(heading, justify="right")
    table.add_column("bottleneck")
    for one in tried:
        report = one.report
        table.add_row(
            _said(one),
            f"{report.jobs_per_h:,.0f}",
            f"{100 * (report.jobs_per_h / than_jobs_per_h - 1):+.0f} %",
            str(sum(report.failures.values())),
            report.bottleneck,
            style="bold" if one is chosen else None,
        )
    return table


def _said(one: Sized) -> str:
    return ", ".join(f"{name} = {value}" for name, value in one.setting.items())


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the log of failures, because the simulation injects them on purpose."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
