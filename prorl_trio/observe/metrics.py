"""The metrics of a node for Prometheus. Events feed counters; gauges are read when somebody asks.

Labels come from the configuration, the registries and closed enums, never from jobs: their number is bounded, and past
`MAX_LABEL_VALUES` of one metric further ones are counted as `other`. An event costs some microseconds; a scrape
happens in the node's loop and costs about a millisecond.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector, Summary
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from prorl_trio.observe.gauges import FateCollector, Gauges, StallCollector

if TYPE_CHECKING:
    from prometheus_client.metrics import MetricWrapperBase

    from prorl_trio.observe.gauges import Read
    from prorl_trio.observe.stall import LoopStalls
    from prorl_trio.pipeline.fates import Fates
    from prorl_trio.pipeline.observer import JobView
    from prorl_trio.sandbox.host import Start
    from prorl_trio.types.models import Outcome, Status, Timing, ToolOutcome, Turn

MAX_LABEL_VALUES: Final = 1024
"""Combinations of label values of one metric."""

WAIT_BUCKETS_S: Final = (0.001, 0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600)
STAGE_BUCKETS_S: Final = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 15, 30, 60, 120, 300, 600, 1800, 3600)
CALL_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600)

_NO_TOOL: Final[frozenset[ToolOutcome]] = frozenset({"unknown", "malformed", "not_run"})
"""Results of calls whose tool has no name, or one that the policy made up: it is not a label."""

_MetricT = TypeVar("_MetricT", bound="MetricWrapperBase")


class _Labelled(Generic[_MetricT]):
    """A metric's children, found without the library's lock, and bounded."""

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
    """The metrics of one node, in a registry of their own. An `observer.Observer`; not thread-safe.

    `watch` adds gauges of any part of the node, `render` gives what `/metrics` answers.
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
        """Show what `read` returns, each time it is asked for, until `unwatch`.

        `read` returns numbers by name: `{"used_bytes": 5}` becomes the gauge `prorl_NAME_used_bytes`, a name that ends
        in `_total` a counter; nested ones are joined by `_`, what is no number is left out. With `label` there is one
        such dict per label value: `{"init": {"busy": 3}}` becomes `prorl_NAME_busy{LABEL="init"}`. It must not raise.
        `text` says what the part is.
        """
        self._gauges.watch(name, read, text, label)

    def unwatch(self, name: str) -> None:
        """Forget what `watch` was told of `name`."""
        self._gauges.unwatch(name)

    def watch_loop(self, stalls: LoopStalls) -> None:
        """Show the passes of the event loop as a histogram."""
        self.registry.register(StallCollector(stalls))

    def watch_fates(self, fates: Fates) -> None:
        """Show how long rollouts were, by what became of them."""
        self.registry.register(FateCollector(fates))

    def render(self) -> tuple[str, bytes]:
        """Return the content type and the body of the text exposition. Call it in the node's loop."""
        return CONTENT_TYPE_LATEST, generate_latest(self.registry)

    def totals(self) -> dict[str, int]:
        """Return the jobs ended, turns taken and tokens sampled since the start, up to date with each turn."""
        return {"jobs_ended": self._ended_total, "turns": self._turns_total, "tokens_sampled": self._tokens_total}

    def backend_called(self, url: str, result: str, used_s: float) -> None:
        """Count a call of a backend that took `used_s`; `result` is of a closed set (completed, failed, ...)."""
        self._calls(url, result).inc()
        self._call(url).observe(used_s)

    def sandbox_opened(self, provider: str, start: Start, waited_s: float) -> None:
        """Count a sandbox that a rollout got after it had waited `waited_s`."""
        self._sandbox(provider, start).observe(waited_s)

    # ------------------------------------------------------------ observer.Observer

    def job_moved(self, job: JobView, status: Status, detail: str) -> None:
        """See `Observer`."""
        if status == "queued":
            self._accepted(job.handler, job.priority).inc()

    def turn_done(self, job: JobView, turn: Turn) -> None:
        """See `Observer`."""
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
        """See `Observer`."""
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
            for segment in trajectory.segments:
                if segment.reason is not None:
                    self._breaks(segment.reason).inc()

    def _stages_ended(self, timing: Timing) -> None:
        """A stage the job never came to has no time."""
        for stage, queued_s, used_s in (
            ("init", timing.queued_init_s, timing.init_s),
            ("run", timing.queued_run_s, timing.run_s),
            ("eval", timing.queued_eval_s, timing.eval_s),
        ):
            if used_s > 0:
                self._queue_wait(stage).observe(queued_s)
                self._stage(stage).observe(used_s)
