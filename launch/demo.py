"""The main job on one machine: a local vLLM, a node, a trainer, real questions. `prorl-trio demo`."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import trio
from rich.console import Console

from launch.paths import engine_python, model_dir
from launch.supervised import open_supervised
from launch.vllm import open_vllm
from prorl_trio.cli import run_jobs
from prorl_trio.client import connect
from prorl_trio.client.collect import make_jobs
from prorl_trio.client.recording import run_folder
from prorl_trio.errors import ConfigError, InternalError, ProrlError
from prorl_trio.models import SamplingParams
from prorl_trio.tasksets import load_task_set

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.client.recording import Summary

__all__ = ["NodeProcess", "demo", "open_node_process"]

NODE_START_TIMEOUT_S = 120.0
NODE_STOP_TIMEOUT_S = 30.0
NODE_GRACE_S = 3.0
ENDPOINT_POLL_S = 0.05
MIN_COMPLETED_SHARE = 0.75
"""With fewer completed rollouts than this the demo has failed."""

console = Console()


class NodeProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A node in a process of its own, listening."""

    url: str
    token: str
    pid: int


@asynccontextmanager
async def open_node_process(config: dict[str, object], *, folder: Path, log_file: Path) -> AsyncIterator[NodeProcess]:
    """Run `prorl-trio serve` with `config` (as in node.toml, without `listen`) until the block is left.

    It listens on the loopback interface with a fresh token. On leaving it is asked to drain and, when the block was
    left by an error or a cancel, to cancel; its whole process tree has gone afterwards, also if this process is killed.

    Args:
        config: tables of node.toml.
        folder: private to the caller; gets the node's configuration, token and endpoint.
        log_file: gets its output.

    Raises:
        ProrlError: it does not start; the message has the end of its log.
        InternalError: it did not end cleanly.
    """
    token_file, endpoint_file = folder / "token", folder / "endpoint.json"
    token = secrets.token_urlsafe(32)
    token_file.touch(mode=0o600)
    token_file.write_text(token)
    listen = {"port": 0, "token_file": str(token_file), "endpoint_file": str(endpoint_file)}
    config_file = folder / "node.toml"
    config_file.write_bytes(msgspec.toml.encode({**config, "listen": listen}))
    command = [sys.executable, "-m", "prorl_trio.cli", "serve", "--config", str(config_file)]
    async with open_supervised(command, env=os.environ, log_file=log_file, grace_s=NODE_GRACE_S) as process:
        url = await _wait_endpoint(endpoint_file, process.wait, log_file)
        try:
            yield NodeProcess(url=url, token=token, pid=process.pid)
        except BaseException:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
            with trio.move_on_after(NODE_GRACE_S, shield=True):
                await trio.sleep(ENDPOINT_POLL_S)  # two signals at once would count as one
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
                await process.wait()
            raise
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        with trio.move_on_after(NODE_STOP_TIMEOUT_S):
            code = await process.wait()
            if code:
                raise InternalError(f"the node ended with exit code {code}; see {log_file}")
            return
        raise InternalError(f"the node did not end within {NODE_STOP_TIMEOUT_S:g} s of SIGTERM; see {log_file}")


async def _wait_endpoint(endpoint_file: Path, wait_end: object, log_file: Path) -> str:
    """The node's URL, once its listener is open."""
    assert callable(wait_end)
    url = ""
    with trio.move_on_after(NODE_START_TIMEOUT_S):
        async with trio.open_nursery() as nursery:

            async def watch_end() -> None:
                await wait_end()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch_end)
            while not endpoint_file.exists():
                await trio.sleep(ENDPOINT_POLL_S)
            url = msgspec.json.decode(endpoint_file.read_bytes())["url"]
            nursery.cancel_scope.cancel()
    if not url:
        tail = log_file.read_bytes()[-4000:].decode(errors="replace")
        raise ProrlError(f"the node did not start. The end of {log_file}:\n{tail}")
    return url


@click.command()
@click.option("--questions", type=click.IntRange(1, 100), default=32, show_default=True, help="GSM8K questions.")
@click.option("--rollouts", type=click.IntRange(1), default=4, show_default=True, help="Rollouts per question.")
@click.option("--max-turns", type=click.IntRange(1), default=3, show_default=True)
@click.option("--max-output-tokens", type=click.IntRange(1), default=192, show_default=True, help="Per turn.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.7, show_default=True)
@click.option("--provider", type=click.Choice(["auto", "apptainer", "bubblewrap"]), default="auto", show_default=True)
@click.option("--backend", help="Use this vLLM server (http://host:port) instead of starting one on the CPU.")
@click.option("--model", type=click.Path(path_type=Path), help="With --backend: the folder of the model it serves.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Record here.")
def demo(
    questions: int,
    rollouts: int,
    max_turns: int,
    max_output_tokens: int,
    temperature: float,
    provider: str,
    backend: str | None,
    model: Path | None,
    out: Path,
) -> None:
    """Watch a real model solve real maths problems: vLLM on the CPU, a node, a sandbox per rollout, a trainer client.

    SmolLM2-135M is tiny, so do not expect right answers: expect every rollout to end, every token and log-probability
    to arrive, and no prefix to break. Exit code 0 only then. On a GPU, with a real policy:

    \b
        vllm serve Qwen/Qwen3-8B --max-model-len 16384
        prorl-trio demo --backend http://127.0.0.1:8000 --model /models/Qwen3-8B --max-output-tokens 2048
    """
    if backend is not None and model is None:
        raise click.UsageError("--backend needs --model: the folder with the tokenizer of the model it serves")
    model = model or model_dir()
    if backend is None and not (engine_python().exists() and model.is_dir()):
        raise ConfigError("the CPU engine or its model is not set up; run: make setup")
    specs = make_jobs(
        load_task_set("gsm8k")[:questions],
        rollouts=rollouts,
        sampling=SamplingParams(temperature=temperature, max_output_tokens=max_output_tokens),
        max_turns=max_turns,
    )

    async def run() -> Summary:
        out.mkdir(parents=True, exist_ok=True)
        async with AsyncExitStack() as stack:
            private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-demo-")))
            folder = run_folder(out)
            url = backend
            if url is None:
                console.print(f"starting vLLM with {model.name} on the CPU (about a minute) ...")
                engine = open_vllm(engine_python(), model, log_file=folder / "vllm.log")
                url = (await stack.enter_async_context(engine)).url
            console.print(f"starting a node on {url} ...")
            config: dict[str, object] = {
                "model": {"path": str(model)},
                "backends": {"urls": [url], "required": True},
                "sandbox": {"provider": provider},
            }
            node = await stack.enter_async_context(
                open_node_process(config, folder=private, log_file=folder / "node.log")
            )
            client = await stack.enter_async_context(connect(node.url, node.token))
            return await run_jobs(client, specs, folder, model=str(model), tasks="gsm8k")

    summary = trio.run(run)
    ended = summary.completed + summary.failed + summary.cancelled + summary.timed_out
    if ended < len(specs) or summary.prefix_breaks or summary.completed < MIN_COMPLETED_SHARE * len(specs):
        console.print("[red]the demo failed: rollouts are missing, prefixes broke, or too few completed[/red]")
        sys.exit(1)
