"""Backends that are down at first join when they are up; all are cleared at one stroke; who waits is told for what."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from random import Random

import msgspec
import pytest
import trio
import trio.testing

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.config import BackendConfig
from prorl_trio.inference.engines.protocol import EngineClient, EngineInfo, made_by
from prorl_trio.inference.pool.admission import unseen
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.types.backends import ResumeBackends
from prorl_trio.types.errors import BackendError

A, B = "http://a:1", "http://b:1"


class LateClient(EngineClient):
    """Is down before `up_at_s`; a probe takes `probe_s`."""

    up_at_s = 0.0
    probe_s = 0.0
    probed_at_s: tuple[float, ...] = ()
    open = 0

    def __init__(self, url):
        self.url = url
        LateClient.open += 1

    async def probe(self, *, timeout_s):
        LateClient.probed_at_s += (trio.current_time(),)
        await trio.sleep(self.probe_s)
        if trio.current_time() < self.up_at_s:
            raise BackendError(f"{self.url}: connection refused", retryable=True)
        return EngineInfo(url=self.url, model="m", max_model_len=9, engine="fake", policy_version="0")

    async def generate(self, request):
        raise NotImplementedError

    async def aclose(self):
        await trio.lowlevel.checkpoint()
        LateClient.open -= 1


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name, value in {"up_at_s": 0.0, "probe_s": 0.0, "probed_at_s": (), "open": 0}.items():
        monkeypatch.setattr(LateClient, name, value)
    yield
    assert LateClient.open == 0


class NamingClient(LateClient):
    """Can be told what its weights are called, which is `label` now."""

    label = "0"

    async def probe(self, *, timeout_s):
        info = await super().probe(timeout_s=timeout_s)
        return msgspec.structs.replace(info, pausable=True, label=self.label, policy_version=self.label)

    async def label_weights(self, policy_version, *, timeout_s):
        await trio.lowlevel.checkpoint()
        NamingClient.label = policy_version
        return True


@asynccontextmanager
async def open_backends(client=LateClient):
    backends = Backends(made_by(client), random=Random(0))
    with trio.fail_after(10_000):
        async with open_single_nursery() as nursery:
            nursery.start_soon(backends.watch)
            yield backends
            nursery.cancel_scope.cancel()
    await backends.aclose()


def states(backends):
    return {each.url: each.state for each in backends.statistics()["backends"]}


async def test_one_that_is_down_is_listed_probed_again_and_joins(autojump_clock):
    LateClient.up_at_s = 100.0
    async with open_backends() as backends:
        backends.expect(A + "/", 2.0, "connection refused")
        assert states(backends) == {A: "down"}
        assert (backends.urls(), backends.list(), backends.accepting) == ((A,), (), False)
        await trio.sleep(90)
        (down,) = backends.statistics()["backends"]
        assert (down.weight, down.error) == (2.0, f"{A}: connection refused")
        pauses = [b - a for a, b in zip(LateClient.probed_at_s, LateClient.probed_at_s[1:], strict=False)]
        assert max(pauses) <= 30
        assert pauses[0] < 3
        assert len(pauses) < 12
        async with backends.lease("t") as lease:
            assert 100 <= trio.current_time() <= 130
            assert lease.url == A
        assert states(backends) == {A: "active"}
        assert backends.statistics()["backends"][0].weight == 2.0


@pytest.mark.parametrize("how", ["named", "added", "no update yet"])
async def test_one_that_is_not_known_to_have_the_policys_weights_does_not_join_by_itself(
    how, monkeypatch, autojump_clock
):
    """It was down as they were moved: what it would sample is of other weights, recorded as of these."""
    monkeypatch.setattr(NamingClient, "label", "0")
    async with open_backends(NamingClient) as backends:
        backends.expect(A)
        if how != "no update yet":
            await backends.operate(ResumeBackends("3"))
            await trio.sleep(100)
            assert states(backends) == {A: "down"}
            assert "its weights have no name, and the policy's are 3: move these there" in backends.shortage()
        if how == "named":
            NamingClient.label = "3"
        if how == "added":
            await backends.add(A)
        await trio.sleep(100)
        assert states(backends) == {A: "active"}
        assert [info.policy_version for info in backends.list()] == ["0" if how == "no update yet" else "3"]


async def test_expected_before_it_is_watched_and_after(autojump_clock):
    LateClient.up_at_s = 5.0
    backends = Backends(made_by(LateClient), random=Random(0))
    backends.expect(A)
    async with open_single_nursery() as nursery:
        nursery.start_soon(backends.watch)
        await trio.sleep(1)
        backends.expect(B)
        await trio.sleep(60)
        assert states(backends) == {A: "active", B: "active"}
        backends.expect(B)  # it is there already
        assert states(backends) == {A: "active", B: "active"}
        nursery.cancel_scope.cancel()
    await backends.aclose()


@pytest.mark.parametrize("how", ["remove", "clear", "add"])
async def test_not_expected_any_more(how, autojump_clock):
    """Taken out in the middle of the probe that would have it join, or added by hand."""
    LateClient.probe_s = 5.0
    async with open_backends() as backends:
        backends.expect(A)
        await trio.sleep(3)
        if how == "add":
            await backends.add(A)
        elif how == "remove":
            await backends.remove(A)
        else:
            assert await backends.clear() == (A,)
        probes = len(LateClient.probed_at_s)
        await trio.sleep(300)
        assert states(backends) == ({A: "active"} if how == "add" else {})
        if how != "add":
            assert len(LateClient.probed_at_s) == probes


@pytest.mark.parametrize("probing_s", [0.0, 20.0])
async def test_one_that_is_down_can_be_weighed(probing_s, autojump_clock):
    """Also in the middle of the probe that would have it join."""
    LateClient.probe_s = probing_s
    LateClient.up_at_s = 15.0
    async with open_backends() as backends:
        backends.expect(A)
        await trio.sleep(10)
        backends.weigh(A + "/", 3.0)
        assert backends.statistics()["backends"][0].weight == 3.0
        await trio.sleep(100)
        assert states(backends) == {A: "active"}
        assert backends.statistics()["backends"][0].weight == 3.0


async def test_one_that_is_drained_while_it_is_down_joins_when_it_is_added(autojump_clock):
    LateClient.probe_s = 5.0
    backends = Backends(made_by(LateClient), random=Random(0))
    backends.expect(B)
    backends.drain(B)
    async with open_single_nursery() as nursery:
        nursery.start_soon(backends.watch)
        backends.expect(A)
        await trio.sleep(3)
        backends.drain(A)
        backends.drain(A)
        probes = len(LateClient.probed_at_s)
        await trio.sleep(300)
        assert states(backends) == {A: "down", B: "down"}
        assert len(LateClient.probed_at_s) == probes
        assert f"{A}: drained while it was down" in backends.shortage()
        backends.weigh(A, 2.0)
        await backends.add(A)
        assert states(backends) == {A: "active", B: "down"}
        await backends.remove(B)
        assert states(backends) == {A: "active"}
        nursery.cancel_scope.cancel()
    await backends.aclose()


async def test_clear_takes_all_out_at_once_and_tasks_finish_where_they_are(autojump_clock):
    async with open_backends() as backends:
        for url in (A, B):
            await backends.add(url)
        async with backends.lease("t") as lease:
            assert await backends.clear() == (A, B)
            assert (backends.urls(), backends.accepting) == ((), False)
            assert states(backends) == {lease.url: "removed"}
        assert states(backends) == {}
        assert await backends.clear() == ()


async def test_who_waits_is_told_what_is_missing_as_it_changes(autojump_clock):
    told = []

    @contextmanager
    def waiting(what):
        told.append(what)
        yield

    LateClient.up_at_s = 50.0
    backends = Backends(made_by(LateClient), max_tasks_per_backend=1, random=Random(0))

    async def task(name):
        async with backends.lease(name, waiting=waiting if name == "t" else unseen):
            await trio.sleep(10)

    async with open_single_nursery() as nursery:
        nursery.start_soon(backends.watch)
        async with trio.open_nursery() as tasks:
            tasks.start_soon(task, "first")
            await trio.testing.wait_all_tasks_blocked()
            tasks.start_soon(task, "t")
            await trio.testing.wait_all_tasks_blocked()
            backends.expect(A, why=f"{A}: connection refused")
        nursery.cancel_scope.cancel()
    assert told[:2] == [
        "a backend that takes tasks: none is registered",
        f"a backend that is up: {A}: connection refused",
    ]
    assert told[-1] == "backend room"
    await backends.aclose()


async def test_weights(autojump_clock):
    async with open_backends() as backends:
        await backends.add(A)
        await backends.add(B, 3)
        backends.weigh(A, 3)
        assert [each.weight for each in backends.statistics()["backends"]] == [3, 3]
        for change in (lambda: backends.weigh(A, 0), lambda: backends.expect("http://c", -1.0)):
            with pytest.raises(BackendError, match="a weight must be > 0"):
                change()
        with pytest.raises(BackendError, match="no such backend"):
            backends.weigh("http://c", 1)
        with pytest.raises(BackendError, match="a weight must be > 0"):
            await backends.add(A, float("inf"))


@pytest.mark.parametrize(
    ("weights", "why", "read"),
    [({B: 1.0}, f"{B} is not among the urls", "is not among the urls"), ({A: 0.0}, "must be > 0, got 0.0", "> 0.0")],
)
def test_weights_that_cannot_be(weights, why, read):
    with pytest.raises(ValueError, match=why):
        BackendConfig(urls=[A], weights=weights)
    with pytest.raises(msgspec.ValidationError, match=read):
        msgspec.convert({"urls": [A], "weights": weights}, BackendConfig)
