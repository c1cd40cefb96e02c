"""The unit of systemd that is shipped says what a node does with signals, exit codes and control groups."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

from prorl_trio.cli.exit_codes import EXIT_JOBS_CUT
from prorl_trio.node.serve import DELIVERY_TIMEOUT_S

UNIT = Path(__file__).parents[2] / "launch/systemd/prorl-node.service"
DRAIN_TIMEOUT_S = 600.0
"""That of the manifests for Kubernetes, which have the same grace."""


def test_it_gives_a_drain_its_time_and_knows_the_nodes_exit_code():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(UNIT)
    service = unit["Service"]
    assert float(service["TimeoutStopSec"]) > DRAIN_TIMEOUT_S + DELIVERY_TIMEOUT_S
    assert int(service["SuccessExitStatus"]) == EXIT_JOBS_CUT
    assert (service["KillMode"], service["Delegate"], service["DelegateSubgroup"]) == ("mixed", "yes", "node")
    assert re.search(r"prorl-trio serve --config /\S+/node\.toml$", service["ExecStart"])


def test_systemd_reads_it(tmp_path):
    verify = shutil.which("systemd-analyze")
    if verify is None:
        return  # no systemd here: the text was looked at above
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text()).replace("User=prorl\n", ""))
    done = subprocess.run([verify, "verify", str(copy)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
