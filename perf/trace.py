"""The cost of the tool path on an agent's work: a recorded trace of 200 shell commands over a small project.

The trace runs through ours, a bare pty, OpenHands' terminal on tmux and SWE-ReX.

    python -m perf.peers setup                         # once: the peers' environments
    python -m perf.trace [--quick] [--json FILE]

Every system has its own copy of the project and its own persistent shell. Each command runs on every system before the
next command, starting with a different system each time. A command counts for a system only if its exit code and output
equal the bare pty's. Ours and the floor run several rounds, in new shells and new copies; peers run only the first.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
import trio

from perf.harness import PERCENTS, Case, Options, Report, Rows, Series, caption_of, rotated, rows_of, run_benchmark
from perf.peers.environments import PEERS, PeerUnavailable
from perf.peers.process import PeerAnswer, open_peer
from perf.project_tree import write_project
from perf.shells import CALL_TIMEOUT_S, open_bare_pty, open_daemon
from prorl_ipc.sandbox_calls import BashResult, BashRun

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    Run = Callable[[str], Awaitable[PeerAnswer]]

ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\a\x1b]*(?:\a|\x1b\\)|\x1b[@-Z\\-_]")
RULER = re.compile(r"[=_]{3,}")
CLOCK = re.compile(r"\b\d+\.\d+s\b|\b\d\d:\d\d\b")


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the recorded trace.

    `kind` groups commands of similar cost; `exit_code` is the required exit code.
    """

    kind: str
    command: str
    exit_code: int


class Answered(msgspec.Struct, frozen=True):
    """A system's answer to one step. `words` is its output in the form of `words_of`."""

    elapsed_s: float
    exit_code: int | None
    words: tuple[str, ...]


class Timed(NamedTuple):
    """The times of a system for a step that it and the floor answered correctly.

    Attributes:
        elapsed_s: the median over rounds.
        first_s: time in the first round, which all systems ran. It compares systems with different numbers of rounds.
        overhead_s: the time beyond the floor's in the same round, median over rounds. Below zero is noise.
    """

    elapsed_s: float
    first_s: float
    overhead_s: float


Figures = dict[int, Timed]
"""Times by step. A missing step was answered differently than by the floor or the record, or not at all."""


def words_of(output: str, *, root: str, command: str) -> tuple[str, ...]:
    """Return the words of an output, sorted: equal for the same output on terminals of different widths and folders.

    Harmless differences are removed: colours, rulers as wide as the terminal, clocks, the folder, and the command
    itself if a terminal echoes it.
    """
    text = CLOCK.sub("TIME", RULER.sub(" ", ANSI.sub("", output).replace(root, "ROOT")))
    words, echo = text.split(), command.split()
    return tuple(sorted(words[len(echo) :] if words[: len(echo)] == echo else words))


def figures_of(
    steps: Sequence[Step], rounds: Sequence[Sequence[Answered]], floors: Sequence[Sequence[Answered]]
) -> Figures:
    """Compare a system with the floor, round by round. Unfinished rounds are shorter."""
    figures: Figures = {}
    for index, step in enumerate(steps):
        pairs = [
            (answers[index], floor[index])
            for answers, floor in zip(rounds, floors, strict=False)
            if index < len(answers)
        ]
        if pairs and all(_is_right(answer, floor, step) for answer, floor in pairs):
            figures[index] = Timed(
                elapsed_s=statistics.median(answer.elapsed_s for answer, _ in pairs),
                first_s=pairs[0][0].elapsed_s,
                overhead_s=statistics.median(answer.elapsed_s - floor.elapsed_s for answer, floor in pairs),
            )
    return figures


def _is_right(answer: Answered, floor: Answered, step: Step) -> bool:
    return answer.exit_code == floor.exit_code == step.exit_code and answer.words == floor.words


FLOOR, FLOOR_AGAIN, OURS = "pty", "pty_again", "ours"
PEER_SYSTEMS = ("tmux", "swerex")
TOOL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAX_OUTPUT_BYTES = 1024 * 1024


