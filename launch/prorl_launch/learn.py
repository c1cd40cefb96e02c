"""`prorl-trio learn` and `make learn`: a policy learns on one machine, with vLLM, a node, sandboxes and a trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import trio
from rich.text import Text

from prorl_ipc.nursery import single_exception
from prorl_launch.learning.record import (
    CHECKPOINTS,
    EVENT,
    EVENTS,
    SETTINGS,
    Ended,
    Evaluated,
    Settings,
    Shown,
    Stepped,
    read_record,
    read_settings,
    write_atomically,
)
from prorl_launch.node import open_node_process
from prorl_launch.paths import engine_python, import_path, model_dir, trainer_python
from prorl_launch.supervised import open_supervised
from prorl_launch.vllm import default_dtype, open_vllm
from prorl_trio.agents.preset import find_preset
from prorl_trio.client.terminal import Console
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.runs.recording import run_folder
from prorl_trio.types.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from prorl_launch.learning.record import Event
    from prorl_launch.vllm import VllmProcess

POLL_S = 0.3


async def follow(path: Path, console: Console, offset: int = 0) -> None:
    """Print each event that is appended to `path` after `offset` bytes. Runs until cancelled."""
    while True:
        chunk = await trio.to_thread.run_sync(_read, path, offset)
        lines, _, _ = chunk.rpartition(b"\n")
        for line in filter(None, lines.split(b"\n")):
            console.print(describe(EVENT.decode(line)), soft_wrap=True)
        offset += len(lines) + bool(lines)
        await trio.sleep(POLL_S)


def _read(path: Path, offset: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read()


def describe(event: Event) -> Text:
    """Return the line for an event."""
    match event:
        case Shown(step, of, loss):
            return Text(f"  demonstrations {step:2}/{of}  loss {loss:.3f}", style="dim")
        case Evaluated(record):
            line = Text(f"held out after {record.step:3} updates: ")
            line.append(f"greedy {record.greedy:.2f}  T = 1 {record.sampled:.2f}", style="bold green")
            return line.append(f"  tool used in {record.tool_share:.0%}  gap {record.gap:.4f}", style="dim")
        case Ended(step, why):
            return Text(f"ended after {step} updates: {why}", style="bold")
        case Stepped(record, of):
            seconds = record.wait_s + record.update_s + record.sync_s + record.checkpoint_s
            line = Text(f"step {record.step:3}/{of}  ")
            line.append(f"reward {record.reward_sampled or record.reward:.2f}", style="bold")
            line.append(f"  informative {record.informative_share or 0.0:.0%}  {record.length:.0f} tokens")
            parts = f"rollouts {record.wait_s:.0f} + training {record.update_s:.0f} + weights {record.sync_s:.1f}"
            return line.append(f"  {seconds:.0f} s ({parts})", style="dim")


QUICK: dict[str, Any] = {
    "steps": 2,
    "groups": 2,
    "rollouts": 4,
    "demonstration_steps": 8,
    "demonstrations": 4,
    "held_out": 12,
    "evaluate_every": 2,
}
"""The settings of a run of three minutes, in which every phase occurs but little is learned."""
AGENT: dict[str, Any] = {
    "steps": 10,
    "groups": 6,
    "rollouts": 4,
    "held_out": 24,
    "evaluate_every": 5,
    "max_output_tokens": 64,
    "max_turns": 4,
    "overlong_cache": 128,
}
"""The settings for a program instead of the node's own loop. Each rollout starts the program, which takes CPU time."""

TRAINER_GRACE_S = 10.0
LOAD_TIMEOUT_S = 60.0
LOG_TAIL_BYTES = 3000
MAX_MODEL_TOKENS = 512
MAX_AGENT_TOKENS = 1024
"""Context for the longer prompts of programs. They must still be short: most programs need 4,000 tokens and more."""
RUN_WORKERS = 64
BLOCK_TOKENS = 32
"""Tokens per block of the engine's cache. Prompts have 50 to 100 tokens, too few to share the default blocks of 128."""
MAX_OBSERVATION_CHARS = 160
"""Maximum characters of an observation. Every token of a traceback is processed by the engine and by the trainer."""
SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"}
"""Engine and trainer share the cores in turn, so threads must not spin while they wait."""
console = Console(highlight=False)


class TrainingFailed(ServiceError):
    """The trainer's process failed. The error is in its log."""


