"""SkyRL beside the environment of verl's tests, which has torch and Ray already: 14 MB more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from prorl_launch import venv
from prorl_launch.paths import import_path
from prorl_launch.progress import SetupError
from prorl_trio.sandbox.cache import cache_dir
from support.skips import because
from support.verl_rig import verl_python

PINS: Final = (
    "skyrl==0.4.0",
    "skyrl-gym==0.4.0",
    "cloudpathlib==0.26.0",
    "jaxtyping==0.3.11",
    "loguru==0.7.3",
    "pybase64==1.5.1",
)
"""SkyRL, and what its trainer imports and verl's environment lacks."""
OTHER: Final = "PRORL_SKYRL_PYTHON"
"""Names another interpreter, which has SkyRL with all that it requires, instead."""


def skyrl_python() -> tuple[str, dict[str, str]]:
    """Return an interpreter with SkyRL, and its environment. Skips where verl has none.

    The interpreter may be older than SkyRL requires (3.12): see `skyrl_program`.
    """
    paths = [import_path(), str(Path(__file__).parents[1])]
    if other := os.environ.get(OTHER):
        return other, {"PYTHONPATH": os.pathsep.join(paths)}
    python = verl_python()
    folder = cache_dir() / "test-tools" / "skyrl"
    arguments = ["-m", "pip", "install", "--no-deps", "--only-binary", ":all:", "--ignore-requires-python", *PINS]
    (cache_dir() / "logs").mkdir(parents=True, exist_ok=True)
    log_file = cache_dir() / "logs" / "skyrl.log"
    try:
        venv.install(folder, " ".join(PINS), [("SkyRL", arguments)], log_file=log_file, by_uv=False)
    except (SetupError, subprocess.SubprocessError) as error:
        pytest.skip(because(f"SkyRL cannot be had: {error}", "look at the network, or at the package index"))
    packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    return str(python), {"PYTHONPATH": os.pathsep.join([*paths, str(packages)])}
