"""`prorl-trio slurm`: start and stop a fleet of nodes on Slurm."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
import trio

from prorl_ipc.clock import RunningClock
from prorl_launch.slurm import queue
from prorl_launch.slurm.engine_port import DEFAULT_PORT, PORT_VARIABLE, EnginePort, find_ports, take_port, tell_port
from prorl_launch.slurm.fleet_folder import (
    find_local_folder,
    open_fleet_folder,
    read_job,
    remove_ended,
    sole_up,
    write_job,
)
from prorl_launch.slurm.leash import run_leashed
from prorl_launch.slurm.node_file import (
    MachineFacts,
    address_of_machine,
    check_secrets,
    head_config,
    node_config,
    read_config,
)
from prorl_launch.slurm.pulse import JobRun, Pulse, PulseRules, with_times
from prorl_launch.slurm.script import EnginePlan, FleetPlan, batch_script, sbatch_groups
from prorl_trio.client.terminal import say, say_json
from prorl_trio.config import load_head_config
from prorl_trio.config.secrets import TOKEN_VARIABLE
from prorl_trio.rendezvous.report import look_at_fleet
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


_POLL_S = 1.0
_BEGIN_S = 10.0
"""Maximum seconds that `up` waits for the log of a running job."""
_LOOK_S = 0.3
_TAIL_LINES = 5
_SCRIPT = "job.sh"
_ENGINES_BEGIN_S = 120.0
"""Maximum time in seconds between the starts of nodes and of engines, which one script starts."""
_FLEET = click.option(
    "--fleet",
    "fleet_dir",
    required=True,
    type=click.Path(path_type=Path),
    help="The fleet's folder, on a disk that all machines share.",
)
_CONFIG = click.option(
    "--config",
    "config_file",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="node.toml of every node.",
)
_HEAD_CONFIG = click.option(
    "--head-config",
    "head_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Settings of the head, as for `prorl-trio fleet --config`. Others are taken from the nodes.",
)
_LOCAL = click.option(
    "--local-dir", default="", help="Folder for sockets on each machine's own disk. Default: found automatically."
)
_PULSE = click.option(
    "--pulse-timeout-s",
    type=click.FloatRange(min=1),
    help="Stop the command if no heartbeat arrives for this many seconds.",
)

_PREFIX: Final = "SBATCH_"
_LONG: Final = {
    "A": "account",
    "C": "constraint",
    "G": "gpus",
    "J": "job-name",
    "M": "clusters",
    "W": "wait",
    "a": "array",
    "c": "cpus-per-task",
    "k": "no-kill",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "t": "time",
}
_FLAGS: Final = frozenset("hHIkOQsuvVW")
"""Short options without a value. Others may follow in the same word, as in `-HW`."""
_VARIABLES: Final = {
    "array": ("ARRAY_INX",),
    "mem": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
    "no-requeue": ("REQUEUE",),
    "requeue": ("NO_REQUEUE",),
    "time": ("TIMELIMIT",),
}
"""Environment variables whose name differs from the option that they override."""


_SIZES: Final = (
    ("processors", "--cpus-per-task", ("cpus-per-task", "cpus-per-gpu", "exclusive")),
    ("memory", "--mem", ("mem-per-node", "mem-per-cpu", "mem-per-gpu", "mem", "exclusive")),
)
"""Resources of a node, with the option for each and the combined options. Options may be shortened."""
_SHORTEST: Final = 3
"""Minimum length of a shortened option that identifies these."""


def check_options(groups: Sequence[Sequence[str]], env: Mapping[str, str]) -> None:
    """Refuse options and variables that would not give the requested fleet.

    A job with one group is submitted with its options on the command line, where they override the environment. With
    several groups, sbatch mixes up such options (seen in 22.05: the time limit of the second group applies to the
    first). Their options are therefore only in the script, which the environment overrides.

    Args:
        groups: the options of each group of the job.
        env: the environment of sbatch.

    Raises:
        ConfigError: an option, or a variable, is refused.
    """
    names = [name for group in groups for name in _names(group)]
    if "wait" in names or f"{_PREFIX}WAIT" in env:
        said = "--wait" if "wait" in names else f"{_PREFIX}WAIT"
        raise ConfigError(f"{said}: a fleet runs until it is ended; `prorl-trio slurm status` tells of it")
    if "clusters" in names or f"{_PREFIX}CLUSTERS" in env:
        said = "--clusters" if "clusters" in names else f"{_PREFIX}CLUSTERS"
        raise ConfigError(f"{said}: the other commands would ask this cluster; run them all on a machine of that one")
    if len(groups) == 1:
        return
    for name in names:
        same = name.upper().replace("-", "_")
        for variable in (f"{_PREFIX}{each}" for each in _VARIABLES.get(name, (same,))):
            if variable in env:
                raise ConfigError(
                    f"{variable} is set, and sbatch would let it overrule --{name} in a job of several groups; unset it"
                )


def _names(options: Sequence[str]) -> Iterator[str]:
    """Yield the long names of options, without their values."""
    for word in options:
        if word.startswith("--"):
            yield word[2:].partition("=")[0]
        elif word.startswith("-"):
            for letter in word[1:]:
                yield _LONG.get(letter, letter)
                if letter not in _FLAGS:
                    break  # the rest is its value


def engines_of_node(engines: Sequence[str], machines: Sequence[str], machine: str) -> list[str]:
    """Return the machines whose engines the node on `machine` uses.

    First each node gets the engine of its own machine. Each other engine goes to the node with the fewest, the first in
    case of a tie. A node left without an engine shares one: its index, modulo the number of engines, selects it.

    Args:
        engines: the machines with an engine, the same list for every node.
        machines: the machines with a node, the same list for every node.
        machine: one of `machines`.
    """
    shares = {node: [engine for engine in engines if engine == node] for node in machines}
    for engine in engines:
        if engine not in shares:
            min(shares.values(), key=len).append(engine)
    if engines and not shares[machine]:
        return [engines[machines.index(machine) % len(engines)]]
    return shares[machine]


def unsized(options: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the resources that sbatch's options and variables do not set: processors, memory, both; or empty."""
    variables = [name.removeprefix(_PREFIX) for name in env if name.startswith(_PREFIX)]
    given = [*_names(options), *(name.lower().replace("_", "-") for name in variables)]
    words = [name for name in given if len(name) >= _SHORTEST]
    missing = [
        f"{what} ({option})"
        for what, option, names in _SIZES
        if not any(each.startswith(word) for word in words for each in names)
    ]
    return " and ".join(missing)


