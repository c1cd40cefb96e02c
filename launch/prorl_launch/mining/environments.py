"""Environments for packages in sandboxes of the image `host`: their requirements, but never the package itself.

Each environment is a folder at `/opt/env`: a virtual environment of the sandboxes' own Python. It contains no bytecode,
no cache, and no record of the release, because these would reveal the fixed release to an agent.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from prorl_launch.mining.index import normal_name
from prorl_launch.pip_config import index_options, pip_settings, uv_environment
from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.sandbox.images.layers import find_layer, store_layer
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.runtime.host_python import require_host_python
from prorl_trio.tasks.grading.repository import run_suite
from prorl_trio.tasks.handlers.swe import SwePayload, grade_change
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping
    from contextlib import AbstractContextManager

    from prorl_trio.agent.activity import Charge
    from prorl_trio.config import SandboxConfig
    from prorl_trio.sandbox.host import SandboxHost
    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.tasks.grading.repository import Graded, Suite, SuiteRun
    from prorl_trio.types.models import TaskInstance


ENVIRONMENT_DIR: Final = "/opt/env"
RUNNER: Final = "pytest"
INSTALL_TIMEOUT_S: Final = 900.0
_RECIPE: Final = 1
"""Increment this when the same requirements produce a different environment."""


class LocalBench:
    """The sandboxes of this machine for `prorl_trio.tasks.grading`. Each run has its own sandbox."""

    def __init__(self, host: SandboxHost, config: SandboxConfig) -> None:
        self._host = host
        self.config = config

    @asynccontextmanager
    async def open_sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """See `prorl_trio.tasks.grading.verifier.Bench`."""
        sandbox = await self._host.open(spec)
        try:
            yield sandbox
        finally:
            await sandbox.aclose()  # noqa: ASYNC102 - it shields itself

    def waiting(self, what: str, charge: Charge) -> AbstractContextManager[None]:
        """Do not charge the wait to anyone."""
        del what, charge
        return nullcontext()

    def standing_in_line(self, what: str, charge: Charge, *, at_most_s: float) -> AbstractContextManager[None]:
        """Do not charge the wait to anyone."""
        del what, charge, at_most_s
        return nullcontext()

    def stage_left_s(self) -> float:
        """Return no limit other than the tests' own."""
        return math.inf

    def spec(self, layers: tuple[str, ...], env: Mapping[str, str]) -> SandboxSpec:
        """Return the specification of sandboxes on the host's userland."""
        limits, start_timeout_s = self.config.limits, self.config.start_timeout_s
        return SandboxSpec(image="host", layers=layers, env=dict(env), limits=limits, start_timeout_s=start_timeout_s)

    async def run(self, suite: Suite, patch: bytes | None) -> SuiteRun:
        """Run tests once, with a patch to the repository unless it is None. Raises the errors of `grade`."""
        return await run_suite(self, patch, suite)

    async def grade(self, payload: SwePayload, patch: bytes | None) -> Graded:
        """Grade a change, or the unchanged repository, as a node does.

        Raises:
            EvaluationError, SandboxUnavailable, SandboxLost: the infrastructure failed; the result of the tests is
                unknown.
        """
        return await grade_change(self, payload, patch, self.config)


def payload_of(row: TaskInstance) -> SwePayload:
    """Return the repository and the tests of a row.

    Raises:
        ConfigError: it is not a row of the handler `swe`.
    """
    try:
        if row.handler != "swe":
            raise ConfigError(
                f"{row.instance_id}: only rows of the handler `swe` can be verified, not of {row.handler}"
            )
        return msgspec.convert(row.payload, SwePayload)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{row.instance_id}: {exc}") from exc


class EnvironmentLayer(NamedTuple):
    """A stored environment: its layer, and its distributions with their versions, sorted."""

    digest: str
    installed: tuple[str, ...]


def environment_variables(source_folders: Iterable[str], repo_dir: str) -> dict[str, str]:
    """Return the environment variables of sandboxes with an environment and a repository with these source folders."""
    places = [repo_dir if folder in ("", ".") else f"{repo_dir}/{folder}" for folder in source_folders]
    return {
        "PATH": f"{ENVIRONMENT_DIR}/bin:/usr/local/bin:/usr/bin:/bin",
        "VIRTUAL_ENV": ENVIRONMENT_DIR,
        "PYTHONPATH": ":".join(places),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }


