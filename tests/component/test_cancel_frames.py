"""Cancels by id, group, tags and session, also ahead of the submit; and a client that waits for room."""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from prorl_ipc.session import (
    MAX_ATTEMPTS,
    MAX_CANCEL_TARGETS,
    MAX_FRAME_JOBS,
    Accepted,
    AllJobs,
    Cancel,
    CheckJobs,
    Rejected,
    Submit,
    TheseJobs,
    WithdrawJobs,
)
from prorl_trio.client import connect
from prorl_trio.types.errors import AdmissionRejected
from prorl_trio.types.models import JobSpec, TaskInstance
from support.fake_node import FakeNode
from support.fake_service import TOKEN, open_service
from support.raw_trainer import raw_trainer


def spec(name, **fields):
    return JobSpec(job_id=name, instance=TaskInstance(instance_id="i", handler="fake", payload={}), **fields)


@asynccontextmanager
async def two_clients(node):
    with trio.fail_after(20):
        async with (
            open_service(node) as service,
            connect(service.url, TOKEN) as client,
            connect(service.url, TOKEN) as other,
        ):
            yield client, other


async def test_cancel_by_group_tags_and_session_takes_only_what_is_ours():
    node = FakeNode()
    async with two_clients(node) as (client, other):
        await client.submit(
            [
                spec("g1", group_id="g"),
                spec("g2", group_id="g"),
                spec("t1", tags={"a": "1", "b": "2"}),
                spec("t2", tags={"a": "1"}),
                spec("rest"),
            ]
        )
        await other.submit([spec("theirs", group_id="g", tags={"a": "1", "b": "2"})])
        assert (await client.cancel(group_id="g")).cancelled == ["g1", "g2"]
        assert (await client.cancel(tags={"a": "1", "b": "2"})).cancelled == ["t1"]
        answer = await client.cancel(["nobody"], group_id="no such")
        assert (answer.cancelled, answer.unknown) == ([], ["nobody"])
        assert (await client.cancel(whole_session=True)).cancelled == ["t2", "rest"]
        assert list(node.live) == ["theirs"]
        outcomes = [outcome async for outcome in client.results(5)]
        assert {outcome.status for outcome in outcomes} == {"cancelled"}


@pytest.mark.parametrize(
    "frame",
    [
        Submit(1, [msgspec.Raw(b"\xc0")] * (MAX_FRAME_JOBS + 1)),
        Submit(1, [], {"job": -1}),
        Submit(1, [], {"job": MAX_ATTEMPTS + 1}),
        Submit(1, [], {str(number): 1 for number in range(MAX_FRAME_JOBS + 1)}),
        CheckJobs(1, [msgspec.Raw(b"\xc0")] * (MAX_FRAME_JOBS + 1)),
        Cancel(1, [TheseJobs(["a"] * (MAX_FRAME_JOBS + 1))]),
        Cancel(1, [AllJobs()] * (MAX_CANCEL_TARGETS + 1)),
        WithdrawJobs(1, ["a"] * (MAX_FRAME_JOBS + 1)),
    ],
    ids=lambda frame: type(frame).__name__,
)
async def test_a_frame_that_would_stall_the_node_ends_its_connection_alone(frame):
    async with open_service(FakeNode()) as service, raw_trainer(service) as trainer:
        await trainer.hello()
        await trainer.send(frame)
        refused = await trainer.receive()
        assert refused.code == "protocol"
        assert "is not a frame: Expected" in refused.message


async def test_a_count_of_attempts_beyond_the_limit_ends_no_session():
    """As of the head of a fleet, whose next attempt of a job would be one too many for the frame."""
    async with two_clients(FakeNode()) as (client, _):
        (answer,) = await client.submit([spec("old")], attempts={"old": MAX_ATTEMPTS + 1})
        assert isinstance(answer, Accepted)


async def test_a_client_names_more_jobs_than_fit_into_a_frame():
    node = FakeNode()
    async with two_clients(node) as (client, _):
        await client.submit([spec("first"), spec("last"), spec("other")])
        unknown = [str(number) for number in range(2 * MAX_FRAME_JOBS)]
        answer = await client.cancel(["first", *unknown, "last"], whole_session=True)
        assert answer.cancelled == ["first", "last", "other"]
        assert answer.unknown == unknown
        await client.withdraw([*unknown, "last"], "withdrawn")


