"""Real nodes of a fleet are killed with -9 or frozen while they work: each job has one outcome at the trainer."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from contextlib import asynccontextmanager

import pytest
import trio

from prorl_ipc.session import Accepted
from prorl_trio.client import connect
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import JobSpec, SamplingParams, TaskInstance
from support.killable import Killable

MIB = 1024 * 1024

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(300)]


@asynccontextmanager
async def open_fleet_of(tmp_path, count):
    """Yield the head and the nodes of one fleet, not started, with ledgers of their own and one engine."""
    tiny = make_tiny_model(tmp_path / "model")
    answer = tiny.turn(r"\boxed{42}")
    engine_config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000)
    async with (
        open_fake_engine(script=lambda _: (answer, [-0.5] * len(answer), "stop"), config=engine_config) as engine,
        trio.open_nursery() as nursery,
    ):
        with (tmp_path / "nodes.log").open("ab") as log:
            fleet = {"dir": str(tmp_path / "fleet"), "heartbeat_interval_s": 0.5, "stale_after_s": 8.0}
            limits = {"log_bytes": MIB, "reserve_bytes": MIB, "max_bytes": 64 * MIB}
            folder = tmp_path / "head"
            folder.mkdir()
            config = {
                "listen": {"port": 0, "endpoint_file": str(folder / "endpoint.json"), "unix_socket": ""},
                "fleet": fleet,
                "ledger": {"dir": str(folder / "ledger"), **limits},
            }
            head = Killable(folder, config, nursery, log, module=("prorl_trio.cli", "fleet", "--config"))
            nodes = []
            for number in range(count):
                folder = tmp_path / f"n{number}"
                folder.mkdir()
                config = {
                    "node_id": f"n{number}",
                    "model": {"path": str(tmp_path / "model")},
                    "listen": {"port": 0, "endpoint_file": str(folder / "endpoint.json"), "unix_socket": ""},
                    "fleet": fleet,
                    "ledger": {"dir": str(folder / "ledger"), **limits},
                    "stages": {"run_workers": 4},
                    "backends": {"urls": [engine.url], "required": True},
                    "sandbox": {"provider": "process", "max_warm": 0},
                    "arena": {"enabled": False},
                }
                nodes.append(Killable(folder, config, nursery, log))
            try:
                yield head, nodes
            finally:
                nursery.cancel_scope.cancel()


def job(job_id):
    instance = TaskInstance(instance_id="q", handler="math", payload={"question": "6 * 7?", "answer": "42"})
    return JobSpec(job_id=job_id, instance=instance, sampling=SamplingParams(max_output_tokens=50))


async def start(nodes):
    async with trio.open_nursery() as nursery:
        for node in nodes:
            nursery.start_soon(node.start)


async def kill_both(client, nodes, seen, nursery):
    """Submit jobs bit by bit, and kill each node once while it has some. Return the attempts that had outcomes."""
    jobs, used = [job(f"job-{n}") for n in range(40)], set()

    async def submit():
        for first in range(0, len(jobs), 10):
            answers = await client.submit(jobs[first : first + 10])
            assert all(isinstance(answer, Accepted) for answer in answers)

    nursery.start_soon(submit)
    async for outcome in client.results(len(jobs), follow=True):
        seen[outcome.job_id] += 1
        used.add(outcome.attempt)
        assert (outcome.status, outcome.reward) == ("completed", 1.0)
        if len(seen) in (1, 20):
            killed = nodes[len(seen) == 1]
            await killed.kill()
            nursery.start_soon(killed.start)
    return used


async def stop_one(client, node, seen):
    """Stop a node while it has jobs, until their outcomes have come from the other one, and let it go on."""
    await client.submit([job(f"stopped-{n}") for n in range(20)])
    os.kill(node.pid, signal.SIGSTOP)
    try:
        async for outcome in client.results():
            seen[outcome.job_id] += 1
        await client.submit([job(f"late-{n}") for n in range(10)])
    finally:
        os.kill(node.pid, signal.SIGCONT)
    async for outcome in client.results():
        seen[outcome.job_id] += 1


async def all_is_told(client):
    """Return when both nodes are members, with nothing at work and nothing to tell."""
    while True:
        members = (await client.status())["members"].values()
        sessions = [session for member in members for session in member.get("sessions", {}).values()]
        if len(sessions) == 2 and not any(s["running"] or s["undelivered"] for s in sessions):
            return
        await trio.sleep(0.1)


async def test_nodes_are_killed_and_stopped_and_each_job_has_one_outcome(tmp_path):
    seen = Counter()
    with trio.fail_after(280):
        async with open_fleet_of(tmp_path, 2) as (head, nodes):
            await start([head, *nodes])
            heartbeats = {"heartbeat_interval_s": 1.0, "heartbeat_timeout_s": 8.0}
            async with connect(fleet=tmp_path / "fleet", connect_timeout_s=60.0, **heartbeats) as client:
                async with trio.open_nursery() as nursery:
                    used = await kill_both(client, nodes, seen, nursery)
                assert max(used) >= 2
                await stop_one(client, nodes[0], seen)
                await all_is_told(client)
                async for outcome in client.results():
                    seen[outcome.job_id] += 1
                command = [sys.executable, "-m", "prorl_trio.cli", "status", "--fleet", str(tmp_path / "fleet")]
                told = await trio.run_process(command, capture_stdout=True)
                assert sorted(json.loads(told.stdout)["members"]) == ["n0", "n1"]
            for node in (head, *nodes):
                assert await node.stop() == 0
            left = sorted(path.name for path in (tmp_path / "fleet").glob("*.json"))
            assert left == ["head.json"], "by which trainers wait for its next start"
    assert len(seen) == 70
    assert set(seen.values()) == {1}
