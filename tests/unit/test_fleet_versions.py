"""The newest of the policy versions that nodes have: told by their updates, or by numbers, and never guessed."""

from __future__ import annotations

import pytest

from prorl_trio.client import PolicyUndecided
from prorl_trio.client.fleet.versions import NodePolicy, newest_version, policy_of
from prorl_trio.types.backends import BackendList


def node(version, *announced):
    return NodePolicy(frozenset({version} if version else ()), announced)


@pytest.mark.parametrize(
    ("nodes", "newest"),
    [
        ([], None),
        ([node("")], None),
        ([node("5"), node("5")], "5"),
        ([node("0"), node("b")], "b"),
        ([node("9"), node("10")], "10"),
        ([node("b", "a", "b"), node("a", "a")], "b"),
        ([node("1", "57", "1"), node("57", "56", "57")], "1"),  # another run has begun, or an older checkpoint
        ([node("c", "a", "b", "c"), node("b"), node("a")], "c"),
        ([node("7"), node("8"), node("8")], "8"),  # and not the majority, nor whoever is first
        ([node("8"), node("7"), node("7")], "8"),
        ([node(""), node("b")], "b"),
    ],
)
def test_the_newest_is_what_came_last(nodes, newest):
    assert newest_version({f"n{number}": each for number, each in enumerate(nodes)}) == newest


@pytest.mark.parametrize(
    "nodes",
    [
        [node("a"), node("b")],
        [node("a"), node("b"), node("b")],
        [node("5"), node("best")],
        [node("2", "1", "3", "2"), node("3", "1", "2", "3")],  # each has had both, in another order
    ],
)
def test_what_cannot_be_told_is_not_guessed(nodes):
    with pytest.raises(PolicyUndecided, match=r"n0.*n1.*client\.policy_update.*end the nodes"):
        newest_version({f"n{number}": each for number, each in enumerate(nodes)})


def test_a_nodes_list_tells_its_policy_and_what_is_down_has_none():
    pool = {
        "backends": [{"policy_version": "3"}, {"policy_version": ""}, {}],
        "versions": ["2", "3"],
        "updating": "somebody",
    }
    assert policy_of(BackendList(urls=[], pool=pool)) == NodePolicy(frozenset({"3"}), ("2", "3"), updating=True)
    assert policy_of(BackendList(urls=[], pool={})) == NodePolicy(frozenset())
