"""The base of all benchmarks: options, interleaved measuring, percentiles, and the three forms of a report.

A benchmark is an async function that returns a `Report`; `run_benchmark` gives it the command line that every benchmark
has: `--quick` and `--json FILE`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import trio
from rich.console import Console
from rich.table import Table

from perf.machine import describe_machine

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Case", "Options", "Report", "Series", "measure_interleaved", "run_benchmark", "tell"]

Unit = Literal["ms", "us"]
PER_SECOND: dict[Unit, float] = {"ms": 1e3, "us": 1e6}
PERCENTS = (50, 95, 99)
PLOT_DPI = 120
FILE_COLUMNS = 120
INTERRUPTED = 130
"""Exit code of shells for a program that was ended by SIGINT."""
_BEGAN_S = time.monotonic()


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The command line. `quick`: under a minute in all, on a small machine. `beside`: a checkout to compare with."""

    quick: bool
    json_path: Path | None
    beside: Path | None = None


def tell(doing: str) -> None:
    """Say on standard error what is measured now, for who waits."""
    sys.stderr.write(f"{time.monotonic() - _BEGAN_S:4.0f} s  {doing}\n")


async def _measured_elsewhere() -> None:
    """Stands in for `Case.run` where samples come from elsewhere."""
    raise RuntimeError("this case is not for `measure_interleaved`")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A case to be timed.

    Attributes:
        name: dotted; the metrics are `NAME.p50_UNIT`, `NAME.p95_UNIT` and `NAME.p99_UNIT`.
        run: does it once. Only this is timed. Left out where samples are taken elsewhere.
        self_timed: `run` returns the seconds to count, as a float: it was timed nearer to the work.
        burst: how often it runs in a row, in each round. With 1 each run finds the caches as another case left them,
            as an agent's action does; a longer row shows the cost of the code alone.
        every: takes part in every n-th round only, for what is slow.
        floor: name of the case that shows what the machine allows. Its ratio is the metric `NAME.x_floor`.
        peer: is somebody else's; the plot has it in another colour.
        max_p50: what p50 is to stay below, in `unit`.
        max_x_floor: what the ratio to the floor is to stay below.
    """

    name: str
    run: Callable[[], Awaitable[Any]] = _measured_elsewhere
    unit: Unit = "ms"
    self_timed: bool = False
    burst: int = 1
    every: int = 1
    floor: str | None = None
    peer: bool = False
    max_p50: float | None = None
    max_x_floor: float | None = None


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one case, in its unit."""

    case: Case
    samples: list[float]

    def percentile(self, percent: float) -> float:
        """Linear between samples, as numpy has it."""
        return float(np.percentile(self.samples, percent))


