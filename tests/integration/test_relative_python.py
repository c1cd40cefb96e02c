"""A node whose Python was found by a relative path has sandboxes on the image `host` all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from prorl_trio.sandbox.providers.registry import PROVIDERS

RUN_TIMEOUT_S = 120
SCRIPT = """
import sys
from pathlib import Path
import trio
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.registry import PROVIDERS

async def main():
    async with PROVIDERS[sys.argv[1]](Path(sys.argv[2])).open_sandbox(SandboxSpec()) as sandbox:
        result = await sandbox.exec(["python3", "-c", "import numpy; print('works')"], timeout_s=60)
        sys.stdout.write(f"{sys.executable} {result.stdout.decode()} {result.stderr.decode()}")

trio.run(main)
"""
CALLS = {
    "through another folder": lambda python: (str(python), {}),
    "by a relative PATH": lambda python: (python.name, {"PATH": f"{python.parent}:/usr/bin:/bin"}),
}


@pytest.mark.parametrize("how", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("provider", ["bubblewrap", "apptainer", "process"])
def test_a_relative_python(provider, how, tmp_path):
    report = trio.run(PROVIDERS[provider]().probe)
    if not report.usable:
        pytest.skip(f"{provider} cannot run here: {report.problem}. What to do: {report.remedy}")
    python = Path(os.path.relpath(sys.executable, tmp_path))
    name, env = how(python)
    done = subprocess.run(
        [name, "-c", SCRIPT, provider, str(tmp_path)],
        executable=python,
        cwd=tmp_path,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.stdout.split() == [f"{done.stdout.split()[0]}", "works"], done.stderr
    assert ".." in done.stdout
