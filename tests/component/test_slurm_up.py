"""`prorl-trio slurm up` beside another one, and what it, `drain` and `down` do when slurmctld is late, with fakes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.quiet_clock import stretched, wait_until

RUN = [sys.executable, "-m", "prorl_trio.cli", "slurm"]
WAITING_SBATCH = """#!/bin/sh
if mkdir {folder}/begun; then read go <{folder}/go; echo 17; else echo 18; fi
echo "17|x" >{folder}/queue; : >{folder}/fleet/slurm/17.log
"""
LATE_SBATCH = """#!/bin/sh
env >{folder}/env
for script; do :; done
echo "17|$script" >{folder}/queue; : >{folder}/fleet/slurm/17.log
echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2
exit 1
"""
"""slurmctld takes the job, and answers too late."""
BRIEF_SBATCH = """#!/bin/sh
[ -z "{log}" ] || echo "srun: error: no prorl-trio there" >{folder}/fleet/slurm/17.log
echo 17
"""
"""The job has ended when somebody looks."""
SQUEUE = """#!/bin/sh
echo x >>{folder}/asked
if [ -e {folder}/deaf ] || [ "$(wc -l <{folder}/asked)" = "$(cat {folder}/deaf_at 2>/dev/null)" ]; then
    echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2
    exit 1
fi
[ -e {folder}/queue ] || exit 0
case "$*" in
    *%o*) cat {folder}/queue;;
    *) echo "17|$(cat {folder}/state 2>/dev/null || echo RUNNING)|n1|1:00|None";;
esac
"""
SCANCEL = """#!/bin/sh
echo "$@" >>{folder}/cancels
case "$*" in --batch*) ;; *) rm {folder}/queue;; esac
"""


@pytest.fixture
def slurm(tmp_path):
    """Run a command of ours, with these of Slurm's: `slurm("up", sbatch=...)`."""
    os.mkfifo(tmp_path / "go")
    (tmp_path / "node.toml").write_text('[model]\npath = "/models/m"\n')
    path = f"{tmp_path}:{os.environ['PATH']}"

    def words(name, *options):
        options = [f"--config={tmp_path}/node.toml", "--nodes=1", *options] if name == "up" else options
        return [*RUN, name, f"--fleet={tmp_path}/fleet", *options]

    def start(name, *options, sbatch=LATE_SBATCH, **env):
        for program, text in {"sbatch": sbatch, "squeue": SQUEUE, "scancel": SCANCEL}.items():
            (tmp_path / program).write_text(text.format(folder=tmp_path, log=env.get("LOG", "")))
            (tmp_path / program).chmod(0o755)
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(words(name, *options), env={**os.environ, "PATH": path, **env}, **out)

    return start


def ended(process):
    out, err = process.communicate(timeout=stretched(60))
    return process.returncode, out, err


def test_a_fleet_that_another_command_is_submitting_is_not_submitted_twice(tmp_path, slurm):
    first = slurm("up", sbatch=WAITING_SBATCH)
    wait_until((tmp_path / "begun").exists, "sbatch is at work", 60)
    code, _, error = ended(slurm("up", sbatch=WAITING_SBATCH))
    (tmp_path / "go").write_text("go\n")
    assert code == 1
    assert "another `prorl-trio slurm up` is submitting the fleet" in error
    code, said, _ = ended(first)
    assert (code, said.partition(";")[0]) == (0, "job 17")
    assert (tmp_path / "fleet/slurm/job_id").read_text() == "17"


def test_a_job_whose_sbatch_heard_nothing_of_it_is_found(tmp_path, slurm):
    code, said, _ = ended(slurm("up"))
    assert (code, said.partition(";")[0]) == (0, "job 17")
    code, _, error = ended(slurm("up"))
    assert code == 1
    assert "job 17 is the fleet" in error
    assert (tmp_path / "fleet/slurm/job_id").read_text() == "17"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", "has ended at once: it has left no log; is {folder}/fleet/slurm on a disk that all machines share?"),
        ("yes", "has ended at once: srun: error: no prorl-trio there"),
    ],
)
def test_a_job_that_ends_at_once_is_told_at_once(tmp_path, slurm, log, said):
    code, _, error = ended(slurm("up", sbatch=BRIEF_SBATCH, LOG=log))
    assert code == 1
    assert f"job 17 {said.format(folder=tmp_path)}" in error


def test_a_fleet_without_a_size_is_warned_of(tmp_path, slurm):
    _, _, error = ended(slurm("up", "--print"))
    assert "sbatch is not asked for processors (--cpus-per-task) and memory (--mem)" in error
    _, _, error = ended(slurm("up", "--print", "-c", "8", SBATCH_MEM_PER_NODE="64G"))
    assert error == ""


def test_a_job_that_nobody_noted_is_not_submitted_again(tmp_path, slurm):
    (tmp_path / "deaf_at").write_text("2")  # asked before sbatch, and after it
    code, _, error = ended(slurm("up"))
    assert code == 1
    assert "Socket timed out" in error
    assert not (tmp_path / "fleet/slurm/job_id").exists()
    code, _, error = ended(slurm("up"))
    assert code == 1
    assert "job 17 is the fleet" in error
    assert (tmp_path / "fleet/slurm/job_id").read_text() == "17"


@pytest.mark.parametrize("outer", [{}, {"SLURM_JOB_ID": "5"}])
def test_the_job_gets_nothing_of_the_job_that_submits_it(tmp_path, slurm, outer):
    ended(slurm("up", **outer, SLURM_RESTART_COUNT="2", SLURM_NTASKS="9", SLURM_CONF="/s.conf", OTHER="kept"))
    handed = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert (handed["SLURM_CONF"], handed["OTHER"]) == ("/s.conf", "kept")
    assert ("SLURM_RESTART_COUNT" in handed, "SLURM_NTASKS" in handed) == (not outer, not outer)


def test_a_slurmctld_that_fails_once_does_not_keep_a_fleet_from_its_end(tmp_path, slurm):
    ended(slurm("up"))
    (tmp_path / "asked").unlink()
    (tmp_path / "deaf_at").write_text("2")
    code, _, error = ended(slurm("down", "--drain-s=2", "--timeout-s=20"))
    assert "Unable to contact slurm controller (connect failure); trying again" in error
    assert (tmp_path / "cancels").read_text().splitlines() == ["--batch --signal=TERM 17", "17"]
    assert code == 0


def test_a_fleet_that_waits_for_machines_has_nothing_to_drain(tmp_path, slurm):
    ended(slurm("up"))
    (tmp_path / "state").write_text("PENDING")
    code, _, error = ended(slurm("drain"))
    assert code == 1
    assert "job 17 waits for machines; `prorl-trio slurm down` takes it back" in error
    code, _, _ = ended(slurm("down", "--drain-s=30"))
    assert code == 0
    assert (tmp_path / "cancels").read_text().splitlines() == ["17"]
    code, _, error = ended(slurm("drain"))
    assert code == 1
    assert "job 17 has ended" in error
