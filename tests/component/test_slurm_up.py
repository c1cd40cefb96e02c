"""`prorl-trio slurm up` beside another one, with a fake sbatch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.quiet_clock import stretched, wait_until

RUN = [sys.executable, "-m", "prorl_trio.cli", "slurm", "up", "--nodes=1"]
SBATCH = """#!/bin/sh
if mkdir {folder}/begun; then read go <{folder}/go; echo 17; else echo 18; fi
"""


@pytest.fixture
def commands(tmp_path):
    """The environment with an sbatch of which the first waits, and a queue that is empty."""
    os.mkfifo(tmp_path / "go")
    for name, text in {"sbatch": SBATCH.format(folder=tmp_path), "squeue": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "node.toml").write_text('[model]\npath = "/models/m"\n')
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_a_fleet_that_another_command_is_submitting_is_not_submitted_twice(tmp_path, commands):
    words = [*RUN, f"--config={tmp_path}/node.toml", f"--fleet={tmp_path}/fleet"]
    with subprocess.Popen(words, env=commands, stdout=subprocess.PIPE, text=True) as first:
        wait_until((tmp_path / "begun").exists, "sbatch is at work", 60)
        second = subprocess.run(words, env=commands, capture_output=True, text=True, timeout=stretched(60), check=False)
        (tmp_path / "go").write_text("go\n")
        said, _ = first.communicate(timeout=stretched(60))
    assert (first.returncode, second.returncode) == (0, 1)
    assert "another `prorl-trio slurm up` is submitting the fleet" in second.stderr
    assert said.startswith("job 17;")
    assert (tmp_path / "fleet/slurm/job_id").read_text() == "17"
