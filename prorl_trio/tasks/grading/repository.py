"""Grading of a change to a repository: apply the patch, overwrite it with the row's own tests, run their runner.

The agent contributes only its patch. The tests, pytest's configuration file, and the startup files of Python or a
runner come from the row or the base, whatever the patch contains; restored files are reported. Pytest's configuration
file and plug-ins are determined before the patch is applied. The patched code shares the tests' process, so a canary
that must fail runs before and after the tests. It detects a patch that disables assertions, but a patch that spares the
canary would still win.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec
import trio

from prorl_trio.tasks.grading.drivers.report import read_report
from prorl_trio.tasks.grading.repository_base import (
    BASE,
    GIT,
    GIT_ENV,
    TESTS,
    BaseNotMade,
    RowTests,
    git,
    make_base,
    quote,
    touched_unversioned,
)
from prorl_trio.tasks.grading.repository_tests import verdict_on
from prorl_trio.tasks.grading.runners import RUNNERS
from prorl_trio.tasks.grading.verdict import TestResult, Verdict
from prorl_trio.tasks.grading.verifier import DRIVERS_DIR, driver_argv, open_verifier
from prorl_trio.types.errors import EvaluationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.tasks.grading.repository_base import RepositoryBase
    from prorl_trio.tasks.grading.repository_tests import RepositoryTests, RunnerName
    from prorl_trio.tasks.grading.verdict import TestStatus
    from prorl_trio.tasks.grading.verifier import Bench, Run, Verifier


PATCH_PATH: Final = f"{DRIVERS_DIR}/patch.diff"
NO_CONFIG_PATH: Final = f"{DRIVERS_DIR}/none.ini"
"""Configures pytest if the repository lacks such a file."""
REPORT_PATH: Final = f"{DRIVERS_DIR}/report.jsonl"
PREPARE_TIMEOUT_S: Final = 120.0
MAX_REPORT_BYTES: Final = 256 * 1024 * 1024
MAX_KNOWN: Final = 4096
"""Limit on cached findings about repositories: about a kilobyte each."""
EVAL_MARGIN_S: Final = 15.0
"""Time reserved from the EVAL budget for the steps after the tests."""

_PATCH: Final = (
    "state() { find .git -path .git/objects -prune -o -type f -exec cksum {} + -o ! -type d -print; "
    "find . -mindepth 2 -name .git; }; before=$(state); "
    f'patch --batch --forward --fuzz=5 -p1 -i {PATCH_PATH} && [ "$(state)" = "$before" ]'
)
"""Fails if the patch changed git's own files, which git would refuse."""
APPLY: Final = {
    "git apply": [*GIT, "apply", "--whitespace=nowarn", PATCH_PATH],
    "git apply --3way": [*GIT, "apply", "--whitespace=nowarn", "--3way", PATCH_PATH],
    "git apply --reject": [*GIT, "apply", "--whitespace=nowarn", "--reject", PATCH_PATH],
    "patch --fuzz=5": ["sh", "-c", _PATCH],
}
"""The ways in which SWE-bench applies a patch, in its order. The tree is cleaned before each attempt."""

_ACTIVATES: Final = ("source ", ". ", "conda ", "export ")
"""Prefixes of a script's commands that select a Python."""
UNFINISHED: Final[dict[str, TestStatus]] = {
    "timed_out": "timed_out",
    "no_report": "missing",
    "lost": "lost",
    "not_applied": "not_run",
    "spoilt": "not_run",
}
"""The status of each test if the run did not finish."""

_TEST_DIRS: Final = frozenset({"test", "tests", "testing"})
_TEST_MODULE: Final = re.compile(r"(test_.*|.*_test|.*_tests|tests?)\.py", re.DOTALL)
_HOOKS: Final = frozenset({
    "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "sitecustomize.py",
    "usercustomize.py", "pytest.py", "_pytest.py", "unittest.py", "pluggy.py", "noxfile.py",
    "runtests.py",
})  # fmt: skip


