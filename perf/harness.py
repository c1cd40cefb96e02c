"""The base of all benchmarks: options, interleaved measuring, percentiles, and the three forms of a report.

A benchmark is an async function that returns a `Report`. `run_benchmark` gives it the common command line: `--quick`,
`--json FILE` and `--plot FILE`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec
import numpy as np
import trio
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Unit = Literal["ms", "us"]
PER_SECOND: dict[Unit, float] = {"ms": 1e3, "us": 1e6}
PERCENTS = (50, 95, 99)
DIGITS: Final = 5
"""Decimal places of the metrics in the file."""
PLOT_DPI = 120
FILE_COLUMNS = 120
INTERRUPTED = 130
"""Exit code of shells for a program that SIGINT ended."""
PACKAGES = ("trio", "msgspec", "ptyprocess", "IPython")
_BEGAN_S = time.monotonic()

Role = Literal["ours", "paper", "floor", "peer"]
ROLES: Final[dict[Role, tuple[str, str]]] = {
    "ours": ("tab:blue", "ours, measured in this run"),
    "paper": ("tab:red", "the paper's number"),
    "floor": ("lightgrey", "the floor: the machine alone"),
    "peer": ("tab:orange", "a peer, measured in this run"),
}
"""The owners of a value, with their colour and their label in the legend."""
MARKERS: Final = "osD^vPX*"
INCHES_PER_BAR: Final = 0.36

KeyT = TypeVar("KeyT")
CAPTIONS: Final = msgspec.toml.decode(Path(__file__).with_name("captions.toml").read_bytes(), type=dict[str, list[str]])


def caption_of(name: str, **values: object) -> list[str]:
    """Return the paragraphs of `captions.toml` below `name`, with `values` filled in; without empty paragraphs."""
    return [said for paragraph in CAPTIONS[name] if (said := paragraph.format(**values))]


class CannotRun(Exception):
    """The benchmark cannot run on this machine. The message contains the missing part and the remedy."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The command line. `quick`: under a minute in total, on a small machine."""

    quick: bool
    json_path: Path | None


def tell(doing: str) -> None:
    """Print the current measurement to standard error."""
    sys.stderr.write(f"{time.monotonic() - _BEGAN_S:4.0f} s  {doing}\n")


def describe_machine() -> str:
    """Return CPU, cores, memory, load, kernel and versions: figures mean nothing without them."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return (
        f"{cpu[0].partition(':')[2].strip() if cpu else platform.machine()}, {len(os.sched_getaffinity(0))} of "
        f"{os.cpu_count()} cores, {memory_gib:.0f} GiB, load {os.getloadavg()[0]:.1f}; "
        f"{platform.system()} {platform.release()}; Python {platform.python_version()}, {versions}"
    )


# ---------------------------------------------------------------- measuring


async def _measured_elsewhere() -> None:
    """Stand in for `Case.run` if samples come from elsewhere."""
    raise RuntimeError("this case is not for `measure_interleaved`")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A case to be timed.

    Attributes:
        name: dotted; the metrics are `NAME.p50_UNIT`, `NAME.p95_UNIT` and `NAME.p99_UNIT`.
        run: runs it once. Only this is timed. Omitted if samples are taken elsewhere.
        self_timed: `run` returns the seconds to count, as a float, timed closer to the work.
        burst: number of consecutive runs in each round. With 1 each run finds the caches as another case left them, as
            an agent's action does; a longer burst shows the cost of the code alone.
        every: runs only in every n-th round, for slow cases.
        floor: name of the case that shows the machine's limit. The ratio to it is the metric `NAME.x_floor`.
        peer: belongs to another project; the plot shows it in another colour.
        max_p50: upper limit of p50, in `unit`.
        max_x_floor: upper limit of the ratio to the floor.
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
        """Return a percentile, linear between samples."""
        return float(np.percentile(self.samples, percent))

    def percentiles_ms(self) -> list[float]:
        per_ms = PER_SECOND["ms"] / PER_SECOND[self.case.unit]
        return [self.percentile(percent) * per_ms for percent in PERCENTS]


async def measure_interleaved(cases: Sequence[Case], *, rounds: int, warm_up_rounds: int) -> list[Series]:
    """Time all cases side by side.

    Each round runs each case in a short burst, starting with a different case each time.

    A slow spell of the machine, a warm cache or a growing heap therefore affects ours and the floor alike. Warm-up
    rounds run every case and are not counted. An exception of a case ends the measurement.
    """
    samples: dict[str, list[float]] = {case.name: [] for case in cases}
    if len(samples) < len(cases):
        raise ValueError("two cases have the same name")
    for round_index in range(-warm_up_rounds, rounds):
        for case in rotated(cases, round_index):
            if round_index >= 0 and round_index % case.every:
                continue
            for _ in range(case.burst):
                started = time.perf_counter()
                returned = await case.run()
                taken_s = float(returned) if case.self_timed else time.perf_counter() - started
                if round_index >= 0:
                    samples[case.name].append(taken_s * PER_SECOND[case.unit])
    return [Series(case=case, samples=samples[case.name]) for case in cases]


def rotated(items: Sequence[KeyT], number: int) -> list[KeyT]:
    """Return the items in order, starting with a different item for each number."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


