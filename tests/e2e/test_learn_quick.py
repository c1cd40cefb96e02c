"""`prorl-trio learn`, interrupted and gone on with: real vLLM, real sandboxes, real weights that change.

In these minutes little can be learned, so it is not asserted that the reward rises.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import trio

from prorl_launch.learning.record import read_record
from prorl_launch.paths import engine_python, trainer_python
from prorl_trio.config import SandboxConfig
from prorl_trio.sampling import ManifestLine
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.types.errors import ConfigError
from support.skips import because
from support.soak import adopted_orphans

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

GAP = 0.05
FIRST_STEP_S = 500.0
END_S = 30.0


def learn(*options):
    command = [sys.executable, "-m", "prorl_trio.cli", "learn", *map(str, options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_a_step(run, folder):
    """Wait until the first step has its checkpoint."""
    deadline = time.monotonic() + FIRST_STEP_S
    while not list(folder.glob("*/checkpoints/step-000001")):
        assert run.poll() is None, run.stdout.read()
        assert time.monotonic() < deadline, "no step was taken"
        time.sleep(0.2)


def processes_of(folder):
    """Command lines that name the run's folder, and the engines that the test has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


@pytest.fixture
def prerequisites():
    for python, remedy in ((engine_python(), "make engine"), (trainer_python("train"), "make trainers")):
        if not python.exists():
            pytest.skip(because(f"{python} is not set up", remedy))
    try:
        trio.run(choose_provider, SandboxConfig())
    except ConfigError as exc:
        pytest.skip(because(f"no sandbox works on this machine: {exc}", "prorl-trio doctor"))


def test_a_run_is_interrupted_goes_on_and_ends_with_its_curve(prerequisites, tmp_path):
    with adopted_orphans():
        first = learn("--quick", "--seed", 3, "--out", tmp_path)
        wait_for_a_step(first, tmp_path)
        first.send_signal(signal.SIGINT)
        said, _ = first.communicate(timeout=END_S)
        (run,) = tmp_path.iterdir()
        assert first.returncode == 130, said
        assert f"prorl-trio learn --resume {run}" in said
        assert processes_of(tmp_path) == []
        weights = [(run / "checkpoints" / "step-000001" / "model.safetensors").read_bytes()]
        before = read_record(run)

        second = learn("--resume", run)
        said, _ = second.communicate(timeout=FIRST_STEP_S)
        assert second.returncode == 0, said
        assert processes_of(tmp_path) == []
    record = read_record(run)
    assert re.search(r"held out after +2 updates: greedy 0\.\d\d|1\.00", said)
    assert [step.step for step in record.steps] == [1, 2]
    assert record.steps[0] == before.steps[0], "what was done before the interruption stays"
    assert [each.step for each in record.evaluations] == [0, 2]
    weights.append((run / "checkpoints" / "step-000002" / "model.safetensors").read_bytes())
    assert weights[0] != weights[1], "the weights did not change"
    assert all(0.0 <= each.gap < GAP for each in record.evaluations)
    assert [each.failed for each in record.evaluations] == [0, 0]
    assert_versions_and_files(run, record)


def assert_versions_and_files(run, record):
    """Rollouts were sampled under versions that advance, and each is in the manifest once."""
    after = (run / "examples-after.md").read_text()
    assert "Policy version 2" in after
    assert "Policy version 0" in (run / "examples-before.md").read_text()
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    settings = record.settings
    assert all(step.trained == settings.groups * settings.rollouts for step in record.steps)
    assert all(max(step.staleness) <= settings.max_staleness for step in record.steps)
    assert {"held_out_greedy_first", "held_out_greedy_last", "gap_max", "step_s"} <= json.loads(
        (run / "curve.json").read_text()
    )["summary"].keys()
    lines = [
        msgspec.json.decode(line, type=ManifestLine)
        for line in (run / "sampling" / "manifest.jsonl").read_bytes().splitlines()
    ]
    ended = [line.job_id for line in lines if line.fate != "carried"]
    assert len(ended) == len(set(ended))
    assert sum(line.fate == "trained" for line in lines) == sum(step.trained for step in record.steps)
