"""`prorl-trio slurm` on a real Slurm, with a job that is held, so that nothing of it runs."""

from __future__ import annotations

import json
import shutil
import stat
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]

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


def test_the_doctor_sees_the_cluster(slurm):
    done = slurm.run("srun", "-N1", "-n1", PROGRAM, "doctor", "--slurm", "--no-engine", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["slurm"]["state"] == "ok", checks
    assert "linuxproc" in checks["process tracking"]["detail"]
    assert checks["local folder"]["detail"].startswith("/tmp")
    assert checks["address"]["state"] == ("ok" if slurm.separate else "warning")