async def measure_interleaved(cases: Sequence[Case], *, rounds: int, warm_up_rounds: int) -> list[Series]:
    """Time all cases side by side: each round runs each, in a short burst, beginning with another one each time.

    So a slow spell of the machine, a warm cache or a growing heap meets ours and the floor alike. Warm-up rounds run
    every case and count nothing. What a case raises ends the measurement.
    """
    samples: dict[str, list[float]] = {case.name: [] for case in cases}
    if len(samples) < len(cases):
        raise ValueError("two cases have the same name")
    for round_index in range(-warm_up_rounds, rounds):
        first = round_index % len(cases)
        for case in (*cases[first:], *cases[:first]):
            if round_index >= 0 and round_index % case.every:
                continue
            for _ in range(case.burst):
                started = time.perf_counter()
                returned = await case.run()
                taken_s = float(returned) if case.self_timed else time.perf_counter() - started
                if round_index >= 0:
                    samples[case.name].append(taken_s * PER_SECOND[case.unit])
    return [Series(case=case, samples=samples[case.name]) for case in cases]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a benchmark.

    Attributes:
        title: over the table.
        series: the timings.
        more_metrics: numbers that are no timings of cases; rows of the table.
        detail_metrics: numbers for the file only; `more_tables` show them to people.
        at_least: what metrics are to reach. `at_most`: what they are to stay within.
        more_tables: printed below the table.
        notes: a sentence each, for people: what was left out and why, under which conditions.
    """

    title: str
    series: list[Series]
    more_metrics: dict[str, float] = {}
    detail_metrics: dict[str, float] = {}
    at_least: dict[str, float] = {}
    at_most: dict[str, float] = {}
    more_tables: list[Table] = []
    notes: list[str] = []

    def joined_with(self, other: Report) -> Report:
        """Both in one; the title is this one's."""
        return Report(
            title=self.title,
            series=self.series + other.series,
            more_metrics=self.more_metrics | other.more_metrics,
            detail_metrics=self.detail_metrics | other.detail_metrics,
            at_least=self.at_least | other.at_least,
            at_most=self.at_most | other.at_most,
            more_tables=self.more_tables + other.more_tables,
            notes=self.notes + other.notes,
        )

    def ratio(self, series: Series) -> float | None:
        """p50 over the p50 of its floor; None without one."""
        floors = [other for other in self.series if other.case.name == series.case.floor]
        return series.percentile(50) / floors[0].percentile(50) if floors else None

    def metrics(self) -> dict[str, float]:
        """Flat: what `--json` writes."""
        metrics: dict[str, float] = {}
        for series in self.series:
            for percent in PERCENTS:
                metrics[f"{series.case.name}.p{percent}_{series.case.unit}"] = round(series.percentile(percent), 4)
            if (ratio := self.ratio(series)) is not None:
                metrics[f"{series.case.name}.x_floor"] = round(ratio, 3)
        return metrics | self.more_metrics | self.detail_metrics

    def missed(self) -> list[str]:
        """A sentence for each target that was not met."""
        missed = []
        for series in self.series:
            case, p50, ratio = series.case, series.percentile(50), self.ratio(series)
            if case.max_p50 is not None and p50 >= case.max_p50:
                missed.append(f"{case.name}: p50 is {p50:.3g} {case.unit}, to be below {case.max_p50:g}")
            if case.max_x_floor is not None and ratio is not None and ratio >= case.max_x_floor:
                missed.append(f"{case.name}: is {ratio:.2f} times {case.floor}, to be below {case.max_x_floor:g}")
        metrics = self.metrics()
        missed += [
            f"{name}: is {metrics[name]:.3g}, to be at least {least:g}"
            for name, least in self.at_least.items()
            if name in metrics and metrics[name] < least
        ]
        missed += [
            f"{name}: is {metrics[name]:.3g}, to be at most {most:g}"
            for name, most in self.at_most.items()
            if name in metrics and metrics[name] > most
        ]
        return missed

    def table(self) -> Table:
        """For people."""
        table = Table(title=self.title)
        table.add_column("case")
        for heading in ("n", "p50", "p95", "p99", "x floor", "target"):
            table.add_column(heading, justify="right")
        for series in self.series:
            case, ratio = series.case, self.ratio(series)
            targets = [f"< {case.max_p50:g} {case.unit}"] if case.max_p50 is not None else []
            targets += [f"< {case.max_x_floor:g} x"] if case.max_x_floor is not None else []
            table.add_row(
                case.name,
                str(len(series.samples)),
                *(f"{series.percentile(percent):.3g} {case.unit}" for percent in PERCENTS),
                "" if ratio is None else f"{ratio:.2f}",
                ", ".join(targets),
            )
        for name, value in self.more_metrics.items():
            target = f">= {self.at_least[name]:g}" if name in self.at_least else ""
            target = f"<= {self.at_most[name]:g}" if name in self.at_most else target
            table.add_row(name, "", f"{value:g}", "", "", "", target)
        return table

    def write_json(self, path: Path) -> None:
        """`metrics` as one JSON object, in the order of the cases."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self.metrics()), indent=2) + b"\n")

    def write_plot(self, path: Path) -> bool:
        """p50 as bars, p95 as whiskers, on a logarithmic scale. False, and no file, where matplotlib is missing."""
        if importlib.util.find_spec("matplotlib") is None:
            return False
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
        pyplot.switch_backend("agg")
        floors = {series.case.floor for series in self.series}
        figure, axes = pyplot.subplots(figsize=(8, 1 + 0.4 * len(self.series)))
        for series in reversed(self.series):
            per_ms = PER_SECOND["ms"] / PER_SECOND[series.case.unit]
            p50, p95 = series.percentile(50) * per_ms, series.percentile(95) * per_ms
            own_color = "tab:orange" if series.case.peer else "tab:blue"
            color = "lightgrey" if series.case.name in floors else own_color
            axes.barh(series.case.name, p50, xerr=[[0], [p95 - p50]], color=color, ecolor="grey", capsize=2)
        axes.set_xscale("log")
        axes.set_xlabel("ms (p50, whisker to p95; blue: ours, grey: floors, orange: peers)")
        axes.set_title(self.title)
        figure.text(0.01, 0, describe_machine(), fontsize=5, va="bottom", color="grey")
        figure.tight_layout()
        figure.savefig(path, dpi=PLOT_DPI)
        pyplot.close(figure)
        return True


def _measure(benchmark: Callable[[Options], Awaitable[Report]], options: Options) -> Report | None:
    """Return what was measured; None if Ctrl-C ended it."""
    try:
        return trio.run(benchmark, options)
    except* KeyboardInterrupt:
        pass
    return None


def run_benchmark(
    benchmark: Callable[[Options], Awaitable[Report]], argv: Sequence[str] | None = None, *, compares: bool = False
) -> int:
    """Parse the command line, run, print the table, write the files asked for. Returns 0, or 130 after Ctrl-C.

    A benchmark that `compares` checkouts has the option `--beside`.

    A missed target is said, but is no error: it may be the machine's doing. What the benchmark raises flies.
    """
    parser = argparse.ArgumentParser(
        description=sys.modules[benchmark.__module__].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples: under 60 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help='write {"metric": number}, and a plot beside it')
    if compares:
        parser.add_argument(
            "--beside", type=Path, metavar="CHECKOUT", help="measure another checkout in alternation, and the ratios"
        )
    arguments = parser.parse_args(argv)
    beside = arguments.beside.resolve(strict=True) if compares and arguments.beside else None
    options = Options(quick=arguments.quick, json_path=arguments.json, beside=beside)
    report = _measure(benchmark, options)
    if report is None:
        print("ended by Ctrl-C: nothing is reported, nothing was written", file=sys.stderr)
        return INTERRUPTED
    console = Console(width=None if sys.stdout.isatty() else FILE_COLUMNS)
    for table in (report.table(), *report.more_tables):
        console.print(table)
    took_s = time.monotonic() - _BEGAN_S
    for note in (*report.notes, f"measured on: {describe_machine()}; in {took_s:.0f} s"):
        console.print(note, style="dim", highlight=False, markup=False)
    for sentence in report.missed():
        console.print(f"missed: {sentence}", style="yellow", highlight=False)
    if options.json_path is not None:
        report.write_json(options.json_path)
        if not report.write_plot(options.json_path.with_suffix(".png")):
            console.print("no plot: matplotlib is not installed", style="dim")
    return 0
