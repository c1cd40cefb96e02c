"""The rig itself: four nodes that differ as those of a real cluster do, and fail as they do."""

from __future__ import annotations

import secrets

import pytest

from support.remains import marked
from support.skips import because
from support.slurm_cluster import kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_each_node_has_a_name_a_network_and_a_tmp_of_its_own(slurm):
    if not slurm.separate:
        pytest.skip(because("no networks can be made here", "run it where root may make them"))
    told = slurm.said("srun", "-N4", "-n4", "sh", "-c", "touch /tmp/seen; hostname; ls -d /tmp/* | wc -l")
    assert sorted(told.split()) == ["1", "1", "1", "1", "n1", "n2", "n3", "n4"]
    assert all((slurm.temporary(node) / "seen").exists() for node in (1, 2, 3, 4))
    for node in (1, 2, 3, 4):
        (slurm.temporary(node) / "seen").unlink()


def test_exit_codes_come_through(slurm):
    assert slurm.run("srun", "-N1", "-n1", "sh", "-c", "exit 7").returncode == 7


@pytest.mark.parametrize(("slurm", "survives"), [("linuxproc", True), ("cgroup", False)], indirect=["slurm"])
def test_by_control_groups_slurm_ends_also_what_left_the_session_of_a_task(slurm, survives):
    mark = secrets.token_hex(8)
    slurm.said("srun", "-n1", "sh", "-c", f"PRORL_TEST_MARK={mark} setsid sleep 600 >/dev/null 2>&1 &")
    orphans = [int(line.split()[0]) for line in marked(mark)]
    for pid in orphans:
        kill(pid)
    assert len(orphans) == survives
