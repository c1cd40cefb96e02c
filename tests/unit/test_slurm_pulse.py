"""The pulse of a job stops when Slurm says that this run of it is over, and not sooner."""

from __future__ import annotations

import errno
import os
import time

import pytest
import trio

from prorl_ipc.clock import RunningClock
from prorl_launch.slurm.leash import _without
from prorl_launch.slurm.pulse import JobRun, Pulse, PulseRules, ask_slurmctld, machines_of, seconds_of, with_times

RUN = JobRun("17", 1)
LIVE = "17|RUNNING|1|n1,n2|"
SUSPENDED = "suspended"
"""Slurm stops the pulse while it waits for the answer, and goes on much later."""


@pytest.mark.parametrize(
    ("listed", "machines"),
    [
        (LIVE, "n1,n2"),
        ("16|NODE_FAIL|0||\n17|COMPLETING|1|n[1-4]|\n", "n[1-4]"),
        ("17|SUSPENDED|1|n1|\n", "n1"),
        ("17|PENDING|2||\n", None),
        ("17|RUNNING|2|n1|\n", None),  # started again, elsewhere
        ("17|NODE_FAIL|1|n1|\n", None),
        ("170|RUNNING|1|n1|\n", None),
        ("17|REVOKED|0||\n17|RUNNING|1|n1|\n", "n1"),  # a cluster of the federation that does not run it
        ("", None),
    ],
)
def test_a_run_is_over_when_its_job_is_gone_or_was_started_again(listed, machines):
    assert machines_of(RUN, listed) == machines


@pytest.mark.parametrize("unknown", ["", "Unknown", "NONE", "N/A"])
def test_an_end_that_slurm_does_not_know_is_none(unknown):
    assert seconds_of(unknown) == ""


