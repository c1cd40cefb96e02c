"""The pure parts of the edge: log, feed, sessions, outcome encoding, token files, and the client's own tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import trio

from ipc.session import (
    Accepted,
    Ack,
    CancelledJobs,
    JobEvent,
    OutcomeFrame,
    Rejected,
    SessionWelcome,
    StatusReport,
    StatusRequest,
    Submit,
)
from prorl_trio.client.address import Address
from prorl_trio.client.inbox import Inbox
from prorl_trio.client.requests import Call, Requests, SubmitCall
from prorl_trio.client.state import ClientState
from prorl_trio.config import ListenConfig
from prorl_trio.service.auth import load_token, token_matches
from prorl_trio.service.limits import SessionLimits
from prorl_trio.service.sessions.feed import Feed
from prorl_trio.service.sessions.outcome_encoding import encode_outcome
from prorl_trio.service.sessions.outcome_log import OutcomeLog
from prorl_trio.service.sessions.session_table import SessionTable
from prorl_trio.types.errors import AdmissionRejected, ConfigError, DuplicateJob, ProtocolError, UnknownHandler
from prorl_trio.types.models import Outcome, TaskInstance
from support.fake_node import FakeNode, make_outcome, make_spec

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 1024 * 1024


class SilentListener:
    def __init__(self) -> None:
        self.events: list[JobEvent] = []
        self.was_replaced = False

    def wake(self) -> None:
        """Silent."""

    def event(self, event: JobEvent) -> None:
        self.events.append(event)

    def replaced(self) -> None:
        self.was_replaced = True


def read(frame: bytes | None) -> tuple[int, str]:
    assert frame is not None
    decoded = msgspec.msgpack.decode(frame, type=OutcomeFrame)
    return decoded.cursor, decoded.job_id


# ---------------------------------------------------------------- log and feed


def test_a_log_forgets_what_is_acknowledged_and_nothing_else():
    log = OutcomeLog(start=10)
    assert [log.append(f"job-{i}", msgspec.msgpack.encode(i)) for i in range(4)] == [11, 12, 13, 14]
    assert log.ack(12) == ["job-0", "job-1"]
    assert log.ack(12) == []
    assert log.ack(3) == []
    assert (log.acked, log.last, len(log)) == (12, 14, 2)
    assert (log.job_id(13), log.outcome(13)) == ("job-2", msgspec.msgpack.encode(2))
    with pytest.raises(ProtocolError, match="cursor 15 acknowledged, but 14 is the last"):
        log.ack(15)
    log.ack(14)
    assert log.size_bytes == 0


def test_a_feed_sends_in_order_up_to_its_window_and_goes_on_with_acks():
    log = OutcomeLog()
    for i in range(5):
        log.append(f"job-{i}", msgspec.msgpack.encode(i))
    feed = Feed(log, 0, max_unacked_outcomes=2)
    assert [read(feed.next_frame()), read(feed.next_frame())] == [(1, "job-0"), (2, "job-1")]
    assert feed.next_frame() is None
    assert not feed.exhausted
    log.ack(1)
    assert read(feed.next_frame()) == (3, "job-2")
    assert feed.next_frame() is None
    log.ack(5)  # received over another connection before this one was made
    assert feed.next_frame() is None
    assert feed.exhausted


def test_a_feed_counts_bytes_but_always_lets_one_outcome_through():
    log = OutcomeLog()
    for i in range(3):
        log.append(f"job-{i}", msgspec.msgpack.encode(bytes(1000)))
    feed = Feed(log, 0, max_unacked_bytes=10)
    assert read(feed.next_frame()) == (1, "job-0")
    assert feed.next_frame() is None
    log.ack(1)
    assert read(feed.next_frame()) == (2, "job-1")


def test_an_outcome_that_is_reserved_and_not_offered_cannot_be_acknowledged():
    log = OutcomeLog()
    log.append("job-1", b"one")
    late = log.reserve("job-2", b"two")
    log.offer(log.reserve("job-3", b"three"))
    with pytest.raises(ProtocolError, match="cursor 2 acknowledged, but 1 is the last"):
        log.ack(late)
    with pytest.raises(ProtocolError):
        log.ack(3)  # it is stored, and waits for the one before it
    assert (log.acked, log.last) == (0, 1)
    log.offer(late)
    assert log.ack(3) == ["job-1", "job-2", "job-3"]


@pytest.mark.parametrize("window", [{"max_unacked_outcomes": 1}, {"max_unacked_bytes": 1}])
def test_what_was_given_up_takes_no_place_in_the_window(window):
    """Nobody can acknowledge it: a trainer that takes one at a time would wait for ever."""
    log = OutcomeLog()
    for number in range(1, 6):
        log.append(f"job-{number}", msgspec.msgpack.encode(bytes(100)))
    feed = Feed(log, 0, **window)
    assert read(feed.next_frame()) == (1, "job-1")
    log.forget("job-2")
    log.forget("job-3")
    assert feed.next_frame() is None
    log.ack(1)
    assert read(feed.next_frame()) == (4, "job-4")
    assert feed.next_frame() is None
    assert read(Feed(log, 0, **window).next_frame()) == (4, "job-4"), "and so for a new connection"
    assert Feed(log, 4, **window).next_frame() is None, "what a trainer has received it has not acknowledged"
    log.ack(4)
    assert read(feed.next_frame()) == (5, "job-5")


def test_a_feed_resumes_after_the_cursor_it_is_given_and_that_forgets_nothing():
    log = OutcomeLog()
    for i in range(3):
        log.append(f"job-{i}", msgspec.msgpack.encode(i))
    assert read(Feed(log, 2).next_frame()) == (3, "job-2")
    assert len(log) == 3


# ---------------------------------------------------------------- outcomes that cannot travel


def decoded(encoded: bytes) -> Outcome:
    return msgspec.msgpack.decode(encoded, type=Outcome)


def test_an_outcome_travels_as_it_is():
    outcome = make_outcome(make_spec("a"), tokens=100)
    assert decoded(encode_outcome(outcome, LIMIT).data) == outcome


@pytest.mark.parametrize(
    "details",
    [{"x": object()}, {"x": 10**30}, {"x": "\ud800"}, {"x": np.float32(1)}],
    ids=["object", "bigint", "surrogate", "numpy"],
)
def test_details_without_a_wire_form_become_a_failure_that_keeps_the_trajectory(details: dict[str, Any]):
    outcome = msgspec.structs.replace(make_outcome(make_spec("a")), details=details)
    got = decoded(encode_outcome(outcome, LIMIT).data)
    assert (got.status, got.reward, got.cause, got.details) == ("failed", None, "handler", {})
    assert "cannot be encoded" in got.error
    assert "left out: details" in got.error
    assert got.trajectory == outcome.trajectory


def test_an_outcome_too_large_for_a_message_becomes_a_failure_that_says_how_large():
    outcome = make_outcome(make_spec("a"), tokens=2000)
    got = decoded(encode_outcome(outcome, 9_000).data)
    assert (got.status, got.reward, got.trajectory) == ("failed", None, None)
    assert "more than the limit of 6952" in got.error


def test_a_failure_that_cannot_travel_keeps_its_status_cause_and_error():
    outcome = msgspec.structs.replace(
        make_outcome(make_spec("a")), status="timed_out", cause="agent_budget", reward=None, error="too slow \ud800"
    )
    got = decoded(encode_outcome(msgspec.structs.replace(outcome, details={"x": object()}), LIMIT).data)
    assert (got.status, got.cause, got.reward) == ("timed_out", "agent_budget", None)
    assert "too slow" in got.error


def test_even_an_outcome_whose_every_part_is_hopeless_arrives():
    outcome = msgspec.structs.replace(make_outcome(make_spec("a")), tags={"x": "y" * 9000}, details={"x": object()})
    got = decoded(encode_outcome(outcome, 4_000).data)
    assert (got.job_id, got.status, got.tags) == ("a", "failed", {})


def test_a_token_costs_nine_bytes_on_the_wire():
    tokens = 32_768
    log = OutcomeLog()
    log.append("a", encode_outcome(make_outcome(make_spec("a"), tokens=tokens), 2**26).data)
    assert log.size_bytes / tokens <= 9.1


# ---------------------------------------------------------------- sessions


async def test_submitting_twice_joins_and_another_spec_is_refused():
    table, node = SessionTable(), FakeNode()
    session, resumed = table.open("s", 0)
    assert not resumed
    spec = make_spec("a", question={"b": 1, "a": [1, 2]})
    session.submit(spec, node)
    session.submit(make_spec("a", question={"a": [1, 2], "b": 1}), node)  # key order does not make another spec
    assert len(node.submitted) == 1
    with pytest.raises(DuplicateJob, match="'a' is here with another spec"):
        session.submit(make_spec("a", question={}), node)
    node.finish("a")
    session.submit(spec, node)  # finished and not acknowledged: joins that
    assert len(node.submitted) == 1
    assert session.knows("a")
    assert not session.is_running("a")
    session.ack(1)
    assert not session.knows("a")
    assert table.open("s", 0) == (session, True)


async def test_a_payload_with_keys_that_are_not_strings_is_taken():
    session, _ = SessionTable().open("s", 0)
    node = FakeNode()
    spec = make_spec("a", question={1: "x", "a": "y"})
    session.submit(spec, node)
    session.submit(spec, node)
    assert len(node.submitted) == 1


async def test_a_job_the_node_refuses_leaves_no_trace():
    session, _ = SessionTable().open("s", 0)
    with pytest.raises(UnknownHandler):
        session.submit(make_spec("a", handler="nobody"), FakeNode())
    assert not session.knows("a")
    assert session.running == 0


async def test_running_and_undelivered_jobs_together_are_limited():
    session, _ = SessionTable(SessionLimits(max_undelivered=3)).open("s", 0)
    node = FakeNode()
    for job_id in ("a", "b", "c"):
        session.submit(make_spec(job_id), node)
    node.finish("a")
    with pytest.raises(AdmissionRejected, match=r"2 jobs running and 1 outcomes .* the limit of 3"):
        session.submit(make_spec("d"), node)
    session.ack(1)
    session.submit(make_spec("d"), node)


async def test_undelivered_bytes_are_limited():
    session, _ = SessionTable(SessionLimits(max_undelivered_bytes=1)).open("s", 0)
    node = FakeNode()
    session.submit(make_spec("a"), node)
    node.finish("a")
    with pytest.raises(AdmissionRejected, match="bytes of outcomes not acknowledged"):
        session.submit(make_spec("b"), node)


async def test_a_second_outcome_of_a_job_is_dropped(caplog: pytest.LogCaptureFixture):
    session, _ = SessionTable().open("s", 0)
    node = FakeNode()
    session.submit(make_spec("a"), node)
    outcome = node.finish("a")
    session.deliver(outcome)
    assert session.log.last == 1
    assert "job a has ended already" in caplog.text


async def test_the_newest_connection_wins_and_the_old_one_cannot_detach_it():
    session, _ = SessionTable().open("s", 0)
    old, new = SilentListener(), SilentListener()
    session.attach(old, 0)
    session.attach(new, 0)
    assert old.was_replaced
    session.detach(old)
    assert session.connected
    session.report("a", "run", "")
    assert [event.job_id for event in new.events] == ["a"]
    session.detach(new)
    assert not session.connected
    session.report("a", "eval", "")


async def test_resuming_beyond_the_last_cursor_is_refused():
    session, _ = SessionTable().open("s", 5)
    with pytest.raises(ProtocolError, match="resume_after 6 is beyond 5"):
        session.attach(SilentListener(), 6)
    assert not session.connected


@pytest.mark.parametrize(("session_id", "resume_after"), [("", 0), ("x" * 201, 0), ("s", -1), ("s", 2**63)])
async def test_impossible_hellos_are_refused(session_id: str, resume_after: int):
    with pytest.raises(ProtocolError):
        SessionTable().open(session_id, resume_after)


async def test_a_full_table_gives_way_only_where_nothing_is_lost(autojump_clock: Any):
    table, node = SessionTable(SessionLimits(max_sessions=2)), FakeNode()
    running, _ = table.open("running", 0)
    running.submit(make_spec("a"), node)
    owed, _ = table.open("owed", 0)
    owed.submit(make_spec("b"), node)
    node.finish("b")
    table.open("empty", 0)
    await trio.sleep(1)
    table.open("new", 0)
    await trio.sleep(1)
    table.open("newer", 0)  # the oldest that holds nothing gives way
    assert [session.session_id for session in table.all()] == ["running", "owed", "new", "newer"]


async def test_abandoned_sessions_keep_what_they_hold_and_nobody_out(autojump_clock: Any):
    table, node = SessionTable(SessionLimits(max_sessions=3)), FakeNode()
    for number in range(10):
        session, _ = table.open(f"abandoned-{number}", 0)
        session.submit(make_spec(f"job-{number}"), node)
        if number % 2:
            node.finish(f"job-{number}")
    await trio.sleep(80_000)
    for number in range(3):
        table.open(f"trainer-{number}", 0)[0].attach(SilentListener(), 0)
    assert len(table) == 13
    assert [len(table.open(f"abandoned-{number}", 0)[0].log) for number in (0, 1)] == [0, 1]
    with pytest.raises(
        AdmissionRejected, match=r"3 sessions, its limit of connected ones \(listen\.max_sessions\); end"
    ):
        table.open("trainer-3", 0)
    assert table.open("abandoned-1", 0)[1]


async def test_wait_delivered_waits_for_connected_trainers_only(autojump_clock: Any):
    table, node = SessionTable(), FakeNode()
    here, _ = table.open("here", 0)
    away, _ = table.open("away", 0)
    for session in (here, away):
        session.submit(make_spec(session.session_id), node)
        node.finish(session.session_id)
    here.attach(SilentListener(), 0)
    with trio.move_on_after(5) as patience:
        await table.wait_delivered()
    assert patience.cancelled_caught
    here.ack(1)
    with trio.fail_after(5):
        await table.wait_delivered()


# ---------------------------------------------------------------- tokens


def test_a_token_comes_from_the_config_or_a_private_file(tmp_path: Path):
    assert load_token(ListenConfig(token=" secret ")) == b"secret"
    path = tmp_path / "token"
    path.write_text("secret\n")
    path.chmod(0o600)
    assert load_token(ListenConfig(token_file=str(path))) == b"secret"
    path.chmod(0o400)
    assert load_token(ListenConfig(token_file=str(path))) == b"secret"
    assert token_matches(b"secret", "secret")
    assert not token_matches(b"secret", "Secret")
    assert not token_matches(b"secret", "")
    assert not token_matches(b"secret", "geheim\u00fc")


def test_a_token_that_is_no_secret_is_refused(tmp_path: Path):
    def refusal(**listen: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_token(ListenConfig(**listen))
        return str(caught.value)

    path = tmp_path / "token"
    assert "is empty; one is required" in refusal()
    assert "is empty; one is required" in refusal(token="  \n")
    assert "both set" in refusal(token="a", token_file=str(path))
    assert "cannot be read: No such file" in refusal(token_file=str(path))
    assert "cannot be read: Is a directory" in refusal(token_file=str(tmp_path))
    assert "not a regular file" in refusal(token_file="/dev/null")
    path.write_text("secret")
    path.chmod(0o640)
    assert "mode 0640, others can reach it; chmod 600" in refusal(token_file=str(path))
    path.chmod(0o600)
    path.write_text(" \n")
    assert "is empty; one is required" in refusal(token_file=str(path))
    path.write_bytes(b"x" * 5000)
    assert "more than the limit of 4096" in refusal(token_file=str(path))


# ---------------------------------------------------------------- the client's tables


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
    assert inbox.settle(4)
    assert not inbox.settle(4)
    assert inbox.first() == outcome_frame(7)
    assert (inbox.settled, inbox.received, len(inbox)) == (4, 7, 1)


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
    with pytest.raises(ProtocolError, match="got CancelledJobs where StatusReport was due"):
        requests.take(CancelledJobs(request_id=request_id, cancelled=[], unknown=[]))


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


@pytest.mark.parametrize("content", [b"caf\xe9", b"two\nlines", b"a\x00b", b"tab\tbed"])
def test_a_token_that_nobody_could_send_is_refused(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"the file {path} is not one line of text in UTF-8"):
        load_token(ListenConfig(token_file=str(path)))
    path.write_text("größer als ein Wort")
    assert load_token(ListenConfig(token_file=str(path))).decode() == "größer als ein Wort"
