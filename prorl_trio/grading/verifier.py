"""A sandbox of the evaluator's own: what it puts there, what the candidate does there, and whose doing an end is.

Before the candidate's code runs, nothing in this sandbox is the policy's doing: an error is infrastructure, and there
is no verdict. Once it runs, its time, its crash and the end of the sandbox from inside are the candidate's: the test
has failed. The end of the sandbox from outside remains an error, without a verdict.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import trio

from prorl_trio.types.errors import EvaluationError, SandboxCallFailed, SandboxLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.sandbox.program import Program
    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.sandbox.sandbox import Sandbox

__all__ = ["DRIVERS_DIR", "Run", "Verifier", "driver_argv", "open_verifier"]

DRIVERS_DIR: Final = "/tmp/grading"
"""The folder of the drivers, inside."""
PACKAGE: Final = "grading_drivers"

MAX_OUTPUT_BYTES: Final = 2 * 1024 * 1024
MAX_STDERR_BYTES: Final = 16 * 1024

End = Literal["exited", "timed_out", "lost", "refused"]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a program of the candidate's. `refused`: the sandbox lives, but does not start it any more."""

    ended: End
    exit_code: int | None = None
    stdout: bytes = b""
    stdout_is_whole: bool = True
    stderr: str = ""
    seconds: float = 0.0


class Verifier:
    """A sandbox in which the agent has never been. Made by `open_verifier`."""

    def __init__(self, context: RolloutContext, sandbox: Sandbox) -> None:
        self._context = context
        self.sandbox = sandbox

    async def place(self, contents: Mapping[str, bytes]) -> None:
        """Write files, by absolute path, before anything of the candidate runs.

        Raises:
            EvaluationError: that is not possible. There is no verdict.
        """
        try:
            with self._context.waiting("files of the evaluation", "evaluator"):
                for path, content in contents.items():
                    await self.sandbox.write_file(path, content)
        except (OSError, SandboxCallFailed, SandboxLost) as exc:
            raise EvaluationError(f"the evaluator's sandbox does not take its files: {exc}") from exc

    async def place_drivers(self) -> None:
        """Write the programs of `drivers`. Errors as `place`."""
        folder = files("prorl_trio.grading") / "drivers"
        names = ("__init__.py", "values.py", "candidate.py", "checker.py", "pytest_run.py", "unittests.py")
        await self.place({f"{DRIVERS_DIR}/{PACKAGE}/{name}": (folder / name).read_bytes() for name in names})

    def charged_to_agent(self) -> AbstractContextManager[None]:
        """Show that the candidate's code is waited for: its time is the policy's."""
        return self._context.waiting("the candidate's program", "agent_budget")

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
            return Run(ended="refused", stderr=str(exc), seconds=trio.current_time() - started_s)
        return Run(
            ended="timed_out" if result.timed_out else "exited",
            exit_code=result.exit_code,
            stdout=result.stdout,
            stdout_is_whole=not result.stdout_dropped_bytes,
            stderr=result.stderr[-MAX_STDERR_BYTES:].decode(errors="replace"),
            seconds=result.duration_s,
        )

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


def driver_argv(name: str, *arguments: str, isolated: bool = True) -> list[str]:
    """Return the command line of a driver.

    It is run by isolated Python, so that nothing beside the candidate's file is imported; unless a repository's tests
    need what its environment says of Python's paths.
    """
    find = f"import sys; sys.path.insert(0, {DRIVERS_DIR!r}); from {PACKAGE}.{name} import main; del sys.path[0]"
    return ["python3", *(["-I"] if isolated else []), "-c", f"{find}; main()", *arguments]


@asynccontextmanager
async def open_verifier(context: RolloutContext, spec: SandboxSpec) -> AsyncIterator[Verifier]:
    """Open a sandbox for the evaluation of an answer.

    Raises:
        SandboxUnavailable: it does not start. There is no verdict.
    """
    async with context.open_sandbox(spec) as sandbox:
        yield Verifier(context, sandbox)
