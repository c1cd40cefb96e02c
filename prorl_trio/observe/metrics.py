"""The metrics of a node for Prometheus. Events update counters; gauges are read at each scrape.

Labels come from the configuration, the registries and closed enums, never from jobs, so their number is bounded. Beyond
`MAX_LABEL_VALUES` of one metric, further values are counted as `other`. An event costs a few microseconds; a scrape
runs in the node's loop and costs about a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector, Summary
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from prorl_trio.observe.stall import BOUNDS_S

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.metrics import MetricWrapperBase

    from prorl_trio.observe.stall import LoopStalls
    from prorl_trio.pipeline.fates import Fates
    from prorl_trio.pipeline.observer import JobView
    from prorl_trio.sandbox.host import Start
    from prorl_trio.types.models import Outcome, Status, Timing, ToolOutcome, Turn


MAX_LABEL_VALUES: Final = 1024
"""Maximal number of label value combinations of one metric."""

WAIT_BUCKETS_S: Final = (0.001, 0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600)
STAGE_BUCKETS_S: Final = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 15, 30, 60, 120, 300, 600, 1800, 3600)
CALL_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600)

_NO_TOOL: Final[frozenset[ToolOutcome]] = frozenset({"unknown", "malformed", "not_run"})
"""Results of calls whose tool lacks a name or was invented by the policy: the name is not used as a label."""

_MetricT = TypeVar("_MetricT", bound="MetricWrapperBase")

Read = Callable[[], Mapping[str, Any]]

MAX_SERIES: Final = 10_000
"""Maximal number of series of one watched part; more are cut off."""
BOUNDS_PER_BUCKET: Final = 4
"""Number of buckets of `LoopStalls` combined in one bucket for Prometheus."""


class Gauges(Collector):
    """Reads the watched parts. See `Metrics.watch`."""

    def __init__(self) -> None:
        self._watched: dict[str, tuple[Read, str, str]] = {}

    def watch(self, name: str, read: Read, text: str, label: str) -> None:
        """Export the result of `read` from now on, and replace an earlier part of the same name."""
        self._watched[name] = (read, text, label)

    def unwatch(self, name: str) -> None:
        """Remove the part called `name`, if it exists."""
        self._watched.pop(name, None)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, because names are unknown before a read; the registry then skips its check for duplicates."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of all parts, read now. Called by the registry once per scrape."""
        for part, (read, text, label) in self._watched.items():
            yield from _families(f"prorl_{part}", read(), text, label)


class StallCollector(Collector):
    """`LoopStalls` as the histogram `prorl_loop_pass_seconds`."""

    def __init__(self, stalls: LoopStalls) -> None:
        self._stalls = stalls

    def collect(self) -> Iterable[Metric]:
        """Called by the registry once per scrape."""
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
        """Called by the registry once per scrape."""
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


