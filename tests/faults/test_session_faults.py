"""Connections cut anywhere, silent peers, trainers and nodes that die: nothing is lost, nothing comes twice."""

from __future__ import annotations

import itertools
import os
import random
from typing import TYPE_CHECKING

import pytest
import trio

from prorl_ipc import websocket as websocket_module
from prorl_ipc.session import Accepted
from prorl_trio.client import connect
from support.cancel_sweep import CancelledRun, cancel_sweep
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_service import TOKEN, open_service
from support.faulty_proxy import FaultyProxy
from support.sessions import sessions_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

DEADLINE_S = 60


@pytest.fixture
async def deadline() -> AsyncIterator[None]:
    with trio.fail_after(DEADLINE_S):
        yield


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconnect at once: the point is where a connection breaks, not how long a client waits."""
    from prorl_trio.client import transport

    monkeypatch.setattr(transport, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(transport, "MAX_DELAY_S", 0.01)


def cuts(seed: int) -> list[int]:
    """Budgets in bytes of one connection after the other: some die in the handshake, some in the middle of a frame."""
    rng = random.Random(seed)
    return [
        rng.choice([rng.randrange(1, 400), rng.randrange(400, 2_000), rng.randrange(2_000, 9_000)]) for _ in range(30)
    ]


@pytest.mark.parametrize("seed", range(25))
async def test_outcomes_come_once_and_in_order_wherever_connections_are_cut(deadline: None, seed: int):
    node = FakeNode(lambda spec: make_outcome(spec, tokens=200))
    specs = [make_spec(f"job-{i}") for i in range(20)]
    async with open_service(node) as service, trio.open_nursery() as nursery:
        # The first connection has to come about, or `connect` would have nothing to survive.
        proxy = FaultyProxy(service.host, service.port, iter([1_000, *cuts(seed)]))
        port = await nursery.start(proxy.serve)
        async with connect(f"ws://127.0.0.1:{port}", TOKEN) as client:
            answers = await client.submit(specs)
            assert [type(answer) for answer in answers] == [Accepted] * 20
            got = [outcome async for outcome in client.results(20)]
            assert [outcome.job_id for outcome in got] == [spec.job_id for spec in specs]
            assert got == [make_outcome(spec, tokens=200) for spec in specs]
            await client.status()
        assert proxy.connections > 1
        nursery.cancel_scope.cancel()
    assert [spec.job_id for spec in node.submitted] == [spec.job_id for spec in specs], "a job ran twice"


async def test_a_submit_cut_after_every_few_bytes_runs_each_job_once(deadline: None):
    for budget in range(300, 2_200, 50):
        node = FakeNode(make_outcome)
        specs = [make_spec(f"job-{i}") for i in range(3)]
        async with open_service(node) as service, trio.open_nursery() as nursery:
            proxy = FaultyProxy(service.host, service.port, itertools.chain([700], itertools.repeat(budget, 2)))
            port = await nursery.start(proxy.serve)
            async with connect(f"ws://127.0.0.1:{port}", TOKEN) as client:
                await client.submit(specs)
                got = [outcome.job_id async for outcome in client.results(3)]
            assert got == ["job-0", "job-1", "job-2"]
            assert proxy.connections > 1
            nursery.cancel_scope.cancel()
        assert len(node.submitted) == 3


async def test_trainers_that_die_and_come_back_get_what_they_had_not_acknowledged(deadline: None):
    rng = random.Random(7)
    node = FakeNode(make_outcome)
    specs = [make_spec(f"job-{i}") for i in range(60)]
    seen: list[str] = []
    kept = 0
    async with open_service(node) as service:
        async with connect(service.url, TOKEN, session_id="s") as client:
            await client.submit(specs)
        while kept < len(specs):
            with pytest.raises(ZeroDivisionError):  # noqa: PT012
                async with connect(service.url, TOKEN, session_id="s", resume_after=kept) as client:
                    results = client.results()
                    for _ in range(min(rng.randrange(1, 9), len(specs) - kept)):
                        seen.append((await anext(results)).job_id)
                        kept = client.cursor
                    raise ZeroDivisionError
    assert seen == [spec.job_id for spec in specs]


async def test_a_silent_peer_is_noticed_from_both_ends(deadline: None, nursery):
    """A pulled cable: TCP says nothing for minutes, the heartbeats do."""
    node = FakeNode()
    table = sessions_in(nursery)
    listen = {"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 0.4}
    async with open_service(node, sessions=table, **listen) as service, trio.open_nursery() as nursery:
        proxy = FaultyProxy(service.host, service.port)
        port = await nursery.start(proxy.serve)
        async with connect(f"ws://127.0.0.1:{port}", TOKEN, session_id="s", **listen) as client:
            await client.submit([make_spec("a")])
            session, _ = table.open("s", 0)
            proxy.silent = True
            link = client._state.link
            while session.connected or client._state.link is link:
                await trio.sleep(0.02)
            proxy.silent = False
            proxy.cut_all()  # what the client may have begun meanwhile
            node.finish("a")
            assert [outcome.job_id async for outcome in client.results(1)] == ["a"]
        nursery.cancel_scope.cancel()


async def test_a_trainer_that_does_not_take_results_stalls_itself_alone_in_bounded_memory(deadline: None):
    node = FakeNode(lambda spec: make_outcome(spec, tokens=1_000))
    async with (
        open_service(node) as service,
        connect(service.url, TOKEN, max_unacked_outcomes=10) as slow,
        connect(service.url, TOKEN) as fast,
    ):
        await slow.submit([make_spec(f"slow-{i}") for i in range(200)])
        await fast.submit([make_spec(f"fast-{i}") for i in range(200)])
        assert len([outcome async for outcome in fast.results(200)]) == 200
        await fast.status()  # the node has read its last acknowledgement
        assert len(slow._state.inbox) <= 10
        sessions = (await slow.status())["sessions"]
        assert sessions[slow.session_id]["undelivered"] == 200
        assert sessions[fast.session_id]["undelivered"] == 0
        got = [outcome.job_id async for outcome in slow.results(200)]
        assert got == [f"slow-{i}" for i in range(200)]


async def test_the_outbox_has_an_end(deadline: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(websocket_module, "OUTBOX_LIMIT_FRAMES", 100)
    node = FakeNode()
    async with open_service(node) as service, connect(service.url, TOKEN) as client:
        await client.submit([make_spec("a")])
        link = client._state.link
        for i in range(150):  # in one step: nothing can be sent in between
            node.advance("a", "run", str(i))
        node.finish("a")
        assert [outcome.job_id async for outcome in client.results(1)] == ["a"]
        assert client._state.link is not link, "the connection was not dropped"


async def test_a_node_restarted_under_its_sessions_goes_on_where_it_was(deadline: None, nursery):
    """The listener goes and comes back, the sessions live on: as they will over a durable store."""
    node = FakeNode()
    table = sessions_in(nursery)
    async with open_service(node, sessions=table) as first, connect(first.url, TOKEN) as client:
        await client.submit([make_spec("a"), make_spec("b")])
        node.finish("a")
        first.stop()
        await first.stopped.wait()
        node.finish("b")
        async with open_service(node, sessions=table, port=first.port):
            assert [outcome.job_id async for outcome in client.results(2)] == ["a", "b"]


async def test_a_client_cancelled_at_any_step_loses_nothing(deadline: None):
    """After each cancel, the session's next client gets every outcome of the jobs taken that the first did not see."""
    node = FakeNode(make_outcome)
    runs = itertools.count()
    async with open_service(node, max_sessions=10_000) as service:
        session_id, seen = "", set[str]()

        async def conversation() -> None:
            nonlocal session_id
            session_id = f"run-{next(runs)}"
            seen.clear()
            node.submitted.clear()
            async with connect(service.url, TOKEN, session_id=session_id) as client:
                await client.submit([make_spec(f"{session_id}-{i}") for i in range(3)])
                async for outcome in client.results(3):
                    seen.add(outcome.job_id)

        async def check(run: CancelledRun) -> None:
            async with connect(service.url, TOKEN, session_id=session_id) as client:
                pending = client._state.welcome.pending if client._state.welcome else 0
                again = [outcome.job_id async for outcome in client.results(pending)]
            submitted = [spec.job_id for spec in node.submitted]
            assert len(set(submitted)) == len(submitted)
            assert seen | set(again) == set(submitted)
            assert len(seen & set(again)) <= 1, "only the outcome in hand may come again"
            assert not run.completed or again == []

        assert await cancel_sweep(conversation, check) > 20


async def test_no_file_descriptor_or_task_is_left_of_connections_that_ended_in_every_way(deadline: None):
    before = set(os.listdir("/proc/self/fd"))
    tasks_before = trio.lowlevel.current_statistics().tasks_living
    async with open_service(FakeNode(make_outcome), max_sessions=100) as service, trio.open_nursery() as nursery:
        proxy = FaultyProxy(service.host, service.port, itertools.cycle([900, 1_500, 100_000]))
        port = await nursery.start(proxy.serve)
        for i in range(15):
            async with connect(f"ws://127.0.0.1:{port}", TOKEN) as client:
                await client.submit([make_spec(f"{i}-{j}") for j in range(5)])
                await anext(client.results())
            with trio.move_on_after(0.002 * i):
                async with connect(service.url, TOKEN):
                    await trio.sleep_forever()
            async with await trio.open_tcp_stream(service.host, service.port) as stranger:
                await stranger.send_all(b"\x00" * i * 100)
        nursery.cancel_scope.cancel()
    assert set(os.listdir("/proc/self/fd")) <= before
    assert trio.lowlevel.current_statistics().tasks_living <= tasks_before
