"""The entry of a node in the folder of its fleet: the file `NODE_ID.json`, with mode 0600, since it holds the token."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from prorl_trio.rendezvous.identity import ProcessIdentity

ENTRY_FORMAT: Final = 1
"""Format of the file. A reader takes no other."""

NodeState = Literal["open", "draining", "away"]
"""`open`: takes jobs; `draining`: takes no more, and finishes those that it has; `away`: it has ended, and left
unfinished work to its next start."""


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
