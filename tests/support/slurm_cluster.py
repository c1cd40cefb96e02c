"""A real Slurm of four nodes on this machine: `launch/prorl_launch/slurm/cluster.sh` for the tests of a session."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prorl_launch.slurm.cluster import SCRIPT, free_ports, has_networks
from support.quiet_clock import stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES = 4
JOBS = 8
"""Jobs that each machine takes at once, at a task each."""
COMMAND_TIMEOUT_S = 300.0
END_TIMEOUT_S = 120.0
LOG_TAIL_LINES = 12
PATIENCE_S = 6.0
"""Seconds for an end of Slurm with its daemons."""
FREEZER = Path("/sys/fs/cgroup/freezer")
"""The freezer of control groups of version 1: with it Slurm can track processes by them."""


class SlurmCluster:
    """A running cluster. `folder` is shared by its nodes, which have each a /tmp of their own if `separate`."""

    def __init__(self, folder: Path, port: int, *, separate: bool, tracking: str) -> None:
        self.folder = folder
        self.port = port
        self.separate = separate
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PRORL_"))} | {
            "SLURM_CLUSTER_DIR": str(folder),
            "SLURM_CLUSTER_NODES": str(NODES),
            "SLURM_CLUSTER_CPUS": str(JOBS),
            "SLURM_CLUSTER_PORT": str(port),
            "SLURM_CLUSTER_PATIENCE_S": f"{stretched(PATIENCE_S):.0f}",
            "SLURM_CLUSTER_TRACKING": tracking,
            "SLURM_CLUSTER_MODE": "netns" if separate else "loopback",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def script(self, *arguments: str) -> None:
        """Run `cluster.sh`."""
        done = self.run(str(SCRIPT), *arguments)
        assert done.returncode == 0, done.stderr

    def run(self, *command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Run a command as a user of the cluster would, in its folder; return its code and output."""
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def said(self, *command: str) -> str:
        """Return what a command that must succeed prints."""
        done = self.run(*command)
        assert done.returncode == 0, f"{command}: exit code {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job, in Slurm's word, empty once it is forgotten."""
        return self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").stdout.strip()

    def report(self) -> str:
        """Return the queue, the machines, and the ends of the daemons' logs, for whoever asks why nothing runs."""
        jobs = self.run("squeue", "-o", "%i %T %r %N").stdout + self.run("scontrol", "show", "nodes", "-o").stdout
        tails = []
        for log in sorted((self.folder / "log").glob("*.log")):
            tails += [f"{log.name}:", *log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]]
        return "\n".join([jobs, *tails])

    def pid_of_slurmd(self, node: int) -> int:
        """Return the pid of node `n1` to `n4`'s daemon."""
        return int((self.folder / f"slurmd-n{node}.pid").read_text())

    def temporary(self, node: int) -> Path:
        """Return the /tmp of a node as it is seen from here."""
        return self.folder / f"node/n{node}/tmp" if self.separate else Path(tempfile.gettempdir())

    def networks(self) -> list[Path]:
        """Return the files of the nodes' networks; none where they share that of this machine."""
        return [Path(f"/run/netns/psl{self.port}-n{node}") for node in range(1, NODES + 1)] if self.separate else []

    def address(self) -> str:
        """Return the address of this machine as the nodes reach it."""
        if not self.separate:
            return "127.0.0.1"
        return (self.folder / "node/hosts").read_text().splitlines()[-1].split()[0]

    def mend(self) -> None:
        """Join all networks and start all daemons that are not there."""
        for node in range(1, NODES + 1):
            if self.separate:
                self.script("link", str(node), "up")
            self.script("slurmd", str(node))

    def cancel_all(self) -> None:
        """End every job and wait until they are gone and all nodes are idle again."""
        # Slurm repeats only each minute what it told a machine that was not there.
        states = ("sinfo", "-h", "-N", "-p", "main", "-o", "%t")
        wait_until(lambda: "*" not in self.said(*states), "every node answers", END_TIMEOUT_S, self.report)
        if jobs := self.said("squeue", "-h", "-o", "%A").split():
            self.run("scancel", "--full", "--signal=KILL", *jobs)
            self.run("scancel", *jobs)
        wait_until(lambda: not self.said("squeue", "-h"), "the queue is empty", END_TIMEOUT_S, self.report)
        idle = ("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N")
        wait_until(lambda: len(self.said(*idle).split()) == NODES, "every node is idle", END_TIMEOUT_S, self.report)


def why_not(tracking: str) -> str:
    """Return why there can be no cluster here that tracks processes so, empty if there can."""
    if os.geteuid() != 0:
        return "Slurm's daemons want root"
    if lacking := [name for name in ("slurmctld", "slurmd", "srun", "munged", "ip") if shutil.which(name) is None]:
        if shutil.which("apt-get") is None:
            return "Slurm cannot be installed here, for there is no apt-get"
        return f"Slurm is not installed: there is no {', '.join(lacking)}"
    if tracking == "cgroup" and not _has_freezer():
        return (
            f"Slurm cannot track processes by control groups: there is no freezer of version 1 to write to ({FREEZER})"
        )
    return ""


@contextmanager
def open_cluster(tracking: str) -> Iterator[SlurmCluster]:
    """Start a cluster, each node with a network of its own if this kernel and user allow it; stop it by its pids."""
    folder = Path(tempfile.mkdtemp(prefix="prorl-slurm-", dir="/run"))
    folder.chmod(0o755)
    cluster = SlurmCluster(folder, free_ports(NODES + 1), separate=has_networks(), tracking=tracking)
    try:
        cluster.script("start")
        yield cluster
    finally:
        cluster.script("stop")
        shutil.rmtree(folder)


def _has_freezer() -> bool:
    """Return whether control groups can be made there."""
    if not (FREEZER / "tasks").exists():
        return False
    group = FREEZER / f"prorl-{secrets.token_hex(3)}"
    with contextlib.suppress(OSError):
        group.mkdir()
        group.rmdir()
        return True
    return False


def kill(pid: int) -> None:
    """Kill a process at once, as nothing in it can foresee."""
    os.kill(pid, signal.SIGKILL)
