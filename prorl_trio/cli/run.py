"""`prorl-trio run`: run a few rollouts of one handler in this process."""

from __future__ import annotations

import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import trio
from rich.text import Text

from prorl_trio.chat.format import ChatFormat
from prorl_trio.cli.task_files import TASKS_HELP
from prorl_trio.config import NodeConfig
from prorl_trio.node.core import open_node
from prorl_trio.runs.progress import console
from prorl_trio.runs.transcript import render_trajectory
from prorl_trio.tasks.handlers.registry import HandlerRegistry, find_handler
from prorl_trio.tasks.sets import load_task_set
from prorl_trio.testing.echo_engine import open_echo_engine
from prorl_trio.types.models import JobSpec, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.tasks.handlers.base import AgentHandler
    from prorl_trio.types.models import Outcome, Status

ECHO = "echo"
PATIENCE_S = 86_400.0
"""Time limit for each stage and tool, in seconds. It is long so that a debugging session is not interrupted."""


class _Sink:
    """A `JobSink` that receives the outcome of one job."""

    session_id = "run"

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.outcome: Outcome | None = None

    def deliver(self, outcome: Outcome) -> None:
        self.outcome = outcome.detached()
        self.ended.set()

    def report(self, job_id: str, status: Status, detail: str) -> None:
        console.print(Text(f"{job_id}: {status}", style="dim"))


@click.command()
@click.argument("handler", metavar="HANDLER")
@click.option("--tasks", "--task", "tasks", required=True, help=TASKS_HELP)
@click.option("--limit", type=click.IntRange(1), default=1, show_default=True, help="Run this many tasks, one by one.")
@click.option(
    "--policy",
    default=ECHO,
    show_default=True,
    help="URL of an engine; or `echo`, which has no model and repeats the last message.",
)
@click.option("--model", type=click.Path(path_type=Path), help="Folder of the model's tokenizer. Required with a URL.")
@click.option(
    "--provider",
    default="auto",
    show_default=True,
    help="Sandbox provider, as sandbox.provider in node.toml.",
)
@click.option("--max-turns", type=click.IntRange(1), default=8, show_default=True, help="Most turns per rollout.")
@click.option(
    "--max-output-tokens", type=click.IntRange(1), default=2048, show_default=True, help="Most sampled tokens per turn."
)
def run(
    handler: str,
    tasks: str,
    limit: int,
    policy: str,
    model: Path | None,
    provider: str,
    max_turns: int,
    max_output_tokens: int,
) -> None:
    """Run a few tasks of one handler in this process.

    HANDLER is MODULE:CLASS (modules in the working directory are found) or the name of an installed handler. The
    handler runs in this process without budgets, so `breakpoint()` and `python -m pdb -m prorl_trio run ...` work in
    it. For each task, the command prints the transcript, the reward and the evaluator's log.

    \b
    Exit codes:
        0  every rollout has a reward
        1  at least one rollout has none

    \b
        prorl-trio run my_env:SupportHandler --task tasks.jsonl
        prorl-trio run my_env:SupportHandler --task tasks.jsonl --policy http://127.0.0.1:8000 --model /models/Qwen3-8B
    """
    if policy != ECHO and model is None:
        raise click.UsageError("--policy URL needs --model: the folder with the tokenizer of the model that it serves")
    found = find_handler(handler)
    sampling = SamplingParams(max_output_tokens=max_output_tokens)
    specs = [
        JobSpec(
            job_id=instance.instance_id[:200],
            instance=msgspec.structs.replace(instance, handler=found.name),
            sampling=sampling,
            max_turns=max_turns,
        )
        for instance in load_task_set(tasks, check=False)[:limit]  # the node checks them
    ]
    if not all(trio.run(_run, found, specs, policy, model, provider)):
        raise SystemExit(1)


async def _run(
    handler: AgentHandler, specs: Sequence[JobSpec], policy: str, model: Path | None, provider: str
) -> list[bool]:
    """Run the jobs one after the other. Return for each job whether it has a reward."""
    async with AsyncExitStack() as stack:
        if model is None:
            model = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-echo-")), "model")
            policy = await stack.enter_async_context(open_echo_engine(model))
        config = {
            "model": {"path": os.fspath(model)},
            "backends": {"urls": [policy], "required": True},
            "sandbox": {"provider": provider},
            "budgets": dict.fromkeys(("init_s", "run_s", "eval_s", "total_s", "agent_s"), PATIENCE_S),
            "agent": {"tool_timeout_s": PATIENCE_S},
        }
        registry = HandlerRegistry([handler])
        node = await stack.enter_async_context(open_node(msgspec.convert(config, NodeConfig), registry))
        chat_format = await trio.to_thread.run_sync(ChatFormat.load, model)
        rewarded = []
        for spec in specs:
            sink = _Sink()
            await node.examine([spec])
            node.check(spec, sink, 0)
            node.take(spec, sink, 1)
            await sink.ended.wait()
            assert sink.outcome is not None
            _show(sink.outcome, chat_format)
            rewarded.append(sink.outcome.reward is not None)
        return rewarded


def _show(outcome: Outcome, chat_format: ChatFormat) -> None:
    console.print(render_trajectory(outcome, chat_format))
    if outcome.evaluation_log:
        console.print(Text(f"evaluator: {outcome.evaluation_log.rstrip()}", style="dim"))
    console.print(Text(f"{outcome.job_id}: {outcome.status}, reward {outcome.reward}", style="bold"))
