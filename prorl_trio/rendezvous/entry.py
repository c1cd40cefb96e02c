"""The entry of a node in the folder of its fleet: the file `NODE_ID.json`, with mode 0600, since it holds the token."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

import msgspec

ENTRY_FORMAT: Final = 1
"""Format of the file. A reader takes no other."""

NodeState = Literal["open", "draining", "away"]
"""`open`: takes jobs; `draining`: takes no more, and finishes those that it has; `away`: it has ended, and left
unfinished work to its next start."""

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_START_TIME: Final = 19
"""Position of the start time in /proc/PID/stat behind the name: field 22."""


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A process, for ever.

    Attributes:
        pid: its id, in its own PID namespace.
        start_time: in clock ticks since the machine was booted (field 22 of /proc/PID/stat).
        boot_id: of the machine, new at each boot.
        pid_namespace: the inode of the namespace in which `pid` counts.
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
    """Return True if the process has certainly ended, as far as this machine can tell; a zombie has.

    False also where we cannot know: it is on another machine, or in another PID namespace.
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
    """/proc/PID/stat from the state on, or None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Places and jobs of a node at its last heartbeat.

    Attributes:
        run_workers: rollouts in RUN at once.
        max_live: jobs that admission lets in.
        live: jobs without an outcome.
    """

    run_workers: int
    max_live: int
    live: int


class SlurmStep(msgspec.Struct, frozen=True, kw_only=True):
    """The Slurm step that a node was started by.

    Attributes:
        job_id: as `scancel` takes it.
        step_id: of that job.
        node_name: the machine, by its name in Slurm.
        end_time: of the allocation, in seconds since 1970 by the clock of Slurm; 0: not known.
    """

    job_id: str
    step_id: str
    node_name: str
    end_time: int = 0


class NodeEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A node as others find it. Unknown fields are ignored, so that a later minor version can add some.

    Attributes:
        format: see `ENTRY_FORMAT`.
        node_id: the name of the file without `.json`.
        url: of its server, as trainers on other machines reach it: `ws://HOST:PORT`.
        unix_url: of the Unix socket, for this machine; empty: none.
        rest_url: of the same server, for REST: `http://HOST:PORT`.
        token: its trainers' password.
        host: name of the machine.
        process: of the node.
        slurm: None: it was not started by Slurm.
        model: what it samples with: the name of the model's folder and a digest of its vocabulary. The same in all
            nodes of a fleet.
        version: of prorl-trio. The same in all nodes of a fleet.
        backends: the LLM backends of its configuration, and the weight of each by its URL: when it is lost, others take
            them over.
        capacity: at the last heartbeat.
        state: see `NodeState`.
        unready: why a job submitted now would not be worked on; empty: it would.
        heartbeat_interval_s: how often it renews the file's modification time.
        stale_after_s: without a heartbeat for so long it counts as lost.
        restart_within_s: how long others leave the jobs of the lost node to its next start; 0: they take them over.
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
        return f"<NodeEntry {self.node_id!r} at {self.url}, {self.state}>"  # without the token


def slurm_step(environment: dict[str, str]) -> SlurmStep | None:
    """Return the step that the environment of a process tells of; None outside Slurm."""
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
