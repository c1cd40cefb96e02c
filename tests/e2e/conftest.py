"""A Debian, as a directory and as a .sif file, which debootstrap makes once in the cache folder; a Slurm cluster."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from prorl_launch.bundle import build_bundle
from prorl_launch.progress import SetupError
from prorl_launch.venv import exclusive
from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.sandbox.providers.apptainer import find_apptainer
from support.skips import because
from support.slurm_cluster import open_cluster, why_not

DEBOOTSTRAP_TIMEOUT_S = 500
PACKAGES = "git,python3"


@pytest.fixture(scope="session")
def runtime():
    """Images other than `host` can be used."""
    try:
        build_bundle()
    except SetupError as error:
        pytest.skip(because(f"no runtime for images can be made: {error}", "make setup"))


@pytest.fixture(scope="session")
def debian():
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip(because("no Debian can be made here", "as root: apt-get install debootstrap"))
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
                pytest.skip(because(f"debootstrap failed: {done.stdout[-300:]}", "look at the network"))
            unborn.rename(root)
    return root


def _mirror():
    argv = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(LABEL) $(REPO_URI)", "Created-By: Packages"]
    listed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    uris = [line.split()[2] for line in listed.splitlines() if line.startswith("Debian Debian ")]
    if not uris:
        pytest.skip(because("apt has no archive of Debian here", "add one to its sources"))
    return uris[0]


@pytest.fixture(scope="session")
def sif(debian):
    if find_apptainer() is None:
        pytest.skip(because("apptainer is not installed: no .sif can be built", "make apptainer"))
    path = debian.with_suffix(".sif")
    with exclusive(debian.parent):
        if not path.exists():
            unborn = path.with_suffix(".new")
            compress = ["--mksquashfs-args", "-comp zstd -Xcompression-level 3"]
            subprocess.run([find_apptainer(), "--quiet", "build", "--force", *compress, unborn, debian], check=True)
            unborn.rename(path)
    return path


@pytest.fixture(scope="session")
def slurm(request):
    """A Slurm cluster of four nodes on this machine, for all tests of this session that track processes alike."""
    tracking = getattr(request, "param", "linuxproc")
    if why := why_not(tracking):
        pytest.skip(because(why, "as root: launch/prorl_launch/slurm/cluster.sh install"))
    with open_cluster(tracking) as cluster:
        yield cluster
