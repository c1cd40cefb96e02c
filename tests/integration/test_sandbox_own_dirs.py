"""A project that is itself below a folder which, inside, is the sandbox's own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest
import trio

from ipc.limits import SandboxLimits
from prorl_trio.sandbox.provider import SandboxSpec

MIB = 1024 * 1024


@pytest.fixture(params=["/tmp", "/var/tmp", "/dev/shm"])
def project_below(request, monkeypatch):
    """An environment there, which this process takes for its own. Its packages are this one's, seen through a link."""
    if Path(sysconfig.get_path("purelib")).is_relative_to("/tmp"):
        pytest.skip(
            "this suite itself runs from below /tmp: the packages that the link leads to go with `rm -rf /tmp/*`"
        )
    with tempfile.TemporaryDirectory(dir=request.param) as folder:
        environment = Path(folder, "project", ".venv")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        (packages,) = environment.glob("lib/python*/site-packages")
        (packages / "theirs.pth").write_text(sysconfig.get_path("purelib"))
        (environment / "bin/greet").write_text(f"#!{environment}/bin/python3\nprint('greetings')\n")
        (environment / "bin/greet").chmod(0o755)
        monkeypatch.setattr(sys, "base_prefix", sys.prefix)
        monkeypatch.setattr(sys, "prefix", str(environment))
        monkeypatch.setattr(sys, "executable", str(environment / "bin/python"))
        yield environment


async def test_the_project_works_and_tmp_keeps_its_limit(provider, project_below):
    with trio.fail_after(90):
        async with provider.open_sandbox(SandboxSpec(limits=SandboxLimits(disk_bytes=64 * MIB))) as sandbox:

            async def bash(command):
                result = await sandbox.bash(command, timeout_s=40)
                return result.output.strip(), result.exit_code, result.breach

            assert await bash("python3 -c 'import numpy, sympy; print(sympy.sqrt(16))'") == ("4", 0, "")
            assert await bash("greet") == ("greetings", 0, ""), "a script that names its interpreter by its old path"
            output, _, _ = await bash(f"touch {project_below}/x || touch $(dirname $(command -v python3))/x; echo")
            assert output.count("Read-only file system") == 2
            assert (await sandbox.ipython("import sympy; sympy.sqrt(16)", timeout_s=40)).result == "4"
            bomb = "for i in $(seq 40); do head -c 8M /dev/zero > /tmp/bomb$i || break; sleep 0.02; done"
            assert (await bash(bomb))[2] == "disk"
            await bash("rm -rf /tmp/*")
            assert await bash("python3 -c 'import numpy; print(numpy.ones(2).sum())'") == ("2.0", 0, "")
            assert await bash("df --output=fstype /tmp | tail -n 1") in (("tmpfs", 0, ""), ("overlay", 0, ""))
    assert not list(project_below.glob("**/x"))
