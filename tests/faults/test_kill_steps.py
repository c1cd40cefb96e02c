"""A node is killed with -9 at one step after the other while it starts, accepts, runs, finishes and delivers.

Each life is killed one step later than the last one, on the same ledger, which is looked at in between, and there is
always a job to do: it has one outcome, numbered after the attempts that the ledger knows of, and nothing is left.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio

from prorl_ipc.session import Accepted
from prorl_trio.client import connect
from prorl_trio.ledger import LedgerLimits, open_ledger
from support.soak import Leftovers, adopted_orphans, rig_environment
from support.soak.backend import open_backend
from support.soak.trainer import soak_spec

pytestmark = pytest.mark.alone

TOKEN = "a-token-for-tests-0123456789"
KIB = 1024
SIZES = {"log_bytes": 64 * KIB, "reserve_bytes": 64 * KIB, "max_bytes": 64 * 1024 * KIB}
LIFE_TIMEOUT_S = 60
SWEEP_TIMEOUT_S = 3000
JOBS_AT_ONCE = 2
GONE_WITHIN_S = 10


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    from prorl_trio.client import transport

    monkeypatch.setattr(transport, "MAX_DELAY_S", 0.1)


@pytest.fixture
def folder():
    """Short enough for the paths of Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="steps-") as path, adopted_orphans():
        yield Path(path)


class Lives:
    """Of a node, one after the other, with a trainer that stays."""

    def __init__(self, folder, trainer):
        self.ended = Counter()
        self._folder, self._trainer = folder, trainer
        self._connected = trio.Event()
        self._submitted, self._accepted = set(), set()
        self._numbers = {}
        """Of the attempt that ends a job, if it is not the first one."""
        self._taken = trio.Event()

    async def train(self, url):
        """One trainer for all lives: take what comes, once there is a node."""
        patience = {"connect_timeout_s": SWEEP_TIMEOUT_S, "reconnect_timeout_s": SWEEP_TIMEOUT_S}
        async with connect(url, TOKEN, **patience) as self._client:
            self._connected.set()
            async for outcome in self._client.results(follow=True):
                assert (outcome.status, outcome.reward) == ("completed", 1.0)
                assert outcome.attempt == self._numbers.get(outcome.job_id, 1)
                self.ended[outcome.job_id] += 1
                self._taken.set()
                self._taken = trio.Event()

    async def _submit(self, job_id):
        await self._connected.wait()
        (answer,) = await self._client.submit([soak_spec(job_id)])
        assert isinstance(answer, Accepted)
        self._accepted.add(job_id)

    async def wait_delivered(self):
        while self._submitted - self.ended.keys():
            await self._taken.wait()
        await self._client.status()  # it is answered behind the acknowledgement

    async def live(self, kind, last_step, job_id):
        """Submit the job, unless there are enough. Returns whether the node died at that step; else it is killed when
        it has delivered all."""
        if len(self._submitted - self.ended.keys()) < JOBS_AT_ONCE:
            self._submitted.add(job_id)
            self._trainer.start_soon(self._submit, job_id)
        with trio.fail_after(LIFE_TIMEOUT_S):
            async with open_node(self._folder, kind, last_step) as node, trio.open_nursery() as nursery:

                async def wait_dead():
                    await node.wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(wait_dead)
                await self.wait_delivered()
                node.kill()
        if nursery.cancel_scope.cancelled_caught:
            assert node.returncode == -signal.SIGKILL, (self._folder / "node.log").read_text()[-3000:]
        await self._look()
        return nursery.cancel_scope.cancelled_caught

    async def last(self):
        """Deliver everything, and end well."""
        with trio.fail_after(LIFE_TIMEOUT_S):
            async with open_node(self._folder, "disk", 0) as node:
                await self.wait_delivered()
                node.terminate()
                assert await node.wait() == 0
        assert self.ended == Counter(dict.fromkeys(self._submitted, 1))

    async def _look(self):
        """What the dead node's ledger says; at a copy, since the next life is to find it as it is."""
        copy = self._folder / "copy"
        if not (self._folder / "ledger").exists():
            return
        shutil.copytree(self._folder / "ledger", copy)
        async with open_ledger(copy, LedgerLimits(**SIZES)) as ledger:
            found = ledger.recovered
        shutil.rmtree(copy)
        assert found.damage == []
        unfinished = [job.job_id for job in found.unfinished]
        undelivered = [job.job_id for job in found.undelivered]
        assert len({*unfinished, *undelivered}) == len(unfinished) + len(undelivered)
        assert set(self._accepted) <= {*unfinished, *undelivered, *self.ended}, "an accepted job is lost"
        assert self.ended.keys().isdisjoint(unfinished), "a job whose outcome was delivered would run again"
        for job in found.undelivered:
            assert job.attempt == self._numbers.get(job.job_id, 1)
        self._numbers |= {job.job_id: job.last_attempt + 1 for job in found.unfinished}


@asynccontextmanager
async def open_node(folder, kind, last_step):
    module = "support.soak.dying_node"
    command = [sys.executable, "-m", module, str(folder / "node.toml"), kind, str(last_step)]
    env = rig_environment(TMPDIR=str(folder / "tmp"))
    with (folder / "node.log").open("ab") as log:
        node = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env)
    try:
        async with node.stdin:
            yield node
    finally:
        node.kill()
        with trio.CancelScope(shield=True):
            await node.wait()


@asynccontextmanager
async def open_lives(folder):
    """On leaving without an error, nothing is left."""
    (folder / "tmp").mkdir()
    left = Leftovers(folder / "tmp")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with open_backend(folder / "model") as backend, trio.open_nursery() as trainer:
        config = {
            "model": {"path": str(folder / "model")},
            "listen": {"port": port, "token": TOKEN},
            "ledger": {"dir": str(folder / "ledger"), "max_attempts": 1_000_000, **SIZES},
            "backends": {"urls": [backend.url]},
            "sandbox": {"provider": "process", "max_warm": 0},
        }
        (folder / "node.toml").write_bytes(msgspec.toml.encode(config))
        lives = Lives(folder, trainer)
        trainer.start_soon(lives.train, f"ws://127.0.0.1:{port}")
        yield lives
        trainer.cancel_scope.cancel()
    end = time.monotonic() + GONE_WITHIN_S
    while (remains := left.find()) and time.monotonic() < end:
        await trio.sleep(0.05)
    assert remains == set()


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        pytest.param("disk", (90,), id="quick"),
        pytest.param("disk", itertools.count(1, 19), id="every 19th call of the disk", marks=pytest.mark.slow),
        pytest.param("loop", itertools.count(1, 13), id="every 13th step of the loop", marks=pytest.mark.soak),
    ],
)
async def test_killed_one_step_later_each_time(folder, kind, steps):
    async with open_lives(folder) as lives:
        for step in steps:
            if not await lives.live(kind, step, f"job-{step}"):
                break  # it had no such step
        await lives.last()
