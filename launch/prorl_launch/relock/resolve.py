"""Resolve the requirements of each environment for all Pythons at once, and write the locks, for `prorl_launch.relock`.

uv resolves and lists all files. A lock keeps the files that a supported Python can install on Linux on x86-64.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import tomllib
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from prorl_launch import environments, paths, venv
from prorl_launch.locks import agent_lock, lock_path, requirements_key
from prorl_launch.progress import SetupError, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PYTHONS: Final = ((3, 11), (3, 12), (3, 13), (3, 14))
NEWEST_GLIBC: Final = 35
"""The minor version of glibc in Ubuntu 22.04; Debian 12 has 2.36. Wheels for newer versions would exclude it."""

_PLATFORMS: Final = [*(f"manylinux_2_{minor}_x86_64" for minor in range(NEWEST_GLIBC, 4, -1)), "manylinux2014_x86_64"]
_PLATFORMS.extend(("manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"))

_ENVIRONMENT: Final = (
    "python_full_version < '{before}' and sys_platform == 'linux' and platform_machine == 'x86_64'"
    " and implementation_name == 'cpython'"
)
_PROJECT: Final = """\
[project]
name = "locked"
version = "0"
requires-python = ">={oldest}"
dependencies = {requirements}
[tool.uv]
environments = [{environment}]
override-dependencies = {left_out}
"""


def main() -> int:
    """Write the locks named on the command line, or every one. Exit code 1 with a message if one cannot be made.

    Earlier locks are then already written.
    """
    uv, names = Path(sys.argv[1]), sys.argv[2:]
    makers = _makers(uv, paths.checkout_dir())
    if unknown := set(names) - set(makers):
        say(f"ERROR\nno such lock: {', '.join(sorted(unknown))}; there are {', '.join(makers)}")
        return 1
    try:
        for name, (path, make) in makers.items():
            if name in (names or makers):
                lock = make()
                path.write_text(lock)
                say(f"{path}: {lock.count('==') + lock.count('integrity')} packages")
    except SetupError as error:
        say(f"ERROR\n{error}")
        return 1
    return 0


def _makers(uv: Path, checkout: Path) -> dict[str, tuple[Path, Callable[[], str]]]:
    """Return the path and the maker of each lock, by its name."""
    makers: dict[str, tuple[Path, Callable[[], str]]] = {
        "dev": (lock_path("dev"), partial(_resolve, uv, "dev", environments.dev_requirements(checkout))),
        "model": (lock_path("model"), partial(_resolve, uv, "model", [environments.MODEL_FILE])),
        "uv": (lock_path("uv"), partial(_resolve, uv, "uv", [venv.UV])),
    }
    for environment in environments.ENVIRONMENTS:
        needs = environments.TORCH_NEEDS if environment.torch_cpu else ()
        wanted = environment.wanted(checkout)
        newest = environment.newest_python or PYTHONS[-1]
        oldest = environment.oldest_python
        make = partial(_resolve, uv, environment.lock, wanted, needs, environment.unlocked, newest, oldest)
        makers[environment.lock] = (lock_path(environment.lock), make)
    for agent in _agents(checkout):
        path = agent_lock(agent["name"], agent["index"])
        oldest_of_agent = tuple(agent["python"])
        make = (
            partial(_resolve_npm, agent["manifest"])
            if agent["index"] == "npm"
            else partial(_resolve, uv, agent["name"], agent["packages"], oldest=oldest_of_agent)
        )
        makers[f"agents/{agent['name']}"] = (path, make)
    return makers


def _agents(checkout: Path) -> list[dict[str, Any]]:
    """Return the agents of `prorl-trio agents`, as the checkout's own environment knows them; empty without it."""
    python = checkout / ".venv" / "bin" / "python"
    if not python.exists():
        return []
    asked = "import json; from prorl_launch.agents import described; print(json.dumps(described()))"
    done = subprocess.run([str(python), "-c", asked], cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"the agents are not known: {done.stderr.strip()}")
    described: list[dict[str, Any]] = json.loads(done.stdout)
    return described


def _resolve_npm(manifest: str) -> str:
    """Return the `package-lock.json` of a `package.json`, with hashes and without addresses."""
    how = ("--package-lock-only", "--ignore-scripts", "--no-audit", "--no-fund", "--force")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "package.json").write_text(manifest)
        argv = ["npm", "install", *how, "--omit-lockfile-registry-resolved"]
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SetupError(f"{manifest}: {done.stderr.strip()}\n{shlex.join(argv)}")
        lock = json.loads(Path(folder, "package-lock.json").read_text())
    for package in lock["packages"].values():
        for unread in ("license", "funding", "engines"):
            package.pop(unread, None)
    return json.dumps(lock, indent=0) + "\n"


