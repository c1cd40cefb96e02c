"""A foreign program as an agent: it works in the task's sandbox, and the gateway answers its calls.

The handler works as with our own loop: its messages are the instruction, its style reads the answer, and it grades the
result. A program runs once per instruction, and again if `after_answer` returns another instruction.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from prorl_trio.agent.gateway import open_gateway
from prorl_trio.agent.mcp import open_servers
from prorl_trio.agents.preset import INSIDE, AgentServer, Start, Started, find_preset
from prorl_trio.types.errors import AgentProgramFailed, HandlerError
from prorl_trio.types.programs import AgentOpened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_ipc.sandbox_calls import ExecResult
    from prorl_trio.agent.context import Address, RolloutContext
    from prorl_trio.agent.gateway import Gateway
    from prorl_trio.agent.style import AfterAnswer, AgentStyle
    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.types.models import AgentProgram, ChatMessage

logger = logging.getLogger(__name__)

MODEL: Final = "policy"
"""The model's name for a program that does not choose one."""
INSTRUCTION: Final = "{instruction}"
MAX_LOG_BYTES: Final = 64 * 1024
PREPARE_S: Final = 30.0
MAX_SAID_CHARS: Final = 2000


def environment(address: Address, model: str) -> dict[str, str]:
    """Return the environment variables from which the SDKs read the address, the key and the model."""
    return {
        "OPENAI_BASE_URL": f"{address.url}/v1",
        "OPENAI_API_BASE": f"{address.url}/v1",
        "OPENAI_API_KEY": address.key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": address.url,
        "ANTHROPIC_API_KEY": address.key,
        "ANTHROPIC_MODEL": model,
        "GOOGLE_GEMINI_BASE_URL": address.url,
        "GEMINI_API_KEY": address.key,
        "GEMINI_MODEL": model,
        "PRORL_GATEWAY": address.url,
        "PRORL_MODEL": model,
    }


async def run_program(
    context: RolloutContext,
    program: AgentProgram,
    messages: Sequence[ChatMessage],
    style: AgentStyle,
    after_answer: AfterAnswer | None = None,
) -> None:
    """Run a program on `messages`; record its requests to the policy, and set `context.answer`.

    Its time is charged to the policy like a tool's, except while the policy answers.

    Raises:
        AgentProgramFailed: it ended, could not be started, or timed out before it requested a turn.
        HandlerError: this node serves no programs, or the task lacks a sandbox.
        Otherwise as `run_agent`.
    """
    sandbox, serve = None if program.external else context.sandbox, context.resources.serve_gateway
    if serve is None or (sandbox is None and not program.external):
        raise HandlerError("a program works in the task's sandbox, and this task has none")
    told = messages
    async with open_gateway(context) as gateway, serve(gateway, sandbox) as address:
        while told:
            asked = len(context.turns)
            if sandbox is None:
                end = await _wait_for_another(context, gateway, program, address, told)
            else:
                end = await _run_once(context, gateway, sandbox, program, address, told)
            if not context.turns:
                raise AgentProgramFailed(end.failure)
            # After a turn, the policy may have caused any failure of the program, also in a later instruction.
            has_asked = len(context.turns) > asked
            # A limit that was reported to the program counts, unless the program ended successfully.
            context.stop_reason = "finished" if end.is_well and has_asked else gateway.limit or "program_error"
            context.answer = end.answer
            if end.answer is None and has_asked and (last := gateway.final_turn()) is not None:
                context.answer = style.final_answer(last)
                if context.answer is None and end.is_well:
                    context.answer = last.content
            told = ()
            if after_answer and context.answer is not None and context.given_reward is None:
                told = await after_answer(context.answer) or ()
    if context.stop_reason == "agent_budget" and not gateway.calls:
        raise AgentProgramFailed("the agent has asked for nothing in all of its time (budgets.agent_s)")


class _End(NamedTuple):
    """The end of an agent's work: whether it reports success, its answer if any, and a message for a failure.

    The message is used if the agent never requested a turn.
    """

    is_well: bool
    answer: str | None
    failure: str


