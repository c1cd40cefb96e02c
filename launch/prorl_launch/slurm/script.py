"""The batch script of a fleet, generated from a plan. `prorl-trio slurm up` submits it, and `--print` shows it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

import msgspec

from prorl_launch.slurm.sweep import LOCAL_DIR_VARIABLE

_HEAD: Final = """\
#!/bin/bash
{options}
# A fleet of {nodes} prorl-trio nodes. Submit it with `sbatch`, or change it first; `prorl-trio slurm up` made it.

prorl={program}
{local}
# What would filter what Slurm's commands see.
unset "${{!SQUEUE_@}}" "${{!SCANCEL_@}}"
# Before the time limit (--signal) and at `prorl-trio slurm drain` this script gets SIGTERM. Then it makes this file, by
# which the nodes take no more jobs and let theirs end, those that start later, too. Another SIGTERM changes nothing:
# the warning before the limit must not cut a drain short.
drain={files}/drain-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}
trap ': >"$drain"' TERM
"""

_ENGINES: Final = """
# Which machines have a node, and which an engine.
node_machines=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
engine_machines=$(scontrol show hostnames "{machines}" | paste -sd,)
# In this folder each engine tells its port.
ports={files}/engines-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}
mkdir -p -m 700 "$ports"

{cpus}
# An engine a machine. It does not hear SIGTERM, for nodes that drain need it.
"$prorl" slurm pulse --name=engines --folder={files} --job="{job}" --tasks={tasks} -- \\
    srun {group}--nodes={tasks} --ntasks={tasks} \\
    {srun} \\
    "$prorl" slurm run --ignore-term {leash} -- \\
    "$prorl" slurm engine --folder="$ports" --port={port} -- \\
    bash -c {command} &
engines=$!
"""

_FLEET_HEAD: Final = """
{cpus}
# The head of the fleet: a task on one of the nodes' machines, which is started again wherever it ends. It does not hear
# SIGTERM, for it takes what the nodes' jobs come to while these drain.
"$prorl" slurm pulse --name=head --folder={files} --tasks=1 --again-after-s={again_s:g} -- \\
    srun {group}--nodes=1 --ntasks=1 \\
    {srun} \\
    "$prorl" slurm run --ignore-term {leash} -- \\
    "$prorl" slurm head {head} &
head=$!
"""

_NODES: Final = """
# A task a machine. They do not need each other: where one fails, the rest go on. A task ends what it runs, and removes
# its files, when the pulse stops: srun or this script was killed, its machine is cut off, or Slurm has started the job
# elsewhere. Where Slurm kills all processes of a task at once, its epilog removes the files.
"$prorl" slurm pulse --name=nodes --folder={files} --tasks={tasks} --drain-file="$drain" -- \\
    srun {group}--nodes={tasks} --ntasks={tasks} \\
    {srun} \\
    "$prorl" slurm run {leash} -- \\
    "$prorl" slurm node {node} &
