from __future__ import annotations

import io
import logging
import threading

import msgspec
import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.observe import logs
from prorl_trio.observe.logs import JobLog, current_job, open_logging
from prorl_trio.pipeline.job import Job
from prorl_trio.tasks.handlers.base import AgentHandler
from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.types.errors import Unauthorized
from support.fake_node import FakeNode, make_spec
from support.fake_service import TOKEN, open_service

logger = logging.getLogger("a.test")


pytestmark = pytest.mark.timeout(30)


def lines(stream):
    return [msgspec.json.decode(line) for line in stream.getvalue().splitlines()]


class Talks(AgentHandler):
    name = "talks"

    def validate(self, payload):
        pass

    def sandbox_spec(self, context):
        return None

    async def run(self, context):
        async def child():
            logger.info("in a child task")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
            nursery.start_soon(trio.lowlevel.checkpoint)
        await trio.to_thread.run_sync(logger.info, "in a thread")
        assert current_job() == context.spec.job_id

    async def eval(self, context):
        raise RuntimeError("the answer is 42")


async def test_what_is_logged_for_a_job_carries_it_into_tasks_and_threads(rig):
    stream = io.StringIO()
    with open_logging(log_format="json", stream=stream):
        async with rig.open_pipeline():
            rig.pipeline.observers.append(JobLog())
            for name in "ab":
                rig.pipeline.submit(Job(rig.spec(name), Talks(), rig.resources, rig.observer))
            await rig.pipeline.wait_idle()
            logger.info("for nobody")
    said = lines(stream)
    for text in ("in a child task", "in a thread"):
        found = [(line["job_id"], line["session_id"], line["stage"]) for line in said if line["message"] == text]
        assert sorted(found) == [("a", "trainer", "run"), ("b", "trainer", "run")]
    assert [line for line in said if "job_id" in line and line["message"] == "for nobody"] == []
    error = next(line for line in said if line["level"] == "error")
    assert error["stage"] == "eval"
    assert "RuntimeError: the answer is 42" in error["exception"]


async def test_one_line_says_how_a_job_ended_and_quotes_nobody(rig):
    rig.says = [r"\boxed{42}"]
    stream = io.StringIO()
    with open_logging(log_format="json", stream=stream):
        async with rig.open_pipeline():
            rig.pipeline.observers.append(JobLog())
            rig.pipeline.submit(Job(rig.spec("good"), MathHandler(), rig.resources, rig.observer))
            rig.pipeline.submit(Job(rig.spec("bad"), Talks(), rig.resources, rig.observer))
            await rig.pipeline.wait_idle()
    ends = {line["job_id"]: line for line in lines(stream) if line["logger"] == "prorl_trio.jobs"}
    good, bad = ends["good"], ends["bad"]
    assert (good["status"], good["cause"], good["turns"], good["attempt"]) == ("completed", None, 1, 1)
    assert good["run_s"] > 0
    assert good["reward"] == 1.0
    assert (bad["status"], bad["reward"], bad["error"]) == ("failed", None, "")
    assert "42" not in bad["message"]
    assert "6 * 7" not in stream.getvalue(), "no payload"


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
async def test_tokens_are_never_logged(level):
    stream = io.StringIO()
    secret = "the-wrong-one-but-a-secret"
    with open_logging(level, "json", stream):
        async with open_service(FakeNode()) as service:
            async with connect(service.url, TOKEN) as client:
                await client.submit([make_spec("j", question="a-secret-payload")])
                await client.status()
            with pytest.raises(Unauthorized):
                async with connect(service.url, secret):
                    pass
    text = stream.getvalue()
    assert "session" in text
    for hidden in (TOKEN, secret, "a-secret-payload"):
        assert hidden not in text


async def test_text_names_the_job_once():
    stream = io.StringIO()
    with open_logging(log_format="text", stream=stream):
        logs._job.set(logs._JobContext("j-1", "s", "run"))
        logger.info("hello")
        logger.info("job j-1 says so itself")
        logs._job.set(None)
    first, second = stream.getvalue().splitlines()
    assert first.endswith("INFO a.test: hello [run of job j-1]")
    assert second.endswith("job j-1 says so itself")


async def test_a_reader_that_does_not_read_stalls_nobody(monkeypatch):
    monkeypatch.setattr(logs, "MAX_QUEUED_RECORDS", 5)
    reads = threading.Event()

    class Stuck(io.StringIO):
        def write(self, text):
            assert reads.wait(10)
            return super().write(text)

    stream = Stuck()
    with open_logging(log_format="json", stream=stream):
        for n in range(100):
            logger.info("record %d", n)
        reads.set()
    said = [line["message"] for line in lines(stream)]
    assert said[0] == "record 0"
    kept = sum(text.startswith("record") for text in said)
    dropped = sum(int(text.split()[0]) for text in said if "were dropped" in text)
    assert (kept + dropped, kept <= 7) == (100, True)


async def test_everything_is_as_before_afterwards():
    root = logging.getLogger()
    before = (root.level, list(root.handlers), threading.active_count())
    with open_logging(logging.DEBUG, "json", io.StringIO()):
        assert logging.getLogger("trio-websocket").level == logging.INFO
    assert (root.level, list(root.handlers), threading.active_count()) == before