class _Group(click.Group):
    """A group of commands that report a `ConfigError` as a message instead of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group)
def slurm() -> None:
    """Start, watch and stop a fleet of nodes on Slurm.

    `up` submits a batch script of ordinary srun lines; `up --print` shows it. These lines execute `run`, `pulse` and
    `node`.
    """


@slurm.command(context_settings={"ignore_unknown_options": True})
@_FLEET
@_CONFIG
@click.option("--nodes", type=click.IntRange(min=1), required=True, help="Number of machines, one node each.")
@click.option("--print", "only_print", is_flag=True, help="Print the batch script without submitting it.")
@click.option(
    "--drain-s",
    type=click.IntRange(1, 65535),
    default=300,
    show_default=True,
    help="Start to drain this many seconds before the time limit.",
)
@click.option("--pulse-timeout-s", type=click.FloatRange(min=1), default=60.0, show_default=True, help="As in `run`.")
@_HEAD_CONFIG
@_LOCAL
@click.option("--engine", "engine_command", default="", help="Command line that starts an engine on each machine.")
@click.option(
    "--engine-port",
    type=click.IntRange(1, 65535),
    help=f"Where it serves; else a free one if the command has ${PORT_VARIABLE}, or {DEFAULT_PORT}.",
)
@click.option(
    "--engine-nodes",
    type=click.IntRange(min=0),
    default=0,
    help="Number of machines for engines only; 0: engines share the nodes' machines.",
)
@click.option(
    "--engine-sbatch", multiple=True, metavar="OPTION", help="Extra sbatch option for engine machines. Repeatable."
)
@click.argument("sbatch", nargs=-1, type=click.UNPROCESSED, metavar="[OPTION OF SBATCH]...")
def up(
    fleet_dir: Path,
    config_file: Path,
    head_file: Path | None,
    only_print: bool,
    sbatch: tuple[str, ...],
    engine_command: str,
    engine_port: int | None,
    engine_nodes: int,
    engine_sbatch: tuple[str, ...],
    **options: Any,
) -> None:
    """Submit a fleet.

    All other options are passed to sbatch: --partition, --account, --time, --gres and so on.
    """
    if (engine_nodes or engine_sbatch) and not (engine_command and engine_nodes):
        raise ConfigError(
            "--engine-nodes and --engine-sbatch are of engines on machines of their own: give --engine, too"
        )
    check_secrets(read_config(config_file), os.environ)
    port = engine_port or (0 if PORT_VARIABLE in engine_command else DEFAULT_PORT)
    engine = EnginePlan(command=engine_command, port=port, machines=engine_nodes, sbatch=engine_sbatch)
    folder = Path(os.path.abspath(fleet_dir))
    if head_file is not None:
        load_head_config(head_file)
    plan = FleetPlan(
        fleet_dir=str(folder),
        config_file=os.path.abspath(config_file),
        head_file=os.path.abspath(head_file) if head_file is not None else "",
        program=_program(),
        sbatch=sbatch,
        engine=engine if engine_command else None,
        **options,
    )
    check_options(sbatch_groups(plan), os.environ)
    if lacks := unsized(sbatch, os.environ):
        say(
            f"WARNING: sbatch is not asked for {lacks}, and many clusters give little then: one CPU a machine", err=True
        )
    script = batch_script(plan)
    if only_print:
        click.echo(script, nl=False)
        return
    files = open_fleet_folder(folder)
    with sole_up(folder):
        if before := _living(folder, files / _SCRIPT):
            raise ConfigError(f"job {before} is the fleet in {folder} already; `prorl-trio slurm down` ends it")
        remove_ended(folder, queue.live)
        (files / _SCRIPT).write_text(script, encoding="utf-8")
        job_id = _submit(files / _SCRIPT, sbatch_groups(plan))
        if not job_id:  # --test-only
            return
        write_job(folder, job_id)
    say(f"job {job_id}; its script is {files / _SCRIPT}, its log {files / job_id}.log")
    if "output" not in _names(sbatch):
        _check_begun(job_id, files / f"{job_id}.log")


@slurm.command()
@_FLEET
def status(fleet_dir: Path) -> None:
    """Print the job, the head and the nodes of a fleet as JSON."""
    job_id = _job_of(fleet_dir)
    jobs = queue.find_jobs([job_id])
    found = look_at_fleet(fleet_dir)
    say_json({"job_id": job_id, "job": jobs[0] if jobs else None, **msgspec.structs.asdict(found)})


@slurm.command()
@_FLEET
def drain(fleet_dir: Path) -> None:
    """Drain the nodes: they accept no new jobs, finish their running jobs, and stop. Returns at once.

    They have until the end of their allocation. `down` stops them earlier.
    """
    job_id = _job_of(fleet_dir)
    jobs = queue.find_jobs([job_id])
    if not jobs or jobs[0].state == "PENDING":
        state = "waits for machines; `prorl-trio slurm down` takes it back" if jobs else "has ended"
        raise ConfigError(f"there is nothing to drain: job {job_id} {state}")
    queue.drain(job_id)


@slurm.command()
@_FLEET
@click.option(
    "--drain-s", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Drain for this many seconds first."
)
@click.option(
    "--timeout-s", type=click.FloatRange(min=1), default=120.0, show_default=True, help="Longest wait in seconds."
)
def down(fleet_dir: Path, drain_s: float, timeout_s: float) -> None:
    """Stop a fleet, wait until its job is gone, and remove the entries of killed nodes."""
    job_id = _job_of(fleet_dir)
    drained = bool(drain_s) and _until_gone(job_id, drain_s, queue.drain)
    if not drained and not _until_gone(job_id, timeout_s, queue.cancel):
        raise ConfigError(f"job {job_id} has not ended within {timeout_s:g} s; see `squeue -j {job_id}`")
    remove_ended(fleet_dir, queue.live)


@slurm.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_LOCAL
@_PULSE
@click.option(
    "--grace-s", type=click.FloatRange(0, 3600), default=3.0, show_default=True, help="Seconds from SIGTERM to SIGKILL."
)
@click.option(
    "--ignore-term", is_flag=True, help="Do not forward SIGTERM, for programs that other tasks need during a drain."
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def run(local_dir: str, command: tuple[str, ...], **rules: Any) -> None:
    """Run a command whose processes cannot outlive this task.

    SIGTERM is forwarded. However this task ends, the command's whole process tree is stopped with it. Its shared memory
    and its TMPDIR, a private folder on a local disk, are removed. The exit code is the command's.

    Pass srun --task-epilog with the path of `prorl-trio-sweep`, which is next to this program. It removes the remains
    when Slurm kills all processes of the task at once. It finds the folder of --local-dir by PRORL_LOCAL_DIR.
    """
    folder = find_local_folder(local_dir)
    sys.exit(trio.run(lambda: run_leashed(command, local_folder=folder, **rules), clock=RunningClock()))


@slurm.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--folder", required=True, type=click.Path(path_type=Path), help="Folder on the shared disk, for small files."
)
@click.option("--name", default="tasks", show_default=True, help="Machines of the step.")
@click.option("--job", "job_id", help="Job whose machines are used. Default: SLURM_JOB_ID.")
@click.option("--tasks", required=True, type=click.IntRange(min=1), help="Tasks of srun.")
@click.option(
    "--drain-file", type=click.Path(path_type=Path), help="When this file appears, the tasks receive SIGTERM once."
)
@click.option("--again-after-s", type=click.FloatRange(min=0), help="Restart srun this many seconds after it ends.")
@click.option(
    "--interval-s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two heartbeats.",
)
@click.option(
    "--query-s",
    type=click.FloatRange(min=1),
    default=10.0,
    show_default=True,
    help="Seconds between two queries of Slurm.",
)
@click.option(
    "--controller-timeout-s",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    help="Give up when slurmctld does not answer for this many seconds.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def pulse(
    folder: Path,
    name: str,
    job_id: str | None,
    tasks: int,
    drain_file: Path | None,
    again_after_s: float | None,
    command: tuple[str, ...],
    **rules: float,
) -> None:
    """Run srun, and send a heartbeat to all its tasks every second while the job runs.

    Tasks in `prorl-trio slurm run --pulse-timeout-s` stop when the heartbeats cease.
    """
    # SIGTERM reaches all processes of a job at once, and draining tasks need their pulse until they have ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job_run = JobRun(job_id or _of_slurm("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    ended = folder / f"ended-{name}-{job_run.job_id}-{job_run.restarts}"
    beats = Pulse(job_run, PulseRules(**rules), ended=ended, tasks=tasks, drain=drain_file)

    async def keep() -> int:
        env = await with_times(job_run.job_id, os.environ)
        return await beats.keep(command, env, again_after_s=again_after_s)

    sys.exit(trio.run(keep, clock=RunningClock()))


@slurm.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--folder", required=True, type=click.Path(path_type=Path), help="File in which the nodes find its port.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Port; 0 takes any free one.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def engine(folder: Path, port: int, command: tuple[str, ...]) -> None:
    """Replace this process by an engine at the port in PRORL_ENGINE_PORT, which is reserved on this machine."""
    machine = _of_slurm("SLURMD_NODENAME")
    try:
        taken, holder = take_port(port)
    except ConfigError as error:
        tell_port(folder, machine, EnginePort(problem=str(error)))
        raise
    holder.set_inheritable(True)  # held while the engine runs
    tell_port(folder, machine, EnginePort(port=taken))
    os.execvpe(command[0], command, {**os.environ, PORT_VARIABLE: str(taken)})


@slurm.command()
@_FLEET
@_CONFIG
@click.option("--engines", default="", metavar="MACHINES", help="Comma-separated machines with an engine.")
@click.option("--machines", default="", metavar="MACHINES", help="Comma-separated machines with a node.")
@click.option("--engine-ports", type=click.Path(path_type=Path), help="Folder in which engines write their ports.")
@click.option(
    "--drain-s", type=click.FloatRange(min=0), help="Drain for this many seconds if Slurm reports no end of the job."
)
def node(
    fleet_dir: Path, config_file: Path, engines: str, machines: str, engine_ports: Path | None, drain_s: float | None
) -> None:
    """Replace this process by the node of this task's machine."""
    shared = (
        [] if not engines else engines_of_node(engines.split(","), machines.split(","), _of_slurm("SLURMD_NODENAME"))
    )
    facts = MachineFacts(
        fleet_dir=str(fleet_dir),
        address=address_of_machine(socket.gethostname()),
        folder=_of_slurm("TMPDIR"),
        engines=_urls(engine_ports, shared) if engine_ports else [],
        drain_s=drain_s,
    )
    common = read_config(config_file)
    config = node_config(common, facts, os.environ)
    path = Path(facts.folder) / "node.toml"
    path.write_bytes(msgspec.toml.encode(config))
    if not check_secrets(common, os.environ):
        os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(32))
    os.execv(sys.executable, [sys.executable, "-m", "prorl_trio.cli", "serve", "--config", str(path)])


