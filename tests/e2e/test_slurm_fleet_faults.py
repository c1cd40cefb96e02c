"""Slurm, and what befalls its machines, interrupts a fleet at work: no job is lost, none has two outcomes.

Real nodes with real sandboxes in which their jobs calculate; seeds choose the moment and the machine.
`PRORL_SLURM_REPEATS=25 pytest -m soak` of this file is 225 interruptions.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest
import trio

from prorl_ipc.session import Accepted
from prorl_trio.client import connect
from support.engine_program import calculation, open_engine
from support.quiet_clock import stretched, wait_until
from support.remains import in_networks, inside, left_after
from support.skips import because
from support.slurm_cluster import NODES, kill
from support.slurm_fleet import LIMIT_S, SlurmFleet, math_job, once_each

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REPEATS = int(os.environ.get("PRORL_SLURM_REPEATS", "1"))
JOBS = 40
QUICK_JOBS = 24
AT_ONCE = 24
"""Jobs without an outcome: half again as many as all nodes run."""
FIRST_OUTCOMES = 6
"""At most so many between two interruptions."""
LONGEST_CALCULATION_S = 1.5
PULSE_TIMEOUT_S = 8.0
BLINK_PULSE_TIMEOUT_S = 60.0
"""A machine that is cut off for a moment goes on: then its node comes back with what it did."""
STALE_AFTER_S = 5.0
END_TIMEOUT_S = 120.0
LONG_S = 600.0


class Interrupted:
    """A fleet with all that may befall it. All blocks."""

    def __init__(self, fleet, seed, pulse_timeout_s):
        self.fleet = fleet
        self.slurm = fleet.slurm
        self.random = random.Random(seed)
        self.options = [f"--pulse-timeout-s={stretched(pulse_timeout_s):.0f}", "--drain-s=10"]
        self.asked = dict
        """Returns the state of the fleet's head."""

    def members(self):
        """Return the nodes that get jobs."""
        return sorted(name for name, member in self.asked()["members"].items() if member["connected"])

    def up(self, *options):
        self.fleet.up(NODES, *self.options, *options)
        self.fleet.wait_up(NODES)

    def wait_gone(self, limit_s=END_TIMEOUT_S):
        job = self.fleet.job
        self.wait(lambda: not self.slurm.run("squeue", "-h", "-j", job).stdout, "the job is gone", limit_s)

    def wait(self, holds, what, limit_s=END_TIMEOUT_S):
        wait_until(holds, what, limit_s, self.fleet.report)

    def anew(self):
        """Require that nothing is left of the job that has ended, and submit another one."""
        self.wait_gone()
        left, took_s = left_after(self.fleet.mark, self.fleet.places, LIMIT_S, self.slurm.networks())
        assert left == [], f"after {took_s:.1f} s: {self.fleet.log()}"
        self.up()

    def machine(self):
        """Choose one with a node, but not that of the batch script: without it the whole job ends."""
        (batch,) = self.slurm.said("squeue", "-h", "-j", self.fleet.job, "-o", "%B").split()
        machines = [node for node in range(1, NODES + 1) if f"n{node}" != batch and self.processes(node, *SERVE)]
        return self.random.choice(machines)

    def wait_cleared(self, node):
        """Wait until nothing is left on one machine."""
        place, network = self.fleet.places[node - 1], self.slurm.networks()[node - 1 : node]

        def left():
            return [*inside([place]), *in_networks(network), *place.glob("*prorl-*")]

        wait_until(lambda: not left(), "nothing is left there", LIMIT_S, lambda: f"{left()}\n{self.fleet.log()}")

    def processes(self, node, *words):
        """Return the pids of the processes of a machine with all these words in their command lines."""
        network = self.slurm.networks()[node - 1].stat().st_ino
        pids = []
        for line in self.slurm.said("ps", "-eww", "-o", "pid=,args=").splitlines():
            pid = int(line.split()[0])
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if all(word in line for word in words) and Path(f"/proc/{pid}/ns/net").stat().st_ino == network:
                    pids.append(pid)
        return pids


SERVE = ("-m prorl_trio.cli serve", "/node.toml")


def cancel(it):
    it.slurm.said("scancel", it.fleet.job)
    it.anew()


def cancel_at_once(it):
    it.slurm.said("scancel", "--full", "--signal=KILL", it.fleet.job)
    it.anew()


def requeue(it):
    """Let the job start again: its nodes have the names that they had before."""

    def entries():
        with contextlib.suppress(FileNotFoundError):  # one is replaced
            return {path.name: json.loads(path.read_text())["process"] for path in it.fleet.entries()}
        return {}

    before = {(name, str(process)) for name, process in entries().items()}
    it.slurm.said("scontrol", "requeue", it.fleet.job)

    def renewed():
        now = {(name, str(process)) for name, process in entries().items()}
        return len(now) == NODES and not now & before

    it.wait(renewed, "all nodes are up anew", LONG_S)


def time_limit(it):
    """Wait for the limit: it is a minute at least, and Slurm looks each half."""
    it.wait_gone(LONG_S)
    it.anew()


def kill_node(it):
    node = it.machine()
    (serving,) = it.processes(node, *SERVE)
    kill(serving)
    it.wait_cleared(node)


def kill_stepd(it):
    node = it.machine()
    (stepd,) = it.processes(node, f"slurmstepd: [{it.fleet.job}.0]")
    kill(stepd)
    it.wait_cleared(node)


def kill_slurmd(it):
    """Slurm gives the machine up, and nobody can end what runs there; then the daemon is back."""
    node = it.machine()
    kill(it.slurm.pid_of_slurmd(node))
    listed = ("squeue", "-h", "-O", "NodeList:64", "-j", it.fleet.job)
    it.wait(
        lambda: f"n{node}" not in it.slurm.said("scontrol", "show", "hostnames", it.slurm.said(*listed)).split(),
        "Slurm has given it up",
    )
    it.wait_cleared(node)
    it.slurm.script("slurmd", str(node))


