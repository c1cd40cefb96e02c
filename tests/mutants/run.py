"""Mutants: small faults put into the code, one at a time, each of which a named test must find.

A table, `*.toml` beside this file, names each mutant, the text that it replaces, and its tests. A mutant that its tests
pass with survives: a rule of the code is without a test.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

IMPORTED_FROM = (".", "ipc", "launch", "sandbox_daemon")
ROOT = Path(__file__).parents[2]
TABLES = Path(__file__).parent
LIMIT_S = 600.0
"""Time that the tests of one mutant get. Tests that do not end have found it, too."""

Verdict = Literal["killed", "survived", "stale", "unsound"]
"""`stale`: the text that it replaces is not there exactly once. `unsound`: its tests fail without it."""


class Mutant(NamedTuple):
    """One fault: `old`, which is in `file` exactly once, becomes `new`, and one of `tests` (pytest's ids) must fail."""

    name: str
    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def mutated(self, root: Path) -> str | None:
        """Return the text of the file with the fault in it; None if the entry is stale."""
        path = root / self.file
        text = path.read_text() if path.is_file() else ""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


def read_tables(folder: Path = TABLES) -> list[Mutant]:
    """Return all mutants. A table has the name of its kind, and `[[mutant]]` for each."""
    return [
        Mutant(**{**entry, "tests": tuple(entry["tests"])}, kind=path.stem)
        for path in sorted(folder.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["mutant"]
    ]


def missing_tests(mutant: Mutant, root: Path = ROOT) -> list[str]:
    """Return which of a mutant's tests do not exist."""
    return [test for test in mutant.tests if not _exists(test, root)]


def _exists(test: str, root: Path) -> bool:
    file, *names = test.partition("[")[0].split("::")
    return (root / file).is_file() and (not names or "::".join(names) in _tests_of(root / file))


@cache
def _tests_of(path: Path) -> frozenset[str]:
    """Return the names of a file's functions, and of its classes' methods as `Class::method`."""
    found = []
    for node in ast.parse(path.read_text()).body:
        name = getattr(node, "name", "")
        found += [name, *(f"{name}::{getattr(each, 'name', '')}" for each in getattr(node, "body", []))]
    return frozenset(found)


class Copy:
    """A copy of the checkout in a temporary folder, in which tests are run."""

    _writes = count(1)

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.stopped = False
        self._child: subprocess.Popen[bytes] | None = None
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        # The checkout is installed in the environment; the copy must come before it.
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder / each) for each in IMPORTED_FROM)}
        where = self._run([sys.executable, "-c", "import prorl_trio; print(prorl_trio.__file__)"], LIMIT_S)
        if str(folder) not in where[1]:
            raise SystemExit(f"tests would run with the checkout's code, not with the copy's: {where[1]}")

    def write(self, file: str, text: str) -> None:
        """Write a file, with a time of its own: compiled code is taken for that of the file by its time and size."""
        path = self.root / file
        path.write_text(text)
        at_s = 1_000_000_000 + 2 * next(self._writes)
        os.utime(path, (at_s, at_s))

    def passes(self, tests: Sequence[str], limit_s: float) -> tuple[bool, str]:
        """Return whether tests pass in time, and what pytest said."""
        code, output = self._run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-m",
                "not slow and not soak",
                *tests,
            ],
            limit_s,
        )
        return code == 0, output

    def stop(self) -> None:
        """Run no more tests, and end those that are run."""
        self.stopped = True
        self._kill()

    def _kill(self) -> None:
        if self._child is not None and self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)

    def _run(self, command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        with tempfile.TemporaryFile() as output:
            self._child = subprocess.Popen(
                command, cwd=self.root, env=self._environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code: int | None = self._child.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
                self._kill()
                self._child.wait()
            output.seek(0)
            return code, output.read().decode(errors="replace")


def judge(copy: Copy, mutants: Sequence[Mutant]) -> Iterator[tuple[Mutant, Verdict, str]]:
    """Yield the verdict on each of `mutants`, which have the same tests, and what pytest said, until it is stopped."""
    tests = mutants[0].tests
    started_s = time.monotonic()
    sound, said = copy.passes(tests, LIMIT_S)
    limit_s = min(LIMIT_S, 30 + 5 * (time.monotonic() - started_s))
    for mutant in mutants:
        if copy.stopped:
            return
        text = mutant.mutated(copy.root)
        if text is None:
            yield mutant, "stale", f"its old text is not in {mutant.file} exactly once"
        elif not sound:
            yield mutant, "unsound", said
        else:
            original = (copy.root / mutant.file).read_text()
            copy.write(mutant.file, text)
            passed, said_of_it = copy.passes(tests, limit_s)
            copy.write(mutant.file, original)
            yield mutant, "survived" if passed else "killed", said_of_it


def main() -> int:
    """Run the mutants, and return how many were not killed, as an exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="KIND_OR_NAME", help="only these; may be given again")
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1, metavar="N", help="so many at a time")
    options = parser.parse_args()
    mutants = [m for m in read_tables() if not options.only or m.name in options.only or m.kind in options.only]
    if not mutants:
        parser.error(f"no mutant of the table is named or of the kind {options.only}")
    by_tests: dict[tuple[str, ...], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_tests[mutant.tests].append(mutant)
    verdicts: dict[Verdict, list[Mutant]] = defaultdict(list)
    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, Progress(*columns, console=console) as progress:
        bar = progress.add_task("mutants", total=len(mutants))
        copies = [Copy(Path(folder, str(number))) for number in range(min(options.j, len(by_tests)))]
        free: SimpleQueue[Copy] = SimpleQueue()
        for each in copies:
            free.put(each)

        def work(group: Sequence[Mutant]) -> None:
            copy = free.get()
            try:
                for mutant, verdict, said in judge(copy, group):
                    verdicts[verdict].append(mutant)
                    if verdict != "killed" or not console.is_terminal:
                        line = f"{verdict}: {mutant.kind}: {mutant.name} ({mutant.file})"
                        console.print(line, markup=False, highlight=False, soft_wrap=True)
                    if verdict in ("stale", "unsound"):
                        console.print("\n".join(said.splitlines()[-15:]), markup=False, highlight=False, soft_wrap=True)
                    progress.advance(bar)
            finally:
                free.put(copy)

        with ThreadPoolExecutor(options.j) as threads:
            try:
                for done in as_completed([threads.submit(work, group) for group in by_tests.values()]):
                    done.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                for each in copies:
                    each.stop()
                raise
    figures = ", ".join(f"{len(found)} {verdict}" for verdict, found in sorted(verdicts.items()))
    console.print(f"{len(mutants)} mutants: {figures}")
    return 0 if len(verdicts["killed"]) == len(mutants) else 1


if __name__ == "__main__":
    raise SystemExit(main())
