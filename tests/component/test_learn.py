"""The reference trainer. Its checks are in `learn_checks.py`: torch is in an environment of its own."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest

from launch.paths import checkout_dir, trainer_python
from support.skips import because

SCRIPT = Path(__file__).with_name("learn_checks.py")
CHECKS = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]
MAX_LINES = 500

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What became of each check: nothing, or where it failed. All run in one process."""
    if not trainer_python("train").exists():
        pytest.skip(because("the trainers' environment is not set up", "make trainers"))
    path = tmp_path_factory.mktemp("learn") / "results.json"
    env = {**os.environ, "PYTHONPATH": str(checkout_dir()), "OMP_NUM_THREADS": "1"}
    argv = [trainer_python("train"), SCRIPT, path]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_trainers_environment(check, results):
    assert not results[check], results[check]


def test_the_reference_trainer_is_short():
    files = (checkout_dir() / "prorl_trio" / "learn").glob("*.py")
    assert sum(len(path.read_text().splitlines()) for path in files) < MAX_LINES
