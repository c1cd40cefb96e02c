"""Sessions that look at the jobs of others, and trainers that say how much they take. Over a real connection."""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

from prorl_ipc.session import (
    SESSION_PROTOCOL_VERSION,
    ObservationLost,
    ObservedOutcome,
    ServerMessage,
    SessionHello,
    SessionWelcome,
)
from prorl_ipc.websocket import LinkLimits, open_client_link
from prorl_trio.client import connect
from prorl_trio.sessions import observation
from prorl_trio.types.errors import ProtocolError
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_service import TOKEN, open_service
from support.sessions import sessions_in

MIB = 1024 * 1024
DEADLINE_S = 30


def in_group(job_id, group_id):
    return msgspec.structs.replace(make_spec(job_id), group_id=group_id)


async def taken(stream, count):
    return [await anext(stream) for _ in range(count)]


async def test_an_observer_sees_others_and_can_do_nothing_to_them(deadline, nursery):
    node, table = FakeNode(), sessions_in(nursery)
    async with (
        open_service(node, sessions=table) as service,
        connect(service.url, TOKEN, session_id="t") as trainer,
        connect(service.url, TOKEN, session_id="o", observe_all=True) as observer,
    ):
        await trainer.submit([make_spec("a")])
        await observer.submit([make_spec("mine")])
        node.advance("a", "run", "turn 1")
        node.finish("a", make_outcome(make_spec("a"), reward=0.5, tokens=3))
        stream = observer.observed()
        moved, ended = await taken(stream, 2)
        assert moved == ("t", "a", "run", "turn 1", None)
        assert (ended.session_id, ended.job_id, ended.status, ended.outcome.reward) == ("t", "a", "completed", 0.5)
        assert len(ended.outcome.trajectory.segments[0]) == 3
        assert (await observer.cancel(["a"])).unknown == ["a"]
        with pytest.raises(ProtocolError, match="cursor 1 acknowledged"):
            table.get("o").ack(1)
        assert table.get("t").log.acked == 0
        assert [outcome.job_id async for outcome in trainer.results(1)] == ["a"]
        node.finish("mine")
        assert [outcome.job_id async for outcome in observer.results(1)] == ["mine"], "its own come as ever"
        assert stream.lost == 0
        with trio.move_on_after(0.01) as patience:
            await anext(stream)
        assert patience.cancelled_caught, "own jobs are not observed"
    assert len(table.observations) == 0


async def test_an_observer_may_look_at_one_group_and_finds_it_again_after_a_lost_connection(deadline, nursery):
    node, table = FakeNode(), sessions_in(nursery)
    async with (
        open_service(node, sessions=table) as service,
        connect(service.url, TOKEN) as trainer,
        connect(service.url, TOKEN, session_id="o", observe_group="g") as observer,
    ):
        await trainer.submit([in_group("a", "g"), in_group("b", "h"), in_group("c", "g")])
        for job_id in "ab":
            node.finish(job_id)
        (first,) = await taken(observer.observed(), 1)
        link = observer._state.link
        link.end(1000, "the test cuts it")
        while observer._state.link in (None, link):
            await observer._state.wait_changed()
        node.finish("c")
        (second,) = await taken(observer.observed(), 1)
        assert (first.job_id, second.job_id) == ("a", "c")


@asynccontextmanager
async def open_raw_observer(service):
    """A link that observes, and is read when the test reads it."""
    stream = await trio.open_tcp_stream(service.host, service.port)
    decode = msgspec.msgpack.Decoder(ServerMessage).decode
    async with open_client_link(stream, service.host, "/", decode, LinkLimits()) as link:
        hello = SessionHello(version=SESSION_PROTOCOL_VERSION, token=TOKEN, session_id="o", observe_all=True)
        await link.send(hello)
        assert isinstance(await link.receive(), SessionWelcome)
        yield link


async def test_a_slow_observer_stalls_nobody_and_learns_what_it_lost(deadline, monkeypatch, nursery):
    monkeypatch.setattr(observation, "MAX_OBSERVED_BYTES", MIB)
    node, table = FakeNode(lambda spec: make_outcome(spec, tokens=20_000)), sessions_in(nursery)
    jobs = 200
    async with (
        open_service(node, sessions=table) as service,
        connect(service.url, TOKEN) as trainer,
        open_raw_observer(service) as link,
    ):
        observed = table.observations._all[0]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.submit, [make_spec(f"job-{n}") for n in range(jobs)])
            async for _ in trainer.results(jobs):
                assert observed.size_bytes <= MIB
        seen, lost = [], 0
        while len(seen) + lost < jobs:
            match await link.receive():
                case ObservedOutcome(job_id=job_id):
                    seen.append(int(job_id.removeprefix("job-")))
                case ObservationLost(count=count):
                    lost += count
        assert seen == sorted(set(seen))
        assert len(seen) + lost == jobs
        assert lost > 0


@pytest.mark.parametrize("window", [{"max_unacked_outcomes": 2}, {"max_unacked_bytes": 2 * 9_500}])
async def test_a_trainer_says_how_much_it_takes(deadline, window):
    node = FakeNode(lambda spec: make_outcome(spec, tokens=1_000))
    async with open_service(node) as service, connect(service.url, TOKEN, **window) as trainer:
        await trainer.submit([make_spec(f"job-{n}") for n in range(20)])
        async for outcome in trainer.results(20):
            await trainer.status()  # what the node may send is here
            assert len(trainer._state.inbox) <= 2, outcome.job_id


async def test_a_window_below_nothing_is_refused(deadline):
    async with open_service(FakeNode()) as service:
        with pytest.raises(ProtocolError, match="max_unacked_bytes -1 must be >= 0"):
            async with connect(service.url, TOKEN, max_unacked_bytes=-1):
                raise AssertionError


async def test_no_trainer_gets_more_than_the_nodes_window(deadline, nursery):
    table = sessions_in(nursery)
    session, _ = table.open("s", 0)
    feed = session.attach(_Nobody(), 0, 10**9, 10**12)
    for n in range(300):
        session.log.append(f"job-{n}", msgspec.msgpack.encode(n))
    sent = 0
    while feed.next_frame() is not None:
        sent += 1
    assert sent == 256


class _Nobody:
    reader_id = ""

    def wake(self):
        pass

    def event(self, event):
        pass

    def replaced(self):
        pass
