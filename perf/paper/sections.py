"""The sections of the report, in the paper's order; what it did not measure comes last."""

from __future__ import annotations

from typing import Final

from perf.ablation import measure_ablation
from perf.ablation_here import measure_ablation_here
from perf.dapo import measure_dapo
from perf.features import measure_features
from perf.fleet import measure_fleets
from perf.paper.latency import (
    measure_cancellation,
    measure_faults,
    measure_node,
    measure_sandboxes,
    measure_shell,
    measure_tools,
)
from perf.paper.section import Section
from perf.race import measure_race
from perf.scaling import measure_scaling

__all__ = ["SECTIONS"]

SECTIONS: Final = (
    Section(
        name="features",
        title="Table 1: features, each proven by tests",
        paper="Table 1 compares six frameworks by three features.",
        measure=measure_features,
    ),
    Section(
        name="ablation",
        title="Table 3: what each part is worth, simulated at the paper's scale",
        paper="Table 3 leaves out load balancing, efficient bash and stale-job clean-up one at a time, on 8 H100.",
        measure=measure_ablation,
    ),
    Section(
        name="ablationhere",
        title="Table 3 on this machine: two engines, real sandboxes",
        paper="Table 3 leaves out load balancing, efficient bash and stale-job clean-up one at a time, on 8 H100.",
        measure=measure_ablation_here,
    ),
    Section(
        name="dapo",
        title="Figure 3: four ways to fill a batch of DAPO, simulated",
        paper="Figure 3 draws efficient DAPO over 3 workers, without numbers.",
        measure=measure_dapo,
    ),
    Section(
        name="scaling",
        title="Figure 5: throughput over nodes, simulated from costs measured here",
        paper="Figure 5 has 1 to 8 nodes, which do 4.7 to 5.0 times the work of one.",
        measure=measure_scaling,
    ),
    Section(
        name="fleet",
        title="Figure 5: throughput over nodes under Slurm",
        paper="Figure 5 has 1 to 8 nodes, which do 4.7 to 5.0 times the work of one.",
        measure=measure_fleets,
    ),
    Section(
        name="shell",
        title="Latency: a shell action",
        paper="Section 3.2.3 and Table 3: 0.42 s an action instead of 0.78 s with tmux.",
        measure=measure_shell,
    ),
    Section(
        name="tools",
        title="Latency: bash, IPython, RPC",
        paper="Section 3.2.3 names them; only bash has a number there.",
        measure=measure_tools,
    ),
    Section(
        name="sandboxes",
        title="Latency: starting a sandbox",
        paper="Not measured by the paper.",
        measure=measure_sandboxes,
    ),
    Section(
        name="node",
        title="From acceptance to delivery, and memory",
        paper="Not measured by the paper.",
        measure=measure_node,
    ),
    Section(
        name="cancellation",
        title="Cancelling a rollout",
        paper="Not measured by the paper.",
        measure=measure_cancellation,
    ),
    Section(
        name="faults",
        title="Loss under faults",
        paper="Not measured by the paper.",
        measure=measure_faults,
    ),
    Section(
        name="race",
        title="A fair race",
        paper="Not measured by the paper.",
        measure=measure_race,
    ),
)
