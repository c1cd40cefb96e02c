"""A real Slurm with several machines on this one, by `launch/prorl_launch/slurm/cluster.sh`, and its fleet.

Each machine has its own network, name and /tmp if the kernel and the user's rights allow it. All of it ends with its
block, also if this process is killed.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from perf.harness import CannotRun
from perf.processes import gets_ready, parent_of
from prorl_launch.slurm.cluster import SCRIPT, free_ports, has_networks
from prorl_launch.supervised import open_supervised
from prorl_trio.rendezvous.watch import FleetWatch
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.rendezvous.entry import NodeEntry

PROGRAMS: Final = ("slurmctld", "slurmd", "srun", "munged", "ip")
KEEP: Final = """\
trap ended=1 TERM
"$1" start && touch "$2" && until [ "${ended:-}" ]; do sleep 3600 & wait; done
"$1" stop
[ -z "${ended:-}" ] || rm -rf "$SLURM_CLUSTER_DIR"
"""
"""Starts the cluster and creates a file when it is ready. On request, stops it and removes its folder. After a failed
start the folder stays, with its log."""
START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 60.0
FLEET_START_TIMEOUT_S: Final = 300.0
FLEET_END_TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.2
LOG_TAIL_BYTES: Final = 2000


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A running cluster.

    Attributes:
        folder: a temporary folder for the block, on a disk that all machines share.
        env: the environment of Slurm's commands.
        address: the address by which its machines reach this one.
        separate: each machine has its own network.
        root_pid: the root of the tree of all Slurm processes; none leaves it.
    """

    folder: Path
    env: dict[str, str]
    address: str
    separate: bool
    root_pid: int


def require_slurm() -> None:
    """Raise `CannotRun` if a cluster cannot be started here."""
    if os.geteuid() != 0:
        raise CannotRun("Slurm's daemons want root: run it as root")
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        raise CannotRun(
            f"Slurm is not installed, there is no {', '.join(lacking)}: "
            "run launch/prorl_launch/slurm/cluster.sh install"
        )


@asynccontextmanager
async def open_cluster(machines: int) -> AsyncIterator[Cluster]:
    """Start a cluster in its own folder and range of ports.

    Raises:
        CannotRun: it is not installed, or not usable by this user.
        RuntimeError: it did not start; with the end of its log.
    """
    require_slurm()
    folder = await trio.to_thread.run_sync(_make_folder)
    try:
        separate = await trio.to_thread.run_sync(has_networks)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PRORL_"))} | {
            "SLURM_CLUSTER_DIR": str(folder),
            "SLURM_CLUSTER_NODES": str(machines),
            "SLURM_CLUSTER_PORT": str(free_ports(machines + 1)),
            "SLURM_CLUSTER_PATIENCE_S": "60",  # slow machines are not given up
            "SLURM_CLUSTER_MODE": "netns" if separate else "loopback",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        ready, log_file = folder / "ready", folder / "cluster.log"
        keep = ["bash", "-c", KEEP, "keep", str(SCRIPT), str(ready)]
        async with open_supervised(keep, env=env, log_file=log_file, grace_s=STOP_TIMEOUT_S) as keeper:
            if not await gets_ready(keeper, partial(_wait_for, ready), START_TIMEOUT_S):
                raise RuntimeError(f"Slurm does not start here: {_tail(log_file)}")
            yield Cluster(
                folder=folder,
                env=env,
                address=_own_address(folder / "node/hosts") if separate else "127.0.0.1",
                separate=separate,
                root_pid=parent_of(keeper.pid),
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # its keeper has removed it, unless it was killed


@asynccontextmanager
async def open_slurm_fleet(
    cluster: Cluster, folder: Path, config: dict[str, object], nodes: int
) -> AsyncIterator[list[NodeEntry]]:
    """Start a Slurm fleet in `folder` with this node.toml. Yield the nodes when all are ready; stop it at the end.

    If the block raises, its fleet ends with the cluster.

    Raises:
        RuntimeError: a command fails, or not all nodes are ready within `FLEET_START_TIMEOUT_S`.
    """
    config_file = folder.with_suffix(".toml")
    config_file.write_bytes(msgspec.toml.encode(config))
    options = ["--config", str(config_file), "--nodes", str(nodes)]
    await _slurm(cluster, "up", "--fleet", str(folder), *options)
    yield await _wait_up(folder, nodes)
    await _slurm(cluster, "down", "--fleet", str(folder), "--timeout-s", f"{FLEET_END_TIMEOUT_S:g}")


async def _slurm(cluster: Cluster, *words: str) -> None:
    """Run `prorl-trio slurm` as a user of the cluster would."""
    command = [sys.executable, "-m", "prorl_trio.cli", "slurm", *words]
    done = await trio.run_process(
        command, env=cluster.env, cwd=cluster.folder, capture_stdout=True, capture_stderr=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"`prorl-trio slurm {words[0]}` failed: {done.stderr.decode(errors='replace')}")


async def _wait_up(folder: Path, nodes: int) -> list[NodeEntry]:
    watch = FleetWatch(folder)
    found: list[NodeEntry] = []
    with trio.move_on_after(FLEET_START_TIMEOUT_S):
        while len(found := await trio.to_thread.run_sync(_ready_nodes, watch)) < nodes:  # noqa: ASYNC110 - nodes do
            await trio.sleep(POLL_S)
        return found
    logs = "\n".join(_tail(path) for path in (folder / "slurm").glob("*.log"))
    raise RuntimeError(f"{len(found)} of {nodes} nodes are ready after {FLEET_START_TIMEOUT_S:g} s: {logs}")


def _ready_nodes(watch: FleetWatch) -> list[NodeEntry]:
    try:
        view = watch.read()
    except ConfigError:  # no node has created it yet
        return []
    return [each.entry for each in view.nodes.values() if each.life == "live" and not each.entry.unready]


async def _wait_for(path: Path) -> None:
    while not await trio.Path(path).exists():  # noqa: ASYNC110 - another process makes it
        await trio.sleep(POLL_S)


def _make_folder() -> Path:
    """Return a new folder that all users may enter. It is not below /tmp, which each machine has of its own."""
    folder = Path(tempfile.mkdtemp(prefix="prorl-perf-", dir="/run"))
    folder.chmod(0o755)
    return folder


def _tail(path: Path) -> str:
    return path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")


def _own_address(hosts: Path) -> str:
    """Return this machine's address as the cluster's machines know it."""
    lines = [line.split() for line in hosts.read_text().splitlines()]
    return next(address for address, name in reversed(lines) if name == socket.gethostname())
