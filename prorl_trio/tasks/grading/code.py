"""Grading of a code solution (a module) against the tests of its task."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from prorl_trio.tasks.grading.code_tests import AssertTests, FunctionTests, OutputTests, UnitTests, carried_back
from prorl_trio.tasks.grading.compare import same_output, same_value
from prorl_trio.tasks.grading.drivers.values import decode, decode_line, encode, encode_line
from prorl_trio.tasks.grading.verdict import TestResult, Verdict
from prorl_trio.tasks.grading.verifier import KILLED, MAX_OUTPUT_BYTES, backstop_s, driver_argv, open_verifier
from prorl_trio.threads import run_sync
from prorl_trio.types.errors import EvaluationError, SandboxCallFailed, SandboxLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from prorl_ipc.sandbox_calls import ExecResult
    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.sandbox.program import Program
    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.tasks.grading.code_tests import CodeTests
    from prorl_trio.tasks.grading.compare import Tolerance
    from prorl_trio.tasks.grading.verdict import TestStatus
    from prorl_trio.tasks.grading.verifier import Verifier


SOLUTION_PATH: Final = "/workspace/solution.py"
PREAMBLE_PATH: Final = "/tmp/grading/preamble.py"
UNITTEST_DRIVERS: Final = ("unittests", "own_time", "values")
CANARY_TESTS: Final = 6
"""Number of canary tests in `drivers/unittests.py`."""
WORK_DIR: Final = "/workspace"
SETUP_LIMIT_S: Final = 60.0
"""Limit for the code that a task's tests run before the first test."""
OUTPUT_ROOM: Final = 2
"""At most this multiple of the expected output is read from a program."""
MAX_COLLECTED: Final = 256

MAX_LINE_BYTES: Final = 16 * 1024 * 1024
"""Longest line accepted from a program."""
MAX_STDERR_CHARS: Final = 2000
END_TIMEOUT_S: Final = 30.0
"""Time limit for the end of a process that no longer reads or writes: it has exited or closed its pipes."""


class CandidateEnded(Exception):
    """The candidate's process no longer answers. `status` is the result of the test that asked."""

    def __init__(self, status: TestStatus, message: str) -> None:
        super().__init__(message)
        self.status: TestStatus = status


