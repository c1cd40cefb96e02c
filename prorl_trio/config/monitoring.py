"""Monitoring of a node: stalls of its event loop, and spans."""

from __future__ import annotations

from typing import Annotated

import msgspec

from prorl_trio.config.quantities import Count, Seconds, SecondsOrZero, Table


class MonitoringConfig(Table, frozen=True):
    """Notices of stalls of the event loop.

    Attributes:
        stall_warn_s: a pass of the event loop, in which it answers nobody, that takes longer is logged with the task's
            name.
        stall_dump_after_s: log the loop's stack while a pass lasts longer, from a thread of its own; 0 never does.
    """

    stall_warn_s: Seconds = 0.25
    stall_dump_after_s: SecondsOrZero = 0.0


class TelemetryConfig(Table, frozen=True):
    """Spans of jobs, stages and turns for OpenTelemetry.

    Attributes:
        otlp_endpoint: where spans go: `http://collector:4318/v1/traces`; empty turns it off.
        service_name: name of this service in them.
        max_queued_spans: spans that wait to be sent; more are dropped.
    """

    otlp_endpoint: Annotated[str, msgspec.Meta(pattern=r"^(https?://[^/\s]+\S*)?\Z")] = ""
    service_name: str = "prorl-trio"
    max_queued_spans: Count = 8192
