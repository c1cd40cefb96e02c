"""`prorl-trio fleet`: run the head of a fleet."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import trio

from prorl_trio.cli.exit_codes import EXIT_JOBS_CUT
from prorl_trio.cli.ready import Ready
from prorl_trio.config import HeadConfig, load_head_config
from prorl_trio.config.secrets import TOKEN_VARIABLE, agreed_token
from prorl_trio.fleet.serve import serve_fleet

if TYPE_CHECKING:
    from prorl_trio.config import ListenConfig

logger = logging.getLogger(__name__)


@click.command()
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="The fleet's folder, the fleet.dir of its nodes, instead of the file's.",
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="A TOML file with the tables listen, rest, fleet, arena, ledger, admission, monitoring and telemetry of "
    "node.toml. Without it the head listens on every address, at a free port, which its entry in the folder names.",
)
@click.option(
    "--ledger",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder of the head's ledger, instead of the file's ledger.dir. The default is a folder below "
    "~/.local/state of this machine.",
)
@click.option("--port", type=click.IntRange(0, 65_535), help="The port, instead of the file's (0: any free one).")
def fleet(folder: Path | None, config_path: Path | None, ledger: Path | None, port: int | None) -> None:
    """Run the head of a fleet.

    Trainers use all nodes in the fleet's folder through this one address, as if it were a single node. The head runs
    until SIGTERM or Ctrl-C.

    The head accepts jobs and passes them to the nodes. It can be killed and restarted at any time: with the same
    ledger, it restores its sessions, jobs and outcomes. The nodes keep working while the head is down.

    The first signal drains the head: it accepts no new jobs and waits for running jobs, at most drain_timeout_s. The
    second signal stops it at once. Remaining jobs continue on the nodes, and the head picks them up after its restart.

    SIGHUP reloads listen.token_file. If the head was started from a terminal, SIGHUP drains it instead (on_hangup).

    The token comes from the configuration or PRORL_TOKEN. Without either, the head generates a token. Trainers that
    connect with `connect(fleet=DIR)` read the token from the folder.

    \b
    Exit codes:
        0   every job has its own outcome
        1   the head could not start, or its configuration is wrong
        3   jobs were cancelled, or remain for the next start
        70  the head stopped because of a bug in prorl-trio
    """
    config = HeadConfig() if config_path is None else load_head_config(config_path)
    listen = config.listen
    if config_path is None:
        listen = msgspec.structs.replace(listen, host="0.0.0.0", port=0)
    if port is not None:
        listen = msgspec.structs.replace(listen, port=port)
    config = msgspec.structs.replace(config, listen=_with_token(listen))
    if folder is not None:
        config = msgspec.structs.replace(config, fleet=msgspec.structs.replace(config.fleet, dir=str(folder)))
    if ledger is not None:
        config = msgspec.structs.replace(config, ledger=msgspec.structs.replace(config.ledger, dir=str(ledger)))
    ready = Ready(secure=bool(listen.tls_cert))

    async def serve() -> bool:
        return await serve_fleet(config, ends_process=True, task_status=ready)

    sys.exit(0 if trio.run(serve) else EXIT_JOBS_CUT)


def _with_token(listen: ListenConfig) -> ListenConfig:
    """Return the configuration with the token from the environment, or with a new token if none is configured."""
    given = agreed_token(listen, os.environ.get(TOKEN_VARIABLE, ""))
    if listen.token_file and not given:
        return listen
    return msgspec.structs.replace(listen, token=given or os.urandom(24).hex(), token_file="")