class Lines:
    """The line-based input and output of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._rest = bytearray()

    async def send(self, line: bytes, *, limit_s: float = 0.0) -> None:
        """Write a line, which ends with a newline.

        The program may use `limit_s` of its own time until its next line; 0 keeps the rest of the previous limit.
        Raises the same errors as `Program.send`.
        """
        await self.program.send(line, own_limit_s=limit_s)

    async def receive(self) -> bytes:
        """Return the next line without its newline; empty after the last line.

        Raises the same errors as `Program.receive_some`.

        Raises:
            ValueError: the line is longer than `MAX_LINE_BYTES`.
        """
        searched = 0
        while (end := self._rest.find(b"\n", searched)) < 0:
            searched = len(self._rest)
            if searched > MAX_LINE_BYTES:
                raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
            piece = await self.program.receive_some()
            if not piece:
                return b""
            self._rest += piece
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return line


class CandidateProcess:
    """The candidate's module in a process that starts on the first request, and again after each exit."""

    def __init__(
        self,
        stack: AsyncExitStack,
        open_driver: Callable[[], AbstractAsyncContextManager[Program]],
        preamble: str,
        check_end: Callable[[str, ExecResult], None],
    ) -> None:
        self._stack = stack
        self._open_driver = open_driver
        self._preamble = preamble
        self._check_end = check_end
        self._has_run = False
        self._lines: Lines | None = None
        self.is_late = False
        """The last answer arrived after its time limit."""

    async def ask(self, request: bytes, *, limit_s: float) -> dict[str, Any]:
        """Return the answer to a request: `value`, or `raised` and `message`. See `ask_line`."""
        try:
            return decode_line(await self.ask_line(request, limit_s=limit_s))
        except ValueError as exc:
            raise CandidateEnded("error", f"no answer: {exc}") from exc

    async def ask_line(self, request: bytes, *, limit_s: float, goes_on: bool = False) -> bytes:
        """Return the raw answer to a request. The candidate's code can write it, so it may be invalid.

        Args:
            request: the line.
            limit_s: the process' own time for the answer, and as much again for its start if it is not running.
            goes_on: share the limit of the previous request; this request gets the rest.

        Raises:
            CandidateEnded: the process exited without an answer.
            SandboxLost: the cause lies outside the sandbox. No verdict is possible.
            EvaluationError: Python is missing, or there is no CPU. No verdict is possible.
            ProgramKilled: see `Verifier.check_end`.
        """
        self.is_late &= goes_on
        try:
            if self._lines is None:
                goes_on = False
                await self._start(limit_s)
            return await self._exchange(request, limit_s, goes_on=goes_on)
        except CandidateEnded:
            self._lines = None
            await self._stack.aclose()
            raise

    async def _start(self, limit_s: float) -> None:
        self._lines = Lines(await self._stack.enter_async_context(self._open_driver()))
        line = await self._exchange(encode_line({"preamble": self._preamble}), limit_s)
        try:
            loaded = decode_line(line)
        except ValueError as exc:
            raise CandidateEnded("error", f"no answer: {exc}") from exc
        if "value" not in loaded:
            raise CandidateEnded("error", f"the solution cannot be loaded: {_said(loaded)}")

    async def _exchange(self, request: bytes, limit_s: float, *, goes_on: bool = False) -> bytes:
        assert self._lines is not None
        result: ExecResult | None = None
        self._lines.program.is_late = False
        try:
            with trio.fail_after(backstop_s(limit_s)):
                sent = await self._sent(request, 0.0 if goes_on else limit_s)
                if sent and (line := await self._lines.receive()):
                    self._has_run = True
                    self.is_late |= self._lines.program.is_late
                    return line
                with trio.move_on_after(END_TIMEOUT_S):
                    result = await self._lines.program.wait()
        except trio.TooSlowError:
            said = f"the machine had no CPU for an answer of {limit_s:g} s in {backstop_s(limit_s):g} s"
            raise EvaluationError(said) from None
        except ValueError as exc:
            raise CandidateEnded("error", f"no answer: {exc}") from exc
        except SandboxLost as exc:
            if not exc.from_inside:
                raise
            raise CandidateEnded("lost", str(exc)) from exc
        except (OSError, SandboxCallFailed) as exc:
            if isinstance(exc, OSError) and not self._has_run:
                raise EvaluationError(f"the evaluator's sandbox cannot run the driver: {exc}") from exc
            raise CandidateEnded("error", f"the sandbox cannot run it any more: {exc}") from exc
        self._has_run = True
        if result is None:
            raise CandidateEnded("error", "the solution's process lives, but reads or writes no more")
        self._check_end("the solution's process", result)
        if result.timed_out:
            raise CandidateEnded("timed_out", f"no answer in {limit_s:g} s of its own time")
        stderr = result.stderr[-MAX_STDERR_CHARS:].decode(errors="replace")
        raise CandidateEnded("error", f"its process ended with exit code {result.exit_code}: {stderr}")

    async def _sent(self, request: bytes, limit_s: float) -> bool:
        assert self._lines is not None
        try:
            await self._lines.send(request, limit_s=limit_s)
        except trio.BrokenResourceError:
            return False
        return True


def _said(answer: dict[str, Any]) -> str:
    return f"{answer.get('raised')}: {answer.get('message')}"


@asynccontextmanager
async def open_candidate(
    open_driver: Callable[[], AbstractAsyncContextManager[Program]],
    *,
    preamble: str,
    check_end: Callable[[str, ExecResult], None],
) -> AsyncIterator[CandidateProcess]:
    """Create a candidate process, which `open_driver` starts; it is completely removed after the block.

    `check_end` is called at each exit, and raises unless the exit is the candidate's doing.
    """
    async with AsyncExitStack() as stack:
        yield CandidateProcess(stack, open_driver, preamble, check_end)


