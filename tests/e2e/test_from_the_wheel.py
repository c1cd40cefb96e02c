"""From a wheel, without a checkout: set-up, the demo on a real engine, an example, and a handler of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from prorl_launch.paths import engine_dir, engine_python, model_dir
from support.own_handler import MODULE
from support.skips import because

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

CHECKOUT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 200


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Run programs of a new environment with the wheel, in a folder of their own: `installed("prorl-trio", ...)`.

    What the project depends on is that of `.venv`, which is no part of what is tested.
    """
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=CHECKOUT, capture_output=True, check=True)
    (wheel,) = folder.glob("*.whl")
    env = folder / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(env / "bin/python"),
        "install",
        "--quiet",
        "--no-index",
        "--no-compile",
    ]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    (site,) = env.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # whose own .pth files are not read
    work = folder / "work"
    work.mkdir()
    (work / "my_env.py").write_text(MODULE)
    (work / "tasks.jsonl").write_text('{"instance_id": "t", "handler": "support", "payload": {"request": "help"}}')
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(program, *arguments):
        argv = [str(env / "bin" / program), *map(str, arguments)]
        done = subprocess.run(argv, cwd=work, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    run.work = work
    return run


def test_the_packages_are_those_of_the_wheel_and_the_environments_those_of_a_checkout(installed):
    code = "import prorl_trio, prorl_launch.paths as p; print(prorl_trio.__file__, p.is_checkout(), p.engine_dir())"
    home, is_checkout, engine = installed("python", "-c", code).split()
    assert Path(home).is_relative_to(installed.work.parent)
    assert (is_checkout, engine) == ("False", str(engine_dir()))


def test_an_example_and_a_handler_of_ones_own_run(installed):
    installed("prorl-trio", "examples", "copy", "mine")
    assert installed("python", "mine/examples/handler.py", "bubblewrap").startswith("add-0 completed, reward 1.0")
    shown = installed("prorl-trio", "run", "my_env:SupportHandler", "--task", "tasks.jsonl")
    assert shown.splitlines()[-1] == "t: completed, reward 1.0"


@pytest.mark.skipif(not engine_python().exists(), reason=because("the CPU engine is not set up", "make engine"))
def test_what_is_set_up_serves_the_demo_and_a_handler(installed, vllm_url):
    assert installed("prorl-trio", "setup", "engine").count("\n") == 1, "it is complete: nothing is made again"
    checks = {each["name"]: each["state"] for each in json.loads(installed("prorl-trio", "doctor", "--json"))["checks"]}
    assert checks["engine"] == checks["model"] == "ok"
    policy = ["--model", model_dir()]
    installed("prorl-trio", "demo", "--questions", 2, "--rollouts", 2, "--backend", vllm_url, *policy)
    (run,) = (installed.work / "runs").iterdir()
    assert "4 outcomes" in installed("prorl-trio", "show", run.relative_to(installed.work))
    shown = installed(
        "prorl-trio", "run", "my_env:SupportHandler", "--task", "tasks.jsonl", "--policy", vllm_url, *policy,
        "--max-turns", 1, "--max-output-tokens", 16,
    )  # fmt: skip
    assert "t: completed, reward " in shown
