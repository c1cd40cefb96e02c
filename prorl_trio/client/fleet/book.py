"""The jobs of a fleet's client: on which node each is, and which outcome of it counts. Pure state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prorl_trio.types.models import JobSpec, Status

__all__ = ["Book", "FleetJob", "Verdict"]

OVER_KEPT: Final = 100_000
"""Ids of jobs of one node whose outcome was given out, as many as that remembers; the oldest is dropped."""

Verdict = Literal["deliver", "drop", "move"]
"""`deliver` it, `drop` it, or drop it and `move` the job: its node was shut down. It may be elsewhere already."""
SHUTDOWN: Final = "shutdown"
"""Error code of a job that its node cut because it was ending."""


class FleetJob:
    """A job without an outcome.

    Attributes:
        spec: to submit it again, if its node is lost.
        node_id: where it is; empty: nowhere, it is being placed.
        attempt: the number of the attempt there.
        former: nodes that had it before and were lost.
        in_submit: a submit to `node_id` has not ended.
        accepted: a node has it, or had it.
        cancel_reason: it is to be cancelled as soon as it is somewhere; None: it is not.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.node_id = ""
        self.attempt = 1
        self.former: list[str] = []
        self.in_submit = False
        self.accepted = False
        self.cancel_reason: str | None = None

    def __repr__(self) -> str:
        return f"<FleetJob {self.spec.job_id!r} attempt {self.attempt} on {self.node_id or 'no node'}>"

    def unplace(self) -> None:
        """Take it from its node, which is lost: the next attempt is elsewhere."""
        self.former.append(self.node_id)
        self.node_id = ""
        self.attempt += 1


class Book:
    """The jobs of this client that have no outcome, and the ids of those that had one.

    Attributes:
        jobs: by id.
        moved: jobs that were on several nodes, and the nodes that were lost, by id.
        homes: nodes on which a job is, or may be, that this client has no spec of, by id.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, FleetJob] = {}
        self.moved: dict[str, set[str]] = {}
        self.homes: dict[str, str] = {}
        self._over: dict[str, None] = {}
        self._moved_over: set[str] = set()
        """Jobs that were on several nodes, each of which may come back with them at any time: all are kept."""

    def is_over(self, job_id: str) -> bool:
        """Return True if an outcome of the job was given out."""
        return job_id in self._over or job_id in self._moved_over

    def of_node(self, node_id: str) -> list[FleetJob]:
        """Return the jobs that are on a node, and in no submit."""
        return [job for job in self.jobs.values() if job.node_id == node_id and not job.in_submit]

    def mark_over(self, job_ids: Iterable[str]) -> None:
        """Remember that outcomes of these jobs were given out, and forget the jobs."""
        for job_id in job_ids:
            self.jobs.pop(job_id, None)
            self.homes.pop(job_id, None)
            if job_id in self.moved:
                self._moved_over.add(job_id)
                continue
            self._over[job_id] = None
            if len(self._over) > OVER_KEPT:
                del self._over[next(iter(self._over))]

    def judge(self, node_id: str, job_id: str, status: Status, error_code: str | None = None) -> Verdict:
        """Return what to do with an outcome that came from a node, and count the job as over if it is given out.

        The first outcome counts, wherever it comes from: also that of a node which was taken for lost. Only a cancel
        there does not, for it was ours: the job goes on elsewhere. Nor does one by which its node was shut down.
        """
        if self.is_over(job_id):
            return "drop"
        job = self.jobs.get(job_id)
        if error_code == SHUTDOWN and job is not None:
            return "move"
        if job is not None:
            here = job.node_id == node_id
        else:
            here = self.homes.get(job_id) == node_id or node_id not in self.moved.get(job_id, ())
        if not here and status == "cancelled":
            return "drop"
        self.mark_over([job_id])
        return "deliver"
