"""The pools of LLM backends of a fleet's nodes, as one pool."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, cast

from prorl_trio.client.errors import ConnectionLost
from prorl_trio.client.fleet.asking import ask_all, joined
from prorl_trio.client.fleet.owners import BackendOwners
from prorl_trio.client.fleet.policy import FleetPolicy
from prorl_trio.types.backends import (
    AddBackend,
    BackendList,
    DrainBackend,
    ListBackends,
    PauseBackends,
    RemoveBackends,
    ResumeBackends,
    UpdateReport,
    WeighBackend,
)
from prorl_trio.types.errors import UnknownBackend

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prorl_trio.client.fleet.asking import PoolMember, PoolMembers
    from prorl_trio.types.backends import AnswerT, BackendRequest

__all__ = ["FleetPools"]

logger = logging.getLogger(__name__)

UPDATES_KEPT: Final = 8
"""Policy updates whose nodes are remembered, in case their last step is asked again."""

LOST_IN_UPDATE: Final = "it was lost in a policy update"


class FleetPools:
    """The operations of `BackendCalls` on all nodes: a step of a policy update is taken by all of them, or fails.

    Attributes:
        policy: who has the fleet's policy version.
        owners: who has which backend.
    """

    def __init__(self, state: PoolMembers, run_soon: Callable[[Callable[[], Awaitable[None]]], None]) -> None:
        """Look at no node yet. `run_soon` runs a function in the background."""
        self.policy = FleetPolicy(state)
        self.owners = BackendOwners(state, self.policy)
        self._state = state
        self._run_soon = run_soon
        self._updates: dict[str, list[PoolMember]] = {}
        """Nodes of a policy update, from its pause on, by its holder."""
        self._open: set[str] = set()
        """Holders of the updates that are under way."""

    async def operate(self, request: BackendRequest[AnswerT]) -> AnswerT:
        """Carry out one operation on the pools of all nodes that it concerns."""
        return cast("AnswerT", await self._any(cast("BackendRequest[Any]", request)))

    async def _any(self, request: BackendRequest[Any]) -> object:
        if isinstance(request, AddBackend):
            await self.owners.add(request)
            return joined(await ask_all(self._members(), ListBackends()))
        if isinstance(request, ListBackends):
            return joined(await ask_all(self._members(), request))
        if isinstance(request, DrainBackend | RemoveBackends):
            self.owners.taken_out(request)
        elif not isinstance(request, WeighBackend):
            return await self._step(request)
        if request.url is not None:
            return await self._where_it_is(request, request.url)
        return joined(await ask_all(self._members(), request))

    def version_of(self, member: PoolMember) -> str | None:
        """Return the policy version that the backends of a node have for certain; None: that is not known.

        In an update they may have the new weights, or not.
        """
        in_update = any(member in self._updates[holder] for holder in self._open)
        return None if member.behind or in_update else self.policy.version

    async def node_lost(self, member: PoolMember, version: str | None) -> None:
        """Give the backends of a lost node, which had the policy `version`, to others."""
        await self.policy.judge_again()
        await self.owners.move(member, version)

    def _members(self) -> list[PoolMember]:
        members = list(self._state.members.values())
        if not members:
            raise ConnectionLost("the fleet has no node now")
        return members

    async def _where_it_is(self, request: BackendRequest[BackendList], url: str) -> BackendList:
        lists = await ask_all(self._members(), ListBackends())
        has = [member for member, answer in lists if url.rstrip("/") in answer.urls]
        if not has:
            raise UnknownBackend(f"no node of the fleet has the backend {url}")
        await ask_all(has, request)
        return joined(await ask_all(self._members(), ListBackends()))

    async def _step(self, request: BackendRequest[UpdateReport]) -> UpdateReport:
        """Take a step of a pause or a policy update on its nodes: those that there were when it began."""
        holder = str(getattr(request, "holder", ""))
        if isinstance(request, PauseBackends) and holder:
            self._updates[holder] = self._members()
            self._open.add(holder)
            if len(self._updates) > UPDATES_KEPT:
                oldest = next(iter(self._updates))
                self._open.discard(oldest)
                del self._updates[oldest]
        members = self._updates.get(holder) or self._members()
        if isinstance(request, ResumeBackends):
            return await self._resume(request, members)
        return _together([report for _, report in await ask_all(members, request)])

    async def _resume(self, request: ResumeBackends, members: list[PoolMember]) -> UpdateReport:
        """End an update. A node that is lost meanwhile is none of it: it goes back, or is behind, by itself."""
        self.policy.begin_resume()
        answers: list[tuple[PoolMember, UpdateReport]] = []
        try:
            answers = await ask_all(members, request, lost_is_fine=True)
        finally:
            self._open.discard(request.holder)
            answered = {member.node_id for member, _ in answers}
            for member in members:
                if self._state.members.get(member.node_id) is not member or (
                    answers and member.node_id not in answered
                ):
                    member.behind = member.behind or LOST_IN_UPDATE
            if request.holder and not (answers and request.policy_version is not None):
                self._run_soon(self.policy.judge_again)  # some nodes may have it all the same
        if request.policy_version is not None:
            self.policy.announce(request.policy_version, answered)
            self._run_soon(self.owners.give_back)
        return _together([report for _, report in answers])


def _together(reports: list[UpdateReport]) -> UpdateReport:
    return UpdateReport(
        paused=all(report.paused for report in reports),
        waiting=sum(report.waiting for report in reports),
        backends=[backend for report in reports for backend in report.backends],
    )
