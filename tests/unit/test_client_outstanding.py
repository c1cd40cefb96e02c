"""What a client takes for outstanding, frame by frame."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from prorl_ipc.session import Accepted, JobList, ListJobs, OutcomeFrame, SessionWelcome
from prorl_trio.client.state import ClientState
from prorl_trio.types.errors import ProtocolError


class Link:
    """Keeps what is posted."""

    def __init__(self) -> None:
        self.posted: list[Any] = []

    def post(self, frame: Any) -> None:
        self.posted.append(frame)

    def end(self, code: int, reason: str) -> None:
        pass


def opened(*, resumed: bool) -> tuple[ClientState, Link]:
    state, link = ClientState("s", 0), Link()
    welcome = SessionWelcome(version=1, node_id="n", session_id="s", resumed=resumed, pending=0)
    state.opened(link, welcome)  # type: ignore[arg-type]
    return state, link


def lists(link: Link) -> int:
    return sum(isinstance(frame, ListJobs) for frame in link.posted)


def outcome(cursor: int, job_id: str) -> OutcomeFrame:
    return OutcomeFrame(cursor=cursor, job_id=job_id, outcome=msgspec.Raw(b"\xc0"))


def accepted(job_id: str, cursor: int = 0) -> Accepted:
    return Accepted(request_id=1, index=0, job_id=job_id, cursor=cursor)


async def test_jobs_come_and_outcomes_take_them_away():
    state, link = opened(resumed=False)
    assert (state.outstanding, lists(link)) == (False, 0)
    state.take(accepted("a"))
    state.take(accepted("b"))
    state.take(outcome(1, "a"))
    assert state.outstanding
    state.take(outcome(2, "b"))
    assert not state.outstanding
    state.take(accepted("a", cursor=1))  # it joins what was received
    assert not state.outstanding
    state.take(accepted("c", cursor=3))  # it has ended, and its outcome is on its way
    assert state.outstanding
    state.take(outcome(3, "c"))
    assert not state.outstanding


async def test_who_comes_back_waits_for_the_nodes_list_all_of_it():
    state, link = opened(resumed=True)
    assert (state.outstanding, lists(link)) == (True, 1)
    state.take(JobList(request_id=0, job_ids=["a"], more=True))
    state.take(JobList(request_id=0, job_ids=["b"]))
    state.take(outcome(1, "a"))
    assert state.outstanding
    state.take(outcome(2, "b"))
    assert not state.outstanding


async def test_a_list_with_nothing_in_it_ends_the_wait():
    state, _ = opened(resumed=True)
    state.take(JobList(request_id=0, job_ids=[]))
    assert not state.outstanding


async def test_after_a_gap_the_node_is_asked_what_still_comes():
    state, link = opened(resumed=False)
    state.take(accepted("a"))
    state.take(accepted("b"))
    state.take(outcome(1, "z"))
    assert lists(link) == 0
    with suppress(ProtocolError):
        state.take(outcome(3, "b"))  # that of `a` was taken by somebody else
    assert (state.outstanding, lists(link)) == (True, 1)
    state.take(JobList(request_id=0, job_ids=[]))
    assert not state.outstanding


async def test_a_submit_in_progress_and_what_is_to_be_sent_again_are_outstanding():
    state, _ = opened(resumed=False)
    with state.submitting():
        assert state.outstanding
    assert not state.outstanding
    state.take(outcome(1, "a"))
    assert not state.outstanding, "it has arrived"
    state.ask_again("its tokens were taken back")
    assert state.outstanding
