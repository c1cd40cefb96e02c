"""Checks of this machine for a fleet on Slurm. Each check has a function, and a remedy."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from typing import TYPE_CHECKING, Final

from prorl_launch.doctor import Check
from prorl_launch.slurm.fleet_folder import find_local_folder
from prorl_launch.slurm.node_file import address_of_machine
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_COMMANDS: Final = ("sbatch", "srun", "scancel", "squeue", "scontrol")
_TIMEOUT_S: Final = 15.0
_SHORT_KILL_WAIT_S: Final = 10


def examine_slurm() -> list[Check]:
    """Check Slurm's commands, its controller and settings, and this machine's disk and name. Blocks for seconds.

    On the login node it checks the needs of `up`; in a job (`srun prorl-trio doctor --slurm`) the needs of a node.
    """
    lacking = [name for name in _COMMANDS if shutil.which(name) is None]
    if lacking:
        detail = f"there is no {', '.join(lacking)} in PATH"
        remedy = "run it on a machine of the cluster; on Debian: apt install slurm-client"
        return [Check(name="slurm", state="missing", detail=detail, remedy=remedy)]
    return [*_settings_checks(_settings()), _local_folder(), _name()]


def _settings() -> dict[str, str]:
    """Return slurmctld's settings under the names of `scontrol show config`; empty if it does not answer."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "config"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}
    pairs = (line.partition("=") for line in done.stdout.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _settings_checks(settings: Mapping[str, str]) -> list[Check]:
    if not settings:
        remedy = "see `scontrol ping`; the cluster's administrators start slurmctld"
        return [Check(name="slurm", state="missing", detail="slurmctld does not answer", remedy=remedy)]
    detail = f"cluster {settings.get('ClusterName', '?')}, version {settings.get('SLURM_VERSION', '?')}"
    return [Check(name="slurm", state="ok", detail=detail), _tracking(settings), _kill_wait(settings)]


def _tracking(settings: Mapping[str, str]) -> Check:
    plugin = settings.get("ProctrackType", "")
    if plugin == "proctrack/cgroup":
        detail = f"{plugin}: Slurm ends whatever a task started; the task's epilog removes the folders of what it kills"
    else:
        detail = f"{plugin}: Slurm leaves orphans; `prorl-trio slurm run` ends them"
    return Check(name="process tracking", state="ok", detail=detail)


def _kill_wait(settings: Mapping[str, str]) -> Check:
    """Check KillWait, `30 sec`: the time that a node has between scancel's SIGTERM and its SIGKILL."""
    text = settings.get("KillWait", "").split(" ")[0]
    if not text.isdigit() or int(text) >= _SHORT_KILL_WAIT_S:
        return Check(name="KillWait", state="ok", detail=f"{text or '?'} s from scancel to the end of a node")
    detail = f"{text} s: after scancel a node has no more time to let rollouts end"
    remedy = "use `prorl-trio slurm down --drain-s 300`, which drains before it cancels"
    return Check(name="KillWait", state="warning", detail=detail, remedy=remedy)


def _local_folder() -> Check:
    try:
        return Check(name="local folder", state="ok", detail=f"{find_local_folder()}: sockets and locks work there")
    except ConfigError as error:
        remedy = "name a short path on the machine's own disk with --local-dir"
        return Check(name="local folder", state="missing", detail=str(error), remedy=remedy)


def _name() -> Check:
    name = socket.gethostname()
    try:
        address = address_of_machine(name)
    except ConfigError as error:
        remedy = "mend /etc/hosts or the name service, or set listen.host in node.toml"
        return Check(name="address", state="missing", detail=str(error), remedy=remedy)
    if address.startswith("127.") and "SLURM_JOB_ID" in os.environ:
        detail = f"{name} is {address} to itself: a node would listen where no other machine reaches it"
        remedy = 'remove that line of /etc/hosts, or set listen.host = "0.0.0.0" and fleet.advertise in node.toml'
        return Check(name="address", state="warning", detail=detail, remedy=remedy)
    return Check(name="address", state="ok", detail=f"{name} is {address}")
