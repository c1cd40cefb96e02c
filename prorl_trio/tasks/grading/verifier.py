"""The evaluator's own sandbox: its files, the candidate's programs in it, and the attribution of each end.

Before the candidate's code runs, the policy cannot influence this sandbox: an error is infrastructure, and there is no
verdict. Afterwards, a time-out, a crash and the end of the sandbox from inside are attributed to the candidate, and the
test has failed. The end of the sandbox from outside remains an error without a verdict.

If a program is killed (SIGKILL) without reaching a limit, the cause is unknown: the candidate, or the machine out of
memory. The answer is then graded once more in fresh sandboxes; a second kill counts as a failure.

The machine's load is not attributed to the candidate either. A program is judged by its own time, which excludes
waiting for a CPU (`prorl_daemon.exec`). Its wall time is a backstop, `BACKSTOP_FACTOR` times as long; a program that
reaches it lacked CPU, and no verdict is possible. In two cases a slow program is graded once more: if it was idle for
most of its time, or if it was right but late on a shared CPU. If its CPU time alone shows that it is too slow, there is
no second try. Only one such second try runs at a time.
"""

from __future__ import annotations

import signal
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

import msgspec
import trio

from prorl_trio.types.errors import EvaluationError, SandboxCallFailed, SandboxLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from prorl_ipc.sandbox_calls import ExecResult
    from prorl_trio.agent.activity import Charge
    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.sandbox.program import Program
    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.sandbox.sandbox import Sandbox

DRIVERS_DIR: Final = "/tmp/grading"
"""The folder of the drivers inside the sandbox."""
PACKAGE: Final = "grading_drivers"

KILLED: Final = 128 + signal.SIGKILL
DRIVER_TIMEOUT_S: Final = 86_400.0
"""A backstop: each request to a driver has its own limit."""
ALONE_TIMEOUT_S: Final = 900.0
"""Longest wait for a turn to be graded alone."""
BACKSTOP_FACTOR: Final = 20
BACKSTOP_LEAST_S: Final = 60.0
MAX_OUTPUT_BYTES: Final = 2 * 1024 * 1024
MAX_STDERR_BYTES: Final = 16 * 1024

End = Literal["exited", "timed_out", "lost", "refused"]

T_co = TypeVar("T_co", covariant=True)


class ProgramKilled(Exception):
    """A program of the evaluation was killed, and no limit of its sandbox explains the kill."""


class ProgramLate(ProgramKilled):
    """A program was too slow, possibly because of the machine's load."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a candidate's program.

    `refused`: the sandbox is alive but no longer starts programs. `is_late`: the program exited by itself, after its
    time.
    """

    ended: End
    exit_code: int | None = None
    stdout: bytes = b""
    stdout_is_whole: bool = True
    stderr: str = ""
    seconds: float = 0.0
    is_late: bool = False


