"""The power fails at each write and sync of the ledger, and the disk holds what the syncs allow, torn and reordered."""

from __future__ import annotations

import random
import shutil

import pytest
import trio

from prorl_trio.ledger import LedgerLimits, NewJob, open_ledger
from support.faulty_disk import FaultyDisk
from support.power_loss import Wreck

KIB = 1024
LIMITS = LedgerLimits(log_bytes=48 * KIB, reserve_bytes=16 * KIB, max_bytes=4096 * KIB, max_reads=1)
"""A log of a few commits: it is begun anew several times."""
SESSIONS = ("s", "t")
QUICK_CUTS, SLOW_CUTS = 60, 400
KEPT = (1.0, 0.0, 0.5)


def payload(name, size):
    return random.Random(name).randbytes(size)


class Story:
    """Calls of the ledger one after the other, and what it must hold after each of them."""

    def __init__(self):
        self.sessions, self.unfinished, self.undelivered, self.acknowledged = {}, {}, {}, set()
        self.states = []
        self.synced = []
        """Whether the call must be on the disk when it has returned."""

    def calls(self, ledger):
        yield self.open("s", 7), ledger.open_session("s", 7)
        yield self.open("t", 0), ledger.open_session("t", 0)
        for round_number in range(4):
            names = [f"{round_number}-{n}" for n in range(5)]
            sizes = [0, 10, 700, 9_000, 40_000]
            specs = [(name, payload(name, size)) for name, size in zip(names, sizes, strict=True)]
            batch = [NewJob(job_id=name, fingerprint=b"f", spec=spec) for name, spec in specs]
            yield self.accept("s", specs), ledger.accept("s", batch)
            for name, size in zip(names[1:], sizes[::-1], strict=False):
                yield self.attempt(name, 1), ledger.begin_attempt(name, 1)
                cursor = self.sessions["s"][1] + 1
                outcome = payload(f"outcome of {name}", size)
                yield self.finish("s", name, 1, cursor, outcome), ledger.finish("s", name, 1, cursor, [outcome])
            upto = self.sessions["s"][1] - round_number % 3
            yield self.acknowledge("s", upto), ledger.acknowledge("s", upto)
            yield self.forget("s", names[0]), ledger.forget("s", [names[0]])
            other = payload(f"t{round_number}", 3_000)
            yield (
                self.accept("t", [(f"t{round_number}", other)]),
                ledger.accept("t", [NewJob(job_id=f"t{round_number}", fingerprint=b"f", spec=other)]),
            )
        yield self.close("t"), ledger.close_session("t")
        yield self.open("t", 0), ledger.open_session("t", 0)

    def state(self):
        return (dict(self.sessions), dict(self.unfinished), dict(self.undelivered), set(self.acknowledged))

    def open(self, session, first):
        self.sessions.setdefault(session, (first, first))
        return True

    def close(self, session):
        del self.sessions[session]
        self.unfinished = {k: v for k, v in self.unfinished.items() if v[0] != session}
        self.undelivered = {k: v for k, v in self.undelivered.items() if k[0] != session}
        return False

    def accept(self, session, specs):
        self.unfinished |= {name: (session, 0, spec) for name, spec in specs}
        return True

    def attempt(self, name, attempt):
        session, _, spec = self.unfinished[name]
        self.unfinished[name] = (session, attempt, spec)
        return False

    def finish(self, session, name, attempt, cursor, outcome):
        del self.unfinished[name]
        self.undelivered[session, cursor] = (name, attempt, outcome)
        self.sessions[session] = (self.sessions[session][0], cursor)
        return True

    def acknowledge(self, session, cursor):
        gone = [key for key in self.undelivered if key[0] == session and key[1] <= cursor]
        self.acknowledged |= {self.undelivered.pop(key)[0] for key in gone}
        self.sessions[session] = (cursor, self.sessions[session][1])
        return False

    def forget(self, session, name):
        del self.unfinished[name]
        return False


async def found_in(ledger):
    recovered = ledger.recovered
    assert recovered.damage == []
    unfinished = {
        job.job_id: (job.session_id, job.last_attempt, await ledger.read(job.spec)) for job in recovered.unfinished
    }
    undelivered = {
        (job.session_id, job.cursor): (job.job_id, job.attempt, await ledger.read(job.outcome))
        for job in recovered.undelivered
    }
    names = [f"{round_number}-{n}" for round_number in range(4) for n in range(5)]
    known = await ledger.lookup(names)
    acknowledged = {name for name, job in known.items() if job.state == "acknowledged"}
    return ({s.session_id: (s.acked, s.last) for s in recovered.sessions}, unfinished, undelivered, acknowledged)


async def record(root):
    """The steps, with the number of calls that had returned before each; and the story."""
    story, disk, steps = Story(), FaultyDisk(), []
    returned = 0
    disk.before = lambda step: steps.append((step, returned))
    async with open_ledger(root / "made" / "ledger", LIMITS, disk=disk) as ledger:
        story.states.append(story.state())
        story.synced.append(True)
        for synced, call in story.calls(ledger):
            story.states.append(story.state())
            story.synced.append(synced)
            await call
            returned += 1
    steps.append((None, returned))
    return steps, story


async def check(folder, story, first, last):
    async with open_ledger(folder, LIMITS) as ledger:
        found = await found_in(ledger)
        assert found in story.states[first : last + 1]
        await ledger.open_session("later", 0)
        await ledger.accept("later", [NewJob(job_id="later", fingerprint=b"f", spec=bytes(20_000))])
    async with open_ledger(folder, LIMITS) as ledger:  # and on it goes
        sessions, unfinished, *rest = await found_in(ledger)
        assert unfinished.pop("later") == ("later", 0, bytes(20_000))
        assert sessions.pop("later") == (0, 0)
        assert (sessions, unfinished, *rest) == found


async def lose_power(root, cuts, kept):
    """At each of the `cuts`; what is left holds all that had to be on the disk, and nothing beside the story."""
    wreck, chance = Wreck(root / "made" / "ledger"), random.Random(17)
    with trio.fail_after(30):
        steps, story = await record(root)
    chosen = {number * len(steps) // cuts for number in range(cuts)}
    for number, (step, returned) in enumerate(steps):
        if number in chosen:
            for share in kept:
                folder = root / "left"
                wreck.leave(folder, chance, kept=share)
                durable = max(n for n in range(returned + 1) if story.synced[n])
                with trio.fail_after(30):
                    first = returned if share == 1 else durable
                    await check(folder, story, first, min(returned + 1, len(story.states) - 1))
                shutil.rmtree(folder)
        if step is not None:
            wreck.take(step)


async def test_what_had_to_be_on_the_disk_is_there(memory_path):
    await lose_power(memory_path, QUICK_CUTS, KEPT)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_what_had_to_be_on_the_disk_is_there_at_many_more_steps(memory_path):
    await lose_power(memory_path, SLOW_CUTS, (*KEPT, 0.2, 0.8))
