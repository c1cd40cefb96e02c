from __future__ import annotations

import gc
import weakref

import pytest
import trio

from prorl_trio.pipeline.job import Job
from prorl_trio.tasks.handlers.math import MathHandler

pytestmark = pytest.mark.timeout(60)


async def test_a_job_that_is_over_is_freed_at_once(rig):
    """A serving node looks for cyclic garbage seldom (`prorl_trio.node.garbage`): jobs must not be any."""
    rig.says = ['{"name": "ipython", "arguments": {"code": "6*7"}}', r"It is \boxed{42}."]
    gc.collect()
    gc.disable()
    try:
        with trio.fail_after(50):
            async with rig.open_pipeline():
                job = Job(rig.spec(), MathHandler(), rig.resources, rig.observer)
                rig.pipeline.submit(job)
                finished, freed = job.finished, weakref.ref(job)
                del job
                await finished.wait()
                await rig.pipeline.wait_idle()
                await trio.testing.wait_all_tasks_blocked()
                assert rig.observer.outcomes["job"].reward == 1.0
                assert freed() is None
    finally:
        gc.enable()
