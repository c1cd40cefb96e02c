"""`prorl-trio top`: show the live state of a node in a terminal, once or repeatedly."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal

import click
import msgspec
import trio
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prorl_ipc.portable_text import printable_json
from prorl_trio.cli.connection import connection_options, with_client
from prorl_trio.client.terminal import one_line
from prorl_trio.runs.progress import console

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rich.console import Console, RenderableType

    from prorl_trio.cli.connection import Node


Sort = Literal["progress", "age", "stage", "turns"]
SORTS: Final = ("progress", "age", "stage", "turns")

BAR_CELLS: Final = 20
NARROW_COLUMNS: Final = 90
"""A terminal narrower than this many columns shows fewer columns of the job table."""
CHROME_LINES: Final = 3
"""Lines of a table other than its rows: the header, a rule, and the count of omitted rows."""
_ORDER: Final = {name: index for index, name in enumerate(("eval", "ran", "run", "ready", "init", "queued"))}


class TopOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `top`.

    `only_stuck` hides all other jobs, `once` prints one report and exits, `as_json` prints one line of JSON per report.
    """

    sort: Sort = "progress"
    only_stuck: bool = False
    once: bool = False
    as_json: bool = False
    interval_s: float = 1.0


class Rates:
    """Jobs, turns and tokens per second between two reports.

    The first report covers the time since the node started.
    """

    def __init__(self) -> None:
        self._last: Mapping[str, Any] = {}
        self._last_s = 0.0

    def update(self, report: Mapping[str, Any]) -> dict[str, float]:
        """Return the growth of the totals per second since the previous report."""
        totals, now_s = _part(report, "totals"), float(report.get("uptime_s", 0.0))
        if now_s < self._last_s:  # a different node answers now
            self._last, self._last_s = {}, 0.0
        used_s = max(now_s - self._last_s, 1e-3)
        rates = {name: (value - self._last.get(name, 0)) / used_s for name, value in totals.items()}
        self._last, self._last_s = totals, now_s
        return rates


def render_top(
    report: Mapping[str, Any], rates: Mapping[str, float], options: TopOptions, width: int, height: int | None = None
) -> RenderableType:
    """Return the whole report. If `height` is given, it contains only as many jobs as fit into that many lines."""
    backends = _part(report, "backends").get("backends", [])
    sessions = {name: each for name, each in _part(report, "sessions").items() if _matters(each)}
    parts: list[RenderableType] = [_head(report, rates), _stages(report), _sandboxes(report)]
    lines = 3 + len(_part(report, "pipeline").get("stages", {}))
    if backends:
        parts.append(_backends(backends))
        lines += len(backends) + 1 + sum(bool(each.get("error")) for each in backends)
    if sessions:
        parts.append(_sessions(sessions))
        lines += len(sessions) + 1
    rows = None if height is None else max(1, height - lines - CHROME_LINES)
    jobs = report.get("jobs", [])
    left_out = max(0, _part(report, "pipeline").get("jobs", 0) - len(jobs))
    parts.append(_jobs(jobs, left_out, options, width, rows))
    return Group(*parts)


