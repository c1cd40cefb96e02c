"""A sandbox of the evaluator's own: what it puts there, what the candidate does there, and whose doing an end is.

Before the candidate's code runs, nothing in this sandbox is the policy's doing: an error is infrastructure, and there
is no verdict. Once it runs, its time, its crash and the end of the sandbox from inside are the candidate's: the test
has failed. The end of the sandbox from outside remains an error, without a verdict.

Who killed a program (SIGKILL) that ran into no limit cannot be told: the candidate, or the machine, out of memory. So
the answer is graded once more, in fresh sandboxes; who is killed there as well has failed.
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

    from ipc.sandbox_calls import ExecResult
    from prorl_trio.agent.activity import Charge
    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.sandbox.program import Program
    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.sandbox.sandbox import Sandbox

__all__ = [
    "DRIVERS_DIR",
    "KILLED",
    "Bench",
    "ProgramKilled",
    "Run",
    "Verifier",
    "again_if_killed",
    "check_end",
    "driver_argv",
    "open_verifier",
]

DRIVERS_DIR: Final = "/tmp/grading"
"""The folder of the drivers, inside."""
PACKAGE: Final = "grading_drivers"

KILLED: Final = 128 + signal.SIGKILL
MAX_OUTPUT_BYTES: Final = 2 * 1024 * 1024
MAX_STDERR_BYTES: Final = 16 * 1024

End = Literal["exited", "timed_out", "lost", "refused"]

T_co = TypeVar("T_co", covariant=True)


class ProgramKilled(Exception):
    """A program of the evaluation was killed, and no limit of its sandbox says why."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a program of the candidate's. `refused`: the sandbox lives, but does not start it any more."""

    ended: End
    exit_code: int | None = None
    stdout: bytes = b""
    stdout_is_whole: bool = True
    stderr: str = ""
    seconds: float = 0.0


class Bench(Protocol):
    """A source of sandboxes and time for an evaluation. A node's job has them in its `RolloutContext`."""

    def open_sandbox(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """Open a sandbox that nobody has used; on leaving the block nothing of it is left.

        Raises:
            SandboxUnavailable: it does not start.
        """

    def waiting(self, what: str, charge: Charge) -> AbstractContextManager[None]:
        """Show, while the block runs, that `what` is waited for, and charge the time."""

    def stage_left_s(self) -> float:
        """Return the seconds that are left for the evaluation; infinite without a limit."""


class Verifier:
    """A sandbox in which the agent has never been. Made by `open_verifier`."""

    def __init__(self, bench: Bench, sandbox: Sandbox, *, last_try: bool) -> None:
        self._bench = bench
        self._last_try = last_try
        self._has_run = False
        self.sandbox = sandbox

    async def place(self, contents: Mapping[str, bytes]) -> None:
        """Write files, by absolute path, before anything of the candidate runs.

        Raises:
            EvaluationError: that is not possible. There is no verdict.
        """
        try:
            with self._bench.waiting("files of the evaluation", "evaluator"):
                for path, content in contents.items():
                    await self.sandbox.write_file(path, content)
        except (OSError, SandboxCallFailed, SandboxLost) as exc:
            raise EvaluationError(f"the evaluator's sandbox does not take its files: {exc}") from exc

    async def place_drivers(self) -> None:
        """Write the programs of `drivers`. Errors as `place`."""
        folder = files("prorl_trio.grading") / "drivers"
        names = [each.name for each in folder.iterdir() if each.name.endswith(".py")]
        await self.place({f"{DRIVERS_DIR}/{PACKAGE}/{name}": (folder / name).read_bytes() for name in names})

    def charged_to_agent(self) -> AbstractContextManager[None]:
        """Show that the candidate's code is waited for: its time is the policy's."""
        return self._bench.waiting("the candidate's program", "agent_budget")

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
    ) -> Run:
        """Run a program of the candidate's; its time is the policy's.

        Raises:
            SandboxLost: not from inside. There is no verdict.
            EvaluationError: it is the first, and is not there. There is no verdict.
            ProgramKilled: it was killed, and there is another try.
        """
        started_s = trio.current_time()
        try:
            with self.charged_to_agent():
                result = await self.sandbox.exec(
                    argv, timeout_s=timeout_s, stdin=stdin, cwd=cwd, env=env, max_output_bytes=MAX_OUTPUT_BYTES
                )
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
        return Run(
            ended="timed_out" if result.timed_out else "exited",
            exit_code=result.exit_code,
            stdout=result.stdout,
            stdout_is_whole=not result.stdout_dropped_bytes,
            stderr=result.stderr[-MAX_STDERR_BYTES:].decode(errors="replace"),
            seconds=result.duration_s,
        )

    def check_end(self, program: str, result: ExecResult) -> None:
        """Raise `ProgramKilled` if the program was killed, no limit says why, and there is another try."""
        if not self._last_try:
            check_end(program, result)

    async def read_back(self, path: str, *, max_bytes: int) -> bytes | None:
        """Return a file that the candidate's programs were to write; None if there is none, or it is too long.

        Raises:
            SandboxLost: not from inside. There is no verdict.
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
    async def open_driver(self, name: str, *arguments: str, timeout_s: float) -> AsyncIterator[Program]:
        """Run a driver to talk to, by lines."""
        async with self.sandbox.open_program(driver_argv(name, *arguments), timeout_s=timeout_s) as program:
            yield program


def check_end(program: str, result: ExecResult) -> None:
    """Raise `ProgramKilled` if the program was killed, and no limit of its sandbox says why."""
    if result.exit_code == KILLED and not result.breach:
        raise ProgramKilled(f"{program} was killed, and no limit of its sandbox says why")


def driver_argv(name: str, *arguments: str, isolated: bool = True, entry: str = "main") -> list[str]:
    """Return the command line of a driver.

    It is run by isolated Python, so that nothing beside the candidate's file is imported; unless a repository's tests
    need what its environment says to Python. Then, too, the present directory is not on its path.
    """
    find = f"import sys; sys.path[:] = [{DRIVERS_DIR!r}, *filter(None, sys.path)]; from {PACKAGE}.{name} import {entry}"
    return ["python3", *(["-I"] if isolated else []), "-c", f"{find}; del sys.path[0]; {entry}()", *arguments]


@asynccontextmanager
async def open_verifier(bench: Bench, spec: SandboxSpec, *, last_try: bool = True) -> AsyncIterator[Verifier]:
    """Open a sandbox for the evaluation of an answer.

    Raises:
        SandboxUnavailable: it does not start. There is no verdict.
    """
    async with bench.open_sandbox(spec) as sandbox:
        yield Verifier(bench, sandbox, last_try=last_try)


class Action(Protocol[T_co]):
    """A piece of an evaluation. At the last try it takes the kill of a program as it takes any other end of it."""

    async def __call__(self, *, last_try: bool) -> T_co:
        """Return what it comes to. Raises ProgramKilled, unless it is the last try."""


async def again_if_killed(context: RolloutContext, action: Action[T_co]) -> T_co:
    """Return what `action` comes to, at a second try if the first was cut short by a kill that nothing explains."""
    try:
        return await action(last_try=False)
    except ProgramKilled as exc:
        context.log_evaluation(f"{exc}: once more\n")
    return await action(last_try=True)
