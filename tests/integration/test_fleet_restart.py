"""A node of a fleet is told to end, is out of time, and comes back: its next start runs the jobs that were cut."""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.config import NodeConfig
from prorl_trio.node.serve import serve_node
from prorl_trio.rendezvous.folder import read_entry
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import JobSpec, SamplingParams, TaskInstance
from support.fleet_head import head_process

pytestmark = pytest.mark.timeout(120)

MIB = 1024 * 1024


def tables(tmp_path, engine_url, restart_within_s=60.0):
    """The node.toml of the node."""
    return {
        "node_id": "n1",
        "drain_timeout_s": 0.0,
        "model": {"path": str(tmp_path / "model")},
        "listen": {"port": 0, "token": "a-token-for-tests-0123456789", "unix_socket": ""},
        "fleet": {"dir": str(tmp_path / "fleet"), "restart_within_s": restart_within_s},
        "ledger": {"dir": str(tmp_path / "ledger"), "log_bytes": MIB, "reserve_bytes": MIB, "max_bytes": 16 * MIB},
        "backends": {"urls": [engine_url], "required": True},
        "sandbox": {"provider": "process", "max_warm": 0},
        "arena": {"enabled": False},
    }


class Lives:
    """The lives of a node, one after the other, in this process."""

    def __init__(self, config, nursery):
        self.config = msgspec.convert(config, NodeConfig)
        self._nursery = nursery
        self._ended = trio.Event()

    async def start(self):
        self._ended = trio.Event()
        await self._nursery.start(self._serve, self._ended)

    async def _serve(self, ended, *, task_status):  # noqa: ASYNC128 - it passes it on
        await serve_node(self.config, task_status=task_status)
        ended.set()

    async def end(self):
        """Tell it to end; its jobs get no time to."""
        os.kill(os.getpid(), signal.SIGTERM)
        await self._ended.wait()


@asynccontextmanager
async def open_lives(tmp_path, **changes):
    tiny = make_tiny_model(tmp_path / "model")
    answer = tiny.turn(r"\boxed{42}")
    engine_config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000)

    def script(_request):
        return answer, [-0.5] * len(answer), "stop"

    with trio.fail_after(110):
        async with open_fake_engine(script=script, config=engine_config) as engine, trio.open_nursery() as nursery:
            lives = Lives(tables(tmp_path, engine.url, **changes), nursery)
            await lives.start()
            engine.hold()
            async with head_process(tmp_path / "fleet", tmp_path / "head-ledger", tmp_path / "head.log"):
                yield lives, engine
            await lives.end()


def job():
    instance = TaskInstance(instance_id="q", handler="math", payload={"question": "6 * 7?", "answer": "42"})
    return JobSpec(job_id="held", instance=instance, sampling=SamplingParams(max_output_tokens=50))


async def submit(client, engine):
    await client.submit([job()], patience_s=60.0)
    await engine.wait_until(lambda stats: stats.running == 1)


async def take(client):
    return [(o.job_id, o.status, o.reward, o.attempt) for o in [o async for o in client.results()]]


async def test_jobs_that_the_end_of_a_node_cut_run_at_its_next_start(tmp_path):
    async with open_lives(tmp_path) as (lives, engine), connect(fleet=tmp_path / "fleet") as client:
        await submit(client, engine)
        await lives.end()
        assert read_entry(tmp_path / "fleet/n1.json")[0].state == "away"
        engine.release()
        await lives.start()
        assert await take(client) == [("held", "completed", 1.0, 2)]


async def test_so_they_do_where_the_trainer_was_away(tmp_path):
    async with open_lives(tmp_path) as (lives, engine):
        async with connect(fleet=tmp_path / "fleet", session_id="s") as client:
            await submit(client, engine)
        await lives.end()
        engine.release()
        await lives.start()
        async with connect(fleet=tmp_path / "fleet", session_id="s") as client:
            assert await take(client) == [("held", "completed", 1.0, 2)]


async def test_a_node_without_a_next_start_has_none_of_them_and_they_begin_anew(tmp_path):
    async with open_lives(tmp_path, restart_within_s=0.0) as (lives, engine):
        async with connect(fleet=tmp_path / "fleet", session_id="s") as client:
            await submit(client, engine)
        await lives.end()
        assert not (tmp_path / "fleet/n1.json").exists()
        engine.release()
        await lives.start()
        async with connect(fleet=tmp_path / "fleet", session_id="s") as client:
            assert await take(client) == [("held", "completed", 1.0, 2)]


async def test_a_next_start_that_could_find_nothing_is_refused(tmp_path):
    make_tiny_model(tmp_path / "model")
    config = {**tables(tmp_path, "http://127.0.0.1:1"), "ledger": {"dir": ""}}
    with pytest.raises(ConfigError, match=r"fleet\.restart_within_s leaves jobs.*in memory; set node_id"):
        await serve_node(msgspec.convert(config, NodeConfig))
