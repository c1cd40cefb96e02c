"""The tree: few modules outside the rooms, imports downwards only, no circle, and a wheel of the product alone."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

from prorl_launch.locks import lock_path

ROOT = Path(__file__).parents[2]
MAX_MODULES_OUTSIDE_ROOMS = 6
IN_THE_WHEEL = {"prorl_trio": ".", "prorl_daemon": "sandbox_daemon", "prorl_ipc": "ipc", "prorl_launch": "launch"}


def test_modules_are_in_rooms():
    outside = sorted(path.name for path in (ROOT / "prorl_trio").glob("*.py"))
    assert len(outside) <= MAX_MODULES_OUTSIDE_ROOMS, outside


def test_rooms_import_downwards_only_and_in_no_circle():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    linted = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert [contract["exhaustive"] for contract in contracts if contract.get("containers") == ["prorl_trio"]] == [True]
    assert "acyclic_siblings" in [contract["type"] for contract in contracts]


def test_the_wheel_has_the_product_and_nothing_else(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = ZipFile(wheel).namelist()
    folders = {name.partition("/")[0] for name in names}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == set(IN_THE_WHEEL)
    for package, below in IN_THE_WHEEL.items():
        modules = {str(path.relative_to(ROOT / below)) for path in (ROOT / below / package).rglob("*.py")}
        assert modules <= {*names}, "a module is missing"
    metadata, _, page = next(
        ZipFile(wheel).read(name).decode().partition("\n\n") for name in names if name.endswith("/METADATA")
    )
    pythons = re.findall(r"^Classifier: Programming Language :: Python :: ([\d.]+)$", metadata, re.MULTILINE)
    assert pythons == re.search(r"^# python: (.*)$", lock_path("dev").read_text(), re.MULTILINE)[1].split()
    assert re.findall(r"^Project-URL: \w+, (.*)$", metadata, re.MULTILINE)
    assert all(link.startswith("https://") for link in re.findall(r"\]\((.*?)\)", page)), "of an index page"
    assert all(
        f"prorl-trio {name}" in page for name in ("setup", "demo", "engine", "examples", "run", "doctor", "learn")
    )
