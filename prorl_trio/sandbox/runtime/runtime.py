"""The parts needed to run the daemon inside a sandbox: a Python, its packages, and the daemon's own code.

In the host's own userland this is an environment with the packages promised to tools (`host_python`). In any other
image it is the self-contained runtime (`bundle`). The daemon's code is copied, so that the rest of a checkout or an
installation is hidden.
"""

from __future__ import annotations

import functools
import importlib.util
import marshal
import os
from pathlib import Path
from typing import Final, NamedTuple

from prorl_trio.sandbox.runtime.bundle import BUNDLE_DIR, BUNDLE_PYTHON, require_bundle
from prorl_trio.sandbox.runtime.host_python import HOST_PYTHON_DIR, require_host_python
from prorl_trio.sandbox.runtime.interpreter import own_python
from prorl_trio.types.errors import InternalError

HOME: Final = "/home/agent"
"""The home directory, inside."""

LIB_DIR: Final = "/opt/prorl/lib"
"""The folder of the daemon's code, inside."""

SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_DAEMON_PACKAGES: Final = ("prorl_ipc", "prorl_daemon")


class Mount(NamedTuple):
    """A host path mounted inside at `target`, read-only by default."""

    source: str
    target: str
    writable: bool = False


class Runtime(NamedTuple):
    """The Python, environment and mounts with which the daemon runs in one kind of image.

    Attributes:
        python: its interpreter, inside, with further arguments of the command line.
        env: environment variables for the interpreter. Tools do not see them.
        mounts: its mounts, except the daemon's code.
        tool_env: environment variables for tools. Without a PATH they have the image's own.
    """

    python: tuple[str, ...]
    env: dict[str, str]
    mounts: tuple[Mount, ...]
    tool_env: dict[str, str]

    def daemon_argv(self) -> tuple[str, ...]:
        return (*self.python, "-m", "prorl_daemon")


def host_runtime(packages: tuple[str, ...] = ()) -> Runtime:
    """Return the runtime for the host's userland: the promised packages, and `packages`. Blocks; first for seconds.

    Raises:
        SandboxUnavailable: see `require_host_python`.
    """
    mounts = (Mount(str(require_host_python(packages)), HOST_PYTHON_DIR),)
    python = f"{HOST_PYTHON_DIR}/bin/python3"
    return Runtime((python,), {"PYTHONPATH": LIB_DIR}, mounts, _tool_env(python))


def process_runtime(lib: str) -> Runtime:
    """Return the runtime with this project's own Python. `lib` is the folder of the daemon's code."""
    return Runtime((own_python(),), {"PYTHONPATH": lib}, (), _tool_env(own_python()))


def _tool_env(python: str) -> dict[str, str]:
    """Return variables so that agents that run `python3` get the Python with NumPy and SymPy."""
    return {"PATH": f"{os.path.dirname(python)}:{SYSTEM_PATH}"}


def image_runtime() -> Runtime:
    """Return the self-contained runtime, for any other image. It ignores variables, since they are the image's.

    Raises:
        SandboxUnavailable: it has not been made.
    """
    return Runtime((BUNDLE_PYTHON, "-I"), {}, (Mount(str(require_bundle()), BUNDLE_DIR),), {})


def install_daemon(target: Path) -> None:
    """Install the packages of the daemon into `target`, compiled, so that sandboxes need not compile them. Blocks."""
    for relative, content in _daemon_files():
        path = target / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@functools.cache
def _daemon_files() -> tuple[tuple[str, bytes], ...]:
    """Return sources and bytecode by relative path. Cached per process, because compiling takes half a second."""
    files: list[tuple[str, bytes]] = []
    for name in _DAEMON_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise InternalError(f"the package {name} is not installed beside prorl_trio")
        for path in sorted(Path(spec.submodule_search_locations[0]).glob("*.py")):
            relative = f"{name}/{path.name}"
            source = path.read_bytes()
            bytecode = _bytecode(source, f"{LIB_DIR}/{relative}")
            files += [(relative, source), (importlib.util.cache_from_source(relative), bytecode)]
    return tuple(files)


def _bytecode(source: bytes, path: str) -> bytes:
    """Return a .pyc file as defined in PEP 552, made in memory, so that a killed node leaves no temporary file.

    It lacks a time stamp and is never checked, because its source is a copy that never changes.
    """
    code = marshal.dumps(compile(source, path, "exec", dont_inherit=True))
    unchecked_hash = (0b01).to_bytes(4, "little")
    return importlib.util.MAGIC_NUMBER + unchecked_hash + importlib.util.source_hash(source) + code
