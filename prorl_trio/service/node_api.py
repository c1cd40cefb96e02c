"""The node as the trainer-facing edges need it. `prorl_trio.node.node.Node` is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.chat.messages import ToolSchema
    from prorl_trio.inference.pool.pool import Backends
    from prorl_trio.pipeline.pipeline import JobSink
    from prorl_trio.types.models import JobSpec, ToolCall

__all__ = ["NodeApi"]


class NodeApi(Protocol):
    """A node as its edge sees it."""

    node_id: str
    backends: Backends
    """The pool: trainers and operators change it and pause it through either edge."""

    def check(self, spec: JobSpec, sink: JobSink, ahead: int) -> None:
        """Refuse a job that is not to be taken, if so many others were promised a place before it.

        Raises:
            ServiceError: `AdmissionRejected`, `DuplicateJob`, `UnknownHandler`, `MalformedJob` or `Draining`.
        """

    def take(self, spec: JobSpec, sink: JobSink, attempt: int) -> None:
        """Take a job that was promised a place, whether there is room or not. Its attempts are counted from `attempt`.

        `sink.deliver` may be called before this returns.

        Raises:
            Draining: the node has ended.
            UnknownHandler: it was promised by a former process, which had this handler.
        """

    async def cancel(self, job_id: str, reason: str) -> None:
        """Return when nothing of the job is left. Its outcome is delivered as for any other end.

        Raises:
            UnknownJob: it is not live here.
        """

    def cancel_soon(self, job_id: str, reason: str) -> None:
        """Cancel a job as `cancel` does, without waiting. Nothing happens if the job is not live here."""

    def statistics(self) -> dict[str, object]:
        """Live state as msgpack-ready values."""
        ...

    def live_jobs(self) -> list[dict[str, object]]:
        """Every live job as a plain dict: the fields of `observer.JobView`, oldest first."""
        ...

    def unreadiness(self) -> str:
        """Why a job submitted now would not be worked on; empty if it would."""
        ...

    def read_turn(self, token_ids: Sequence[int], tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall]]:
        """Read one completion: its text without the tokens that structure the dialogue, and the calls written in it.

        `raw` of each call is how the text has it. `tools` are those that the policy was offered. Blocks for as long as
        a tokenizer takes.
        """
        ...