_RUNNERS: Final = frozenset({"_pytest", "pytest", "unittest"})
_AT_START: Final = frozenset({"sitecustomize", "usercustomize"})
"""Modules that Python imports before any program, from the source folder of any installed package."""


def is_test_file(path: str) -> bool:
    """Return whether a path of a repository belongs to a test, by its own name or that of a parent folder."""
    *_, name = names = path.split("/")
    return is_test_module(path) or name == "conftest.py" or bool(_TEST_DIRS.intersection(names))


def is_test_module(path: str) -> bool:
    """Return whether a path is named like a test module."""
    return _TEST_MODULE.fullmatch(path.rpartition("/")[2]) is not None


def may_be_source(path: str) -> bool:
    """Return whether a path that `belongs_to_tests` may still be source, such as `django/test/client.py`.

    It is in a package called `test` or `testing`, and is neither a test module nor a hook.
    """
    folders, _, _ = path.rpartition("/")
    top, *inner = folders.split("/")
    if top in _TEST_DIRS or "tests" in inner or is_test_module(path) or is_hook(path):
        return False
    return bool(_TEST_DIRS.intersection(inner)) and path.endswith(".py")


def is_hook(path: str) -> bool:
    """Return whether a path is a file that runs a repository's tests, or that Python executes at startup."""
    *folders, name = path.split("/")
    if name in _HOOKS or name.endswith((".pth", ".pyc")) or _RUNNERS.intersection(folders[:1]):
        return True
    return any(each.partition(".")[0] in _AT_START for each in (*folders, name))  # covers packages and extensions


def belongs_to_tests(path: str) -> bool:
    """Return whether an agent's change to this path is ignored because it is a test, test data, or a hook."""
    return is_test_file(path) or is_hook(path)


class Suite(NamedTuple):
    """Tests of a repository: their sandbox, their files, and the way to run them.

    Attributes:
        spec: the sandbox; it contains the repository, git, and the requirements of `runner`.
        base: how the repository is prepared.
        arguments: for the runner.
        test_timeout_s: for each test.
        timeout_s: for all tests.
        test_files: the content of each file written over the patched tree, by its path in the repository.
        removed_test_files: paths of files that are then removed.
        test_patch: the row's change to its tests; the changed files are written over the patched tree.
        script: a bash script that runs before the tests; see `NamedTests`.
        runner: of the tests; see `runners`.
    """

    spec: SandboxSpec
    base: RepositoryBase
    arguments: Sequence[str]
    test_timeout_s: float
    timeout_s: float
    test_files: Mapping[str, str]
    removed_test_files: Sequence[str] = ()
    test_patch: str = ""
    script: str = ""
    runner: RunnerName = "pytest"


class SuiteRun(NamedTuple):
    """The result of running a repository's tests.

    Attributes:
        ended: `finished` if the runner completed and reported it; only then there are `results`. `spoilt` if the patch
            obstructs the row's own files; `lost` if the tests ended their sandbox.
        results: the reported results of all tests except the canaries.
        tampered: evidence that the patched code made tests pass that must fail.
        said: details of the end: the obstacle, or the last part of the runner's standard error.
        applied_by: one of `APPLY`; empty if all failed or there was no patch.
        restored: files that the patch touched and that were restored.
        log: the runner's output.
    """

    ended: Literal["finished", "timed_out", "no_report", "lost", "not_applied", "spoilt"]
    results: Sequence[TestResult] = ()
    tampered: str = ""
    said: str = ""
    applied_by: str = ""
    restored: Sequence[str] = ()
    log: str = ""


class Graded(NamedTuple):
    """A verdict on a patch, and the run on which it is based."""

    verdict: Verdict
    run: SuiteRun


