"""A node, its sandboxes or both stand still for longer than each of their limits: no rollout pays for that.

As by `scontrol suspend`, a paused container or a frozen machine. Meanwhile one rollout is in INIT, others are in tools,
and others have their evaluation run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.sandbox.reaper import descendants
from prorl_trio.types.models import Budgets, JobSpec, SamplingParams, TaskInstance
from support.processes import command_line, is_first

pytestmark = [pytest.mark.alone, pytest.mark.timeout(150)]

REPO = Path(__file__).parents[2]
STOP_S = 6.0
BUDGETS = Budgets(init_s=60.0, run_s=4.0, agent_s=4.0, eval_s=4.0)
MARK = "1.0625"
SLEEP = f"exec sleep {MARK}"
PYTHON = f"python3 -c 'import time; [time.sleep({MARK} / 20) for _ in range(20)]' {MARK}"
STAGES = {
    "init": {"init": SLEEP},
    "bash": {"bash": [{"command": PYTHON, "timeout": 2}]},
    "beside what runs in the background": {"bash": [{"command": f"sleep 60 & {PYTHON}; kill %1", "timeout": 2}]},
    "eval": {"eval": SLEEP},
    "eval of a program that computes": {"eval": f"head -c 30M /dev/zero | sha256sum; {SLEEP}"},
}


def is_marked(pid):
    return MARK.encode() in command_line(pid).split(b"\0")


class Node:
    """The node, and the processes that each stop names."""

    def __init__(self, process):
        self.process = process

    def working(self):
        return [each.pid for each in descendants(self.process.pid) if is_marked(each.pid)]

    def sandboxes(self):
        first = [each.pid for each in descendants(self.process.pid) if is_first(each.pid)]
        return [pid for each in first for pid in (each, *(below.pid for below in descendants(each)))]

    def everything(self):
        return [self.process.pid, *(each.pid for each in descendants(self.process.pid))]

    def itself(self):
        return [self.process.pid]


@asynccontextmanager
async def stopped(pids):
    """By signals. What has ended meanwhile is none of ours."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGSTOP:
            yield


def new_group():
    """A control group that can be frozen; None if there is none."""
    for mount in ("/sys/fs/cgroup/freezer", "/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
        group = Path(mount) / f"prorl-test-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            if (group / "freezer.state").exists() or (group / "cgroup.freeze").exists():
                return group
            group.rmdir()
    return None


@asynccontextmanager
async def frozen(pids):
    """By a control group of either version; by signals where none may be written."""
    group = new_group()
    if group is None:
        async with stopped(pids):
            yield
        return
    switch, on, off = (group / "freezer.state", "FROZEN", "THAWED")
    if not switch.exists():
        switch, on, off = (group / "cgroup.freeze", "1", "0")
    for pid in pids:
        with suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))
    switch.write_text(on)
    try:
        yield
    finally:
        switch.write_text(off)
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (group.parent / "cgroup.procs").write_text(pid)
        with suppress(OSError):  # what was born meanwhile is in it, and ends with its sandbox
            group.rmdir()


@asynccontextmanager
async def open_node():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(REPO), str(REPO / "tests")))}
    command = [sys.executable, "-m", "support.stopped_node", "bubblewrap", f"{len(STAGES)}"]
    async with trio.open_nursery() as nursery:
        run = partial(trio.run_process, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=False)
        process = await nursery.start(run, command)
        said = b""
        while not said.endswith(b"\n"):
            said += await process.stdout.receive_some()
        try:
            yield Node(process), *json.loads(said)
        finally:
            process.terminate()
            with trio.move_on_after(30, shield=True):
                await process.wait()


def job(name):
    instance = TaskInstance(instance_id=name, handler="steps", payload=STAGES[name])
    sampling = SamplingParams(max_output_tokens=400)
    return JobSpec(job_id=name, instance=instance, sampling=sampling, max_turns=8, budgets=BUDGETS)


@pytest.mark.parametrize(
    ("who", "how"),
    [(Node.everything, stopped), (Node.itself, stopped), (Node.sandboxes, frozen)],
    ids=["everything is stopped", "the node is stopped", "sandboxes are frozen"],
)
async def test_nobody_pays_for_a_stop_that_is_longer_than_each_limit(who, how):
    ended = {}
    with trio.fail_after(140):
        async with open_node() as (node, url, token), connect(url, token) as client:
            await client.submit(list(map(job, STAGES)))
            while len(node.working()) < len(STAGES):
                await trio.sleep(0.01)
            async with how(who(node)):
                await trio.sleep(STOP_S)
            async for outcome in client.results(len(STAGES)):
                ended[outcome.job_id] = (outcome.status, outcome.cause, outcome.reward, outcome.error)
    assert ended == dict.fromkeys(STAGES, ("completed", None, 1.0, ""))
