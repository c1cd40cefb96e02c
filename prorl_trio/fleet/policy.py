"""The policy version of a fleet, and which of its nodes have another."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.types.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from prorl_trio.fleet.members import Member
    from prorl_trio.types.backends import BackendList

logger = logging.getLogger(__name__)

UNSETTLED: Final = "its policy version is not known yet"
ASK_S: Final = 10.0
"""Longest wait for a node's answer. One that has given none is asked again."""
RETRY_S: Final = 0.25
UNNAMED: Final = "0"
"""The version of weights that no update was made of, and that their engine has no name for."""


class PolicyUndecided(Exception):
    """The nodes of the fleet have different policy versions, and which is the newest is not known."""


class FleetPolicy:
    """The judge of who gets jobs: the nodes that have the fleet's policy version.

    That is the version that an update through this head announced last. Before its first update, it is the newest that
    any node has: see `newest_version`.

    Attributes:
        version: None: no node has any, or it is undecided.
        undecided: why it is not known; empty: it is.
        waiting: a policy update is under way, whose end nodes that have joined must await.
    """

    def __init__(self, members: Mapping[str, Member]) -> None:
        """Judge no node yet. `members` are the nodes with a session, by id, as they are at any time."""
        self.version: str | None = None
        self.undecided = ""
        self.waiting = False
        self._members = members
        self._announced: str | None = None
        self._steps = 0
        """Resumes so far: an answer from before one says nothing of what is after it."""
        self._judging = trio.Lock()

    def joined(self, member: Member) -> None:
        """Give a node that has joined no jobs until `settle` has judged it."""
        member.behind = UNSETTLED

    @property
    def settled(self) -> bool:
        """Return True if each node is judged."""
        return not any(member.behind == UNSETTLED for member in self._members.values())

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
        self.undecided = ""
        for member in self._members.values():
            member.behind = "" if member.node_id in updated else f"it was not there for version {version}"

    async def _judge(self) -> None:
        """Ask all nodes, and judge those that answer."""
        steps = self._steps
        policies = await self._ask()
        self.waiting = any(policy.updating for policy in policies.values())
        if not policies or self.waiting or steps != self._steps:
            return
        self.undecided = ""
        try:
            self.version = newest_version(policies) if self._announced is None else self._announced
        except PolicyUndecided as exc:
            logger.error("no node of the fleet gets jobs: %s", exc)
            self.version, self.undecided = None, str(exc)
        for node_id, policy in policies.items():
            member = self._members.get(node_id)
            if member is not None:
                self._set(member, self._behind(policy))

    def _behind(self, policy: NodePolicy) -> str:
        if self.undecided:
            return "which node has the newest policy version is not known"
        if self.version is None or policy.versions <= {self.version}:
            return ""
        return f"its backends have the policy versions {sorted(policy.versions)}, and the fleet has {self.version!r}"

    def _set(self, member: Member, behind: str) -> None:
        if behind and behind != member.behind and not self.undecided:
            logger.error("node %s gets no jobs until the next policy update: %s", member.node_id, behind)
        member.behind = behind

    async def _ask(self) -> dict[str, NodePolicy]:
        policies: dict[str, NodePolicy] = {}

        async def ask(member: Member) -> None:
            try:
                policies[member.node_id] = policy_of(await member.client.list_backends())
            except ServiceError as exc:
                logger.info("node %s does not tell its policy version: %s", member.node_id, exc)

        with trio.move_on_after(ASK_S):
            async with open_single_nursery() as nursery:
                for member in list(self._members.values()):
                    nursery.start_soon(ask, member)
        return policies


class NodePolicy(NamedTuple):
    """The policy of a node.

    Attributes:
        versions: of its backends that were reached.
        announced: those that policy updates brought to this node lately, the oldest first.
        updating: a policy update is under way there.
    """

    versions: frozenset[str]
    announced: tuple[str, ...] = ()
    updating: bool = False


def policy_of(listed: BackendList) -> NodePolicy:
    """Return what a node's list of backends tells of its policy."""
    pool: Mapping[str, Any] = listed.pool
    versions = {str(each.get("policy_version", "")) for each in pool.get("backends", [])}
    return NodePolicy(frozenset(versions - {""}), tuple(pool.get("versions", ())), bool(pool.get("updating")))


def newest_version(nodes: Mapping[str, NodePolicy]) -> str | None:
    """Return the version that came last of all that nodes have; None if none has any.

    Of two versions, that came later which a node took over in an update when it had the other one before. Where no node
    has had both: any is later than `0`, weights without a name; and of two integers the larger.

    Raises:
        PolicyUndecided: none is later than all the others by these rules.
    """
    there = sorted({version for node in nodes.values() for version in node.versions})
    newest = [one for one in there if all(_is_later(one, other, nodes) for other in there if other != one)]
    if newest:
        return newest[0]
    if not there:
        return None
    who = "; ".join(
        f"{version}: {', '.join(name for name, node in sorted(nodes.items()) if version in node.versions)}"
        for version in there
    )
    raise PolicyUndecided(
        f"the nodes of the fleet have different policy versions ({who}), and none of them can tell which came last; "
        "update the policy, which reaches all of them (client.policy_update), or end the nodes with the older one"
    )


def _is_later(one: str, other: str, nodes: Mapping[str, NodePolicy]) -> bool:
    lists = [node.announced for node in nodes.values() if one in node.announced and other in node.announced]
    told = {announced.index(one) > announced.index(other) for announced in lists}
    if told:
        return told == {True}
    if UNNAMED in (one, other):
        return other == UNNAMED
    return one.isdecimal() and other.isdecimal() and int(one) > int(other)
