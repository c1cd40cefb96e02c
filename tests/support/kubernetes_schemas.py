"""The schemas of Kubernetes, by the package kubernetes-validate. Of its 17,000 files some are unpacked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Final
from zipfile import ZipFile

import pytest

from prorl_launch.venv import exclusive
from prorl_trio.sandbox.cache import cache_dir
from support.skips import because

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PINS: Final = ("kubernetes-validate==1.37.0", "importlib-resources==7.1.0")
"""Not what else it imports, which the tests' own environment has."""
DOWNLOAD_TIMEOUT_S: Final = 240
CHECK_TIMEOUT_S: Final = 240
SCHEMAS: Final = "kubernetes_validate/kubernetes-json-schema"
CHECK: Final = """
import json, sys
from kubernetes_validate import utils

versions, files = json.loads(sys.argv[1])
found = {version: [] for version in versions}
for file in files:
    for resource in utils.resources_from_file(file):
        for version, problems in found.items():
            try:
                utils.validate(resource, version, strict=True)
            except utils.ValidationError as problem:
                problems.append(f"{file}: {resource['kind']}: {problem.message}")
print(json.dumps(found))
"""


def problems_of(manifests: Sequence[Path], versions: Sequence[str]) -> dict[str, list[str]]:
    """Return what the schemas of some versions of Kubernetes have against some files, by version."""
    argv = [sys.executable, "-c", CHECK, json.dumps([[*versions], [*map(str, manifests)]])]
    env = os.environ | {"PYTHONPATH": str(_packages(versions))}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def _packages(versions: Sequence[str]) -> Path:
    """Return the folder with the packages and the schemas of some versions, made once: 22 MB come."""
    folder = cache_dir() / "test-tools" / "-".join((*PINS, *versions)).replace("==", "-")
    with exclusive(folder.parent):
        if folder.is_dir():
            return folder
        staging = folder.with_name(f".new-{folder.name}")
        shutil.rmtree(staging, ignore_errors=True)
        argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(staging)]
        try:
            subprocess.run([*argv, *PINS], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(staging, ignore_errors=True)
            said = getattr(error, "stderr", None) or error
            pytest.skip(
                because(f"kubernetes-validate cannot be had: {said}", "look at the network or the package index")
            )
        wanted = tuple(f"{SCHEMAS}/v{version}.0-local-strict/" for version in versions)
        for wheel in staging.glob("*.whl"):
            with ZipFile(wheel) as packed:
                names = [name for name in packed.namelist() if not name.startswith(SCHEMAS) or name.startswith(wanted)]
                packed.extractall(staging, names)
            wheel.unlink()
        staging.rename(folder)
    return folder
