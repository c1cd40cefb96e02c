"""The interface of a node that its network services use. `prorl_trio.node.node.Node` implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from prorl_trio.pipeline.job import JobSink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prorl_trio.pipeline.observer import JobView
    from prorl_trio.types.backends import AnswerT, NodeRequest
    from prorl_trio.types.models import EncodedOutcome, JobSpec, Status, ToolCall, ToolSchema


class Room(NamedTuple):
    """Room of a node for jobs of one session: as `prorl_ipc.session.RoomReport` says."""

    room: int
    free: int
    run_workers: int


class SessionSink(JobSink, Protocol):
    """The session that gets a job's outcome: from a pipeline as an object, or as bytes from another node."""

    def begin_attempt(self, job_id: str, detail: str, stored: Callable[[], None]) -> None:
        """Take the news that the job's next attempt begins on another node, as `report` takes that it entered `init`.

        `stored` is called when that is stored, perhaps before this returns: a node that is given the job then has an
        attempt whose number no other one gets.
        """

    def deliver_encoded(self, outcome: EncodedOutcome, stored: Callable[[bool], None]) -> None:
        """Take the job's outcome as bytes; may be called more than once for a job.

        `stored` is called once, perhaps before this returns. True: the outcome is stored here, or is not needed: the
        job has another one, runs as a later attempt, or is not known (any more). So whoever sent it may forget it.
        False: the ledger has refused it, and the job is dropped. It is not called, and the sender has to keep the
        outcome, while the disk does not take it, and for a job that the node's end cuts and leaves to its next start.
        """


class NodeApi(Protocol):
    """A node, as its network services see it."""

    node_id: str

    async def operate(self, request: NodeRequest[AnswerT]) -> AnswerT:
        """Carry out what a trainer or an operator asks of the pool of backends. See the request for its errors."""
        ...

    def check(self, spec: JobSpec, sink: SessionSink, ahead: int) -> None:
        """Check whether the node would accept a job. Reserves nothing.

        Args:
            spec: the job.
            sink: the session that would get its outcome.
            ahead: jobs that were promised a place and that the node does not have yet. They count as queued.

        Raises:
            ServiceError: `AdmissionRejected`, `DuplicateJob`, `UnknownHandler`, `MalformedJob` or `Draining`.
        """

    def validate(self, spec: JobSpec) -> None:
        """Check whether there is something about the job itself for which `check` refuses it, whatever room there is.

        Raises:
            ServiceError: `UnknownHandler`, `MalformedJob`, or `Draining` if no job of this kind is accepted any more.
        """

    def is_unexamined(self, spec: JobSpec) -> bool:
        """Return whether `examine` has to be awaited before `check` knows all that speaks against a job."""
        ...

    async def examine(self, specs: Sequence[JobSpec]) -> None:
        """Find out what `check` cannot find out at once: whether the gold answers of these jobs can be graded.

        `check` raises what was found. Bounded in time: what cannot be found out speaks against no job. Safe to cancel.
        """

    def take(self, spec: JobSpec, sink: SessionSink, attempt: int) -> None:
        """Accept a job that was promised a place, even if the node is full by now.

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
        """Cancel a job, and return when nothing of it runs any more. Its outcome is delivered as for any other end.

        If this call is itself cancelled, the job ends all the same.

        Raises:
            UnknownJob: no such job is live here.
        """

    def cancel_soon(self, job_id: str, reason: str) -> None:
        """Cancel a job as `cancel` does, without waiting. Does nothing if no such job is live here."""

    def statistics(self) -> dict[str, object]:
        """Return the node's live state as values that msgpack can encode."""
        ...

    def find_jobs(self, matches: Callable[[JobSpec, str, Status], bool], limit: int) -> tuple[int, list[JobView]]:
        """Return the number of live jobs that match, and the first `limit` of these, oldest first.

        `matches` is called with each job's spec, session and status.
        """
        ...

    def find_job(self, job_id: str) -> JobView | None:
        """Return a live job as it is now; None if it is not live here."""
        ...

    def unreadiness(self) -> str:
        """Return why a job submitted now would not be worked on; empty if it would be."""
        ...

    def read_turn(self, token_ids: Sequence[int], tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall]]:
        """Return the text of one completion without the chat format's special tokens, and the tool calls in it.

        `raw` of each call is the call as it stands in the text. Blocks while the tokenizer decodes.

        Args:
            token_ids: the completion.
            tools: the tools that the policy was offered.
        """
        ...
