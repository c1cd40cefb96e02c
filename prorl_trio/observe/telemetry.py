"""OpenTelemetry spans: one per job, below it one per stage, below RUN one per turn with its inference and its tools.

Needs the extra `otel`. If `telemetry.otlp_endpoint` is empty, nothing is imported or executed. A thread of the SDK
sends spans from a bounded queue; spans beyond its limit are dropped.
"""

from __future__ import annotations

import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio

from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

    from prorl_trio.config import TelemetryConfig
    from prorl_trio.pipeline.observer import JobView
    from prorl_trio.types.models import Outcome, Status, Turn

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S: Final = 5.0
"""Longest wait at the end of a node for spans to be sent."""
_STAGES: Final = ("queued", "init", "ready", "run", "ran", "eval")


class _JobTrace:
    """The open spans of one job."""

    def __init__(self, job: Span) -> None:
        self.job = job
        self.stage: Span | None = None


class JobSpans:
    """Creates the spans. An `observer.Observer`. Neither tokens nor texts are attributes."""

    def __init__(self, tracer: Tracer) -> None:
        from opentelemetry import trace

        self._tracer = tracer
        self._trace = trace
        self._live: dict[str, _JobTrace] = {}

    def job_moved(self, job: JobView, status: Status, detail: str) -> None:
        live = self._live.get(job.job_id)
        if live is None:
            live = self._live[job.job_id] = _JobTrace(self._begin(job))
        if live.stage is not None:
            live.stage.end()
            live.stage = None
        if status in _STAGES:
            live.stage = self._child(live.job, status, time.time_ns(), {"prorl.attempt": job.attempt})

    def turn_done(self, job: JobView, turn: Turn) -> None:
        live = self._live.get(job.job_id)
        if live is None or live.stage is None:
            return
        end_ns = time.time_ns()
        tools_ns = end_ns - int(1e9 * turn.tools_s)
        start_ns = tools_ns - int(1e9 * turn.inference_s)
        span = self._child(live.stage, "turn", start_ns, {"prorl.turn": job.turns})
        inference = self._child(
            span,
            "inference",
            start_ns,
            {
                "gen_ai.usage.output_tokens": turn.completion_end - turn.completion_start,
                "gen_ai.response.finish_reasons": [turn.finish_reason],
            },
        )
        inference.end(tools_ns)
        if turn.tool_calls:
            names = [call.name for call in turn.tool_calls if not call.error]
            self._child(span, "tools", tools_ns, {"prorl.tools": names}).end(end_ns)
        span.end(end_ns)

    def job_ended(self, job: JobView, outcome: Outcome) -> None:
        live = self._live.pop(job.job_id, None)
        if live is None:
            return
        if live.stage is not None:
            live.stage.end()
        span = live.job
        span.set_attribute("prorl.status", outcome.status)
        span.set_attribute("prorl.turns", job.turns)
        if outcome.reward is not None:
            span.set_attribute("prorl.reward", outcome.reward)
        if outcome.cause is not None:
            span.set_attribute("prorl.cause", outcome.cause)
        if outcome.status in ("failed", "timed_out"):
            span.set_status(self._trace.StatusCode.ERROR, outcome.cause or outcome.status)
        span.end()

    def _begin(self, job: JobView) -> Span:
        return self._tracer.start_span(
            "rollout",
            attributes={
                "prorl.job_id": job.job_id,
                "prorl.session_id": job.session_id,
                "prorl.group_id": job.group_id,
                "prorl.instance_id": job.instance_id,
                "prorl.handler": job.handler,
                "prorl.priority": job.priority,
            },
        )

    def _child(self, parent: Span, name: str, start_ns: int, attributes: dict[str, str | int | list[str]]) -> Span:
        context = self._trace.set_span_in_context(parent)
        return self._tracer.start_span(name, context, start_time=start_ns, attributes=attributes)


@asynccontextmanager
async def open_telemetry(
    config: TelemetryConfig, node_id: str, *, exporter: SpanExporter | None = None
) -> AsyncIterator[JobSpans | None]:
    """Send spans to `config.otlp_endpoint`, or through `exporter`. Yields None if telemetry is off.

    At the end, queued spans are sent, for at most `FLUSH_TIMEOUT_S`.

    Raises:
        ConfigError: the extra `otel` is not installed.
    """
    if not config.otlp_endpoint:
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        raise ConfigError(
            f"telemetry.otlp_endpoint is set, but the extra is missing ({exc}); pip install 'prorl-trio[otel]'"
        ) from exc
    if exporter is None:
        exporter = OTLPSpanExporter(config.otlp_endpoint, timeout=FLUSH_TIMEOUT_S)
    resource = Resource.create({"service.name": config.service_name, "service.instance.id": node_id})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=config.max_queued_spans))
    try:
        yield JobSpans(provider.get_tracer("prorl_trio"))
    finally:
        with trio.move_on_after(FLUSH_TIMEOUT_S, shield=True) as patience:
            await trio.to_thread.run_sync(provider.shutdown, abandon_on_cancel=True)
        if patience.cancelled_caught:
            logger.warning("spans could not be sent to %s within %g s", config.otlp_endpoint, FLUSH_TIMEOUT_S)
