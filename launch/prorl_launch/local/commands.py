"""`prorl-trio local`: a fleet of nodes on one machine."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
import trio

from prorl_launch.local.claim import claimed, find_claim
from prorl_launch.local.fleet import run_nodes
from prorl_launch.local.plan import LOCAL, check_config, write_head, write_plan
from prorl_trio.cli.exit_codes import EXIT_JOBS_CUT
from prorl_trio.client.terminal import say, say_json
from prorl_trio.rendezvous.report import look_at_fleet
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from prorl_launch.local.claim import Claim

POLL_S: Final = 0.1
SIGNALS_APART_S: Final = 0.1
_FLEET = click.option(
    "--fleet",
    "fleet_dir",
    envvar="PRORL_FLEET",
    show_envvar=True,
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The fleet's folder.",
)
_HEAD_CONFIG = click.option(
    "--head-config",
    "head_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Settings of the head, as of `prorl-trio fleet --config`; where it is silent, those of the nodes.",
)


@click.group()
def local() -> None:
    """Start, watch and end a fleet of nodes on this machine.

    It is the fleet that `prorl-trio slurm` starts on many: the same nodes, and a trainer finds them in the same way.

    \b
        prorl-trio local up --fleet /tmp/fleet --config node.toml --nodes 2
        prorl-trio submit --fleet /tmp/fleet --tasks sums       # in another terminal
        prorl-trio local down --fleet /tmp/fleet
    """


@local.command()
@_FLEET
@click.option(
    "--config",
    "config_file",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="node.toml of every node.",
)
@_HEAD_CONFIG
@click.option("--nodes", type=click.IntRange(1, 64), default=2, show_default=True, help="Nodes, each a process.")
def up(fleet_dir: Path, config_file: Path, head_file: Path | None, nodes: int) -> None:
    """Run a fleet, nodes and head, until Ctrl-C.

    Each node has the given node.toml, but a name, free ports and a folder of its own: LOCAL/NODE in the fleet's folder
    has its node.toml, its log and its ledger, where the next start finds what was not delivered. Their backends are
    those of the file: all nodes use them.

    The first Ctrl-C or SIGTERM drains all nodes: they take no new jobs, and let those that they have end. The second
    cancels the jobs that are left, the third kills. Nothing stays, also if this command is killed. A node that ends by
    itself is told, and its jobs go to the others; a head that ends is started again, and has its jobs in its ledger.

    Where the fleet is up already, with as many nodes, this says so and does nothing.

    Exit code: 0 every job had its own outcome, or the fleet was up already; 3 jobs were cut short; 1 a node did not
    start, or ended by itself.
    """
    check_config(config_file)
    fleet = Path(os.path.abspath(fleet_dir))
    with claimed(fleet, nodes) as other:
        if other is not None:
            _require_same(other, fleet, nodes)
            say(f"{_count(nodes)} of the fleet in {fleet} are up already, by process {other.process.pid}")
            return
        folders = write_plan(config_file, fleet, nodes)
        head = write_head(config_file, head_file, fleet)
        codes = trio.run(
            lambda: run_nodes(
                fleet,
                folders,
                head,
                on_ready=lambda: say(f"READY {_count(nodes)}; trainers find them by PRORL_FLEET={fleet}"),
                on_end=lambda name, code: say(
                    f"node {name} has ended with exit code {code}; its log is {fleet / LOCAL / name / 'node.log'}"
                ),
            )
        )
    sys.exit(max(codes.values()) if len(codes) == nodes and {0, EXIT_JOBS_CUT} >= {*codes.values()} else 1)


@local.command()
@_FLEET
def status(fleet_dir: Path) -> None:
    """Print the head and the nodes of a fleet as JSON, and whether `local up` runs them.

    `life` is `live`, `stale` (no heartbeat is seen) or `ended`; `state` is what a node said of itself at its last
    heartbeat, and `capacity` what it had to do. Jobs, backends and sandboxes: `prorl-trio status --fleet`.
    """
    claim = find_claim(fleet_dir)
    found = look_at_fleet(fleet_dir)
    say_json({"up": None if claim is None else claim.process.pid, **msgspec.structs.asdict(found)})


@local.command()
@_FLEET
@click.option("--drain-s", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Drain first, so long.")
@click.option("--timeout-s", type=click.FloatRange(min=1), default=60.0, show_default=True, help="Longest wait then.")
def down(fleet_dir: Path, drain_s: float, timeout_s: float) -> None:
    """End a fleet, and return when nothing of it runs.

    With --drain-s the nodes first let the jobs that they have end. Jobs that are left are cancelled; what was not
    delivered stays in the ledgers for the next `up`. Where nothing is up, this says so and does nothing.
    """
    claim = find_claim(fleet_dir)
    if claim is None:
        say(f"no fleet is up in {fleet_dir}")
        return
    _signal(claim)
    if _gone(fleet_dir, drain_s or SIGNALS_APART_S):  # two signals at once would count as one
        return
    _signal(claim)
    if not _gone(fleet_dir, timeout_s):
        raise ConfigError(
            f"the fleet in {fleet_dir} has not ended within {timeout_s:g} s; a third signal kills it: "
            f"kill {claim.process.pid}"
        )


def _require_same(other: Claim, fleet: Path, nodes: int) -> None:
    if other.nodes != nodes:
        raise ConfigError(
            f"the fleet in {fleet} is up with {_count(other.nodes)}, by process {other.process.pid}, and {nodes} were "
            f"asked for; end it first: prorl-trio local down --fleet {fleet}"
        )


def _count(nodes: int) -> str:
    return f"{nodes} node{'s' * (nodes > 1)}"


def _signal(claim: Claim) -> None:
    os.kill(claim.process.pid, signal.SIGTERM)


def _gone(fleet: Path, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while find_claim(fleet) is not None:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)  # a command without a loop; another process ends
    return True
