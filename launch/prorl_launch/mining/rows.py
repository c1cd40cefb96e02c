"""Rows of mined tasks: the data for nodes, and separately the data hidden from agents. Pure, except for their files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from prorl_launch.mining.sdist import Entry, file_kind
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence
    from pathlib import Path

    from prorl_launch.mining.sdist import Tree
    from prorl_trio.tasks.grading.verdict import TestResult

T = TypeVar("T")

REPO_DIR: Final = "/testbed"
_UNSTABLE_ID: Final = re.compile(r"0x[0-9a-fA-F]{6,}|[\r\n\x00]")
"""Unstable or ambiguous parts of a test's name: addresses and line ends."""


class MinedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate and its result. `reason` explains a refusal; `checks` contains the result of each run."""

    instance_id: str
    status: Literal["verified", "refused"]
    reason: str = ""
    row: TaskInstance | None = None
    gold: str = ""
    checks: dict[str, str] = {}


class Gold(msgspec.Struct, frozen=True, kw_only=True):
    """The solution of a row, in a separate file, which never reaches a node's task or an agent."""

    instance_id: str
    patch: str


class RowChecks(msgspec.Struct, frozen=True, kw_only=True):
    """The result of each check of a row: `right`, or the defect."""

    instance_id: str
    checks: dict[str, str]


class TestOverlay(msgspec.Struct, frozen=True, kw_only=True):
    """The test files with which an evaluator replaces a repository's own, and binary test data."""

    __test__ = False

    files: dict[str, str]
    removed: list[str]
    binary: dict[str, bytes]


class ChosenTests(msgspec.Struct, frozen=True, kw_only=True):
    """The tests that decide on a row, and their files."""

    fail_to_pass: list[str]
    pass_to_pass: list[str]
    files: list[str]


def overlay_of(base: Tree, new: Tree) -> TestOverlay:
    """Return the overlay that replaces tests, their data and their configuration in `base` with `new`'s."""
    files: dict[str, str] = {}
    binary: dict[str, bytes] = {}
    for path, entry in new.items():
        if file_kind(path) != "test" or base.get(path, Entry(b"\0")).content == entry.content:
            continue
        try:
            files[path] = entry.content.decode()
        except UnicodeDecodeError:
            binary[path] = entry.content
    removed = sorted(path for path in base if file_kind(path) == "test" and path not in new)
    return TestOverlay(files=files, removed=removed, binary=binary)


def choose_tests(
    before: Sequence[Mapping[str, TestResult]],
    gold: Sequence[Mapping[str, TestResult]],
    *,
    unsteady: Container[str] = (),
) -> ChosenTests | None:
    """Return the deciding tests from repeated runs before and with the gold patch; None if none decides.

    A fail-to-pass test passed in each run with the patch and in none before. A pass-to-pass test passed in all runs.
    Only pass-to-pass tests in files of fail-to-pass tests count, or all if these files contain none. `unsteady` are
    names of functions whose result does not depend on the code alone.
    """
    named = set().union(*before, *gold)
    steady = sorted(
        test for test in named if not _UNSTABLE_ID.search(test) and "::" in test and _function(test) not in unsteady
    )
    passes_now = [test for test in steady if all(_passed(run, test) for run in gold)]
    fail_to_pass = [test for test in passes_now if not any(_passed(run, test) for run in before)]
    still = [test for test in passes_now if all(_passed(run, test) for run in before)]
    if not fail_to_pass or not still:
        return None
    files = {_file(test) for test in fail_to_pass}
    beside = [test for test in still if _file(test) in files]
    if not beside:
        beside, files = still, files | {_file(test) for test in still}
    return ChosenTests(fail_to_pass=fail_to_pass, pass_to_pass=beside, files=sorted(files))


def _passed(run: Mapping[str, TestResult], test: str) -> bool:
    return test in run and run[test].status == "passed"


def _file(test: str) -> str:
    return test.partition("::")[0]


def _function(test: str) -> str:
    return test.partition("[")[0].rpartition("::")[2]


def save_task(task: MinedTask, folder: Path) -> None:
    """Write a candidate's result atomically. Blocks."""
    target = folder / "candidates" / f"{task.instance_id}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(task))
    part.replace(target)


def load_tasks(folder: Path) -> dict[str, MinedTask]:
    """Return the result of each candidate so far, by its name. Blocks."""
    paths = sorted((folder / "candidates").glob("*.json"))
    found = [msgspec.json.decode(path.read_bytes(), type=MinedTask) for path in paths]
    return {task.instance_id: task for task in found}


def write_lines(path: Path, lines: Iterable[Any]) -> None:
    """Write a JSONL file atomically. Blocks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    part.replace(path)


def read_rows(path: Path) -> list[TaskInstance]:
    """Return the rows of a JSONL file. Blocks.

    Raises:
        ConfigError: it cannot be read, or a line is not a row; with its number.
    """
    return _lines(path, TaskInstance)


def read_gold(path: Path) -> dict[str, str]:
    """Return the gold patches in a file by row name. Blocks. Raises the errors of `read_rows`."""
    return {gold.instance_id: gold.patch for gold in _lines(path, Gold)}


def read_checks(path: Path) -> dict[str, dict[str, str]]:
    """Return the checks in an append-only file, and truncate an incomplete last line. Blocks.

    Raises the errors of `read_rows`. A missing file counts as empty.
    """
    if not path.exists():
        return {}
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
    return {found.instance_id: found.checks for found in _lines(path, RowChecks)}


def _lines(path: Path, kind: type[T]) -> list[T]:
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
    found: list[T] = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            found.append(msgspec.json.decode(line, type=kind))
        except msgspec.DecodeError as exc:
            raise ConfigError(f"{path}, line {number}: {exc}") from exc
    return found
