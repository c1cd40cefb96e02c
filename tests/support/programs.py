"""Programs that tests want and a bare machine has not: out of Debian's packages, unpacked into the cache folder.

Nothing is installed, and nobody has to be root: `apt-get download` and `dpkg-deb` are enough.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

from prorl_launch.venv import exclusive
from prorl_trio.sandbox.cache import cache_dir
from support.skips import because

DOWNLOAD_TIMEOUT_S = 120


def find_busybox():
    """A busybox that needs no library. Skips the test if there is none and none can be had."""
    found = shutil.which("busybox")
    if found and is_static(found):
        return found
    return str(unpacked("busybox-static") / "bin/busybox")


def is_static(program):
    return subprocess.run(["ldd", program], capture_output=True, check=False).returncode != 0


def unpacked(package):
    """The folder with the files of a Debian package, downloaded once."""
    folder = cache_dir() / "test-tools" / package
    with exclusive(folder.parent):
        if folder.is_dir():
            return folder
        staging = folder.with_name(f".new-{package}")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            _run(["apt-get", "download", "--quiet", package], staging)
            (archive,) = staging.glob("*.deb")
            _run(["dpkg-deb", "--extract", archive.name, "."], staging)
            archive.unlink()
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(staging, ignore_errors=True)
            said = getattr(error, "stderr", None) or error
            pytest.skip(because(f"{package} cannot be had from apt: {said}", f"apt-get install {package}"))
        staging.rename(folder)
    return folder


def _run(argv, folder):
    subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=True)
