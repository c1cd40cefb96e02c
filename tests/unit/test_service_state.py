"""The pure parts of sessions: log, feed, and outcomes as they travel."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from prorl_ipc.session import OutcomeFrame
from prorl_trio.sessions.encoding import encode_outcome
from prorl_trio.sessions.feed import Feed
from prorl_trio.sessions.outcome_log import OutcomeLog
from prorl_trio.types.errors import ProtocolError
from prorl_trio.types.models import Outcome
from support.fake_node import make_outcome, make_spec

LIMIT = 1024 * 1024


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
