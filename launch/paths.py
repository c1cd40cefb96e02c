"""The places where set-up puts things and others find them. Standard library only: read before `.venv` exists."""

from __future__ import annotations

import os
from pathlib import Path

from launch.engine_env import EngineKind, engine_key
from prorl_trio.sandbox.cache import cache_dir

__all__ = ["MODEL_NAME", "cache_dir", "checkout_dir", "default_engine", "engine_dir", "engine_python", "model_dir"]

MODEL_NAME = "SmolLM2-135M-Instruct"


def checkout_dir() -> Path:
    """The folder that holds `pyproject.toml` and the packages."""
    return Path(__file__).resolve().parent.parent


def default_engine() -> EngineKind:
    """The engine meant where none is named: `PRORL_ENGINE`, which the Makefile sets from `ENGINE`; else `cpu`."""
    return "gpu" if os.environ.get("PRORL_ENGINE") == "gpu" else "cpu"


def engine_dir(kind: EngineKind | None = None) -> Path:
    """The virtual environment of the inference engine. Another set of pins, or another Python, is another folder."""
    return cache_dir() / f"engine-{engine_key(kind or default_engine(), checkout_dir())}"


def engine_python(kind: EngineKind | None = None) -> Path:
    """The interpreter that starts vLLM. It exists once `make engine` has run."""
    return engine_dir(kind) / "bin" / "python"


def model_dir() -> Path:
    """The folder of the default policy in Hugging Face's format. It exists once `make engine` has run."""
    return cache_dir() / "models" / MODEL_NAME