@slurm.command()
@_FLEET
@_CONFIG
@_HEAD_CONFIG
def head(fleet_dir: Path, config_file: Path, head_file: Path | None) -> None:
    """Replace this process by the head of the fleet, on this task's machine."""
    facts = MachineFacts(
        fleet_dir=str(fleet_dir), address=address_of_machine(socket.gethostname()), folder=_of_slurm("TMPDIR")
    )
    common = read_config(config_file)
    tables = head_config(common, {} if head_file is None else read_config(head_file), facts)
    path = Path(facts.folder) / "fleet.toml"
    path.write_bytes(msgspec.toml.encode(tables))
    if not check_secrets(tables, os.environ):
        os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(32))
    os.execv(sys.executable, [sys.executable, "-m", "prorl_trio.cli", "fleet", "--config", str(path)])


def _living(folder: Path, script: Path) -> str:
    """Return the job of the fleet in this folder, or an empty string; record an unrecorded one."""
    before = read_job(folder)
    if before and queue.live([before]):
        return before
    if unnoted := queue.submitted_as(script):
        write_job(folder, unnoted)
    return unnoted


def _submit(script: Path, groups: list[list[str]]) -> str:
    """Submit the script. Return the job's id, or an empty string with `--test-only`, whose output is printed."""
    try:
        job_id, said = queue.submit(script, groups)
    except queue.SlurmFailed:
        with suppress(queue.SlurmFailed):  # Slurm does not answer now; the next `up` checks again
            if job_id := queue.submitted_as(script):
                return job_id
        raise
    if not job_id:
        say(said)
    return job_id


