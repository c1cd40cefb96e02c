"""Grading of a solution in code: a module, against the tests that its task brings."""

from __future__ import annotations

import secrets
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from prorl_trio.grading.code_tests import AssertTests, FunctionTests, OutputTests, UnitTests
from prorl_trio.grading.compare import same_output, same_value
from prorl_trio.grading.drivers.values import decode, decode_line, encode, encode_line
from prorl_trio.grading.lines import CandidateEnded, Lines, open_candidate
from prorl_trio.grading.verdict import TestResult, Verdict
from prorl_trio.grading.verifier import KILLED, driver_argv, open_verifier
from prorl_trio.types.errors import EvaluationError, SandboxCallFailed, SandboxLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.grading.code_tests import CodeTests
    from prorl_trio.grading.compare import Tolerance
    from prorl_trio.grading.lines import CandidateProcess
    from prorl_trio.grading.verdict import TestStatus
    from prorl_trio.grading.verifier import Verifier
    from prorl_trio.sandbox.provider import SandboxSpec

__all__ = ["SOLUTION_PATH", "grade_code"]

SOLUTION_PATH: Final = "/workspace/solution.py"
TESTS_PATH: Final = "/tmp/grading/tests.py"
CANARY_TESTS: Final = 6
"""Tests of the canary in `drivers/unittests.py`."""
WORK_DIR: Final = "/workspace"
EVAL_MARGIN_S: Final = 10.0
"""Left of the EVAL budget when the last test ends: for the end of the sandboxes."""
CHECKER_MARGIN_S: Final = 30.0
"""For the checker's own work, beyond the time of the tests."""


async def grade_code(
    context: RolloutContext, solution: str, tests: CodeTests, spec: SandboxSpec, *, last_try: bool = True
) -> Verdict:
    """Run the tests on a solution, in sandboxes that the agent has never touched.

    What the solution does there (it hangs, crashes, kills its sandbox, prints what it likes) are failed tests.

    Raises:
        EvaluationError, SandboxUnavailable, SandboxLost: there is no verdict.
        ProgramKilled: it is not the last try. See `again_if_killed`.
    """
    async with open_verifier(context, spec, last_try=last_try) as verifier:
        await verifier.place({SOLUTION_PATH: solution.encode(errors="replace")})
        clock = _Clock(context, tests)
        match tests:
            case OutputTests():
                return await _grade_output(verifier, tests, clock)
            case FunctionTests():
                await verifier.place_drivers()
                return await _grade_functions(verifier, tests, clock)
            case AssertTests():
                await verifier.place_drivers()
                async with open_verifier(context, spec, last_try=last_try) as checker:
                    await checker.place_drivers()
                    return await _grade_asserts(verifier, checker, tests, clock)
            case UnitTests():
                await verifier.place_drivers()
                await verifier.place({TESTS_PATH: tests.code.encode()})
                return await _grade_unittests(verifier, tests, clock)


class _Clock:
    """The time that tests may take: each, all, and what is left of the EVAL budget."""

    def __init__(self, context: RolloutContext, tests: CodeTests) -> None:
        self.test_timeout_s = tests.test_timeout_s
        self._deadline_s = trio.current_time() + min(tests.timeout_s, context.stage_left_s() - EVAL_MARGIN_S)

    @property
    def left_s(self) -> float:
        """Seconds that are left for all tests."""
        return max(0.0, self._deadline_s - trio.current_time())

    def next_s(self) -> float:
        """Seconds that the next test may take; 0 if there is no time for it."""
        return min(self.test_timeout_s, self.left_s)


def _rest(test_ids: list[str], done: list[TestResult]) -> Iterator[TestResult]:
    for test_id in test_ids[len(done) :]:
        yield TestResult(test_id=test_id, status="not_run", message="no time was left for it")


async def _one_by_one(
    test_ids: list[str], clock: _Clock, run: Callable[[int, float], Awaitable[TestResult]]
) -> Verdict:
    """Run tests in order, while there is time, and until the candidate has ended its sandbox."""
    done: list[TestResult] = []
    for number in range(len(test_ids)):
        timeout_s = clock.next_s()
        if not timeout_s:
            break
        done.append(await run(number, timeout_s))
        if done[-1].status == "lost":
            return Verdict(tests=[*done, *(TestResult(test_id=each, status="lost") for each in test_ids[len(done) :])])
    return Verdict(tests=[*done, *_rest(test_ids, done)])


# ---------------------------------------------------------------- programs