# ---------------------------------------------------------------- reports


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """A table of texts: `headings`, and rows with the same number of cells."""

    title: str
    headings: list[str]
    rows: list[list[str]]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.headings) for row in self.rows):
            raise ValueError(f"{self.title}: a row has not {len(self.headings)} cells")

    def shown(self) -> Table:
        table = Table(title=self.title)
        for place, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if place else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def rows_of(
    title: str,
    keys: Iterable[KeyT],
    columns: Mapping[str, Callable[[KeyT], str] | str],
    *,
    metrics: Mapping[str, float] | None = None,
    of: str = "",
) -> Rows:
    """Return a table with a row for each key, and a column for each heading.

    A column is a function of the key, or a text with names of metrics in braces, such as `{times:.2f} x`. The names are
    relative to `OF.KEY.`. The cell is empty if a metric of the key is missing.
    """
    every = metrics or {}

    def cell(column: Callable[[KeyT], str] | str, key: KeyT) -> str:
        if not isinstance(column, str):
            return column(key)
        start = f"{of}.{key}."
        with suppress(KeyError):
            return column.format_map({n.removeprefix(start): v for n, v in every.items() if n.startswith(start)})
        return ""

    rows = [[cell(column, key) for column in columns.values()] for key in keys]
    return Rows(title=title, headings=list(columns), rows=rows)


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A value. `high`: the end of its whisker, such as a 95th percentile; None: no whisker."""

    label: str
    value: float
    role: Role = "ours"
    high: float | None = None


class Bars(msgspec.Struct, frozen=True, kw_only=True, tag="bars"):
    """Horizontal bars in the given order. `unit` is the unit of their length."""

    title: str
    unit: str
    bars: list[Bar]
    logarithmic: bool = False


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Points (x, y) that belong together."""

    label: str
    points: list[tuple[float, float]]
    role: Role = "ours"


