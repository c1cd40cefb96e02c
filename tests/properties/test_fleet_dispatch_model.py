"""A head, its ledger and its members, in random orders of everything that may happen: each job has one outcome."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_trio.fleet.dispatch import Dispatch
from prorl_trio.fleet.events import (
    Acknowledge,
    Answered,
    Begin,
    Begun,
    Cancel,
    CancelThere,
    Deliver,
    End,
    Ended,
    Forget,
    Forgotten,
    Joined,
    Lost,
    Recovered,
    Restored,
    Room,
    Stored,
    Submit,
    Taken,
    Waited,
    Withdraw,
    Withdrawn,
)
from prorl_trio.types.models import GroupPolicy, JobSpec, TaskInstance

STEPS = 250
JOBS = 12


class Member:
    """A node: what it has of the head's session survives the loss of the connection, unless its disk goes."""

    def __init__(self, name):
        self.name = name
        self.joined = False
        self.generation = 0
        self.wipe()

    def wipe(self):
        self.running = {}
        self.ended = {}
        self.cursor = 0
        self.cut()

    def cut(self):
        self.joined = False
        self.generation += 1
        self.todo = deque()
        self.said = deque()

    def end(self, job_id, status="completed", code=None):
        self.cursor += 1
        self.ended[job_id] = (self.cursor, self.running.pop(job_id), status, code)
        self._say_ended(job_id)

    def _say_ended(self, job_id):
        cursor, attempt, status, code = self.ended[job_id]
        if self.joined:
            self.said.append(Ended(self.name, job_id, cursor, attempt, status, code))

    def join(self):
        self.joined = True
        for job_id in sorted(self.ended, key=lambda each: self.ended[each]):
            self._say_ended(job_id)
        return Joined(self.name, frozenset([*self.running, *self.ended]))

    def work(self, rng):
        """Carry out the next request of the head."""
        effect, attempt = self.todo.popleft()
        if isinstance(effect, Submit):
            code = ""
            if effect.job_id not in self.running and effect.job_id not in self.ended:
                code = rng.choice(["", "", "", "admission", "draining"])
                if not code:
                    self.running[effect.job_id] = attempt
            self.said.append(Answered(self.name, effect.job_id, code))
        elif isinstance(effect, CancelThere):
            if effect.job_id in self.running:
                self.end(effect.job_id, "cancelled", "cancelled")
        elif isinstance(effect, Acknowledge):
            assert all(cursor > effect.cursor for cursor, *_ in self.ended.values()), "it would refuse the id for long"
        else:
            job_ids = effect.job_ids if isinstance(effect, Withdraw) else [effect.job_id]
            for job_id in job_ids:
                self.running.pop(job_id, None)
                self.ended.pop(job_id, None)
            if isinstance(effect, Forget):
                self.said.append(Forgotten(self.name, effect.job_id, effect.cursor))
            else:
                self.said.append(Withdrawn(self.name, job_ids))


