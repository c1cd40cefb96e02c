"""The interface of a node that its network services use. `prorl_trio.node.node.Node` implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from prorl_trio.pipeline.job import JobSink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prorl_trio.pipeline.live import JobFilter
    from prorl_trio.pipeline.observer import JobView
    from prorl_trio.types.backends import AnswerT, NodeRequest
    from prorl_trio.types.models import EncodedOutcome, JobSpec, ToolCall, ToolSchema


class Room(NamedTuple):
    """Room of a node for jobs of one session, as in `prorl_ipc.session.RoomReport`."""

    room: int
    free: int
    run_workers: int


class SessionSink(JobSink, Protocol):
    """The session that receives a job's outcome: from a pipeline as an object, or from another node as bytes."""

    def begin_attempt(self, job_id: str, detail: str, stored: Callable[[], None]) -> None:
        """Note that the job's next attempt begins on another node, as `report` notes that it entered `init`.

        `stored` is called when this is stored, perhaps before this returns. A node that is then given the job has an
        attempt with a unique number.
        """

    def deliver_encoded(self, outcome: EncodedOutcome, stored: Callable[[bool], None]) -> None:
        """Accept the job's outcome as bytes; may be called more than once for a job.

        `stored` is called once, perhaps before this returns. True means that the sender may forget the outcome. It is
        then stored here, or not needed because the job has another outcome, runs as a later attempt, or is unknown.
        False means that the ledger refused it, and the job is dropped. If the disk accepts no data, or the node's end
        left the job to its next start, `stored` is not called and the sender must keep the outcome.
        """


class NodeApi(Protocol):
    """A node, as seen by its network services."""

    node_id: str

    async def operate(self, request: NodeRequest[AnswerT]) -> AnswerT:
        """Carry out a request of a trainer or an operator to the pool of backends. See the request for its errors."""
        ...

    def check(self, spec: JobSpec, sink: SessionSink, ahead: int) -> None:
        """Check whether the node would accept a job. Reserves nothing.

        Args:
            spec: the job.
            sink: the session that would receive its outcome.
            ahead: jobs with a promised place that the node does not have yet. They count as queued.

        Raises:
            ServiceError: `AdmissionRejected`, `DuplicateJob`, `UnknownHandler`, `MalformedJob` or `Draining`.
        """

    def validate(self, spec: JobSpec) -> None:
        """Check whether `check` would refuse the job even with unlimited room.

        Raises:
            ServiceError: `UnknownHandler`, `MalformedJob`, or `Draining` if jobs of this kind are no longer accepted.
        """

    def is_unexamined(self, spec: JobSpec) -> bool:
        """Return whether `examine` must be awaited before `check` can find every problem of a job."""
        ...

    async def examine(self, specs: Sequence[JobSpec]) -> None:
        """Determine what `check` cannot determine at once: whether the gold answers of these jobs can be graded.

        `check` raises the resulting errors. Bounded in time; a job whose check does not finish counts as good. Safe to
        cancel.
        """

    def take(self, spec: JobSpec, sink: SessionSink, attempt: int) -> None:
        """Accept a job with a promised place, even if the node is full by now.

        Its attempts are counted from `attempt`. `sink.deliver` may be called before this returns.

        Raises:
            Draining: the node has ended.
            DuplicateJob: a job with this id is live.
            UnknownHandler: a former process accepted the job with a handler that this one does not have.
        """

    def room(self, session_id: str, ahead: int) -> Room:
        """Return the room for jobs of a session, with `ahead` jobs promised a place. Reserves nothing."""
        ...

    async def cancel(self, job_id: str, reason: str) -> None:
        """Cancel a job, and return when it no longer runs. Its outcome is delivered as for any other end.

        If this call is itself cancelled, the job still ends.

        Raises:
            UnknownJob: the job is not live here.
        """

    def cancel_soon(self, job_id: str, reason: str) -> None:
        """Cancel a job as `cancel` does, without waiting. A job that is not live here is ignored."""

    def statistics(self) -> dict[str, object]:
        """Return the node's live state as values that msgpack can encode."""
        ...

    def find_jobs(self, wanted: JobFilter, limit: int) -> tuple[int, list[JobView]]:
        """Return the number of live jobs that match, and the first `limit` of these. See `LiveJobs.find`."""
        ...

    def find_job(self, job_id: str) -> JobView | None:
        """Return the current view of a live job; None if it is not live here."""
        ...

    def unreadiness(self) -> str:
        """Return why a job submitted now would not be processed; empty if it would."""
        ...

    def read_turn(self, token_ids: Sequence[int], tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall]]:
        """Return the text of one completion without the chat format's special tokens, and the tool calls in it.

        `raw` of each call is the exact text of the call. Blocks while the tokenizer decodes.

        Args:
            token_ids: the completion.
            tools: the tools that the policy was offered.
        """
        ...
