"""`prorl-trio serve`: run a node."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click
import msgspec
import trio

from prorl_trio.cli.exit_codes import EXIT_JOBS_CUT
from prorl_trio.cli.ready import Ready
from prorl_trio.config import OnHangup, load_config
from prorl_trio.config.quantities import MAX_WEIGHT
from prorl_trio.config.secrets import TOKEN_VARIABLE, agreed_token
from prorl_trio.node.garbage import open_garbage_searches
from prorl_trio.node.serve import serve_node
from prorl_trio.tasks.handlers.registry import HandlerRegistry, find_handler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.config import NodeConfig

logger = logging.getLogger(__name__)


def _weighted_urls(_context: click.Context, _parameter: click.Parameter, values: Sequence[str]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for value in values:
        url, _, weight = value.partition(",weight=")
        try:
            weights[url] = float(weight or 1.0)
        except ValueError:
            raise click.BadParameter(f"{value}: the weight is not a number") from None
        if not 0 < weights[url] <= MAX_WEIGHT:
            raise click.BadParameter(f"{value}: the weight must be > 0 and at most {MAX_WEIGHT:g}")
    return weights


def _refuse_rest_port(_context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.BadParameter("REST is always served, at the port of the WebSocket; use --port")


@click.command()
@click.option("--config", "config_path", required=True, type=click.Path(path_type=Path), help="The node's TOML file.")
@click.option(
    "--token",
    help="Token for trainers, instead of the file's. Prefer PRORL_TOKEN, because other users can "
    "read command lines. PRORL_TOKEN and a token in the file must be equal.",
)
@click.option(
    "--port", type=click.IntRange(0, 65_535), help="The node's port, instead of listen.port (0: any free one)."
)
@click.option("--rest-port", hidden=True, expose_value=False, callback=_refuse_rest_port)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="URL[,weight=W]",
    callback=_weighted_urls,
    help="LLM backend, instead of backends.urls. Repeatable. With weight 2 it gets twice as many "
    "rollouts as with 1, the default.",
)
@click.option(
    "--handler",
    "handlers",
    multiple=True,
    metavar="MODULE:CLASS",
    help="Handler class, in addition to installed ones; modules in the working directory are found. Repeatable.",
)
@click.option(
    "--on-hangup",
    type=click.Choice(get_args(OnHangup)),
    help="Effect of SIGHUP, instead of on_hangup in the file. `auto`, the default, drains a node "
    "started from a terminal, and reloads any other.",
)
def serve(
    config_path: Path,
    token: str | None,
    port: int | None,
    backends: dict[str, float],
    handlers: tuple[str, ...],
    on_hangup: OnHangup | None,
) -> None:
    """Run a node until SIGTERM or Ctrl-C.

    The first signal drains the node: it accepts no new jobs and waits for running jobs, at most drain_timeout_s. After
    SIGTERM in a Slurm allocation, it waits until the allocation ends. The second signal cancels the remaining jobs. A
    third kills the node.

    SIGHUP reloads the configuration file. These settings change at once: worker counts, queue limits, admission,
    session weights, budgets, backends, limits of agents and backends, backend health checks, and monitoring. The log
    names the settings that need a restart. If the node was started from a terminal, SIGHUP means that the terminal was
    closed, and the node drains (see --on-hangup).

    The WebSocket and REST share one port. With listen.tls_cert and listen.tls_key (PEM files), the node uses TLS: the
    WebSocket becomes wss:// and REST https://.

    \b
    Exit codes:
        0   every job has its own outcome
        1   the node could not start, or its configuration is wrong
        3   jobs were cut short: they end as `cancelled`, or run again at the next
           start if fleet.restart_within_s is set
        70  the node stopped because of a bug in prorl-trio

    \b
    A minimal node.toml:
        [model]
        path = "/models/Qwen3-8B"           # tokenizer and chat template
        [listen]
        token_file = "/run/user/1000/token" # the trainer's password, mode 0600
        [backends]
        urls = ["http://127.0.0.1:8000"]    # vllm serve Qwen3-8B
    """

    def load() -> NodeConfig:
        config = load_config(config_path)
        if config.listen.token and config_path.stat().st_mode & 0o077:
            logger.warning(
                "%s has the token, and others can read it; chmod 600 it, or use listen.token_file", config_path
            )
        if backends:
            chosen = msgspec.structs.replace(config.backends, urls=list(backends), weights=backends)
            config = msgspec.structs.replace(config, backends=chosen)
        if on_hangup is not None:
            config = msgspec.structs.replace(config, on_hangup=on_hangup)
        if port is not None:
            config = msgspec.structs.replace(config, listen=msgspec.structs.replace(config.listen, port=port))
        given = token or agreed_token(config.listen, os.environ.get(TOKEN_VARIABLE, ""))
        if not given or (config.listen.token_file and not token):  # a token file may change at run time
            return config
        listen = msgspec.structs.replace(config.listen, token=given, token_file="")
        return msgspec.structs.replace(config, listen=listen)

    config = load()
    registry = HandlerRegistry.from_entry_points(map(find_handler, handlers))
    ready = Ready(secure=bool(config.listen.tls_cert))

    async def serve() -> bool:
        async with open_garbage_searches():
            return await serve_node(config, registry, load=load, ends_process=True, task_status=ready)

    sys.exit(0 if trio.run(serve) else EXIT_JOBS_CUT)
