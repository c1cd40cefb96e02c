"""The cost of the tool path on an agent's work: a recorded trace of 200 shell commands over a small project.

The trace runs through ours, a bare pty, OpenHands' terminal on tmux and SWE-ReX.

    python -m perf.peers setup                         # once: the peers' environments
    python -m perf.trace [--quick] [--json FILE]

Every system has its own copy of the project and its own persistent shell. They run the trace side by side, each command
on each system before the next, another one first each time. A command counts for a system only if its exit code and its
output equal the bare pty's. Ours and the floor run several rounds, in new shells and new copies; peers run the first.
"""

from __future__ import annotations

import importlib.util
import shutil
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from perf.harness import PERCENTS, Case, Options, Report, Series, run_benchmark
from perf.peers.environments import PeerUnavailable
from perf.trace_figures import Answered, Figures, Step, figures_of, words_of
from perf.trace_systems import FLOOR, FLOOR_AGAIN, OURS, PEER_SYSTEMS, Workspace, make_workspace, open_system

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.trace_systems import Run

TRACE_PATH = Path(__file__).with_name("traces") / "agent_shell.jsonl"
QUICK_STEPS = 29
SHOWN_WRONG = 5
QUICK_ROUNDS, ROUNDS = 4, 5
AT_LEAST = {"trace.tmux_over_ours": 50.0, "trace.swerex_over_ours": 20.0}
TITLES = {
    FLOOR: "bare pty",
    FLOOR_AGAIN: "another bare pty",
    OURS: "ours",
    **{name: name for name in PEER_SYSTEMS},
}
NOTES = [
    "Overhead is time beyond the bare pty's for the same command in the same round. A second bare pty shows the noise: "
    "in ratios it stands in for an overhead of ours that is smaller.",
    "`_over_ours` compares overheads, `_over_ours_whole` times with the commands' own work in them; the paper's step "
    "from tmux to a pty, 0.78 s to 0.42 s an action, is a factor of 1.86 of the latter kind.",
    "Peers are called in their own process, without the pipe to it being charged; SWE-ReX without its HTTP server.",
]


def load_trace() -> list[Step]:
    """The recorded commands, in their order: each needs what those before it left."""
    return msgspec.json.Decoder(Step).decode_lines(TRACE_PATH.read_bytes())


async def benchmark(options: Options) -> Report:
    """Run the trace through all systems that there are."""
    if shutil.which("git") is None or importlib.util.find_spec("pytest") is None:
        raise RuntimeError("the trace runs git and pytest: install git, and this project's extra `perf`")
    steps = load_trace()[: QUICK_STEPS if options.quick else None]
    answers: dict[str, list[list[Answered]]] = {}
    failures: dict[str, str] = {}
    for number in range(QUICK_ROUNDS if options.quick else ROUNDS):
        names = [FLOOR, OURS, FLOOR_AGAIN, *(PEER_SYSTEMS if number == 0 else ())]
        for name, answered in (await run_round(steps, names, failures)).items():
            answers.setdefault(name, []).append(answered)
    figures = {name: figures_of(steps, rounds, answers[FLOOR]) for name, rounds in answers.items()}
    if not figures[OURS].steps:
        raise RuntimeError("ours answered every command otherwise than the bare pty")
    return report_of(steps, {name: one for name, one in figures.items() if one.steps}, failures)


async def run_round(steps: Sequence[Step], names: Sequence[str], failures: dict[str, str]) -> dict[str, list[Answered]]:
    """Every step on every system, interleaved. A peer that fails ends there, and `failures` gets its reason."""
    async with AsyncExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-trace-")))
        running: dict[str, tuple[Workspace, Run]] = {}
        for index, name in enumerate(names):
            workspace = make_workspace(base / f"{index:02d}")
            try:
                running[name] = (workspace, await stack.enter_async_context(open_system(name, workspace)))
            except PeerUnavailable as exc:
                failures[name] = str(exc)
        answers: dict[str, list[Answered]] = {name: [] for name in running}
        for index, step in enumerate(steps):
            order = list(running)
            first = index % len(order)
            for name in (*order[first:], *order[:first]):
                workspace, run = running[name]
                try:
                    answer = await run(step.command)
                except PeerUnavailable as exc:
                    failures[name] = str(exc)
                    del running[name]
                else:
                    words = words_of(answer.output, root=str(workspace.root), command=step.command)
                    answers[name].append(Answered(answer.elapsed_s, answer.exit_code, words))
    return answers


