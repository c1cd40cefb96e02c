"""The fleet that a node belongs to."""

from __future__ import annotations

from prorl_trio.config.quantities import Seconds, SecondsOrZero, Table


class FleetConfig(Table, frozen=True):
    """The fleet that this node belongs to: all nodes with an entry in one folder.

    Attributes:
        dir: the folder, on a disk that all machines of the fleet and its trainer share; made with mode 0700 if it is
            missing. The node writes `NODE_ID.json` there, with its token. Empty: no fleet.
        advertise: the host name by which other machines reach this node. Empty: `listen.host`, or, where that is every
            address of the machine, the machine's name.
        heartbeat_interval_s: time between two heartbeats; less than a third of `stale_after_s`.
        stale_after_s: without a heartbeat for so long the node counts as lost, and its jobs are moved.
        restart_within_s: how long the jobs of this node, if it is lost or its end cuts them, are left to its next
            start, which finds them in the ledger on its disk; 0: other nodes take them over at once.
        end_margin_s: time before the end of the node's allocation by which it has ended by itself. Slurm tells the end
            (`SLURM_JOB_END_TIME`) by its own clock: at least what clocks differ, and what the node's end takes.
    """

    dir: str = ""
    advertise: str = ""
    heartbeat_interval_s: Seconds = 5.0
    stale_after_s: Seconds = 30.0
    restart_within_s: SecondsOrZero = 0.0
    end_margin_s: SecondsOrZero = 30.0

    @property
    def leaves_jobs(self) -> bool:
        """Return True if the jobs that the node's end cuts are left to its next start."""
        return bool(self.dir) and self.restart_within_s > 0

    def __post_init__(self) -> None:
        if self.heartbeat_interval_s > self.stale_after_s / 3:
            raise ValueError(
                f"heartbeat_interval_s must be at most a third of stale_after_s ({self.stale_after_s:g}), got "
                f"{self.heartbeat_interval_s:g}"
            )