async def _grade_output(verifier: Verifier, tests: OutputTests, clock: _Clock) -> Verdict:
    async def run(number: int, timeout_s: float) -> TestResult:
        case, test_id = tests.cases[number], tests.test_ids[number]
        ended = await verifier.run(
            ["python3", SOLUTION_PATH], timeout_s=timeout_s, stdin=case.input.encode(), cwd=WORK_DIR
        )
        result = partial(TestResult, test_id=test_id, seconds=ended.seconds)
        if ended.ended != "exited":
            return result(status="error" if ended.ended == "refused" else ended.ended, message=ended.stderr)
        if ended.exit_code != 0:
            return result(status="error", message=f"exit code {ended.exit_code}: {ended.stderr}")
        if not ended.stdout_is_whole:
            return result(status="failed", message="it printed more than is read")
        same = await _compare(same_output, ended.stdout.decode(errors="replace"), case.output, tests.tolerance)
        return result(status="passed" if same else "failed", message="" if same else "another output is expected")

    return await _one_by_one(tests.test_ids, clock, run)


# ---------------------------------------------------------------- functions


async def _grade_functions(verifier: Verifier, tests: FunctionTests, clock: _Clock) -> Verdict:
    open_driver = partial(verifier.open_driver, "candidate", SOLUTION_PATH, timeout_s=clock.left_s + EVAL_MARGIN_S)
    async with open_candidate(open_driver, preamble=tests.preamble, check_end=verifier.check_end) as candidate:

        async def run(number: int, timeout_s: float) -> TestResult:
            case, began_s = tests.cases[number], trio.current_time()
            call = {"call": tests.function, "args": encode(case.args), "kwargs": encode(case.kwargs)}
            result = partial(TestResult, test_id=tests.test_ids[number])
            try:
                with verifier.charged_to_agent():
                    answer = await candidate.ask(encode_line(call), timeout_s=timeout_s)
            except CandidateEnded as exc:
                return result(status=exc.status, message=str(exc), seconds=trio.current_time() - began_s)
            seconds = trio.current_time() - began_s
            if "value" not in answer:
                said = f"{answer.get('raised')}: {answer.get('message')}"
                return result(status="error", message=said, seconds=seconds)
            right = [case.result, *case.alternatives]
            same = await _compare(_is_any, answer["value"], right, tests.tolerance)
            message = "" if same else "another result is expected"
            return result(status="passed" if same else "failed", message=message, seconds=seconds)

        return await _one_by_one(tests.test_ids, clock, run)


def _is_any(encoded: Any, right: list[Any], tolerance: Tolerance | None) -> bool:
    try:
        value = decode(encoded)
        return any(same_value(value, expected, tolerance) for expected in right)
    except (ValueError, RecursionError, OverflowError):
        return False  # nothing that the driver makes: the candidate has written it itself


async def _compare(compare: Callable[..., bool], *arguments: Any) -> bool:
    """Compare in a thread: what the candidate gave may be long."""
    return await trio.to_thread.run_sync(compare, *arguments)


# ---------------------------------------------------------------- assertions


async def _grade_asserts(candidate_box: Verifier, checker_box: Verifier, tests: AssertTests, clock: _Clock) -> Verdict:
    """Two sandboxes: the checker's, with the tests, and the candidate's; calls go from one to the other by here."""
    whole_s = clock.left_s
    open_driver = partial(candidate_box.open_driver, "candidate", SOLUTION_PATH, timeout_s=whole_s + EVAL_MARGIN_S)
    task = {"setup": tests.setup, "code": tests.code, "functions": tests.functions, "tests": tests.tests}
    async with (
        checker_box.open_driver("checker", timeout_s=whole_s + CHECKER_MARGIN_S) as program,
        open_candidate(open_driver, preamble=tests.preamble, check_end=candidate_box.check_end) as candidate,
    ):
        checker = _Checker(Lines(program), candidate, candidate_box, checker_box, clock)
        await checker.start(task)

        async def run(number: int, _timeout_s: float) -> TestResult:
            return await checker.next_result(tests.test_ids[number])

        return await _one_by_one(tests.test_ids, clock, run)


