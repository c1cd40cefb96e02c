"""`kill -9` of a process that uses the ledger under load, at random moments, over and over on the same folder."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import trio

from prorl_trio.ledger import LedgerLimits, open_ledger

KIB = 1024
ROUNDS = 12
TASKS = 8
ROUND_TIMEOUT_S = 30

LOAD = """
import os, random, sys, trio
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from prorl_trio.ledger import NewJob, open_ledger
from test_ledger_kill import LIMITS, TASKS, payload

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

async def work(ledger, chance, number, cursors):
    session, step = f"s{number}", 0
    await ledger.open_session(session, 0)
    while True:
        jobs = [f"{sys.argv[2]}-{number}-{step}-{n}" for n in range(chance.randint(1, 3))]
        step += 1
        await ledger.accept(session, [NewJob(job_id=job, fingerprint=b"f", spec=payload(job, 500)) for job in jobs])
        say("accepted", *jobs)
        for job in jobs[chance.random() < 0.3:]:
            await ledger.begin_attempt(job, 1)
            cursors[session] = cursor = cursors.get(session, 0) + 1
            say("finishing", job)
            await ledger.finish(session, job, 1, cursor, [payload(job, 5000), b"!"])
            say("finished", job, session, cursor)
        if chance.random() < 0.5:
            cursor = cursors.get(session, 0) - chance.randint(0, 2)
            if cursor > 0:
                say("acknowledging", session, cursor)
                await ledger.acknowledge(session, cursor)
                say("acknowledged", session, cursor)

async def main():
    async with open_ledger(Path(sys.argv[1]), LIMITS) as ledger, trio.open_nursery() as nursery:
        cursors = {session.session_id: session.last for session in ledger.recovered.sessions}
        for number in range(TASKS):
            nursery.start_soon(work, ledger, random.Random(f"{sys.argv[3]}-{number}"), number, cursors)

trio.run(main)
"""


def payload(job_id, size):
    return random.Random(job_id).randbytes(size)


LIMITS = LedgerLimits(log_bytes=128 * KIB, reserve_bytes=128 * KIB, max_bytes=256 * 1024 * KIB)


class Told:
    """What the killed processes said of what they did."""

    def __init__(self):
        self.accepted, self.finishing, self.finished = set(), set(), {}
        self.acknowledging, self.acknowledged = {}, {}

    def hear(self, line):
        word, *rest = line.split()
        match word:
            case "accepted":
                self.accepted.update(rest)
            case "finishing":
                self.finishing.add(rest[0])
            case "finished":
                self.finished[rest[0]] = (rest[1], int(rest[2]))
            case "acknowledging":
                self.acknowledging[rest[0]] = max(int(rest[1]), self.acknowledging.get(rest[0], 0))
            case "acknowledged":
                self.acknowledged[rest[0]] = max(int(rest[1]), self.acknowledged.get(rest[0], 0))


async def load_and_kill(folder, round_number, lines, told):
    here, number = str(Path(__file__).parent), str(round_number)
    command = [sys.executable, "-c", LOAD, str(folder), number, number, here]
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    said = b""
    try:
        while said.count(b"\n") < lines:
            piece = await process.stdout.receive_some()
            assert piece, "the load ended by itself"
            said += piece
    finally:
        process.kill()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 10):
            await process.wait()
    async with process.stdout:
        while piece := await process.stdout.receive_some():
            said += piece
    for line in said.decode().splitlines()[: said.count(b"\n")]:
        told.hear(line)


async def check(folder, told):
    async with open_ledger(folder, LIMITS) as ledger:
        assert ledger.recovered.damage == []
        unfinished = [job.job_id for job in ledger.recovered.unfinished]
        outcomes = {job.job_id: (job.session_id, job.cursor) for job in ledger.recovered.undelivered}
        assert len(unfinished) + len(ledger.recovered.undelivered) == len({*unfinished, *outcomes}), (
            "a job is there twice"
        )
        for job in told.accepted - told.finishing:
            assert job in unfinished, "an accepted job is lost"
        for job, (session, cursor) in told.finished.items():
            assert job not in unfinished, "a finished job would run again"
            if cursor <= told.acknowledged.get(session, 0):
                assert job not in outcomes, "what was acknowledged comes back"
            elif cursor > told.acknowledging.get(session, 0):
                assert outcomes.get(job) == (session, cursor), "an outcome is lost"
        for job in ledger.recovered.undelivered:
            assert await ledger.read(job.outcome) == payload(job.job_id, 5000) + b"!"
        for job in ledger.recovered.unfinished:
            assert await ledger.read(job.spec) == payload(job.job_id, 500)


async def test_nothing_answered_is_lost_and_nothing_comes_twice(memory_path):
    chance = random.Random(4)
    told = Told()
    for round_number in range(ROUNDS):
        with trio.fail_after(ROUND_TIMEOUT_S):
            await load_and_kill(memory_path, round_number, chance.randint(1, 800), told)
            if round_number % 3 == 2:
                (memory_path / "index.snapshot").unlink(missing_ok=True)
            if round_number % 2:
                await check(memory_path, told)
    with trio.fail_after(ROUND_TIMEOUT_S):
        await check(memory_path, told)
    assert len(told.finished) > 20
    assert told.acknowledged