def test_the_end_of_a_job_is_in_seconds_since_1970(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    assert seconds_of("1970-01-02T09:00:05\n") == str(24 * 3600 + 5)
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Answers with a job of two groups, as Slurm 22.05, whose jobs are not told their times."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    groups = "1970-01-01T00:01:00|1970-01-01T01:01:00\n" * 2
    program = tmp_path / "squeue"
    program.write_text(f'#!/bin/sh\necho "$@" >"{tmp_path}/asked"\nprintf "{groups}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    yield tmp_path / "asked"
    monkeypatch.undo()
    time.tzset()


async def test_nodes_are_told_when_their_job_began_and_when_it_ends(squeue):
    told = {"SLURM_JOB_START_TIME": "60", "SLURM_JOB_END_TIME": "3660"}
    assert await with_times("17", {"A": "b"}) == {"A": "b", **told}
    assert "--jobs=17" in squeue.read_text()
    assert await with_times("17", {"SLURM_JOB_END_TIME": "9"}) == {**told, "SLURM_JOB_END_TIME": "9"}


async def test_what_slurm_has_told_already_is_not_asked(squeue):
    told = {"SLURM_JOB_START_TIME": "1", "SLURM_JOB_END_TIME": "2"}
    assert await with_times("17", told) == told
    assert not squeue.exists()


async def test_a_users_own_filters_for_squeue_hide_no_job(tmp_path, monkeypatch):
    program = tmp_path / "squeue"
    program.write_text(f"""#!/bin/sh
[ -z "$SQUEUE_PARTITION" ] && case "$*" in *--all*) echo '{LIVE}';; esac
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SQUEUE_PARTITION", "gpu")
    assert machines_of(RUN, await ask_slurmctld()) == "n1,n2"


async def test_a_squeue_that_cannot_be_started_has_not_answered(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await ask_slurmctld() is None


@pytest.mark.parametrize(
    ("machine", "beat", "without"),
    [("n1", "n1,n2", False), ("n1", "n10,n2", True), ("n1", "", False), ("", "n1", False)],
)
def test_a_task_hears_when_its_machine_is_no_longer_of_the_job(machine, beat, without):
    assert _without(machine, beat) is without


def pulse(tmp_path, *answers, command_tasks=1, drain=None):
    """A pulse to whose questions these are the answers; the last one stays."""
    answers = list(answers)

    async def ask():
        await trio.lowlevel.checkpoint()
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return answer

    async def name(machines):
        await trio.lowlevel.checkpoint()
        return machines

    rules = PulseRules(interval_s=0.1, query_s=0.1, controller_timeout_s=35)
    return Pulse(RUN, rules, ended=tmp_path / "ended", tasks=command_tasks, drain=drain, ask=ask, name=name)


async def test_a_slurmctld_that_comes_back_in_time_is_waited_for(tmp_path, autojump_clock):
    why = await pulse(tmp_path, LIVE, *[None] * 300, LIVE, "17|PENDING|2||").wait_over()
    assert why == "Slurm says that run 1 of job 17 is over"
    assert trio.current_time() == pytest.approx(30.2)


async def test_one_that_does_not_is_taken_for_lost(tmp_path, autojump_clock):
    assert await pulse(tmp_path, LIVE, None).wait_over() == "slurmctld has not answered for 35 s"
    assert trio.current_time() == pytest.approx(35.1, abs=0.2)


def test_time_in_which_the_job_is_suspended_is_no_time_without_an_answer(tmp_path):
    ahead_s, answers = 0.0, [LIVE, None, SUSPENDED, SUSPENDED, LIVE, ""]

    async def ask():
        nonlocal ahead_s
        await trio.lowlevel.checkpoint()
        answer = answers.pop(0)
        ahead_s += 1000 * (answer == SUSPENDED)
        return None if answer == SUSPENDED else answer

    rules = PulseRules(interval_s=0.1, query_s=0.01, controller_timeout_s=5)
    beats = Pulse(RUN, rules, ended=tmp_path / "ended", tasks=1, drain=None, ask=ask)
    why = trio.run(beats.wait_over, clock=RunningClock(time=lambda: time.perf_counter() + ahead_s))
    assert why == "Slurm says that run 1 of job 17 is over"
    assert not answers


async def test_the_command_gets_lines_and_its_exit_code_is_ours(tmp_path):
    told = tmp_path / "told"
    command = ["sh", "-c", f"head -n 3 >{told}; exit 7"]
    assert await pulse(tmp_path, LIVE).keep(command, os.environ) == 7
    assert told.read_text().split() == ["n1,n2"] * len(told.read_text().split()) != []
    assert not (tmp_path / "ended").exists()


async def test_a_disk_that_fails_for_a_while_ends_no_task(tmp_path, monkeypatch):
    listdir, failures = os.listdir, []

    def fail(path):
        if str(path).endswith("ended"):
            failures.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", fail)
    assert await pulse(tmp_path, LIVE).keep(["sh", "-c", "sleep 0.5; exit 7"], os.environ) == 7
    assert failures


async def test_the_command_is_told_to_drain_once_the_file_for_it_is_there(tmp_path):
    drain = tmp_path / "drain"
    words = f"while read machines word; do touch {drain}; test $machines,$word = n1,n2,drain && exit 7; done"
    with trio.fail_after(10):
        assert await pulse(tmp_path, LIVE, drain=drain).keep(["sh", "-c", words], os.environ) == 7


SAID = {"ended": "all 1 tasks have ended", "over": "is over", "asked": "SIGUSR1"}


@pytest.mark.parametrize("ready", SAID)
async def test_an_srun_that_waits_for_what_has_ended_is_ended(tmp_path, monkeypatch, capsys, ready):
    for name in ("_SRUN_END_S", "_TASKS_END_S"):
        monkeypatch.setattr(f"prorl_launch.slurm.pulse.{name}", 0.2)
    answer = "" if ready == "over" else LIVE
    command = {"ended": f"touch {tmp_path}/ended/0", "over": "true", "asked": "kill -USR1 $PPID"}[ready]
    with trio.fail_after(10):
        assert await pulse(tmp_path, answer).keep(["sh", "-c", f"{command}; exec sleep 60"], os.environ) == 137
    assert SAID[ready] in capsys.readouterr().err
