"""Metrics that are read, not counted: the live figures of the node's parts, taken when a scrape asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from prorl_trio.observe.stall import BOUNDS_S

if TYPE_CHECKING:
    from prometheus_client import Metric

    from prorl_trio.observe.stall import LoopStalls
    from prorl_trio.pipeline.fates import Fates

Read = Callable[[], Mapping[str, Any]]

MAX_SERIES: Final = 10_000
"""The most series that one watched part may show; more are cut off."""
BOUNDS_PER_BUCKET: Final = 4
"""Prometheus gets one bucket for so many of `LoopStalls`."""


class Gauges(Collector):
    """Reads whatever is watched. See `Metrics.watch`."""

    def __init__(self) -> None:
        self._watched: dict[str, tuple[Read, str, str]] = {}

    def watch(self, name: str, read: Read, text: str, label: str) -> None:
        """Show what `read` returns from now on, in place of an earlier one of the same name."""
        self._watched[name] = (read, text, label)

    def unwatch(self, name: str) -> None:
        """Remove the part called `name`, if it is there."""
        self._watched.pop(name, None)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, as names are known only after a read; the registry then does not check for double names."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of all parts, read now. Called by the registry, once a scrape."""
        for part, (read, text, label) in self._watched.items():
            yield from _families(f"prorl_{part}", read(), text, label)


class StallCollector(Collector):
    """`LoopStalls` as the histogram `prorl_loop_pass_seconds`."""

    def __init__(self, stalls: LoopStalls) -> None:
        self._stalls = stalls

    def collect(self) -> Iterable[Metric]:
        """Called by the registry, once a scrape."""
        stalls, seen = self._stalls, 0
        buckets: list[tuple[str, float]] = []
        for index, bound_s in enumerate(BOUNDS_S):
            seen += stalls.counts[index]
            if index % BOUNDS_PER_BUCKET == 0:
                buckets.append((f"{bound_s:.3g}", seen))
        buckets.append(("+Inf", seen + stalls.counts[-1]))
        text = "How long the event loop ran tasks before it looked at the outside again."
        yield HistogramMetricFamily("prorl_loop_pass_seconds", text, buckets=buckets, sum_value=stalls.sum_s)
        yield GaugeMetricFamily("prorl_loop_pass_max_seconds", "The longest pass.", value=stalls.report().max_ms / 1e3)


class FateCollector(Collector):
    """`Fates` as the histograms `prorl_rollout_duration_seconds` and `prorl_rollout_tokens`, by fate."""

    def __init__(self, fates: Fates) -> None:
        self._fates = fates

    def collect(self) -> Iterable[Metric]:
        """Called by the registry, once a scrape."""
        told = "of rollouts that began (admitted), and of these of such as completed (delivered) and others (dropped)."
        for name, text, by_fate in (
            ("prorl_rollout_duration_seconds", f"Time in RUN {told}", self._fates.run_s),
            ("prorl_rollout_tokens", f"Tokens sampled {told}", self._fates.tokens),
        ):
            family = HistogramMetricFamily(name, text, labels=["fate"])
            for fate, distribution in by_fate.items():
                bounds = [*map(str, distribution.bounds), "+Inf"]
                buckets = list(zip(bounds, accumulate(distribution.counts), strict=True))
                family.add_metric([fate], buckets=buckets, sum_value=distribution.total)
            yield family


def _families(prefix: str, values: Mapping[str, Any], text: str, label: str) -> Iterator[Metric]:
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    rows = values.items() if label else [("", values)]
    series = 0
    for label_value, row in rows:
        for name, number in _numbers(row):
            series += 1
            if series > MAX_SERIES:
                break
            full = f"{prefix}_{name}"
            if full not in families:
                kind = CounterMetricFamily if full.endswith("_total") else GaugeMetricFamily
                families[full] = kind(full, text, labels=[label] if label else [])
            families[full].add_metric([label_value] if label else [], number)
    yield from families.values()


def _numbers(values: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number below `values`, with the names on the way to it."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _numbers(value, f"{path}_{name}" if path else str(name))
    elif isinstance(values, int | float):
        yield path, float(values)
