"""A sandbox that takes long to close, or does not die, harms its own job at most: it is named, and ended later."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager

import pytest
import trio

from prorl_trio.pipeline import pipeline as pipeline_module
from prorl_trio.pipeline.job import Job
from prorl_trio.pipeline.pipeline import open_pipeline
from prorl_trio.sandbox import host as host_module
from prorl_trio.sandbox import process_tree, reaper
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.process_tree import open_process_tree
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.run_dir import open_run_dir, open_shared_run_dir, remains_count
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation

pytestmark = pytest.mark.timeout(60)


class Quick(AgentHandler):
    """Has a sandbox and does nothing with it."""

    name = "quick"

    def validate(self, payload):
        pass

    def sandbox_spec(self, context):
        return SandboxSpec()

    async def run(self, context):
        await trio.lowlevel.checkpoint()

    async def eval(self, context):
        await trio.lowlevel.checkpoint()
        return Evaluation(reward=1.0, details={})


async def outcome_of(rig, job_id):
    job = Job(rig.spec(job_id), Quick(), rig.resources, rig.observer)
    rig.pipeline.submit(job)
    await job.finished.wait()
    return rig.observer.outcomes[job_id]


async def test_a_sandbox_that_does_not_close_in_time_ends_its_job_alone(rig, monkeypatch, caplog):
    monkeypatch.setattr(host_module, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(pipeline_module, "CLEANUP_TIMEOUT_S", 0.1)
    async with rig.open(), open_sandbox_host(rig.provider) as host, trio.open_nursery() as service:
        async with open_pipeline(rig.resources, host, service) as rig.pipeline:
            rig.provider.close_gate = trio.Event()
            slow = [await outcome_of(rig, f"slow-{number}") for number in range(3)]
            overdue, live = host.statistics()["close_overdue_total"], len(rig.provider.live)
            rig.provider.close_gate.set()
            assert [(outcome.status, outcome.error) for outcome in slow] == [("completed", "")] * 3
            assert (overdue, live) == (3, 3)
            assert "ends before its sandbox fake-1 has closed" in caplog.text
            assert "sandbox fake-1 has not closed in 0.05 s" in caplog.text
            assert (await outcome_of(rig, "next")).status == "completed"
            await trio.testing.wait_all_tasks_blocked()
        assert rig.provider.live == []
        assert host.statistics()["live"] == 0


@asynccontextmanager
async def tree_in(run_dir):
    script = "trap '' TERM; read line; echo READY; sleep 1000 & exec sleep 1000"
    async with (
        run_dir.open_sandbox_dir() as folder,
        open_process_tree(
            ("sh", "-c", script),
            env={"PATH": os.defpath},
            stdin_line=b"token\n",
            folder=folder.path,
            start_timeout_s=20.0,
        ) as tree,
    ):
        yield folder.path, tree


async def test_what_a_machine_that_stood_still_has_left_is_reaped_later(tmp_path, monkeypatch, caplog):
    """As after a SIGSTOP of the node: each deadline has passed when it goes on."""
    monkeypatch.setattr(process_tree, "END_TIMEOUT_S", 0.0)
    with trio.fail_after(50):
        async with open_shared_run_dir(tmp_path), open_run_dir(tmp_path) as run_dir:
            async with tree_in(run_dir) as (folder, tree):
                members = tree.members
            assert remains_count() == 1
            assert f"something of sandbox {folder.name} outlived its end" in caplog.text
            while remains_count():
                await trio.sleep(0.01)
            assert not any(map(reaper.is_alive, members))
            assert not folder.exists()
        assert list(tmp_path.iterdir()) == []


async def test_what_is_left_at_the_end_of_the_node_is_the_reapers(tmp_path, monkeypatch):
    monkeypatch.setattr(process_tree, "END_TIMEOUT_S", 0.0)
    monkeypatch.setattr(reaper, "reap_sandbox", lambda _folder: False)
    with trio.fail_after(50):
        async with open_shared_run_dir(tmp_path), open_run_dir(tmp_path) as run_dir:
            async with tree_in(run_dir) as (_, tree):
                members = tree.members
            process = run_dir._reaper
        await process.wait()
        process_tree.reap_leaders()
        assert not any(map(reaper.is_alive, members))
        assert list(tmp_path.iterdir()) == []
