"""Slurm ends jobs in many ways, and its daemons die in more: of what our tasks started nothing is left within 10 s.

Where the cluster tracks processes without control groups, Slurm itself leaves orphans. Where it does so with them, as
most do, it kills all processes of a task at once, those that would clear up included. Seeds choose the machine and the
moment.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

from prorl_launch.paths import checkout_dir
from prorl_launch.slurm.script import FleetPlan, batch_script
from support.quiet_clock import stretched, wait_until
from support.remains import left_after, marked, segments
from support.slurm_cluster import NODES, kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TREE = checkout_dir() / "tests/support/hostile_tree.py"
LIMIT_S = 10.0
"""From the event, or where Slurm itself must find it out first, from its verdict."""
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 120.0
PULSE_TIMEOUT_S = 5.0
REPEATS = int(os.environ.get("PRORL_SLURM_REPEATS", "1"))
TRACKINGS = ["linuxproc", "cgroup"]
BOTH = pytest.mark.parametrize("slurm", TRACKINGS, indirect=True)
BOTH_IN_SOAK = pytest.mark.parametrize(
    "slurm", ["linuxproc", pytest.param("cgroup", marks=pytest.mark.soak)], indirect=True
)


class Fleet:
    """A job in which each of four tasks runs a hostile program, submitted with our own batch script."""

    def __init__(self, slurm, seed, *, deaf=False, **changes):
        self.slurm = slurm
        self.random = random.Random(seed)
        self.mark = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="fleet-", dir=slurm.folder))
        (self.folder / "slurm").mkdir()
        local = f"/tmp/{self.mark[:8]}"
        self.places = [slurm.temporary(node) / self.mark[:8] for node in range(1, NODES + 1)]
        for place in self.places:
            place.mkdir(exist_ok=True)
        plan = FleetPlan(
            nodes=NODES,
            fleet_dir=str(self.folder),
            config_file="/dev/null",
            program=str(Path(sys.executable).with_name("prorl-trio")),
            pulse_timeout_s=stretched(PULSE_TIMEOUT_S),
            local_dir=local if slurm.separate else str(self.places[0]),
            **changes,
        )
        script = batch_script(plan)
        node = f'"$prorl" slurm node --fleet={self.folder} --config=/dev/null --drain-s={plan.drain_s}'
        assert node in script
        program = shlex.join([sys.executable, str(TREE)])
        ready = f"{self.folder}/ready-${{SLURM_RESTART_COUNT:-0}}-$SLURMD_NODENAME"  # for the shell of each task
        script = script.replace(node, f"sh -c 'exec {program} {ready}{' --deaf' * deaf}'")
        script = script.replace("slurm pulse ", "slurm pulse --query-s=1 ")
        script = script.replace("\nprorl=", f"\nexport PRORL_TEST_MARK={self.mark}\nprorl=", 1)
        self.script = self.folder / "job.sh"
        self.script.write_text(script)
        self.job = slurm.said("sbatch", "--parsable", str(self.script))

    def log(self):
        return "\n".join(path.read_text(errors="replace") for path in (self.folder / "slurm").glob("*.log"))

    def report(self):
        return f"{self.log()}\n{self.slurm.report()}"

    def ready(self):
        return list(self.folder.glob("ready-*"))

    def wait_ready(self, count=NODES):
        wait_until(lambda: len(self.ready()) >= count, f"{count} tasks run", START_TIMEOUT_S, self.report)

    def machines(self):
        """Names of the machines that the job has, as Slurm says."""
        listed = self.slurm.said("squeue", "-h", "-O", "NodeList:64", "-j", self.job)
        return self.slurm.said("scontrol", "show", "hostnames", listed).split()

    def wait_cleared(self, node, others):
        """Wait until nothing is left on one machine, while the tasks of so many others go on."""
        place = self.places[node - 1]
        wait_until(
            lambda: not list(place.glob("*prorl-*")) and len(segments(self.mark)) <= others,
            "its folder and its memory are gone",
            LIMIT_S,
            self.log,
        )
        assert len(segments(self.mark)) == others, self.log()

    def wait_gone(self):
        """Wait until Slurm has no such job any more."""
        wait_until(lambda: not self.slurm.run("squeue", "-h", "-j", self.job).stdout, "the job is gone", END_TIMEOUT_S)

    def told(self):
        """Return the last word of the program of each task that has begun."""
        return [path.read_text() for path in self.ready()]

    def pids(self, *words):
        """Pids of processes of this job with all these words in their command lines, by pid."""
        lines = self.slurm.said("ps", "-eww", "-o", "pid=,args=").splitlines()
        return [int(line.split()[0]) for line in lines if all(word in line for word in words)]

    def stepds(self):
        """Those of the head's step and of the nodes'; the batch script has one of its own."""
        return [pid for step in (0, 1) for pid in self.pids(f"slurmstepd: [{self.job}.{step}]")]

    def tasks(self):
        """Those of nodes."""
        ours = {int(line.split()[0]) for line in marked(self.mark)}
        others = {*self.pids("srun "), *self.pids("slurm head")}
        return [pid for pid in self.pids("slurm run") if pid in ours and pid not in others]

    def head_machine(self):
        """Return the number of the machine that the head's task is on."""
        ours = {int(line.split()[0]) for line in marked(self.mark)}
        pids = [pid for pid in self.pids("slurm run", "slurm head") if pid in ours and pid not in self.pids("srun ")]
        found = {node for node in range(1, NODES + 1) for pid in pids if machine_of(pid) == f"n{node}"}
        (machine,) = found
        return machine

    def assert_nothing_left(self, limit_s=LIMIT_S):
        left, took_s = left_after(self.mark, self.places, limit_s)
        assert left == [], f"after {took_s:.1f} s: {self.log()[-2000:]}"
        return took_s


