"""Verification of a row by its tests: before any change, with the gold patch, an empty patch, and hacks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_launch.mining.changes import make_patch
from prorl_launch.mining.environments import payload_of
from prorl_launch.mining.rows import RowChecks, read_checks
from prorl_launch.mining.sdist import Entry
from prorl_trio.sandbox.images.layers import CONTENT_NAME, find_layer
from prorl_trio.tasks.grading.repository_tests import NamedTests
from prorl_trio.types.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from prorl_launch.mining.environments import LocalBench
    from prorl_launch.mining.sdist import Tree
    from prorl_trio.tasks.grading.repository import Graded, SuiteRun
    from prorl_trio.tasks.grading.verdict import TestResult
    from prorl_trio.tasks.handlers.swe import SwePayload
    from prorl_trio.types.models import TaskInstance


TIMES: Final = 2
"""Number of runs before the change, and with the gold patch. Changes that must not solve the row are run once."""
MAX_SAID_CHARS: Final = 2000

EDITED: Final = "def test_nothing():\n    pass\n"
HOOK: Final = """\
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""
_REPLACES_ALL: Final = """

def _hack(*_arguments, **_options):
    import pytest
    pytest.xfail("hack")


for _name, _value in [*globals().items()]:
    if getattr(_value, "__module__", None) == __name__:
        if isinstance(_value, type):
            for _key, _member in [*vars(_value).items()]:
                if callable(_member):
                    setattr(_value, _key, _hack)
        elif callable(_value):
            globals()[_name] = _hack
"""
_EXPECTS_FAILURE: Final = """

import unittest
unittest.TestCase.__unittest_expecting_failure__ = True
"""
_PATCHES_REPORTS: Final = """

import _pytest.runner as _runner
_made = _runner.TestReport.from_item_and_call.__func__


def _forged(cls, item, call):
    report = _made(cls, item, call)
    report.outcome, report.longrepr = "passed", None
    return report


_runner.TestReport.from_item_and_call = classmethod(_forged)
"""
_EXITS: Final = "\n\nimport os\nos._exit(0)\n"
_SPARES_CANARY: Final = "    if __import__('re').search('test_[0-9a-f]{8}_', item.nodeid):\n        return\n"
_PLUGIN: Final = HOOK.replace("    report = ", f"{_SPARES_CANARY}    report = ")
_CONFIGURES: Final = {
    "evil_plugin.py": _PLUGIN,
    "pytest.toml": "[pytest]\naddopts = ['-p', 'evil_plugin']\n",
    ".pytest.toml": "[pytest]\naddopts = ['-p', 'evil_plugin']\n",
    "pytest.ini": "[pytest]\naddopts = -p evil_plugin\n",
    "evil-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n",
    "evil-1.0.dist-info/entry_points.txt": "[pytest11]\nevil = evil_plugin\n",
    "evil.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n",
    "evil.egg-info/entry_points.txt": "[pytest11]\nevil2 = evil_plugin\n",
    "numbers.py": _EXITS,
    "signal.py": _EXITS,
    "sitecustomize.py": _EXITS,
}


def _at_the_end(text: str) -> Callable[[Tree], Tree]:
    return lambda modules: {
        path: entry._replace(content=entry.content + text.encode()) for path, entry in modules.items()
    }


def _beside(modules: Tree) -> Tree:
    del modules
    return {path: Entry(text.encode()) for path, text in _CONFIGURES.items()}


HACKS: Final[dict[str, Callable[[Tree], Tree]]] = {
    "xfail in the code": _at_the_end(_REPLACES_ALL),
    "expected failures": _at_the_end(_EXPECTS_FAILURE),
    "patched reports": _at_the_end(_PATCHES_REPORTS),
    "early exit": _at_the_end(_EXITS),
    "configuration, plug-ins and modules": _beside,
}
"""Each hack changes the content of the gold patch's modules, or adds files."""
CHECKS: Final = ("before", "gold", "empty patch", "test-editing patch", *HACKS)


def changed_modules(gold: bytes) -> list[str]:
    """Return the Python modules that a patch changes."""
    paths = dict.fromkeys(re.findall(rb"(?m)^\+\+\+ b/(.*?)\t?$", gold))
    return [path.decode(errors="surrogateescape") for path in paths if path.endswith(b".py")]


def hack_patches(files: Tree) -> dict[str, bytes]:
    """Return a patch for each hack, given the base version of the gold patch's modules. Blocks."""
    return {name: make_patch(files, {**files, **hack(files)}) for name, hack in HACKS.items()}


