"""A node is killed with -9 while it accepts, runs, finishes and delivers: each job has one outcome at the trainer."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager

import pytest
import trio

from prorl_ipc.session import Accepted
from prorl_trio.client import connect
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import JobSpec, SamplingParams, TaskInstance
from support.killable import TOKEN, Killable

MIB = 1024 * 1024

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(300)]


@asynccontextmanager
async def open_killable(tmp_path, **ledger):
    tiny = make_tiny_model(tmp_path / "model")
    answer = tiny.turn(r"\boxed{42}")
    engine_config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000)
    async with (
        open_fake_engine(script=lambda _: (answer, [-0.5] * len(answer), "stop"), config=engine_config) as engine,
        trio.open_nursery() as nursery,
    ):
        config = {
            "model": {"path": str(tmp_path / "model")},
            "listen": {"port": 0, "endpoint_file": str(tmp_path / "endpoint.json"), "unix_socket": ""},
            "ledger": {
                "dir": str(tmp_path / "ledger"),
                "log_bytes": MIB,
                "reserve_bytes": MIB,
                "max_bytes": 64 * MIB,
                **ledger,
            },
            "backends": {"urls": [engine.url], "required": True},
            "sandbox": {"provider": "process", "max_warm": 0},
            "arena": {"enabled": False},
        }
        with (tmp_path / "node.log").open("ab") as log:
            try:
                yield Killable(tmp_path, config, nursery, log), engine
            finally:
                nursery.cancel_scope.cancel()


def job(job_id):
    instance = TaskInstance(instance_id="q", handler="math", payload={"question": "6 * 7?", "answer": "42"})
    return JobSpec(job_id=job_id, instance=instance, sampling=SamplingParams(max_output_tokens=50))


async def test_killed_again_and_again_each_job_has_one_outcome(tmp_path):
    jobs = [job(f"job-{n}") for n in range(60)]
    seen = Counter()
    with trio.fail_after(250):
        async with open_killable(tmp_path) as (node, _engine):
            url = await node.start()
            async with connect(url, TOKEN) as client:

                async def submit():
                    for start in range(0, len(jobs), 10):  # batches, so that kills also come in the middle of accepts
                        answers = await client.submit(jobs[start : start + 10])
                        assert all(isinstance(answer, Accepted) for answer in answers)

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(submit)
                    async for outcome in client.results(len(jobs), follow=True):
                        seen[outcome.job_id] += 1
                        assert (outcome.status, outcome.reward) == ("completed", 1.0)
                        if len(seen) in (1, 20, 45):
                            await node.kill()
                            nursery.start_soon(node.start)
                    await client.status()
            assert await node.stop() == 0
    assert seen == Counter({spec.job_id: 1 for spec in jobs})


async def test_a_client_goes_on_when_the_node_comes_back_at_another_port(tmp_path):
    with trio.fail_after(200):
        async with open_killable(tmp_path) as (node, _engine):
            first = await node.start(note_port=False)
            async with connect(token=TOKEN, endpoint_file=tmp_path / "endpoint.json") as client:
                await client.submit([job("a")])
                assert [outcome.job_id async for outcome in client.results(1)] == ["a"]
                await node.kill()
                taken = await trio.open_tcp_listeners(int(first.rpartition(":")[2]), host="127.0.0.1")
                second = await node.start(note_port=False)
                assert second != first
                (answer,) = await client.submit([job("b")])
                assert isinstance(answer, Accepted)
                assert [outcome.job_id async for outcome in client.results(1)] == ["b"]
            for listener in taken:
                await listener.aclose()
            assert await node.stop() == 0


async def test_undelivered_outcomes_outlive_a_shutdown_and_an_absent_trainer(tmp_path):
    with trio.fail_after(200):
        async with open_killable(tmp_path) as (node, _engine):
            url = await node.start()
            async with connect(url, TOKEN, session_id="s") as client:
                await client.submit([job("a"), job("b")])
            assert await node.stop() == 0  # drained, with nobody there to take the outcomes
            await node.start()
            async with connect(url, TOKEN, session_id="s") as client:
                assert client.resumed
                assert {outcome.job_id async for outcome in client.results(2)} == {"a", "b"}
