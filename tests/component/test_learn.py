"""The reference trainer. Its checks are in `support.learn_checks`: torch is in an environment of its own."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio

from prorl_launch.paths import checkout_dir, import_path, trainer_python
from prorl_trio.types.models import PolicySpan, Segment, Trajectory
from support.fake_node import FakeNode, make_outcome
from support.fake_service import TOKEN, open_service
from support.skips import because

TESTS = Path(__file__).parents[1]
CHECKS = [
    node.name
    for path in sorted(TESTS.glob("support/learn_checks/*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]
PROGRAM = ("-m", "support.learn_checks")
MAX_LINES = 500

pytestmark = pytest.mark.timeout(300)


def in_the_trainers_environment(*argv, cwd=None, **env):
    """Run a program there; return what it printed."""
    python = trainer_python("train")
    if not python.exists():
        pytest.skip(because("the trainers' environment is not set up", "make trainers"))
    env = {
        **os.environ,
        "PYTHONPATH": f"{import_path()}:{TESTS}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **env,
    }
    done = subprocess.run([python, *argv], env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return where each check failed, or nothing. All run in one process."""
    path = tmp_path_factory.mktemp("learn") / "results.json"
    in_the_trainers_environment(*PROGRAM, path)
    return json.loads(path.read_text())


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_trainers_environment(check, results):
    assert not results[check], results[check]


class Node(FakeNode):
    """Every second rollout of a group is right. Tokens are of the small vocabulary of the checks' model."""

    def __init__(self):
        super().__init__(lambda spec: self.outcome_of(spec))

    def outcome_of(self, spec):
        member = int(spec.job_id.split("-")[-2])
        ids = np.arange(12) * (3 + member) % 50
        span = PolicySpan(start=5, end=12, policy_version=self.backends.policy_version, engine="e")
        segment = Segment.from_arrays(ids, np.full(12, -3.0), np.arange(12) >= 5, [span])
        trajectory = Trajectory(segments=[segment], turns=[], stop_reason="finished")
        return msgspec.structs.replace(make_outcome(spec, reward=float(member % 2)), trajectory=trajectory)

    def check(self, spec, sink, ahead):
        pass


async def test_the_loop_of_the_guide_trains_and_updates_the_policy(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", (checkout_dir() / "docs" / "learn.md").read_text(), re.DOTALL)
    program = tmp_path / "program.py"
    program.write_text(block)
    node = Node()
    with trio.fail_after(200):
        await node.backends.add("http://127.0.0.1:1")
        async with open_service(node) as service:
            env = {"PRORL_URL": service.url, "PRORL_TOKEN": TOKEN, "MODEL": str(tmp_path / "model"), "DEVICE": "cpu"}
            said = await trio.to_thread.run_sync(
                lambda: in_the_trainers_environment(*PROGRAM, "--model-for", program, cwd=tmp_path, **env)
            )
            assert node.backends.policy_version == "3"
        await node.backends.aclose()
    assert said == "1 0.50 56\n2 0.50 56\n3 0.50 56\n"
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-000002", "step-000003"]


def test_an_import_without_torch_says_which_extra_has_it():
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'prorl-trio[train]'")):
        importlib.import_module("prorl_trio.learn")


def test_the_reference_trainer_is_short():
    files = (checkout_dir() / "prorl_trio" / "learn").glob("*.py")
    assert sum(len(path.read_text().splitlines()) for path in files) < MAX_LINES