def _check_begun(job_id: str, log: Path) -> None:
    """Return once the job waits for machines, or has begun and its log exists. Blocks for at most `_BEGIN_S`.

    Raises:
        ConfigError: it has already ended; with its log, and further places to check.
    """
    shared = f"is {log.parent} on a disk that all machines share? A folder below /tmp usually is not"
    deadline, has_begun = time.monotonic() + _BEGIN_S, False
    while time.monotonic() < deadline:
        try:
            jobs = queue.find_jobs([job_id])
        except queue.SlurmFailed:
            return
        if not jobs:
            end = log.read_text(errors="replace").strip().splitlines()[-_TAIL_LINES:] if log.exists() else []
            raise ConfigError(f"job {job_id} has ended at once: {chr(10).join(end) or f'it has left no log; {shared}'}")
        if jobs[0].state == "PENDING" or has_begun:
            return
        has_begun = log.exists()  # a script that fails at once is gone by the next poll
        time.sleep(_LOOK_S)  # a command without a loop; Slurm sends no notifications
    say(f"WARNING: job {job_id} runs, and its log has not appeared; {shared}", err=True)


def _job_of(fleet_dir: Path) -> str:
    job_id = read_job(fleet_dir)
    if not job_id:
        raise ConfigError(f"no fleet was started in {fleet_dir} by `prorl-trio slurm up`")
    return job_id


