"""What makes the daemon run inside a sandbox: this project's Python, its packages, and the daemon's own code.

The Python and its packages are bound read-only at the paths they have outside, so nothing in them needs to move. The
daemon's code is copied, so that nothing else of a checkout or an installation can be seen.
"""

from __future__ import annotations

import compileall
import importlib.util
import os
import shutil
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

from prorl_trio.errors import InternalError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LIB_DIR", "PYTHON", "TOOL_PATH", "Mount", "daemon_argv", "install_daemon", "python_mounts"]

LIB_DIR: Final = "/opt/prorl/lib"
"""Where the daemon's code is, inside."""

PYTHON: Final = sys.executable

TOOL_PATH: Final = ":".join(
    (os.path.dirname(sys.executable), "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
)
"""PATH of what agents run: `python3` is the project's, with numpy and sympy."""

_DAEMON_PACKAGES: Final = ("ipc", "sandbox_daemon")
_SYSTEM_DIRS: Final = ("/usr", "/bin", "/lib", "/lib64", "/sbin")


class Mount(NamedTuple):
    """A host path seen inside, at `target`, read-only unless said otherwise."""

    source: str
    target: str
    writable: bool = False


def python_mounts() -> tuple[Mount, ...]:
    """The folders of the interpreter and of its virtual environment, outermost first.

    Those below /usr are left out: the host image has them, and another image keeps its own /usr.
    """
    real_prefix = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))
    prefixes = sorted({sys.base_prefix, sys.prefix, real_prefix})
    return tuple(
        Mount(prefix, prefix)
        for prefix in prefixes
        if not any(_is_below(prefix, system) for system in _SYSTEM_DIRS)
        and not any(prefix != other and _is_below(prefix, other) for other in prefixes)
    )


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def install_daemon(target: Path) -> None:
    """Copy the packages of the daemon into `target` and compile them, so that no sandbox has to. Blocks."""
    for name in _DAEMON_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise InternalError(f"the package {name} is not installed beside prorl_trio")
        shutil.copytree(spec.submodule_search_locations[0], target / name, ignore=shutil.ignore_patterns("*.md", ".*"))
    compileall.compile_dir(target, quiet=2, stripdir=str(target), prependdir=LIB_DIR)


def daemon_argv(socket_path: str) -> tuple[str, ...]:
    """The daemon's command line. Its environment must have `LIB_DIR` on PYTHONPATH."""
    return (PYTHON, "-m", "sandbox_daemon", "--socket", socket_path)