nodes=$!
"""

_TAIL: Final = """
# `wait` returns at each signal as well.
while kill -0 "$nodes" 2>/dev/null; do wait "$nodes"; done
wait "$nodes"
code=$?
kill -USR1 "$head" 2>/dev/null && wait "$head"
{then}rm -f "$drain"
exit $code
"""

_THEN_ENGINES: Final = """\
kill -USR1 "$engines" 2>/dev/null && wait "$engines"
rm -rf "$ports"
"""

_CPUS: Final = """\
# Since Slurm 22.05 srun does not inherit the job's --cpus-per-task. (It inherits --cpus-per-gpu, --threads-per-core,
# --hint, --mem and --gres.)
cpus={value}
if [ -n "$cpus" ]; then export SRUN_CPUS_PER_TASK="$cpus"; else unset SRUN_CPUS_PER_TASK; fi"""

_SRUN: Final = (
    '--ntasks-per-node=1 --export=ALL --overlap --kill-on-bad-exit=0 --no-kill --wait=0 --task-epilog="$prorl-sweep"'
)
"""`--export=ALL`: an `--export` option of sbatch would also apply to srun, and hide our variables from the tasks."""
_HEAD_AGAIN_S: Final = 2.0
_JOB_CPUS: Final = "${SLURM_CPUS_PER_TASK-}"
_EVERY_MACHINE: Final = '"$SLURM_JOB_NUM_NODES"'


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that a fleet starts, one per machine.

    Attributes:
        command: a bash command. It serves at the port in `PRORL_ENGINE_PORT`, at all addresses of its machine.
        port: the port on all machines; 0: a free port on each.
        machines: number of separate machines for engines, as a second group of a heterogeneous job; 0: they share the
            nodes' machines.
        sbatch: sbatch options for these machines.
    """

    command: str
    port: int = 0
    machines: int = 0
    sbatch: Sequence[str] = ()


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The size, locations and rules of a fleet.

    Attributes:
        nodes: number of machines, with one node each.
        fleet_dir: the folder of the fleet on a shared disk, absolute.
        config_file: node.toml of every node, absolute, on a shared disk.
        program: `prorl-trio`, absolute, at the same path on every machine, with `prorl-trio-sweep` next to it.
        head_file: settings of the head, absolute, on a shared disk; empty: the nodes' settings.
        local_dir: a folder on each machine's own disk; empty: found there.
        drain_s: seconds between the warning before the time limit and the limit. It is also the drain time of nodes
            that do not know the end of their allocation.
        pulse_timeout_s: seconds without a pulse after which a task stops its command.
        sbatch: sbatch options, in its own syntax. They come last, and override ours.
        engine: None: engines run elsewhere, and node.toml has their addresses.
    """

    nodes: int
    fleet_dir: str
    config_file: str
    program: str
    head_file: str = ""
    local_dir: str = ""
    drain_s: int = 300
    pulse_timeout_s: float = 60.0
    sbatch: Sequence[str] = ()
    engine: EnginePlan | None = None


def batch_script(plan: FleetPlan) -> str:
    """Return the text of the script."""
    lines = "\n#SBATCH hetjob\n".join("\n".join(sbatch_lines(group)) for group in sbatch_groups(plan))
    local = f"export {LOCAL_DIR_VARIABLE}={shlex.quote(plan.local_dir)}\n" if plan.local_dir else ""
    head = _HEAD.format(
        options=lines, nodes=plan.nodes, program=shlex.quote(plan.program), local=local, files=_files(plan)
    )
    return (
        head
        + _engines(plan)
        + _fleet_head(plan)
        + _nodes(plan)
        + _TAIL.format(then=_THEN_ENGINES if plan.engine else "")
    )


def sbatch_groups(plan: FleetPlan) -> list[list[str]]:
    """Return the sbatch options of the nodes' group, and of the engines' group if they have separate machines.

    The user's options come last, and override ours.
    """
    ours = [
        "--job-name=prorl-trio",
        f"--nodes={plan.nodes}",
        "--ntasks-per-node=1",
        "--requeue",
        "--no-kill",
        f"--signal=B:TERM@{plan.drain_s}",
        f"--output={plan.fleet_dir.replace('%', '%%')}/slurm/%j.log",
        "--open-mode=append",
    ]
    groups = [[*ours, *plan.sbatch]]
    if plan.engine and plan.engine.machines:
        theirs = [f"--nodes={plan.engine.machines}", "--ntasks-per-node=1", "--no-kill"]
        groups.append([*theirs, *plan.engine.sbatch])
    return groups


def _fleet_head(plan: FleetPlan) -> str:
    own = [f"--head-config={plan.head_file}"] if plan.head_file else []
    return _FLEET_HEAD.format(
        files=_files(plan),
        cpus=_CPUS.format(value=_JOB_CPUS),
        again_s=_HEAD_AGAIN_S,
        group=_group_of_nodes(plan),
        srun=_SRUN,
        leash=_leash(plan),
        head=shlex.join([f"--fleet={plan.fleet_dir}", f"--config={plan.config_file}", *own]),
    )


def _group_of_nodes(plan: FleetPlan) -> str:
    return "--het-group=0 " if plan.engine and plan.engine.machines else ""


def _nodes(plan: FleetPlan) -> str:
    node = shlex.join([f"--fleet={plan.fleet_dir}", f"--config={plan.config_file}", f"--drain-s={plan.drain_s}"])
    if plan.engine:
        node += ' --engines="$engine_machines" --machines="$node_machines" --engine-ports="$ports"'
    return _NODES.format(
        files=_files(plan),
        tasks=_EVERY_MACHINE,
        group=_group_of_nodes(plan),
        srun=_SRUN,
        leash=_leash(plan),
        node=node,
    )


def _engines(plan: FleetPlan) -> str:
    if not plan.engine:
        return ""
    apart = plan.engine.machines
    own_cpus = _cpus_per_task(plan.engine.sbatch)
    return _ENGINES.format(
        machines="$SLURM_JOB_NODELIST_HET_GROUP_1" if apart else "$SLURM_JOB_NODELIST",
        job="$SLURM_JOB_ID_HET_GROUP_1" if apart else "$SLURM_JOB_ID",
        files=_files(plan),
        cpus=_CPUS.format(value=f"${{SLURM_CPUS_PER_TASK_HET_GROUP_1:-{own_cpus}}}" if apart else _JOB_CPUS),
        tasks=apart or _EVERY_MACHINE,
        group="--het-group=1 " if apart else "",
        srun=_SRUN,
        leash=_leash(plan),
        command=shlex.quote(plan.engine.command),
        port=plan.engine.port,
    )


def _cpus_per_task(options: Sequence[str]) -> str:
    """Return the number of processors in sbatch options; empty if they do not set it.

    Slurm may omit the variable for the second group of a heterogeneous job.
    """
    found = ""
    words = iter(options)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "-c" or (len(name) > len("--cpus-per-") and "--cpus-per-task".startswith(name)):
            found = value if equals else next(words, "")
        elif word.startswith("-c") and word[2:].isdigit():
            found = word[2:]
    return found if found.isdigit() else ""


def _files(plan: FleetPlan) -> str:
    return shlex.quote(f"{plan.fleet_dir}/slurm")


def _leash(plan: FleetPlan) -> str:
    return f"--pulse-timeout-s={plan.pulse_timeout_s:g}"


def sbatch_lines(options: Sequence[str]) -> list[str]:
    """Return a line of the script for each option, including a value that follows it."""
    lines: list[list[str]] = []
    for word in options:
        if word.startswith("-") or not lines:
            lines.append([])
        lines[-1].append(word)
    return [f"#SBATCH {shlex.join(words)}" for words in lines]
