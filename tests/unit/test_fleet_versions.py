"""The newest of the policy versions that nodes have: told by their updates, or by numbers, and never guessed."""

from __future__ import annotations

import pytest
import trio

from prorl_trio.fleet.members import Member
from prorl_trio.fleet.pools import FleetPolicy, NodePolicy, PolicyUndecided, newest_version, policy_of
from prorl_trio.types.backends import BackendList
from support.fake_fleet import entry_of


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
        ([node("0", "b", "0"), node("b", "b")], "0"),  # it was announced by that name
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


class Link:
    """A client of a node whose backends have some versions."""

    def __init__(self, *versions):
        self.versions = versions
        self.announced = []
        self.updating = ""
        self.meanwhile = lambda: None

    async def list_backends(self):
        await trio.lowlevel.checkpoint()
        pool = {
            "backends": [{"policy_version": version} for version in self.versions],
            "versions": self.announced,
            "updating": self.updating,
        }
        self.meanwhile()
        return BackendList(urls=[], pool=pool)


def fleet_of(**links):
    """Return the policy of a fleet, and its nodes."""
    members = {name: Member(entry_of(name), link, lambda *_: None) for name, link in links.items()}
    policy = FleetPolicy(members)
    for member in members.values():
        policy.joined(member)
    return policy, members


def given_jobs(members):
    return {name for name, member in members.items() if not member.behind}


async def test_a_node_one_of_whose_engines_has_another_version_gets_no_jobs():
    policy, members = fleet_of(a=Link("4", "5"), b=Link("5", "5"), c=Link(), d=Link("4"))
    await policy.settle()
    assert policy.version == "5"
    assert given_jobs(members) == {"b", "c"}
    assert "['4', '5']" in members["a"].behind


async def test_what_was_announced_is_the_fleets_version_whatever_nodes_have():
    policy, members = fleet_of(a=Link("5"), b=Link("9"))
    policy.announce("5", {"a"})
    assert given_jobs(members) == {"a"}
    await policy.judge_again()
    assert policy.version == "5"
    assert given_jobs(members) == {"a"}


async def test_while_nobody_knows_which_came_last_no_node_gets_jobs():
    policy, members = fleet_of(a=Link("a"), b=Link("b"), c=Link())
    await policy.settle()
    assert given_jobs(members) == set()
    assert "client.policy_update" in policy.undecided


async def test_what_nodes_said_before_a_resume_says_nothing_of_what_is_after_it():
    link = Link("4")
    policy, members = fleet_of(a=link)
    policy.announce("4", {"a"})
    link.versions = ("3",)
    link.meanwhile = policy.begin_resume
    await policy.judge_again()
    assert given_jobs(members) == {"a"}
    link.meanwhile = lambda: None
    await policy.judge_again()
    assert given_jobs(members) == set()


async def test_nodes_are_not_judged_in_an_update():
    a, b = Link("4"), Link("4")
    policy, members = fleet_of(a=a, b=b)
    await policy.settle()
    a.versions, a.updating = ("5",), "somebody"
    await policy.judge_again()
    assert policy.waiting
    assert policy.version == "4"
    a.updating = ""
    await policy.judge_again()
    assert not policy.waiting
    assert policy.version == "5"
    assert "['4']" in members["b"].behind
