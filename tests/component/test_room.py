"""A client of several nodes asks each for its room, and tells it which attempt a moved job is at."""

from __future__ import annotations

import pytest
import trio

from prorl_ipc.session import Accepted
from prorl_trio.client import connect
from prorl_trio.config import AdmissionConfig
from prorl_trio.pipeline.admission import Admission, Load
from support.fake_node import FakeNode, make_spec
from support.fake_service import TOKEN, open_service

pytestmark = pytest.mark.timeout(30)

IDLE = Load(queued=0, live=0, queued_of_session=0, live_of_session=0, undelivered=0, undelivered_bytes=0)


@pytest.mark.parametrize(
    ("held", "room"),
    [
        ({}, 10),
        ({"queued": 7}, 13),
        ({"queued": 25}, 0),
        ({"live": 95}, 5),
        ({"live_of_session": 28}, 2),
        ({"queued_of_session": 9}, 1),
        ({"undelivered": 49}, 10),
        ({"undelivered": 50}, 0),
        ({"undelivered_bytes": 1000}, 0),
    ],
)
def test_room_is_what_every_limit_leaves(held, room):
    limits = AdmissionConfig(
        max_queued_per_session=10,
        max_live=100,
        max_live_per_session=30,
        max_undelivered=50,
        max_undelivered_bytes=1000,
    )
    if "queued" in held:
        limits = AdmissionConfig(max_live=100)
    admission = Admission(limits, max_queued=20)
    assert admission.room(IDLE._replace(**held)) == room


async def test_a_node_tells_its_room_and_reserves_nothing():
    node = FakeNode()
    with trio.fail_after(10):
        async with open_service(node) as service, connect(service.url, TOKEN) as client:
            first = await client.room()
            assert (first.room, first.free, first.run_workers) == (10_000, 8, 8)
            assert first.unready == "no backend takes tasks"
            await client.submit([make_spec(f"job-{n}") for n in range(10)])
            second = await client.room()
            assert (second.room, second.free) == (9_990, -2)
            node.draining = True
            assert (await client.room()).room == 0


async def test_a_moved_job_goes_on_with_the_next_attempt_and_others_with_the_first():
    node = FakeNode()
    with trio.fail_after(10):
        async with open_service(node) as service, connect(service.url, TOKEN) as client:
            specs = [make_spec("moved"), make_spec("new")]
            answers = await client.submit(specs, attempts={"moved": 2})
            assert [type(answer) for answer in answers] == [Accepted, Accepted]
            assert node.attempts == {"moved": 3, "new": 1}