def _resolve(
    uv: Path,
    name: str,
    requirements: list[str],
    besides: Sequence[str] = (),
    left_out: Sequence[str] = (),
    newest: tuple[int, int] = PYTHONS[-1],
    oldest: tuple[int, int] = PYTHONS[0],
) -> str:
    """Return the lock of `requirements` for Pythons from `oldest` to `newest`.

    It also contains the requirements of `besides`, and never a package of `left_out`.
    """
    with tempfile.TemporaryDirectory() as folder:
        project, answer = Path(folder, "pyproject.toml"), Path(folder, "pylock.toml")
        never = [f"{package}; python_version < '3'" for package in left_out]
        environment = _ENVIRONMENT.format(before=_dotted((newest[0], newest[1] + 1)))
        fields = {"requirements": [*requirements, *besides], "environment": environment, "left_out": never}
        shown = {name: json.dumps(value) for name, value in fields.items()}
        project.write_text(_PROJECT.format(oldest=_dotted(oldest), **shown))
        argv = [str(uv), "pip", "compile", "--quiet", "--universal", "--only-binary", ":all:"]
        argv += ["--python-version", _dotted(oldest)]
        argv += ["--format", "pylock.toml", "--output-file", str(answer), str(project)]
        if name == "model":  # only the package's data is used
            argv.append("--no-deps")
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SetupError(f"{name}: {done.stderr.strip()}\n{shlex.join(argv)}")
        packages = tomllib.loads(answer.read_text())["packages"]
    return render(packages, requirements, newest, oldest)


def render(
    packages: list[dict[str, Any]],
    requirements: list[str],
    newest: tuple[int, int] = PYTHONS[-1],
    oldest: tuple[int, int] = PYTHONS[0],
) -> str:
    """Return a lock of `packages`, as uv describes them.

    It names the Pythons from `oldest` to `newest` for which every package has a wheel.

    Raises:
        SetupError: no such Python exists.
    """
    promised = {version for version in PYTHONS if oldest <= version <= newest}
    served = set(promised)
    lines = []
    for package in packages:
        wanted = {version for version in promised if _applies(package.get("marker", ""), version)}
        hashes: set[str] = set()
        found: set[tuple[int, int]] = set()
        for wheel in package.get("wheels", []):
            if usable := wanted & usable_pythons(wheel.get("name") or Path(wheel["url"]).name):
                found |= usable
                hashes.add(wheel["hashes"]["sha256"])
        served -= wanted - found
        if not hashes:
            continue
        pins = "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(hashes))
        lines.append(f"{package['name']}=={package['version']}{'' if wanted == promised else _condition(wanted)}{pins}")
    if not served:
        raise SetupError(f"there is no Python for which each of {' '.join(requirements)} has wheels")
    head = [
        "# What pip installs, with the SHA-256 of each wheel that it may be. Made by `make lock`: do not edit.",
        f"# python: {' '.join(map(_dotted, sorted(served)))}",
        f"# requirements: {requirements_key(requirements)}",
    ]
    return "\n".join([*head, *lines]) + "\n"


def usable_pythons(wheel: str) -> set[tuple[int, int]]:
    """Return the members of `PYTHONS` that can install this wheel on every supported machine."""
    tags = parse_wheel_filename(wheel)[3]
    return {version for version in PYTHONS if not tags.isdisjoint(_TAGS[version])}


def _tags(version: tuple[int, int]) -> frozenset[Tag]:
    interpreter = f"cp{version[0]}{version[1]}"
    return frozenset(
        chain(cpython_tags(version, platforms=_PLATFORMS), compatible_tags(version, interpreter, _PLATFORMS))
    )


def _applies(marker: str, version: tuple[int, int]) -> bool:
    """Return whether a marker holds under this Python on Linux on x86-64."""
    where = {"python_version": _dotted(version), "python_full_version": f"{_dotted(version)}.0"}
    return not marker or Marker(marker).evaluate(where)


def _condition(versions: set[tuple[int, int]]) -> str:
    return " ; " + " or ".join(f"python_version == '{_dotted(version)}'" for version in sorted(versions))


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


_TAGS: Final = {version: _tags(version) for version in PYTHONS}


if __name__ == "__main__":
    sys.exit(main())