def _part(report: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return one part of a report, or an empty mapping: not every node reports every part."""
    part = report.get(name)
    return part if isinstance(part, Mapping) else {}


def _head(report: Mapping[str, Any], rates: Mapping[str, float]) -> Text:
    loop = _part(report, "loop")
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(one_line(report.get("node_id", "")).plain, style="bold")
    head.append(f"  up {_seconds(report.get('uptime_s', 0.0))}")
    if report.get("draining"):
        head.append("  DRAINING", style="bold yellow")
    head.append(f"  {60 * rates.get('jobs_ended', 0.0):.1f} jobs/min")
    head.append(f"  {rates.get('turns', 0.0):.1f} turns/s")
    head.append(f"  {rates.get('tokens_sampled', 0.0):.0f} tokens/s")
    p99_ms = loop.get("p99_ms", 0.0)
    head.append(f"  loop p99 {p99_ms:.1f} ms, max {loop.get('max_ms', 0.0):.0f} ms", style="red" if p99_ms > 50 else "")
    return head


def _stages(report: Mapping[str, Any]) -> RenderableType:
    pipeline = _part(report, "pipeline")
    grid = Table.grid(padding=(0, 1))
    for name, stage in pipeline.get("stages", {}).items():
        busy, workers = stage.get("busy", 0), stage.get("workers", 0)
        full = round(BAR_CELLS * min(1.0, busy / workers)) if workers else 0
        bar = Text("#" * full, style="green") + Text("." * (BAR_CELLS - full), style="dim")
        grid.add_row(name.upper(), bar, f"{busy}/{workers} busy", f"{stage.get('queued', 0)} queued")
    outcomes = ", ".join(f"{count} {status}" for status, count in pipeline.get("outcomes", {}).items() if count)
    return Group(grid, Text(f"ended: {outcomes or 'none'}", no_wrap=True, overflow="ellipsis"))


def _sandboxes(report: Mapping[str, Any]) -> Text:
    sandboxes = _part(report, "sandboxes")
    said = ", ".join(f"{sandboxes.get(name, 0)} {name}" for name in ("live", "warm", "starting"))
    failed = sandboxes.get("failed_total", 0)
    text = f"sandboxes ({sandboxes.get('provider', '?')}): {said}; {sandboxes.get('started_total', 0)} started"
    return Text(f"{text}, {failed} failed", style="yellow" if failed else "", no_wrap=True, overflow="ellipsis")


def _backends(backends: list[Mapping[str, Any]]) -> RenderableType:
    """Return a table of the node's own tasks and the total load of each engine, followed by the errors.

    For the head of a fleet, the table names the node of each backend.
    """
    node = ["node"] if any("node_id" in backend for backend in backends) else []
    table = _table("backend", *node, "state", "tasks", "ever", "running", "waiting", "KV")
    errors = []
    for backend in backends:
        state = "suspended" if backend.get("suspended") else str(backend.get("state", ""))
        kv_usage, limit = backend.get("kv_usage"), backend.get("max_tasks") or ""
        table.add_row(
            one_line(backend.get("url", "")),
            *([one_line(backend.get("node_id", ""))] if node else []),
            Text(state, style="" if state == "active" else "yellow"),
            f"{backend.get('in_flight', 0)}{limit and f'/{limit}'}",
            str(backend.get("assigned_total", 0)),
            _known(backend.get("engine_running")),
            _known(backend.get("engine_waiting")),
            "" if kv_usage is None else f"{100 * kv_usage:.0f}%",
        )
        if error := str(backend.get("error", "")):
            url = str(backend.get("url", ""))
            said = one_line(error if error.startswith(url) else f"{url}: {error}").plain
            errors.append(Text(said, style="yellow", no_wrap=True, overflow="ellipsis"))
    return Group(table, *errors)


def _sessions(sessions: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _table("session", "", "running", "undelivered", "MB")
    for session_id, session in sessions.items():
        table.add_row(
            one_line(session_id),
            "connected" if session.get("connected") else Text("away", style="yellow"),
            str(session.get("running", 0)),
            str(session.get("undelivered", 0)),
            f"{session.get('undelivered_bytes', 0) / 1e6:.1f}",
        )
    return table


def _matters(session: Mapping[str, Any]) -> bool:
    """Return whether to show a session: it has a connection, jobs or outcomes. Every visitor has a session."""
    return any(session.get(name) for name in ("connected", "running", "undelivered"))


def _jobs(
    jobs: list[Mapping[str, Any]], left_out: int, options: TopOptions, width: int, rows: int | None
) -> RenderableType:
    """Return the table of jobs. `left_out` is the number of queued jobs that the report omits."""
    stuck = [job for job in jobs if job.get("stuck")]
    shown = sorted(stuck if options.only_stuck else jobs, key=lambda job: _key(job, options.sort))
    wide, programs = width >= NARROW_COLUMNS, any(job.get("agent") for job in jobs)
    columns = ["", "job", "stage", "age", "quiet", "waits for"]
    if wide:
        columns[2:2] = ["session", "agent"] if programs else ["session"]
        columns[-1:-1] = ["turns"]
    table, told = _table(*columns), 0
    for job in shown:
        others = job.get("other_waits", ())
        if rows is not None and table.row_count and table.row_count + 1 + len(others) > rows:
            break
        told += 1
        bad = bool(job.get("stuck"))
        cells: list[Text | str] = [
            Text("!" if bad else " ", style="bold red"),
            one_line(job.get("job_id", "")),
            str(job.get("status", "")),
            _seconds(job.get("age_s", 0.0)),
            _seconds(job.get("last_progress_s", 0.0)),
            one_line(job.get("waiting_on") or "(computing)"),
        ]
        if wide:
            cells[2:2] = [one_line(job.get("session_id", "")), one_line(job.get("agent", ""))][: 1 + programs]
            cells[-1:-1] = [str(job.get("turns", 0))]
        table.add_row(*cells, style="red" if bad else "")
        for wait in others:
            table.add_row(*[""] * (len(cells) - 1), one_line(wait), style="dim")
    total, queued = len(jobs) + left_out, left_out + sum(job.get("status") == "queued" for job in jobs)
    said = f"{total} jobs, {len(stuck)} stuck"
    if queued:
        said += f"; {total - queued} at work, {queued} queued"
    more = len(shown) - told + (0 if options.only_stuck else left_out)
    if more:
        said += f"; {more} more not shown"
    return Group(Text(said, style="bold red" if stuck else "bold"), table)


def _key(job: Mapping[str, Any], sort: Sort) -> tuple[Any, ...]:
    """Return the sort key of a job. Stuck jobs always come first and queued jobs last."""
    by: dict[Sort, Any] = {
        "progress": -job.get("last_progress_s", 0.0),
        "age": -job.get("age_s", 0.0),
        "stage": (_ORDER.get(str(job.get("status")), len(_ORDER)), -job.get("age_s", 0.0)),
        "turns": -job.get("turns", 0),
    }
    return (not job.get("stuck"), job.get("status") == "queued", by[sort])


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1), show_edge=False, header_style="bold dim")
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    return table


def _known(number: float | None) -> str:
    return "" if number is None else f"{number:.0f}"


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f}s"
    minutes = int(seconds // 60)
    return f"{minutes}m{int(seconds % 60):02d}" if minutes < 100 else f"{minutes // 60}h{minutes % 60:02d}"


@click.command()
@connection_options
@click.option("--once", is_flag=True, help="Print one report and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print each report as one line of JSON, as `status` does.")
@click.option("--sort", type=click.Choice(SORTS), default="progress", show_default=True, help="Sort order of the jobs.")
@click.option("--stuck", "only_stuck", is_flag=True, help="Show only jobs without progress for stuck_after_s.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two reports.",
)
def top(node: Node, **options: Any) -> None:
    """Watch a node live, and see what every job is waiting for. Ctrl-C exits.

    The view shows stages, backends, sandboxes, sessions and jobs. Stuck jobs come first, marked with `!`, then active
    jobs, then queued jobs. `quiet` is the time since the last event of a job. The lines below a job list the waiting
    dialogues of its other agents.
    """
    chosen = TopOptions(**options)
    with suppress(KeyboardInterrupt):
        with_client(node, lambda client: run_top(client.status, console, chosen))


async def run_top(status: Callable[[], Awaitable[Mapping[str, Any]]], console: Console, options: TopOptions) -> None:
    """Show the result of `status` every `interval_s` seconds, until cancelled or `once`.

    On a capable terminal the report is updated in place. Otherwise reports follow one another.
    """
    rates = Rates()
    in_place = console.is_terminal and not console.is_dumb_terminal and not options.once and not options.as_json
    if not in_place:
        while True:
            report = await status()
            if options.as_json:
                console.file.write(printable_json(msgspec.json.encode(report).decode()) + "\n")
                console.file.flush()
            else:
                console.print(render_top(report, rates.update(report), options, console.width))
            if options.once:
                return
            await trio.sleep(options.interval_s)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            report = await status()
            body = render_top(report, rates.update(report), options, console.width, console.height)
            live.update(body, refresh=True)
            await trio.sleep(options.interval_s)