class Bench(Protocol):
    """A source of sandboxes and time for an evaluation. On a node, a job's `RolloutContext` provides it."""

    def open_sandbox(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """Open an unused sandbox, which is completely removed after the block.

        Raises:
            SandboxUnavailable: the sandbox does not start.
        """

    def waiting(self, what: str, charge: Charge) -> AbstractContextManager[None]:
        """Display a wait for `what` during the block, and charge the time."""

    def standing_in_line(self, what: str, charge: Charge, *, at_most_s: float) -> AbstractContextManager[None]:
        """Display a wait like `waiting`, without charging any budget. The caller enforces `at_most_s`."""

    def stage_left_s(self) -> float:
        """Return the remaining seconds for the evaluation; infinite without a limit."""


class Verifier:
    """A sandbox that the agent has never used. Created by `open_verifier`."""

    def __init__(self, bench: Bench, sandbox: Sandbox, *, last_try: bool) -> None:
        self._bench = bench
        self._last_try = last_try
        self._has_run = False
        self.sandbox = sandbox

    async def place(self, contents: Mapping[str, bytes]) -> None:
        """Write files by absolute path, before any code of the candidate runs.

        Raises:
            EvaluationError, SandboxLost: the files cannot be written. No verdict is possible.
        """
        try:
            with self._bench.waiting("files of the evaluation", "evaluator"):
                for path, content in contents.items():
                    await self.sandbox.write_file(path, content)
        except (OSError, SandboxCallFailed) as exc:
            raise EvaluationError(f"the evaluator's sandbox does not take its files: {exc}") from exc

    async def place_drivers(self, *modules: str) -> None:
        """Write these programs of `drivers`. Raises the same errors as `place`."""
        folder = files("prorl_trio.tasks.grading") / "drivers"
        names = [f"{each}.py" for each in ("__init__", *modules)]
        await self.place({f"{DRIVERS_DIR}/{PACKAGE}/{name}": (folder / name).read_bytes() for name in names})

    def charged_to_agent(self, limit_s: float) -> AbstractContextManager[None]:
        """Display a wait for the candidate's code, which may use `limit_s` of its own time.

        The time belongs to the policy and is not charged to a budget: the tests' own limits bound it.
        """
        at_most_s = backstop_s(limit_s) + BACKSTOP_LEAST_S
        return self._bench.standing_in_line("the candidate's program", "agent_budget", at_most_s=at_most_s)

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        max_stdout_bytes: int = MAX_OUTPUT_BYTES,
    ) -> Run:
        """Run a candidate's program, which may use `timeout_s` of its own time.

        Raises:
            SandboxLost: the cause lies outside the sandbox. No verdict is possible.
            EvaluationError: the first program is missing, or the machine had no CPU for it. No verdict is possible.
            ProgramKilled: it was killed, or may have been slowed down by the machine's load, and another try is left.
        """
        started_s = trio.current_time()
        stdout = _Capture(max_stdout_bytes) if max_stdout_bytes > MAX_OUTPUT_BYTES else None
        try:
            with self.charged_to_agent(timeout_s):
                result = await self.sandbox.exec(
                    argv,
                    timeout_s=backstop_s(timeout_s),
                    stdin=stdin,
                    cwd=cwd,
                    env=env,
                    max_output_bytes=MAX_OUTPUT_BYTES,
                    on_output=None if stdout is None else stdout.take,
                    own_limit_s=timeout_s,
                    lenient=not self._last_try,
                )
        except _TooLong:
            return Run(ended="exited", exit_code=0, stdout_is_whole=False, seconds=trio.current_time() - started_s)
        except SandboxLost as exc:
            if not exc.from_inside:
                raise
            return Run(ended="lost", stderr=str(exc), seconds=trio.current_time() - started_s)
        except (OSError, SandboxCallFailed) as exc:
            if isinstance(exc, OSError) and not self._has_run:
                raise EvaluationError(f"the evaluator's sandbox cannot run {argv[0]}: {exc}") from exc
            return Run(ended="refused", stderr=str(exc), seconds=trio.current_time() - started_s)
        self._has_run = True
        self.check_end(argv[0], result)
        if result.timed_out and not result.breach and 0.0 < result.own_s <= timeout_s:
            raise EvaluationError(
                f"the machine had no CPU for {argv[0]}: it could use {result.own_s:.1f} s in {result.duration_s:.0f} s"
            )
        return Run(
            ended="timed_out" if result.timed_out else "exited",
            exit_code=result.exit_code,
            stdout=result.stdout if stdout is None else bytes(stdout.output),
            stdout_is_whole=stdout is not None or not result.stdout_dropped_bytes,
            stderr=result.stderr[-MAX_STDERR_BYTES:].decode(errors="replace"),
            seconds=result.duration_s,
            is_late=not result.timed_out and result.own_s > timeout_s,
        )

    def check_end(self, program: str, result: ExecResult) -> None:
        """Raise `ProgramKilled` if the program was killed, no limit explains it, and another try is left.

        Likewise raise `ProgramLate` if it had to be ended and was idle for most of its time.
        """
        if self._last_try:
            return
        check_end(program, result)
        if result.timed_out and result.cpu_s < result.own_s / 2:
            raise ProgramLate(f"{program} was too slow, with {result.cpu_s:.1f} s of CPU in {result.own_s:.1f} s")

    def check_late(self, is_late: bool, what: str) -> bool:
        """Return whether a correct result came too late. Raises ProgramLate if so and another try is left."""
        if is_late and not self._last_try:
            raise ProgramLate(f"{what} is right, and late")
        return is_late

    async def read_back(self, path: str, *, max_bytes: int) -> bytes | None:
        """Return a file written by the candidate's programs; None if it is missing or too long.

        Raises:
            SandboxLost: the cause lies outside the sandbox. No verdict is possible.
        """
        try:
            return await self.sandbox.read_file(path, max_bytes=max_bytes)
        except SandboxLost as exc:
            if not exc.from_inside:
                raise
        except (OSError, ValueError, SandboxCallFailed):
            pass
        return None

    @asynccontextmanager
    async def open_driver(self, name: str, *arguments: str) -> AsyncIterator[Program]:
        """Run a driver as a line-based dialogue. Each request states the time limit of its answer."""
        argv, is_lenient = driver_argv(name, *arguments), not self._last_try
        async with self.sandbox.open_program(argv, timeout_s=DRIVER_TIMEOUT_S, lenient=is_lenient) as program:
            yield program


