"""The live state of a fleet, made of those of its nodes: sums, and lists one after the other. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LARGEST: Final = frozenset({"uptime_s", "p50_ms", "p99_ms", "max_ms", "age_s"})
"""Figures of which the fleet's is the largest of its nodes'."""
PARTS: Final = ("pipeline", "backends", "sandboxes", "totals", "loop", "sessions")


def merge_statistics(name: str, reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return one report with the parts that `prorl-trio top` shows, and each node's own under `nodes`."""
    nodes = list(reports.values())
    merged: dict[str, Any] = {
        "node_id": f"{name}: {len(nodes)} nodes",
        "draining": bool(nodes) and all(report.get("draining") for report in nodes),
        "uptime_s": max((report.get("uptime_s", 0.0) for report in nodes), default=0.0),
        "jobs": [{**job, "node_id": node_id} for node_id, report in reports.items() for job in report.get("jobs", [])],
    }
    for part in PARTS:
        found = [report[part] for report in nodes if isinstance(report.get(part), dict)]
        if found:
            merged[part] = _merge(part, found)
    models = [report["model"] for report in nodes if "model" in report]
    if models:
        merged["model"] = models[0]
    merged["nodes"] = dict(reports)
    return merged


def _merge(name: str, values: Sequence[Any]) -> Any:
    """Return one value for those that several nodes give under a name."""
    first = values[0]
    if all(isinstance(value, bool) for value in values):
        return any(values)
    if all(isinstance(value, int | float) for value in values):
        return max(values) if name in LARGEST else sum(values)
    if all(isinstance(value, dict) for value in values):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _merge(key, [value[key] for value in values if key in value]) for key in keys}
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    return first
