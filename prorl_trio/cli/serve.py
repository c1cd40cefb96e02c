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
    help="The trainers' password, instead of the file's. Better set PRORL_TOKEN: others can see command lines. A token "
    "in the file that differs from PRORL_TOKEN is an error.",
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
    help="An LLM backend, instead of those of backends.urls; may be given again. Of weight 2, it gets twice as many "
    "rollouts as one of weight 1, which is the default.",
)
@click.option(
    "--handler",
    "handlers",
    multiple=True,
    metavar="MODULE:CLASS",
    help="A handler class beside those of installed packages; may be given again. Modules of the working directory are "
    "found.",
)
@click.option(
    "--on-hangup",
    type=click.Choice(get_args(OnHangup)),
    help="What SIGHUP means, instead of the file's on_hangup. auto, the default: drain if the node was started from a "
    "terminal, which is gone then; else reload.",
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

    The first one drains the node: it takes no new jobs, and lets those it has end, for drain_timeout_s at most (SIGTERM
    in an allocation of Slurm's: until that ends). The second cancels the jobs that are left. A third kills the node.

    Exit code: 0 every job had its own outcome; 3 jobs were cut short (they end as `cancelled`; with
    fleet.restart_within_s the next start runs them); 1 it could not start or its configuration is wrong; 70 a bug of
    prorl-trio ended it.

    SIGHUP reads the file again: worker counts, queue limits, admission, weights of sessions, budgets, limits of agents
    and backends, how backends are watched, and monitoring change at once; the log says what needs a restart. On a node
    that was started from a terminal, SIGHUP means that the terminal is gone: that node drains (see --on-hangup).

    The WebSocket and REST are at one port. With listen.tls_cert and listen.tls_key, PEM files, it speaks TLS: the
    WebSocket is wss:// and REST https://.

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
        if not given or (config.listen.token_file and not token):  # in a file it may change
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