async def test_a_cancel_ahead_of_its_submit_is_not_lost():
    node = FakeNode()
    async with two_clients(node) as (client, other):
        answer = await client.cancel(["early"], "not wanted", ahead=True)
        assert answer.unknown == ["early"]
        await other.submit([spec("early")])
        assert list(node.live) == ["early"], "another session's job of that id is its own"
        await other.cancel(["early"])
        assert [outcome.job_id async for outcome in other.results(1)] == ["early"]
        await other.status()  # it has acknowledged it: the id is free
        await client.cancel(["plain"])
        (accepted, plain) = await client.submit([spec("early"), spec("plain")])
        assert [type(accepted).__name__, type(plain).__name__] == ["Accepted", "Accepted"]
        outcome = await anext(client.results(1))
        assert (outcome.job_id, outcome.status, outcome.error) == ("early", "cancelled", "not wanted")
        assert list(node.live) == ["plain"], "without `ahead`, nothing is remembered"


class FullNode(FakeNode):
    """Has room for `room` jobs; says to come back in a moment."""

    def __init__(self, room):
        super().__init__()
        self.room = room
        self.rejected = 0

    def check(self, spec, sink, ahead):
        if len(self.live) + ahead >= self.room:
            self.rejected += 1
            raise AdmissionRejected("full", 0.05)
        super().check(spec, sink, ahead)


async def test_submit_waits_for_room():
    node = FullNode(room=2)
    async with two_clients(node) as (client, _), trio.open_nursery() as nursery:

        async def work():
            for _ in range(7):
                await node.wait_live(2)
                node.finish(next(iter(node.live)))

        nursery.start_soon(work)
        answers = await client.submit([spec(f"j{n}") for n in range(8)])
        assert [type(answer).__name__ for answer in answers] == ["Accepted"] * 8
        assert [answer.index for answer in answers] == list(range(8))
        assert node.rejected
        nursery.cancel_scope.cancel()


async def test_patience_has_an_end():
    node = FullNode(room=1)
    async with two_clients(node) as (client, _):
        for patience_s in (0, 0.2):
            answers = await client.submit([spec("a"), spec("b")], patience_s=patience_s)
            assert [answer.job_id for answer in answers] == ["a", "b"]
            assert (answers[1].code, answers[1].retry_after_s) == ("admission", 0.05)
        assert node.rejected > 2


async def test_a_withdrawn_job_leaves_nothing_and_its_id_is_free():
    node = FakeNode()
    async with two_clients(node) as (client, _), trio.open_nursery() as nursery:
        node.cancel_gate = trio.Event()
        await client.submit([spec("stale"), spec("ended")])
        nursery.start_soon(client.withdraw, ["stale", "ended", "unknown"], "it runs elsewhere")
        await wait_all_tasks_blocked()
        await client.status()  # it has the withdrawal
        node.finish("ended")  # before the cancel took hold: it has its outcome
        (refused,) = await client.submit([spec("stale")], patience_s=0)
        assert isinstance(refused, Rejected)
        assert (refused.code, refused.retry_after_s) == ("admission", 0.25)
        node.cancel_gate.set()
        outcomes = [outcome async for outcome in client.results()]
        assert [(outcome.job_id, outcome.status) for outcome in outcomes] == [("ended", "completed")]
        assert not node.live
        await client.submit([spec("stale")], attempts={"stale": 2})
        assert node.attempts["stale"] == 3
        node.finish("stale")
        assert [outcome.status async for outcome in client.results()] == ["completed"]


async def test_a_withdrawn_job_is_not_awaited_by_the_next_client_of_its_session():
    node = FakeNode()
    node.cancel_gate = trio.Event()
    with trio.fail_after(20):
        async with open_service(node) as service:
            async with connect(service.url, TOKEN, session_id="s") as client, trio.open_nursery() as nursery:
                await client.submit([spec("stale")])
                nursery.start_soon(client.withdraw, ["stale"], "it runs elsewhere")
                await wait_all_tasks_blocked()
                await client.status()  # it has the withdrawal
                nursery.cancel_scope.cancel()
            async with connect(service.url, TOKEN, session_id="s") as client:
                assert client.resumed
                assert [outcome async for outcome in client.results()] == []
                node.cancel_gate.set()
                await node.wait_live(0)
                answers = await client.submit([spec("stale")])
                assert [type(answer) for answer in answers] == [Accepted]
                node.finish("stale")
                assert [outcome.status async for outcome in client.results()] == ["completed"]
