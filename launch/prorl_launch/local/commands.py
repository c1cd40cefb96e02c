"""`prorl-trio local`: run a fleet of nodes on one machine."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
import trio

from prorl_launch.local.plan import LOCAL, check_config, run_nodes, write_head, write_plan
from prorl_trio.cli.exit_codes import EXIT_JOBS_CUT
from prorl_trio.client.terminal import say, say_json
from prorl_trio.rendezvous.entry import ProcessIdentity, this_process
from prorl_trio.rendezvous.folder import claim_folder
from prorl_trio.rendezvous.report import look_at_fleet
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    help="Settings of the head, as for `prorl-trio fleet --config`. Others are taken from the nodes.",
)

_FILE: Final = "up.lock"
_MAX_BYTES: Final = 4096
_WRITE_TIMEOUT_S: Final = 1.0
_LOOK_TIMEOUT_S: Final = 0.3
_POLL_S: Final = 0.01


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The process that runs a fleet, and the number of its nodes."""

    process: ProcessIdentity
    nodes: int


@contextmanager
def claimed(fleet: Path, nodes: int) -> Iterator[Claim | None]:
    """Claim the fleet in this folder for this process during the block. Yields another process's claim, if it exists.

    Raises:
        ConfigError: the folder cannot be used.
    """
    folder = claim_folder(fleet) / LOCAL
    folder.mkdir(mode=0o700, exist_ok=True)
    handle = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _take_soon(handle):
            yield _read(handle)
            return
        os.truncate(handle, 0)
        os.pwrite(handle, msgspec.json.encode(Claim(process=this_process(), nodes=nodes)), 0)
        yield None
    finally:
        os.close(handle)  # releases the lock


def find_claim(fleet: Path) -> Claim | None:
    """Return the claim of the process that currently runs the fleet in this folder; None without one."""
    try:
        handle = os.open(fleet / LOCAL / _FILE, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return None if _take(handle, fcntl.LOCK_SH) else _read(handle)
    finally:
        os.close(handle)


def _take(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _take_soon(handle: int) -> bool:
    """Return True if the exclusive lock was acquired. Readers such as `find_claim` hold the lock only briefly."""
    deadline_s = time.monotonic() + _LOOK_TIMEOUT_S
    while not _take(handle, fcntl.LOCK_EX):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)  # flock has no time-out
    return True


def _read(handle: int) -> Claim | None:
    """Return the claim that the lock's holder has written; None if the holder ended before."""
    deadline_s = time.monotonic() + _WRITE_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(os.pread(handle, _MAX_BYTES, 0), type=Claim)
        time.sleep(_POLL_S)  # it is being written
    return None


@click.group()
def local() -> None:
    """Start, watch and stop a fleet of nodes on this machine.

    It works like a fleet of `prorl-trio slurm`: the nodes are the same, and trainers find them in the same way.

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
@click.option(
    "--nodes", type=click.IntRange(1, 64), default=2, show_default=True, help="Number of nodes, one process each."
)
def up(fleet_dir: Path, config_file: Path, head_file: Path | None, nodes: int) -> None:
    """Run a fleet, nodes and head, until Ctrl-C.

    All nodes use the given node.toml and its backends, but each has its own name, free ports and folder. The folder
    LOCAL/NODE in the fleet's folder contains the node's node.toml, log and ledger. The next start finds undelivered
    outcomes in the ledger.

    The first Ctrl-C or SIGTERM drains all nodes: they accept no new jobs and wait for running jobs. The second cancels
    the remaining jobs, and the third kills the nodes. Nothing keeps running, even if this command is killed. If a node
    stops unexpectedly, this is reported, and its jobs move to other nodes. A stopped head is restarted with the jobs in
    its ledger.

    If the fleet is already running with this number of nodes, the command reports that and does nothing.

    \b
    Exit codes:
        0  every job has its own outcome, or the fleet was already running
        1  a node did not start, or stopped unexpectedly
        3  jobs were cut short
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

    `life` is `live`, `stale` (no recent heartbeat) or `ended`. `state` and `capacity` are a node's state and load at
    its last heartbeat. For jobs, backends and sandboxes, use `prorl-trio status --fleet`.
    """
    claim = find_claim(fleet_dir)
    found = look_at_fleet(fleet_dir)
    say_json({"up": None if claim is None else claim.process.pid, **msgspec.structs.asdict(found)})


@local.command()
@_FLEET
@click.option(
    "--drain-s", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Drain for this many seconds first."
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="Then wait for at most this many seconds.",
)
def down(fleet_dir: Path, drain_s: float, timeout_s: float) -> None:
    """Stop a fleet, and wait until all of its processes have ended.

    With --drain-s the nodes first wait for running jobs. The remaining jobs are cancelled. Undelivered outcomes stay in
    the ledgers for the next `up`. If the fleet is not running, the command reports that and does nothing.
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
        time.sleep(POLL_S)  # a command without a loop; waits for another process
    return True
