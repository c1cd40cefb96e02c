"""Pausing the pool for a policy update: what begins, what ends, what is sampled again, and what a time-out leaves."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import trio.testing

from prorl_trio.http.client import RetryPolicy
from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.pipeline.job import Job
from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.testing.fake_engine import open_fake_engine
from prorl_trio.types.backends import PauseBackends, ResumeBackends
from prorl_trio.types.errors import BackendError, BackendsBusy, PauseTimeout
from prorl_trio.types.models import Budgets
from support.completions import asked, begun

pytestmark = pytest.mark.timeout(20)


@asynccontextmanager
async def open_pool():
    async with open_fake_engine() as engine:
        backends = Backends(made_by(partial(VllmClient, retry=RetryPolicy(max_attempts=1))))
        await backends.add(engine.url)
        try:
            yield backends, engine
        finally:
            await backends.aclose()


async def sample(backends, into, task="task"):
    async with backends.lease(task) as lease:
        completion = await lease.attempt(begun(asked([5, 6, 7], request_id=task)))
        into.append(completion)


async def test_paused_pool_begins_nothing_and_resume_stamps_the_new_version():
    got = []
    async with open_pool() as (backends, engine), trio.open_nursery() as nursery:
        report = await backends.operate(PauseBackends("wait", 5))
        assert report.paused
        assert [(b.url, b.in_flight, b.engine) for b in report.backends] == [(engine.url, 0, "not_offered")]
        probes = engine.stats.completions_total
        nursery.start_soon(sample, backends, got)
        while not backends.statistics()["admission"]["waiting"]:
            await trio.testing.wait_all_tasks_blocked()
        assert engine.stats.completions_total == probes
        report = await backends.operate(ResumeBackends("v7"))
        assert (report.paused, report.backends[0].policy_version) == (False, "v7")
    assert [completion.policy_version for completion in got] == ["v7"]


async def test_wait_lets_what_runs_end_under_the_old_version():
    got = []
    async with open_pool() as (backends, engine), trio.open_nursery() as nursery:
        engine.hold()
        nursery.start_soon(sample, backends, got)
        await engine.wait_until(lambda stats: stats.running == 1)
        async with trio.open_nursery() as pausing:
            pausing.start_soon(backends.operate, PauseBackends("wait", 10))
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(BackendsBusy):
                await backends.operate(ResumeBackends())
            engine.release()
        assert [completion.policy_version for completion in got] == ["0"]
        await backends.operate(ResumeBackends("v1"))


async def test_abort_samples_again_from_the_same_prompt_after_the_resume():
    got = []
    async with open_pool() as (backends, engine), trio.open_nursery() as nursery:
        engine.hold()
        nursery.start_soon(sample, backends, got)
        await engine.wait_until(lambda stats: stats.running == 1)
        report = await backends.operate(PauseBackends("abort", 10))
        assert report.backends[0].in_flight == 0
        await engine.wait_until(lambda stats: stats.aborted_total == 1)
        assert not got
        engine.release()
        await backends.operate(ResumeBackends("v2"))
    assert [completion.policy_version for completion in got] == ["v2"]
    assert engine.requests[-1].prompt == engine.requests[-2].prompt == [5, 6, 7]


async def test_keep_leaves_what_runs_and_holds_what_comes():
    got = []
    async with open_pool() as (backends, engine), trio.open_nursery() as nursery:
        engine.hold()
        nursery.start_soon(sample, backends, got)
        await engine.wait_until(lambda stats: stats.running == 1)
        report = await backends.operate(PauseBackends("keep", 10))
        assert report.backends[0].in_flight == 1
        nursery.start_soon(sample, backends, got, "second")
        while not backends.statistics()["admission"]["waiting"]:
            await trio.testing.wait_all_tasks_blocked()
        engine.release()
        await backends.operate(ResumeBackends("v3"))
    assert sorted(completion.policy_version for completion in got) == ["0", "v3"]


async def test_time_out_undoes_the_pause_and_says_what_runs():
    got = []
    async with open_pool() as (backends, engine), trio.open_nursery() as nursery:
        engine.hold()
        nursery.start_soon(sample, backends, got)
        await engine.wait_until(lambda stats: stats.running == 1)
        with pytest.raises(PauseTimeout, match=f"1 on {engine.url}"):
            await backends.operate(PauseBackends("wait", 0.05))
        assert backends.statistics()["admission"]["paused"] is False
        engine.release()
    assert len(got) == 1


async def test_time_out_of_a_second_pause_leaves_the_first():
    async with open_pool() as (backends, engine), trio.open_nursery() as nursery:
        engine.hold()
        nursery.start_soon(sample, backends, [])
        await engine.wait_until(lambda stats: stats.running == 1)
        await backends.operate(PauseBackends("keep", 5))
        with pytest.raises(PauseTimeout):
            await backends.operate(PauseBackends("wait", 0.05))
        assert backends.statistics()["admission"]["paused"] is True
        await backends.operate(ResumeBackends())
        engine.release()


async def test_cancelled_pause_is_undone():
    async with open_pool() as (backends, engine), trio.open_nursery() as nursery:
        engine.hold()
        nursery.start_soon(sample, backends, [])
        await engine.wait_until(lambda stats: stats.running == 1)
        with trio.move_on_after(0.05):
            await backends.operate(PauseBackends("wait", 60))
        assert backends.statistics()["admission"]["paused"] is False
        engine.release()


class PausableClient(VllmClient):
    """An engine with a pause of its own."""

    def __init__(self, url):
        super().__init__(url)
        self.told = []

    async def pause(self, mode, *, timeout_s):
        await trio.lowlevel.checkpoint()
        self.told.append(mode)
        return True

    async def resume(self, *, timeout_s):
        await trio.lowlevel.checkpoint()
        self.told.append("resume")


async def test_engine_that_can_pause_is_paused_after_the_gate_and_resumed_before_it():
    clients = []

    def client(url):
        clients.append(PausableClient(url))
        return clients[-1]

    async with open_fake_engine() as engine:
        backends = Backends(made_by(client))
        await backends.add(engine.url)
        assert (await backends.operate(PauseBackends("abort", 5))).backends[0].engine == "paused"
        assert (await backends.operate(ResumeBackends())).backends[0].engine == "resumed"
        assert clients[0].told == ["abort", "resume"]
        await backends.aclose()


class SilentClient(PausableClient):
    """An engine that stops, but does not say so."""

    async def pause(self, mode, *, timeout_s):
        self.told.append(mode)
        await trio.sleep_forever()


async def test_engine_that_did_not_answer_the_pause_is_named_and_told_to_go_on():
    clients = []

    def client(url):
        clients.append(SilentClient(url))
        return clients[-1]

    async with open_fake_engine() as engine:
        backends = Backends(made_by(client))
        await backends.add(engine.url)
        with pytest.raises(PauseTimeout, match=f"not paused by then: {engine.url}"):
            await backends.operate(PauseBackends("keep", 0.05))
        assert clients[0].told == ["keep", "resume"]
        assert backends.statistics()["admission"]["paused"] is False
        await backends.aclose()


class FailingClient(PausableClient):
    """An engine that cannot be paused."""

    async def pause(self, mode, *, timeout_s):
        await trio.lowlevel.checkpoint()
        raise BackendError(f"{self.url}: out of order", retryable=True)


async def test_engine_that_fails_to_pause_is_reported_and_the_others_are_paused():
    kinds = iter((FailingClient, PausableClient))
    async with open_fake_engine() as one, open_fake_engine() as other:
        backends = Backends(made_by(lambda url: next(kinds)(url)))
        await backends.add(one.url)
        await backends.add(other.url)
        report = await backends.operate(PauseBackends("wait", 5))
        assert [(b.url, b.engine) for b in report.backends] == [(one.url, "failed"), (other.url, "paused")]
        assert "out of order" in report.backends[0].error
        assert report.paused
        report = await backends.operate(ResumeBackends("v1"))
        assert [(b.engine, b.policy_version) for b in report.backends] == [("resumed", "v1"), ("resumed", "v1")]
        await backends.aclose()


async def test_prefixes_are_shared_only_within_a_version():
    got = []
    async with open_pool() as (backends, engine):
        await sample(backends, got)
        await backends.operate(ResumeBackends("v1"))
        await sample(backends, got)
        assert [request.cache_salt for request in engine.requests][-2:] == ["0", "v1"]


async def test_job_on_paused_backends_says_so_and_is_not_charged(rig):
    rig.says = [r"\boxed{42}"]
    async with rig.open_pipeline():
        backends = rig.resources.backends
        await backends.operate(PauseBackends("wait", 5))
        rig.pipeline.submit(Job(rig.spec(budgets=Budgets(run_s=0.5)), MathHandler(), rig.resources, rig.observer))
        while not backends.statistics()["admission"]["waiting"]:
            await trio.sleep(0.01)
        (job,) = [job.view() for job in rig.pipeline.live]
        assert job.waiting_on == "backends paused"
        await trio.sleep(0.6)
        await backends.operate(ResumeBackends("v9"))
        await rig.pipeline.wait_idle()
    outcome = rig.observer.outcomes["job"]
    assert (outcome.status, outcome.reward) == ("completed", 1.0), outcome.error
    assert [span.policy_version for span in outcome.trajectory.segments[0].spans] == ["v9"]
