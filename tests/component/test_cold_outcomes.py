"""More outcomes than may be in memory, over a real ledger: they are read back when somebody takes them."""

from __future__ import annotations

import os
import random
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import trio

from prorl_ipc.arena_memory import TOKEN_BYTES
from prorl_trio.client import connect
from prorl_trio.config import LedgerConfig
from prorl_trio.ledger import LedgerLimits, open_ledger
from prorl_trio.sessions.feed import READ_AHEAD_BYTES
from prorl_trio.sessions.journal import open_journal
from prorl_trio.sessions.session_table import SessionTable, recover_sessions
from prorl_trio.sessions.submission import submit_one
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_rest import open_rest
from support.fake_service import TOKEN, open_service

MIB = 1024 * 1024
HOT_BYTES = 8 * MIB
JOBS = 200
TOKENS = MIB // TOKEN_BYTES
SLACK_BYTES = 48 * MIB
"""What the allocator and the ledger's groups may take besides."""
AT_ONCE = 10
SEEN = 5


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def open_life(folder):
    """One life of a node's process."""
    limits = LedgerLimits(log_bytes=64 * MIB, reserve_bytes=MIB, max_bytes=1024 * MIB)
    async with open_ledger(folder, limits) as ledger, open_journal(ledger, HOT_BYTES) as journal:
        table, node = SessionTable(journal), FakeNode()
        await recover_sessions(table, node, LedgerConfig())
        yield table, node, journal.cache


async def finish_all(session, node):
    """As many jobs as are running at once end, again and again. Nobody takes what comes of them."""
    for first in range(0, JOBS, AT_ONCE):
        specs = [make_spec(f"job-{n}") for n in range(first, first + AT_ONCE)]
        for spec in specs:
            await submit_one(session, spec, node)
        for n, spec in enumerate(specs, first):
            node.finish(spec.job_id, make_outcome(spec, reward=float(n), tokens=TOKENS))
        while len(session.log) < first + AT_ONCE:
            await session.wait_arrival()


@pytest.fixture
async def stored(tmp_path):
    """A ledger of 200 outcomes of a MiB each; what it took to get there is bounded."""
    with trio.fail_after(60):
        async with open_life(tmp_path / "ledger") as (table, node, cache):
            session, _ = table.open("s", 0)
            before = resident_bytes()
            await finish_all(session, node)
            assert len(session.log) == JOBS
            assert session.log.size_bytes > JOBS * MIB
            assert cache.size_bytes == session.log.memory_bytes <= HOT_BYTES
            assert cache.size_bytes > HOT_BYTES - 2 * MIB
            assert resident_bytes() - before < HOT_BYTES + SLACK_BYTES
    return tmp_path / "ledger"


async def test_a_new_start_reads_no_payload_and_everybody_gets_every_outcome(stored):
    before = resident_bytes()
    with trio.fail_after(60):
        async with open_life(stored) as (table, node, cache):
            assert (cache.misses_total, cache.size_bytes) == (0, 0)
            assert resident_bytes() - before < SLACK_BYTES, "a start takes no memory for what is on the disk"
            session = table.get("s")
            async with open_rest(node, sessions=table) as rest:
                for n in random.Random(1).sample(range(JOBS), SEEN):
                    answer = await rest.call("GET", f"/v1/rollouts/job-{n}")
                    assert answer.status == 200, answer.body
                    assert answer.json()["outcome"]["reward"] == n
                answer = await rest.call("GET", "/v1/results?session=s&limit=3")
                assert [entry["cursor"] for entry in answer.json()["results"]] == [1, 2, 3]
            assert cache.misses_total == SEEN + 3
            rewards = []
            async with open_service(node, sessions=table) as service, connect(service.url, TOKEN, session_id="s") as t:
                async for outcome in t.results(JOBS):
                    rewards.append(outcome.reward)
                    assert np.asarray(outcome.trajectory.segments[0].token_ids).shape == (TOKENS,)
                    assert session.log.memory_bytes <= HOT_BYTES
            assert rewards == [float(n) for n in range(JOBS)]
            assert cache.misses_total == SEEN + 3 + JOBS, "each is read once for the trainer"


async def test_a_trainer_that_stops_costs_its_share_and_gets_everything_later(tmp_path):
    """Beside one that goes on, and whose outcomes need never be read back."""
    with trio.fail_after(60):
        async with open_life(tmp_path / "ledger") as (table, node, cache):
            stopped, fast = table.open("stopped", 0)[0], table.open("fast", 0)[0]
            listener = _Stopped()
            feed, fast_feed = stopped.attach(listener, 0), fast.attach(_Stopped(), 0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(feed.read_ahead, stopped.read, listener.wake)
                for n in range(40):
                    for session in (stopped, fast):
                        spec = make_spec(f"{session.session_id}-{n}")
                        await submit_one(session, spec, node)
                        node.finish(spec.job_id, make_outcome(spec, tokens=TOKENS))
                    for session in (stopped, fast):
                        while session.log.last <= n:
                            await session.wait_arrival()
                    assert fast_feed.next_frame() is not None, "it was read back"
                    fast.ack(n + 1)
                    assert cache.size_bytes <= HOT_BYTES
                    assert feed.ahead_bytes <= READ_AHEAD_BYTES
                frames = 0
                while frames < 40:
                    if feed.next_frame() is None:
                        await listener.woken.park()
                    else:
                        frames += 1
                nursery.cancel_scope.cancel()


class _Stopped:
    reader_id = ""

    def __init__(self):
        self.woken = trio.lowlevel.ParkingLot()

    def wake(self):
        self.woken.unpark_all()

    def event(self, event):
        pass

    def replaced(self):
        raise AssertionError
