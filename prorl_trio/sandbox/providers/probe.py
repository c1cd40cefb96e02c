"""Runs the short commands with which a provider detects what works on this machine."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Final

import trio

from prorl_trio.sandbox.provider import ProviderReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FOLDER_REMEDY: Final = "make room there, or set sandbox.runtime_dir to a folder of this user's on a local disk or tmpfs"
"""The remedy if the folder for a probe cannot be used."""

PROBE_TIMEOUT_S: Final = 20.0
PROBE_DISK_BYTES: Final = 16 * 1024 * 1024
_PROBE_FOLDER: Final = "prorl-probe"
_LOWER_FILES: Final = (
    "removed/in/file",
    "renamed/in/file",
    "emptied/in/file",
    "to_file/in/file",
    "to_folder",
    "old",
    "new",
)
_REPLACE: Final = f"""
cd /{_PROBE_FOLDER} &&
rm -r removed && test ! -e removed &&
mv renamed moved && test -f moved/in/file && test ! -e renamed &&
rm -r emptied && mkdir emptied && test ! -e emptied/in &&
rm -r to_file && echo x > to_file && test -f to_file &&
rm to_folder && mkdir to_folder && echo x > to_folder/file && test -f to_folder/file &&
mv new old && test -f old && test ! -e new && rm old && test ! -e old
"""
REPLACE_IN_LAYER: Final = ("/bin/sh", "-c", _REPLACE)
"""A command that removes, renames and replaces folders and files of `make_probe_layer`, as `git checkout` and the
preparation of a repository do. It fails if an overlay does not support that."""


def make_probe_layer(folder: Path) -> Path:
    """Make a layer for `REPLACE_IN_LAYER` in `folder`, and return its path. Blocks for less than a millisecond."""
    layer = folder / "layer"
    for name in _LOWER_FILES:
        path = layer / _PROBE_FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x", encoding="ascii")
    return layer


def report_of(name: str, version: str, problem: str, images_problem: str, remedy: str) -> ProviderReport:
    """Return the report of an existing provider; `remedy` belongs to either problem."""
    return ProviderReport(
        name=name,
        usable=not problem,
        version=version,
        problem=problem,
        images_problem=images_problem,
        remedy=remedy if problem or images_problem else "",
    )


async def run_probe(argv: Sequence[str], env: Mapping[str, str]) -> tuple[str, str]:
    """Run `argv` to its end. Returns its output, and the problem (empty if it exited with 0). Cancellable."""
    try:
        with trio.fail_after(PROBE_TIMEOUT_S):
            done = await trio.run_process(
                argv, env=env, cwd="/", stdin=subprocess.DEVNULL, capture_stdout=True, capture_stderr=True, check=False
            )
    except trio.TooSlowError:
        return "", f"{argv[0]} did not end within {PROBE_TIMEOUT_S:g} s"
    except OSError as exc:
        return "", f"{argv[0]} cannot be run: {exc.strerror}"
    printed = done.stdout.decode(errors="replace").strip()
    said = done.stderr.decode(errors="replace").strip()
    return (
        printed,
        "" if done.returncode == 0 else f"exit code {done.returncode}: {said or printed or 'it said nothing'}",
    )
