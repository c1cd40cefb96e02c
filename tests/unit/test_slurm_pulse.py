"""The pulse of a job stops when Slurm says that this run of it is over, and not sooner."""

from __future__ import annotations

import os

import pytest
import trio

from launch.slurm import pulse
from launch.slurm.pulse import JobRun, beat, is_over

RUN = JobRun("17", 1)


@pytest.mark.parametrize(
    ("listed", "over"),
    [
        ("17|RUNNING|1|\n", False),
        ("16|NODE_FAIL|0|\n17|COMPLETING|1|\n", False),
        ("17|SUSPENDED|1|\n", False),
        ("17|PENDING|2|\n", True),
        ("17|RUNNING|2|\n", True),  # started again, elsewhere
        ("17|NODE_FAIL|1|\n", True),
        ("170|RUNNING|1|\n", True),
        ("", True),
    ],
)
def test_a_run_is_over_when_its_job_is_gone_or_was_started_again(listed, over):
    assert is_over(RUN, listed) is over


@pytest.fixture
def pipe(monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setattr(pulse, "_STDOUT", writer)
    yield reader, writer
    for descriptor in (reader, writer):
        try:
            os.close(descriptor)
        except OSError:
            continue


async def beats(answers):
    """Run a pulse to whose questions these are the answers; the last one stays."""
    answers = list(answers)

    async def ask():
        await trio.lowlevel.checkpoint()
        return answers.pop(0) if len(answers) > 1 else answers[0]

    return await beat(RUN, interval_s=1, query_interval_s=10, controller_timeout_s=35, ask=ask)


async def test_it_beats_until_the_run_is_over(pipe, autojump_clock):
    why = await beats(["17|RUNNING|1|", None, "17|RUNNING|1|", "17|PENDING|2|"])
    assert "run 1 of job 17 is over" in why
    assert trio.current_time() == pytest.approx(40, abs=1)
    assert len(os.read(pipe[0], 1000)) in {40, 41}, "a beat is due at the moment of the end"


async def test_an_hour_without_slurmctld_is_bearable_no_longer_than_asked(pipe, autojump_clock):
    began_s = trio.current_time()
    assert "has not answered for 35 s" in await beats(["17|RUNNING|1|", None])
    assert trio.current_time() - began_s == pytest.approx(50)


async def test_it_ends_when_nobody_reads(pipe):
    os.close(pipe[0])
    with trio.fail_after(5):
        assert await beats(["17|RUNNING|1|"]) == "srun has ended"
