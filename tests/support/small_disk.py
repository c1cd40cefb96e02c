"""A small file system, to fill it up."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import pytest

from support.skips import because

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import RawIOBase
    from pathlib import Path

KIB = 1024


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[None]:
    """Have a disk of `size` bytes at `path`, which is made. Skips the test where nothing can be mounted.

    The whole machine sees the mount, and other tests look at what is mounted: only for a test marked as `alone`.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        raise RuntimeError(f"{path} would be mounted beside other tests: mark this one with pytest.mark.alone")
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if (done := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(because(f"no file system can be mounted here: {done.stderr}", "run the tests as root"))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: Path) -> None:
    """Leave no room on the disk, by a file `path`."""
    with path.open("wb", buffering=0) as file:
        for size in (64 * KIB, 4 * KIB, 1):
            with pytest.raises(OSError, match="No space left on device"):
                _write_for_ever(file, bytes(size))


def _write_for_ever(file: RawIOBase, piece: bytes) -> NoReturn:
    while True:
        file.write(piece)
