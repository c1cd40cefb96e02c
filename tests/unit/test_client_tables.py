"""The client's own tables: what it waits for, and what came."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from prorl_ipc.session import (
    Accepted,
    Ack,
    Cancelled,
    OutcomeFrame,
    Rejected,
    SessionWelcome,
    StatusReport,
    StatusRequest,
    Submit,
)
from prorl_trio.client.address import Address
from prorl_trio.client.requests import Call, Requests, SubmitCall
from prorl_trio.client.state import ClientState, Inbox
from prorl_trio.types.errors import ProtocolError
from prorl_trio.types.models import TaskInstance
from support.fake_node import make_spec


def outcome_frame(cursor: int) -> OutcomeFrame:
    return OutcomeFrame(cursor=cursor, job_id=f"job-{cursor}", outcome=msgspec.Raw(b"\xc0"))


def test_what_is_left_out_before_the_first_outcome_of_an_inbox_is_not_missed():
    inbox = Inbox()
    assert inbox.put(outcome_frame(7))
    assert inbox.left_out == 0
    assert inbox.put(outcome_frame(9))
    assert inbox.left_out == 1


def test_an_inbox_takes_each_outcome_once_and_knows_how_many_will_not_come():
    inbox = Inbox(resume_after=3)
    assert not inbox.put(outcome_frame(3))
    assert inbox.put(outcome_frame(4))
    assert inbox.put(outcome_frame(7))
    assert not inbox.put(outcome_frame(4))
    assert not inbox.put(outcome_frame(6)), "what was given up does not come late"
    assert inbox.left_out == 2
    assert inbox.first() == outcome_frame(4)
    assert inbox.acknowledge(4)
    assert not inbox.acknowledge(4)
    assert inbox.first() == outcome_frame(7)
    assert (inbox.acked, inbox.received, len(inbox)) == (4, 7, 1)


def sent(requests: Requests) -> list[bytes]:
    (frame,) = requests.frames()
    assert isinstance(frame, Submit)
    return [bytes(job) for job in frame.jobs]


async def test_a_submit_sent_again_carries_only_what_is_unanswered():
    requests = Requests()
    call = SubmitCall([(f"job-{i}", msgspec.Raw(bytes([i]))) for i in range(4)])
    request_id = requests.add(call)
    assert sent(requests) == [b"\x00", b"\x01", b"\x02", b"\x03"]
    assert requests.take(Accepted(request_id=request_id, index=1, job_id="job-1"))
    requests.infer_accepted("job-3")
    assert sent(requests) == [b"\x00", b"\x02"]
    rejected = Rejected(request_id=request_id, index=1, job_id="job-2", code="draining", message="")
    assert requests.take(rejected)
    assert not requests.take(rejected)
    assert not call.complete
    assert requests.take(Accepted(request_id=request_id, index=0, job_id="job-0"))
    assert call.complete
    assert call.answered.is_set()
    assert [type(answer) for answer in call.answers] == [Accepted, Accepted, Rejected, Accepted]
    assert requests.frames() == []
    with pytest.raises(ProtocolError, match="answers none of 2 jobs"):
        requests.take(Accepted(request_id=request_id, index=2, job_id="job-0"))
    requests.remove(request_id)
    assert not requests.take(rejected)
    assert len(requests) == 0


async def test_an_outcome_answers_the_submit_whose_answer_was_lost():
    """Or it would be sent again after the outcome was acknowledged, and the job would run twice."""
    state = ClientState("s", 0)
    call = SubmitCall([("job-1", msgspec.Raw(b"\xc0"))])
    request_id = state.requests.add(call)
    assert sent(state.requests) == [b"\xc0"]
    state.take(outcome_frame(1))
    assert call.complete
    assert state.requests.frames() == []
    state.take(Accepted(request_id=request_id, index=0, job_id="job-1", cursor=1))  # late, and no news
    assert not state.outstanding
    state.welcome = SessionWelcome(version=1, node_id="n", session_id="s", resumed=True, pending=0)
    posted: list[Any] = []
    link: Any = SimpleNamespace(post=posted.append)
    state.opened(link, msgspec.structs.replace(state.welcome, resumed=False))
    assert posted == [Ack(cursor=0)]


async def test_an_answer_of_the_wrong_kind_is_refused():
    requests = Requests()
    request_id = requests.add(Call(lambda i: StatusRequest(request_id=i), StatusReport))
    with pytest.raises(ProtocolError, match="got Cancelled where StatusReport was due"):
        requests.take(Cancelled(request_id=request_id, cancelled=[], ended=[], unknown=[]))


def test_addresses():
    assert Address.parse("ws://127.0.0.1:8700") == Address("127.0.0.1", 8700, "/")
    assert str(Address.parse("ws://[::1]:8700/a")) == "ws://[::1]:8700/a"
    for url in ("127.0.0.1:8700", "http://127.0.0.1:8700", "ws://host", "wss://host", ""):
        with pytest.raises(ValueError, match=r"ws://HOST:PORT"):
            Address.parse(url)


def test_a_spec_is_what_it_was_on_the_other_side():
    spec = make_spec("a", question="?")
    assert isinstance(spec.instance, TaskInstance)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=type(spec)) == spec
