"""Run the unit and component tests of what changed against the merge base with main, the nearest first, for a minute.

    python tests/support/quick.py [--base REF] [--list]

A test file is near to a change if few imports lead from it to a file that changed. Tests that are slow, or measure
time, are left out. When the time is over, what was not run is counted.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("prorl_trio", "sandbox_daemon", "ipc", "launch", "perf")
SUITES = ("tests/unit", "tests/component")
LIMIT_S = 50.0
"""No test begins later; the start of pytest and the last test are beside it."""
MARKS = "not slow and not soak and not alone"


def module_of(path: str) -> str:
    """Return the name by which the code imports a file of the repository."""
    parts = Path(path).with_suffix("").parts
    if parts[:2] in (("tests", "support"), ("tests", "mutants")) or parts[0] in ("ipc", "launch", "sandbox_daemon"):
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(source: str, known: set[str]) -> set[str]:
    """Return those of the known modules that a source imports, or starts by name (`-m MODULE`)."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            names.add(node.value)
    return names & known


def near_tests(changed: set[str], sources: dict[str, str]) -> list[str]:
    """Return the test files of `SUITES` that changed or reach something that did, the nearest first.

    Args:
        changed: paths from the root of the repository, with `/`. A file that is no module stands for the modules whose
            source has its name.
        sources: the text of each Python file, by such a path.
    """
    modules = {module_of(path): path for path in sources}
    users: dict[str, set[str]] = {}
    for path, source in sources.items():
        for module in imported_by(source, set(modules)):
            users.setdefault(modules[module], set()).add(path)
    data = [Path(path).name for path in changed - sources.keys()]
    pending = deque(sorted(changed & sources.keys()))
    pending.extend(path for path, source in sources.items() if any(name in source for name in data))
    reached = dict.fromkeys(pending)
    while pending:
        for user in sorted(users.get(pending.popleft(), ())):
            if user not in reached:
                reached[user] = None
                pending.append(user)
    return [path for path in reached if path.startswith(SUITES) and Path(path).name.startswith("test_")]


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


class _Limit:
    """A plugin of pytest that begins no test after `LIMIT_S`."""

    def __init__(self) -> None:
        self.ends_s = time.monotonic() + LIMIT_S
        self.left = 0

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        del item, nextitem
        if time.monotonic() < self.ends_s:
            return None
        self.left += 1
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left:
            terminalreporter.write_line(f"{self.left} more tests were not run: {LIMIT_S:g} s were over", yellow=True)


def main() -> int:
    """Run them. Returns pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--base", default="main", metavar="REF", help="compare with the merge base of this; default: main"
    )
    parser.add_argument("--list", action="store_true", help="print the test files, and run none")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    (base,) = _git("merge-base", arguments.base, "HEAD")
    changed = {*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")}
    listed = _git(
        "ls-files", "--cached", "--others", "--exclude-standard", *(f"{each}/*.py" for each in (*PACKAGES, "tests"))
    )
    tests = near_tests(changed, {path: Path(path).read_text() for path in listed if Path(path).is_file()})
    if arguments.list or not tests:
        sys.stdout.write("\n".join(tests or ["no unit or component test reaches what changed"]) + "\n")
        return 0
    return int(pytest.main(["-q", "-m", MARKS, *tests], plugins=[_Limit()]))


if __name__ == "__main__":
    sys.exit(main())