def _urls(ports: Path, machines: list[str]) -> list[str]:
    """Return the addresses of the engines on these machines. Print the machines without a port."""
    found = find_ports(ports, machines, _ENGINES_BEGIN_S)
    problems = [told.problem for told in found.values() if told.problem]
    if problems and len(problems) == len(found):
        raise ConfigError(f"there is no engine for this node: {'; '.join(problems)}")
    for problem in problems:
        say(f"one engine less: {problem}", err=True)
    return [f"http://{machine}:{found[machine].port}" for machine in machines if not found[machine].problem]


def _of_slurm(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(f"{name} is not set: this runs in a job of Slurm's, as `prorl-trio slurm up --print` shows")
    return value


def _program() -> str:
    beside = Path(sys.executable).with_name("prorl-trio")
    found = str(beside) if beside.exists() else shutil.which("prorl-trio")
    if found is None:
        raise ConfigError(f"there is no prorl-trio beside {sys.executable}, nor in PATH")
    return found


def _until_gone(job_id: str, timeout_s: float, end: Callable[[str], None]) -> bool:
    """Stop the job, and return whether it ended in time.

    Unanswered requests to slurmctld are retried until then. A pending job has nothing to drain.
    """
    deadline = time.monotonic() + timeout_s
    asked = False
    while True:
        try:
            jobs = queue.find_jobs([job_id])
            if not jobs:
                return True
            if end is queue.drain and jobs[0].state == "PENDING":
                return False
            if not asked:
                end(job_id)
                asked = True
        except queue.SlurmFailed as error:
            say(f"{error}; trying again", err=True)
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)  # a command without a loop; Slurm sends no notifications
