"""`prorl-trio engine`: run a local vLLM whose weights a trainer may replace."""

from __future__ import annotations

import os
from pathlib import Path

import click
import trio

from prorl_launch.paths import cache_dir, engine_python, model_dir
from prorl_launch.vllm import open_vllm
from prorl_trio.client.terminal import say
from prorl_trio.types.errors import BackendError, ConfigError

_LOG = "engine.log"


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The model's folder. Default: the demo's, SmolLM2-135M.",
)
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=8000, show_default=True, help="Port; 0 takes any free one."
)
@click.option(
    "--max-model-len", type=click.IntRange(1), default=4096, show_default=True, help="Longest context, in tokens."
)
@click.option("--dtype", default="", help="Data type of the weights, as in vLLM. Default: the fastest on this machine.")
@click.option(
    "--log", "log_file", type=click.Path(dir_okay=False, path_type=Path), help="Log file. Default: in the cache folder."
)
@click.argument("vllm_options", nargs=-1, type=click.UNPROCESSED, metavar="[OPTION OF VLLM]...")
def engine(
    model: Path | None, port: int, max_model_len: int, dtype: str, log_file: Path | None, vllm_options: tuple[str, ...]
) -> None:
    """Run a vLLM server for a node on this machine, until Ctrl-C.

    The server listens on the loopback interface in development mode. A trainer may therefore pause it and load new
    weights, as `prorl-trio learn`, TRL and verl do. The command prints the node.toml lines for this engine. `prorl-trio
    setup engine` installs it. PRORL_ENGINE=gpu selects the build for CUDA. Further options are passed to vLLM.

    \b
        prorl-trio engine
        prorl-trio engine --model /models/Qwen3-0.6B --port 8001 --max-model-len 8192
    """
    model = (model or model_dir()).resolve()
    if not engine_python().exists() or not model.is_dir():
        raise ConfigError("the engine or its model is not set up; run: prorl-trio setup engine")
    log_file = log_file or cache_dir() / "logs" / _LOG
    log_file.parent.mkdir(parents=True, exist_ok=True)
    say(f"starting vLLM with {model.name} (about a minute); its log is {log_file}", err=True)
    trio.run(_run, model, port, max_model_len, dtype, log_file, vllm_options)


async def _run(
    model: Path, port: int, max_model_len: int, dtype: str, log_file: Path, vllm_options: tuple[str, ...]
) -> None:
    """Serve until cancelled. Raises BackendError if the server does not start, or ends by itself."""
    opened = open_vllm(
        engine_python(),
        model,
        log_file=log_file,
        port=port,
        max_model_len=max_model_len,
        dtype=dtype,
        extra_args=vllm_options,
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    async with opened as server:
        say(f'# {server.url} serves until Ctrl-C. In node.toml:\n[model]\npath = "{model}"')
        say(f'[backends]\nurls = ["{server.url}"]')
        process = os.pidfd_open(server.pid)
        try:
            await trio.lowlevel.wait_readable(process)
        finally:
            os.close(process)
        raise BackendError(f"vLLM has ended by itself; its log is {log_file}", retryable=False)
