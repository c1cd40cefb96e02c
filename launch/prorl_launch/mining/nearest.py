"""Published rows ported to the nearest source archive: their patches and tests, without the original commit.

A ported row differs from the published one, so it is labelled with its archive. It is accepted only if both patches
apply without fuzz, and each test has the result in the row.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from prorl_launch.mining.candidates import source_folders
from prorl_launch.mining.changes import changed_files
from prorl_launch.mining.environments import environment_variables, make_environment
from prorl_launch.mining.index import download, list_sdists
from prorl_launch.mining.rows import REPO_DIR, MinedTask
from prorl_launch.mining.sdist import Entry, read_metadata, read_sdist, write_tree
from prorl_launch.mining.verification import verify_row
from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.sandbox.images.compose import compose_image
from prorl_trio.sandbox.images.layers import store_layer
from prorl_trio.tasks.sets.wheels import WheelFile
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_launch.mining.environments import LocalBench
    from prorl_launch.mining.index import IndexSettings
    from prorl_launch.mining.sdist import Tree

APPLY_TIMEOUT_S: Final = 60.0
TEST_TIMEOUT_S: Final = 120.0
TIMEOUT_S: Final = 900.0


class PublishedRow(NamedTuple):
    """A row of a wheel, the release it is ported to, and the requirements of the release and its tests."""

    instance_id: str
    data_set: str
    member: str
    package: str
    version: str
    requirements: tuple[str, ...]


PUBLISHED_ROWS: Final = (
    PublishedRow(
        "dask__dask-9378",
        "SWE-Gym",
        "resources_servers/swerl_gen/data/example.jsonl",
        "dask",
        "2022.8.0",
        ("cloudpickle", "fsspec", "numpy==1.23.5", "packaging", "partd", "pytest<8", "pyyaml", "toolz"),
    ),
    PublishedRow(
        "tox-dev__pipdeptree-279",
        "SWE-rebench",
        "resources_servers/swe_rebench/data/example.jsonl",
        "pipdeptree",
        "2.12.0",
        ("pip", "virtualenv", "pytest-mock", "pytest<8"),
    ),
)


async def build_published(published: PublishedRow, bench: LocalBench, settings: IndexSettings) -> MinedTask:
    """Return the row on its archive, verified or refused with the reason.

    Raises:
        ConfigError: the wheel, the archive or the environment is unavailable.
        EvaluationError, SandboxUnavailable, SandboxLost: the infrastructure failed; the row's result is unknown.
    """
    row, gold = await trio.to_thread.run_sync(make_row, published, settings)
    if row is None:
        return MinedTask(instance_id=published.instance_id, status="refused", reason=gold)
    checks = await verify_row(bench, row, gold.encode())
    wrong = [f"{check}: {verdict}" for check, verdict in checks.items() if verdict != "right"]
    if wrong:
        reason = "; ".join(wrong)[:2000]
        return MinedTask(instance_id=row.instance_id, status="refused", reason=reason, checks=checks)
    await trio.to_thread.run_sync(compose_image, row.instance_id, "host", row.payload["layers"])
    return MinedTask(instance_id=row.instance_id, status="verified", row=row, gold=gold, checks=checks)


def make_row(published: PublishedRow, settings: IndexSettings) -> tuple[TaskInstance | None, str]:
    """Return the row and its gold patch, or None and why a patch does not apply. Blocks."""
    told = read_row(published)
    file = next((each for each in list_sdists(published.package, settings) if each.version == published.version), None)
    if file is None:
        raise ConfigError(f"{published.package} {published.version}: the index has no source archive of it")
    path, sha256 = download(file, cache_dir() / "mining" / "sdists", settings)
    base = read_sdist(path)
    with_tests = apply_strictly(base, told["test_patch"].encode())
    if with_tests is None or apply_strictly(base, told["patch"].encode()) is None:
        return None, f"a patch of the row does not apply to {file.name} without fuzz"
    metadata = read_metadata(published.package, base)
    environment = make_environment(published.package, published.requirements)
    with tempfile.TemporaryDirectory(prefix="prorl-mine-") as scratch:
        write_tree(base, Path(scratch))
        repository = store_layer(Path(scratch), at=REPO_DIR).record.digest
    changed = changed_files(base, with_tests)
    fail_to_pass, pass_to_pass = (_names(told[key]) for key in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    files = sorted({name.partition("::")[0] for name in [*fail_to_pass, *pass_to_pass]})
    payload: dict[str, Any] = {
        "problem_statement": told["problem_statement"],
        "image": "host",
        "layers": [environment.digest, repository],
        "repo_dir": REPO_DIR,
        "env": environment_variables(source_folders(base), REPO_DIR),
        "test_files": {name: with_tests[name].content.decode() for name in changed if name in with_tests},
        "removed_test_files": [name for name in changed if name not in with_tests],
        "tests": {
            "kind": "pytest",
            "arguments": ["-oaddopts=", *files],
            "fail_to_pass": fail_to_pass,
            "pass_to_pass": pass_to_pass,
            "test_timeout_s": TEST_TIMEOUT_S,
            "timeout_s": TIMEOUT_S,
        },
        "source": {
            "package": published.package,
            "kind": "published row",
            "data_set": published.data_set,
            "base": f"{published.package}=={published.version} (sdist)",
            "gold": "the patch of the published row",
            "licence": metadata.licence,
            "sha256": {file.name: sha256},
            "environment": [*environment.installed],
        },
    }
    name = published.instance_id
    return TaskInstance(instance_id=name, handler="swe", payload=payload, family=published.package), told["patch"]


def read_row(published: PublishedRow) -> dict[str, Any]:
    """Return the row as published. Blocks on the disk.

    Raises:
        ConfigError: its wheel is missing (the message has the command that downloads it), or lacks the row.
    """
    wheel = WheelFile("nemo-gym", "0.7.0", "3.13.14", published.member)
    for line in wheel.read("sdist-published").splitlines():
        row: dict[str, Any] = json.loads(line)
        row = row.get("instance", row)
        if row.get("instance_id") == published.instance_id:
            return row
    raise ConfigError(f"{published.instance_id} is not in {published.member} of nemo-gym 0.7.0")


def _names(tests: str | Sequence[str]) -> list[str]:
    """Return test names, which some data sets encode as JSON text."""
    return list(json.loads(tests) if isinstance(tests, str) else tests)


def apply_strictly(tree: Tree, patch: bytes) -> Tree | None:
    """Return a tree with a patch applied, with an exact match of its context; None if it does not apply. Blocks."""
    with tempfile.TemporaryDirectory(prefix="prorl-apply-") as scratch:
        folder = Path(scratch)
        write_tree(tree, folder)
        argv = ["git", "apply", "--whitespace=nowarn", "-"]
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": str(folder.parent)}
        done = subprocess.run(
            argv, cwd=folder, input=patch, capture_output=True, timeout=APPLY_TIMEOUT_S, env=environment, check=False
        )
        if done.returncode:
            return None
        return {
            str(path.relative_to(folder)): Entry(path.read_bytes(), bool(path.stat().st_mode & 0o100))
            for path in folder.rglob("*")
            if path.is_file()
        }
