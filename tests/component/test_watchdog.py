from __future__ import annotations

import logging
import weakref

import trio

from prorl_trio.pipeline.job import Job
from prorl_trio.pipeline.pipeline import watch_jobs
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation


class Shields(AgentHandler):
    """Does not answer a cancel until it is let go."""

    name = "shields"

    def __init__(self):
        self.reached, self.let_go = trio.Event(), trio.Event()

    def validate(self, payload):
        pass

    def sandbox_spec(self, context):
        return None

    async def run(self, context):
        self.reached.set()
        with trio.CancelScope(shield=True):
            await self.let_go.wait()

    async def eval(self, context):
        return Evaluation(reward=1.0, details={})


class Said(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines, self.more = [], trio.Event()

    def emit(self, record):
        self.lines.append(record.getMessage())
        self.more.set()


async def test_a_handler_that_does_not_answer_its_cancel_is_named_once(rig):
    said = Said()
    logger = logging.getLogger("prorl_trio.pipeline.pipeline")
    logger.addHandler(said)
    try:
        with trio.fail_after(30):
            async with rig.open_pipeline(), trio.open_nursery() as nursery:
                nursery.start_soon(watch_jobs, rig.pipeline.live, 0.05)
                handler = Shields()
                job = Job(rig.spec(), handler, rig.resources, rig.observer)
                rig.pipeline.submit(job)
                await handler.reached.wait()
                assert not said.lines
                nursery.start_soon(rig.pipeline.cancel, job, "enough")
                await said.more.wait()
                await trio.sleep(0.3)
                assert len(said.lines) == 1
                assert "has not answered its cancel" in said.lines[0]
                assert "handler shields" in said.lines[0]
                handler.let_go.set()
                await job.finished.wait()
                nursery.cancel_scope.cancel()
    finally:
        logger.removeHandler(said)
    assert rig.observer.outcomes["job"].status == "cancelled"


class Well:
    """The fields of a job that a look reads."""

    scope = None
    stuck = False


async def test_a_job_that_is_well_is_freed_when_it_ends_and_not_at_the_next_look(autojump_clock):
    live = [Well() for _ in range(3)]
    gone = [weakref.ref(job) for job in live]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_jobs, live, 5)
        await trio.sleep(7)
        live.clear()
        assert [ref() for ref in gone] == [None] * 3
        nursery.cancel_scope.cancel()
