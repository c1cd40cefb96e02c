"""When a client tells its node that outcomes are taken care of: as many at once as there are, ahead of what follows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import trio
import trio.testing

from prorl_ipc.session import Ack, ListJobs, OutcomeFrame, SessionWelcome, StatusRequest
from prorl_trio.client.state import ACK_DELAY_S, ClientState

if TYPE_CHECKING:
    from trio.testing import MockClock

WELCOME = SessionWelcome(version=1, node_id="n", session_id="s", resumed=True, pending=0)

LIST = ListJobs(request_id=0)
"""Who comes back to a session asks what is still to come."""


def open_state(outcomes: int, resume_after: int = 0) -> tuple[ClientState, list[Any]]:
    """A client with a link that records what is posted and asked of it, and outcomes in its inbox."""
    state, said = ClientState("s", resume_after), []
    link: Any = SimpleNamespace(
        post=said.append, wake=lambda: said.append("wake"), start_soon=lambda *call: said.append(call)
    )
    state.opened(link, WELCOME)
    assert said == [Ack(cursor=resume_after), LIST]
    said.clear()
    for cursor in range(resume_after + 1, resume_after + 1 + outcomes):
        state.take(OutcomeFrame(cursor=cursor, job_id=f"j{cursor}", outcome=msgspec.Raw(b"\xc0")))
    return state, said


async def test_the_last_outcome_there_is_is_acknowledged_at_once():
    state, said = open_state(1)
    state.acknowledge(1)
    assert said == ["wake"]
    assert msgspec.msgpack.decode(state.next_ack() or b"", type=Ack) == Ack(cursor=1)
    assert state.next_ack() is None
    state.acknowledge(1)
    assert said == ["wake"], "no news"


async def test_acknowledgements_wait_a_moment_for_others_while_there_is_more_to_take(autojump_clock: MockClock):
    state, said = open_state(5)
    state.acknowledge(1)
    state.acknowledge(2)
    state.acknowledge(3)
    ((run, *args),) = said
    said.clear()
    assert state.next_ack() is None, "not yet"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, *args)
        await trio.testing.wait_all_tasks_blocked()
        state.acknowledge(4)
        assert said == []
    assert trio.current_time() == ACK_DELAY_S
    assert said == ["wake"]
    assert msgspec.msgpack.decode(state.next_ack() or b"", type=Ack) == Ack(cursor=4)
    state.acknowledge(5)
    assert said == ["wake", "wake"]


async def test_what_waits_when_a_link_ends_goes_over_the_next_one_and_the_old_one_asks_for_nothing(
    autojump_clock: MockClock,
):
    state, said = open_state(5)
    state.acknowledge(2)
    ((run, *args),) = said
    state.lost()
    new: list[Any] = []
    link: Any = SimpleNamespace(
        post=new.append, wake=lambda: new.append("wake"), start_soon=lambda *call: new.append(call)
    )
    state.opened(link, WELCOME)
    assert new == [Ack(cursor=2), LIST]
    state.acknowledge(3)
    await run(*args)
    assert said == [(run, *args)]
    assert state.next_ack() is None, "the new link's own moment lasts"


async def test_a_request_comes_after_the_acknowledgement_of_what_was_settled_before_it():
    state, said = open_state(2)
    state.acknowledge(1)
    state.post(StatusRequest(request_id=1))
    state.post(StatusRequest(request_id=2))
    assert said[1:] == [Ack(cursor=1), StatusRequest(request_id=1), StatusRequest(request_id=2)]
    assert state.next_ack() is None


async def test_what_was_settled_without_a_link_is_acknowledged_by_the_next_one():
    state, said = open_state(2, resume_after=7)
    link = state.link
    state.lost()
    state.acknowledge(9)
    assert said == []
    assert link is not None
    state.opened(link, WELCOME)
    assert said == [Ack(cursor=9), LIST]
    assert state.next_ack() is None
