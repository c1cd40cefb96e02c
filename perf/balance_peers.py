"""The part of `perf.balance` on vllm-router: the same batch on engines over HTTP, placed by each of its policies."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import msgspec
from rich.table import Table

from perf.balance_served import BACKENDS, OURS, ROUTED, SPEED_UP, WORK, WORKERS, Placement, ServedRun, run_served
from perf.harness import Report, tell
from perf.peers.environments import PEERS, PeerUnavailable

__all__ = ["measure_router"]

QUICK_INSTANCES: Final = 16
QUICK_SEEDS, SEEDS = 1, 2
QUICK_PLACEMENTS: Final = (OURS[0], ROUTED[0])
TITLE: Final = f"{BACKENDS} engines over HTTP, {WORKERS} rollouts at once"
DEFAULT_POLICY: Final = "cache_aware"


async def measure_router(*, quick: bool) -> Report:
    """Metrics, a table and notes; only a note where vllm-router is not installed."""
    placements = QUICK_PLACEMENTS if quick else (*OURS, *ROUTED)
    work = msgspec.structs.replace(WORK, instances=QUICK_INSTANCES) if quick else WORK
    runs: defaultdict[Placement, list[ServedRun]] = defaultdict(list)
    try:
        for seed in range(QUICK_SEEDS if quick else SEEDS):
            for placement in placements if seed % 2 == 0 else reversed(placements):
                tell(f"over HTTP, seed {seed}: {placement.name}{' by vllm-router' if placement.policy else ''}")
                runs[placement].append(await run_served(placement, seed, work=work))
    except PeerUnavailable as exc:
        return Report(title=TITLE, series=[], notes=[f"left out: {exc}"])
    return router_report({placement: runs[placement] for placement in placements})


def router_report(runs: dict[Placement, list[ServedRun]]) -> Report:
    """Report on the runs of each placement by seed; ours comes first."""
    ours = runs[OURS[0]]
    gains = {placement: _mean_gain(ours, others) for placement, others in runs.items()}
    routed = {placement.name: gain for placement, gain in gains.items() if placement.policy}
    best = min(routed, key=routed.__getitem__)
    metrics = {"balance.http.least_over_router_best": routed[best]}
    if DEFAULT_POLICY in routed:
        metrics["balance.http.least_over_router_default"] = routed[DEFAULT_POLICY]
    details = {}
    table = Table(title=f"{TITLE}, mean over seeds")
    table.add_column("placed by")
    for heading in ("makespan", "busiest/mean tokens", "prefix hits", "least_in_flight is faster by"):
        table.add_column(heading, justify="right")
    for placement, placed in runs.items():
        makespan_s, hits = _mean([run.makespan_s for run in placed]), _mean([run.prefix_hit_rate for run in placed])
        busiest = _mean([run.busiest_over_mean for run in placed])
        owner = "vllm-router: " if placement.policy else ""
        table.add_row(
            owner + placement.name, f"{makespan_s:.0f} s", f"{busiest:.2f}", f"{hits:.1%}", f"{gains[placement]:.2f} x"
        )
        prefix = f"balance.http.{'router.' if placement.policy else ''}{placement.name}"
        details[f"{prefix}.makespan_s"] = makespan_s
        details[f"{prefix}.busiest_over_mean"] = busiest
        details[f"{prefix}.prefix_hit_rate"] = hits
    return Report(
        title=TITLE,
        series=[],
        more_metrics={name: round(value, 3) for name, value in metrics.items()},
        detail_metrics={name: round(value, 3) for name, value in details.items()},
        more_tables=[table],
        notes=[
            f"Over HTTP the engines run {SPEED_UP} times as fast, and makespans are told as if they did not: what HTTP "
            "and a busy machine cost is in them, many times over, and alike for all. Differences of a few percent say "
            "nothing.",
            f"{PEERS['vllm-router'].title} runs with its defaults but for the policy; calls name their rollout in "
            f"X-Session-ID. Of what was run its best is {best}. sticky_least_loaded is told of a rollout's end (POST "
            "/finish_session), sticky_untold is the same without. It knows of a rollout what it is told; the pool "
            "knows it anyway, and has no process and no hop in between.",
        ],
    )


def _mean_gain(ours: list[ServedRun], others: list[ServedRun]) -> float:
    """Throughput of ours over theirs, the mean over seeds."""
    pairs = zip(ours, others, strict=True)
    return _mean([mine.rollouts_per_s / other.rollouts_per_s for mine, other in pairs])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
