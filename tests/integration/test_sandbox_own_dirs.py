"""What the node keeps below a folder which, inside, is the sandbox's own."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import trio

from prorl_ipc.limits import SandboxLimits
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.runtime.host_python import HOST_PYTHON_DIR, require_host_python

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def cache_below_tmp():
    """A cache in /tmp, with the Python of sandboxes in it: a copy, as to make it takes seconds."""
    made = require_host_python()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        shutil.copytree(made, Path(folder) / "host-pythons" / made.name, symlinks=True)
        patch.setenv("PRORL_CACHE_DIR", folder)
        require_host_python.cache_clear()
        assert require_host_python().is_relative_to(folder)
        yield Path(folder)
    require_host_python.cache_clear()


async def test_python_works_and_tmp_keeps_its_limit(provider, cache_below_tmp):
    with trio.fail_after(90):
        async with provider.open_sandbox(SandboxSpec(limits=SandboxLimits(disk_bytes=64 * MIB))) as sandbox:

            async def bash(command):
                result = await sandbox.bash(command, timeout_s=40)
                return result.output.strip(), result.exit_code, result.breach

            assert await bash(f"ls {cache_below_tmp} 2>/dev/null; ls -A /tmp") == ("", 0, "")
            assert await bash("python3 -c 'import numpy, sympy; print(sympy.sqrt(16))'") == ("4", 0, "")
            assert await bash("ipython --no-banner -c 'print(6 * 7)'") == ("42", 0, "")
            output, _, _ = await bash(f"touch {HOST_PYTHON_DIR}/x || touch $(dirname $(command -v python3))/x; echo")
            assert output.count("Read-only file system") == 2
            assert (await sandbox.ipython("import sympy; sympy.sqrt(16)", timeout_s=40)).result == "4"
            bomb = "for i in $(seq 40); do head -c 8M /dev/zero > /tmp/bomb$i || break; sleep 0.02; done"
            assert (await bash(bomb))[2] == "disk"
            await bash("rm -rf /tmp/*")
            assert await bash("python3 -c 'import numpy; print(numpy.ones(2).sum())'") == ("2.0", 0, "")
            assert await bash("df --output=fstype /tmp | tail -n 1") in (("tmpfs", 0, ""), ("overlay", 0, ""))
    assert not list(cache_below_tmp.glob("**/x"))
