"""The pools of LLM backends of a fleet's nodes, as one pool."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlsplit

from ipc.nursery import open_single_nursery
from prorl_trio.client.errors import ConnectionLost
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
from prorl_trio.types.errors import BackendError, ProrlError, ServiceError, UnknownBackend

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prorl_trio.client.fleet.state import FleetState, Member
    from prorl_trio.types.backends import AnswerT, BackendRequest

__all__ = ["FleetPools"]

logger = logging.getLogger(__name__)

UPDATES_KEPT: Final = 8
"""Policy updates whose nodes are remembered, in case their last step is asked again."""


class FleetPools:
    """The operations of `BackendCalls` on all nodes: a step of a policy update is taken by all of them, or fails.

    A backend that is added goes to the node on its own host, if there is one, else to the node with the fewest. When
    that node is lost, it goes to another one.
    """

    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._added: dict[str, tuple[str, float | None]] = {}
        """Node and weight of the backends that were added by this client, by URL."""
        self._updates: dict[str, list[Member]] = {}
        """Nodes of a policy update, from its pause on, by its holder."""
        self.version: str | None = None
        """The policy version that was announced last by this client; None: none was."""

    async def operate(self, request: BackendRequest[AnswerT]) -> AnswerT:
        """Carry out one operation on the pools of all nodes that it concerns."""
        return cast("AnswerT", await self._any(cast("BackendRequest[Any]", request)))

    async def _any(self, request: BackendRequest[Any]) -> object:
        if isinstance(request, AddBackend):
            return await self._add(request)
        if isinstance(request, ListBackends):
            return _joined(await self._all(self._members(), request))
        if isinstance(request, DrainBackend | WeighBackend):
            return await self._where_it_is(request, request.url)
        if not isinstance(request, RemoveBackends):
            return await self._step(request)
        if request.url is not None:
            self._added.pop(request.url, None)
            return await self._where_it_is(request, request.url)
        self._added.clear()
        return _joined(await self._all(self._members(), request))

    async def behind(self, member: Member) -> str:
        """Return why a node that has joined must not get jobs yet: it has another policy than the fleet.

        Raises:
            ServiceError: it is lost again.
        """
        if self.version is None:
            return ""
        listed = await member.client.list_backends()
        versions = {str(each.get("policy_version", "")) for each in listed.pool.get("backends", [])}
        if versions <= {self.version}:
            return ""
        return f"its backends have the policy versions {sorted(versions)}, and the fleet has {self.version!r}"

    async def node_lost(self, node_id: str) -> None:
        """Give the backends that were added to a lost node to others."""
        for url, (home, weight) in list(self._added.items()):
            if home != node_id:
                continue
            try:
                await self._add(AddBackend(url=url, weight=weight))
            except ProrlError as exc:
                logger.error("backend %s of the lost node %s goes to no other: %s", url, node_id, exc)

    def _members(self) -> list[Member]:
        members = list(self._state.members.values())
        if not members:
            raise ConnectionLost("the fleet has no node now")
        return members

    async def _add(self, request: AddBackend) -> BackendList:
        lists = await self._all(self._members(), ListBackends())
        has = [member for member, answer in lists if request.url.rstrip("/") in answer.urls]
        near = [member for member, _ in lists if _same_host(member, request.url)]
        fewest = sorted(lists, key=lambda pair: (len(pair[1].urls), pair[0].node_id))
        chosen = (has or near or [fewest[0][0]])[0]
        await chosen.client.add_backend(request.url, request.weight)
        self._added[request.url] = (chosen.node_id, request.weight)
        return _joined(await self._all(self._members(), ListBackends()))

    async def _where_it_is(self, request: BackendRequest[BackendList], url: str) -> BackendList:
        lists = await self._all(self._members(), ListBackends())
        has = [member for member, answer in lists if url.rstrip("/") in answer.urls]
        if not has:
            raise UnknownBackend(f"no node of the fleet has the backend {url}")
        await self._all(has, request)
        return _joined(await self._all(self._members(), ListBackends()))

    async def _step(self, request: BackendRequest[UpdateReport]) -> UpdateReport:
        """Take a step of a pause or a policy update on its nodes: those that there were when it began."""
        holder = str(getattr(request, "holder", ""))
        if isinstance(request, PauseBackends) and holder:
            self._updates[holder] = self._members()
            if len(self._updates) > UPDATES_KEPT:
                del self._updates[next(iter(self._updates))]
        members = self._updates.get(holder) or self._members()
        lost_is_fine = isinstance(request, ResumeBackends)  # it goes back, or is behind, by itself
        answers = await self._all(members, request, lost_is_fine=lost_is_fine)
        if isinstance(request, ResumeBackends) and request.policy_version is not None:
            self.version = request.policy_version
            updated = {member.node_id for member, _ in answers}
            for member in self._state.members.values():
                member.behind = "" if member.node_id in updated else f"it was not there for version {self.version}"
        reports = [report for _, report in answers]
        return UpdateReport(
            paused=all(report.paused for report in reports),
            waiting=sum(report.waiting for report in reports),
            backends=[backend for report in reports for backend in report.backends],
        )

    async def _all(
        self, members: Sequence[Member], request: BackendRequest[AnswerT], *, lost_is_fine: bool = False
    ) -> list[tuple[Member, AnswerT]]:
        """Ask nodes at once; return their answers, in order. Raises the first error, when all have answered.

        `lost_is_fine`: a node that is lost is left out, unless none is left.
        """
        answers: dict[str, AnswerT] = {}
        errors: list[ServiceError | BackendError] = []

        async def ask(member: Member) -> None:
            try:
                answers[member.node_id] = await member.client.operate(request)
            except (ServiceError, BackendError) as exc:
                if lost_is_fine and isinstance(exc, ConnectionLost):
                    logger.error("node %s was lost in a policy update: %s", member.node_id, exc)
                else:
                    errors.append(exc)

        async with open_single_nursery() as nursery:
            for member in members:
                nursery.start_soon(ask, member)
        if errors:
            raise errors[0]
        if not answers:
            raise ConnectionLost("all nodes of the fleet were lost")
        return [(member, answers[member.node_id]) for member in members if member.node_id in answers]


def _joined(answers: Sequence[tuple[Member, BackendList]]) -> BackendList:
    """Return the lists of several nodes as one; each backend in `pool` says whose it is."""
    pools: list[Mapping[str, object]] = [answer.pool for _, answer in answers]
    backends = [
        {**backend, "node_id": member.node_id} for member, answer in answers for backend in answer.pool["backends"]
    ]
    return BackendList(
        urls=[url for _, answer in answers for url in answer.urls],
        pool={
            **{name: sum(cast("int", pool.get(name, 0)) for pool in pools) for name in ("open_leases", "waiting")},
            "backends": backends,
        },
    )


def _same_host(member: Member, url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host in ("127.0.0.1", "localhost", "::1"):
        return member.entry.host == socket.gethostname()
    return host in (member.entry.host, urlsplit(member.entry.url).hostname)
