"""Runs of a row's tests in sandboxes: the patch goes in, the evaluator's files go over it, and pytest reports."""

from __future__ import annotations

import shlex
from importlib.resources import files
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from launch.mining.sdist import file_kind
from prorl_trio.grading.drivers.values import decode_line
from prorl_trio.grading.verdict import TestResult
from prorl_trio.grading.verifier import DRIVERS_DIR, PACKAGE, driver_argv
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.types.errors import SandboxLost

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prorl_trio.config import SandboxConfig
    from prorl_trio.sandbox.host import SandboxHost
    from prorl_trio.sandbox.sandbox import Sandbox

__all__ = ["Bench", "SuiteJob", "SuiteRun"]

PREPARE_TIMEOUT_S: Final = 120.0
MAX_REPORT_BYTES: Final = 64 * 1024 * 1024
_GIT: Final = (
    "git -c core.hooksPath=/dev/null -c core.quotePath=false -c core.autocrlf=false -c safe.directory='*' -c gc.auto=0 "
    "-c user.name=base -c user.email=base@localhost -c commit.gpgSign=false -c init.defaultBranch=base"
)


class SuiteJob(NamedTuple):
    """The tests to run: the sandbox's layers and variables, the evaluator's files, pytest's arguments and time-outs."""

    layers: tuple[str, ...]
    env: Mapping[str, str]
    repo_dir: str
    test_files: Mapping[str, str]
    removed_test_files: Sequence[str]
    arguments: Sequence[str]
    test_timeout_s: float
    timeout_s: float
    image: str = "host"


class SuiteRun(NamedTuple):
    """The end of a run. Only if it `finished`, `results` are of all tests, by node id."""

    ended: Literal["finished", "timed_out", "no_report", "not_applied"]
    results: dict[str, TestResult]
    said: str = ""


class Bench:
    """A place to run tests: each run has a sandbox of its own."""

    def __init__(self, host: SandboxHost, config: SandboxConfig) -> None:
        self._host = host
        self._config = config

    async def run(self, job: SuiteJob, patch: bytes | None = None) -> SuiteRun:
        """Run the tests once, with a patch to the repository unless it is None. The patch cannot change tests.

        Raises:
            SandboxUnavailable, SandboxLost, OSError: infrastructure; nothing is known of the tests.
        """
        spec = SandboxSpec(
            image=job.image,
            layers=job.layers,
            env=dict(job.env),
            start_timeout_s=self._config.start_timeout_s,
            limits=self._config.limits,
        )
        sandbox = await self._host.open(spec)
        try:
            return await _run_in(sandbox, job, patch)
        finally:
            await sandbox.aclose()


async def _run_in(sandbox: Sandbox, job: SuiteJob, patch: bytes | None) -> SuiteRun:
    if patch is not None:
        said = await _apply(sandbox, job, patch)
        if said:
            return SuiteRun("not_applied", {}, said)
    if job.removed_test_files:
        await sandbox.exec(["rm", "-rf", "--", *job.removed_test_files], timeout_s=PREPARE_TIMEOUT_S, cwd=job.repo_dir)
    for path, text in job.test_files.items():
        await sandbox.write_file(f"{job.repo_dir}/{path}", text.encode())
    for name in ("__init__.py", "values.py", "pytest_run.py"):
        driver = files("prorl_trio.grading") / "drivers" / name
        await sandbox.write_file(f"{DRIVERS_DIR}/{PACKAGE}/{name}", driver.read_bytes())
    report = f"{DRIVERS_DIR}/report.jsonl"
    argv = driver_argv("pytest_run", report, str(job.test_timeout_s), *job.arguments, isolated=False)
    try:
        done = await sandbox.exec(argv, timeout_s=job.timeout_s, cwd=job.repo_dir)
        content = b"" if done.timed_out else await sandbox.read_file(report, max_bytes=MAX_REPORT_BYTES)
    except FileNotFoundError:
        content = b""
    except SandboxLost as exc:
        if not exc.from_inside:
            raise
        return SuiteRun("no_report", {}, str(exc))
    said = (done.stdout + done.stderr)[-2000:].decode(errors="replace")
    if done.timed_out:
        return SuiteRun("timed_out", {}, said)
    results, whole = read_report(content)
    return SuiteRun("finished" if whole else "no_report", results, said)


async def _apply(sandbox: Sandbox, job: SuiteJob, patch: bytes) -> str:
    """Apply a patch, and undo what it does to tests. Returns why it does not apply; empty if it does."""
    place = f"{DRIVERS_DIR}/patch.diff"
    await sandbox.write_file(place, patch)
    apply = f"{_GIT} apply --whitespace=nowarn {place}" if patch.strip() else "true"
    begin = f"{_GIT} init -q && {_GIT} add -A -f && {_GIT} commit -q --allow-empty -m base"
    end = f"{_GIT} add -A -f && {_GIT} diff --cached --name-only --no-renames -z HEAD"
    script = f"rm -rf .git; {begin} || exit 9; {apply} || exit 8; {end}"
    done = await sandbox.exec(["sh", "-c", script], timeout_s=PREPARE_TIMEOUT_S, cwd=job.repo_dir)
    if done.exit_code == 8:
        return done.stderr.decode(errors="replace")
    if done.exit_code != 0:
        raise OSError(f"{job.repo_dir} cannot be made ready for a patch: {done.stderr.decode(errors='replace')}")
    touched = [path for path in done.stdout.decode(errors="surrogateescape").split("\0") if path]
    undo = [f"{_GIT} checkout -q HEAD -- {shlex.quote(path)} 2>/dev/null || rm -rf -- {shlex.quote(path)}"
            for path in touched if file_kind(path) == "test"]  # fmt: skip
    await sandbox.exec(["sh", "-c", "; ".join([*undo, "rm -rf .git"])], timeout_s=PREPARE_TIMEOUT_S, cwd=job.repo_dir)
    return ""


def read_report(content: bytes) -> tuple[dict[str, TestResult], bool]:
    """Return the results of a report by node id, and whether it has its end. Of two with one name the last counts."""
    results: dict[str, TestResult] = {}
    whole = False
    for line in content.splitlines():
        try:
            found = decode_line(line)
            if "end" in found:
                whole = True
            else:
                result = msgspec.convert({"test_id": found.pop("test"), **found}, TestResult)
                results[result.test_id] = result
        except (ValueError, KeyError):
            continue
    return results, whole
