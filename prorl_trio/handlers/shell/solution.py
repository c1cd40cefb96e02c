"""Solutions that tasks bring: what runs in place of an agent where a task is to be tried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prorl_trio.handlers.shell.payload import HOME
from prorl_trio.types.errors import HandlerError, SandboxCallFailed

if TYPE_CHECKING:
    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.handlers.shell.payload import Environment, Solution

MAX_LOG_BYTES: Final = 64 * 1024


async def run_solution(context: RolloutContext, solution: Solution, environment: Environment) -> None:
    """Run a solution where the agent would work, for as long as the agent might. Its verifier says what it is worth.

    Its output is in the evaluation's log. How it ends does not matter, as in Harbor.

    Raises:
        HandlerError: the sandbox does not take it.
    """
    assert context.sandbox is not None
    config = context.resources.config
    timeout_s = config.budgets.of_agent(context.spec.budgets)
    try:
        for path, file in solution.files.items():
            mode = file.mode | 0o111 if path == solution.script else file.mode
            await context.sandbox.write_file(path, file.content, mode=mode)
        with context.standing_in_line("the solution", "handler", at_most_s=timeout_s):
            result = await context.sandbox.exec(
                ["/bin/sh", "-c", solution.script],
                timeout_s=timeout_s,
                cwd=environment.workdir or HOME,
                env={"DEBIAN_FRONTEND": "noninteractive", **solution.env},
                max_output_bytes=MAX_LOG_BYTES,
            )
    except (OSError, SandboxCallFailed) as exc:
        raise HandlerError(f"{solution.script} cannot be run: {exc}") from exc
    for said in (result.stdout, result.stderr):
        context.log_evaluation(said.decode(errors="replace"))
    if result.timed_out:
        context.log_evaluation(f"{solution.script} had no end in {timeout_s:g} s\n")