class Lines(msgspec.Struct, frozen=True, kw_only=True, tag="lines"):
    """Lines over a common x. `logarithmic`: both axes, to the base 2. `steps`: a value holds until the next one."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    logarithmic: bool = False
    steps: bool = False


Figure = Bars | Lines


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a benchmark.

    Attributes:
        title: title of the table.
        series: the timings.
        more_metrics: numbers other than timings of cases; rows of the table.
        detail_metrics: numbers for the file only; `tables` show them to people.
        at_least: lower limits of metrics. `at_most`: upper limits.
        tables: printed below the table.
        figures: the plots; without any, the cases are drawn as bars.
        notes: sentences for people: skipped parts with the reasons, and conditions.
    """

    title: str
    series: list[Series] = []
    more_metrics: dict[str, float] = {}
    detail_metrics: dict[str, float] = {}
    at_least: dict[str, float] = {}
    at_most: dict[str, float] = {}
    tables: list[Rows] = []
    figures: list[Figure] = []
    notes: list[str] = []

    def joined_with(self, other: Report) -> Report:
        """Return both reports as one, with this one's title."""
        joined: dict[str, Any] = {}
        for name in self.__struct_fields__[1:]:
            mine, theirs = getattr(self, name), getattr(other, name)
            joined[name] = mine | theirs if isinstance(mine, dict) else mine + theirs
        return Report(title=self.title, **joined)

    def ratio(self, series: Series) -> float | None:
        """Return p50 over the p50 of its floor; None without one."""
        floors = [other for other in self.series if other.case.name == series.case.floor]
        return series.percentile(50) / floors[0].percentile(50) if floors else None

    def metrics(self) -> dict[str, float]:
        """Return the content of the `--json` file."""
        metrics: dict[str, float] = {}
        for series in self.series:
            for percent in PERCENTS:
                metrics[f"{series.case.name}.p{percent}_{series.case.unit}"] = series.percentile(percent)
            if (ratio := self.ratio(series)) is not None:
                metrics[f"{series.case.name}.x_floor"] = ratio
        return {
            name: round(value, DIGITS) for name, value in (metrics | self.more_metrics | self.detail_metrics).items()
        }

    def missed(self) -> list[str]:
        """Return a sentence for each missed target."""
        missed = []
        for series in self.series:
            case, p50, ratio = series.case, series.percentile(50), self.ratio(series)
            if case.max_p50 is not None and p50 >= case.max_p50:
                missed.append(f"{case.name}: p50 is {p50:.3g} {case.unit}, to be below {case.max_p50:g}")
            if case.max_x_floor is not None and ratio is not None and ratio >= case.max_x_floor:
                missed.append(f"{case.name}: is {ratio:.2f} times {case.floor}, to be below {case.max_x_floor:g}")
        metrics = self.metrics()
        for targets, words, sign in ((self.at_least, "at least", 1), (self.at_most, "at most", -1)):
            missed += [
                f"{name}: is {metrics[name]:.3g}, to be {words} {target:g}"
                for name, target in targets.items()
                if name in metrics and sign * metrics[name] < sign * target
            ]
        return missed

    def table(self) -> Rows:
        rows = []
        for series in self.series:
            case, ratio = series.case, self.ratio(series)
            targets = [f"< {case.max_p50:g} {case.unit}"] if case.max_p50 is not None else []
            targets += [f"< {case.max_x_floor:g} x"] if case.max_x_floor is not None else []
            percentiles = [f"{series.percentile(percent):.3g} {case.unit}" for percent in PERCENTS]
            over_floor = "" if ratio is None else f"{ratio:.2f}"
            rows.append([case.name, str(len(series.samples)), *percentiles, over_floor, ", ".join(targets)])
        for name, value in self.more_metrics.items():
            target = f">= {self.at_least[name]:g}" if name in self.at_least else ""
            target = f"<= {self.at_most[name]:g}" if name in self.at_most else target
            rows.append([name, "", f"{round(value, 3):g}", "", "", "", target])
        headings = ["case", "n", "p50", "p95", "p99", "x floor", "target"]
        return Rows(title=self.title, headings=headings, rows=rows)

    def write_json(self, path: Path) -> None:
        """Write `metrics` as one JSON object, in the order of the cases."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self.metrics()), indent=2) + b"\n")

    def write_plot(self, path: Path) -> bool:
        """Write the figures, or p50 of the cases with p95 as whiskers.

        Return False, without a file, if matplotlib is missing.
        """
        floors = {series.case.floor for series in self.series}
        bars = []
        for series in self.series:
            p50, p95, _ = series.percentiles_ms()
            role: Role = "floor" if series.case.name in floors else "peer" if series.case.peer else "ours"
            bars.append(Bar(label=series.case.name, value=p50, role=role, high=p95))
        cases = [Bars(title=self.title, unit="ms (p50; whisker to p95)", bars=bars, logarithmic=True)] if bars else []
        return draw(self.figures or cases, path)


# ---------------------------------------------------------------- drawing


def can_draw() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(figures: Sequence[Figure], path: Path) -> bool:
    """Write all figures to one file, one below the other, in the format of its suffix.

    Returns False, without a file, if matplotlib or figures are missing.
    """
    if not can_draw() or not figures:
        return False
    mpl: Any = importlib.import_module("matplotlib")
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "prorl-trio"
    heights = [1.6 + INCHES_PER_BAR * len(figure.bars) if isinstance(figure, Bars) else 4.0 for figure in figures]
    whole: Any = importlib.import_module("matplotlib.figure").Figure(figsize=(8, sum(heights)), layout="constrained")
    axes = whole.subplots(len(figures), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, figure in zip(axes, figures, strict=True):
        if isinstance(figure, Bars):
            _bars(ax, figure)
        else:
            _lines(ax, figure)
        ax.set_title(figure.title, fontsize=10)
        ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    metadata = {"Date": None} if path.suffix == ".svg" else None
    whole.savefig(path, dpi=PLOT_DPI, metadata=metadata)
    return True


def _bars(ax: Any, figure: Bars) -> None:
    seen: set[str] = set()
    for place, bar in enumerate(figure.bars):
        color, words = ROLES[bar.role]
        whisker = None if bar.high is None else [[0.0], [max(0.0, bar.high - bar.value)]]
        label = None if bar.role in seen else words
        seen.add(bar.role)
        ax.barh(place, bar.value, xerr=whisker, color=color, ecolor="grey", capsize=2, label=label)
        ax.annotate(f" {bar.value:.3g}", (max(bar.value, bar.high or 0.0), place), va="center", fontsize=7)
    ax.set_yticks(range(len(figure.bars)), [bar.label for bar in figure.bars], fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.15)
    if figure.logarithmic:
        ax.set_xscale("log")
    ax.set_xlabel(figure.unit, fontsize=8)


def _lines(ax: Any, figure: Lines) -> None:
    one_color = len({line.role for line in figure.lines}) == 1
    for number, line in enumerate(figure.lines):
        color, style = None if one_color else ROLES[line.role][0], "--" if line.role in ("paper", "peer") else "-"
        marker = None if figure.steps else MARKERS[number % len(MARKERS)]
        drawn = "steps-post" if figure.steps else "default"
        xs, ys = zip(*line.points, strict=True)
        ax.plot(xs, ys, style, marker=marker, color=color, label=line.label, markersize=5, drawstyle=drawn)
    if figure.logarithmic:
        ticks = sorted({x for line in figure.lines for x, _ in line.points})
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xlabel(figure.x_label, fontsize=8)
    ax.set_ylabel(figure.y_label, fontsize=8)
    ax.grid(alpha=0.3)


# ---------------------------------------------------------------- the command line

Benchmark = Callable[[Options], Awaitable[Report]]


async def _measured(benchmark: Benchmark, options: Options) -> Report:
    try:
        return await benchmark(options)
    except CannotRun as exc:
        raise SystemExit(str(exc)) from exc


def _measure(benchmark: Benchmark, options: Options) -> Report | None:
    """Return the report; None after Ctrl-C."""
    try:
        return trio.run(_measured, benchmark, options)
    except* KeyboardInterrupt:
        pass
    return None


def run_benchmark(benchmark: Benchmark, argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run, print the table, and write the requested files. Return 0, or 130 after Ctrl-C.

    A missed target is printed, but is not an error, because the machine may be the cause. Exceptions of the benchmark
    pass, except `CannotRun`, which ends the program with its message.
    """
    parser = argparse.ArgumentParser(
        description=sys.modules[benchmark.__module__].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples: under 60 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help='write {"metric": number}, and a plot beside it')
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the plot there: .svg, .png or .pdf")
    arguments = parser.parse_args(argv)
    options = Options(quick=arguments.quick, json_path=arguments.json)
    report = _measure(benchmark, options)
    if report is None:
        print("ended by Ctrl-C: nothing is reported, nothing was written", file=sys.stderr)
        return INTERRUPTED
    console = Console(width=None if sys.stdout.isatty() else FILE_COLUMNS)
    for rows in (report.table(), *report.tables):
        console.print(rows.shown())
    took_s = time.monotonic() - _BEGAN_S
    for note in (*report.notes, f"measured on: {describe_machine()}; in {took_s:.0f} s"):
        console.print(note, style="dim", highlight=False, markup=False)
    for sentence in report.missed():
        console.print(f"missed: {sentence}", style="yellow", highlight=False)
    plot: Path | None = arguments.plot
    if options.json_path is not None:
        report.write_json(options.json_path)
        plot = plot or options.json_path.with_suffix(".png")
    if plot is not None and not report.write_plot(plot):
        console.print("no plot: matplotlib is not installed, or there is nothing to draw", style="dim")
    return 0
