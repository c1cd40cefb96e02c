from __future__ import annotations

import logging
from types import SimpleNamespace

import msgspec
import pytest
import trio

from prorl_trio.agent.activity import Activity
from prorl_trio.node.node import Node
from prorl_trio.pipeline.job import Job
from prorl_trio.pipeline.live import LiveJobs
from prorl_trio.pipeline.observer import Observers
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.types.models import JobSpec

pytestmark = pytest.mark.timeout(30)


class Recorder:
    def __init__(self):
        self.moves, self.turns, self.ends = [], [], []

    def job_moved(self, job, status, detail):
        assert job.status == status
        self.moves.append(status)

    def turn_done(self, job, turn):
        self.turns.append((job.turns, turn.observations))

    def job_ended(self, job, outcome):
        self.ends.append((job.job_id, outcome.status))


class Raises(Recorder):
    def job_moved(self, job, status, detail):
        super().job_moved(job, status, detail)
        raise RuntimeError("a bug of who watches")


async def test_who_watches_is_told_everything_once(rig):
    rig.says = ['{"name": "ipython", "arguments": {"code": "6*7"}}', r"\boxed{42}"]
    recorder, raises = Recorder(), Raises()
    async with rig.open_pipeline():
        rig.pipeline.observers += [raises, recorder]
        rig.pipeline.submit(Job(rig.spec(), MathHandler(), rig.resources, rig.observer))
        await rig.pipeline.wait_idle()
    assert recorder.moves == ["queued", "init", "ready", "run", "ran", "eval", "completed"]
    assert recorder.turns == [(1, ["42"]), (2, [])]
    assert recorder.ends == [("job", "completed")]
    assert raises.moves == ["queued"]
    assert raises not in rig.pipeline.observers


class Waits(AgentHandler):
    name = "waits"

    def validate(self, payload):
        pass

    def sandbox_spec(self, context):
        return SandboxSpec()

    async def run(self, context):
        with context.waiting("tool bash"):
            await trio.sleep_forever()

    async def eval(self, context):
        return Evaluation(reward=1.0, details={})


async def test_a_live_job_says_what_it_waits_for(rig):
    rig.config = msgspec.structs.replace(
        rig.config,
        stuck_after_s=0.0,
        stages=msgspec.structs.replace(rig.config.stages, run_workers=1),
    )
    async with rig.open_pipeline():
        for name, status in (("a", "run"), ("b", "ready")):
            rig.pipeline.submit(Job(rig.spec(name, tags={"k": "v"}), Waits(), rig.resources, rig.observer))
            await rig.observer.wait_status(name, status)
        await trio.testing.wait_all_tasks_blocked()
        running, waiting = [job.view() for job in rig.pipeline.live]
        assert (running.status, running.waiting_on, running.stuck) == ("run", "tool bash", True)
        assert (running.session_id, running.handler, running.tags, running.attempt) == (
            "trainer",
            "math",
            {"k": "v"},
            1,
        )
        assert (waiting.status, waiting.waiting_on, waiting.stuck) == ("ready", "run worker", False)
        assert 0 <= running.last_progress_s <= running.age_s
        assert msgspec.msgpack.encode(msgspec.structs.asdict(running))
        await rig.pipeline.cancel_all("enough")


async def test_waits_of_several_tasks_do_not_hide_each_other():
    activity = Activity()
    with activity.waiting("a"):
        outer = activity.waiting("b")
        with outer:
            assert activity.waiting_on == "b"
        assert activity.waiting_on == "a"
        with pytest.raises(ValueError, match="x"), activity.waiting("c"):
            raise ValueError("x")
        assert activity.waiting_on == "a"
    assert activity.waiting_on == ""


async def test_one_that_raises_is_dropped_and_logged(caplog):
    raises, recorder = Raises(), Recorder()
    observers = Observers([raises, recorder])
    with caplog.at_level(logging.ERROR):
        observers.job_moved(lambda: type("View", (), {"status": "init"})(), "init", "")
        observers.job_moved(lambda: type("View", (), {"status": "run"})(), "run", "")
    assert recorder.moves == ["init", "run"]
    assert "is dropped" in caplog.text


class NumberView(msgspec.Struct):
    number: int


def test_the_status_of_a_node_with_many_jobs_stays_small():
    """Jobs in stages are all there; those that only wait are counted."""
    live = LiveJobs()
    for number in range(30_000):
        live.add(
            SimpleNamespace(
                spec=JobSpec(job_id=f"{number}", instance=None),
                session_id="s",
                accepted_s=number,
                status="run" if number % 100 == 99 else "queued",
                view=lambda number=number: NumberView(number=number),
            )
        )
    node = Node.__new__(Node)
    node._pipeline = SimpleNamespace(live=live)
    shown = [view["number"] for view in node.live_jobs()]
    assert len(shown) == 1_000
    assert shown[:300] == list(range(99, 30_000, 100))
    assert shown[300:] == [number for number in range(1_000) if number % 100 != 99][:700]
    assert node.live_by_status() == {"run": 300, "queued": 29_700}
