"""The places where set-up puts things and others find them. Standard library only: read before `.venv` exists."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from prorl_launch.environments import EngineKind, Environment, TrainerKind, engine_environment, trainer_environment
from prorl_trio.sandbox.cache import cache_dir as cache_dir

MODEL_NAME = "SmolLM2-135M-Instruct"


SHIPPED: Final = "shipped"
"""The folder in which a wheel carries files of a checkout, by their names there."""
_PACKAGE: Final = Path(__file__).resolve().parent
_PACKAGES: Final = ("prorl_trio", "prorl_ipc", "prorl_launch", "prorl_daemon")


def is_checkout() -> bool:
    """Return False if this is an installed wheel."""
    return not (_PACKAGE / SHIPPED).is_dir()


def checkout_dir() -> Path:
    """Return the folder that holds `pyproject.toml`, `examples` and `launch`; of a wheel the one with its copies."""
    return _PACKAGE.parents[1] if is_checkout() else _PACKAGE / SHIPPED


def import_path() -> str:
    """Return the `PYTHONPATH` by which an environment without this project finds its packages, and nothing else.

    Installed packages are in a folder with many others: they get one of their own in the cache folder, of links.
    """
    found = [spec for spec in map(find_spec, _PACKAGES) if spec is not None and spec.origin]
    homes = {spec.name: Path(spec.origin).resolve().parent for spec in found if spec.origin}
    if is_checkout():
        return os.pathsep.join(dict.fromkeys(str(home.parent) for home in homes.values()))
    name = hashlib.sha256(str(_PACKAGE).encode()).hexdigest()[:12]
    folder = cache_dir() / "import-paths" / name
    folder.mkdir(parents=True, exist_ok=True)
    for package, home in homes.items():
        with suppress(FileExistsError):
            (folder / package).symlink_to(home)
    return str(folder)


def apptainer_script() -> Path:
    """Return the script that installs Apptainer."""
    return _PACKAGE / "apptainer.sh"


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
    """The interpreter that starts vLLM. It exists once `prorl-trio setup engine` has run."""
    return engine_dir(kind) / "bin" / "python"


def trainer_python(trainer: TrainerKind, kind: EngineKind | None = None) -> Path:
    """The interpreter in which a trainer runs. It exists once `prorl-trio setup trainers` has run.

    This project is not installed there: have `import_path()` as its `PYTHONPATH`.
    """
    return environment_dir(trainer_environment(trainer, kind or default_engine())) / "bin" / "python"


def model_dir() -> Path:
    """The folder of the default policy in Hugging Face's format. It exists once `prorl-trio setup engine` has run."""
    return cache_dir() / "models" / MODEL_NAME