async def grade_code(
    context: RolloutContext,
    solution: str,
    tests: CodeTests,
    spec: SandboxSpec,
    *,
    all_tests: bool = True,
    last_try: bool = True,
) -> Verdict:
    """Run the tests on a solution in sandboxes that the agent has never touched.

    A solution that hangs, crashes, kills its sandbox or floods its output fails tests. Without `all_tests` the first
    failure stops the grading.

    Raises:
        EvaluationError, SandboxUnavailable, SandboxLost: no verdict is possible.
        ProgramKilled: it is not the last try. See `again_if_killed`.
    """
    test_ids = await _collected(context, tests, spec, last_try=last_try) if isinstance(tests, UnitTests) else []
    async with open_verifier(context, spec, last_try=last_try) as verifier:
        await verifier.place({SOLUTION_PATH: solution.encode(errors="replace")})
        plan = _Plan(tests, all_tests=all_tests)
        match tests:
            case OutputTests():
                argv = ["python3", SOLUTION_PATH]
                if tests.preamble:
                    await verifier.place_drivers("program")
                    await verifier.place({PREAMBLE_PATH: tests.preamble.encode()})
                    argv = driver_argv("program", SOLUTION_PATH, PREAMBLE_PATH, isolated=False)
                return await _grade_output(verifier, tests, argv, plan)
            case FunctionTests():
                await verifier.place_drivers("candidate", "values")
                return await _grade_functions(verifier, tests, plan)
            case AssertTests():
                await verifier.place_drivers("candidate", "values")
                async with open_verifier(context, spec, last_try=last_try) as checker:
                    await checker.place_drivers("checker", "values")
                    return await _grade_asserts(verifier, checker, tests, plan)
            case UnitTests():
                await verifier.place_drivers(*UNITTEST_DRIVERS)
                return await _grade_unittests(verifier, tests, test_ids)


class _Plan:
    """The tests to run one by one, and their time limits."""

    def __init__(self, tests: CodeTests, *, all_tests: bool) -> None:
        self._test_ids = tests.test_ids
        self._all_tests = all_tests
        self._limit_s = tests.test_timeout_s
        self._total_s = tests.timeout_s
        self._used_s = 0.0

    async def run(self, run: Callable[[int, float], Awaitable[TestResult]]) -> Verdict:
        """Run tests in order until the time is up, a failure decides, or the sandbox has ended."""
        done: list[TestResult] = []
        rest: TestStatus = "not_run"
        why = "no time was left for it"
        for number in range(len(self._test_ids)):
            limit_s = self._limit_s if self._total_s is None else min(self._limit_s, self._total_s - self._used_s)
            if limit_s <= 0:
                break
            result = await run(number, limit_s)
            done.append(result)
            self._used_s += min(result.seconds, limit_s)
            if result.status == "lost":
                rest, why = "lost", ""
                break
            if result.status != "passed" and not self._all_tests:
                why = "a test before it failed"
                break
        left = self._test_ids[len(done) :]
        return Verdict(tests=[*done, *(TestResult(test_id=each, status=rest, message=why) for each in left)])


# ---------------------------------------------------------------- programs


async def _grade_output(verifier: Verifier, tests: OutputTests, argv: list[str], plan: _Plan) -> Verdict:
    async def run(number: int, limit_s: float) -> TestResult:
        case, test_id = tests.cases[number], tests.test_ids[number]
        ended = await verifier.run(
            argv,
            timeout_s=limit_s,
            stdin=case.input.encode(),
            cwd=WORK_DIR,
            max_stdout_bytes=max(MAX_OUTPUT_BYTES, OUTPUT_ROOM * len(case.output.encode())),
        )
        result = partial(TestResult, test_id=test_id, seconds=ended.seconds)
        if ended.ended != "exited":
            return result(status="error" if ended.ended == "refused" else ended.ended, message=ended.stderr)
        if ended.exit_code != 0:
            return result(status="error", message=f"exit code {ended.exit_code}: {ended.stderr}")
        if not ended.stdout_is_whole:
            return result(status="failed", message="it printed more than is read")
        if not await _compare(same_output, ended.stdout.decode(errors="replace"), case.output, tests.tolerance):
            return result(status="failed", message="another output is expected")
        return result(status="timed_out" if verifier.check_late(ended.is_late, "the output") else "passed")

    return await plan.run(run)


# ---------------------------------------------------------------- functions


async def _grade_functions(verifier: Verifier, tests: FunctionTests, plan: _Plan) -> Verdict:
    open_driver = partial(verifier.open_driver, "candidate", SOLUTION_PATH)
    async with open_candidate(open_driver, preamble=tests.preamble, check_end=verifier.check_end) as candidate:

        async def run(number: int, limit_s: float) -> TestResult:
            case, began_s = tests.cases[number], trio.current_time()
            args, kwargs = carried_back([case.args, case.kwargs])
            call = {"call": tests.function, "args": encode(args), "kwargs": encode(kwargs)}
            result = partial(TestResult, test_id=tests.test_ids[number])
            try:
                with verifier.charged_to_agent(limit_s):
                    answer = await candidate.ask(encode_line(call), limit_s=limit_s)
            except CandidateEnded as exc:
                return result(status=exc.status, message=str(exc), seconds=trio.current_time() - began_s)
            seconds = trio.current_time() - began_s
            if "value" not in answer:
                said = f"{answer.get('raised')}: {answer.get('message')}"
                return result(status="error", message=said, seconds=seconds)
            right = carried_back([case.result, *case.alternatives])
            if not await _compare(_is_any, answer["value"], right, tests.tolerance):
                return result(status="failed", message="another result is expected", seconds=seconds)
            is_late = verifier.check_late(candidate.is_late, "the result")
            return result(status="timed_out" if is_late else "passed", seconds=seconds)

        return await plan.run(run)