@click.command()
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the demonstrations and problems.")
@click.option("--steps", type=click.IntRange(1), help="Policy updates (30; with --quick 2).")
@click.option(
    "--no-dynamic",
    is_flag=True,
    help="Train on every group, for comparison, even if all or none of its rollouts are correct.",
)
@click.option("--quick", is_flag=True, help="Run all parts in three minutes; the policy learns little.")
@click.option(
    "--objective", type=click.Choice(["dapo", "grpo", "dr-grpo", "rloo", "ppo"]), default="dapo", show_default=True
)
@click.option(
    "--agent",
    metavar="NAME",
    default="",
    help="Train on sums through this agent program; choose one with short prompts, such as pydantic-ai.",
)
@click.option("--provider", type=click.Choice(["auto", "apptainer", "bubblewrap"]), default="auto", show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Record below this folder."
)
@click.option("--resume", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Resume this run.")
def learn(
    seed: int,
    steps: int | None,
    no_dynamic: bool,
    quick: bool,
    objective: str,
    agent: str,
    provider: str,
    out: Path,
    resume: Path | None,
) -> None:
    """Watch a real policy learn to use a tool.

    SmolLM2-135M is first trained on Python cells with random operations. It then learns to solve word problems by GRPO
    with dynamic sampling. vLLM samples, each rollout has a sandbox, and the weights change while rollouts run. On two
    cores this takes about an hour. The run's folder contains curve.png, curve.json and trajectories before and after.

    With --agent, the policy gets no demonstrations. It learns to answer sums through a third-party program, in
    ten updates.

    Ctrl-C stops everything; --resume continues from the last checkpoint.
    """
    for python, target in ((engine_python(), "engine"), (trainer_python("train"), "trainers")):
        if not python.exists():
            raise ConfigError(f"{python} is not set up; run: prorl-trio setup {target}")
    if resume is not None:
        folder = resume
    else:
        if agent:
            find_preset(agent)
        chosen: dict[str, Any] = {
            **(AGENT if agent else {}),
            **(QUICK if quick else {}),
            **({"demonstration_steps": 0} if agent else {}),
            **({"steps": steps} if steps else {}),
        }
        settings = Settings(
            model=str(model_dir()),
            seed=seed,
            dynamic=not no_dynamic,
            objective=objective,
            agent=agent,
            dtype=default_dtype(),
            **chosen,
        )
        folder = run_folder(out)
        write_atomically(folder / SETTINGS, settings)
    console.print(f"the run is in {folder}", markup=False, soft_wrap=True)
    try:
        trio.run(_run, folder.resolve(), provider)
    except* KeyboardInterrupt:
        console.print(f"to go on: prorl-trio learn --resume {folder}", markup=False, soft_wrap=True)
        raise
    for name, figure in read_record(folder).summary.items():
        shown = f"{figure:.3f}" if isinstance(figure, float) else figure
        console.print(f"  {name:24} {shown}", markup=False)
    console.print(f"the curve: {folder / 'curve.png'}", markup=False, soft_wrap=True)


async def _run(folder: Path, provider: str) -> None:
    """Start all parts, wait until the run has its steps, and stop all parts."""
    settings, events = read_settings(folder), folder / EVENTS
    seen = events.stat().st_size if events.exists() else 0
    console.print("starting vLLM on the CPU, and showing the policy some sums: a minute or two ...")
    with single_exception():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow, events, console, seen)
            shown = trio.Event()
            nursery.start_soon(_show, folder, shown)
            engine = open_vllm(
                engine_python(),
                Path(settings.model),
                log_file=folder / "vllm.log",
                dtype=settings.dtype,
                max_model_len=MAX_AGENT_TOKENS if settings.agent else MAX_MODEL_TOKENS,
                extra_args=["--enable-scale-out", "--block-size", str(BLOCK_TOKENS)],
                env={"VLLM_SERVER_DEV_MODE": "1", **SHARED_CORES},
            )
            async with engine as server:
                await shown.wait()
                await _give_weights(server, max((folder / CHECKPOINTS).glob("step-*")))
                config = _node_config(folder, settings, server.url, provider)
                async with open_node_process(config, folder=folder, log_file=folder / "node.log") as node:
                    console.print("a node is up; now the policy learns by its own rollouts")
                    env = {"PRORL_URL": node.url, "PRORL_TOKEN": node.token, "PRORL_ENGINE_URL": server.url}
                    await _run_trainer("train", folder, env)
            await trio.sleep(2 * POLL_S)  # for the last lines
            nursery.cancel_scope.cancel()


async def _show(folder: Path, shown: trio.Event) -> None:
    """Make the run's first checkpoint, unless it exists."""
    if not any((folder / CHECKPOINTS).glob("step-*")):
        await _run_trainer("warm_up", folder, {})
    shown.set()


async def _give_weights(engine: VllmProcess, checkpoint: Path) -> None:
    """Load a checkpoint into the engine under its version name, before a node requests this version."""
    client = VllmClient(engine.url)
    try:
        await client.probe(timeout_s=LOAD_TIMEOUT_S)
        loaded = await client.load_weights(str(checkpoint), timeout_s=LOAD_TIMEOUT_S)
        version = str(int(checkpoint.name.rpartition("-")[2]))
        if not (loaded and await client.label_weights(version, timeout_s=LOAD_TIMEOUT_S)):
            raise ServiceError(f"vLLM at {engine.url} loads no weights: is it in development mode?")
    finally:
        client.http.close()


def _node_config(folder: Path, settings: Settings, engine_url: str, provider: str) -> dict[str, object]:
    return {
        "node_id": "learn",
        "model": {"path": settings.model},
        "backends": {"urls": [engine_url], "required": True},
        "sandbox": {"provider": provider},
        "stages": {"run_workers": RUN_WORKERS},
        "agent": {"max_nudges": 0, "max_observation_chars": MAX_OBSERVATION_CHARS},
        "ledger": {"dir": str(folder / "ledger")},  # a resumed run finds its session there
    }


async def _run_trainer(module: str, folder: Path, env: dict[str, str]) -> None:
    """Run `prorl_launch.learning.MODULE` in the trainers' environment until it ends.

    Raises:
        TrainingFailed: it ended with an error.
    """
    log_file = folder / "trainer.log"
    command = [str(trainer_python("train")), "-m", f"prorl_launch.learning.{module}", str(folder)]
    env = {**os.environ, "PYTHONPATH": import_path(), "HF_HUB_OFFLINE": "1", **SHARED_CORES, **env}
    async with open_supervised(command, env=env, log_file=log_file, grace_s=TRAINER_GRACE_S) as process:
        code = await process.wait()
    if code != 0:
        tail = (await trio.Path(log_file).read_bytes())[-LOG_TAIL_BYTES:].decode(errors="replace")
        raise TrainingFailed(f"{module} ended with exit code {code}. The end of {log_file}:\n{tail}")
