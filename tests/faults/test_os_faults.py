"""The system refuses a node its k-th call, for every k of a whole rollout: space, quota, files, processes, memory.

Whatever is refused, the node lives, the rollout has one outcome, which blames neither the policy nor the handler, and
nothing is left.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.config import NodeConfig
from prorl_trio.node.serve import serve_node
from prorl_trio.sandbox.reaper import descendants
from prorl_trio.tasks.handlers.base import Evaluation
from prorl_trio.tasks.handlers.registry import HandlerRegistry
from prorl_trio.types.models import JobSpec, RetryPolicy, SamplingParams, TaskInstance
from support.os_faults import BROKEN, DESCRIPTORS, FILES, MEMORY, PROCESSES, QUOTA, SPACE, os_faults
from support.soak.backend import open_backend
from support.soak.node import SoakHandler

pytestmark = pytest.mark.alone

NUMBERS = {
    "descriptors": DESCRIPTORS,
    "files": FILES,
    "space": SPACE,
    "quota": QUOTA,
    "broken": BROKEN,
    "processes": PROCESSES,
    "memory": MEMORY,
}
MAX_CALLS = 3_000
QUICK_POINTS = 5
MIB = 1024 * 1024


class Whole(SoakHandler):
    """A rollout that has everything: tools in RUN, and a fresh sandbox in EVAL."""

    async def eval(self, context):
        async with context.open_sandbox(self.sandbox_spec(context)) as sandbox:
            said = await sandbox.exec(["/bin/echo", "42"], timeout_s=60)
        return Evaluation(reward=float(context.answer == "42" and said.stdout == b"42\n"), details={})


def job(job_id):
    return JobSpec(
        job_id=job_id,
        instance=TaskInstance(instance_id="1", handler="soak", payload={}),
        sampling=SamplingParams(max_output_tokens=200),
        max_turns=4,
        retry=RetryPolicy(max_attempts=4, backoff_s=0.01),
    )


@asynccontextmanager
async def open_node(folder, provider):
    """A node in this process with its client."""
    async with open_backend(folder / "model", turn_s=0.0) as engine:
        tables = {
            "node_id": "faults",
            "model": {"path": str(folder / "model")},
            "listen": {"port": 0, "token": "t"},
            "backends": {"urls": [engine.url]},
            "stages": {"run_workers": 4, "init_workers": 2, "eval_workers": 2, "ready_queue": 2},
            "ledger": {"dir": str(folder / "l"), "reserve_bytes": MIB, "log_bytes": MIB, "max_bytes": 64 * MIB},
            "arena": {"size_bytes": 16 * MIB},
            "sandbox": {"provider": provider, "runtime_dir": str(folder / "r"), "max_warm": 1},
        }
        config = msgspec.convert(tables, NodeConfig)
        async with trio.open_nursery() as nursery:
            host, port = await nursery.start(serve_node, config, HandlerRegistry([Whole()]))
            async with connect(f"ws://{host}:{port}", "t", session_id="s") as client:
                yield client
            nursery.cancel_scope.cancel()


async def outcome_of(client, job_id):
    await client.submit([job(job_id)], patience_s=60)
    async for outcome in client.results(1):
        assert outcome.job_id == job_id, "one outcome a job"
        return outcome


def check(outcome, faults):
    told = (faults.refused, outcome.status, outcome.cause, outcome.error_code, outcome.error)
    if outcome.status == "completed":
        assert outcome.reward == 1.0, told
    else:
        assert outcome.reward is None, told
        assert outcome.cause in ("sandbox", "node", "inference"), told
    for attempt in outcome.attempts:
        assert attempt.cause in ("sandbox", "node", "inference"), (faults.refused, attempt)


def left_in(folder):
    return sorted(path for path in (folder / "r").glob("prorl-*/sbx-*"))


async def sweep(folder, provider, number, *, count, stride=0):
    """Return how many rollouts met a fault, each `stride` calls later; without one, they are spread over a rollout."""
    with os_faults(number) as faults:
        async with open_node(folder, provider) as client:
            for name in ("first", "warm-up"):
                faults.arm(MAX_CALLS)
                warm = await outcome_of(client, name)
                assert warm.reward == 1.0, warm
            stride = stride or max(1, faults.calls // QUICK_POINTS)
            done, first = 0, 1
            while first < MAX_CALLS:
                faults.arm(first, count)
                with trio.fail_after(90):
                    outcome = await outcome_of(client, f"job-{first}")
                refused, calls = list(faults.refused), faults.calls
                faults.disarm()
                check(outcome, faults)
                done += 1
                if not refused and calls < first:
                    break
                first += stride
            with trio.fail_after(60):
                assert (await outcome_of(client, "after")).reward == 1.0
                status = await client.status()
                while status["sandboxes"]["remains"]:
                    await trio.sleep(0.1)
                    status = await client.status()
            assert status["sandboxes"]["paused"] == ""
            assert status["sandboxes"]["live"] == 0
            assert len(left_in(folder)) <= 6, "the warm one, and the fork server's"
    return done


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="f-") as path:
        yield Path(path)


async def check_sweep(folder, provider, name, **how):
    before = descendants(os.getpid())
    assert await sweep(folder, provider, NUMBERS[name], **how) > 3
    assert descendants(os.getpid()) <= before
    assert list((folder / "r").iterdir()) == []


@pytest.mark.parametrize("name", NUMBERS)
async def test_one_call_is_refused_at_some_steps_of_a_rollout(folder, name):
    with trio.fail_after(240):
        await check_sweep(folder, "bubblewrap", name, count=1)


@pytest.mark.soak
@pytest.mark.parametrize("count", [1, 5, 30])
@pytest.mark.parametrize("provider", ["process", "bubblewrap"])
@pytest.mark.parametrize("name", NUMBERS)
async def test_calls_are_refused_at_every_step_of_a_rollout(folder, provider, name, count):
    with trio.fail_after(3600):
        await check_sweep(folder, provider, name, stride=1 if count == 1 else count, count=count)