def find_uv() -> str:
    """Return the path of uv: from PATH, next to this Python, or from the cache folder.

    Raises:
        ConfigError: uv is not installed.
    """
    beside = [Path(sys.executable).parent / "uv", *sorted(cache_dir().glob("uv-*/bin/uv"))]
    found = shutil.which("uv") or next((str(path) for path in beside if os.access(path, os.X_OK)), None)
    if found is None:
        raise ConfigError("mining makes environments with uv, and there is none: pip install 'prorl-trio[mining]'")
    return found


def make_environment(package: str, requirements: Iterable[str]) -> EnvironmentLayer:
    """Return the stored layer of an environment with pytest and these requirements. It is made once. Blocks: seconds.

    Raises:
        ConfigError: uv is missing or fails, with its output; or the requirements install the package itself.
    """
    wanted = sorted({RUNNER, *requirements})
    key = hashlib.sha256(json.dumps([_RECIPE, sys.version, wanted]).encode()).hexdigest()[:20]
    record = cache_dir() / "mining" / "environments" / f"{key}.json"
    if record.is_file():
        known = EnvironmentLayer(*json.loads(record.read_text()))
        if find_layer(known.digest) is not None:
            known = known._replace(installed=tuple(known.installed))
            _refuse_package(package, known.installed)
            return known
    with tempfile.TemporaryDirectory(prefix="prorl-env-") as scratch:
        folder = Path(scratch) / "env"
        _install(wanted, folder)
        made = seal_environment(package, folder)
    record.parent.mkdir(parents=True, exist_ok=True)
    part = record.with_name(f"{key}.{os.getpid()}.part")
    part.write_text(json.dumps(made))
    part.replace(record)
    return made


def packages_folder(folder: Path) -> Path:
    """Return an environment's folder of packages."""
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def seal_environment(package: str, folder: Path) -> EnvironmentLayer:
    """Turn a folder with packages into a virtual environment, and store it. Blocks.

    Raises:
        ConfigError: it contains the package itself. Dependencies of pytest or of a requirement cannot be tasks. They
            would be imported instead of the repository's version, or reveal the solution.
    """
    installed = _installed(packages_folder(folder))
    _refuse_package(package, installed)
    for path in [*folder.rglob("__pycache__"), *folder.rglob("*.pyc"), *folder.rglob("direct_url.json")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    _link_python(folder)
    return EnvironmentLayer(store_layer(folder, at=ENVIRONMENT_DIR).record.digest, installed)


def _refuse_package(package: str, installed: Iterable[str]) -> None:
    if normal_name(package) in {normal_name(each.partition("==")[0]) for each in installed}:
        raise ConfigError(
            f"{package} is needed by pytest, or by what its tests need: it cannot be told from the runner's"
        )


def _install(wanted: list[str], folder: Path) -> None:
    target = packages_folder(folder)
    target.mkdir(parents=True)
    argv = [find_uv(), "pip", "install", "--quiet", "--python", sys.executable, "--target", str(target)]
    settings = pip_settings()
    environment = {**os.environ, **uv_environment(settings)}
    try:
        done = subprocess.run(
            [*argv, "--only-binary=:all:", "--link-mode=copy", *index_options(settings), *wanted],
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise ConfigError(f"uv did not install {', '.join(wanted)} within {INSTALL_TIMEOUT_S:g} s") from exc
    if done.returncode:
        raise ConfigError(f"uv cannot install {', '.join(wanted)}: {done.stderr.strip()[-2000:]}")
    shutil.rmtree(target / "bin", ignore_errors=True)  # contains another Python's path
    (target / ".lock").unlink(missing_ok=True)


def _installed(folder: Path) -> tuple[str, ...]:
    found = importlib.metadata.distributions(path=[str(folder)])
    return tuple(sorted(f"{normal_name(each.name)}=={each.version}" for each in found))


def _link_python(folder: Path) -> None:
    """Link the interpreter of the image `host` into the environment."""
    host = require_host_python()
    shutil.rmtree(folder / "bin", ignore_errors=True)
    (folder / "bin").mkdir()
    for name in ("python", "python3", f"python{sys.version_info.major}.{sys.version_info.minor}"):
        (folder / "bin" / name).symlink_to(os.readlink(host / "bin" / "python3"))
    (folder / "pyvenv.cfg").write_text((host / "pyvenv.cfg").read_text())
    script = folder / "bin" / RUNNER
    script.write_text(
        f"#!{ENVIRONMENT_DIR}/bin/python3\nimport sys\n\nimport pytest\n\nsys.exit(pytest.console_main())\n"
    )
    script.chmod(0o755)