async def _wait_for_another(
    context: RolloutContext,
    gateway: Gateway,
    program: AgentProgram,
    address: Address,
    messages: Sequence[ChatMessage],
) -> _End:
    """Offer an instruction to a remote agent, and wait until the agent has finished."""
    agents = context.resources.external_agents
    if agents is None:
        raise HandlerError("nobody can offer an agent to this node")
    model = program.model or MODEL
    opened = AgentOpened(
        urls={"openai": f"{address.url}/v1", "anthropic": address.url, "google": address.url},
        key=address.key,
        model=model,
        env=environment(address, model),
        messages=list(messages),
        context_tokens=gateway.context_tokens,
    )
    with (
        gateway.budget.tool(f"agent {program.name}") as gateway.program,
        agents.offered(context.spec.job_id, opened, context.turns) as offer,
    ):
        try:
            await offer.finished.wait()
        finally:
            gateway.program = None
    assert offer.finish is not None
    context.given_reward = offer.finish.reward
    return _End(True, offer.finish.text, "the agent elsewhere said that it is done before it had asked for a turn")


async def _run_once(
    context: RolloutContext,
    gateway: Gateway,
    sandbox: Sandbox,
    program: AgentProgram,
    address: Address,
    messages: Sequence[ChatMessage],
) -> _End:
    """Run the program on one instruction to its end, and log its output.

    A program that cannot start counts as failed.
    """
    instruction = "\n\n".join(message.content for message in messages)
    env = {
        name: value.replace("{url}", address.url).replace("{key}", address.key) for name, value in program.env.items()
    }
    env = {**environment(address, program.model or MODEL), **env}
    stdin = b""
    if program.preset:
        try:
            started = await _prepared(context, gateway, sandbox, program, address, instruction)
        except (OSError, ValueError) as exc:
            return _End(False, None, f"the agent {program.preset!r} cannot be set up: {exc}")
        argv, env = list(started.argv), {**env, **started.env, **program.env}
    else:
        argv = [part.replace(INSTRUCTION, instruction) for part in program.command]
        stdin = b"" if argv != list(program.command) else instruction.encode(errors="replace")
    timeout_s = context.resources.config.budgets.of_agent(context.spec.budgets)
    with gateway.budget.tool(f"agent {program.name}") as gateway.program, context.acting():
        try:
            result = await sandbox.exec(
                argv, timeout_s=timeout_s, cwd=program.cwd, env=env, stdin=stdin, max_output_bytes=MAX_LOG_BYTES
            )
        except (OSError, ValueError) as exc:
            return _End(False, None, f"the agent's program {argv[0]!r} cannot be run: {exc}")
        finally:
            gateway.program = None
    context.log_evaluation(f"agent: exit code {result.exit_code}\n{_said(result)}\n")
    await trio.lowlevel.checkpoint()
    return _End(result.exit_code == 0, None, _failure(program, result))


async def _prepared(
    context: RolloutContext,
    gateway: Gateway,
    sandbox: Sandbox,
    program: AgentProgram,
    address: Address,
    instruction: str,
) -> Started:
    """Return how to start a preset's agent, after writing its files into a separate folder. Raises OSError."""
    preset = find_preset(program.preset)
    async with open_servers(context) as servers:  # for a moment, because agents ignore servers that do not start
        mcp = [
            AgentServer(each.name, each.config, [tool.listed_name for tool in each.tools], each.others)
            for each in (servers.servers if servers is not None else ())
        ]
    made = await sandbox.exec(["mktemp", "-d", "/tmp/agent-XXXXXXXX"], timeout_s=PREPARE_S)
    home = made.stdout.decode().strip()
    if made.exit_code or not home:
        raise OSError(f"no folder can be made for it: {_said(made)}")
    started = preset.start(
        Start(
            root=f"{INSIDE}/{preset.name}" if context.is_layered else str(preset.folder) + f"{INSIDE}/{preset.name}",
            home=home,
            url=address.url,
            key=address.key,
            model=program.model or MODEL,
            instruction=instruction,
            context_tokens=gateway.context_tokens,
            output_tokens=context.spec.sampling.max_output_tokens,
            mcp=mcp,
        )
    )
    for path, text in started.files.items():
        await sandbox.write_file(f"{home}/{path}", text.encode())
    return started


def _said(result: ExecResult) -> str:
    return f"{result.stdout.decode(errors='replace')}\n{result.stderr.decode(errors='replace')}".strip()


def _failure(program: AgentProgram, result: ExecResult) -> str:
    said = _said(result)[-MAX_SAID_CHARS:]
    return (
        f"the agent's program {program.name!r} ended with exit code {result.exit_code} before it had asked for a turn; "
        "is it set up to ask where OPENAI_BASE_URL, ANTHROPIC_BASE_URL or GOOGLE_GEMINI_BASE_URL say? "
        f"It said: {said or 'nothing'}"
    )
