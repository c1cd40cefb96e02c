"""`prorl-trio local` with real nodes: they take a trainer's jobs, go on after an end, and do not outlive a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest
import trio

from prorl_ipc.session import Accepted
from prorl_trio.client import connect
from prorl_trio.rendezvous.entry import ProcessIdentity, has_ended
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import JobSpec, TaskInstance
from support.killable import TOKEN, terminate

MIB = 1024 * 1024


class Fleet:
    """A fleet's folder, and the commands on it."""

    def __init__(self, folder, config_file, nursery):
        self.folder, self._config_file, self._nursery = folder, config_file, nursery

    def _run(self, *arguments, **options):
        argv = [sys.executable, "-m", "prorl_trio.cli", "local", *arguments, "--fleet", str(self.folder)]
        env = {**os.environ, "PRORL_TOKEN": TOKEN}
        return partial(trio.run_process, argv, env=env, check=False, **options)

    async def up(self, nodes=2):
        process = await self._nursery.start(
            self._run(
                "up",
                "--config",
                str(self._config_file),
                "--nodes",
                str(nodes),
                stdout=subprocess.PIPE,
                deliver_cancel=terminate,
            )
        )
        assert b"READY %d node" % nodes in await process.stdout.receive_some()
        return process

    async def done(self, *arguments):
        """The exit code and output of a command that ends by itself."""
        ended = await self._run(*arguments, capture_stdout=True)()
        return ended.returncode, ended.stdout.decode()

    async def up_again(self):
        return await self.done("up", "--config", str(self._config_file), "--nodes", "2")

    async def lives(self):
        _, output = await self.done("status")
        return [node["life"] for node in json.loads(output)["nodes"].values()]


@asynccontextmanager
async def open_fleets(tmp_path, *names):
    tiny = make_tiny_model(tmp_path / "model")
    answer = tiny.turn(r"\boxed{42}")
    says = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000)
    async with (
        open_fake_engine(script=lambda _: (answer, [-0.5] * len(answer), "stop"), config=says) as engine,
        trio.open_nursery() as nursery,
    ):
        config = {
            "model": {"path": str(tmp_path / "model")},
            "ledger": {"log_bytes": MIB, "reserve_bytes": MIB, "max_bytes": 64 * MIB},
            "fleet": {"heartbeat_interval_s": 0.5},
            "stages": {"run_workers": 2},
            "backends": {"urls": [engine.url], "required": True},
            "sandbox": {"provider": "process", "max_warm": 0},
            "arena": {"enabled": False},
        }
        (tmp_path / "node.toml").write_bytes(msgspec.toml.encode(config))
        yield [Fleet(tmp_path / name, tmp_path / "node.toml", nursery) for name in names]
        nursery.cancel_scope.cancel()


async def outcomes_of(fleet, step):
    question = {"question": "6 * 7?", "answer": "42"}
    jobs = [
        JobSpec(job_id=f"{step}-{n}", instance=TaskInstance(instance_id="q", handler="math", payload=question))
        for n in range(8)
    ]
    async with connect(fleet=fleet.folder) as client:
        assert all(isinstance(given, Accepted) for given in await client.submit(jobs))
        outcomes = [outcome async for outcome in client.results(len(jobs))]
    assert sorted(outcome.job_id for outcome in outcomes) == sorted(job.job_id for job in jobs)
    assert {outcome.reward for outcome in outcomes} == {1.0}


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_fleet_on_one_machine_is_started_used_ended_started_again_and_killed(tmp_path):
    async with open_fleets(tmp_path, "fleet") as (fleet,):
        process = await fleet.up()
        assert await fleet.lives() == ["live", "live"]
        await outcomes_of(fleet, "first")
        code, said = await fleet.up_again()
        assert code == 0
        assert "are up already" in said
        assert await fleet.done("down", "--drain-s", "30") == (0, "")
        assert await process.wait() == 0
        assert await fleet.lives() == []
        assert (await fleet.done("down"))[1].startswith("no fleet is up")

        process = await fleet.up()
        await outcomes_of(fleet, "second")
        entries = [json.loads(path.read_bytes()) for path in fleet.folder.glob("*.json")]
        processes = [msgspec.convert(entry["process"], ProcessIdentity) for entry in entries]
        assert len(processes) == 3, "two nodes and the head"
        process.kill()
        while not all(map(has_ended, processes)):
            await trio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_two_fleets_of_one_user_on_one_machine_leave_each_other_alone(tmp_path):
    async with open_fleets(tmp_path, "one", "two") as (one, two):
        processes = [await one.up(nodes=1), await two.up(nodes=1)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outcomes_of, one, "both")
            nursery.start_soon(outcomes_of, two, "both")
        assert await one.done("down", "--drain-s", "30") == (0, "")
        assert await processes[0].wait() == 0
        assert await two.lives() == ["live"]
        await outcomes_of(two, "alone")
        assert await two.done("down", "--drain-s", "30") == (0, "")
        assert await processes[1].wait() == 0
