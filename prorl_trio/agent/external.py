"""A remote agent: in a notebook, in a service, in another cluster. The rollout waits for it in RUN."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from prorl_trio.types.errors import NoAgentWanted
from prorl_trio.types.programs import AgentFinished, OpenAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prorl_trio.types.models import Turn
    from prorl_trio.types.programs import AgentOpened, FinishAgent

FINISHED_KEPT = 4096
"""Number of remembered ends, for callers that missed the answer."""
LOOK_S = 0.5
"""Delay with which the end of a job is detected while callers wait for its offer."""


class Offer:
    """A rollout that waits for its agent. `finished` is set when the agent reports, with the report in `finish`."""

    def __init__(self, opened: AgentOpened, turns: Sequence[Turn]) -> None:
        self.opened = opened
        self.turns = turns
        self.finish: FinishAgent | None = None
        self.finished = trio.Event()


class ExternalAgents:
    """The rollouts of a node that wait for remote agents, by job id.

    Args:
        check_live: raises UnknownJob for a job that is not live on the node.
    """

    def __init__(self, check_live: Callable[[str], None]) -> None:
        self._check_live = check_live
        self._offers: dict[str, Offer] = {}
        self._finished: dict[str, AgentFinished] = {}
        self._changed = trio.Event()

    @contextmanager
    def offered(self, job_id: str, opened: AgentOpened, turns: Sequence[Turn]) -> Iterator[Offer]:
        """Let an agent work for the job during the block."""
        offer = self._offers[job_id] = Offer(opened, turns)
        self._changed.set()
        self._changed = trio.Event()
        try:
            yield offer
        finally:
            del self._offers[job_id]

    async def operate(self, request: OpenAgent | FinishAgent) -> AgentOpened | AgentFinished:
        """Carry out a request. See `OpenAgent`, which waits, and `FinishAgent`."""
        return await self._open(request) if isinstance(request, OpenAgent) else self._finish(request)

    async def _open(self, request: OpenAgent) -> AgentOpened:
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(request.wait_s):  # noqa: ASYNC912 - works without any time as well
            while (offer := self._offers.get(request.job_id)) is None or offer.finished.is_set():
                self._check_live(request.job_id)
                with trio.move_on_after(LOOK_S):
                    await self._changed.wait()
            return offer.opened
        self._check_live(request.job_id)
        raise NoAgentWanted(
            f"job {request.job_id!r} has not wanted an agent within {request.wait_s:g} s: it waits in a queue or for "
            'its sandbox, or its agent is not `{"external": true}`'
        )

    def _finish(self, request: FinishAgent) -> AgentFinished:
        if (before := self._finished.get(request.key)) is not None:
            return before
        offer = self._offers.get(request.job_id)
        if offer is None or offer.finished.is_set():
            self._check_live(request.job_id)
            raise NoAgentWanted(f"job {request.job_id!r} does not wait for an agent now")
        if request.key not in ("", offer.opened.key):
            raise NoAgentWanted(
                f"the attempt of job {request.job_id!r} has ended that had this key; open its agent again"
            )
        offer.finish = request
        offer.finished.set()
        answer = AgentFinished(turns=len(offer.turns))
        if request.key:
            self._finished[request.key] = answer
            if len(self._finished) > FINISHED_KEPT:
                del self._finished[next(iter(self._finished))]
        return answer
