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
    """Run the head of a fleet, which is used as a node.

    It is the one address at which trainers use all nodes of the folder, until SIGTERM or Ctrl-C.

    The head takes jobs as a node does, and has the nodes work on them. It can be killed and started again at any time:
    with the same ledger, sessions, jobs and outcomes are those of before, and the nodes go on meanwhile.

    The first signal drains: the head takes no new jobs, and lets those it has end, for drain_timeout_s at most. The
    second ends it at once. Jobs that are left go on in the nodes, and are the next start's.

    SIGHUP reads listen.token_file again; on a head that was started from a terminal it drains (on_hangup).

    The token is that of the configuration or PRORL_TOKEN; without either, the head makes one. Trainers that use the
    folder, `connect(fleet=DIR)`, read the token there.

    Exit code: 0 every job had its own outcome; 3 jobs are left to the next start, or were cancelled; 1 it could not
    start or its configuration is wrong; 70 a bug of prorl-trio ended it.
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
    """Return the configuration with the token of the environment, or a new one if there is none at all."""
    given = agreed_token(listen, os.environ.get(TOKEN_VARIABLE, ""))
    if listen.token_file and not given:
        return listen
    return msgspec.structs.replace(listen, token=given or os.urandom(24).hex(), token_file="")
