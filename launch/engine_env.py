"""The inference engine's own environment: what it needs, and the steps that build it. Standard library only.

vLLM pins torch, transformers and much else exactly, so it never shares an environment with the node: they
meet over HTTP. The requirements are those of the extra `cpu` or `gpu` of this project's own metadata, so each pin is
written once.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import sys
import tomllib
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["EngineKind", "engine_key", "install_steps", "requirements"]

EngineKind = Literal["cpu", "gpu"]

PROJECT = "prorl-trio"
RECIPE = 1
"""Raise it when `install_steps` changes its result: environments made by an older recipe are then left behind."""

_MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""vLLM asks for them, a text model does not use them, and builds that do not match torch's break `import vllm`."""


def requirements(kind: EngineKind, checkout: Path) -> list[str]:
    """The requirements of the extra `kind`, with references to this project's other extras replaced by their contents.

    Read from `checkout/pyproject.toml`, or where there is none (an installed wheel) from the installed metadata.
    """
    extras = _extras(checkout)
    found: list[str] = []
    pending = list(extras[kind])
    while pending:
        requirement = pending.pop(0)
        if own := re.fullmatch(rf"{PROJECT}\[([\w-]+)\]", requirement.strip()):
            pending[:0] = extras[own[1]]
        else:
            found.append(requirement)
    return found


def engine_key(kind: EngineKind, checkout: Path) -> str:
    """A short name for one set of pins under one version of Python: equal keys mean interchangeable environments."""
    facts = [RECIPE, kind, requirements(kind, checkout), sys.implementation.cache_tag]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def install_steps(kind: EngineKind, checkout: Path) -> list[tuple[str, list[str]]]:
    """What to run, in order, with the new environment's Python: pairs of a title and the arguments after `python`.

    torch goes first, because its CPU build is what a machine most likely cannot find; the last step imports what was
    installed, so that an engine that cannot start here is noticed by set-up.
    """
    wanted = requirements(kind, checkout)
    torch = [item for item in wanted if re.match(r"torch\b(?!-)", item)]
    pip = ["-m", "pip"]
    steps = [("torch", [*pip, "install", *torch])] if torch else []
    steps.append(("vLLM and what the model's conversion needs", [*pip, "install", *wanted]))
    if kind == "cpu":
        steps.append(("without image and audio packages", [*pip, "uninstall", "--yes", *_MEDIA_PACKAGES]))
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
