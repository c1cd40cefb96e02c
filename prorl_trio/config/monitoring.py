"""What a node tells of itself: stalls of its event loop, and spans."""

from __future__ import annotations

from typing import Annotated

import msgspec

from prorl_trio.config.quantities import Count, Seconds, SecondsOrZero
from prorl_trio.config.table import Table

__all__ = ["MonitoringConfig", "TelemetryConfig"]


class MonitoringConfig(Table, frozen=True):
    """What the node says of itself.

    `stall_warn_s`: a longer pass of the event loop, in which it answers nobody, is logged with the task's name.
    `stall_dump_after_s`: log the loop's stack while a pass lasts longer, from a thread of its own; 0 never does.
    """

    stall_warn_s: Seconds = 0.25
    stall_dump_after_s: SecondsOrZero = 0.0


class TelemetryConfig(Table, frozen=True):
    """OpenTelemetry: spans go to `otlp_endpoint` (`http://collector:4318/v1/traces`); empty turns it off."""

    otlp_endpoint: Annotated[str, msgspec.Meta(pattern=r"^(https?://[^/\s]+\S*)?\Z")] = ""
    service_name: str = "prorl-trio"
    max_queued_spans: Count = 8192
