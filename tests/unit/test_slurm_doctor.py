"""`doctor --slurm` examines a cluster."""

from __future__ import annotations

import os

import pytest

from prorl_launch.slurm import doctor

SCONTROL = """#!/bin/sh
cat <<END
Configuration data as of 2026-01-01
ClusterName             = big
KillWait                = {kill_wait} sec
ProctrackType           = proctrack/{tracking}
SLURM_VERSION           = 22.05.8
END
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Commands named as Slurm's, of which one tells settings."""

    def make(**settings):
        for name in ("sbatch", "srun", "scancel", "squeue", "scontrol"):
            path = tmp_path / name
            path.write_text(SCONTROL.format(**settings) if name == "scontrol" and settings else "#!/bin/sh\nexit 1\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return {check.name: check for check in doctor.examine_slurm()}

    return make


def test_without_slurm_it_says_what_is_missing(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    (check,) = doctor.examine_slurm()
    assert check.state == "missing"
    assert "no sbatch, srun" in check.detail


def test_a_controller_that_does_not_answer_is_named(cluster):
    assert cluster()["slurm"].detail == "slurmctld does not answer"


@pytest.mark.parametrize(("tracking", "said"), [("cgroup", "ends whatever"), ("linuxproc", "leaves orphans")])
def test_the_settings_that_matter_are_told(cluster, tracking, said):
    checks = cluster(kill_wait=30, tracking=tracking)
    assert checks["slurm"].detail == "cluster big, version 22.05.8"
    assert said in checks["process tracking"].detail
    assert checks["KillWait"].state == checks["local folder"].state == "ok"


def test_a_short_time_after_scancel_is_a_warning_with_a_way_out(cluster):
    check = cluster(kill_wait=5, tracking="cgroup")["KillWait"]
    assert check.state == "warning"
    assert "--drain-s" in check.remedy


def test_a_name_without_an_address_is_told(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-machine.invalid")
    check = doctor._name()
    assert check.state == "missing"
    assert "no-such-machine.invalid" in check.detail


def test_an_address_that_only_this_machine_reaches_is_a_warning_in_a_job(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert doctor._name().state == "ok"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert doctor._name().state == "warning"