class _Checker:
    """The program that knows the answers. That it ends, or is silent, is no verdict, unless it waits for an answer."""

    def __init__(
        self, lines: Lines, candidate: CandidateProcess, candidate_box: Verifier, own_box: Verifier, clock: _Clock
    ) -> None:
        self._lines = lines
        self._candidate = candidate
        self._candidate_box = candidate_box
        self._own_box = own_box
        self._clock = clock
        self._ended: list[CandidateEnded] = []
        """At the present test, if the candidate has ended."""
        self._has_answered = False
        """The candidate has: what this program does now may come of that."""
        self._over = ""

    async def start(self, task: dict[str, Any]) -> None:
        """Hand it the tests."""
        with suppress(trio.BrokenResourceError):  # it has ended, or was never there: `_receive` says so
            await self._lines.send(encode_line(task))

    async def next_result(self, test_id: str) -> TestResult:
        """Return the result of the test that it runs now, and answer its calls meanwhile."""
        if self._over:
            return TestResult(test_id=test_id, status="not_run", message=self._over)
        self._ended.clear()
        began_s = trio.current_time()
        deadline_s = began_s + self._clock.next_s()
        while True:
            message = await self._receive(deadline_s)
            if message is None:
                late = trio.current_time() > deadline_s
                return TestResult(
                    test_id=test_id,
                    status="timed_out" if late else "error",
                    message=self._over,
                    seconds=trio.current_time() - began_s,
                )
            if "test" in message:
                status, said = message["status"], message["message"]
                if self._ended and status != "passed":
                    status, said = self._ended[0].status, str(self._ended[0])
                return TestResult(test_id=test_id, status=status, message=said, seconds=trio.current_time() - began_s)
            answer = await self._call(message, deadline_s)
            with suppress(trio.BrokenResourceError):  # it has ended: `_receive` says whose doing that is
                await self._lines.send(answer + b"\n")

    async def _call(self, call: dict[str, Any], deadline_s: float) -> bytes:
        """Return the candidate's answer as it was written: what is wrong with it is an error of the test."""
        timeout_s = deadline_s - trio.current_time()
        if not self._ended and timeout_s > 0:
            try:
                with self._candidate_box.charged_to_agent():
                    line = await self._candidate.ask_line(encode_line(call), timeout_s=timeout_s)
                self._has_answered = True
                return line
            except CandidateEnded as exc:
                self._ended.append(exc)
        return encode_line({"lost": str(self._ended[0]) if self._ended else "its time is used up"}).rstrip()

    async def _receive(self, deadline_s: float) -> dict[str, Any] | None:
        """Return the next message; None if there is none, by what the candidate gave the test to compare.

        Raises:
            EvaluationError: there is none, and the candidate has no part in that. There is no verdict.
        """
        with trio.move_on_at(deadline_s + EVAL_MARGIN_S):  # noqa: ASYNC912 - each way through it waits for the program
            try:
                if line := await self._lines.receive():
                    return decode_line(line)
                result = await self._lines.program.wait()
                self._own_box.check_end("the tests' process", result)
            except (OSError, SandboxCallFailed) as exc:
                if self._has_answered:
                    raise
                raise EvaluationError(f"the tests cannot be run: {exc}") from exc
            except SandboxLost as exc:
                if not exc.from_inside:
                    raise
                if not self._has_answered:
                    raise EvaluationError(f"the tests end their own sandbox: {exc}") from exc
                self._over = str(exc)
                return None
            said = f"the tests end with exit code {result.exit_code}: {result.stderr.decode(errors='replace')}"
            if not self._has_answered or (result.exit_code == KILLED and not result.breach):
                raise EvaluationError(said)
            self._over = said
            return None
        if not self._has_answered:
            raise EvaluationError("the tests hang before they ask the solution for anything")
        self._over = "the tests hang in what the solution has given them"
        return None


# ---------------------------------------------------------------- unittest


async def _grade_unittests(verifier: Verifier, tests: UnitTests, clock: _Clock) -> Verdict:
    canary = f"Case{secrets.token_hex(4)}"
    ended = await verifier.run(
        driver_argv("unittests", SOLUTION_PATH, TESTS_PATH),
        timeout_s=clock.left_s,
        stdin=encode_line({"canary": canary}),
        cwd=WORK_DIR,
        env={"MPLBACKEND": "Agg"},
    )
    reported = _reported(ended.stdout)
    missing: TestStatus = "missing"
    if ended.ended in ("timed_out", "lost"):
        missing = ended.ended
    if reported is None:  # it has not come to the last canary, so nothing that was said before can be believed
        lines = [TestResult(test_id=each, status=missing, message=ended.stderr) for each in tests.test_ids]
        return Verdict(tests=lines)
    results = [reported.get(each, TestResult(test_id=each, status="missing")) for each in tests.test_ids]
    return Verdict(tests=results, tampered=_caught(reported, canary))


def _reported(stdout: bytes) -> dict[str, TestResult] | None:
    """Return the results by id; None if the report has no end. A test that is reported twice counts as its worse."""
    results: dict[str, TestResult] = {}
    for line in stdout.splitlines():
        try:
            message = decode_line(line)
        except ValueError:
            continue
        if "end" in message:
            return results
        try:
            result = msgspec.convert({"test_id": message.pop("test"), **message}, TestResult)
        except (KeyError, msgspec.ValidationError):
            continue
        if result.test_id not in results or results[result.test_id].status == "passed":
            results[result.test_id] = result
    return None


def _caught(reported: dict[str, TestResult], canary: str) -> str:
    """Return what the canary's results say; empty if each of its tests failed, as it must."""
    statuses = [result.status for name, result in reported.items() if name.startswith(f"{canary}.")]
    if len(statuses) != CANARY_TESTS:
        return f"{len(statuses)} of {CANARY_TESTS} tests that must fail were reported"
    return "a test that must fail has not failed" if set(statuses) - {"failed", "error"} else ""
