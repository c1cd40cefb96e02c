"""Requests that wait for their answer. They outlive a connection: a new one sends them again, which is harmless, since
job ids are idempotent. Pure state but for one event each.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import trio

from ipc.session import (
    Accepted,
    BackendsAnswer,
    CallBackends,
    CancelJobs,
    CancelledJobs,
    CancelledOnNode,
    CancelOnNode,
    Rejected,
    StatusReport,
    StatusRequest,
    Submit,
)
from prorl_trio.types.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import msgspec

__all__ = ["Answer", "Call", "FrameT", "RequestFrame", "Requests", "SubmitCall"]

Answer = Accepted | Rejected | CancelledJobs | CancelledOnNode | StatusReport | BackendsAnswer
RequestFrame = Submit | CancelJobs | CancelOnNode | StatusRequest | CallBackends
FrameT = TypeVar("FrameT", CancelledJobs, CancelledOnNode, StatusReport, BackendsAnswer)


class Call(Generic[FrameT]):
    """One frame, one answer. `build` makes the frame for a request id.

    Attributes:
        withdrawable: the node can be told that nobody waits for the answer any more.
    """

    def __init__(self, build: Callable[[int], RequestFrame], answer_type: type[FrameT]) -> None:
        self._build = build
        self._answer_type: type[FrameT] = answer_type
        self.withdrawable = answer_type is BackendsAnswer
        self.answer: FrameT | None = None
        self.answered = trio.Event()

    @property
    def complete(self) -> bool:
        """The answer is there."""
        return self.answer is not None

    def frame(self, request_id: int) -> RequestFrame:
        """What to send."""
        return self._build(request_id)

    def take(self, answer: Answer) -> bool:
        """The answer has come.

        Raises:
            ProtocolError: it answers something else.
        """
        if not isinstance(answer, self._answer_type):
            raise ProtocolError(f"got {type(answer).__name__} where {self._answer_type.__name__} was due")
        self.answer = answer
        self.answered.set()
        return True


class SubmitCall:
    """One frame of N jobs, N answers. Sent again, it carries only the jobs not answered yet.

    Attributes:
        answers: by position in `jobs`.
    """

    withdrawable = False

    def __init__(self, jobs: Sequence[tuple[str, msgspec.Raw]]) -> None:
        self._jobs = jobs
        self._sent: list[int] = []
        self.answers: list[Accepted | Rejected | None] = [None] * len(jobs)
        self._missing = len(jobs)
        self.answered = trio.Event()

    @property
    def complete(self) -> bool:
        """All answers are there."""
        return not self._missing

    def frame(self, request_id: int) -> Submit:
        """What to send."""
        self._sent = [position for position, answer in enumerate(self.answers) if answer is None]
        return Submit(request_id=request_id, jobs=[self._jobs[position][1] for position in self._sent])

    def take(self, answer: Answer) -> bool:
        """One of the answers has come. False: it was known.

        Raises:
            ProtocolError: it answers something else.
        """
        if not isinstance(answer, Accepted | Rejected) or not 0 <= answer.index < len(self._sent):
            raise ProtocolError(f"got {answer!r}, which answers none of {len(self._sent)} jobs")
        return self._set(self._sent[answer.index], answer)

    def infer_accepted(self, job_id: str) -> None:
        """The job's outcome has come, so its lost answer was `Accepted`: it must not be submitted again."""
        for position, (known_id, _) in enumerate(self._jobs):
            if known_id == job_id and self.answers[position] is None:
                self._set(position, Accepted(request_id=0, index=position, job_id=job_id))

    def _set(self, position: int, answer: Accepted | Rejected) -> bool:
        if self.answers[position] is not None:
            return False
        self.answers[position] = answer
        self._missing -= 1
        if not self._missing:
            self.answered.set()
        return True


class Requests:
    """The calls in flight, by request id, in the order they were made."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._calls: dict[int, Call[Any] | SubmitCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call[Any] | SubmitCall) -> int:
        """Enter a call; returns its request id."""
        request_id = next(self._ids)
        self._calls[request_id] = call
        return request_id

    def remove(self, request_id: int) -> None:
        """The caller has its answer, or has given up. An answer that comes later is ignored."""
        self._calls.pop(request_id, None)

    def take(self, answer: Answer) -> bool:
        """Hand an answer to its call. False: nobody waits for it.

        Raises:
            ProtocolError: it is of another kind than the call.
        """
        call = self._calls.get(answer.request_id)
        return call is not None and call.take(answer)

    def infer_accepted(self, job_id: str) -> None:
        """See `SubmitCall.infer_accepted`."""
        for call in self._calls.values():
            if isinstance(call, SubmitCall):
                call.infer_accepted(job_id)

    def frames(self) -> list[RequestFrame]:
        """Everything not answered yet, for a new connection."""
        return [call.frame(request_id) for request_id, call in self._calls.items() if not call.complete]

    def wake_all(self) -> None:
        """Let every caller look at what has become of the client."""
        for call in self._calls.values():
            call.answered.set()
