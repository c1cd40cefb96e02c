"""What a session of the trio client does and outlives, over a real listener."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from prorl_ipc.session import Accepted, Cancelled, Rejected
from prorl_trio.client import ConnectionLost, RolloutClient, SessionLost, SessionReplaced, connect
from prorl_trio.client import client as client_module
from prorl_trio.types.errors import AdmissionRejected, BackendError, ProtocolError, UnknownBackend
from prorl_trio.types.models import Outcome
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_service import TOKEN, open_service
from support.faulty_proxy import FaultyProxy
from support.sessions import ended, sessions_in, submit

DEADLINE_S = 30


async def take(client: RolloutClient, n: int) -> list[Outcome]:
    return [outcome async for outcome in client.results(n)]


# ---------------------------------------------------------------- jobs


async def test_five_hundred_outcomes_of_4k_tokens_arrive_in_order_bit_for_bit(deadline: None):
    specs = [make_spec(f"job-{i}") for i in range(500)]
    node = FakeNode(lambda spec: make_outcome(spec, tokens=4096))
    async with open_service(node) as service, connect(service.url, TOKEN) as client:
        answers = await client.submit(specs)
        assert [(type(a), a.index, a.job_id) for a in answers] == [
            (Accepted, i, spec.job_id) for i, spec in enumerate(specs)
        ]
        for spec in specs:
            (outcome,) = await take(client, 1)
            assert outcome == make_outcome(spec, tokens=4096)
        assert client.cursor == 500
        assert (await client.status())["sessions"][client.session_id]["undelivered"] == 0


async def test_answers_keep_the_order_of_the_specs_over_batches_and_rejections(
    deadline: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(client_module, "BATCH_JOBS", 3)
    specs = [make_spec(f"job-{i}") for i in range(8)]
    specs[2] = make_spec("nobody", handler="nobody")
    specs[4] = make_spec("large", text="x" * 70_000)
    specs[5] = make_spec("object", thing=object())
    node = FakeNode()
    async with (
        open_service(node, max_message_bytes=65_536) as service,
        connect(service.url, TOKEN, max_message_bytes=65_536) as client,
    ):
        answers = await client.submit(specs)
        assert [answer.index for answer in answers] == list(range(8))
        assert [answer.job_id for answer in answers] == [spec.job_id for spec in specs]
        rejected = {answer.index: answer for answer in answers if isinstance(answer, Rejected)}
        assert {index: answer.code for index, answer in rejected.items()} == {
            2: "unknown_handler",
            4: "malformed",
            5: "malformed",
        }
        assert "more than the limit of" in rejected[4].message
        assert "cannot be encoded" in rejected[5].message
        assert await client.submit([]) == []


async def test_batches_fit_the_message_limit(deadline: None):
    node = FakeNode(lambda spec: make_outcome(spec, tokens=1))
    specs = [make_spec(f"job-{i}", text="x" * 20_000) for i in range(50)]
    async with (
        open_service(node, max_message_bytes=65_536) as service,
        connect(service.url, TOKEN, max_message_bytes=65_536) as client,
    ):
        assert all(isinstance(answer, Accepted) for answer in await client.submit(specs))
        assert len(await take(client, 50)) == 50


async def test_a_result_is_acknowledged_when_the_next_one_is_asked_for(deadline: None, nursery):
    node = FakeNode(make_outcome)
    table = sessions_in(nursery)
    async with open_service(node, sessions=table) as service, connect(service.url, TOKEN, session_id="s") as client:
        session, _ = table.open("s", 0)
        await client.submit([make_spec("a"), make_spec("b"), make_spec("c")])
        results = client.results()
        assert (await anext(results)).job_id == "a"
        await client.status()
        assert session.log.acked == 0
        assert (await anext(results)).job_id == "b"
        await client.status()
        assert session.log.acked == 1
        results = client.results(1)  # another iterator goes on where the first one was
        assert (await anext(results)).job_id == "c"
        with pytest.raises(StopAsyncIteration):
            await anext(results)
        await client.status()
        assert session.log.acked == 3


@pytest.mark.parametrize("window", [0, 1])
async def test_what_the_node_was_told_to_give_up_is_passed_over(
    deadline: None, caplog: pytest.LogCaptureFixture, window: int, nursery
):
    """The others come, also one at a time, and it is told how many do not."""
    node = FakeNode(make_outcome)
    table = sessions_in(nursery)
    session, _ = table.open("s", 0)
    await submit(session, node, *(make_spec(f"job-{number}") for number in range(1, 5)))
    await ended(session, 4)
    session.forget("job-2")
    async with (
        open_service(node, sessions=table) as service,
        connect(service.url, TOKEN, session_id="s", max_unacked_outcomes=window) as client,
    ):
        assert [outcome.job_id for outcome in await take(client, 2)] == ["job-1", "job-3"]
        assert "1 outcomes before cursor 3 will not come" in caplog.text
        await client.submit([make_spec("job-5")])
        assert [outcome.job_id for outcome in await take(client, 2)] == ["job-4", "job-5"]
        assert client.cursor == 5


@pytest.mark.parametrize("crash", [False, True])
async def test_what_was_yielded_last_comes_again_only_after_an_exception(deadline: None, *, crash: bool):
    node = FakeNode(make_outcome)
    async with open_service(node) as service:
        with pytest.raises(ZeroDivisionError) if crash else trio.CancelScope():
            async with connect(service.url, TOKEN, session_id="s") as client:
                await client.submit([make_spec("a"), make_spec("b"), make_spec("c")])
                assert [outcome.job_id for outcome in (await take_without_asking(client, 2))] == ["a", "b"]
                if crash:
                    raise ZeroDivisionError
        async with connect(service.url, TOKEN, session_id="s") as client:
            assert client.resumed
            assert next(iter(await take(client, 1))).job_id == ("b" if crash else "c")


async def take_without_asking(client: RolloutClient, n: int) -> list[Outcome]:
    results = client.results()
    return [await anext(results) for _ in range(n)]


async def test_resume_after_skips_and_acknowledges_what_the_trainer_kept(deadline: None, nursery):
    node = FakeNode(make_outcome)
    table = sessions_in(nursery)
    async with open_service(node, sessions=table) as service:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with connect(service.url, TOKEN, session_id="s") as client:
                await client.submit([make_spec("a"), make_spec("b"), make_spec("c")])
                await take_without_asking(client, 2)
                checkpoint = client.cursor
                raise ZeroDivisionError
        assert checkpoint == 2
        async with connect(service.url, TOKEN, session_id="s", resume_after=checkpoint) as client:
            assert (await take_without_asking(client, 1))[0].job_id == "c"
            await client.status()
            assert table.open("s", 0)[0].log.acked == 2


async def test_a_new_session_goes_on_with_the_cursors_of_a_lost_one(deadline: None):
    node = FakeNode(make_outcome)
    async with open_service(node) as service, connect(service.url, TOKEN, session_id="s", resume_after=41) as client:
        assert not client.resumed
        await client.submit([make_spec("a")])
        await take(client, 1)
        assert client.cursor == 42


async def test_submitting_again_joins_and_delivers_once(deadline: None):
    node = FakeNode()
    async with open_service(node) as service, connect(service.url, TOKEN) as client:
        spec = make_spec("a")
        for _ in range(3):
            (answer,) = await client.submit([spec])
            assert isinstance(answer, Accepted)
        (other,) = await client.submit([make_spec("a", question="other")])
        assert isinstance(other, Rejected)
        assert other.code == "duplicate_job"
        node.finish("a")
        await client.submit([spec])
        assert [outcome.job_id for outcome in await take(client, 1)] == ["a"]
        assert await take(client, 1) == []
        assert len(node.submitted) == 1


async def test_a_cancelled_wait_for_a_result_loses_none(deadline: None):
    node = FakeNode()
    specs = [make_spec(f"job-{i}") for i in range(20)]
    async with open_service(node) as service, connect(service.url, TOKEN) as client:
        await client.submit(specs)
        got: list[str] = []
        for spec in specs:
            with trio.CancelScope() as scope:
                scope.cancel()
                await anext(client.results())
            node.finish(spec.job_id)
        results = client.results()
        while len(got) < len(specs):
            with trio.move_on_after(0.001):
                got.append((await anext(results)).job_id)
        assert got == [spec.job_id for spec in specs]


async def test_cancel_reports_what_it_did(deadline: None):
    node = FakeNode()
    async with open_service(node) as service, connect(service.url, TOKEN) as client:
        await client.submit([make_spec("a"), make_spec("b")])
        cancelled = await client.cancel(["a", "x"], "no longer needed")
        assert (cancelled.cancelled, cancelled.unknown) == (["a"], ["x"])
        (outcome,) = await take(client, 1)
        assert (outcome.status, outcome.cause, outcome.reward, outcome.error) == (
            "cancelled",
            "cancelled",
            None,
            "no longer needed",
        )
        assert list(node.live) == ["b"]


async def test_events_arrive_and_are_bounded(deadline: None):
    node = FakeNode()
    async with open_service(node) as service, connect(service.url, TOKEN) as client:
        await client.submit([make_spec("a")])
        events = client.events()
        for status in ("init", "run"):
            node.advance("a", status)
        assert [(await anext(events)).status for _ in range(2)] == ["init", "run"]
        for i in range(3000):
            node.advance("a", "run", str(i))
            if i % 100 == 99:
                await client.status()
        assert len(client._state.events) == 1024
        assert (await anext(events)).detail == str(3000 - 1024)


async def test_backends(deadline: None):
    node = FakeNode()
    node.unfit_backends.add("http://bad")
    async with open_service(node) as service, connect(service.url, TOKEN) as client:
        await client.add_backend("http://good")
        assert [each["url"] for each in (await client.status())["backends"]["backends"]] == ["http://good"]
        with pytest.raises(BackendError, match="http://bad drops token ids"):
            await client.add_backend("http://bad")
        await client.weigh_backend("http://good", 2)
        await client.drain_backend("http://good")
        assert (node.listed("http://good").weight, node.listed("http://good").state) == (2, "draining")
        await client.remove_backend("http://good")
        for call in (client.remove_backend("http://good"), client.drain_backend("http://good")):
            with pytest.raises(UnknownBackend, match="no such backend"):
                await call
        await client.add_backend("http://heavy", weight=3)
        assert node.listed("http://heavy").weight == 3
        with pytest.raises(BackendError, match=r"Expected `float` > 0"):
            await client.weigh_backend("http://heavy", 0)
        assert (await client.list_backends()).urls == ["http://heavy"]
        await client.clear_backends()
        assert node.backends.urls() == ()


async def test_many_calls_at_once_take_turns(deadline: None):
    node = FakeNode()
    node.cancel_gate = trio.Event()
    async with open_service(node) as service, connect(service.url, TOKEN) as client:
        await client.submit([make_spec("a")])
        answers: list[Cancelled] = []

        async def cancel() -> None:
            answers.append(await client.cancel(["a"]))

        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(cancel)
            await wait_all_tasks_blocked()
            node.cancel_gate.set()
        assert len(answers) == 100


async def test_two_clients_are_two_sessions(deadline: None):
    node = FakeNode()
    async with open_service(node) as service, connect(service.url, TOKEN) as one, connect(service.url, TOKEN) as two:
        await one.submit([make_spec("one")])
        await two.submit([make_spec("two")])
        node.finish("two")
        node.finish("one")
        assert [outcome.job_id for outcome in await take(one, 1)] == ["one"]
        assert [outcome.job_id for outcome in await take(two, 1)] == ["two"]


async def test_a_full_node_sends_new_sessions_away(deadline: None):
    async with open_service(FakeNode(), max_sessions=1) as service, connect(service.url, TOKEN):
        with pytest.raises(AdmissionRejected, match="1 sessions, its limit"):
            async with connect(service.url, TOKEN):
                pass


# ---------------------------------------------------------------- what ends a client


async def test_a_replaced_client_stays_away(deadline: None):
    node = FakeNode()
    async with open_service(node) as service, connect(service.url, TOKEN, session_id="s") as old:
        await old.submit([make_spec("a")])
        async with connect(service.url, TOKEN, session_id="s") as new:
            with pytest.raises(SessionReplaced):
                await anext(old.results())
            with pytest.raises(SessionReplaced):
                await old.status()
            node.finish("a")
            assert [outcome.job_id for outcome in await take(new, 1)] == ["a"]


async def test_what_had_arrived_is_yielded_before_the_error(deadline: None):
    node = FakeNode(make_outcome)
    async with open_service(node) as service, connect(service.url, TOKEN, session_id="s") as old:
        await old.submit([make_spec("a"), make_spec("b")])
        while len(old._state.inbox) < 2:
            await old.status()
        async with connect(service.url, TOKEN, session_id="s"):
            with pytest.raises(SessionReplaced):
                await old.status()
            assert [outcome.job_id for outcome in await take_without_asking(old, 2)] == ["a", "b"]
            with pytest.raises(SessionReplaced):
                await anext(old.results())


async def test_a_restarted_node_is_a_lost_session_if_jobs_were_under_way(deadline: None):
    node = FakeNode()
    async with open_service(node) as service, connect(service.url, TOKEN) as client:
        await client.submit([make_spec("a"), make_spec("b")])
        node.finish("a")
        await take(client, 1)
        service.stop()
        await service.stopped.wait()
        async with open_service(FakeNode(), port=service.port):
            with pytest.raises(SessionLost, match="1 jobs without an outcome") as lost:
                await anext(client.results())
            assert lost.value.job_ids == ["b"]


async def test_a_restarted_node_is_no_matter_if_nothing_was_under_way(deadline: None):
    node = FakeNode(make_outcome)
    async with open_service(node) as service, connect(service.url, TOKEN) as client:
        await client.submit([make_spec("a")])
        await take(client, 1)
        service.stop()
        await service.stopped.wait()
        async with open_service(FakeNode(make_outcome), port=service.port):
            await client.submit([make_spec("b")])
            assert [outcome.job_id for outcome in await take(client, 1)] == ["b"]
            assert client.cursor == 2


async def test_a_node_that_stays_away_is_given_up(deadline: None):
    async with open_service(FakeNode()) as service, connect(service.url, TOKEN, reconnect_timeout_s=0.3) as client:
        service.stop()
        await service.stopped.wait()
        with pytest.raises(ConnectionLost, match=f"no connection to {service.url}"):
            await client.status()
        with pytest.raises(ConnectionLost):
            await anext(client.results())


async def test_a_message_too_large_for_the_node_is_an_error_not_a_loop(deadline: None):
    async with open_service(FakeNode(), max_message_bytes=10_000) as service, connect(service.url, TOKEN) as client:
        with pytest.raises(ProtocolError, match="Exceeded maximum message size: 10000 bytes"):
            await client.submit([make_spec("a", text="x" * 20_000)])


async def test_an_outcome_too_large_for_the_client_is_an_error_not_a_loop(deadline: None):
    node = FakeNode(lambda spec: make_outcome(spec, tokens=10_000))
    async with (
        open_service(node) as service,
        connect(service.url, TOKEN, max_message_bytes=50_000) as client,
    ):
        await client.submit([make_spec("a")])
        with pytest.raises(ProtocolError, match="raise max_message_bytes"):
            await anext(client.results())


# ---------------------------------------------------------------- connections that break


async def test_calls_survive_a_cut_connection(deadline: None):
    node = FakeNode()
    async with open_service(node) as service, trio.open_nursery() as nursery:
        proxy = FaultyProxy(service.host, service.port)
        port = await nursery.start(proxy.serve)
        async with connect(f"ws://127.0.0.1:{port}", TOKEN) as client:
            for i in count(1):
                proxy.cut_all()
                await client.submit([make_spec(f"job-{i}")])
                node.finish(f"job-{i}")
                assert [outcome.job_id for outcome in await take(client, 1)] == [f"job-{i}"]
                if i == 5:
                    break
            assert proxy.connections == 6
        nursery.cancel_scope.cancel()


def test_the_public_names():
    import prorl_trio.client as package

    assert {"connect", "RolloutClient", "BlockingClient"} <= set(package.__all__)
    assert all(getattr(package, name).__doc__ for name in package.__all__)
    assert msgspec.structs.fields(Outcome)