async def grade_repository(
    bench: Bench, patch: bytes | None, tests: RepositoryTests, suite: Suite, *, last_try: bool = True
) -> Graded:
    """Run a row's tests on its repository with a patch, in a sandbox that the agent has never touched.

    Args:
        bench: the requesting job; a `RolloutContext` on a node.
        patch: a unified diff against the repository as `make_base` made it for the agent; None leaves it unchanged.
        tests: the tests whose results decide.
        suite: how these tests are run.
        last_try: a killed program is attributed to the patch. See `again_if_killed`.

    Raises:
        EvaluationError, SandboxUnavailable, SandboxLost: no verdict is possible.
        ProgramKilled: it is not the last try.
    """
    run = await run_suite(bench, patch, suite, last_try=last_try)
    return Graded(_judge(tests, run), run)


async def run_suite(bench: Bench, patch: bytes | None, suite: Suite, *, last_try: bool = True) -> SuiteRun:
    """Run all tests of a suite with a patch, between canaries. Raises the same errors as `grade_repository`."""
    async with open_verifier(bench, suite.spec, last_try=last_try) as verifier:
        repository = _Repository(verifier, suite.base)
        await verifier.place_drivers(RUNNERS[suite.runner].driver, "session", "report", "own_time")
        with bench.waiting("the repository", "evaluator"):
            await repository.make_ready(suite)
        applied_by = ""
        if patch is not None:
            await verifier.place({PATCH_PATH: patch})
            applied_by = await repository.apply()
            if not applied_by:
                return SuiteRun("not_applied", said="no patch")
        canary = f"test_{secrets.token_hex(4)}"
        try:
            await repository.check_unversioned()
            restored = await repository.restore(suite.test_files, suite.removed_test_files)
            arguments = await repository.place_canaries(suite, canary)
        except _Spoilt as exc:
            return SuiteRun("spoilt", tampered=str(exc), said=str(exc), applied_by=applied_by)
        timeout_s = max(1.0, min(suite.timeout_s, bench.stage_left_s() - EVAL_MARGIN_S))
        key = secrets.token_bytes(32)
        run = await repository.run_tests(suite, arguments, timeout_s, key)
        content = await verifier.read_back(REPORT_PATH, max_bytes=MAX_REPORT_BYTES) if run.ended != "lost" else None
        reported = results_of(content or b"", key)
        return end_of_run(run, reported, canary, RUNNERS[suite.runner].canaries)._replace(
            applied_by=applied_by, restored=restored
        )


class _Spoilt(Exception):
    """The patch obstructs the row's own files."""


class _Found(msgspec.Struct, frozen=True):
    """The findings of a driver's `look` in a repository without a patch.

    Attributes:
        config: pytest's configuration file; empty if there is none.
        rootdir: the folder to which test ids are relative.
        plugins: the plug-ins of the environment, as `NAME=MODULE`.
        options: the driver's own.
    """

    config: str = ""
    rootdir: str = ""
    plugins: list[str] = []
    options: list[str] = []


_FINDINGS: Final = trio.lowlevel.RunVar[OrderedDict[bytes, _Found]]("grading_findings")


def _known_findings() -> OrderedDict[bytes, _Found]:
    """Return the findings of this trio run by content digest, least recently used first."""
    try:
        return _FINDINGS.get()
    except LookupError:
        known: OrderedDict[bytes, _Found] = OrderedDict()
        _FINDINGS.set(known)
        return known


def _content_of(suite: Suite) -> bytes:
    """Return a digest of all inputs of the findings. Images and layers are identified by name."""
    spec = suite.spec
    content = (
        *(spec.image, spec.layers, sorted(spec.env.items()), suite.base, suite.arguments, suite.script, suite.runner),
        *(sorted(suite.test_files.items()), suite.removed_test_files, suite.test_patch),
    )
    return hashlib.sha256(repr(content).encode(errors="surrogatepass")).digest()


