from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_trio.config import AdmissionConfig
from prorl_trio.pipeline.admission import MAX_RETRY_S, MIN_RETRY_S, UNMEASURED_RETRY_S, Admission, EndRate, Load
from prorl_trio.types.errors import AdmissionRejected

LIMITS = AdmissionConfig(
    max_queued_per_session=3, max_live=10, max_live_per_session=5, max_undelivered=20, max_undelivered_bytes=1000
)
NOTHING = Load(queued=0, live=0, queued_of_session=0, live_of_session=0, undelivered=0, undelivered_bytes=0)


@pytest.mark.parametrize(
    ("field", "limit", "name"),
    [
        ("queued", 7, "stages.init_queue"),
        ("queued_of_session", 3, "admission.max_queued_per_session"),
        ("live", 10, "admission.max_live"),
        ("live_of_session", 5, "admission.max_live_per_session"),
        ("undelivered", 20, "admission.max_undelivered"),
        ("undelivered_bytes", 1000, "admission.max_undelivered_bytes"),
    ],
)
def test_each_limit_is_named_when_it_is_reached(field, limit, name):
    admission = Admission(LIMITS, max_queued=7)
    admission.check(NOTHING._replace(**{field: limit - 1}), 0.0)
    with pytest.raises(AdmissionRejected, match=f"{name}: the node holds {limit}, and its limit is {limit}") as raised:
        admission.check(NOTHING._replace(**{field: limit}), 0.0)
    assert raised.value.retry_after_s == UNMEASURED_RETRY_S


@pytest.mark.parametrize(
    ("held", "room"),
    [
        ({}, 3),
        ({"queued_of_session": 1}, 2),
        ({"queued": 6}, 1),
        ({"live": 9}, 1),
        ({"live_of_session": 5}, 0),
        ({"live_of_session": 9}, 0),
        ({"undelivered": 19}, 3),  # those that come now do not count before they have ended
        ({"undelivered": 20}, 0),
        ({"undelivered_bytes": 999}, 3),
        ({"undelivered_bytes": 1000}, 0),
    ],
)
def test_room_is_for_as_many_as_check_lets_in(held, room):
    admission = Admission(LIMITS, max_queued=7)
    load = NOTHING._replace(**held)
    assert admission.room(load) == room
    let_in = 0
    while True:
        try:
            admission.check(load, 0.0)
        except AdmissionRejected:
            break
        let_in += 1
        more = {field: getattr(load, field) + 1 for field in ("queued", "live", "queued_of_session", "live_of_session")}
        load = load._replace(**more)
    assert let_in == room


def test_the_advice_is_measured():
    admission = Admission(LIMITS, max_queued=7)
    for n in range(200):
        admission.rate.ended(n * 0.5)
    with pytest.raises(AdmissionRejected) as raised:
        admission.check(NOTHING._replace(live=13), 99.5)
    assert raised.value.retry_after_s == pytest.approx(4 * 0.5, rel=0.02)


def test_a_standstill_is_noticed():
    rate = EndRate()
    for n in range(10):
        rate.ended(n * 0.1)
    assert rate.wait_s(1, 1.0) < 0.2
    assert rate.wait_s(1, 100.0) == pytest.approx(10.0)


@given(st.lists(st.floats(0, 1e4), max_size=300), st.integers(1, 10**6))
def test_the_advice_is_within_bounds(delays, jobs):
    rate, now_s = EndRate(), 0.0
    for delay in delays:
        now_s += delay
        rate.ended(now_s)
    assert MIN_RETRY_S <= rate.wait_s(jobs, now_s) <= MAX_RETRY_S
