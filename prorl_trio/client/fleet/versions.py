"""The newest of the policy versions that the nodes of a fleet have. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prorl_trio.client.errors import PolicyUndecided

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.types.backends import BackendList

__all__ = ["NodePolicy", "newest_version", "policy_of"]

UNNAMED: Final = "0"
"""The version of weights that no update was made of, and that their engine has no name for."""


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