class _Repository:
    """The repository in the verifier's sandbox."""

    def __init__(self, verifier: Verifier, base: RepositoryBase) -> None:
        self._verifier = verifier
        self._base = base
        self._dir = base.repo_dir
        self._tests = RowTests([], [])
        self._found = _Found()
        self._changed: list[str] = []
        self._added: list[str] = []

    async def make_ready(self, suite: Suite) -> None:
        """Create the base before any of the agent's data arrives, and determine how to run the tests.

        Equal content gives equal findings, which are cached in this process.
        """
        try:
            self._tests = await make_base(self._verifier.sandbox, self._base, test_patch=suite.test_patch)
        except BaseNotMade as exc:
            raise EvaluationError(str(exc)) from exc
        known, key = _known_findings(), _content_of(suite)
        if key in known:
            known.move_to_end(key)
            self._found = known[key]
            return
        await self._look(suite)
        known[key] = self._found
        if len(known) > MAX_KNOWN:
            known.popitem(last=False)

    async def _look(self, suite: Suite) -> None:
        """Determine how to run the tests. The row's test files are present only during this step."""
        try:
            await self._write_tests(suite.test_files, suite.removed_test_files)
        except _Spoilt as exc:
            raise EvaluationError(str(exc)) from exc
        runner = RUNNERS[suite.runner]
        activated = "\n".join(line for line in suite.script.splitlines() if line.lstrip().startswith(_ACTIVATES))
        argv = ["python3", "-c", runner.look]
        if not runner.look:
            argv = driver_argv(runner.driver, *suite.arguments, isolated=False, entry="look")
        look = await self._verifier.run(
            in_shell(activated, argv),
            timeout_s=PREPARE_TIMEOUT_S,
            cwd=self._dir,
            env={"PYTHONDONTWRITEBYTECODE": "1"},
        )
        try:
            if look.exit_code != 0:
                raise ValueError(f"{look.ended}, exit code {look.exit_code}")
            if not runner.look:
                self._found = msgspec.json.decode(look.stdout.splitlines()[-1], type=_Found)
        except (ValueError, IndexError, msgspec.DecodeError) as exc:
            raise EvaluationError(
                f"the image {suite.spec.image!r} cannot run the tests: {runner.needs} ({exc}): {look.stderr.strip()}"
            ) from exc
        clean = await self._verifier.run(
            ["sh", "-c", self._base.clean], timeout_s=PREPARE_TIMEOUT_S, cwd=self._dir, env=GIT_ENV
        )
        if clean.exit_code != 0:
            raise EvaluationError(f"the row's tests cannot be taken out of the repository again: {clean.stderr}")

    async def apply(self) -> str:
        """Apply the patch and return the successful way; empty if all failed."""
        for way, argv in APPLY.items():
            result = await self._verifier.run(argv, timeout_s=PREPARE_TIMEOUT_S, cwd=self._dir, env=GIT_ENV)
            if result.ended == "exited" and result.exit_code == 0:
                return way
            clean = ["sh", "-c", self._base.clean]
            again = await self._verifier.run(clean, timeout_s=PREPARE_TIMEOUT_S, cwd=self._dir, env=GIT_ENV)
            if again.exit_code != 0:
                return ""
        return ""

    async def check_unversioned(self) -> None:
        """Raise `_Spoilt` if the patch changed a folder outside the repository's version control."""
        if self._base.unversioned:
            script = touched_unversioned(self._base)
            touched = await self._prepare(["sh", "-c", script], "the environment cannot be looked at")
            if touched.stdout.strip():
                raise _Spoilt(f"the patch changes what is no part of the repository: {_text(touched.stdout).strip()}")

    async def restore(self, test_files: Mapping[str, str], removed: Sequence[str]) -> list[str]:
        """Restore tests and hooks that the patch touched, write the row's files, and return the restored paths.

        Remains of a rejected hunk are removed.
        """
        attributes = quote(":(glob)**/.gitattributes")  # they would change how git reads and writes files
        undo = f"{git('reset -q')} && {git('clean -q -ff -dx --')} {attributes}"
        undo = f"{undo} && {{ {git(f'checkout -q {BASE} --')} {attributes} 2>/dev/null || true; }}"
        plain = f'{{ [ -z "$(find . -name .gitattributes -print)" ] || {{ {undo}; }}; }}'
        listed = await self._prepare(
            [
                "sh",
                "-c",
                f"{plain} && {self._base.add} && {git(f'diff --cached --name-status --no-renames -z {BASE}')}",
            ],
            "the changes cannot be listed",
        )
        words = listed.stdout.decode(errors="surrogateescape").split("\0")
        changed = dict(zip(words[1::2], words[0::2], strict=False))
        put_back = [path for path in changed if self._is_put_back(path)]
        for is_new, command in ((True, "rm -rf --"), (False, git(f"--literal-pathspecs checkout -q {BASE} --"))):
            paths = [path for path in put_back if (changed[path] == "A") == is_new]
            if paths:
                names = b"".join(path.encode(errors="surrogateescape") + b"\0" for path in paths)
                await self._prepare(["sh", "-c", f"xargs -0 {command}"], "files cannot be put back", names)
        await self._write_tests(test_files, removed)
        theirs = {*put_back, *test_files, *removed, *self._tests.written, *self._tests.removed}
        self._changed = [path for path in changed if path not in theirs]
        self._added = [path for path in self._changed if changed[path] == "A"]
        return [_plain(path) for path in changed if path in theirs]

    def _is_put_back(self, path: str) -> bool:
        """Return whether a path is always restored from the base or the row."""
        if path in self._base.sources and not is_hook(path):
            return False
        return belongs_to_tests(path) or f"{self._dir}/{path}" == self._found.config

    async def _write_tests(self, test_files: Mapping[str, str], removed: Sequence[str]) -> None:
        """Write the row's test files over existing files. Raises `_Spoilt`."""
        if own := [path for path in (*removed, *self._tests.removed) if path]:
            await self._prepare(["rm", "-rf", "--", *own], "files cannot be removed")
        for path in self._tests.written:
            await self._make_way(path)
        if self._tests.written:
            argv = [*GIT, "--literal-pathspecs", "checkout", "-q", TESTS, "--", *self._tests.written]
            await self._prepare(argv, "the row's tests cannot be written")
        for path, text in test_files.items():
            await self._make_way(path)
            await self._write(path, text.encode(errors="surrogateescape"))

    async def _make_way(self, path: str) -> None:
        """Remove a link at this path or at a parent folder, which would redirect the write."""
        parts = path.split("/")
        above = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
        clear = "; ".join(f"[ ! -L {quote(each)} ] || rm -f -- {quote(each)}" for each in above)
        await self._prepare(["sh", "-c", f"{clear}; [ ! -d {quote(path)} ] || rm -rf -- {quote(path)}"], path)

    async def place_canaries(self, suite: Suite, canary: str) -> list[str]:
        """Write the tests that must fail, and return the arguments that run them before and after the row's tests."""
        canaries = RUNNERS[suite.runner].place(suite.arguments, canary)
        for path, text in canaries.files.items():
            await self._write(path, text.encode())
        return canaries.arguments

    async def _write(self, path: str, content: bytes) -> None:
        try:
            await self._verifier.place({f"{self._dir}/{path}": content})
        except EvaluationError as exc:
            raise _Spoilt(str(exc)) from exc

    async def run_tests(self, suite: Suite, arguments: Sequence[str], timeout_s: float, key: bytes) -> Run:
        """Run the tests with their runner's driver, which writes a report with this key."""
        found = self._found
        options = found.options
        if found.rootdir:
            options = [*options, "-c", found.config or NO_CONFIG_PATH, "--rootdir", found.rootdir]
            if not found.config:  # otherwise the folder of that file
                options = [*options, "--confcutdir", found.rootdir]
                await self._verifier.place({NO_CONFIG_PATH: b"[pytest]\n"})
        job = {
            "key": key.hex(),
            "repository": self._dir,
            "changed": self._changed,
            "added": self._added,
            "plugins": found.plugins,
            "options": options,
        }
        driver = RUNNERS[suite.runner].driver
        argv = driver_argv(driver, REPORT_PATH, str(suite.test_timeout_s), *arguments, isolated=False)
        line = json.dumps(job).encode() + b"\n"  # escapes bytes of a path that are not UTF-8
        return await self._verifier.run(in_shell(suite.script, argv), timeout_s=timeout_s, cwd=self._dir, stdin=line)

    async def _prepare(self, argv: Sequence[str], what: str, stdin: bytes = b"") -> Run:
        """Run our own program. Raises `_Spoilt` if it fails, because only the patch can be the cause."""
        result = await self._verifier.run(argv, timeout_s=PREPARE_TIMEOUT_S, cwd=self._dir, env=GIT_ENV, stdin=stdin)
        if result.ended != "exited" or result.exit_code != 0:
            raise _Spoilt(f"{what} ({result.ended}, exit code {result.exit_code}): {result.stderr}")
        return result


