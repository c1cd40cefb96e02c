"""The engine as the only limit: tokens per second of a run through the node, as a share of a bare closed loop's.

A real vLLM on this machine's CPU, a node, a sandbox for each rollout, questions that are answered by programs: several
turns with tool calls. Then the same calls straight to the same engine, as many at a time, with nothing in between. Both
in turn, in one sitting; a table shows where the rest goes.

    python -m perf.engine [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from perf.engine_replay import (
    EngineSeen,
    PlacedRollout,
    Slots,
    account,
    place_calls,
    recorded_turns,
    replay,
    watch_engine,
)
from perf.harness import CAPTIONS, CannotRun, Options, Report, Rows, run_benchmark, tell
from perf.processes import process_time, tree_time
from prorl_launch.node import open_node_process
from prorl_launch.paths import engine_python, model_dir
from prorl_launch.vllm import open_vllm
from prorl_trio.client import connect
from prorl_trio.runs.collect import make_jobs
from prorl_trio.tasks.sets.word_problems import word_problem
from prorl_trio.types.models import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from prorl_launch.node import NodeProcess
    from prorl_launch.vllm import VllmProcess
    from prorl_trio.client import RolloutClient
    from prorl_trio.types.models import JobSpec, Outcome, TaskInstance

LEAST_SHARE: Final = 0.95
MIN_COMPLETED_SHARE: Final = 0.95
"""With fewer completed rollouts a run measures failures."""
TEMPERATURE: Final = 0.7
"""So that the model writes programs that run, more often than not."""
WARM_UP_ROLLOUTS: Final = 2
NOTES: Final = CAPTIONS["engine"]


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """The amounts of a measurement. `slots`: rollouts at work at a time; calls at a time of the bare loop."""

    questions: int
    rollouts: int
    slots: int
    rounds: int
    max_turns: int = 4
    max_output_tokens: int = 192


QUICK: Final = Scale(questions=6, rollouts=3, slots=8, rounds=1, max_turns=3, max_output_tokens=96)
FULL: Final = Scale(questions=32, rollouts=4, slots=16, rounds=3)


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of CPU: of the engine, of the node's own process, and of what ran in sandboxes that have ended."""

    engine_s: float
    node_s: float
    sandboxes_s: float

    @property
    def all_s(self) -> float:
        """Return the seconds of all three."""
        return self.engine_s + self.node_s + self.sandboxes_s

    def since(self, before: Cpu) -> Cpu:
        """Return the seconds since `before`."""
        return Cpu(**{name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__})


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """A run through the node, and its replay."""

    run: list[PlacedRollout]
    bare: list[PlacedRollout]
    run_engine: EngineSeen
    bare_engine: EngineSeen
    run_cpu: Cpu
    bare_cpu: Cpu


async def benchmark(options: Options) -> Report:
    """Start an engine and a node, and compare."""
    if not engine_python().exists():
        raise CannotRun("there is no engine here to measure: run `make engine`")
    scale = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="prorl-engine-") as folder:
        async with _open_engine_and_node(Path(folder), scale) as (engine, node):
            return report_of(await measure(engine, node, str(model_dir()), scale), scale)


@asynccontextmanager
async def _open_engine_and_node(folder: Path, scale: Scale) -> AsyncIterator[tuple[VllmProcess, NodeProcess]]:
    tell("vLLM starts")
    async with open_vllm(engine_python(), model_dir(), log_file=folder / "vllm.log") as engine:
        tell("the node starts")
        config: dict[str, object] = {
            "model": {"path": str(model_dir())},
            "backends": {"urls": [engine.url], "required": True},
            "stages": {"run_workers": scale.slots},
        }
        async with open_node_process(config, folder=folder, log_file=folder / "node.log") as node:
            yield engine, node


async def measure(engine: VllmProcess, node: NodeProcess, model: str, scale: Scale) -> list[Round]:
    """Run and replay in turn, each time other questions.

    Raises:
        RuntimeError: too many rollouts failed.
    """
    rounds: list[Round] = []
    async with connect(node.url, node.token) as client:
        tell("warming up")
        await _run(client, _jobs(scale, number=-1)[:WARM_UP_ROLLOUTS])
        for number in range(scale.rounds):
            jobs = _jobs(scale, number=number)
            tell(f"round {number + 1} of {scale.rounds}: {len(jobs)} rollouts through the node")
            before = cpu_of(engine.pid, node.pid)
            async with watch_engine(engine.url) as run_engine:
                outcomes, run = await _run(client, jobs)
            after = cpu_of(engine.pid, node.pid)
            tell("the same calls, bare")
            turns = [recorded_turns(outcome) for outcome in outcomes]
            async with watch_engine(engine.url) as bare_engine:
                bare = await replay(
                    engine.url, model, turns, scale.slots, salt=f"bare-{number}", temperature=TEMPERATURE
                )
            rounds.append(
                Round(
                    run=run,
                    bare=bare,
                    run_engine=run_engine,
                    bare_engine=bare_engine,
                    run_cpu=after.since(before),
                    bare_cpu=cpu_of(engine.pid, node.pid).since(after),
                )
            )
    return rounds