def cut(it):
    """Cut a machine off until it has cleared up after itself."""
    node = it.machine()
    it.slurm.script("link", str(node), "down")
    it.wait(lambda: not it.processes(node, *SERVE), "it has heard no pulse")
    it.wait_cleared(node)
    it.slurm.script("link", str(node), "up")


def blink(it):
    """Cut a machine off until its jobs have gone elsewhere: it comes back with outcomes of its own."""
    node, before, moved = it.machine(), it.members(), it.asked()["pipeline"]["moved"]
    it.slurm.script("link", str(node), "down")
    it.wait(lambda: it.members() != before, "the head has given the node up")
    it.wait(lambda: it.asked()["pipeline"]["moved"] > moved, "its jobs have gone elsewhere")
    it.slurm.script("link", str(node), "up")
    it.wait(lambda: it.members() == before, "the node is back")


class Load:
    """A trainer that always has so many jobs without an outcome, until it has had enough."""

    def __init__(self, client, least):
        self.client = client
        self.least = least
        self.is_over = False
        self.job_ids = []
        self.seen = Counter()
        self.attempts = Counter()
        self.changed = trio.lowlevel.ParkingLot()

    async def submit(self):
        while not self.is_over or len(self.job_ids) < self.least:
            if len(self.job_ids) - len(self.seen) >= AT_ONCE:
                await self.changed.park()
                continue
            self.job_ids.append(f"job-{len(self.job_ids)}")
            while True:
                (answer,) = await self.client.submit([math_job(self.job_ids[-1])], patience_s=LONG_S)
                if isinstance(answer, Accepted):
                    break
                assert answer.code == "draining", answer  # a head that is to end; another one follows
                await trio.sleep(0.2)

    async def receive(self):
        async for outcome in self.client.results(follow=True):
            self.seen[outcome.job_id] += 1
            self.attempts[outcome.attempt] += 1
            assert (outcome.status, outcome.reward) == ("completed", 1.0), (outcome.error, outcome.attempts)
            self.changed.unpark_all()

    async def wait_more(self, count):
        """Wait for so many further outcomes."""
        count += self.seen.total()
        while self.seen.total() < count:
            await self.changed.park()

    async def wait_all(self):
        """Wait until each job has an outcome, and the nodes have nothing more to tell."""
        while len(self.seen) < len(self.job_ids):
            await self.changed.park()
        while True:
            members = (await self.client.status())["members"].values()
            sessions = [session for member in members for session in member.get("sessions", {}).values()]
            if not any(session.get("running") or session.get("undelivered") for session in sessions):
                return
            await trio.sleep(0.2)


GROUPS = [
    [kill_node, kill_stepd, requeue, cancel],
    [cut, cancel_at_once, kill_slurmd],
    [blink],
    [time_limit],
]
QUICK = [kill_node, requeue]
MOVES = {kill_node, kill_stepd, cut, cancel_at_once}
"""Those that leave no time for a job to end: another attempt has its outcome. `blink` looks for itself: there the first
attempt may be back before the second has ended."""


@pytest.fixture
def fleet(slurm):
    if not slurm.separate:
        pytest.skip(because("no networks can be made here, and so no machines with names", "run it where root may"))
    made = SlurmFleet(slurm)
    yield made
    slurm.mend()
    made.remove()


def named(value):
    return "-".join(end.__name__ for end in value) if isinstance(value, list) else None


@pytest.mark.parametrize(
    ("ends", "jobs"),
    [(QUICK, QUICK_JOBS), *(pytest.param(ends, JOBS, marks=pytest.mark.soak) for ends in GROUPS)],
    ids=named,
)
@pytest.mark.parametrize("seed", range(REPEATS))
async def test_each_job_has_one_outcome_whatever_befalls_its_fleet_and_nothing_is_left(fleet, ends, jobs, seed):
    it = Interrupted(fleet, seed, BLINK_PULSE_TIMEOUT_S if blink in ends else PULSE_TIMEOUT_S)
    in_thread = trio.to_thread.run_sync
    options = ["--time=2"] if time_limit in ends else []
    times = {"connect_timeout_s": stretched(30.0), "heartbeat_interval_s": 0.5, "heartbeat_timeout_s": stretched(3.0)}
    times["reconnect_timeout_s"] = stretched(4.0) if blink in ends else LONG_S

    def calculate():
        return calculation(it.random.uniform(0, LONGEST_CALCULATION_S))

    async with open_engine(0, fleet.model, calculate) as port:
        fleet.write_config([f"http://{fleet.slurm.address()}:{port}"], STALE_AFTER_S)
        await in_thread(functools.partial(it.up, *options))
        async with connect(fleet=fleet.folder, **times) as client, trio.open_nursery() as nursery:
            it.asked = functools.partial(trio.from_thread.run, client.status)
            load = Load(client, jobs)
            nursery.start_soon(load.submit)
            nursery.start_soon(load.receive)
            for end in ends:
                if end is not time_limit:  # which comes when it comes
                    await load.wait_more(it.random.randint(1, FIRST_OUTCOMES))
                await in_thread(end, it)
            load.is_over = True
            load.changed.unpark_all()
            await load.wait_all()
            nursery.cancel_scope.cancel()
        await in_thread(functools.partial(fleet.command, "down", "--timeout-s", "900"))
        await in_thread(fleet.assert_nothing_left)
    assert load.seen == once_each(load.job_ids)
    assert max(load.attempts) > 1 or not MOVES & {*ends}, "none was interrupted at work"
