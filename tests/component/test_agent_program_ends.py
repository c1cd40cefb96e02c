"""How a program's end is judged: after a turn, whatever becomes of it may be the policy's doing."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import trio.lowlevel

from prorl_trio.agent.context import Address, RolloutContext
from prorl_trio.agent.program import run_program
from prorl_trio.agent.said import Question, Said
from prorl_trio.agent.style import PLAIN
from prorl_trio.types.errors import AgentProgramFailed
from prorl_trio.types.models import AgentProgram, ChatMessage

pytestmark = pytest.mark.timeout(30)

STEP = [ChatMessage(role="user", content="Go on.")]
WELL = SimpleNamespace(exit_code=0, stdout=b"", stderr=b"")
BROKEN = SimpleNamespace(exit_code=127, stdout=b"", stderr=b"no such program")
ASK = Question(messages=[Said("user", "What is 6 * 7?")])


async def answered(gateway):
    await gateway.ask(ASK)
    return WELL


async def silent(_gateway):
    await trio.lowlevel.checkpoint()
    return WELL


async def broken(_gateway):
    await trio.lowlevel.checkpoint()
    return BROKEN


async def gone(_gateway):
    await trio.lowlevel.checkpoint()
    raise OSError("no such file: python3")


async def full(_gateway):
    """As `mktemp` of a preset's folder ends where the disk is full."""
    await trio.lowlevel.checkpoint()
    return SimpleNamespace(exit_code=1, stdout=b"", stderr=b"no space left on device")


async def run(rig, *runs, program=None):
    """Run a program once for each of `runs`, which get the gateway in the program's place; return the context."""
    gateways, left = [], list(runs)

    @asynccontextmanager
    async def serve(gateway, _sandbox):
        gateways.append(gateway)
        yield Address("http://localhost", "")

    async def execute(_argv, **_how):
        return await left.pop(0)(gateways[0])

    async def after_answer(_answer):
        await trio.lowlevel.checkpoint()
        return STEP if left else None

    rig.says = ["It is 41."]
    rig.resources.serve_gateway = serve
    context = RolloutContext(spec=rig.spec(max_turns=2), resources=rig.resources)
    context.sandbox = SimpleNamespace(exec=execute)
    await run_program(context, program or AgentProgram(command=["x"]), STEP, PLAIN, after_answer)
    return context


@pytest.mark.parametrize("second", [silent, broken, gone])
async def test_a_program_that_fails_in_a_later_instruction_voids_no_rollout(rig, second):
    """The policy was in the sandbox before: it could break the program, or use up the turns."""
    async with rig.open():
        context = await run(rig, answered, second)
    assert (context.stop_reason, context.answer, len(context.turns)) == ("program_error", None, 1)


@pytest.mark.parametrize("first", [silent, broken, gone])
async def test_a_program_that_fails_before_any_turn_is_infrastructure(rig, first):
    async with rig.open():
        with pytest.raises(AgentProgramFailed):
            await run(rig, first)


async def test_a_preset_that_cannot_be_set_up_is_infrastructure_with_its_reason(rig):
    async with rig.open():
        with pytest.raises(AgentProgramFailed, match=r"'pi' cannot be set up: no folder .*no space left on device"):
            await run(rig, full, program=AgentProgram(preset="pi"))