def _jobs(scale: Scale, *, number: int) -> list[JobSpec]:
    """Return the rollouts of a round, whose questions no other round has."""
    instances = [_program_question(place) for place in range(scale.questions * number, scale.questions * (number + 1))]
    sampling = SamplingParams(temperature=TEMPERATURE, max_output_tokens=scale.max_output_tokens)
    return make_jobs(instances, rollouts=scale.rollouts, sampling=sampling, max_turns=scale.max_turns)


def _program_question(number: int) -> TaskInstance:
    problem = word_problem(number % 1_000_000, seed=1)
    return problem.instance(
        question=f"{problem.question} Write a Python program that prints the answer.",
        system_prompt="You are a helpful assistant.",
        instruction="",
        describe_tools=False,
        plain_answer=True,
    )


async def _run(client: RolloutClient, jobs: list[JobSpec]) -> tuple[list[Outcome], list[PlacedRollout]]:
    """Return the outcomes with a trajectory in the order in which their RUN stage began, and when that was.

    Of the times an outcome has durations: they are counted back from its arrival.
    """
    began_s = trio.current_time()
    await client.submit(jobs)
    found: list[tuple[PlacedRollout, Outcome]] = []
    async for outcome in client.results():
        if outcome.status != "completed" or outcome.trajectory is None:
            continue
        timing = outcome.timing
        end_s = trio.current_time() - began_s - timing.eval_s - timing.queued_eval_s
        turns = [
            (turn.inference_s, turn.tools_s, turn.completion_end - turn.completion_start)
            for turn in outcome.trajectory.turns
        ]
        found.append((place_calls(max(0.0, end_s - timing.run_s), end_s, turns), outcome.detached()))
    if len(found) < MIN_COMPLETED_SHARE * len(jobs):
        raise RuntimeError(f"only {len(found)} of {len(jobs)} rollouts completed")
    found.sort(key=lambda pair: pair[0].start_s)
    return [outcome for _, outcome in found], [rollout for rollout, _ in found]


def cpu_of(engine_pid: int, node_pid: int) -> Cpu:
    """Return the seconds of CPU so far. What is ended and waited for counts to the process that waited."""
    node = process_time(node_pid)
    return Cpu(engine_s=tree_time(engine_pid).own_s, node_s=node.own_s, sandboxes_s=node.ended_s)


def report_of(rounds: list[Round], scale: Scale) -> Report:
    """Return the shares of all rounds together, and the tables."""
    whole = [(account(r.run, scale.slots, tail=True), account(r.bare, scale.slots, tail=True)) for r in rounds]
    steady = [(account(r.run, scale.slots, tail=False), account(r.bare, scale.slots, tail=False)) for r in rounds]
    run, bare = _joined([run for run, _ in whole]), _joined([bare for _, bare in whole])
    steady_run, steady_bare = _joined([run for run, _ in steady]), _joined([bare for _, bare in steady])
    shares = [run.tokens_per_s / bare.tokens_per_s for run, bare in whole]
    call_s = sum(call.end_s - call.start_s for r in rounds for rollout in r.run for call in rollout.calls)
    metrics = {
        "engine.share": run.tokens_per_s / bare.tokens_per_s,
        "engine.share_without_tail": steady_run.tokens_per_s / steady_bare.tokens_per_s,
        "engine.share_min": min(shares),
        "engine.share_max": max(shares),
        "engine.busy_share": fmean([r.run_engine.busy_share for r in rounds]),
        "engine.calls_share": run.calls / bare.calls,
        "engine.call_speed_share": run.tokens_per_call_s / bare.tokens_per_call_s,
        "engine.cpu_share": sum(r.run_cpu.engine_s for r in rounds) / sum(r.run_cpu.all_s for r in rounds),
        "engine.run_tokens_per_s": run.tokens_per_s,
        "engine.bare_tokens_per_s": bare.tokens_per_s,
    }
    run_ms, bare_ms = _engine_ms_per_token(rounds)
    details = {
        "engine.cpu_ms_per_token": run_ms,
        "engine.bare_cpu_ms_per_token": bare_ms,
        "engine.rollouts": float(sum(len(r.run) for r in rounds)),
        "engine.calls": float(sum(len(rollout.calls) for r in rounds for rollout in r.run)),
        "engine.sandbox_cpu_s": sum(r.run_cpu.sandboxes_s for r in rounds) / sum(len(r.run) for r in rounds),
        "engine.node_cpu_s": sum(r.run_cpu.node_s for r in rounds) / sum(len(r.run) for r in rounds),
        "engine.mean_running": fmean([r.run_engine.mean_running for r in rounds]),
        "engine.bare_mean_running": fmean([r.bare_engine.mean_running for r in rounds]),
        "engine.call_outside_share": 1 - sum(r.run_engine.latency_s for r in rounds) / call_s,
        **{f"engine.slots.{name}": getattr(run, name) for name in SLOT_ROWS},
        **{f"engine.bare_slots.{name}": getattr(bare, name) for name in SLOT_ROWS},
    }
    title = f"{scale.questions * scale.rollouts} rollouts, {scale.slots} at a time, {len(rounds)} rounds"
    return Report(
        title=f"The engine's share: {title}",
        more_metrics=metrics,
        detail_metrics=details,
        at_least={"engine.share": LEAST_SHARE},
        tables=[_slot_rows((run, bare, steady_run, steady_bare)), _cpu_rows(rounds)],
        notes=list(NOTES),
    )


