"""Verification of a row: its tests before any change, with the gold patch, an empty one, and one that edits tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from launch.mining.changes import make_patch
from launch.mining.runs import SuiteJob
from launch.mining.sdist import Entry
from prorl_trio.sandbox.images.layers import CONTENT_NAME, find_layer
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launch.mining.runs import Bench, SuiteRun
    from launch.mining.sdist import Tree
    from prorl_trio.types.models import TaskInstance

__all__ = ["CHECKS", "TIMES", "editing_patch", "job_of", "verify_row"]

TIMES: Final = 2
"""Runs of each check."""
CHECKS: Final = ("before", "gold", "empty patch", "test-editing patch")
EDITED: Final = "def test_nothing():\n    pass\n"
HOOK: Final = """\
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""


def job_of(row: TaskInstance) -> SuiteJob:
    """Return the tests of a row.

    Raises:
        ConfigError: it is no row of the handler `swe` whose tests are pytest's.
    """
    payload: dict[str, Any] = row.payload
    tests = payload.get("tests", {})
    if row.handler != "swe" or tests.get("kind") != "pytest":
        raise ConfigError(f"{row.instance_id}: only rows of the handler `swe` with tests of pytest can be verified")
    return SuiteJob(
        layers=tuple(payload.get("layers", ())),
        env=payload.get("env", {}),
        repo_dir=payload.get("repo_dir", "/testbed"),
        test_files=payload.get("test_files", {}),
        removed_test_files=payload.get("removed_test_files", []),
        arguments=tests["arguments"],
        test_timeout_s=tests.get("test_timeout_s", 60.0),
        timeout_s=tests.get("timeout_s", 1800.0),
        image=payload.get("image") or "host",
    )


async def verify_row(bench: Bench, row: TaskInstance, gold: bytes) -> dict[str, str]:
    """Return how each check of a row ended, by its name: `right`, or what was wrong with it.

    Before, no test that is to pass now passes, and each that is to pass still does; with the gold patch all of them
    pass; with an empty patch, or one that edits the tests and makes pytest call everything passed, the row is not
    solved. Each check runs `TIMES` times, in sandboxes of its own.

    Raises:
        ConfigError: it cannot be verified.
        SandboxUnavailable, SandboxLost, OSError: infrastructure; nothing is known of the row.
    """
    job = job_of(row)
    editing = await trio.to_thread.run_sync(editing_patch, row)
    patches = dict(zip(CHECKS, (None, gold, b"", editing), strict=True))
    found: dict[str, str] = {}
    for check, patch in patches.items():
        verdicts = [_judge(check, row, await bench.run(job, patch)) for _ in range(TIMES)]
        found[check] = next((verdict for verdict in verdicts if verdict != "right"), "right")
    return found


def _judge(check: str, row: TaskInstance, run: SuiteRun) -> str:
    if run.ended != "finished":
        # A cheat that breaks its own run has not won; of any other, nothing could be said.
        return "right" if check == "test-editing patch" and run.ended == "not_applied" else f"{run.ended}: {run.said}"
    tests = row.payload["tests"]
    fail_to_pass = {test: _status(run, test) for test in tests["fail_to_pass"]}
    pass_to_pass = {test: _status(run, test) for test in tests["pass_to_pass"]}
    passes = [test for test, status in fail_to_pass.items() if status in ("passed", "xfailed")]
    broken = {test: each for test, each in pass_to_pass.items() if each not in ("passed", "xfailed", "skipped")}
    if check == "gold":
        failed = {test: each for test, each in fail_to_pass.items() if test not in passes} | broken
        return _said("does not pass", failed)
    if check == "before":
        return _said("passes already", dict.fromkeys(passes, "passed")) if passes else _said("does not pass", broken)
    return "it is solved" if len(passes) == len(fail_to_pass) and not broken else "right"


def _status(run: SuiteRun, test: str) -> str:
    return run.results[test].status if test in run.results else "missing"


def _said(what: str, tests: Mapping[str, str]) -> str:
    if not tests:
        return "right"
    test, status = next(iter(tests.items()))
    return f"{test} {what} ({status}); {len(tests)} such tests"


def editing_patch(row: TaskInstance) -> bytes:
    """Return a patch that makes all tests pass by editing them, and by a hook for pytest. Blocks.

    Raises:
        ConfigError: the row's layers are not in the store.
    """
    repo_dir = row.payload.get("repo_dir", "/testbed")
    edited = {name: EDITED for name in row.payload["tests"]["arguments"] if name.endswith(".py")}
    old: Tree = {}
    new: Tree = {}
    for path, text in {**edited, "conftest.py": HOOK}.items():
        new[path] = Entry(text.encode())
        for digest in row.payload.get("layers", ()):
            layer = find_layer(digest)
            if layer is None:
                raise ConfigError(f"{row.instance_id}: the layer {digest} is not in the store: mine it again")
            place = Path(layer.folder / CONTENT_NAME, repo_dir.lstrip("/"), path)
            if place.is_file():
                old[path] = Entry(place.read_bytes(), bool(place.stat().st_mode & 0o100))
                new[path] = new[path]._replace(executable=old[path].executable)
    return make_patch(old, new)
