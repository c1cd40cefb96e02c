"""Requests in flight. Pure state, except for one event per request.

Requests outlive a connection: they are sent again over the next one. This is harmless because job ids are idempotent.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import trio

from prorl_ipc.session import (
    MAX_ATTEMPTS,
    Accepted,
    BackendsAnswer,
    CallBackends,
    Cancel,
    Cancelled,
    CheckedJobs,
    CheckJobs,
    Rejected,
    RoomReport,
    RoomRequest,
    StatusReport,
    StatusRequest,
    Submit,
    WithdrawJobs,
    WithdrawnJobs,
)
from prorl_trio.types.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import msgspec

Answer = Accepted | Rejected | CheckedJobs | Cancelled | WithdrawnJobs | StatusReport | RoomReport | BackendsAnswer
RequestFrame = Submit | CheckJobs | Cancel | WithdrawJobs | StatusRequest | RoomRequest | CallBackends
FrameT = TypeVar("FrameT", CheckedJobs, Cancelled, WithdrawnJobs, StatusReport, RoomReport, BackendsAnswer)


class Call(Generic[FrameT]):
    """A request of one frame with one answer; `build` makes the frame for a request id.

    Attributes:
        withdrawable: on a cancel, the node is notified that the answer is no longer needed.
    """

    def __init__(self, build: Callable[[int], RequestFrame], answer_type: type[FrameT]) -> None:
        self._build = build
        self._answer_type: type[FrameT] = answer_type
        self.withdrawable = answer_type is BackendsAnswer
        self.answer: FrameT | None = None
        self.answered = trio.Event()

    @property
    def complete(self) -> bool:
        return self.answer is not None

    def frame(self, request_id: int) -> RequestFrame:
        return self._build(request_id)

    def take(self, answer: Answer) -> bool:
        """Store the answer, wake the caller, and return True.

        Raises:
            ProtocolError: the answer is of another type than the request's.
        """
        if not isinstance(answer, self._answer_type):
            raise ProtocolError(f"got {type(answer).__name__} where {self._answer_type.__name__} was due")
        self.answer = answer
        self.answered.set()
        return True


class SubmitCall:
    """A request of one frame with N jobs and N answers. Sent again, it carries only the jobs without an answer.

    Attributes:
        answers: one per job, by its position in `jobs`; None: not answered yet.
    """

    withdrawable = False

    def __init__(self, jobs: Sequence[tuple[str, msgspec.Raw]], attempts: Mapping[str, int] | None = None) -> None:
        self._jobs = jobs
        self._attempts = attempts or {}
        self._sent: list[int] = []
        self.answers: list[Accepted | Rejected | None] = [None] * len(jobs)
        self._missing = len(jobs)
        self.answered = trio.Event()

    @property
    def complete(self) -> bool:
        return not self._missing

    def frame(self, request_id: int) -> Submit:
        self._sent = [position for position, answer in enumerate(self.answers) if answer is None]
        names = [self._jobs[position][0] for position in self._sent] if self._attempts else []
        return Submit(
            request_id=request_id,
            jobs=[self._jobs[position][1] for position in self._sent],
            attempts={name: min(self._attempts[name], MAX_ATTEMPTS) for name in names if name in self._attempts},
        )

    def take(self, answer: Answer) -> bool:
        """Store the answer to one job; the last answer wakes the caller. Return False if the job already had an answer.

        Raises:
            ProtocolError: the answer has another type, or does not belong to a job of the last frame.
        """
        if not isinstance(answer, Accepted | Rejected) or not 0 <= answer.index < len(self._sent):
            raise ProtocolError(f"got {answer!r}, which answers none of {len(self._sent)} jobs")
        return self._set(self._sent[answer.index], answer)

    def infer_accepted(self, job_id: str) -> None:
        """Store `Accepted` as the answer for a job whose outcome has arrived but whose answer was lost.

        Otherwise the job would be submitted again. Does nothing for other jobs.
        """
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
    """The calls in flight, by request id, in the order in which they were made."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._calls: dict[int, Call[Any] | SubmitCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call[Any] | SubmitCall) -> int:
        """Add a call and return its new request id."""
        request_id = next(self._ids)
        self._calls[request_id] = call
        return request_id

    def remove(self, request_id: int) -> None:
        """Remove a call; a later answer is ignored. Does nothing if the call is not there."""
        self._calls.pop(request_id, None)

    def take(self, answer: Answer) -> bool:
        """Pass an answer to its call. Return False if there is no such call, or if it already had this answer.

        Raises:
            ProtocolError: the answer does not fit the call.
        """
        call = self._calls.get(answer.request_id)
        return call is not None and call.take(answer)

    def infer_accepted(self, job_id: str) -> None:
        """Call `SubmitCall.infer_accepted` for every submit in flight."""
        for call in self._calls.values():
            if isinstance(call, SubmitCall):
                call.infer_accepted(job_id)

    def frames(self) -> list[RequestFrame]:
        """Return the frames of all calls not fully answered, to send over a new connection."""
        return [call.frame(request_id) for request_id, call in self._calls.items() if not call.complete]

    def wake_all(self) -> None:
        """Wake every caller, so that it sees that the client has failed."""
        for call in self._calls.values():
            call.answered.set()
