"""`prorl-trio demo`: the whole service on one machine, with a local vLLM, a node, a trainer and real questions."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click
import trio

from prorl_launch.node import open_node_process
from prorl_launch.paths import engine_python, model_dir
from prorl_launch.vllm import open_vllm
from prorl_trio.cli.task_files import agent_option
from prorl_trio.client import connect
from prorl_trio.runs.collect import make_jobs
from prorl_trio.runs.progress import console, run_jobs
from prorl_trio.runs.recording import run_folder
from prorl_trio.tasks.sets import load_task_set
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import SamplingParams

if TYPE_CHECKING:
    from prorl_trio.runs.recording import Summary

MIN_COMPLETED_SHARE = 0.75
"""The demo fails below this share of completed rollouts."""


@click.command()
@click.option("--tasks", default="sums", show_default=True, help="A task set (sums, gsm8k), or a JSONL file of tasks.")
@click.option(
    "--questions",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Use the first N questions of the task set.",
)
@click.option("--rollouts", type=click.IntRange(1), default=4, show_default=True, help="Rollouts per question.")
@click.option("--max-turns", type=click.IntRange(1), default=3, show_default=True)
@agent_option
@click.option("--max-output-tokens", type=click.IntRange(1), default=192, show_default=True, help="Per turn.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.4, show_default=True)
@click.option("--provider", type=click.Choice(["auto", "apptainer", "bubblewrap"]), default="auto", show_default=True)
@click.option("--backend", help="Use this vLLM server (http://host:port) instead of starting one on the CPU.")
@click.option("--model", type=click.Path(path_type=Path), help="With --backend: folder of the served model.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Record below this folder."
)
def demo(
    tasks: str,
    questions: int,
    rollouts: int,
    max_turns: int,
    agent: str | None,
    max_output_tokens: int,
    temperature: float,
    provider: str,
    backend: str | None,
    model: Path | None,
    out: Path,
) -> None:
    """Watch a real model answer questions, several times each.

    The demo starts vLLM on the CPU, a node, a sandbox for each rollout and a client. SmolLM2-135M is tiny and
    untrained. It answers about a third of the sums and short questions. The table of groups shows which questions it
    could learn from, because their rewards differ, and how the other rollouts ended. The exit code is 0 only if every
    rollout ended and no prefix broke. For competition-like questions, which it never answers, use --tasks gsm8k. With a
    real policy on a GPU:

    \b
        vllm serve Qwen/Qwen3-8B --max-model-len 16384
        prorl-trio demo --backend http://127.0.0.1:8000 --model /models/Qwen3-8B --tasks gsm8k \\
            --temperature 1 --max-output-tokens 2048
    """
    if backend is not None and model is None:
        raise click.UsageError("--backend needs --model: the folder with the tokenizer of the model it serves")
    model = model or model_dir()
    if backend is None and not (engine_python().exists() and model.is_dir()):
        raise ConfigError("the CPU engine or its model is not set up; run: prorl-trio setup engine")
    specs = make_jobs(
        load_task_set(tasks)[:questions],
        rollouts=rollouts,
        sampling=SamplingParams(temperature=temperature, max_output_tokens=max_output_tokens),
        max_turns=max_turns,
        agent=agent,
    )

    async def run() -> Summary:
        async with AsyncExitStack() as stack:
            folder = run_folder(out)
            url = backend
            if url is None:
                _say(f"starting vLLM with {model.name} on the CPU (about a minute) ...")
                engine = open_vllm(engine_python(), model, log_file=folder / "vllm.log")
                url = (await stack.enter_async_context(engine)).url
            _say(f"starting a node on {url} ...")
            config: dict[str, object] = {
                "model": {"path": str(model)},
                "backends": {"urls": [url], "required": True},
                "sandbox": {"provider": provider},
            }
            node = await stack.enter_async_context(
                open_node_process(config, folder=folder, log_file=folder / "node.log")
            )
            client = await stack.enter_async_context(connect(node.url, node.token))
            return await run_jobs(client, specs, folder, model=str(model), tasks=tasks)

    summary = trio.run(run)
    ended = summary.completed + summary.failed + summary.cancelled + summary.timed_out
    if ended < len(specs) or summary.prefix_breaks or summary.completed < MIN_COMPLETED_SHARE * len(specs):
        console.print("[red]the demo failed: rollouts are missing, prefixes broke, or too few completed[/red]")
        sys.exit(1)


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