class Workspace:
    """The folders of one system in one round. All paths have equal length, so that layouts do not differ."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work, self.home, self.run = root / "work", root / "home", root / "run"

    @property
    def env(self) -> dict[str, str]:
        """Return the whole environment of the shell, the same for all systems except for these folders."""
        return {
            "PATH": f"{Path(sys.executable).parent}:{TOOL_PATH}",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PAGER": "cat",
            "GIT_PAGER": "cat",
            "GIT_CONFIG_NOSYSTEM": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "TMUX_TMPDIR": str(self.run),
        }


def make_workspace(root: Path) -> Workspace:
    """Create the folders, with the project in `work`. `root` must not exist."""
    workspace = Workspace(root)
    for folder in (workspace.work, workspace.home, workspace.run):
        folder.mkdir(mode=0o700, parents=True)
    write_project(workspace.work)
    return workspace


@asynccontextmanager
async def open_system(name: str, workspace: Workspace) -> AsyncIterator[Run]:
    """Start a persistent shell in `workspace.work`; it ends on leaving.

    Raises:
        PeerUnavailable: the peer `name` is unavailable; also raised by `Run` when a peer fails.
    """
    if name == OURS:
        async with open_daemon(workspace.run, env=workspace.env, cwd=workspace.work) as daemon:

            async def run_ours(command: str) -> PeerAnswer:
                call = BashRun(command=command, timeout_s=CALL_TIMEOUT_S, max_output_bytes=MAX_OUTPUT_BYTES)
                started = time.perf_counter()
                result = await daemon.call(call, BashResult, timeout_s=CALL_TIMEOUT_S)
                return PeerAnswer(result.output, result.exit_code, time.perf_counter() - started)

            yield run_ours
    elif name in (FLOOR, FLOOR_AGAIN):
        with open_bare_pty(env=workspace.env, cwd=workspace.work) as pty:

            async def run_pty(command: str) -> PeerAnswer:
                await trio.lowlevel.checkpoint()
                started = time.perf_counter()
                exit_code = pty.run(command)
                elapsed_s = time.perf_counter() - started
                return PeerAnswer(pty.take_output(), exit_code, elapsed_s)

            yield run_pty
    else:
        log = workspace.run / "log"
        async with open_peer(PEERS[name], env=workspace.env, cwd=workspace.work, log=log) as peer:
            yield peer.run


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


COLUMNS: Final[dict[str, Callable[[str], str] | str]] = {
    "system": TITLES.__getitem__,
    "right": "{right:.0f}",
    "wrong": "{wrong:.0f}",
    "total": "{total_s:.2f} s",
    "overhead": "{overhead_total_s:.3f} s",
    **{f"p{percent}": f"{{overhead_p{percent}_ms:.2f}} ms" for percent in PERCENTS},
}


def load_trace() -> list[Step]:
    """Return the recorded commands in order. Each depends on the files of earlier ones."""
    return msgspec.json.Decoder(Step).decode_lines(TRACE_PATH.read_bytes())


async def benchmark(options: Options) -> Report:
    """Run the trace through all available systems."""
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
    if not figures[OURS]:
        raise RuntimeError("ours answered every command otherwise than the bare pty")
    return report_of(steps, {name: one for name, one in figures.items() if one}, failures)


async def run_round(steps: Sequence[Step], names: Sequence[str], failures: dict[str, str]) -> dict[str, list[Answered]]:
    """Run every step on every system, interleaved. A failed peer stops there, and `failures` gets its reason."""
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
            for name in rotated(list(running), index):
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
    """Return ratios over the steps that both sides answered correctly. Peers without a correct answer are omitted."""
    ours, floor = figures[OURS], figures[FLOOR]
    pairs = [(ours[index].elapsed_s, floor[index].elapsed_s) for index in ours.keys() & floor.keys()]
    ours_s, floor_s = zip(*pairs, strict=True)
    noise_s = abs(sum(one.overhead_s for one in figures[FLOOR_AGAIN].values()))
    metrics = {
        "trace.commands": float(len(steps)),
        "trace.ours_over_pty": statistics.median(ours_s) / statistics.median(floor_s),
        "trace.ours_over_pty_total": sum(ours_s) / sum(floor_s),
    }
    for name in PEER_SYSTEMS:
        peer = figures.get(name, {})
        if both := ours.keys() & peer.keys():
            overhead_s = max(sum(ours[index].overhead_s for index in both), noise_s)
            whole_s = sum(ours[index].first_s for index in both)
            metrics[f"trace.{name}_over_ours"] = sum(peer[index].overhead_s for index in both) / overhead_s
            metrics[f"trace.{name}_over_ours_whole"] = sum(peer[index].first_s for index in both) / whole_s
    details = details_of(steps, figures)
    title = "overhead above the bare pty, a command at a time"
    return Report(
        title=f"trace: {len(steps)} shell commands of an agent",
        series=[series_of(name, one) for name, one in figures.items()],
        more_metrics=metrics,
        detail_metrics=details | {"trace.noise_total_s": noise_s},
        at_least=AT_LEAST,
        tables=[rows_of(title, figures, COLUMNS, metrics=details, of="trace"), kind_rows(steps, figures)],
        notes=[
            *(f"left out: {reason}" for reason in failures.values()),
            *wrong_notes(steps, figures),
            *caption_of("trace"),
        ],
    )


def series_of(name: str, figures: Figures) -> Series:
    """Return a series with one sample per command."""
    case = Case(
        name=f"trace.{name}",
        floor=None if name == FLOOR else f"trace.{FLOOR}",
        peer=name in PEER_SYSTEMS,
        max_x_floor=2 if name == OURS else None,
    )
    return Series(case=case, samples=[one.elapsed_s * 1e3 for one in figures.values()])


def wrong_notes(steps: Sequence[Step], figures: dict[str, Figures]) -> list[str]:
    """Return a sentence for each system with wrong answers, with the first few commands."""
    said = []
    for name, one in figures.items():
        if wrong := [step.command for index, step in enumerate(steps) if index not in one]:
            more = ", ..." if len(wrong) > SHOWN_WRONG else ""
            said.append(f"{TITLES[name]} answered wrong: {', '.join(map(repr, wrong[:SHOWN_WRONG]))}{more}")
    return said


def details_of(steps: Sequence[Step], figures: dict[str, Figures]) -> dict[str, float]:
    """Return the figures of the tables, for the file."""
    details: dict[str, float] = {}
    for name, one in figures.items():
        of, overhead_s = f"trace.{name}", [each.overhead_s for each in one.values()]
        details |= {f"{of}.right": len(one), f"{of}.wrong": len(steps) - len(one)}
        details[f"{of}.total_s"] = sum(each.elapsed_s for each in one.values())
        if name != FLOOR:
            details[f"{of}.overhead_total_s"] = sum(overhead_s)
            for percent in PERCENTS:
                details[f"{of}.overhead_p{percent}_ms"] = float(np.percentile(overhead_s, percent)) * 1e3
    return details


def kind_rows(steps: Sequence[Step], figures: dict[str, Figures]) -> Rows:
    """Return the median time of the commands of each kind, in the round that all systems ran."""
    rows = []
    for kind in dict.fromkeys(step.kind for step in steps):
        members = [index for index, step in enumerate(steps) if step.kind == kind]
        times_s = [[one[index].first_s for index in members if index in one] for one in figures.values()]
        cells = [f"{statistics.median(some_s) * 1e3:.2f}" if some_s else "" for some_s in times_s]
        rows.append([kind, str(len(members)), *cells])
    title = "median time by kind of command in the first round, ms"
    return Rows(title=title, headings=["kind", "commands", *figures], rows=rows)


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark))
