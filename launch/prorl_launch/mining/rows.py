"""Rows of mined tasks: what a node is given, and apart from it what no agent may see. Pure, but for their files."""

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
"""Parts of a test's name that are there by chance, or cannot be told apart: addresses, ends of lines."""


class MinedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate and what became of it. `reason` says why it is refused; `checks` how each run ended."""

    instance_id: str
    status: Literal["verified", "refused"]
    reason: str = ""
    row: TaskInstance | None = None
    gold: str = ""
    checks: dict[str, str] = {}


class Gold(msgspec.Struct, frozen=True, kw_only=True):
    """The solution of a row, in a file of its own, which never reaches a node's task or an agent."""

    instance_id: str
    patch: str


class RowChecks(msgspec.Struct, frozen=True, kw_only=True):
    """The end of each check of a row: `right`, or what was wrong."""

    instance_id: str
    checks: dict[str, str]


class TestOverlay(msgspec.Struct, frozen=True, kw_only=True):
    """The test files by which an evaluator replaces those of a repository, and data of tests that are no text."""

    __test__ = False

    files: dict[str, str]
    removed: list[str]
    binary: dict[str, bytes]


class ChosenTests(msgspec.Struct, frozen=True, kw_only=True):
    """The tests that decide on a row, and the files that have them."""

    fail_to_pass: list[str]
    pass_to_pass: list[str]
    files: list[str]


def overlay_of(base: Tree, new: Tree) -> TestOverlay:
    """Return what makes the tests, their data and their configuration in `base` those of `new`."""
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
    """Return the tests that decide, given the results of equal runs before and with the gold patch; None if none does.

    A test that is to pass now passed in each run with the patch and in none before. One that is to pass still passed in
    all. Of the latter those count that are in files of the former, or all if there are none in them. `unsteady` are
    names of functions whose result is not the code's alone.
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
    """Write what became of a candidate, whole or not at all. Blocks."""
    target = folder / "candidates" / f"{task.instance_id}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(task))
    part.replace(target)


def load_tasks(folder: Path) -> dict[str, MinedTask]:
    """Return what became of each candidate so far, by its name. Blocks."""
    paths = sorted((folder / "candidates").glob("*.json"))
    found = [msgspec.json.decode(path.read_bytes(), type=MinedTask) for path in paths]
    return {task.instance_id: task for task in found}


def write_lines(path: Path, lines: Iterable[Any]) -> None:
    """Write a JSONL file, whole or not at all. Blocks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    part.replace(path)


def read_rows(path: Path) -> list[TaskInstance]:
    """Return the rows of a JSONL file. Blocks.

    Raises:
        ConfigError: it cannot be read, or a line is no row; with its number.
    """
    return _lines(path, TaskInstance)


def read_gold(path: Path) -> dict[str, str]:
    """Return the gold patches of a file by the names of their rows. Blocks. Errors as `read_rows`."""
    return {gold.instance_id: gold.patch for gold in _lines(path, Gold)}


def read_checks(path: Path) -> dict[str, dict[str, str]]:
    """Return the checks in a file that grows line by line, and cut off a line that was not written to its end. Blocks.

    Errors as `read_rows`; there is nothing in a file that is not there.
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