_RUN: Final = 'export GRADING_PYTHONPATH="${PYTHONPATH-}"; unset PYTHONPATH; exec "$@"'
"""Starts Python with only the environment on its path; the driver adds the rest."""
_RUN_AFTER_SCRIPT: Final = (
    'exec 3<&0 0</dev/null; grading=("${@:2}"); eval "$1" 3<&-; set +eux; '
    f'exec 0<&3 3<&-; set -- "${{grading[@]}}"; {_RUN}'
)
"""Only the driver reads standard input."""


def in_shell(script: str, argv: Sequence[str]) -> list[str]:
    """Return a command line that runs a driver in the environment created by a bash script.

    Failing commands do not end the script. An empty script needs no bash.
    """
    if script.strip():
        return ["bash", "-c", _RUN_AFTER_SCRIPT, "tests", script, *argv]
    return ["sh", "-c", _RUN, "tests", *argv]


def end_of_run(run: Run, reported: list[TestResult] | None, canary: str, canaries: int) -> SuiteRun:
    """Return the result of a run, complete or not. A canary that did not fail is recorded as tampering."""
    log = f"{run.stderr}\n{_text(run.stdout)}"
    if reported is None:  # the last canary is missing, so the earlier results are not trusted
        ended = run.ended if run.ended in ("timed_out", "lost") else "no_report"
        return SuiteRun(ended, said=run.stderr, log=log)
    ours = [result for result in reported if f"{canary}_" in result.test_id.partition("::")[0]]
    caught = ""
    if len(ours) != canaries:
        caught = f"{len(ours)} of {canaries} tests that must fail were reported"
    elif {result.status for result in ours} - {"failed", "error"}:
        caught = "a test that must fail has not failed"
    results = [result for result in reported if result not in ours]
    return SuiteRun("finished", results, caught, run.stderr, log=log)


def _judge(tests: RepositoryTests, run: SuiteRun) -> Verdict:
    if run.ended == "finished":
        return verdict_on(tests, run.results, tampered=run.tampered)
    status = UNFINISHED[run.ended]
    lost = [TestResult(test_id=each, status=status, message=run.said) for each in tests.test_ids]
    return Verdict(tests=lost, tampered=run.tampered)


def results_of(report: bytes, key: bytes) -> list[TestResult] | None:
    """Return the reported test results; None if the report is missing or incomplete."""
    messages = read_report(report, key)
    if messages is None:
        return None
    return [
        TestResult(test_id=_plain(each["test"]), status=each["status"], message=_plain(each["message"]))
        for each in messages
    ]


def _plain(text: str) -> str:
    """Return a text that can be encoded: invalid characters are escaped."""
    return text.encode(errors="backslashreplace").decode()


def _text(output: bytes) -> str:
    return output.decode(errors="replace")