SLOT_ROWS: Final = {
    "calls": "a completion is under way",
    "tools": "a tool is at work",
    "between": "the node, between the two",
    "unready": "empty: sandboxes start",
    "tail": "empty: no rollout is left",
}


def _slot_rows(every: Sequence[Slots]) -> Rows:
    figures: dict[str, Callable[[Slots], str]] = {
        said: (lambda slots, name=name: f"{getattr(slots, name):.1%}")  # type: ignore[misc]  # mypy infers no default
        for name, said in SLOT_ROWS.items()
    }
    figures |= {
        "tokens per second of a call": lambda slots: f"{slots.tokens_per_call_s:.2f}",
        "tokens per second": lambda slots: f"{slots.tokens_per_s:.1f}",
        "seconds": lambda slots: f"{slots.wall_s:.1f}",
    }
    rows = [[said, *map(cell, every)] for said, cell in figures.items()]
    headings = ["", "run", "bare", "run, without the tail", "bare, without the tail"]
    return Rows(title="where the time of the slots goes", headings=headings, rows=rows)


def _cpu_rows(rounds: list[Round]) -> Rows:
    """Return who had the cores, and the CPU that a token took the engine: idle time and others are not told apart."""
    cores = len(os.sched_getaffinity(0))
    kinds = ([r.run for r in rounds], [r.bare for r in rounds])
    walls = [sum(max(rollout.end_s for rollout in rollouts) for rollouts in kind) for kind in kinds]
    used = ([r.run_cpu for r in rounds], [r.bare_cpu for r in rounds])
    rows = []
    for name, said in (("engine_s", "engine"), ("node_s", "node"), ("sandboxes_s", "sandboxes that have ended")):
        seconds = [sum(getattr(cpu, name) for cpu in kind) for kind in used]
        rows.append([said, *(f"{s:.1f} ({s / (wall * cores):.1%})" for s, wall in zip(seconds, walls, strict=True))])
    rows.append(["engine, ms a token", *(f"{ms:.2f}" for ms in _engine_ms_per_token(rounds))])
    return Rows(title=f"CPU seconds, and their share of {cores} cores", headings=["", "run", "bare"], rows=rows)


def _engine_ms_per_token(rounds: list[Round]) -> tuple[float, float]:
    """Return the engine's milliseconds of CPU for a token, of the runs and of the bare loops."""
    tokens = sum(call.tokens for r in rounds for rollout in r.run for call in rollout.calls)
    run_s, bare_s = sum(r.run_cpu.engine_s for r in rounds), sum(r.bare_cpu.engine_s for r in rounds)
    return 1e3 * run_s / tokens, 1e3 * bare_s / tokens


def _joined(every: list[Slots]) -> Slots:
    """Return the mean over rounds, weighed by their lengths."""
    wall_s = sum(slots.wall_s for slots in every)
    means = {
        name: sum(getattr(slots, name) * slots.wall_s for slots in every) / wall_s
        for name in ("tokens_per_s", *SLOT_ROWS)
    }
    return msgspec.structs.replace(every[0], wall_s=wall_s, **means)


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark))
