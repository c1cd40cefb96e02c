"""The batch script of a fleet, made of a plan: what `prorl-trio slurm up` submits, and `--print` shows."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

import msgspec

__all__ = ["FleetPlan", "batch_script", "sbatch_lines"]

_HEAD: Final = """\
#!/bin/bash
{options}
# A fleet of {nodes} prorl-trio nodes. Submit it with `sbatch`, or change it first; `prorl-trio slurm up` made it.

prorl={program}

# Before the time limit (--signal) and at `prorl-trio slurm drain` the nodes get SIGTERM: they take no more jobs and let
# theirs end. It goes to the steps, for srun itself would answer SIGTERM by killing its tasks at once.
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM
"""

_NODES: Final = """
# A task a machine. They do not need each other: where one fails, the rest go on. A task ends what it runs, and removes
# its files, when the pulse stops: srun or this script was killed, its machine is cut off, or Slurm has started the job
# elsewhere.
"$prorl" slurm pulse --folder={files} --tasks={nodes} -- \\
    srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --overlap --kill-on-bad-exit=0 --no-kill --wait=0 \\
    "$prorl" slurm run {leash} -- \\
    "$prorl" slurm node {node} &
nodes=$!
"""

_TAIL: Final = """
# `wait` returns at each signal as well.
while kill -0 "$nodes" 2>/dev/null; do wait "$nodes"; done
wait "$nodes"
code=$?
exit $code
"""


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The size, places and rules of a fleet.

    Attributes:
        nodes: machines, with one node each.
        fleet_dir: the folder of the fleet on a shared disk, absolute.
        config_file: node.toml of every node, absolute, on a shared disk.
        program: `prorl-trio`, absolute, at the same place on every machine.
        local_dir: folder on each machine's own disk; empty: found there.
        drain_s: time between the warning before the time limit and the limit, in seconds.
        pulse_timeout_s: time without a pulse after which a task ends what it runs.
        sbatch: options of sbatch's, in their own words; they come last, and overrule ours.
    """

    nodes: int
    fleet_dir: str
    config_file: str
    program: str
    local_dir: str = ""
    drain_s: int = 300
    pulse_timeout_s: float = 60.0
    sbatch: Sequence[str] = ()


def batch_script(plan: FleetPlan) -> str:
    """Return the text of the script."""
    ours = [
        "--job-name=prorl-trio",
        f"--nodes={plan.nodes}",
        "--ntasks-per-node=1",
        "--requeue",
        "--no-kill",
        f"--signal=B:TERM@{plan.drain_s}",
        f"--output={plan.fleet_dir}/slurm/%j.log",
        "--open-mode=append",
    ]
    leash = [f"--pulse-timeout-s={plan.pulse_timeout_s:g}", *([f"--local-dir={plan.local_dir}"] * bool(plan.local_dir))]
    head = _HEAD.format(
        options="\n".join(sbatch_lines([*ours, *plan.sbatch])), nodes=plan.nodes, program=shlex.quote(plan.program)
    )
    nodes = _NODES.format(
        files=shlex.quote(f"{plan.fleet_dir}/slurm"),
        nodes='"$SLURM_JOB_NUM_NODES"',
        leash=shlex.join(leash),
        node=shlex.join([f"--fleet={plan.fleet_dir}", f"--config={plan.config_file}"]),
    )
    return head + nodes + _TAIL


def sbatch_lines(options: Sequence[str]) -> list[str]:
    """Return a line of the script for each option, together with the value that follows it."""
    lines: list[list[str]] = []
    for word in options:
        if word.startswith("-") or not lines:
            lines.append([])
        lines[-1].append(word)
    return [f"#SBATCH {shlex.join(words)}" for words in lines]
