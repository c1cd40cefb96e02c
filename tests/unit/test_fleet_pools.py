"""The version that a lost node's backends have is known for certain, or it is not."""

from __future__ import annotations

import pytest

from prorl_trio.client import ConnectionLost
from prorl_trio.fleet.members import Member
from prorl_trio.fleet.pools import FleetPools
from prorl_trio.types.backends import PauseBackends, ResumeBackends, UpdateReport
from prorl_trio.types.errors import BackendsBusy
from support.fake_fleet import entry_of


class Link:
    """A client of a node; with an `error`, none of its steps succeeds."""

    error = None

    async def operate(self, _request):
        if self.error is not None:
            raise self.error
        return UpdateReport(paused=False, waiting=0, backends=[])

    async def list_backends(self):
        raise ConnectionLost("not asked here")


@pytest.fixture
def members():
    return {name: Member(entry_of(name), Link(), lambda *_: None) for name in "ab"}


@pytest.fixture
def pools(members):
    pools = FleetPools(members, lambda _afn: None)
    pools.policy.announce("1", {"a", "b"})
    return pools


PAUSE = PauseBackends(holder="h")


async def test_outside_of_updates_it_is_that_of_the_fleet(members, pools):
    assert pools.version_of(members["a"]) == "1"
    members["a"].behind = "it was not there for version 1"
    assert pools.version_of(members["a"]) is None


@pytest.mark.parametrize("version", [None, "2"])
async def test_of_a_node_that_is_lost_in_an_update_it_is_not_known_nor_when_that_is_over(members, pools, version):
    lost = members["b"]
    await pools.operate(PAUSE)
    assert pools.version_of(lost) is None
    lost.client.error = ConnectionLost("it is gone")
    await pools.operate(ResumeBackends(policy_version=version, holder="h"))
    assert pools.version_of(lost) is None
    assert pools.version_of(members["a"]) == (version or "1")


async def test_nor_if_its_session_ended_before_the_step_did(members, pools):
    lost = members["b"]
    await pools.operate(PAUSE)
    del members["b"]
    members["a"].client.error = BackendsBusy("another step")
    with pytest.raises(BackendsBusy):
        await pools.operate(ResumeBackends(holder="h"))
    assert pools.version_of(lost) is None
