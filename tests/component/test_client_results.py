"""`results` ends when nothing is outstanding, and not before, whatever became of jobs and connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from prorl_ipc.session import Accepted, Cancelled, Rejected
from prorl_trio.client import SessionLost, connect
from prorl_trio.edges.websocket import server as connection_module
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_service import TOKEN, open_service
from support.faulty_proxy import FaultyProxy
from support.sessions import ended, sessions_in

if TYPE_CHECKING:
    from prorl_trio.client.client import ResultStream

DEADLINE_S = 30


async def ids(results: ResultStream) -> list[str]:
    return [outcome.job_id async for outcome in results]


async def test_a_rejected_job_is_not_waited_for(deadline: None):
    specs = [make_spec("a"), make_spec("bad", handler="nobody"), make_spec("b")]
    async with open_service(FakeNode(make_outcome)) as service, connect(service.url, TOKEN) as client:
        answers = await client.submit(specs)
        assert isinstance(answers[1], Rejected)
        assert await ids(client.results(len(specs))) == ["a", "b"]
        assert await ids(client.results()) == []
        assert (await client.status())["sessions"][client.session_id]["undelivered"] == 0, "what was yielded is acked"


@pytest.mark.parametrize("submits", [[], [make_spec("bad", handler="nobody")]], ids=["nothing", "all rejected"])
async def test_where_nothing_was_taken_there_are_no_results(submits: list, deadline: None):
    async with open_service(FakeNode(make_outcome)) as service, connect(service.url, TOKEN) as client:
        await client.submit(submits)
        assert not client.outstanding
        assert await ids(client.results()) == []
        assert await ids(client.results(3)) == []


async def test_a_count_is_the_most_that_comes(deadline: None):
    async with open_service(FakeNode(make_outcome)) as service, connect(service.url, TOKEN) as client:
        await client.submit([make_spec("a"), make_spec("b"), make_spec("c")])
        assert await ids(client.results(2)) == ["a", "b"]
        assert client.outstanding
        assert await ids(client.results(2)) == ["c"]


async def test_a_second_task_that_takes_results_is_refused(deadline: None):
    node = FakeNode()
    async with open_service(node) as service, connect(service.url, TOKEN) as client:
        await client.submit([make_spec("a"), make_spec("b")])
        taken: list[str] = []

        async def take() -> None:
            taken.extend([outcome.job_id async for outcome in client.results()])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            await wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError, match="another task waits"):
                await ids(client.results())
            for job_id in "ab":
                node.finish(job_id, make_outcome(make_spec(job_id)))
        assert taken == ["a", "b"], "the first task is not disturbed"
        assert await ids(client.results()) == []


async def test_an_iterator_that_has_ended_stays_so(deadline: None):
    async with open_service(FakeNode(make_outcome)) as service, connect(service.url, TOKEN) as client:
        results = client.results()
        assert await ids(results) == []
        await client.submit([make_spec("a")])
        assert await ids(results) == []
        assert await ids(client.results()) == ["a"]


async def test_cancelled_jobs_are_waited_for_since_they_have_outcomes(deadline: None):
    node = FakeNode()
    async with open_service(node) as service, connect(service.url, TOKEN) as client:
        await client.submit([make_spec("a"), make_spec("b")])
        assert isinstance(await client.cancel(whole_session=True), Cancelled)
        assert {outcome.status async for outcome in client.results()} == {"cancelled"}


async def test_a_submit_in_progress_may_add_to_them(deadline: None):
    """Two tasks: the results of a submit that waits for room are waited for, those of a later one only with follow."""
    node = FakeNode()
    got: list[str] = []
    async with open_service(node) as service, connect(service.url, TOKEN) as client, trio.open_nursery() as nursery:

        async def take(*, follow: bool, count: int | None = None) -> None:
            got.extend(await ids(client.results(count, follow=follow)))

        nursery.start_soon(lambda: take(follow=False))
        await client.submit([make_spec("a")])
        node.finish("a")
        while nursery.child_tasks:
            await wait_all_tasks_blocked()
        assert got == ["a"]
        nursery.start_soon(lambda: take(follow=True, count=2))
        for job_id in ("b", "c"):
            await wait_all_tasks_blocked()
            await client.submit([make_spec(job_id)])
            node.finish(job_id)
    assert got == ["a", "b", "c"]


async def test_a_job_submitted_twice_is_waited_for_once(deadline: None):
    node = FakeNode()
    async with open_service(node) as service, connect(service.url, TOKEN) as client:
        spec = make_spec("a")
        await client.submit([spec, spec])
        node.finish("a")
        results = client.results()
        assert (await anext(results)).job_id == "a"
        (answer,) = await client.submit([spec])  # it has ended and is not acknowledged: it joins
        assert isinstance(answer, Accepted)
        assert answer.cursor == 1
        assert await ids(results) == []
        assert len(node.submitted) == 1


# ---------------------------------------------------------------- sessions that are come back to


async def leave_jobs(url: str, job_ids: list[str]) -> None:
    async with connect(url, TOKEN, session_id="s") as client:
        await client.submit([make_spec(job_id) for job_id in job_ids])


async def test_the_jobs_of_an_earlier_client_are_outstanding(deadline: None):
    node = FakeNode()
    async with open_service(node) as service:
        await leave_jobs(service.url, ["a", "b", "c"])
        node.finish("b")
        async with connect(service.url, TOKEN, session_id="s") as client:
            got = []
            async for outcome in client.results():
                got.append(outcome.job_id)
                if node.live:
                    node.finish(next(iter(node.live)))
            assert got == ["b", "a", "c"]
        async with connect(service.url, TOKEN, session_id="s") as client:
            assert client.resumed
            assert await ids(client.results()) == []


async def test_what_the_trainer_has_already_is_not_waited_for(deadline: None):
    node = FakeNode()
    async with open_service(node) as service:
        await leave_jobs(service.url, ["a", "b"])
        node.finish("a")
        node.finish("b")
        async with connect(service.url, TOKEN, session_id="s", resume_after=1) as client:
            await client.submit([make_spec("b")])  # the same again
            assert await ids(client.results()) == ["b"]


async def test_a_list_of_many_jobs_comes_in_pages(deadline: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection_module, "JOBS_PER_LIST", 2)
    node = FakeNode()
    job_ids = [f"job-{i}" for i in range(5)]
    async with open_service(node) as service:
        await leave_jobs(service.url, job_ids)
        async with connect(service.url, TOKEN, session_id="s") as client:
            for job_id in job_ids:
                node.finish(job_id)
            assert await ids(client.results()) == job_ids


async def test_jobs_of_an_earlier_client_that_a_restarted_node_forgot_are_lost_loudly(deadline: None):
    node = FakeNode()
    async with open_service(node) as service:
        await leave_jobs(service.url, ["a", "b"])
        node.finish("a")
        async with connect(service.url, TOKEN, session_id="s") as client:
            results = client.results()
            assert (await anext(results)).job_id == "a"
            service.stop()
            await service.stopped.wait()
            async with open_service(FakeNode(), port=service.port):
                with pytest.raises(SessionLost) as lost:
                    await anext(results)
                assert lost.value.job_ids == ["b"]


async def test_it_ends_over_connections_that_break(deadline: None):
    node = FakeNode()
    async with open_service(node) as service, trio.open_nursery() as nursery:
        proxy = FaultyProxy(service.host, service.port)
        port = await nursery.start(proxy.serve)
        async with connect(f"ws://127.0.0.1:{port}", TOKEN) as client:
            await client.submit([make_spec(f"job-{i}") for i in range(6)])
            results = client.results()
            got = []
            for i in range(6):
                proxy.cut_all()
                node.finish(f"job-{i}")
                got.append((await anext(results)).job_id)
            assert await ids(results) == []
            assert got == [f"job-{i}" for i in range(6)]
        nursery.cancel_scope.cancel()


async def test_a_job_that_ended_elsewhere_while_the_connection_was_lost_is_not_waited_for(deadline: None, nursery):
    """Its outcome was deleted over REST, or taken by another client of the session."""
    node, table = FakeNode(), sessions_in(nursery)
    async with open_service(node, sessions=table) as service, trio.open_nursery() as nursery:
        proxy = FaultyProxy(service.host, service.port)
        port = await nursery.start(proxy.serve)
        async with connect(f"ws://127.0.0.1:{port}", TOKEN, session_id="s") as client:
            await client.submit([make_spec("a"), make_spec("b")])
            session = table.get("s")
            assert session is not None
            proxy.cut_all()
            while session.connected:
                await wait_all_tasks_blocked()
            node.finish("a")
            await ended(session, 1)
            session.forget("a")
            node.finish("b")
            assert await ids(client.results()) == ["b"]
        nursery.cancel_scope.cancel()


async def test_outcomes_that_somebody_else_took_are_not_waited_for(deadline: None, nursery):
    """Two consumers of one session: what the other one acknowledged before it was sent here leaves a gap."""
    node, table = FakeNode(), sessions_in(nursery)
    async with open_service(node, sessions=table) as service, connect(service.url, TOKEN, session_id="s") as client:
        await client.submit([make_spec("a"), make_spec("b"), make_spec("c")])
        session = table.get("s")
        assert session is not None
        results = client.results()
        node.finish("a")
        assert (await anext(results)).job_id == "a"
        node.finish("b")
        while session.log.last < 2:
            await session.wait_arrival()
        session.ack(2)
        node.finish("c")
        assert await ids(results) == ["c"]
