"""Namespaces that other programs keep by a mount are not taken for what a sandbox left; those of sandboxes are."""

from __future__ import annotations

import subprocess
import sys

import pytest

from prorl_launch.userns import user_namespace_problem
from support.skips import because

PROGRAM = """
import subprocess
from prorl_trio.testing.sandbox_check import mounts_of_sandboxes

def keep(place, *options):
    command = ["unshare", *options, "--net", "sh", "-c", "echo; read end"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        subprocess.run(["mount", "--bind", f"/proc/{holder.pid}/ns/net", place], check=True)

keep("strangers")
keep("sandboxes", "--user", "--map-root-user")
subprocess.run(["mount", "-t", "tmpfs", "none", "plain"], check=True)
print(*mounts_of_sandboxes(), sep="\\n")
"""


def test_a_namespace_counts_if_a_sandbox_can_have_made_it(tmp_path):
    if problem := user_namespace_problem():
        pytest.skip(because(f"no user namespaces here: {problem}", "see `prorl-trio doctor`"))
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "strangers").touch()
    (folder / "sandboxes").touch()
    (folder / "plain").mkdir()
    inside = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", PROGRAM]
    done = subprocess.run(inside, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told = [line.split(" ") for line in done.stdout.splitlines()]
    ours = {fields[1].rpartition("/")[2]: fields[2] for fields in told if str(tmp_path) in fields[1]}
    assert ours == {"plain": "tmpfs", "sandboxes": "nsfs"}
