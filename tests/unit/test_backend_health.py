"""Backends that fail go out, their tasks move, and they come back when they are well (pure, and with clients that only
pretend)."""

from __future__ import annotations

from contextlib import asynccontextmanager
from random import Random

import pytest
import trio
import trio.testing

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.config import HealthConfig, LoadConfig
from prorl_trio.inference.engines.protocol import Completion, EngineClient, EngineInfo, RequestRefused, made_by
from prorl_trio.inference.pool.backend import CircuitBreaker
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.types.errors import BackendError
from support.completions import asked, begun

A, B = "http://a:1", "http://b:1"
POLICY = HealthConfig(interval_s=10, open_after_failures=2, close_after_successes=2)


def states(breaker, steps):
    """The state after each step: `c` and `p` are a call and a probe that failed, `C` and `P` those answered."""
    seen = []
    for step in steps:
        (breaker.call_ended if step in "cC" else breaker.probed)(ok=step.isupper())
        seen.append(breaker.state)
    return seen


def test_failures_in_a_row_open_it():
    assert states(CircuitBreaker(POLICY), "cCcC") == ["closed"] * 4
    assert states(CircuitBreaker(POLICY), "pPpCpc") == ["closed"] * 5 + ["open"]


def test_good_probes_do_not_make_up_for_failed_calls():
    """Of an engine that answers probes and nothing else, and is called seldom."""
    assert states(CircuitBreaker(POLICY), "cPPPc") == ["closed"] * 4 + ["open"]
    assert states(CircuitBreaker(POLICY), "cPp") == ["closed"] * 2 + ["open"]


def test_the_first_call_after_a_recovery_decides_and_each_that_fails_doubles_the_time():
    breaker = CircuitBreaker(POLICY)
    states(breaker, "cc")
    needed = []
    for _ in range(6):
        probes = 1
        while states(breaker, "P") != ["closed"]:
            probes += 1
        needed.append(probes)
        assert states(breaker, "PPc")[-1] == "open"
    assert needed == [2, 4, 8, 16, 16, 16]
    assert states(breaker, "P" * 16 + "CcC")[-4:] == ["closed"] * 4
    assert states(breaker, "cc" + "PP")[-1] == "closed"


def test_a_call_from_before_it_opened_does_not_count():
    breaker = CircuitBreaker(POLICY)
    began = breaker.openings
    states(breaker, "cc" + "PP")
    breaker.call_ended(ok=False, began=began)
    assert breaker.closed
    breaker.call_ended(ok=False, began=breaker.openings)
    assert not breaker.closed


def test_probes_in_a_row_close_it_and_late_calls_do_not_count():
    breaker = CircuitBreaker(POLICY)
    assert states(breaker, "ppCpPpPcCP") == ["closed"] + ["open"] * 3 + [
        "half_open",
        "open",
        "half_open",
        "half_open",
        "half_open",
        "closed",
    ]
    assert states(breaker, "pP") == ["closed"] * 2


def test_added_again_it_begins_anew():
    breaker = CircuitBreaker(POLICY)
    states(breaker, "pp")
    breaker.reset()
    assert states(breaker, "p") == ["closed"]


@pytest.mark.parametrize("field", ["open_after_failures", "close_after_successes"])
def test_a_policy_that_cannot_be(field):
    with pytest.raises(ValueError, match=f"{field} must be >= 1, got 0"):
        HealthConfig(**{field: 0})
    with pytest.raises(ValueError, match="interval_s must be >= 0"):
        HealthConfig(interval_s=-1)


