"""An image to measure with: bash, a few programs, and what the project's Python needs, as a directory and as a .sif."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["build_directory_image", "build_sif"]

PROGRAMS = ("bash", "sh", "cat", "env", "ls", "sleep", "true")
FOLDERS = ("bin", "dev", "etc", "proc", "tmp", "usr", "var")
BUILD_TIMEOUT_S = 120.0


def build_directory_image(root: Path) -> Path:
    """Fill the new folder `root` from this machine, some 30 MB. Blocks; returns `root`."""
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True)
    binaries = [Path(found) for name in PROGRAMS if (found := shutil.which(name))]
    for binary in binaries:
        shutil.copy2(binary, root / "bin" / binary.name)
    extensions = Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so")
    for library in _libraries([*binaries, Path(sys.executable), Path(msgspec._core.__file__), *extensions]):
        target = root / str(library).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)
    return root


def _libraries(files: Iterable[Path]) -> set[Path]:
    """Return the libraries that the dynamic loader would load for `files`, itself included."""
    listed = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False).stdout
    words = {word for line in listed.splitlines() if line[:1].isspace() for word in line.split()}
    return {Path(word) for word in words if word.startswith("/") and Path(word).is_file()}


def build_sif(apptainer: str, root: Path, sif: Path) -> Path:
    """The directory image `root` as one file. Blocks; returns `sif`.

    Raises:
        subprocess.CalledProcessError: Apptainer cannot build it; its words are in `stderr`.
    """
    command = [apptainer, "--quiet", "build", str(sif), str(root)]
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=BUILD_TIMEOUT_S)
    return sif
