"""The miner. It tries several candidates at a time, until each is a verified row, or refused with a reason."""

from __future__ import annotations

import ast
import re
import tempfile
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import trio

from prorl_launch.mining.candidates import candidates_of, changed_tests, read_releases, refusal, source_folders
from prorl_launch.mining.changes import imports_patch
from prorl_launch.mining.environments import environment_variables, make_environment, payload_of
from prorl_launch.mining.rows import REPO_DIR, MinedTask, choose_tests, load_tasks, overlay_of, save_task
from prorl_launch.mining.sdist import Entry, file_kind, write_tree
from prorl_launch.mining.statements import hunk_statement, release_statement
from prorl_launch.mining.verification import TIMES, message_of, verify_row
from prorl_trio.sandbox.images.compose import compose_image
from prorl_trio.sandbox.images.layers import store_layer
from prorl_trio.tasks.grading.repository import Suite
from prorl_trio.tasks.grading.repository_base import RepositoryBase
from prorl_trio.tasks.grading.repository_tests import results_by_id
from prorl_trio.types.errors import ConfigError, RolloutError
from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prorl_launch.mining.candidates import Candidate
    from prorl_launch.mining.environments import EnvironmentLayer, LocalBench
    from prorl_launch.mining.index import IndexSettings
    from prorl_launch.mining.rows import ChosenTests, TestOverlay
    from prorl_launch.mining.sdist import Tree
    from prorl_trio.tasks.grading.repository import SuiteRun
    from prorl_trio.tasks.grading.verdict import TestResult


MAX_FAIL_TO_PASS: Final = 200
MAX_FUNCTIONS: Final = 10
"""Maximum number of test functions that fail before the change. More functions indicate several unrelated changes."""
OPTIONS: Final = ("-oaddopts=", "--continue-on-collection-errors")
"""Options of pytest: ignore the package's own, and continue after a module that cannot be imported."""

_CLOCKS: Final = frozenset(
    f"{clock}{unit}" for clock in ("perf_counter", "process_time", "thread_time", "monotonic") for unit in ("", "_ns")
) | {"default_timer", "timeit"}
_WALL_CLOCKS: Final = frozenset({"time", "time_ns"})
"""Ambiguous names, which count only as attributes of the module `time` that are called without arguments."""

MIN_LINE_CHARS: Final = 20
"""Shorter lines of a gold patch reveal nothing."""
MIN_BLOCK_LINES: Final = 3


def find_leak(gold: bytes, statement: str, base: Tree) -> str:
    """Return where the gold patch is visible, as text; empty if nowhere.

    The statement must not contain added lines. No other file of the base may have `MIN_BLOCK_LINES` consecutive added
    lines, such as a copy of the module in a build folder.
    """
    said = {line.strip() for line in statement.splitlines()}
    changed = {found.decode() for found in re.findall(rb"(?m)^\+\+\+ b/(.*?)\t?$", gold)}
    for block in _added(gold.decode()):
        told = next((line for line in block if len(line) >= MIN_LINE_CHARS and line in said), None)
        if told is not None:
            return f"the statement has a line of the gold patch: {told}"
        longest = max(block, key=len)
        if len(block) < MIN_BLOCK_LINES or len(longest) < MIN_LINE_CHARS:
            continue
        pattern = re.compile(rb"(?m)^[ \t]*" + rb"[ \t]*\r?\n[ \t]*".join(re.escape(line.encode()) for line in block))
        for path, entry in base.items():
            if path not in changed and longest.encode() in entry.content and pattern.search(entry.content):
                return f"{path} has lines of the gold patch"
    return ""


def _added(patch: str) -> Iterator[list[str]]:
    """Yield each block of lines that a patch adds, without their indentation."""
    block: list[str] = []
    for line, following in pairwise([*patch.splitlines(), ""]):
        if line.startswith("+") and not line.startswith("+++ "):
            block.append(line[1:].strip())
        if block and not following.startswith("+"):
            yield block
            block = []