class IllClient(EngineClient):
    """Fails while `ill`."""

    def __init__(self, url):
        self.url = url
        self.ill = False
        self.model = "m"
        self.calls = 0
        self.probe_s = 0.0
        self.breaks = None

    async def probe(self, *, timeout_s):
        await trio.sleep(self.probe_s)
        self._check()
        return EngineInfo(url=self.url, model=self.model, max_model_len=9, engine="fake", policy_version="0")

    async def generate(self, request):
        await trio.lowlevel.checkpoint()
        self.calls += 1
        self._check()
        if self.breaks is not None:
            raise self.breaks
        return Completion(token_ids=[1], logprobs=[0.0], finish_reason="stop", policy_version="0", engine="fake")

    async def aclose(self):
        await trio.lowlevel.checkpoint()

    def _check(self):
        if self.ill:
            raise BackendError(f"{self.url}: connection refused", retryable=True)


class Pool:
    """Two backends, watched."""

    def __init__(self, health):
        self.clients = {url: IllClient(url) for url in (A, B)}
        self.backends = Backends(made_by(self.clients.__getitem__), health=health, random=Random(0))

    def accepting(self):
        return {each.url for each in self.backends.statistics()["backends"] if not each.suspended}


@asynccontextmanager
async def open_pool(health=POLICY):
    pool = Pool(health)
    for url in (A, B):
        await pool.backends.add(url)
    with trio.fail_after(1000):
        async with open_single_nursery() as nursery:
            nursery.start_soon(pool.backends.watch)
            yield pool
            nursery.cancel_scope.cancel()


async def complete(lease):
    return await lease.attempt(begun(asked([1], 1, timeout_s=5)))


async def test_out_after_failed_probes_and_back_after_good_ones(autojump_clock):
    async with open_pool() as pool:
        pool.clients[A].ill = True
        await trio.sleep(15)
        assert pool.accepting() == {A, B}
        await trio.sleep(10)
        assert pool.accepting() == {B}
        pool.clients[A].ill = False
        await trio.sleep(10)
        assert pool.accepting() == {B}
        await trio.sleep(10)
        assert pool.accepting() == {A, B}


async def test_its_tasks_move_before_their_next_completion_and_stay(autojump_clock):
    async with open_pool() as pool, pool.backends.lease("t1") as one, pool.backends.lease("t2") as two:
        homes = {one.url: one, two.url: two}
        assert set(homes) == {A, B}
        pool.clients[A].ill = True
        await trio.sleep(25)
        await complete(homes[A])
        assert homes[A].url == B
        assert pool.clients[A].calls == 0
        pool.clients[A].ill = False
        await trio.sleep(25)
        await complete(homes[A])
        assert homes[A].url == B
        assert pool.backends.statistics()["moves"] == {"failure": 1}


async def test_calls_that_fail_put_it_out_without_a_probe(autojump_clock):
    async with open_pool() as pool, pool.backends.lease("t") as lease:
        home = lease.url
        pool.clients[home].ill = True
        for _ in range(2):
            with pytest.raises(BackendError, match="connection refused"):
                await complete(lease)
        assert pool.accepting() == {A, B} - {home}
        assert lease.url == home
        await complete(lease)
        assert lease.url != home


async def test_the_last_one_keeps_its_tasks_and_who_comes_waits_until_it_is_well(autojump_clock):
    async with open_pool() as pool:
        await pool.backends.remove(B)
        pool.clients[A].ill = True
        async with pool.backends.lease("t") as lease:
            await trio.sleep(25)
            assert not pool.backends.accepting
            with pytest.raises(BackendError, match="connection refused"):
                await complete(lease)
            pool.clients[A].ill = False
            with trio.fail_after(30):
                async with pool.backends.lease("u") as later:
                    assert later.url == A
            await complete(lease)


async def test_added_again_it_takes_tasks_at_once(autojump_clock):
    async with open_pool() as pool:
        pool.clients[A].ill = True
        await trio.sleep(25)
        pool.clients[A].ill = False
        await pool.backends.add(A)
        assert pool.accepting() == {A, B}


