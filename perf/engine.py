"""The engine as the only limit: tokens per second of a run through the node, as a share of a bare closed loop's.

It uses a real vLLM on this machine's CPU, a node, a sandbox for each rollout, and questions answered by programs, with
several turns and tool calls. Then the same calls go directly to the same engine with the same concurrency. Both
alternate in one session. A table shows the use of the remaining time.

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
    SHARES,
    EngineSeen,
    PlacedRollout,
    account,
    place_calls,
    recorded_turns,
    replay,
    watch_engine,
)
from perf.harness import CannotRun, Options, Report, Rows, caption_of, run_benchmark, tell
from perf.processes import process_time, tree_time
from perf.rollouts import run_span
from prorl_launch.node import open_node_process
from prorl_launch.paths import engine_python, model_dir
from prorl_launch.vllm import open_vllm
from prorl_trio.client import connect
from prorl_trio.runs.collect import make_jobs
from prorl_trio.tasks.sets.word_problems import word_problem
from prorl_trio.types.models import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from prorl_launch.node import NodeProcess
    from prorl_launch.vllm import VllmProcess
    from prorl_trio.client import RolloutClient
    from prorl_trio.types.models import JobSpec, Outcome, TaskInstance

LEAST_SHARE: Final = 0.95
MIN_COMPLETED_SHARE: Final = 0.95
"""Below this share of completed rollouts, a run would measure failures."""
TEMPERATURE: Final = 0.7
"""At this temperature the model's programs run more often than not."""
WARM_UP_ROLLOUTS: Final = 2


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a measurement. `slots`: concurrent rollouts, and concurrent calls of the bare loop."""

    questions: int
    rollouts: int
    slots: int
    rounds: int
    max_turns: int = 4
    max_output_tokens: int = 192


QUICK: Final = Scale(questions=6, rollouts=3, slots=8, rounds=1, max_turns=3, max_output_tokens=96)
FULL: Final = Scale(questions=32, rollouts=4, slots=16, rounds=3)


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """A run through the node, and its replay: rollouts, the engine's own figures, and the results of `cpu_of`."""

    run: list[PlacedRollout]
    bare: list[PlacedRollout]
    run_engine: EngineSeen
    bare_engine: EngineSeen
    run_cpu_s: dict[str, float]
    bare_cpu_s: dict[str, float]


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
    """Run and replay alternately, with new questions each time.

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
                    run_cpu_s=_since(before, after),
                    bare_cpu_s=_since(after, cpu_of(engine.pid, node.pid)),
                )
            )
    return rounds


def _jobs(scale: Scale, *, number: int) -> list[JobSpec]:
    """Return the rollouts of a round, with questions that no other round uses."""
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
    """Return the outcomes with a trajectory in the order of their RUN stage, and its start times.

    An outcome only has durations, which are subtracted from its arrival time.
    """
    began_s = trio.current_time()
    await client.submit(jobs)
    found: list[tuple[PlacedRollout, Outcome]] = []
    async for outcome in client.results():
        if outcome.status != "completed" or outcome.trajectory is None:
            continue
        start_s, end_s = run_span(outcome, trio.current_time() - began_s)
        turns = [
            (turn.inference_s, turn.tools_s, turn.completion_end - turn.completion_start)
            for turn in outcome.trajectory.turns
        ]
        found.append((place_calls(max(0.0, start_s), end_s, turns), outcome.detached()))
    if len(found) < MIN_COMPLETED_SHARE * len(jobs):
        raise RuntimeError(f"only {len(found)} of {len(jobs)} rollouts completed")
    found.sort(key=lambda pair: pair[0].start_s)
    return [outcome for _, outcome in found], [rollout for rollout, _ in found]


WHO: Final = {"engine": "engine", "node": "node", "sandboxes": "sandboxes that have ended"}


def cpu_of(engine_pid: int, node_pid: int) -> dict[str, float]:
    """Return the CPU seconds so far, by `WHO`. Ended children count for the process that waited for them."""
    node = process_time(node_pid)
    return {"engine": tree_time(engine_pid).own_s, "node": node.own_s, "sandboxes": node.ended_s}


def _since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {who: after[who] - before[who] for who in after}


def report_of(rounds: list[Round], scale: Scale) -> Report:
    """Return the shares of all rounds together, and the tables."""
    kinds = [(kind, tail) for tail in (True, False) for kind in ("run", "bare")]
    accounts = {kind: [account(getattr(r, kind[0]), scale.slots, tail=kind[1]) for r in rounds] for kind in kinds}
    run, bare, steady_run, steady_bare = (_joined(accounts[kind], scale.slots) for kind in kinds)
    shares = [
        run["tokens_per_s"] / bare["tokens_per_s"]
        for run, bare in zip(accounts["run", True], accounts["bare", True], strict=True)
    ]
    run_s, bare_s = (
        {who: sum(getattr(r, name)[who] for r in rounds) for who in WHO} for name in ("run_cpu_s", "bare_cpu_s")
    )
    rollouts = [rollout for r in rounds for rollout in r.run]
    calls = [call for rollout in rollouts for call in rollout.calls]
    tokens, call_s = sum(call.tokens for call in calls), sum(call.end_s - call.start_s for call in calls)
    ms_per_token = {"run": 1e3 * run_s["engine"] / tokens, "bare": 1e3 * bare_s["engine"] / tokens}
    title = f"{scale.questions * scale.rollouts} rollouts, {scale.slots} at a time, {len(rounds)} rounds"
    return Report(
        title=f"The engine's share: {title}",
        more_metrics={
            "engine.share": run["tokens_per_s"] / bare["tokens_per_s"],
            "engine.share_without_tail": steady_run["tokens_per_s"] / steady_bare["tokens_per_s"],
            "engine.share_min": min(shares),
            "engine.share_max": max(shares),
            "engine.busy_share": fmean([r.run_engine.busy_share for r in rounds]),
            "engine.calls_share": run["calls"] / bare["calls"],
            "engine.call_speed_share": run["tokens_per_call_s"] / bare["tokens_per_call_s"],
            "engine.cpu_share": run_s["engine"] / sum(run_s.values()),
            "engine.run_tokens_per_s": run["tokens_per_s"],
            "engine.bare_tokens_per_s": bare["tokens_per_s"],
        },
        detail_metrics={
            "engine.cpu_ms_per_token": ms_per_token["run"],
            "engine.bare_cpu_ms_per_token": ms_per_token["bare"],
            "engine.rollouts": float(len(rollouts)),
            "engine.calls": float(len(calls)),
            "engine.sandbox_cpu_s": run_s["sandboxes"] / len(rollouts),
            "engine.node_cpu_s": run_s["node"] / len(rollouts),
            "engine.mean_running": fmean([r.run_engine.mean_running for r in rounds]),
            "engine.bare_mean_running": fmean([r.bare_engine.mean_running for r in rounds]),
            "engine.call_outside_share": 1 - sum(r.run_engine.latency_s for r in rounds) / call_s,
            **{f"engine.slots.{name}": run[name] for name in SHARES},
            **{f"engine.bare_slots.{name}": bare[name] for name in SHARES},
        },
        at_least={"engine.share": LEAST_SHARE},
        tables=[
            _slot_rows((run, bare, steady_run, steady_bare)),
            _cpu_rows((run_s, bare_s), (run["wall_s"], bare["wall_s"]), ms_per_token),
        ],
        notes=caption_of("engine"),
    )


def _slot_rows(every: Sequence[Mapping[str, float]]) -> Rows:
    rows = [[said, *(f"{account[name]:.1%}" for account in every)] for name, said in SHARES.items()]
    rows.append(["tokens per second of a call", *(f"{account['tokens_per_call_s']:.2f}" for account in every)])
    rows.append(["tokens per second", *(f"{account['tokens_per_s']:.1f}" for account in every)])
    rows.append(["seconds", *(f"{account['wall_s']:.1f}" for account in every)])
    headings = ["", "run", "bare", "run, without the tail", "bare, without the tail"]
    return Rows(title="where the time of the slots goes", headings=headings, rows=rows)


def _cpu_rows(
    used: tuple[Mapping[str, float], ...], walls_s: tuple[float, ...], ms_per_token: Mapping[str, float]
) -> Rows:
    """Return the use of the cores, and the engine's CPU per token. Idle time and other processes are not separated."""
    cores = len(os.sched_getaffinity(0))
    pairs = list(zip(used, walls_s, strict=True))
    rows = [
        [said, *(f"{cpu_s[who]:.1f} ({cpu_s[who] / (wall_s * cores):.1%})" for cpu_s, wall_s in pairs)]
        for who, said in WHO.items()
    ]
    rows.append(["engine, ms a token", *(f"{ms:.2f}" for ms in ms_per_token.values())])
    return Rows(title=f"CPU seconds, and their share of {cores} cores", headings=["", "run", "bare"], rows=rows)


def _joined(every: list[dict[str, float]], slots: int) -> dict[str, float]:
    """Return the mean over rounds, weighted by their lengths; `wall_s` is their sum."""
    wall_s = sum(one["wall_s"] for one in every)
    means = {name: sum(one[name] * one["wall_s"] for one in every) / wall_s for name in every[0]}
    per_call = means["tokens_per_s"] / (means["calls"] * slots) if means["calls"] else 0.0
    return means | {"wall_s": wall_s, "tokens_per_call_s": per_call}


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark))
