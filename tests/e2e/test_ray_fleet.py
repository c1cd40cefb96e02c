"""Fleets in a real Ray cluster of several raylets: start, use, end, and kills of nodes, actors, machines, drivers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from prorl_launch.paths import import_path
from support.verl_rig import TESTS, verl_python

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

CASES = re.findall(r"^def (case_\w+)", (TESTS / "support/ray_cluster.py").read_text(), re.MULTILINE)
WITHIN_S = 580


@pytest.fixture(scope="module")
def results():
    """The traceback of each case; empty if it passed. One cluster has them all, because it takes long to start."""
    python = str(verl_python())
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # short, for sockets
    try:
        for name in ("tmp", "site"):
            (folder / name).mkdir()
        installed = Path(distribution("prorl-trio").locate_file("")).glob("prorl_trio-*.dist-info")
        shutil.copytree(next(installed), folder / "site/prorl_trio.dist-info")  # the entry points of handlers
        env = {
            **os.environ,
            "PYTHONPATH": f"{import_path()}:{TESTS}:{folder}/site",
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "RAY_TMPDIR": str(folder / "ray"),
            "RAY_raylet_start_wait_time_s": "300",
        }
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # each of Ray's processes imports the same modules
        with (folder / "log").open("wb") as log:
            program = subprocess.Popen(
                [python, "-m", "support.ray_cluster", str(folder)],
                cwd=folder,
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                program.wait(WITHIN_S)
            finally:
                if program.poll() is None:
                    os.killpg(program.pid, signal.SIGKILL)
                    program.wait()
        found = folder / "results.json"
        told = json.loads(found.read_text()) if found.exists() else {}
        yield told | {"log": (folder / "log").read_text(errors="replace")[-6000:]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("case", CASES)
def test_a_fleet_in_a_ray_cluster(results, case):
    if why := results.get(case, results["log"]):
        pytest.fail(why, pytrace=False)