def find_twin(task: MinedTask, others: Iterable[MinedTask]) -> str:
    """Return the name of a verified task with the same statement, change or tests; empty if none.

    Two hunks of a release with the same tests are halves of one change.
    """
    assert task.row is not None
    mine = task.row.payload
    for other in others:
        if other.row is None:
            continue
        payload = other.row.payload
        same_release = payload["source"]["sha256"] == mine["source"]["sha256"]
        same_tests = set(payload["tests"]["fail_to_pass"]) == set(mine["tests"]["fail_to_pass"])
        if (
            payload["problem_statement"] == mine["problem_statement"]
            or _substance(other.gold) == _substance(task.gold)
            or (same_release and same_tests)
        ):
            return other.instance_id
    return ""


def _substance(patch: str) -> list[str]:
    """Return the lines that a patch adds and removes, wherever they are."""
    return [line for line in patch.splitlines() if line[:1] in ("+", "-") and line[:4] not in ("+++ ", "--- ")]


def functions_that_read_clocks(modules: Iterable[bytes]) -> frozenset[str]:
    """Return the names of test functions that read a clock, directly or through a function or fixture.

    Functions and methods are identified by name alone, in any module, so false positives are possible. A nested
    function is part of the outer one. A module that does not parse has none.
    """
    uses: dict[str, set[str]] = {}
    for module in modules:
        for function in _functions(module):
            uses.setdefault(function.name, set()).update(_names(function))
    timed: set[str] = set()
    while found := {name for name, used in uses.items() if name not in timed and used & (_CLOCKS | timed)}:
        timed |= found
    return frozenset(timed)