class RequestCollector(Collector):
    """Requests of programs as the counter `prorl_gateway_requests_total`, by dialect and result."""

    def __init__(self, read: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Called by the registry once per scrape."""
        text = "Requests of programs, by how they were answered."
        family = CounterMetricFamily("prorl_gateway_requests", text, labels=["dialect", "result"])
        for labels, count in self._read().items():
            family.add_metric(labels, count)
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
    """Yield every number below `values`, with the names on the path to it."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _numbers(value, f"{path}_{name}" if path else str(name))
    elif isinstance(values, int | float):
        yield path, float(values)


class _Labelled(Generic[_MetricT]):
    """A metric's children, found without the library's lock and limited in number."""

    def __init__(self, metric: _MetricT) -> None:
        self._metric = metric
        self._children: dict[tuple[str, ...], _MetricT] = {}

    def __call__(self, *values: str) -> _MetricT:
        child = self._children.get(values)
        if child is None:
            if len(self._children) >= MAX_LABEL_VALUES:
                values = ("other",) * len(values)
            child = self._children[values] = self._metric.labels(*values) if values else self._metric
        return child


class Metrics:
    """The metrics of one node in a separate registry. An `observer.Observer`; not thread-safe.

    `watch` adds gauges for any part of the node; `render` returns the body of `/metrics`.
    """

    def __init__(self, node_id: str = "", version: str = "") -> None:
        self.registry = registry = CollectorRegistry()
        self._gauges = Gauges()
        self._turns_total = self._tokens_total = self._ended_total = 0
        registry.register(self._gauges)
        ProcessCollector(registry=registry)
        Info("prorl_node", "Which node this is.", registry=registry).info({"node_id": node_id, "version": version})

        def counter(name: str, text: str, *labels: str) -> _Labelled[Counter]:
            return _Labelled(Counter(f"prorl_{name}", text, labels, registry=registry))

        def seconds(name: str, text: str, buckets_s: tuple[float, ...], *labels: str) -> _Labelled[Histogram]:
            return _Labelled(Histogram(f"prorl_{name}_seconds", text, labels, registry=registry, buckets=buckets_s))

        self._accepted = counter(
            "jobs_accepted", "Jobs taken, attempts after the first included.", "handler", "priority"
        )
        self._outcomes = counter("outcomes", "Jobs that ended.", "handler", "status", "cause")
        self._queue_wait = seconds("queue_wait", "Waits for a worker of the stage.", WAIT_BUCKETS_S, "stage")
        self._stage = seconds("stage_duration", "Time in a stage.", STAGE_BUCKETS_S, "stage")
        self._job = seconds("job_duration", "From acceptance to outcome, waits included.", STAGE_BUCKETS_S, "status")
        self._turns = counter("turns", "Turns the policy took.", "handler")
        self._finishes = counter(
            "completions", "Completions by why sampling ended; tool_call: stopped early by the node.", "finish_reason"
        )
        self._inference = seconds("turn_inference", "Completion of one turn, retries included.", CALL_BUCKETS_S)
        self._tools = seconds("turn_tools", "Tool calls of one turn together.", CALL_BUCKETS_S)
        self._tool_calls = counter("tool_calls", "Calls of tools, by how they went (`ToolOutcome`).", "tool", "result")
        self._tokens = counter(
            "tokens",
            "Sampled by the policy, given (prompts, observations), or received after an early stop and dropped.",
            "kind",
        )
        self._drift = counter("drift_tokens", "Recorded otherwise than sent or sampled; anything but 0 is a bug.")
        self._undelivered = counter(
            "undelivered_tokens", "Sampled for a trajectory, and not in it; anything but 0 is a bug."
        )
        self._echoes = counter(
            "echoes", "Turns that a program has sent back, by how, or by the segment's reason.", "how"
        )
        self._breaks = counter("segment_breaks", "Segments that do not continue the one before, and why.", "reason")
        self._calls = counter("backend_calls", "Calls of an LLM backend, retries not counted.", "backend", "result")
        self._call = seconds("backend_call", "Calls of an LLM backend, retries included.", CALL_BUCKETS_S, "backend")
        self._sandbox = seconds(
            "sandbox_open",
            "Waits for a sandbox: for its start (cold, places to start included), or for one started before (warm).",
            CALL_BUCKETS_S,
            "provider",
            "start",
        )
        self._reward = _Labelled(Summary("prorl_reward", "Rewards given.", ("handler",), registry=registry))

    def watch(self, name: str, read: Read, text: str = "", *, label: str = "") -> None:
        """Export the result of `read` at each scrape, until `unwatch`.

        `read` returns numbers by name: `{"used_bytes": 5}` becomes the gauge `prorl_NAME_used_bytes`, and a name that
        ends in `_total` a counter. Nested names are joined by `_`; values that are not numbers are skipped. With
        `label` there is one such dict per label value: `{"init": {"busy": 3}}` becomes `prorl_NAME_busy{LABEL="init"}`.
        It must not raise. `text` describes the part.
        """
        self._gauges.watch(name, read, text, label)

    def unwatch(self, name: str) -> None:
        """Remove the part added by `watch` as `name`."""
        self._gauges.unwatch(name)

    def watch_loop(self, stalls: LoopStalls) -> None:
        """Export the passes of the event loop as a histogram."""
        self.registry.register(StallCollector(stalls))

    def watch_fates(self, fates: Fates) -> None:
        """Export the durations of rollouts by fate."""
        self.registry.register(FateCollector(fates))

    def watch_requests(self, read: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        """Export the requests of programs; `read` returns their numbers by dialect and result."""
        self.registry.register(RequestCollector(read))

    def render(self) -> tuple[str, bytes]:
        """Return the content type and the body of the text exposition. Call it in the node's loop."""
        return CONTENT_TYPE_LATEST, generate_latest(self.registry)

    def totals(self) -> dict[str, int]:
        """Return the number of ended jobs, turns and sampled tokens since the start, up to date with each turn."""
        return {"jobs_ended": self._ended_total, "turns": self._turns_total, "tokens_sampled": self._tokens_total}

    def backend_called(self, url: str, result: str, used_s: float) -> None:
        """Count a call of a backend that took `used_s`; `result` belongs to a closed set (completed, failed, ...)."""
        self._calls(url, result).inc()
        self._call(url).observe(used_s)

    def sandbox_opened(self, provider: str, start: Start, waited_s: float) -> None:
        """Count a sandbox that a rollout got after waiting `waited_s`."""
        self._sandbox(provider, start).observe(waited_s)

    # ------------------------------------------------------------ observer.Observer

    def job_moved(self, job: JobView, status: Status, detail: str) -> None:
        if status == "queued":
            self._accepted(job.handler, job.priority).inc()

    def turn_done(self, job: JobView, turn: Turn) -> None:
        sampled = turn.completion_end - turn.completion_start
        self._turns_total += 1
        self._tokens_total += sampled
        self._turns(job.handler).inc()
        self._tokens("sampled").inc(sampled)
        self._finishes(turn.finish_reason).inc()
        if turn.dropped_tokens:
            self._tokens("dropped").inc(turn.dropped_tokens)
        self._inference().observe(turn.inference_s)
        if turn.tool_calls:
            self._tools().observe(turn.tools_s)
            for call, result in zip(turn.tool_calls, turn.tool_results, strict=False):
                self._tool_calls("" if result.outcome in _NO_TOOL else call.name, result.outcome).inc()

    def job_ended(self, job: JobView, outcome: Outcome) -> None:
        self._ended_total += 1
        self._outcomes(job.handler, outcome.status, outcome.cause or "").inc()
        self._job(outcome.status).observe(job.age_s)
        self._stages_ended(outcome.timing)
        if outcome.reward is not None:
            self._reward(job.handler).observe(outcome.reward)
        trajectory = outcome.trajectory
        if trajectory is not None:
            sampled = sum(turn.completion_end - turn.completion_start for turn in trajectory.turns)
            self._tokens("given").inc(max(0, sum(len(segment) for segment in trajectory.segments) - sampled))
            self._drift().inc(trajectory.drift_tokens)
            self._undelivered().inc(trajectory.undelivered_tokens)
            for how, count in trajectory.echoes.items():
                self._echoes(how).inc(count)
            for segment in trajectory.segments:
                if segment.reason is not None:
                    self._breaks(segment.reason).inc()

    def _stages_ended(self, timing: Timing) -> None:
        """Record the durations of the stages that the job reached."""
        for stage, queued_s, used_s in (
            ("init", timing.queued_init_s, timing.init_s),
            ("run", timing.queued_run_s, timing.run_s),
            ("eval", timing.queued_eval_s, timing.eval_s),
        ):
            if used_s > 0:
                self._queue_wait(stage).observe(queued_s)
                self._stage(stage).observe(used_s)