async def verify_row(bench: LocalBench, row: TaskInstance, gold: bytes) -> dict[str, str]:
    """Return the result of each check of a row by its name: `right`, or the defect.

    Before the change, every fail-to-pass test must fail and every pass-to-pass test must pass. With the gold patch all
    must pass. Three kinds of changes must not solve the row. They are an empty patch, a patch that edits the tests and
    makes pytest report everything as passed, and each of `HACKS`. The grader is the node's own. Each run has its own
    sandbox.

    Raises:
        ConfigError: it cannot be verified.
        EvaluationError, SandboxUnavailable, SandboxLost: the infrastructure failed; the row's result is unknown.
    """
    payload = payload_of(row)
    editing = await trio.to_thread.run_sync(editing_patch, row.instance_id, payload)
    hacks = await trio.to_thread.run_sync(_hacks, row.instance_id, payload, gold)
    patches = dict(zip(CHECKS, (None, gold, b"", editing, *hacks.values()), strict=True))
    found: dict[str, str] = {}
    for check, patch in patches.items():
        times = TIMES if check in ("before", "gold") else 1
        verdicts = [_judge(check, payload, await bench.grade(payload, patch)) for _ in range(times)]
        found[check] = next((verdict for verdict in verdicts if verdict != "right"), "right")
    return found


async def verify_rows(
    rows: Sequence[TaskInstance],
    verify: Callable[[TaskInstance], Awaitable[dict[str, str]]],
    *,
    jobs: int,
    results: Path | None,
    on_ended: Callable[[], None],
) -> dict[str, dict[str, str]]:
    """Verify rows, `jobs` at a time, and return the checks of each row by its name.

    `all` contains its obstacle, if any.

    Each finished row is a line of the file `results`, regardless of other rows. Rows in the file are not verified
    again. Obstructed rows are not stored, and are verified the next time.

    Raises:
        ConfigError: the file has another format.
    """
    checked = {} if results is None else await trio.to_thread.run_sync(read_checks, results)
    limiter, writing = trio.CapacityLimiter(jobs), trio.Lock()

    async def check(row: TaskInstance) -> None:
        async with limiter:
            try:
                checked[row.instance_id] = await verify(row)
            except (ConfigError, RolloutError, OSError) as exc:
                checked[row.instance_id] = {"all": str(exc)}
            else:
                async with writing:
                    await trio.to_thread.run_sync(_append, results, row.instance_id, checked[row.instance_id])
        on_ended()

    async with trio.open_nursery() as nursery:
        for row in rows:
            if row.instance_id in checked:
                on_ended()
            else:
                nursery.start_soon(check, row)
    return {row.instance_id: checked[row.instance_id] for row in rows}


def _append(results: Path | None, name: str, checks: dict[str, str]) -> None:
    if results is not None:
        with results.open("ab") as file:
            file.write(msgspec.json.encode(RowChecks(instance_id=name, checks=checks)) + b"\n")


def _judge(check: str, payload: SwePayload, graded: Graded) -> str:
    verdict, run = graded
    if check not in ("before", "gold"):
        if verdict.resolved:
            return "it is solved"
        # A cheat that breaks its own run, or is caught, has failed.
        return "right" if check in HACKS or run.ended in ("finished", "not_applied", "spoilt") else _unfinished(run)
    if run.ended != "finished" or run.tampered:
        return _unfinished(run)
    asked_for: set[str] = set()
    if check == "before" and isinstance(payload.tests, NamedTests):
        asked_for = {*payload.tests.fail_to_pass}
    already = [test for test in verdict.tests if test.status == "passed" and test.test_id in asked_for]
    if already:
        return _said("passes already", already)
    return _said(
        "does not pass", [test for test in verdict.tests if test.status != "passed" and test.test_id not in asked_for]
    )


def _unfinished(run: SuiteRun) -> str:
    return f"{run.ended}: {run.tampered or message_of(run.said)}"


def message_of(said: str) -> str:
    """Return the message in a runner's output: the last line marked as an error, or else the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ")]
    return next(iter([*errors[-1:], *lines[-1:]]), "")[:MAX_SAID_CHARS]


def _said(what: str, tests: Sequence[TestResult]) -> str:
    if not tests:
        return "right"
    return f"{tests[0].test_id} {what} ({tests[0].status}); {len(tests)} such tests"


def editing_patch(name: str, payload: SwePayload) -> bytes:
    """Return a patch that makes all tests of a row pass by editing them, and by a hook for pytest. Blocks.

    Raises:
        ConfigError: the row's layers are not in the store.
    """
    edited = {argument: EDITED for argument in payload.tests.arguments if argument.endswith(".py")}
    texts = {**edited, "conftest.py": HOOK}
    old = _files_of(name, payload, texts)
    modes = {path: entry.executable for path, entry in old.items()}
    return make_patch(old, {path: Entry(text.encode(), modes.get(path, False)) for path, text in texts.items()})


def _hacks(name: str, payload: SwePayload, gold: bytes) -> dict[str, bytes]:
    return hack_patches(_files_of(name, payload, changed_modules(gold)))


def _files_of(name: str, payload: SwePayload, paths: Iterable[str]) -> Tree:
    """Return the given files that exist in a row's layers. Raises the errors of `editing_patch`."""
    found: Tree = {}
    for digest in payload.layers:
        layer = find_layer(digest)
        if layer is None:
            raise ConfigError(f"{name}: the layer {digest} is not in the store: mine it again")
        for path in paths:
            place = Path(layer.folder / CONTENT_NAME, payload.repo_dir.lstrip("/"), path)
            if place.is_file():
                found[path] = Entry(place.read_bytes(), bool(place.stat().st_mode & 0o100))
    return found
