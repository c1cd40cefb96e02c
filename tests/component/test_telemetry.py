from __future__ import annotations

import sys
import threading

import pytest
import trio

from prorl_trio.config import TelemetryConfig
from prorl_trio.observe.telemetry import open_telemetry
from prorl_trio.pipeline.job import Job
from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.types.errors import ConfigError
from support.fake_node import make_outcome, make_spec

memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
ON = TelemetryConfig(otlp_endpoint="http://127.0.0.1:1/v1/traces")


pytestmark = pytest.mark.timeout(30)


async def test_a_job_is_a_span_with_its_stages_and_turns_below(rig):
    rig.says = ['{"name": "ipython", "arguments": {"code": "6*7"}}', r"\boxed{42}"]
    exporter = memory.InMemorySpanExporter()
    async with open_telemetry(ON, "node-1", exporter=exporter) as spans:
        async with rig.open_pipeline():
            rig.pipeline.observers.append(spans)
            rig.pipeline.submit(Job(rig.spec("job-7"), MathHandler(), rig.resources, rig.observer))
            await rig.pipeline.wait_idle()
        assert spans._live == {}
    found = exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in found}

    def path(span):
        above = by_id.get(span.parent.span_id) if span.parent else None
        return (*path(above), span.name) if above else (span.name,)

    paths = sorted("/".join(path(span)) for span in found)
    stages = ["queued", "init", "ready", "run", "ran", "eval"]
    turns = ["turn", "turn", "turn/inference", "turn/inference", "turn/tools"]
    assert paths == sorted(
        ["rollout", *(f"rollout/{stage}" for stage in stages), *(f"rollout/run/{turn}" for turn in turns)]
    )
    root = next(span for span in found if span.name == "rollout")
    assert root.attributes["prorl.job_id"] == "job-7"
    assert (root.attributes["prorl.status"], root.attributes["prorl.turns"]) == ("completed", 2)
    assert root.attributes["prorl.reward"] == 1.0
    assert root.status.is_ok
    assert root.resource.attributes["service.instance.id"] == "node-1"
    tools = next(span for span in found if span.name == "tools")
    assert tools.attributes["prorl.tools"] == ("ipython",)
    assert all(span.start_time <= span.end_time for span in found)
    assert "6*7" not in str([dict(span.attributes) for span in found])


async def test_a_failed_job_is_an_error_with_its_cause(rig):
    exporter = memory.InMemorySpanExporter()
    async with open_telemetry(ON, "n", exporter=exporter) as spans, rig.open_pipeline():
        rig.pipeline.observers.append(spans)
        job = Job(rig.spec("cut"), MathHandler(), rig.resources, rig.observer)
        rig.pipeline.submit(job)
        await rig.pipeline.cancel(job, "enough")
        failed = make_outcome(make_spec("lost"), reward=None)
        view = job.view()
        spans.job_ended(view, failed)  # never begun: nothing to end
    (root,) = [span for span in exporter.get_finished_spans() if span.name == "rollout"]
    assert (root.attributes["prorl.status"], root.attributes["prorl.cause"]) == ("cancelled", "cancelled")


async def test_off_is_off():
    async with open_telemetry(TelemetryConfig(), "n") as spans:
        assert spans is None
    look = "import prorl_trio.cli, sys; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    done = await trio.run_process([sys.executable, "-c", look], check=False, capture_stderr=True)
    assert done.returncode == 0, done.stderr


async def test_without_the_extra_it_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'prorl-trio\[otel\]'"):
        async with open_telemetry(ON, "n"):
            pass


async def test_a_collector_that_never_answers_holds_the_end_up_no_longer_than_allowed(monkeypatch):
    monkeypatch.setattr("prorl_trio.observe.telemetry.FLUSH_TIMEOUT_S", 0.1)
    release = threading.Event()

    class Stuck(memory.InMemorySpanExporter):
        def export(self, spans):
            release.wait(20)
            return super().export(spans)

    try:
        async with open_telemetry(ON, "n", exporter=Stuck()) as spans:
            spans._tracer.start_span("x").end()
            began_s = trio.current_time()
        assert trio.current_time() - began_s < 10
    finally:
        release.set()
