"""The programs of examples/ do what they say, each against a local node with a made-up policy, and are short."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from prorl_trio.sandbox.providers.registry import probe_providers
from support.agents import installed
from support.skips import because

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 120
TIMEOUT_S = 100

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def provider():
    """A provider that works here: one that isolates, if there is one."""
    reports = trio.run(probe_providers)
    return next((report.name for report in reports if report.usable), "process")


def command(name, *arguments):
    return [sys.executable, str(EXAMPLES / name), *arguments]


def run(name, *arguments, **env):
    done = subprocess.run(
        command(name, *arguments), env={**os.environ, **env}, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def local_node(provider):
    """The variables that `examples/local_node.py` says to export, while it runs."""
    with subprocess.Popen(command("local_node.py", provider), stdout=subprocess.PIPE, text=True) as node:
        try:
            words = shlex.split(node.stdout.readline())
            assert words[:1] == ["export"], words
            yield dict(word.split("=", 1) for word in words[1:])
            node.send_signal(signal.SIGINT)
            assert node.wait(TIMEOUT_S) == 0
        finally:
            node.kill()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_is_run(path):
    assert len(path.read_text().splitlines()) < MAX_LINES
    elsewhere = Path(__file__).with_name("test_tinker_train.py").read_text()
    assert f'"{path.name}"' in Path(__file__).read_text() or f"import {path.stem};" in elsewhere


def test_a_handler_of_ones_own(provider):
    assert run("handler.py", provider) == (
        "add-0 completed, reward 1.0: {'module': 'def add(a, b): return a + b\\n'}\n"
    )


def test_a_provider_of_ones_own_keeps_the_contract():
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--user", "--pid", "--fork", "true"], check=False).returncode:
        pytest.skip(because("unshare makes no namespaces here", "install util-linux, and allow user namespaces"))
    checks = (
        "bash_keeps_state",
        "two_at_once",
        "cancelled_call",
        "what_a_killed_daemon_leaves",
        "background_processes_end",
    )
    assert run("provider.py", *checks) == "".join(f"ok {check}\n" for check in checks)


def test_a_script_over_rest(provider):
    with local_node(provider) as env:
        for _ in range(2):
            lines = run("rest.py", **env).splitlines()
            assert len([line for line in lines if " completed, reward " in line and line.endswith(" tokens")]) == 6
            assert lines[-1] == "the node has 0 live rollouts"


def test_a_trainers_loop_with_a_weight_update(provider):
    with local_node(provider) as env:
        first, second = run("trainer_loop.py", **env).splitlines()
    assert re.match(r"step 1: 8 rollouts by \['0'\], reward 0\.\d+, loss ", first)
    assert re.match(r"step 2: 8 rollouts by \['1'\], reward 0\.\d+, loss ", second)


def test_agents_that_people_have():
    names = ["mini-swe-agent", "pi"]
    for name in names:
        installed(name)
    lines = run("blackbox_agent.py", *names).splitlines()
    assert [line for line in lines if ": completed, reward 1.0" in line] == lines[:1] + lines[5:6]
    assert sum(line.startswith("  segment 0 (the task): ") for line in lines) == len(names)