def _is_any(encoded: Any, right: list[Any], tolerance: Tolerance | None) -> bool:
    try:
        value = decode(encoded)
        return any(same_value(value, expected, tolerance) for expected in right)
    except (ValueError, RecursionError, OverflowError):
        return False  # the driver never writes this, so the candidate did


async def _compare(compare: Callable[..., bool], *arguments: Any) -> bool:
    """Compare in a thread, because the candidate's values may be large."""
    return await run_sync(compare, *arguments)


# ---------------------------------------------------------------- assertions


async def _grade_asserts(candidate_box: Verifier, checker_box: Verifier, tests: AssertTests, plan: _Plan) -> Verdict:
    """Use two sandboxes: the checker's, with the tests, and the candidate's. Calls between them pass through here."""
    open_driver = partial(candidate_box.open_driver, "candidate", SOLUTION_PATH)
    task = {"setup": tests.setup, "code": tests.code, "functions": tests.functions}
    async with (
        checker_box.open_driver("checker") as program,
        open_candidate(open_driver, preamble=tests.preamble, check_end=candidate_box.check_end) as candidate,
    ):
        checker = _Checker(Lines(program), candidate, candidate_box, checker_box)
        await checker.start(task)

        async def run(number: int, limit_s: float) -> TestResult:
            return await checker.result(tests.test_ids[number], tests.tests[number], limit_s)

        return await plan.run(run)


class _Checker:
    """The program that knows the answers.

    Its exit or silence gives no verdict, unless it waits for the candidate's answer.
    """

    def __init__(self, lines: Lines, candidate: CandidateProcess, candidate_box: Verifier, own_box: Verifier) -> None:
        self._lines = lines
        self._candidate = candidate
        self._candidate_box = candidate_box
        self._own_box = own_box
        self._has_answered = False
        """The candidate has answered, so it may be the cause of what this program does now."""
        self._over = ""
        self._over_status: TestStatus = "error"

    async def start(self, task: dict[str, Any]) -> None:
        """Send the code that precedes the tests, and wait until it has been executed."""
        await self._send(encode_line(task), SETUP_LIMIT_S)
        await self._receive(SETUP_LIMIT_S)

    async def result(self, test_id: str, test: str, limit_s: float) -> TestResult:
        """Run a test, answer its calls, and return its result.

        Its calls may together use `limit_s` of the candidate's own time, and the same amount of this program's own
        time.
        """
        if self._over:
            return TestResult(test_id=test_id, status="not_run", message=self._over)
        began_s = trio.current_time()
        result = partial(TestResult, test_id=test_id)
        ended: CandidateEnded | None = None
        is_late = False
        calls = 0
        await self._send(encode_line({"run": test}), limit_s)
        while True:
            self._lines.program.is_late = False
            message = await self._receive(limit_s)
            seconds = trio.current_time() - began_s
            is_late |= self._lines.program.is_late
            if message is None:
                return result(status=self._over_status, message=self._over, seconds=seconds)
            if "status" in message:
                status, said = message["status"], message["message"]
                if message.get("cannot_cross") and not self._has_answered:
                    raise EvaluationError(f"{test_id}: {said}")
                if ended is not None:  # whatever the test does with the answer
                    status, said = ended.status, str(ended)
                if status == "passed" and self._candidate_box.check_late(is_late, test_id):
                    status = "timed_out"
                return result(status=status, message=said, seconds=seconds)
            if ended is None:
                try:
                    with self._candidate_box.charged_to_agent(limit_s):
                        line = await self._candidate.ask_line(encode_line(message), limit_s=limit_s, goes_on=calls > 0)
                    self._has_answered = True
                    is_late |= self._candidate.is_late
                except CandidateEnded as exc:
                    ended = exc
            if ended is not None:
                line = encode_line({"lost": str(ended)}).rstrip()
            calls += 1
            await self._send(line + b"\n")

    async def _send(self, line: bytes, limit_s: float = 0.0) -> None:
        with suppress(trio.BrokenResourceError):  # it has exited or never started: `_receive` finds the cause
            await self._lines.send(line, limit_s=limit_s)

    async def _receive(self, limit_s: float) -> dict[str, Any] | None:
        """Return the next message; None if it is missing because of the values that the candidate gave the test.

        Raises:
            EvaluationError: it is missing, and the candidate is not the cause. No verdict is possible.
        """
        with trio.move_on_after(backstop_s(limit_s)):  # noqa: ASYNC912 - every path waits for the program
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
                self._over, self._over_status = str(exc), "error"
                return None
            said = f"the tests end with exit code {result.exit_code}: {result.stderr.decode(errors='replace')}"
            if result.timed_out:
                said = f"the tests hang: no answer in {limit_s:g} s of their own time"
            if not self._has_answered or (result.exit_code == KILLED and not result.breach):
                raise EvaluationError(said)
            self._over, self._over_status = said, "timed_out" if result.timed_out else "error"
            return None
        raise EvaluationError(f"the machine had no CPU for the tests: no answer in {backstop_s(limit_s):g} s")


