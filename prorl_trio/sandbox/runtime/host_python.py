"""The Python of the image `host`: only the installed packages that are promised to tools.

The node's own environment contains the tasks with their answers and the node's code, which agents must not see.
Sandboxes therefore get a separate virtual environment, at `HOST_PYTHON_DIR`: the packages named here or by
`sandbox.packages`, with their dependencies. It is one folder of the cache, made on first use of hard links (of copies,
on another file system), complete or absent at any moment. An interpreter below /usr is the host's, which sandboxes see
anyway. Any other interpreter is copied into the environment, with its standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.sandbox.runtime.bundle import closure, installed_files
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HOST_PYTHON_DIR: Final = "/opt/prorl/python"
"""Its folder inside the sandbox."""

PROMISED: Final = ("ipython", "numpy", "sympy")
PROMISED_IF_INSTALLED: Final = ("ipykernel", "jupyter-client", "matplotlib", "pip", "scipy")
"""Packages that tools find in the image `host` if they are installed, with their dependencies, in addition to the
daemon's."""

_DAEMON: Final = ("msgspec", "ptyprocess", "trio")
_RECIPE: Final = 1
"""Increase it when the code builds something else from the same parts."""
_STAGING: Final = ".new-"
_BASE: Final = "base"
_NOT_OF_STDLIB: Final = frozenset({"dist-packages", "site-packages", "sitecustomize.py", "test", "usercustomize.py"})
_DATA: Final = frozenset({"etc", "share"})
"""Folders of an environment for data of packages, such as kernel descriptions and manuals."""
_COMPILE_TIMEOUT_S: Final = 600.0
_SCRIPT: Final = "#!{python}\nimport sys\n\nfrom {module} import {name}\n\nsys.exit({call}())\n"


@functools.cache
def require_host_python(packages: tuple[str, ...] = ()) -> Path:
    """Return the folder, and make it if necessary. Blocks for seconds, once for each set of versions.

    Args:
        packages: names of additional distributions.

    Raises:
        SandboxUnavailable: it cannot be made; the message has a remedy.
    """
    distributions = _chosen(packages)
    target = _path(distributions)
    try:
        if not target.is_dir():
            _make(target, distributions)
    except (OSError, LookupError, subprocess.SubprocessError) as exc:
        raise SandboxUnavailable(
            f"the Python of the image `host` cannot be made in {target.parent}: {exc}; PRORL_CACHE_DIR names another "
            "folder"
        ) from exc
    return target


def has_host_python() -> bool:
    """Return whether the environment without additional packages has been made."""
    return _path(_chosen(())).is_dir()


def _chosen(packages: tuple[str, ...]) -> tuple[importlib.metadata.Distribution, ...]:
    try:
        return closure((*_DAEMON, *PROMISED, *packages), PROMISED_IF_INSTALLED)
    except importlib.metadata.PackageNotFoundError as exc:
        raise SandboxUnavailable(
            f"{exc.name} is not installed beside the node: install it, or take it from sandbox.packages"
        ) from exc


def _path(distributions: Iterable[importlib.metadata.Distribution]) -> Path:
    return cache_dir() / "host-pythons" / _key(distributions)


def interpreter_libraries() -> tuple[Path, ...]:
    """Return shared libraries of an interpreter outside /usr, which may look for them by their host paths."""
    base = _base()
    return () if base is None else tuple(sorted(path for path in (base / "lib").glob("*.so*") if path.is_file()))


def package_folders() -> frozenset[str]:
    """Return the folders of the node's own packages, including Python's default ones."""
    known = (sysconfig.get_path(name) for name in ("purelib", "platlib"))
    named = ("site-packages", "dist-packages")
    seen = (path for path in (*sys.path, *known) if os.path.basename(path.rstrip("/")) in named)
    return frozenset(map(os.path.realpath, seen))


def _base() -> Path | None:
    """Return the installation of this environment's interpreter; None if it is below /usr."""
    base = Path(sys.base_prefix).resolve()
    return None if base.is_relative_to("/usr") else base


