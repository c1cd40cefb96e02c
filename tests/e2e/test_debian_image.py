"""A whole Debian, as a directory and as a .sif file, that debootstrap makes once in the user's cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
import trio

from launch.bundle import build_bundle
from launch.progress import SetupError
from launch.venv import exclusive
from prorl_trio.cache import cache_dir
from prorl_trio.sandbox.apptainer import ApptainerProvider, find_apptainer
from prorl_trio.sandbox.bubblewrap import BubblewrapProvider
from prorl_trio.sandbox.provider import SandboxSpec

pytestmark = pytest.mark.slow

DEBOOTSTRAP_TIMEOUT_S = 500
TIMEOUT_S = 120
PACKAGES = "git,python3"


@pytest.fixture(scope="module")
def debian():
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("no Debian can be made here: that needs root and debootstrap (apt-get install debootstrap)")
    mirror = _mirror()
    folder = cache_dir() / "test-images"
    with exclusive(folder):
        root = folder / "debian"
        if not root.is_dir():
            unborn = folder / "debian.new"
            shutil.rmtree(unborn, ignore_errors=True)
            argv = [
                "debootstrap",
                "--variant=minbase",
                "--merged-usr",
                f"--include={PACKAGES}",
                "bookworm",
                unborn,
                mirror,
            ]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=DEBOOTSTRAP_TIMEOUT_S, check=False)
            if done.returncode != 0:
                pytest.skip(f"debootstrap failed, no network? {done.stdout[-300:]}")
            unborn.rename(root)
    return root


def _mirror():
    argv = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(LABEL) $(REPO_URI)", "Created-By: Packages"]
    listed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    uris = [line.split()[2] for line in listed.splitlines() if line.startswith("Debian Debian ")]
    if not uris:
        pytest.skip("apt has no archive of Debian here")
    return uris[0]


@pytest.fixture(scope="module")
def sif(debian):
    if find_apptainer() is None:
        pytest.skip("apptainer is not installed: no .sif can be built")
    path = debian.with_suffix(".sif")
    with exclusive(debian.parent):
        if not path.exists():
            unborn = path.with_suffix(".new")
            compress = ["--mksquashfs-args", "-comp zstd -Xcompression-level 3"]
            subprocess.run([find_apptainer(), "--quiet", "build", "--force", *compress, unborn, debian], check=True)
            unborn.rename(path)
    return path


CASES = [(ApptainerProvider, "debian"), (BubblewrapProvider, "debian"), (ApptainerProvider, "sif")]


@pytest.mark.parametrize(("provider_type", "kind"), CASES, ids=lambda value: getattr(value, "name", value))
async def test_work_in_a_debian(provider_type, kind, request, tmp_path):
    """git, its Python, its shell and its package database are Debian's own; IPython is ours."""
    try:
        build_bundle()
    except SetupError as error:
        pytest.skip(f"no runtime for images can be made: {error}")
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
