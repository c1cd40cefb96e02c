"""Programs that are asked and answer by lines, each within a time, and started again after their end."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import trio

from prorl_trio.grading.drivers.values import decode_line, encode_line
from prorl_trio.grading.verifier import backstop_s
from prorl_trio.types.errors import EvaluationError, SandboxCallFailed, SandboxLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from prorl_ipc.sandbox_calls import ExecResult
    from prorl_trio.grading.verdict import TestStatus
    from prorl_trio.sandbox.program import Program

MAX_LINE_BYTES: Final = 16 * 1024 * 1024
"""Longest line that is taken from a program."""
MAX_STDERR_CHARS: Final = 2000
END_TIMEOUT_S: Final = 30.0
"""For the end of a process that reads or writes no more: it has ended, or has closed its pipes."""


class CandidateEnded(Exception):
    """The candidate's process gives no answer any more. `status` is what becomes of the test that asked."""

    def __init__(self, status: TestStatus, message: str) -> None:
        super().__init__(message)
        self.status: TestStatus = status


class Lines:
    """The lines of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._rest = bytearray()

    async def send(self, line: bytes, *, limit_s: float = 0.0) -> None:
        """Write a line, which has its newline.

        The program may use `limit_s` of its own time until it has written its next line; with 0, what is left of the
        limit before. Errors as `Program.send`.
        """
        await self.program.send(line, own_limit_s=limit_s)

    async def receive(self) -> bytes:
        """Return the next line, without its newline; nothing after the last. Errors as `Program.receive_some`.

        Raises:
            ValueError: it is longer than `MAX_LINE_BYTES`.
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
    """The candidate's module, in a process that is started when it is first asked, and again after each end."""

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
        """The last answer came after its time."""

    async def ask(self, request: bytes, *, limit_s: float) -> dict[str, Any]:
        """Return the answer to a line: `value`, or `raised` and `message`. See `ask_line`."""
        try:
            return decode_line(await self.ask_line(request, limit_s=limit_s))
        except ValueError as exc:
            raise CandidateEnded("error", f"no answer: {exc}") from exc

    async def ask_line(self, request: bytes, *, limit_s: float, goes_on: bool = False) -> bytes:
        """Return the answer to a line as it was written, by whatever code of the candidate's: it need not be an answer.

        Args:
            request: the line.
            limit_s: the own time of the process for the answer, and as much again for its start where there is none.
            goes_on: the limit is that of the question before, of which this one gets what is left.

        Raises:
            CandidateEnded: there is no answer. The process is gone.
            SandboxLost: not from inside. There is no verdict.
            EvaluationError: Python is not there, or there is no CPU. There is no verdict.
            ProgramKilled: as `Verifier.check_end` says.
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
    """Make a process to ask, which `open_driver` starts; nothing of it is left after the block.

    `check_end` is told each of its ends, and raises where that is no answer of the candidate's.
    """
    async with AsyncExitStack() as stack:
        yield CandidateProcess(stack, open_driver, preamble, check_end)