def _functions(module: bytes) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(module)
    except (SyntaxError, ValueError, RecursionError):
        return []
    return [
        node
        for scope in ast.walk(tree)
        if isinstance(scope, ast.Module | ast.ClassDef)
        for node in scope.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names that a function uses, including arguments (pytest fixtures).

    `timeit` stands for a wall clock.
    """
    found: set[str] = set()
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr=name) if name in _WALL_CLOCKS:
                found.add("timeit")
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]) if name in _WALL_CLOCKS:
                found.add("timeit")
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name):
                found.add(name)
    return found


class Wanted(NamedTuple):
    """A package to mine, the number of its newest pairs of releases, and undeclared requirements of its tests."""

    package: str
    pairs: int = 4
    requirements: tuple[str, ...] = ()


class MiningLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of mining. Time-outs allow for other load on the machine."""

    hunks: int = 8
    per_package: int = 6
    test_timeout_s: float = 30.0
    timeout_s: float = 300.0


class Miner:
    """Mines packages into a folder, which stores the result of each candidate. Stored candidates are not tried again.

    `make_environment` and `settings` are the sources of its packages.
    """

    def __init__(
        self,
        bench: LocalBench,
        folder: Path,
        settings: IndexSettings,
        *,
        limits: MiningLimits,
        jobs: int,
        on_ended: Callable[[MinedTask], None],
        make_environment: Callable[[str, Sequence[str]], EnvironmentLayer] = make_environment,
    ) -> None:
        self._bench = bench
        self._folder = folder
        self._settings = settings
        self._limits = limits
        self._jobs = trio.CapacityLimiter(jobs)
        self._on_ended = on_ended
        self._make_environment = make_environment
        self._known = load_tasks(folder)
        self._verified: dict[str, int] = {}
        for task in self._known.values():
            if task.row is not None:
                self._verified[task.row.family] = self._verified.get(task.row.family, 0) + 1

    async def mine(self, wanted: Sequence[Wanted]) -> list[str]:
        """Mine packages, and return the errors as text. A package that is unavailable does not stop the others."""
        problems: list[str] = []
        async with trio.open_nursery() as nursery:
            for each in wanted:
                nursery.start_soon(self._mine_package, each, problems)
        return problems

    async def _mine_package(self, wanted: Wanted, problems: list[str]) -> None:
        try:
            async with self._jobs:
                releases = await trio.to_thread.run_sync(
                    read_releases, wanted.package, wanted.pairs + 1, self._settings
                )
            for old, new in reversed([*pairwise(releases)]):
                found = candidates_of(old, new, hunks=self._limits.hunks)
                while (candidate := await trio.to_thread.run_sync(next, found, None)) is not None:
                    if self._verified.get(wanted.package, 0) >= self._limits.per_package:
                        return
                    async with self._jobs:
                        await self._try(candidate, wanted, problems)
        except (ConfigError, OSError) as exc:
            problems.append(f"{wanted.package}: {exc}")

    async def _try(self, candidate: Candidate, wanted: Wanted, problems: list[str]) -> None:
        if candidate.instance_id in self._known:
            return
        try:
            task = await self._decide(candidate, wanted)
        except RolloutError as exc:  # a sandbox error: the candidate's result is unknown, so retry it next time
            problems.append(f"{candidate.instance_id}: {exc}")
            return
        await trio.to_thread.run_sync(save_task, task, self._folder)
        self._known[task.instance_id] = task
        self._verified[wanted.package] = self._verified.get(wanted.package, 0) + (task.status == "verified")
        self._on_ended(task)

    async def _decide(self, candidate: Candidate, wanted: Wanted) -> MinedTask:
        refused = partial(MinedTask, instance_id=candidate.instance_id, status="refused")
        if reason := refusal(candidate):
            return refused(reason=reason)
        requirements = [*candidate.new.metadata.requires, *wanted.requirements]
        environment = await trio.to_thread.run_sync(self._make_environment, wanted.package, requirements)
        overlay = overlay_of(candidate.base, candidate.new.tree)
        base = candidate.base | {path: Entry(content) for path, content in overlay.binary.items()}
        found = await self._choose(candidate, base, overlay, environment)
        if isinstance(found, str):
            return refused(reason=found)
        chosen, before = found
        statement = _statement(candidate, chosen, before)
        if not statement:
            return refused(
                reason="the tests that fail say nothing that could be the statement: an exception's name alone"
            )
        if leak := await trio.to_thread.run_sync(find_leak, candidate.gold, statement, base):
            return refused(reason=leak)
        row = await trio.to_thread.run_sync(
            partial(_make_row, candidate, base, overlay, environment, chosen, statement, self._limits)
        )
        gold = candidate.gold.decode()
        task = MinedTask(instance_id=row.instance_id, status="verified", row=row, gold=gold)
        if twin := find_twin(task, self._known.values()):
            return refused(reason=f"it asks for the same as {twin}")
        imports = await trio.to_thread.run_sync(imports_patch, candidate.base, candidate.new.tree, candidate.gold)
        if imports and (await self._bench.grade(payload_of(row), imports)).verdict.resolved:
            return refused(reason="the imports of the gold patch alone solve it")
        checks = await verify_row(self._bench, row, candidate.gold)
        wrong = [f"{check}: {verdict}" for check, verdict in checks.items() if verdict != "right"]
        if wrong:
            return refused(reason="; ".join(wrong)[:2000], checks=checks)
        await trio.to_thread.run_sync(compose_image, row.instance_id, "host", row.payload["layers"])
        return msgspec.structs.replace(task, checks=checks)

    async def _choose(
        self, candidate: Candidate, base: Tree, overlay: TestOverlay, environment: EnvironmentLayer
    ) -> tuple[ChosenTests, Mapping[str, TestResult]] | str:
        """Return the deciding tests with all results before the change, or the reason why none decides."""
        timed = await trio.to_thread.run_sync(functions_that_read_clocks, _sources_of_tests(base, overlay))
        with tempfile.TemporaryDirectory(prefix="prorl-mine-") as scratch:
            await trio.to_thread.run_sync(write_tree, base, Path(scratch, REPO_DIR.lstrip("/")))
            suite = Suite(
                spec=self._bench.spec(
                    (environment.digest, scratch), environment_variables(source_folders(base), REPO_DIR)
                ),
                base=RepositoryBase(repo_dir=REPO_DIR),
                arguments=[*OPTIONS, *changed_tests(candidate)],
                test_timeout_s=self._limits.test_timeout_s,
                timeout_s=self._limits.timeout_s,
                test_files=overlay.files,
                removed_test_files=overlay.removed,
            )
            before: list[Mapping[str, TestResult]] = []
            gold: list[Mapping[str, TestResult]] = []
            for _ in range(TIMES):
                for patch, results in ((None, before), (candidate.gold, gold)):
                    run = await self._bench.run(suite, patch)
                    # If a run hangs or dies before the change, every test would look fixed by the change.
                    if run.ended != "finished" or run.tampered:
                        which = "before the change" if patch is None else "with the gold patch"
                        return f"the tests {which}: {run.ended}: {run.tampered or message_of(run.said)}"
                    results.append(_by_id(run))
                chosen = choose_tests(before, gold, unsteady=timed)
                if chosen is None:
                    return "no test fails before the change and passes after it, or none passes in both, each time"
        assert chosen is not None
        if len(chosen.fail_to_pass) > MAX_FAIL_TO_PASS:
            return f"{len(chosen.fail_to_pass)} tests fail before the change; the limit is {MAX_FAIL_TO_PASS}"
        functions = {name.partition("[")[0] for name in chosen.fail_to_pass}
        if len(functions) > MAX_FUNCTIONS:
            return f"the tests of {len(functions)} functions fail before the change; the limit is {MAX_FUNCTIONS}"
        return chosen, before[0]


def _sources_of_tests(base: Tree, overlay: TestOverlay) -> list[bytes]:
    """Return the test modules that an evaluator runs, and the modules in the same folders."""
    tests = {path: entry.content for path, entry in base.items() if file_kind(path) == "test"}
    tests |= {path: text.encode() for path, text in overlay.files.items()}
    return [content for path, content in tests.items() if path.endswith(".py") and path not in overlay.removed]


def _by_id(run: SuiteRun) -> dict[str, TestResult]:
    return results_by_id(run.results, {result.test_id for result in run.results})


def _make_row(
    candidate: Candidate,
    base: Tree,
    overlay: TestOverlay,
    environment: EnvironmentLayer,
    chosen: ChosenTests,
    statement: str,
    limits: MiningLimits,
) -> TaskInstance:
    with tempfile.TemporaryDirectory(prefix="prorl-mine-") as scratch:
        write_tree(base, Path(scratch))
        repository = store_layer(Path(scratch), at=REPO_DIR).record.digest
    payload: dict[str, Any] = {
        "problem_statement": statement,
        "image": "host",
        "layers": [environment.digest, repository],
        "repo_dir": REPO_DIR,
        "env": environment_variables(source_folders(base), REPO_DIR),
        "test_files": overlay.files,
        "removed_test_files": overlay.removed,
        "tests": {
            "kind": "pytest",
            "strict": True,
            "arguments": [*OPTIONS, *chosen.files],
            "fail_to_pass": chosen.fail_to_pass,
            "pass_to_pass": chosen.pass_to_pass,
            "test_timeout_s": 2 * limits.test_timeout_s,
            "timeout_s": 2 * limits.timeout_s,
        },
        "source": _source(candidate, environment),
    }
    name = candidate.instance_id
    return TaskInstance(instance_id=name, handler="swe", payload=payload, family=candidate.new.package)


def _statement(candidate: Candidate, chosen: ChosenTests, before: Mapping[str, TestResult]) -> str:
    new, old = candidate.new, candidate.old
    if candidate.kind == "release":
        return release_statement(new.package, old.file.version, new.file.version, candidate.section)
    # A new test does not exist before the change, but its module may show why: it cannot be imported.
    names = dict.fromkeys(name if name in before else name.partition("::")[0] for name in chosen.fail_to_pass)
    messages = {name: before[name].message for name in names if name in before}
    return hunk_statement(new.package, new.file.version, candidate.path, messages)


def _source(candidate: Candidate, environment: EnvironmentLayer) -> dict[str, Any]:
    old, new = candidate.old, candidate.new
    whole = candidate.kind == "release"
    gold = f"{new.file.name} (source files)" if whole else f"one hunk of {candidate.path} in {new.file.name}"
    return {
        "package": new.package,
        "kind": candidate.kind,
        "base": old.file.name if whole else f"{new.file.name} without one hunk, with the tests of {old.file.name}",
        "gold": gold,
        "licence": new.metadata.licence,
        "sha256": {old.file.name: old.sha256, new.file.name: new.sha256},
        "environment": [*environment.installed],
    }
