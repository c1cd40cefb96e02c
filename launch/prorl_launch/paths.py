"""The places where set-up puts things and others find them. Standard library only: read before `.venv` exists."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from prorl_launch.environments import EngineKind, Environment, TrainerKind, engine_environment, trainer_environment
from prorl_trio.sandbox.cache import cache_dir as cache_dir

MODEL_NAME = "SmolLM2-135M-Instruct"


def checkout_dir() -> Path:
    """The folder that holds `pyproject.toml` and the packages."""
    return Path(__file__).resolve().parents[2]


def import_path() -> str:
    """The `PYTHONPATH` by which an environment without this project finds its packages."""
    found = map(find_spec, ("prorl_trio", "prorl_ipc", "prorl_launch", "prorl_daemon"))
    folders = {Path(spec.origin).resolve().parents[1]: None for spec in found if spec is not None and spec.origin}
    return os.pathsep.join(map(str, folders))


def default_engine() -> EngineKind:
    """The engine meant where none is named: `PRORL_ENGINE`, which the Makefile sets from `ENGINE`; else `cpu`."""
    return "gpu" if os.environ.get("PRORL_ENGINE") == "gpu" else "cpu"


def environment_dir(environment: Environment) -> Path:
    """The folder of one of `ENVIRONMENTS`. Another set of pins, or another Python, is another folder."""
    return cache_dir() / f"{environment.lock.partition('-')[0]}-{environment.key(checkout_dir())}"


def engine_dir(kind: EngineKind | None = None) -> Path:
    """The virtual environment of the inference engine."""
    return environment_dir(engine_environment(kind or default_engine()))


def engine_python(kind: EngineKind | None = None) -> Path:
    """The interpreter that starts vLLM. It exists once `make engine` has run."""
    return engine_dir(kind) / "bin" / "python"


def trainer_python(trainer: TrainerKind, kind: EngineKind | None = None) -> Path:
    """The interpreter in which a trainer runs. It exists once `make trainers` has run.

    This project is not installed there: have `import_path()` as its `PYTHONPATH`.
    """
    return environment_dir(trainer_environment(trainer, kind or default_engine())) / "bin" / "python"


def model_dir() -> Path:
    """The folder of the default policy in Hugging Face's format. It exists once `make engine` has run."""
    return cache_dir() / "models" / MODEL_NAME
