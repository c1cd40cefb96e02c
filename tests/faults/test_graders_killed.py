"""Graders, their sandboxes and the node are killed at random while rollouts whose right verdict is known are graded.

Each ends once: with the right verdict, or with none and a cause. A right answer is never worth 0 for what was done to
its grader, and a wrong one never gains anything. Each step of a grading is cut in
tests/component/grading/test_cut_grading.py.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from prorl_ipc.session import Accepted
from prorl_trio.client import connect
from prorl_trio.sandbox.providers.registry import PROVIDERS
from prorl_trio.sandbox.reaper import descendants
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.sandbox_check import command_of
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import JobSpec, RetryPolicy, SamplingParams
from support.killable import TOKEN, Killable
from support.known_verdicts import KINDS, known_task, policy
from support.skips import because

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(900)]

CAUSES = {"sandbox", "evaluator", "node"}
"""Whose doing it is that a rollout has no reward here."""
PAUSE_S = 0.3
"""Mean time between two kills."""
APART_S = 5
"""Between two kills of what its own work may have ended: one killed at its second try, too, counts as failed."""
DEADLINE_S = 800


@asynccontextmanager
async def open_node(folder, provider):
    tiny = make_tiny_model(folder / "model")

    def sample(prompt):
        ids = tiny.turn(policy(tiny.decode(prompt)))
        return ids, [-0.5] * len(ids), "stop"

    says = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=16_000)
    async with open_fake_engine(script=sample, config=says) as engine, trio.open_nursery() as nursery:
        config = {
            "model": {"path": str(folder / "model")},
            "listen": {"port": 0, "endpoint_file": str(folder / "endpoint.json"), "unix_socket": ""},
            "ledger": {"dir": str(folder / "ledger"), "max_attempts": 100},
            "backends": {"urls": [engine.url]},
            "sandbox": {"provider": provider, "packages": ["pytest"]},
            "arena": {"enabled": False},
        }
        with (folder / "node.log").open("ab") as log:
            try:
                yield Killable(folder, config, nursery, log)
            finally:
                nursery.cancel_scope.cancel()


class Killer:
    """Kills what it meets below a node: scorers, sandboxes in any of their parts, and now and then the node itself."""

    def __init__(self, node, seed):
        self.kills = Counter()
        self._node = node
        self._random = random.Random(seed)
        self._spared_until = 0.0

    async def run(self, kills, node_kills):
        """Kill so often at random moments, the node at so many of them."""
        steps = ["node"] * node_kills + ["below"] * (kills - node_kills)
        self._random.shuffle(steps)
        for step in steps:
            await trio.sleep(self._random.expovariate(1 / PAUSE_S))
            if step == "node":
                await self._node.kill()
                await self._node.start()
                self.kills["node"] += 1
            else:
                while not (kind := await trio.to_thread.run_sync(self._kill_one, trio.current_time())):
                    await trio.sleep(0.02)
                if kind in ("scorer", "program"):
                    self._spared_until = trio.current_time() + APART_S
                self.kills[kind] += 1

    def _kill_one(self, now):
        """Kill a process, or a whole sandbox, and return which kind; empty if there is none."""
        lines = {process.pid: command_of(process.pid) for process in descendants(self._node.pid)}
        sandboxes = [pid for pid, line in lines.items() if "prorl_daemon" in line]
        inside = {process.pid for pid in sandboxes for process in descendants(pid)} - {*sandboxes}
        victims = {"sandbox": sandboxes, "tree": sandboxes}
        if now >= self._spared_until:
            victims["scorer"] = [pid for pid, line in lines.items() if "scoring_worker" in line]
            victims["program"] = [*inside]
        kinds = [kind for kind, pids in victims.items() if pids]
        if not kinds:
            return ""
        kind = self._random.choice(kinds)
        victim = self._random.choice(sorted(victims[kind]))
        below = [process.pid for process in descendants(victim)] if kind == "tree" else []
        for pid in (*below, victim):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return kind


@pytest.fixture(params=["bubblewrap", "apptainer"])
async def provider(request):
    report = await PROVIDERS[request.param]().probe()
    if not report.usable:
        pytest.skip(because(f"{request.param} cannot run here: {report.problem}", report.remedy))
    return request.param


async def outcomes_of(folder, provider, tasks, *, seed, kills, node_kills):
    """Return the outcomes of the tasks by their names, each of which came once, and what was killed."""
    retries = [
        RetryPolicy(max_attempts=attempts, causes=("sandbox", "evaluator", "node"), backoff_s=0.1)
        for attempts in (1, 3)
    ]
    jobs = [
        JobSpec(
            job_id=task.instance.instance_id,
            instance=task.instance,
            sampling=SamplingParams(max_output_tokens=2000),
            retry=retries[number % 2],
        )
        for number, task in enumerate(tasks)
    ]
    outcomes, seen = {}, Counter()
    with trio.fail_after(DEADLINE_S):
        async with open_node(folder, provider) as node:
            url = await node.start()
            async with connect(url, TOKEN) as client, trio.open_nursery() as nursery:
                assert all(isinstance(answer, Accepted) for answer in await client.submit(jobs))
                killer = Killer(node, seed)
                nursery.start_soon(killer.run, kills, node_kills)
                async for outcome in client.results(len(jobs), follow=True):
                    seen[outcome.job_id] += 1
                    outcomes[outcome.job_id] = outcome
                nursery.cancel_scope.cancel()
            assert await node.stop() == 0
    assert seen == Counter(job.job_id for job in jobs)
    return outcomes, killer.kills


@pytest.mark.parametrize(
    ("seed", "copies", "kills"),
    [(1, 1, 20), *(pytest.param(seed, 6, 150, marks=pytest.mark.soak) for seed in range(2, 10))],
)
async def test_what_is_killed_costs_a_verdict_at_most(tmp_path, provider, seed, copies, kills):
    tmp_path.chmod(0o755)
    tasks = [
        known_task(f"{answer}-{kind}-{n}", kind, answer, tmp_path / "layer")
        for n in range(copies)
        for kind in KINDS
        for answer in ("gold", "wrong")
    ]
    random.Random(seed).shuffle(tasks)
    outcomes, done = await outcomes_of(tmp_path, provider, tasks, seed=seed, kills=kills, node_kills=1 + kills // 20)
    right = {task.instance.instance_id: task.reward for task in tasks}
    false = {
        name: (outcome.status, outcome.cause, outcome.error, outcome.reward, outcome.details, outcome.evaluation_log)
        for name, outcome in outcomes.items()
        if (outcome.cause not in CAUSES if outcome.reward is None else outcome.reward != right[name])
    }
    assert not false, done
    assert done["node"] >= 1
    assert done.total() >= kills // 2
    assert sum(outcome.reward is not None for outcome in outcomes.values()) >= len(tasks) // 2