class _TooLong(Exception):
    """A program has written more than the limit."""


class _Capture:
    """A program's stdout that is too long for an `ExecResult`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.output = bytearray()

    def take(self, stream: str, data: bytes) -> None:
        """Append the next piece.

        Raises:
            _TooLong: the total exceeds `max_bytes`. That ends the program.
        """
        if stream == "stdout":
            self.output += data
            if len(self.output) > self._max_bytes:
                raise _TooLong


def backstop_s(limit_s: float) -> float:
    """Return the wall time after which a program with a limit of `limit_s` of its own time is ended."""
    return max(BACKSTOP_FACTOR * limit_s, BACKSTOP_LEAST_S)


def check_end(program: str, result: ExecResult) -> None:
    """Raise `ProgramKilled` if the program was killed, and no limit of its sandbox explains it."""
    if result.exit_code == KILLED and not result.breach:
        raise ProgramKilled(f"{program} was killed, and no limit of its sandbox says why")


def driver_argv(name: str, *arguments: str, isolated: bool = True, entry: str = "main") -> list[str]:
    """Return the command line of a driver.

    It uses isolated Python, so that nothing next to the candidate's file is imported. Tests of a repository may need
    Python's environment variables; then only the current directory is removed from the path.
    """
    find = f"import sys; sys.path[:] = [{DRIVERS_DIR!r}, *filter(None, sys.path)]; from {PACKAGE}.{name} import {entry}"
    return ["python3", *(["-I"] if isolated else []), "-c", f"{find}; del sys.path[0]; {entry}()", *arguments]


@asynccontextmanager
async def open_verifier(bench: Bench, spec: SandboxSpec, *, last_try: bool = True) -> AsyncIterator[Verifier]:
    """Open a sandbox for the evaluation of an answer.

    Raises:
        SandboxUnavailable: it does not start. No verdict is possible.
    """
    async with bench.open_sandbox(spec) as sandbox:
        yield Verifier(bench, sandbox, last_try=last_try)


class Action(Protocol[T_co]):
    """A part of an evaluation. On the last try, a kill or a time-out of a program counts as its result."""

    async def __call__(self, *, last_try: bool) -> T_co:
        """Return its result. Raises ProgramKilled unless it is the last try."""


async def again_if_killed(context: RolloutContext, action: Action[T_co]) -> T_co:
    """Return the result of `action`, with a second try if an unexplained kill cut the first one short.

    The second try also happens if the machine's load may have slowed a program. It then runs alone: this process makes
    only one such try at a time, and the wait is not charged to a budget.
    """
    try:
        return await action(last_try=False)
    except ProgramLate as exc:
        context.log_evaluation(f"{exc}: once more, alone\n")
        is_late = True
    except ProgramKilled as exc:
        context.log_evaluation(f"{exc}: once more\n")
        is_late = False
    if not is_late:
        return await action(last_try=True)
    async with _alone(context):
        return await action(last_try=True)


_TURN: Final = trio.lowlevel.RunVar[trio.Lock]("grading_alone")


@asynccontextmanager
async def _alone(context: RolloutContext) -> AsyncIterator[None]:
    """Hold the turn of this process' exclusive tries. If no turn comes in time, the try runs concurrently.

    Otherwise programs that idle until their time-out would keep other answers from a verdict.
    """
    try:
        turn = _TURN.get()
    except LookupError:
        turn = trio.Lock()
        _TURN.set(turn)
    with context.standing_in_line("a turn to be graded alone", "evaluator", at_most_s=ALONE_TIMEOUT_S):
        with trio.move_on_after(ALONE_TIMEOUT_S) as patience:
            await turn.acquire()
    try:
        yield
    finally:
        if not patience.cancelled_caught:
            turn.release()
