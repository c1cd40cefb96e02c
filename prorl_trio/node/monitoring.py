"""The monitoring of a node: metrics, stalls of the loop, the log of its jobs, tracing spans."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from prorl_trio.observe.logs import JobLog
from prorl_trio.observe.metrics import Metrics
from prorl_trio.observe.stall import LoopStalls, open_loop_stalls
from prorl_trio.observe.telemetry import open_telemetry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from prorl_trio.config import HeadConfig, MonitoringConfig, NodeConfig
    from prorl_trio.node.node import Node
    from prorl_trio.pipeline.observer import Observer
    from prorl_trio.sessions.session_table import SessionTable


class Described(Protocol):
    """A node or a head, as its monitoring sees it."""

    draining: bool

    @property
    def uptime_s(self) -> float:
        """Return the seconds since the node or head was opened."""
        ...

    def part(self, name: str) -> object:
        """Return one part of the statistics."""
        ...

    def describe(self, name: str, read: Callable[[], object]) -> None:
        """Add a part to the statistics."""


class Monitoring:
    """The instruments of one node. Pass `observers` to `open_node`, then call `watch` with the node."""

    def __init__(self, config: NodeConfig | HeadConfig, stalls: LoopStalls) -> None:
        self.stalls = stalls
        self.metrics = Metrics(config.node_id, version("prorl-trio"))
        self.metrics.watch_loop(stalls)
        self.observers: list[Observer] = [JobLog(), self.metrics]

    def apply(self, config: MonitoringConfig) -> None:
        """Apply the thresholds of stall warnings and stack dumps of `config`."""
        self.stalls.warn_s = config.stall_warn_s
        self.stalls.dump_after(config.stall_dump_after_s)

    def watch(self, node: Node, sessions: SessionTable) -> None:
        """Add the figures of node and sessions to the metrics, and the figures measured here to `node.statistics()`."""
        metrics = self.metrics
        pool = partial(_part, node, "backends")
        metrics.watch(
            "stage",
            lambda: _part(node, "pipeline", "stages"),
            "A stage of the pipeline: jobs that wait for it, its workers and those at work.",
            label="stage",
        )
        metrics.watch(
            "backend",
            lambda: _by_url(pool()["backends"]),
            "An LLM backend: whether it takes rollouts (up), those it has now and had ever, what its engine reports.",
            label="backend",
        )
        metrics.watch_fates(node.fates)
        metrics.watch(
            "backends", lambda: _without_moves(pool()), "The pool of LLM backends, and its admission of completions."
        )
        metrics.watch("rollout_moves", lambda: _moves(pool()), "Rollouts moved to another backend.", label="reason")
        metrics.watch("sandbox", lambda: _part(node, "sandboxes"), "Sandboxes now, and what became of their starts.")
        metrics.watch("scorers", lambda: _part(node, "scorers"), "Processes that run reward functions.")
        metrics.watch("arena", lambda: _part(node, "arena"), "The shared memory that trajectories are recorded in.")
        if (gateways := node.gateways) is not None:
            tally = gateways.tally
            node.describe("gateway", tally.statistics)
            metrics.watch_requests(lambda: tally.results)
            metrics.watch("gateway", lambda: {"joined_total": tally.joined}, "What programs have asked.")
        self.watch_sessions(node, sessions)

    def watch_sessions(self, node: Described, sessions: SessionTable) -> None:
        """Add the figures that a node and the head of a fleet have in common: sessions, ledger, loop."""
        metrics = self.metrics
        metrics.watch("outbox", lambda: _outbox(sessions.statistics()), "What all sessions hold together.")
        ledger, cache = sessions.journal.ledger, sessions.journal.cache
        metrics.watch("ledger", lambda: _ledger(_part(node, "ledger")), "Jobs and outcomes, and what they take.")
        metrics.watch("outcome_cache", cache.statistics, "Outcomes that are in memory, also those that are on a disk.")
        metrics.watch(
            "node", lambda: {"draining": node.draining, "uptime_seconds": node.uptime_s}, "The node as a whole."
        )
        node.describe("loop", lambda: msgspec.structs.asdict(self.stalls.report()))
        node.describe("totals", metrics.totals)
        node.describe("ledger", lambda: msgspec.structs.asdict(ledger.statistics()))
        node.describe("outcome_cache", cache.statistics)
        node.describe("sessions", sessions.statistics)


@asynccontextmanager
async def open_monitoring(config: NodeConfig | HeadConfig) -> AsyncIterator[Monitoring]:
    """Measure the running loop until the block exits; yield the node's instruments.

    Raises:
        ConfigError: telemetry is configured, but not installed.
    """
    settings = config.monitoring
    with open_loop_stalls(settings.stall_warn_s, dump_after_s=settings.stall_dump_after_s) as stalls:
        monitoring = Monitoring(config, stalls)
        async with open_telemetry(config.telemetry, config.node_id) as spans:
            if spans is not None:
                monitoring.observers.append(spans)
            yield monitoring


def _part(node: Described, *path: str) -> Any:
    part: Any = node.part(path[0])
    for name in path[1:]:
        part = part[name]
    return part


def _by_url(backends: list[Any]) -> dict[str, Mapping[str, Any]]:
    return {backend.url: {"up": _is_up(backend), **msgspec.structs.asdict(backend)} for backend in backends}


def _is_up(backend: Any) -> bool:
    return backend.state == "active" and not backend.suspended


def _without_moves(pool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in pool.items() if name != "moves"}


def _moves(pool: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    return {reason: {"total": count} for reason, count in pool["moves"].items()}


def _ledger(statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics with `_total` added to the names of counters, as Prometheus expects; `full` is 0 or 1."""
    named = {f"{name}_total" if name in ("commits", "operations") else name: n for name, n in statistics.items()}
    return {**named, "full": int(bool(statistics["full"]))} if "full" in statistics else named


def _outbox(sessions: Mapping[str, Any]) -> dict[str, int]:
    """Return the sums over all sessions. Session ids must not become labels, because trainers choose them."""
    each = list(sessions.values())
    return {
        "sessions": len(each),
        "sessions_connected": sum(session["connected"] for session in each),
        "running_jobs": sum(session["running"] for session in each),
        "offered_outcomes": sum(session["last_cursor"] for session in each),
        "acknowledged_outcomes": sum(session["acked_cursor"] for session in each),
        "undelivered_outcomes": sum(session["undelivered"] for session in each),
        "undelivered_bytes": sum(session["undelivered_bytes"] for session in each),
        "memory_bytes": sum(session["memory_bytes"] for session in each),
        "undelivered_bytes_of_largest": max((session["undelivered_bytes"] for session in each), default=0),
    }