@contextlib.contextmanager
def running(slurm, seed, **changes):
    """A fleet all of whose tasks run; afterwards the cluster is as it was before."""
    made = Fleet(slurm, seed, **changes)
    try:
        made.wait_ready()
        yield made
    finally:
        for node in range(1, NODES + 1):
            slurm.script("slurmd", str(node))
            if slurm.separate:
                slurm.script("link", str(node), "up")
        slurm.cancel_all()
        for folder in {made.folder, *made.places}:
            shutil.rmtree(folder)


@pytest.fixture
def fleet(slurm, request):
    with running(slurm, request.node.callspec.params["seed"]) as made:
        yield made


def machine_of(pid):
    """Return the name of the machine that a task is on."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(each.partition(b"=")[2].decode() for each in variables if each.startswith(b"SLURMD_NODENAME="))


def cancel(fleet):
    """Ask politely; tasks get the time of KillWait to drain."""
    fleet.slurm.said("scancel", fleet.job)
    fleet.wait_gone()
    assert fleet.told() == ["drained"] * NODES


def cancel_at_once(fleet):
    fleet.slurm.said("scancel", "--full", "--signal=KILL", fleet.job)


def drain(fleet):
    """Send what --signal sends before the time limit."""
    fleet.slurm.said("scancel", "--batch", "--signal=TERM", fleet.job)
    fleet.wait_gone()
    assert fleet.told() == ["drained"] * NODES


def kill_tasks(fleet):
    for pid in fleet.random.sample(fleet.tasks(), 4):
        kill(pid)


def kill_stepds(fleet):
    for pid in fleet.random.sample(found := fleet.stepds(), len(found)):
        kill(pid)


def kill_srun(fleet):
    for pid in set(fleet.pids("srun ", str(fleet.folder))) - set(fleet.pids("slurm pulse")):
        with contextlib.suppress(ProcessLookupError):  # it is two processes
            kill(pid)


def kill_pulse(fleet):
    for pid in fleet.pids("slurm pulse", str(fleet.folder)):
        kill(pid)


def kill_batch_script(fleet):
    (stepd,) = fleet.pids(f"slurmstepd: [{fleet.job}.batch]")
    kill(stepd)
    for pid in fleet.pids(f"job{int(fleet.job):05}/slurm_script"):
        kill(pid)


ENDS = [cancel, kill_tasks, kill_srun, cancel_at_once], [drain, kill_stepds, kill_pulse, kill_batch_script]
QUICK_ENDS = [cancel, kill_tasks, cancel_at_once, kill_stepds, kill_batch_script]
"""Those in which control groups make a difference."""


def cases():
    """Yield the trackings, each with what ends fleets that run at the same time on the same machines."""
    for tracking in TRACKINGS:
        for ends in ENDS if tracking == "linuxproc" else [QUICK_ENDS, *ENDS]:
            marks = [pytest.mark.soak] * (tracking == "cgroup" and ends is not QUICK_ENDS)
            name = "-".join(end.__name__ for end in ends)
            yield pytest.param(tracking, ends, id=f"{tracking}-{name}", marks=marks)


@pytest.mark.parametrize("seed", range(REPEATS))
@pytest.mark.parametrize(("slurm", "ends"), list(cases()), indirect=["slurm"])
def test_nothing_is_left_however_a_job_ends_and_another_on_its_machines_goes_on(slurm, ends, seed):
    with contextlib.ExitStack() as stack:
        fleets = [Fleet(slurm, seed) for _ in ends]
        other = stack.enter_context(running(slurm, seed))
        for fleet in fleets:
            fleet.wait_ready()
        for fleet, end in zip(fleets, ends, strict=True):
            time.sleep(fleet.random.uniform(0, 0.5))
            end(fleet)
        for fleet in fleets:
            fleet.assert_nothing_left()
        assert other.told() == ["ready"] * NODES, other.log()
        assert len(other.tasks()) == len(segments(other.mark)) == NODES
    for fleet in fleets:
        for folder in {fleet.folder, *fleet.places}:
            shutil.rmtree(folder)


@BOTH
@pytest.mark.parametrize("seed", range(REPEATS))
def test_a_requeued_job_starts_anew_beside_nothing_of_its_former_run(fleet, seed):
    old = {line.split()[0] for line in marked(fleet.mark)}
    fleet.slurm.said("scontrol", "requeue", fleet.job)
    fleet.wait_ready(2 * NODES)
    assert not old & {line.split()[0] for line in marked(fleet.mark)}
    fleet.slurm.said("scancel", fleet.job)
    fleet.assert_nothing_left()


@BOTH_IN_SOAK
@pytest.mark.parametrize("seed", range(REPEATS))
def test_machines_are_lost_one_after_the_other_and_the_rest_goes_on(fleet, seed):
    """A task is killed; a machine is cut off, and clears up after itself; Slurm gives up one whose slurmd has died."""
    (batch,) = fleet.slurm.said("squeue", "-h", "-j", fleet.job, "-o", "%B").split()
    head = fleet.head_machine()  # which keeps its folder there; elsewhere it moves
    first, cut, given_up = fleet.random.sample([node for node in range(1, NODES + 1) if f"n{node}" != batch], 3)
    first, cut = (cut, first) if first == head else (first, cut)
    (victim,) = [pid for pid in fleet.tasks() if machine_of(pid) == f"n{first}"]
    kill(victim)
    fleet.wait_cleared(first, NODES - 1)

    others = NODES - 1
    if fleet.slurm.separate:
        others -= 1
        fleet.slurm.script("link", str(cut), "down")
        fleet.wait_cleared(cut, others)
    others -= 1
    kill(fleet.slurm.pid_of_slurmd(given_up))
    wait_until(lambda: f"n{given_up}" not in fleet.machines(), "Slurm has given it up", END_TIMEOUT_S)
    fleet.wait_cleared(given_up, others)
    assert sorted(fleet.told()) == ["drained"] * (NODES - others) + ["ready"] * others, fleet.log()


@pytest.mark.soak
@BOTH
@pytest.mark.parametrize("node", range(1, NODES + 1))
@pytest.mark.parametrize("seed", range(REPEATS))
def test_any_machine_that_slurm_has_given_up_is_cleared(fleet, seed, node):
    """slurmd dies, that of the batch script, too, and nobody can end what runs there."""
    kill(fleet.slurm.pid_of_slurmd(node))
    wait_until(lambda: f"n{node}" not in fleet.machines(), "Slurm has noticed", END_TIMEOUT_S)
    fleet.wait_cleared(node, len(fleet.machines()))


@pytest.mark.soak  # Slurm looks at limits every 30 s, and the shortest is a minute
@BOTH
@pytest.mark.parametrize("seed", range(REPEATS))
@pytest.mark.parametrize("deaf", [False, True])
def test_nothing_is_left_at_the_time_limit(slurm, seed, deaf):
    """Let those that hear the warning end before, and kill those that are deaf."""
    with running(slurm, seed, deaf=deaf, drain_s=10, sbatch=["--time=1"]) as fleet:
        wait_until(lambda: fleet.told() != ["ready"] * NODES or not fleet.tasks(), "the limit has come", 200.0)
        fleet.wait_gone()
        assert fleet.told() == ["ready" if deaf else "drained"] * NODES
        fleet.assert_nothing_left()


@pytest.mark.soak
@BOTH
@pytest.mark.parametrize("seed", range(REPEATS))
def test_a_job_that_others_preempt_makes_room_at_once_and_starts_anew(slurm, seed):
    with running(slurm, seed) as fleet:
        old = {line.split()[0] for line in marked(fleet.mark)}
        urgent = ("--partition=urgent", f"--nodes={NODES}", "--exclusive", "--output=/dev/null", "--wrap=sleep 20")
        other = fleet.slurm.said("sbatch", "--parsable", *urgent)
        wait_until(lambda: fleet.slurm.state(other) == "RUNNING", "the other runs", END_TIMEOUT_S)
        fleet.assert_nothing_left()
        assert fleet.told() == ["drained"] * NODES
        fleet.wait_ready(2 * NODES)
        assert not old & {line.split()[0] for line in marked(fleet.mark)}