def report_of(steps: Sequence[Step], figures: dict[str, Figures], failures: dict[str, str]) -> Report:
    """Ratios are over the steps that both sides answered right. Peers without a right answer are left out."""
    ours, floor = figures[OURS], figures[FLOOR]
    both = sorted(set(ours.steps) & set(floor.steps))
    ours_s, floor_s = ours.among(ours.elapsed_s, both), floor.among(floor.elapsed_s, both)
    noise_s = abs(sum(figures[FLOOR_AGAIN].overhead_s))
    metrics = {
        "trace.commands": float(len(steps)),
        "trace.ours_over_pty": statistics.median(ours_s) / statistics.median(floor_s),
        "trace.ours_over_pty_total": sum(ours_s) / sum(floor_s),
    }
    for name in PEER_SYSTEMS:
        if (peer := figures.get(name)) is not None and (both := sorted(set(ours.steps) & set(peer.steps))):
            overhead_s = max(sum(ours.among(ours.overhead_s, both)), noise_s)
            metrics[f"trace.{name}_over_ours"] = sum(peer.among(peer.overhead_s, both)) / overhead_s
            whole_s = sum(ours.among(ours.first_s, both))
            metrics[f"trace.{name}_over_ours_whole"] = sum(peer.among(peer.first_s, both)) / whole_s
    return Report(
        title=f"trace: {len(steps)} shell commands of an agent",
        series=[series_of(name, one) for name, one in figures.items()],
        more_metrics={name: round(value, 3) for name, value in metrics.items()},
        detail_metrics=details_of(figures) | {"trace.noise_total_s": round(noise_s, 4)},
        at_least=AT_LEAST,
        more_tables=[overhead_table(figures), kind_table(steps, figures)],
        notes=[*(f"left out: {reason}" for reason in failures.values()), *wrong_notes(steps, figures), *NOTES],
    )


def series_of(name: str, figures: Figures) -> Series:
    """Return a series with one sample a command."""
    case = Case(
        name=f"trace.{name}",
        floor=None if name == FLOOR else f"trace.{FLOOR}",
        peer=name in PEER_SYSTEMS,
        max_x_floor=2 if name == OURS else None,
    )
    return Series(case=case, samples=[elapsed_s * 1e3 for elapsed_s in figures.elapsed_s])


def wrong_notes(steps: Sequence[Step], figures: dict[str, Figures]) -> list[str]:
    """Return a sentence for each system that answered commands wrong, with the first few of them."""
    return [
        f"{TITLES[name]} answered wrong: {', '.join(repr(steps[index].command) for index in one.wrong[:SHOWN_WRONG])}"
        + (", ..." if len(one.wrong) > SHOWN_WRONG else "")
        for name, one in figures.items()
        if one.wrong
    ]


def details_of(figures: dict[str, Figures]) -> dict[str, float]:
    """Return the figures of the tables, for the file."""
    details: dict[str, float] = {}
    for name, one in figures.items():
        details[f"trace.{name}.total_s"] = round(sum(one.elapsed_s), 4)
        details[f"trace.{name}.wrong"] = len(one.wrong)
        if name != FLOOR:
            details[f"trace.{name}.overhead_total_s"] = round(sum(one.overhead_s), 4)
            for percent in PERCENTS:
                details[f"trace.{name}.overhead_p{percent}_ms"] = round(one.overhead_percentile_ms(percent), 4)
    return details


def overhead_table(figures: dict[str, Figures]) -> Table:
    """Beyond the floor, command by command."""
    table = Table("system", title="overhead above the bare pty, a command at a time")
    for heading in ("right", "wrong", "total", "overhead", *(f"p{percent}" for percent in PERCENTS)):
        table.add_column(heading, justify="right")
    for name, one in figures.items():
        percentiles = (f"{one.overhead_percentile_ms(percent):.2f} ms" for percent in PERCENTS)
        table.add_row(
            TITLES[name],
            str(len(one.steps)),
            str(len(one.wrong)),
            f"{sum(one.elapsed_s):.2f} s",
            *(("", "", "", "") if name == FLOOR else (f"{sum(one.overhead_s):.3f} s", *percentiles)),
        )
    return table


def kind_table(steps: Sequence[Step], figures: dict[str, Figures]) -> Table:
    """The median time of the commands of each kind, in the round that all systems ran."""
    table = Table("kind", title="median time by kind of command in the first round, ms")
    for heading in ("commands", *figures):
        table.add_column(heading, justify="right")
    for kind in dict.fromkeys(step.kind for step in steps):
        members = [index for index, step in enumerate(steps) if step.kind == kind]
        times_s = [one.among(one.first_s, members) for one in figures.values()]
        cells = [f"{statistics.median(some_s) * 1e3:.2f}" if some_s else "" for some_s in times_s]
        table.add_row(kind, str(len(members)), *cells)
    return table


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark))