class World:
    def __init__(self, rng):
        self.rng = rng
        self.members = {name: Member(name) for name in "abc"}
        self.specs = {}
        self.attempts = {}
        self.outcomes = {}
        self.cancelled = set()
        self.head = Dispatch()
        self.head.apply(Recovered())
        self.writing = deque()

    def apply(self, event):
        for effect in self.head.apply(event):
            match effect:
                case Begin(job_id, attempt, _node_id):
                    self.writing.append((Begun(job_id), attempt, None))
                case Deliver(node_id, job_id, cursor):
                    member = self.members[node_id]
                    assert job_id not in self.outcomes, "a second outcome"
                    assert event.attempt >= self.attempts.get(job_id, 0), "the session would drop it"
                    self.writing.append((Stored(node_id, job_id, cursor), job_id, (member, member.generation)))
                case End(job_id, _reason, _failed):
                    assert job_id not in self.outcomes, "a second outcome"
                    self.outcomes[job_id] = "head"
                case Restored():
                    pass
                case _:
                    attempt = self.head.jobs[effect.job_id].attempt if isinstance(effect, Submit) else 0
                    assert self.members[effect.node_id].joined
                    self.members[effect.node_id].todo.append((effect, attempt))

    def write(self):
        event, what, sender = self.writing.popleft()
        if sender is None:
            if event.job_id in self.specs and event.job_id not in self.outcomes:
                assert what > self.attempts.get(event.job_id, 0), "two attempts of one number"
                self.attempts[event.job_id] = what
            self.apply(event)
            return
        assert what not in self.outcomes, "a second outcome"
        self.outcomes[what] = "member"
        member, generation = sender
        if member.generation == generation:
            self.apply(event)

    def take(self):
        job_id = f"job-{len(self.specs)}"
        group = self.rng.choice(["", "g", "h", "p"])
        policy = GroupPolicy(size=JOBS, min_completed=JOBS) if group == "p" else None
        instance = TaskInstance(instance_id="i", handler="fake", payload={})
        spec = self.specs[job_id] = JobSpec(job_id=job_id, instance=instance, group_id=group, group=policy)
        self.apply(Taken(spec, self.rng.choice("st"), 0))

    def lose(self, member):
        member.cut()
        self.apply(Lost(member.name, "cut off", self.rng.random() < 0.3))

    def join(self, member):
        self.apply(member.join())
        self.report(member)

    def report(self, member):
        held = self.head.members[member.name].held
        self.apply(Room(member.name, 10, 2 - held, 2, held))

    def kill_head(self):
        """What was not written is forgotten; members keep what they have."""
        self.writing.clear()
        for member in self.members.values():
            member.cut()
        self.head = Dispatch()
        for job_id, spec in self.specs.items():
            if job_id not in self.outcomes:
                self.apply(Taken(spec, "s", self.attempts.get(job_id, 0)))

    def step(self):
        rng, member = self.rng, self.rng.choice(list(self.members.values()))
        chance = rng.random()
        if chance < 0.10 and len(self.specs) < JOBS:
            self.take()
        elif chance < 0.30 and self.writing:
            self.write()
        elif chance < 0.50 and member.todo:
            member.work(rng)
        elif chance < 0.70 and member.said:
            self.apply(member.said.popleft())
        elif chance < 0.78 and member.running:
            member.end(rng.choice(list(member.running)))
        elif chance < 0.80 and member.running:
            for job_id in list(member.running):  # its shutdown
                member.end(job_id, "cancelled", "shutdown")
        elif chance < 0.83 and member.joined:
            self.lose(member)
            if rng.random() < 0.3:
                member.wipe()
            elif rng.random() < 0.5:
                member.running = {job_id: attempt + 1 for job_id, attempt in member.running.items()}
        elif chance < 0.91 and not member.joined:
            self.join(member)
        elif chance < 0.93:
            self.apply(Waited(member.name))
        elif chance < 0.95 and self.head.recovering:
            self.apply(Recovered())
        elif chance < 0.96 and self.specs:
            job_id = rng.choice(list(self.specs))
            self.cancelled.add(job_id)
            self.apply(Cancel(job_id, "not needed"))
        elif chance < 0.97:
            self.kill_head()
        elif member.joined:
            self.report(member)
        self.check()

    def check(self):
        for name, places in self.head.members.items():
            assert places.held == sum(job.status in ("queued", "init", "ready", "run") for job in places.jobs.values())
            assert all(self.head.jobs[job_id].node_id == name for job_id in places.jobs)

    def settle(self):
        """Let everything come back and end."""
        members = list(self.members.values())
        self.apply(Recovered())
        for member in members:
            self.apply(Waited(member.name))
        for _ in range(400):
            for member in members:
                if not member.joined:
                    self.join(member)
                while member.todo:
                    member.work(self.rng)
                while member.said:
                    self.apply(member.said.popleft())
                for job_id in list(member.running):
                    member.end(job_id)
            while self.writing:
                self.write()
            for member in members:
                self.report(member)
            self.check()
            if len(self.outcomes) == len(self.specs) and not any(m.running or m.ended or m.todo for m in members):
                return
        raise AssertionError(f"not settled: {self.head.jobs}, {[vars(member) for member in members]}")


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_each_job_has_one_outcome_whatever_happens(seed):
    world = World(random.Random(seed))
    for _ in range(STEPS):
        world.step()
    world.settle()
    assert world.outcomes.keys() == world.specs.keys()
    assert not world.head.jobs
    assert not world.head.queued
