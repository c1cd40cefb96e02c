"""Every file that set-up installs can be had as a wheel: pip is asked for nothing else, and installs nothing.

On a fresh machine set-up itself proves it, because it installs only wheels. Run this test after `make lock`, on a
machine where everything is installed already.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from prorl_launch.locks import WHEELS_ONLY, lock_path
from support.skips import because

pytestmark = pytest.mark.soak

TIMEOUT_S = 600
LOCKS = ["dev", "engine-cpu", "model", "train-cpu"]
PIP = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps", *WHEELS_ONLY]


def ask(*arguments):
    return subprocess.run([*PIP, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.fixture(scope="module")
def index():
    """It answers. Skips where none does."""
    if (found := ask("idna")).returncode:
        pytest.skip(because(f"no package index answers: {found.stderr.strip()[-300:]}", "look at the network"))


def requirements(name):
    """The lines of a lock, without their hashes: with them pip fetches each file whole to look at it."""
    lines = lock_path(name).read_text().splitlines()
    return [line.removesuffix(" \\") for line in lines if line and not line.startswith((" ", "#"))]


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("name", LOCKS)
def test_the_index_has_a_wheel_of_everything(name, tmp_path):
    """Of what an earlier lock has as well it was asked there."""
    asked = {line for earlier in LOCKS[: LOCKS.index(name)] for line in requirements(earlier)}
    (tmp_path / "plain.txt").write_text("\n".join(line for line in requirements(name) if line not in asked))
    done = ask("--requirement", str(tmp_path / "plain.txt"))
    assert done.returncode == 0, done.stderr[-3000:]
