"""Streams stalled, trickling, half-open and corrupted: between trainer and node, and between node and backend."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager

import pytest
import trio
import trustme

from prorl_trio.client import connect
from prorl_trio.http.client import RetryPolicy
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.testing.fake_engine import open_fake_engine
from prorl_trio.types.errors import BackendError, ServiceError
from support.completions import asked
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_service import TOKEN, open_service
from support.faulty_proxy import FaultyProxy
from support.sessions import sessions_in

pytestmark = pytest.mark.timeout(120)

DEADLINE_S = 60
JOBS = 20
NOTICED_WITHIN_S = 10
"""By heartbeats of less than a second, on a busy machine; TCP would take minutes."""
HEARTBEATS = {"heartbeat_interval_s": 0.1, "heartbeat_timeout_s": 1.0}


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    from prorl_trio.client import transport

    monkeypatch.setattr(transport, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(transport, "MAX_DELAY_S", 0.01)


@asynccontextmanager
async def open_proxy(host, port):
    async with trio.open_nursery() as nursery:
        proxy = FaultyProxy(host, port)
        proxy.port = await nursery.start(proxy.serve)
        yield proxy
        nursery.cancel_scope.cancel()


def specs_of(prefix):
    return [make_spec(f"{prefix}-{i}") for i in range(JOBS)]


def answer(spec):
    return make_outcome(spec, tokens=300)


async def work(client, specs):
    await client.submit(specs)
    return [outcome async for outcome in client.results(len(specs))]


# ---------------------------------------------------------------- trainer and node


async def test_a_trickle_brings_everything_and_the_heartbeats_hold():
    with trio.fail_after(DEADLINE_S):
        async with open_service(FakeNode(answer), **HEARTBEATS) as service, open_proxy(service.host, service.port) as p:
            async with connect(f"ws://127.0.0.1:{p.port}", TOKEN, **HEARTBEATS) as client:
                p.bytes_per_s = 40_000
                assert await work(client, specs_of("slow")) == [answer(spec) for spec in specs_of("slow")]
            assert p.connections == 1, "slow is not broken"


async def test_a_stall_is_outlived_by_the_session_and_not_felt_by_others():
    with trio.fail_after(DEADLINE_S):
        node = FakeNode(answer)
        async with (
            open_service(node, **HEARTBEATS) as service,
            open_proxy(service.host, service.port) as p,
            connect(f"ws://127.0.0.1:{p.port}", TOKEN, **HEARTBEATS) as stalled,
            connect(service.url, TOKEN) as other,
        ):
            p.stall()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stalled.submit, specs_of("stalled"))
                assert await work(other, specs_of("other")) == [answer(spec) for spec in specs_of("other")]
                while p.connections < 2:  # the heartbeats have found out
                    await trio.sleep(0.02)
                p.resume()
            got = [outcome async for outcome in stalled.results(JOBS)]
        assert got == [answer(spec) for spec in specs_of("stalled")]
    assert len(node.submitted) == 2 * JOBS, "a job ran twice"


async def test_a_stall_in_any_direction_is_noticed_by_both_ends_and_costs_nothing():
    """Each end has its own deadline: no end of a connection gets through where bytes do not."""
    async with trio.open_nursery() as nursery:
        for ways in (("up",), ("down",), ("up", "down")):
            nursery.start_soon(stall_ways, nursery, *ways)


async def stall_ways(nursery, *ways):
    heartbeats = {"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 0.4}
    with trio.fail_after(DEADLINE_S):
        node, sessions = FakeNode(), sessions_in(nursery)
        async with (
            open_service(node, sessions=sessions, **heartbeats) as service,
            open_proxy(service.host, service.port) as p,
            connect(f"ws://127.0.0.1:{p.port}", TOKEN, **heartbeats) as client,
        ):
            specs = [make_spec("during"), make_spec("after")]
            await client.submit(specs)
            session, link = sessions.get(client.session_id), client._state.link
            p.stall(*ways)
            node.finish("during", answer(specs[0]))
            with trio.fail_after(NOTICED_WITHIN_S):  # noqa: ASYNC912 - it is there until somebody notices
                while session.connected or client._state.link is link:
                    await trio.sleep(0.01)
            p.resume()
            node.finish("after", answer(specs[1]))
            assert [outcome async for outcome in client.results(2)] == [answer(spec) for spec in specs]
            assert sessions.get(client.session_id) is session
    assert len(node.submitted) == 2, "a job ran twice"


async def test_a_half_open_connection_is_noticed_from_both_ends():
    """The trainer hears the node, the node does not hear the trainer."""
    with trio.fail_after(DEADLINE_S):
        node = FakeNode(answer)
        async with (
            open_service(node, **HEARTBEATS) as service,
            open_proxy(service.host, service.port) as p,
            connect(f"ws://127.0.0.1:{p.port}", TOKEN, **HEARTBEATS) as client,
        ):
            p.half_open = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.submit, specs_of("deaf"))
                while p.connections < 2:
                    await trio.sleep(0.02)
                p.half_open = False
                p.cut_all()  # what may have begun meanwhile
            got = [outcome async for outcome in client.results(JOBS)]
        assert got == [answer(spec) for spec in specs_of("deaf")]


@pytest.mark.parametrize("seed", range(6))
async def test_corruption_under_tls_changes_nothing_but_the_number_of_connections(seed, tmp_path):
    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1")
    ca, cert, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    leaf.private_key_and_cert_chain_pem.write_to_path(cert)
    leaf.private_key_pem.write_to_path(key)
    key.chmod(0o600)
    with trio.fail_after(DEADLINE_S):
        node = FakeNode(answer)
        async with (
            open_service(node, tls_cert=str(cert), tls_key=str(key), **HEARTBEATS) as service,
            open_proxy(service.host, service.port) as p,
            connect(f"wss://127.0.0.1:{p.port}", TOKEN, tls_ca=ca, **HEARTBEATS) as client,
        ):
            p.corrupt(random.Random(seed), 30_000)
            assert await work(client, specs_of("tls")) == [answer(spec) for spec in specs_of("tls")]
            while not p.flipped_total:
                await client.status()
    assert len(node.submitted) == JOBS, "a job ran twice"


async def work_corrupted(port, specs):
    try:
        async with connect(f"ws://127.0.0.1:{port}", TOKEN, connect_timeout_s=0.2, **HEARTBEATS) as client:
            await work(client, specs)
    except ServiceError:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("seed", range(10))
async def test_corruption_without_tls_ends_neither_the_node_nor_another_session(seed):
    """Nothing can vouch for the bits of the corrupted session then; it may end, but only with an error of ours."""
    with trio.fail_after(DEADLINE_S):
        async with (
            open_service(FakeNode(answer), max_sessions=1000, **HEARTBEATS) as service,
            open_proxy(service.host, service.port) as p,
            connect(service.url, TOKEN, **HEARTBEATS) as bystander,
        ):
            p.corrupt(random.Random(seed), 700)
            for round_ in range(10):
                with trio.move_on_after(0.3):
                    await work_corrupted(p.port, specs_of(f"bad-{round_}"))
            assert p.flipped_total > 10
            assert await work(bystander, specs_of("good")) == [answer(spec) for spec in specs_of("good")]
            assert bystander._state.link is not None


# ---------------------------------------------------------------- node and backend


async def generate(client, n, timeout_s=2.0):
    return await client.generate(asked([5, 6, 7, n], 200, request_id=f"r-{n}", timeout_s=timeout_s))


@asynccontextmanager
async def open_backend():
    """An engine, a proxy before it, and a client behind that, which has probed it."""
    async with open_fake_engine() as engine, open_proxy("127.0.0.1", int(engine.url.rpartition(":")[2])) as p:
        retry = RetryPolicy(max_attempts=4, first_delay_s=0.01, max_delay_s=0.02)
        client = VllmClient(f"http://127.0.0.1:{p.port}", retry=retry)
        try:
            await client.probe(timeout_s=10)
            yield engine, p, client
        finally:
            await client.aclose()


async def test_a_trickling_engine_is_waited_for_and_a_stalled_one_is_given_up_in_time():
    with trio.fail_after(DEADLINE_S):
        async with open_backend() as (engine, p, client):
            expected = await generate(client, 1)
            p.bytes_per_s = 20_000
            assert await generate(client, 1, timeout_s=30) == expected
            p.bytes_per_s = None
            p.stall()
            with pytest.raises(BackendError) as caught:
                await generate(client, 1, timeout_s=0.5)
            assert caught.value.retryable
            p.resume()
            assert await generate(client, 1, timeout_s=30) == expected
            await engine.wait_until(lambda stats: stats.running == 0)


async def test_a_cut_engine_connection_is_tried_again():
    with trio.fail_after(DEADLINE_S):
        async with open_backend() as (engine, p, client):
            expected = await generate(client, 1)
            engine.hold()
            async with trio.open_nursery() as nursery:
                got = []

                async def ask():
                    got.append(await generate(client, 1, timeout_s=30))

                nursery.start_soon(ask)
                await engine.wait_until(lambda stats: stats.running == 1)
                p.cut_all()
                engine.release()
            assert got == [expected]


@pytest.mark.parametrize("seed", range(5))
async def test_corrupted_answers_raise_backend_errors_or_pass_every_check(seed):
    """A flipped digit that leaves a valid answer cannot be seen; anything else is a `BackendError`, and it heals."""
    with trio.fail_after(DEADLINE_S):
        async with open_backend() as (engine, p, client):
            expected = await generate(client, 1)
            p.corrupt(random.Random(seed), 300)
            errors = 0
            for n in range(40):
                try:
                    completion = await generate(client, n, timeout_s=0.5)
                except BackendError:
                    errors += 1
                else:
                    assert len(completion.token_ids) == len(completion.logprobs) > 0
            assert errors > 0
            p.corrupt(random.Random(seed), 2**40)
            p.cut_all()
            assert await generate(client, 1, timeout_s=30) == expected
            await engine.wait_until(lambda stats: stats.running == 0)