def _key(distributions: Iterable[importlib.metadata.Distribution]) -> str:
    digest = hashlib.sha256(json.dumps([_RECIPE, HOST_PYTHON_DIR, sys.version, _interpreter()]).encode())
    for distribution in distributions:
        digest.update(f"{distribution.name}=={distribution.version}\n{distribution.read_text('RECORD')}".encode())
    return digest.hexdigest()[:12]


def _interpreter() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _make(target: Path, distributions: Iterable[importlib.metadata.Distribution]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.parent):
        if target.is_dir():
            return
        for left in target.parent.glob(f"{_STAGING}*"):  # leftovers of killed processes
            shutil.rmtree(left, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=target.parent))
        try:
            _fill(staging, distributions)
            _compile(staging)
            staging.chmod(0o755)
            staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    with open(folder / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fill(root: Path, distributions: Iterable[importlib.metadata.Distribution]) -> None:
    home = os.path.dirname(_interpreter()) if _base() is None else f"{HOST_PYTHON_DIR}/{_BASE}/bin"
    names = ("python", "python3", f"python{sys.version_info.major}.{sys.version_info.minor}")
    if (base := _base()) is not None:
        _copy_interpreter(base, root / _BASE, names)
    (root / "bin").mkdir()
    for name in names:
        (root / "bin" / name).symlink_to(f"{home}/{os.path.basename(_interpreter()) if base is None else names[-1]}")
    version = ".".join(map(str, sys.version_info[:3]))
    (root / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\nversion = {version}\n")
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(root), "platbase": str(root)}))
    for distribution in distributions:
        _copy_distribution(distribution, packages, root)


def _copy_interpreter(base: Path, target: Path, names: Iterable[str]) -> None:
    for name in names:
        _place(Path(_interpreter()), target / "bin" / name)
    for library in interpreter_libraries():
        _place(library, target / "lib" / library.name)
    stdlib = Path(sysconfig.get_path("stdlib")).resolve()
    for folder, below, files in os.walk(stdlib):
        if Path(folder) == stdlib:
            below[:] = [name for name in below if name not in _NOT_OF_STDLIB and not name.startswith("config-")]
            files = [name for name in files if name not in _NOT_OF_STDLIB]
        for file in files:
            _place(Path(folder, file), target / Path(folder, file).relative_to(base))
    headers = Path(sysconfig.get_path("include"))
    for header in headers.rglob("*.h"):
        if headers.is_relative_to(base):
            _place(header, target / header.relative_to(base))


def _copy_distribution(distribution: importlib.metadata.Distribution, packages: Path, root: Path) -> None:
    for file in installed_files(distribution):
        source = os.path.normpath(str(distribution.locate_file(file)))
        if ".." not in file.parts:
            _place(Path(source), packages / file)
        elif (data := os.path.relpath(source, sys.prefix)).partition("/")[0] in _DATA:
            _place(Path(source), root / data)
    for entry in distribution.entry_points:
        if entry.group == "console_scripts":
            script = root / "bin" / entry.name
            name = entry.attr.partition(".")[0]
            python = f"{HOST_PYTHON_DIR}/bin/python3"
            script.write_text(_SCRIPT.format(python=python, module=entry.module, name=name, call=entry.attr))
            script.chmod(0o755)


def _place(source: Path, target: Path) -> None:
    """Link a file, or copy it if linking is not possible. A listed file may be missing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except FileNotFoundError:
        return
    except OSError:
        shutil.copy2(real, target)


def _compile(root: Path) -> None:
    """Compile missing bytecode, which cannot be written on a read-only mount."""
    tag = sys.implementation.cache_tag
    sources = (path for path in root.rglob("*.py") if not (path.parent / f"__pycache__/{path.stem}.{tag}.pyc").exists())
    if listed := "".join(f"{path}\n" for path in sources):
        command = [sys.executable, "-I", "-m", "compileall", "-q", "-j", "0", "-s", str(root), "-p", HOST_PYTHON_DIR]
        # Its exit code reports whether all were valid Python, which templates are not.
        subprocess.run(
            [*command, "-i", "-"],
            input=listed.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_COMPILE_TIMEOUT_S,
            check=False,
        )
