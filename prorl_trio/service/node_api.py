"""What the trainer-facing edge needs of a node, and what the node needs of the edge. `testing.FakeNode` is the fake."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from prorl_trio.models import JobSpec, Outcome, Status

__all__ = ["JobSink", "NodeApi"]


class JobSink(Protocol):
    """Where a node puts what becomes of a job. Synchronous, never blocks, never raises; called in the node's loop."""

    def deliver(self, outcome: Outcome) -> None:
        """The job's one outcome. Never called again for this job."""

    def report(self, job_id: str, status: Status, detail: str) -> None:
        """The job changed its stage. May be dropped on the way to the trainer."""


class NodeApi(Protocol):
    """A node as its edge sees it."""

    node_id: str

    def submit(self, spec: JobSpec, sink: JobSink) -> None:
        """Take one job, or nothing of it. `sink.deliver` may be called before this returns.

        Raises:
            ServiceError: `AdmissionRejected`, `DuplicateJob`, `UnknownHandler`, `MalformedJob` or `Draining`.
        """

    async def cancel(self, job_id: str, reason: str) -> None:
        """Return when nothing of the job is left. Its outcome is delivered as for any other end.

        Raises:
            UnknownJob: it is not live here.
        """

    def statistics(self) -> dict[str, object]:
        """Live state as msgpack-ready values."""
        ...

    async def add_backend(self, url: str) -> None:
        """Probe an LLM backend and add it.

        Raises:
            BackendError: it is not fit; the message says why.
        """

    async def remove_backend(self, url: str) -> None:
        """Take a backend out; its running calls finish.

        Raises:
            BackendError: it is not in the pool.
        """
