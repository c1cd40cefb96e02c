"""The policy version of a fleet, and which of its nodes have another."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import trio

from ipc.nursery import open_single_nursery
from prorl_trio.client.errors import PolicyUndecided
from prorl_trio.client.fleet.versions import newest_version, policy_of
from prorl_trio.types.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Collection

    from prorl_trio.client.fleet.asking import PoolMember, PoolMembers
    from prorl_trio.client.fleet.versions import NodePolicy

__all__ = ["SHUTTING_DOWN", "FleetPolicy"]

logger = logging.getLogger(__name__)

UNSETTLED: Final = "its policy version is not known yet"
SHUTTING_DOWN: Final = "it is shutting down"
ASK_S: Final = 10.0
"""Longest wait for a node's answer. One that has given none is asked again."""
RETRY_S: Final = 0.25


class FleetPolicy:
    """The judge of who gets jobs: the nodes that have the fleet's policy version.

    That is the version that this client announced last. Before its first update, it is the newest that any node has:
    see `newest_version`.

    Attributes:
        version: None: no node has any, or it is undecided.
        undecided: why it is not known; None: it is.
        waiting: a policy update is under way, whose end nodes that have joined must await.
    """

    def __init__(self, state: PoolMembers) -> None:
        self.version: str | None = None
        self.undecided: PolicyUndecided | None = None
        self.waiting = False
        self._state = state
        self._announced: str | None = None
        self._steps = 0
        """Resumes so far: an answer from before one says nothing of what is after it."""
        self._judging = trio.Lock()

    def joined(self, member: PoolMember) -> None:
        """Give a node that has joined no jobs until `settle` has judged it."""
        member.behind = UNSETTLED

    @property
    def settled(self) -> bool:
        """Return True if each node is judged."""
        return not any(member.behind == UNSETTLED for member in self._state.members.values())

    def require_decided(self) -> None:
        """Raise PolicyUndecided if it is not known which nodes have the fleet's policy."""
        if self.undecided is not None:
            raise PolicyUndecided(str(self.undecided))

    async def settle(self) -> None:
        """Return when each node is judged; those that were are judged anew, as the new ones may have a later policy."""
        async with self._judging:
            while not self.settled:
                await self._judge()
                if not self.settled:
                    await trio.sleep(RETRY_S)

    async def judge_again(self) -> None:
        """Judge all nodes once more: one is lost, or an update was cut off."""
        async with self._judging:
            await self._judge()

    def begin_resume(self) -> None:
        """Note that a resume is on its way to the nodes: what they said before does not count any more."""
        self._steps += 1

    def announce(self, version: str, updated: Collection[str]) -> None:
        """Note that the nodes `updated` have this version now, and that it is the fleet's."""
        self._steps += 1
        self._announced = self.version = version
        self.undecided = None
        for member in self._state.members.values():
            member.behind = "" if member.node_id in updated else f"it was not there for version {version}"
        self._state.notify()

    async def _judge(self) -> None:
        """Ask all nodes, and judge those that answer."""
        steps = self._steps
        policies = await self._ask()
        self.waiting = any(policy.updating for policy in policies.values())
        if not policies or self.waiting or steps != self._steps:
            self._state.notify()
            return
        self.undecided = None
        try:
            self.version = newest_version(policies) if self._announced is None else self._announced
        except PolicyUndecided as exc:
            logger.error("no node of the fleet gets jobs: %s", exc)
            self.version, self.undecided = None, exc
        for node_id, policy in policies.items():
            member = self._state.members.get(node_id)
            if member is not None and member.behind != SHUTTING_DOWN:
                self._set(member, self._behind(policy))
        self._state.notify()

    def _behind(self, policy: NodePolicy) -> str:
        if self.undecided is not None:
            return "which node has the newest policy version is not known"
        if self.version is None or policy.versions <= {self.version}:
            return ""
        return f"its backends have the policy versions {sorted(policy.versions)}, and the fleet has {self.version!r}"

    def _set(self, member: PoolMember, behind: str) -> None:
        if behind and behind != member.behind and self.undecided is None:
            logger.error("node %s gets no jobs until the next policy update: %s", member.node_id, behind)
        member.behind = behind

    async def _ask(self) -> dict[str, NodePolicy]:
        policies: dict[str, NodePolicy] = {}

        async def ask(member: PoolMember) -> None:
            try:
                policies[member.node_id] = policy_of(await member.client.list_backends())
            except ServiceError as exc:
                logger.info("node %s does not tell its policy version: %s", member.node_id, exc)

        with trio.move_on_after(ASK_S):
            async with open_single_nursery() as nursery:
                for member in list(self._state.members.values()):
                    nursery.start_soon(ask, member)
        return policies
