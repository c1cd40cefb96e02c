"""Work in a whole Debian, as a directory and as a .sif file."""

from __future__ import annotations

import pytest
import trio

from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.apptainer import ApptainerProvider
from prorl_trio.sandbox.providers.bubblewrap import BubblewrapProvider

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime")]

TIMEOUT_S = 120


CASES = [(ApptainerProvider, "debian"), (BubblewrapProvider, "debian"), (ApptainerProvider, "sif")]


@pytest.mark.parametrize(("provider_type", "kind"), CASES, ids=lambda value: getattr(value, "name", value))
async def test_work_in_a_debian(provider_type, kind, request, tmp_path):
    """git, its Python, its shell and its package database are Debian's own; IPython is ours."""
    image = request.getfixturevalue(kind)
    provider = provider_type(tmp_path)
    report = await provider.probe()
    if not report.usable:
        pytest.skip(f"{provider.name} cannot run here: {report.problem}. What to do: {report.remedy}")
    with trio.fail_after(TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec(image=str(image))) as sandbox:

            async def bash(command):
                result = await sandbox.bash(command, timeout_s=30)
                assert result.exit_code == 0, result.output
                return result.output.strip()

            assert await bash(". /etc/os-release; echo $ID-$VERSION_ID") == "debian-12"
            assert await bash("command -v python3") == "/usr/bin/python3"
            versions = await bash("python3 -c 'import ssl, sqlite3, sys; print(sys.prefix, sys.version_info[:2])'")
            assert versions == "/usr (3, 11)"
            assert await bash("locale charmap 2>/dev/null; echo $LANG") == "UTF-8\nC.UTF-8"
            assert "git" in await bash("dpkg-query -W -f '${Package}\n' git")
            await bash("cd ~ && git init -q r && cd r && git config user.email a@b && git config user.name a")
            await bash("echo x > f && git add f && git commit -qm one && git log --oneline | wc -l")
            assert await bash("cat /proc/self/maps | grep -c /opt/prorl; true") == "0"
            cell = await sandbox.ipython("import sys\n!git --version\nsys.prefix", timeout_s=30)
            assert cell.stdout.startswith("git version")
            assert cell.result == "'/opt/prorl/runtime'"
