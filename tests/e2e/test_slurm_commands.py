"""`prorl-trio slurm` on a real Slurm, with a job that is held, so that nothing of it runs."""

from __future__ import annotations

import json
import shutil
import stat
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = str(Path(sys.executable).with_name("prorl-trio"))


@pytest.fixture
def shared(slurm):
    """A folder that all machines see, with a node.toml."""
    folder = Path(tempfile.mkdtemp(prefix="shared-", dir=slurm.folder))
    (folder / "node.toml").write_text('[model]\npath = "/models/m"\n')
    yield folder
    slurm.cancel_all()
    shutil.rmtree(folder)


def test_a_fleet_is_submitted_once_told_of_and_ended(slurm, shared):
    where = ("--fleet", str(shared / "fleet"))
    up = (PROGRAM, "slurm", "up", *where, "--config", str(shared / "node.toml"), "--nodes", "4", "--hold", "-J", "mine")
    assert slurm.said(*up).startswith("job ")
    script = (shared / "fleet/slurm/job.sh").read_text()
    assert slurm.said(*up, "--print") == script.strip()
    assert stat.S_IMODE((shared / "fleet").stat().st_mode) == 0o700

    told = json.loads(slurm.said(PROGRAM, "slurm", "status", *where))
    job = told["job_id"]
    assert (told["job"]["state"], told["job"]["reason"], told["nodes"]) == ("PENDING", "JobHeldUser", {})
    shown = slurm.said("scontrol", "show", "job", job)
    assert "JobName=mine" in shown, "an option of sbatch's overrules ours"
    assert "Requeue=1" in shown
    assert "NumNodes=4" in shown

    again = slurm.run(*up)
    assert again.returncode == 1
    assert f"job {job} is the fleet" in again.stderr

    slurm.said(PROGRAM, "slurm", "down", *where)
    assert slurm.said("squeue", "-h") == ""
    assert json.loads(slurm.said(PROGRAM, "slurm", "status", *where))["job"] is None
    slurm.said(PROGRAM, "slurm", "down", *where)


def test_what_slurm_refuses_is_told_in_its_words(slurm, shared):
    where = ("--fleet", str(shared / "fleet"), "--config", str(shared / "node.toml"))
    done = slurm.run(PROGRAM, "slurm", "up", *where, "--nodes", "5")
    assert done.returncode == 1
    assert "sbatch failed" in done.stderr
    assert "Node count specification invalid" in done.stderr or "node configuration" in done.stderr, done.stderr
    done = slurm.run(PROGRAM, "slurm", "down", *where[:2])
    assert done.returncode == 1
    assert "no fleet was started in" in done.stderr


def test_options_of_the_command_line_overrule_those_of_the_environment_as_sbatchs_do(slurm, shared):
    where = ("--fleet", str(shared / "fleet"))
    options = ("--config", str(shared / "node.toml"), "--nodes", "2", "--hold", "--partition", "urgent")
    others = ("SBATCH_PARTITION=main", "SBATCH_JOB_NAME=other", "SBATCH_SIGNAL=HUP@7", "SBATCH_OUTPUT=/dev/null")
    slurm.said("env", *others, "SBATCH_TIMELIMIT=7", PROGRAM, "slurm", "up", *where, *options)
    job = json.loads(slurm.said(PROGRAM, "slurm", "status", *where))["job_id"]
    shown = slurm.said("scontrol", "show", "job", job)
    assert "Partition=urgent" in shown
    assert "JobName=prorl-trio" in shown
    assert f"StdOut={shared}/fleet/slurm/{job}.log" in shown
    assert "TimeLimit=00:07:00" in shown, "what is not said is the environment's"
    slurm.said(PROGRAM, "slurm", "down", *where)


def test_options_of_two_groups_stay_apart_and_no_variable_overrules_them(slurm, shared):
    where = ("--fleet", str(shared / "fleet"), "--config", str(shared / "node.toml"), "--nodes", "2", "--hold")
    engines = (
        "--engine",
        "serve",
        "--engine-nodes",
        "1",
        "--engine-sbatch=--time=5",
        "--engine-sbatch=--partition=urgent",
    )
    up = (PROGRAM, "slurm", "up", *where, *engines)
    done = slurm.run("env", "SBATCH_PARTITION=main", *up)
    assert done.returncode == 1
    assert "SBATCH_PARTITION is set, and sbatch would let it overrule --partition" in done.stderr
    slurm.said("env", "SBATCH_ACCOUNT=mine", *up)
    job = json.loads(slurm.said(PROGRAM, "slurm", "status", *where[:2]))["job_id"]
    nodes, engine = slurm.said("scontrol", "show", "job", job).split("\n\n")
    for word, other in (("NumNodes=2", "NumNodes=1"), ("Partition=main", "Partition=urgent")):
        assert word in nodes
        assert other in engine
    assert "TimeLimit=00:05:00" in engine
    assert "TimeLimit=00:05:00" not in nodes
    slurm.said(PROGRAM, "slurm", "down", *where[:2])


def test_whether_a_fleet_could_run_is_told_and_waiting_for_its_end_is_refused(slurm, shared):
    where = ("--fleet", str(shared / "fleet"))
    up = (PROGRAM, "slurm", "up", *where, "--config", str(shared / "node.toml"), "--nodes", "4")
    assert "to start at" in slurm.said(*up, "--test-only")
    assert slurm.run(PROGRAM, "slurm", "status", *where).returncode == 1, "nothing was submitted"
    done = slurm.run(*up, "--wait")
    assert done.returncode == 1
    assert "--wait: a fleet runs until it is ended" in done.stderr
    assert slurm.said("squeue", "-h") == ""


def test_of_two_commands_at_once_one_submits_the_fleet(slurm, shared):
    where = ("--fleet", str(shared / "fleet"), "--config", str(shared / "node.toml"), "--nodes", "1", "--hold")
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: slurm.run(PROGRAM, "slurm", "up", *where), range(4)))
    assert sorted(each.returncode for each in done) == [0, 1, 1, 1], [each.stderr for each in done]
    (job,) = slurm.said("squeue", "-h", "-o", "%A").split()
    assert (shared / "fleet/slurm/job_id").read_text() == job


def test_the_doctor_sees_the_cluster(slurm):
    done = slurm.run("srun", "-N1", "-n1", PROGRAM, "doctor", "--slurm", "--no-engine", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["slurm"]["state"] == "ok", checks
    assert "linuxproc" in checks["process tracking"]["detail"]
    assert checks["local folder"]["detail"].startswith("/tmp")
    assert checks["address"]["state"] == ("ok" if slurm.separate else "warning")