async def test_one_whose_answers_cannot_be_trusted_goes_out(autojump_clock):
    """Else it would draw all tasks: it fails each at once, and so has the least to do."""
    async with open_pool() as pool:
        pool.clients[A].breaks = BackendError("it drops logprobs", retryable=False)
        harmed = 0
        for index in range(50):
            async with pool.backends.lease(f"t{index}") as lease:
                try:
                    await complete(lease)
                except BackendError:
                    harmed += 1
        assert harmed == POLICY.open_after_failures
        assert pool.accepting() == {B}


async def test_a_request_that_is_refused_says_nothing_of_the_backend(autojump_clock):
    """Else a job with a wrong parameter would put out one backend after the other."""
    async with open_pool() as pool, pool.backends.lease("t") as lease:
        client = pool.clients[lease.url]
        client.breaks = RequestRefused("top_p must be in (0, 1], got 2")
        for _ in range(10):
            with pytest.raises(RequestRefused):
                await complete(lease)
        assert pool.accepting() == {A, B}
        # Nor does it hide failures: these are in a row.
        for error in (BackendError("gone", retryable=True), client.breaks, BackendError("gone", retryable=True)):
            client.breaks = error
            with pytest.raises(BackendError):
                await complete(lease)
        assert pool.accepting() == {A, B} - {lease.url}


async def test_a_request_that_is_refused_is_asked_of_no_other_backend(autojump_clock):
    async with open_pool() as pool, pool.backends.lease("t") as lease:
        for client in pool.clients.values():
            client.breaks = RequestRefused("top_p must be in (0, 1], got 2")
        with pytest.raises(RequestRefused):
            await lease.complete(begun(asked([1], 1, timeout_s=5)))
        assert sum(client.calls for client in pool.clients.values()) == 1


async def test_a_success_forgets_which_backends_had_failed_before(autojump_clock):
    async with open_pool() as pool, pool.backends.lease("t") as lease:
        for _ in range(2):
            here, other = lease.url, ({A, B} - {lease.url}).pop()
            pool.clients[here].ill, pool.clients[other].ill = True, False
            await lease.complete(begun(asked([1], 1, timeout_s=5)))
            assert lease.url == other


async def test_one_that_does_not_answer_its_probe_holds_up_no_other(autojump_clock):
    async with open_pool() as pool:
        pool.clients[A].probe_s = 1000
        pool.clients[B].ill = True
        await trio.sleep(25)
        assert pool.accepting() == {A}


async def test_one_that_serves_another_model_goes_out(autojump_clock):
    async with open_pool() as pool:
        pool.clients[A].model = "another"
        await trio.sleep(25)
        assert pool.accepting() == {B}


async def test_tasks_of_a_drained_or_removed_one_move_with_their_next_completion(autojump_clock):
    async with open_pool() as pool, pool.backends.lease("t1") as one, pool.backends.lease("t2") as two:
        homes = {one.url: one, two.url: two}
        pool.backends.drain(A)
        await complete(homes[A])
        assert homes[A].url == B
        assert pool.backends.statistics()["moves"] == {"drain": 1}
        await pool.backends.remove(B)
        await complete(homes[B])
        assert homes[B].url == B  # there is no other
        await pool.backends.add(A)
        await complete(homes[B])
        assert homes[B].url == A


async def test_another_policy_holds_from_now_on(autojump_clock):
    async with open_pool(HealthConfig(interval_s=0)) as pool:
        pool.clients[A].ill = True
        await trio.sleep(100)
        assert pool.accepting() == {A, B}
        pool.backends.adopt(HealthConfig(interval_s=10, open_after_failures=1), LoadConfig())
        await trio.sleep(15)
        assert pool.accepting() == {B}
        pool.clients[A].ill = False
        pool.backends.adopt(HealthConfig(interval_s=10, close_after_successes=1), LoadConfig())
        await trio.sleep(9)
        assert pool.accepting() == {B}  # the interval begins with the policy
        await trio.sleep(2)
        assert pool.accepting() == {A, B}