# ---------------------------------------------------------------- unittest


_COLLECTED: Final[OrderedDict[tuple[str, str], list[str]]] = OrderedDict()
"""The tests that unittest finds, by their code and image."""


async def _collected(context: RolloutContext, tests: UnitTests, spec: SandboxSpec, *, last_try: bool) -> list[str]:
    """Return the ids of the tests that must pass, as found by unittest's own loader in a separate sandbox.

    Tests that a decorator skips or expects to fail are excluded. If the tests cannot be executed without a solution,
    the ids are read from their source.

    Raises:
        EvaluationError: there are no tests to pass, or their code does not terminate.
    """
    key = (tests.code, spec.image)
    if key not in _COLLECTED:
        async with open_verifier(context, spec, last_try=last_try) as verifier:
            await verifier.place_drivers(*UNITTEST_DRIVERS)
            ended = await verifier.run(
                driver_argv("unittests"),
                timeout_s=SETUP_LIMIT_S,
                stdin=encode_line({"code": tests.code}),
                env={"MPLBACKEND": "Agg"},
            )
        if ended.ended != "exited":
            raise EvaluationError(f"the tests cannot be collected ({ended.ended}): {ended.stderr}")
        found = _reported(ended.stdout)
        ids = tests.test_ids if found is None else [each.test_id for each in found.values() if each.status == "missing"]
        if not ids:
            raise EvaluationError("tests.code has no test that a solution must pass")
        _COLLECTED[key] = ids
        if len(_COLLECTED) > MAX_COLLECTED:
            _COLLECTED.popitem(last=False)
    return _COLLECTED[key]


async def _grade_unittests(verifier: Verifier, tests: UnitTests, test_ids: list[str]) -> Verdict:
    canary = f"Case{secrets.token_hex(4)}"
    ended = await verifier.run(
        driver_argv("unittests", SOLUTION_PATH),
        timeout_s=tests.timeout_s or SETUP_LIMIT_S + tests.test_timeout_s * len(test_ids),
        stdin=encode_line({"code": tests.code, "canary": canary, "limit_s": tests.test_timeout_s}),
        cwd=WORK_DIR,
        env={"MPLBACKEND": "Agg"},
    )
    reported = _reported(ended.stdout)
    missing: TestStatus = "missing"
    if ended.ended in ("timed_out", "lost"):
        missing = ended.ended
    if reported is None:  # the last canary is missing, so the earlier results are not trusted
        lines = [TestResult(test_id=each, status=missing, message=ended.stderr) for each in test_ids]
        return Verdict(tests=lines)
    results = [reported.get(each, TestResult(test_id=each, status="missing")) for each in test_ids]
    verdict = Verdict(tests=results, tampered=_caught(reported, canary))
    if verdict.resolved and verifier.check_late(ended.is_late, "all of it"):
        return Verdict(tests=[TestResult(test_id=each, status="timed_out") for each in test_ids])
    return verdict


def _reported(stdout: bytes) -> dict[str, TestResult] | None:
    """Return the results by id; None if the report is incomplete. Of a test reported twice, the worse result counts."""
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
    """Return a manipulation shown by the canary's results; empty if each of its tests failed, as it must."""
    statuses = [result.status for name, result in reported.items() if name.startswith(f"{canary}.")]
    if len(statuses) != CANARY_TESTS:
        return f"{len(statuses)} of {CANARY_TESTS} tests that must fail were reported"
    return "a test that must fail has not failed" if set(statuses) - {"failed", "error"} else ""
