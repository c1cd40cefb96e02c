"""Operations on the pools of several nodes at once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from ipc.nursery import open_single_nursery
from prorl_trio.client.errors import ConnectionLost
from prorl_trio.types.backends import BackendList
from prorl_trio.types.errors import BackendError, ServiceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prorl_trio.client.client import RolloutClient
    from prorl_trio.rendezvous.entry import NodeEntry
    from prorl_trio.types.backends import AnswerT, BackendRequest

__all__ = ["MemberT", "PoolMember", "PoolMembers", "ask_all", "joined"]

logger = logging.getLogger(__name__)


class PoolMember(Protocol):
    """A node of a fleet, for the operations on its pool.

    Attributes:
        entry: as it was when the session was opened.
        client: the session.
        behind: why it is given no jobs, though it takes some; empty: it is given some.
    """

    entry: NodeEntry
    client: RolloutClient
    behind: str

    @property
    def node_id(self) -> str:
        """Return the node's id."""
        ...


MemberT = TypeVar("MemberT", bound=PoolMember)


class PoolMembers(Protocol):
    """The nodes of a fleet that there are now."""

    @property
    def members(self) -> Mapping[str, PoolMember]:
        """Return the nodes with a session, by id."""
        ...

    def notify(self) -> None:
        """Wake those that wait for a change."""


async def ask_all(
    members: Sequence[MemberT], request: BackendRequest[AnswerT], *, lost_is_fine: bool = False
) -> list[tuple[MemberT, AnswerT]]:
    """Ask nodes at once; return their answers, in order. Raises the first error, when all have answered.

    `lost_is_fine`: a node that is lost is left out, unless none is left.
    """
    answers: dict[str, AnswerT] = {}
    errors: list[ServiceError | BackendError] = []

    async def ask(member: MemberT) -> None:
        try:
            answers[member.node_id] = await member.client.operate(request)
        except (ServiceError, BackendError) as exc:
            if lost_is_fine and isinstance(exc, ConnectionLost):
                logger.error("node %s was lost while it was asked to %s: %s", member.node_id, request.operation, exc)
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


def joined(answers: Sequence[tuple[PoolMember, BackendList]]) -> BackendList:
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
