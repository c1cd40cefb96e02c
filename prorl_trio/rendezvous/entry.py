"""The entry of a node in its fleet's folder: the file `NODE_ID.json`, with mode 0600 because it contains the token."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

import msgspec

ENTRY_FORMAT: Final = 1
"""Format of the file. Readers reject other formats."""

NodeState = Literal["open", "draining", "away"]
"""`open`: accepts jobs; `draining`: accepts no new jobs and finishes the ones it has; `away`: has exited and left
unfinished work to its next start."""

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_START_TIME: Final = 19
"""Position of the start time (field 22) in /proc/PID/stat, counted after the name."""


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A permanently unique identity of a process.

    Attributes:
        pid: its id, in its own PID namespace.
        start_time: in clock ticks since the machine was booted (field 22 of /proc/PID/stat).
        boot_id: id of the machine's current boot.
        pid_namespace: the inode of the namespace of `pid`.
    """

    pid: int
    start_time: int
    boot_id: str
    pid_namespace: int


def this_process() -> ProcessIdentity:
    """Return our own identity. Reads /proc."""
    fields = _stat_fields("self")
    assert fields is not None, "we live"
    return ProcessIdentity(
        pid=os.getpid(),
        start_time=int(fields[_START_TIME]),
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
    )


def has_ended(process: ProcessIdentity) -> bool:
    """Return True if the process has certainly exited, as far as this machine can see. A zombie counts as exited.

    Returns False for processes on another machine or in another PID namespace, because their state is unknown.
    """
    if process.boot_id != _boot_id() or process.pid_namespace != _pid_namespace():
        return False
    fields = _stat_fields(str(process.pid))
    return fields is None or fields[0] in "XZ" or int(fields[_START_TIME]) != process.start_time


def _boot_id() -> str:
    return BOOT_ID.read_text().strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _stat_fields(pid: str) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on, or None if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity and load of a node at its last heartbeat.

    Attributes:
        run_workers: number of concurrent rollouts in RUN.
        max_live: number of jobs that admission accepts.
        live: number of jobs without an outcome.
    """

    run_workers: int
    max_live: int
    live: int


class SlurmStep(msgspec.Struct, frozen=True, kw_only=True):
    """The Slurm step that started a node.

    Attributes:
        job_id: as `scancel` accepts it.
        step_id: of that job.
        node_name: Slurm's name of the machine.
        end_time: end of the allocation in seconds since 1970, by Slurm's clock; 0 if unknown.
    """

    job_id: str
    step_id: str
    node_name: str
    end_time: int = 0


class NodeEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The published entry of a node. Unknown fields are ignored, so that a later minor version can add fields.

    Attributes:
        format: see `ENTRY_FORMAT`.
        node_id: the name of the file without `.json`.
        url: of its server, as trainers on other machines reach it: `ws://HOST:PORT`.
        unix_url: of the Unix socket, for clients on this machine; empty without a socket.
        rest_url: REST URL of the same server: `http://HOST:PORT`.
        token: the password for trainers.
        host: the machine's name.
        process: identity of the node's process.
        slurm: the step that started the node; None if Slurm did not start it.
        model: the name of the model's folder and a digest of its vocabulary. Equal in all nodes of a fleet.
        version: version of prorl-trio. Equal in all nodes of a fleet.
        backends: the weight of each configured LLM backend by URL. If the node is lost, other nodes take over its
            backends.
        capacity: at the last heartbeat.
        state: see `NodeState`.
        unready: why a job submitted now would not be processed; empty if it would be.
        heartbeat_interval_s: interval at which the node renews the file's modification time.
        stale_after_s: the node counts as lost after this many seconds without a heartbeat.
        restart_within_s: seconds for which other nodes leave the jobs of a lost node to its next start; 0: they take
            over the jobs at once.
    """

    format: int = ENTRY_FORMAT
    node_id: str
    url: str
    unix_url: str = ""
    rest_url: str = ""
    token: str
    host: str
    process: ProcessIdentity
    slurm: SlurmStep | None = None
    model: str
    version: str
    backends: dict[str, float] = {}
    capacity: Capacity
    state: NodeState = "open"
    unready: str = ""
    heartbeat_interval_s: float
    stale_after_s: float
    restart_within_s: float = 0.0

    def __repr__(self) -> str:
        return f"<NodeEntry {self.node_id!r} at {self.url}, {self.state}>"  # hides the token


def slurm_step(environment: dict[str, str]) -> SlurmStep | None:
    """Return the Slurm step described by the environment of a process; None outside Slurm."""
    job_id = environment.get("SLURM_JOB_ID", "")
    if not job_id:
        return None
    end_time = environment.get("SLURM_JOB_END_TIME", "")
    return SlurmStep(
        job_id=job_id,
        step_id=environment.get("SLURM_STEP_ID", ""),
        node_name=environment.get("SLURMD_NODENAME", ""),
        end_time=int(end_time) if end_time.isascii() and end_time.isdigit() else 0,
    )
