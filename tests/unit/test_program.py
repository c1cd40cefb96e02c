from __future__ import annotations

from contextlib import nullcontext

import pytest
import trio

from prorl_ipc.sandbox_calls import Exec, ExecInputTaken, ExecResult
from prorl_trio.sandbox.program import Program
from prorl_trio.types.errors import SandboxLost

ENDED = ExecResult(exit_code=0, stdout=b"", stderr=b"", duration_s=0.0)


@pytest.mark.parametrize(
    ("end", "error"),
    [(ENDED, None), (FileNotFoundError("no program"), FileNotFoundError), (None, SandboxLost)],
)
async def test_a_piece_that_nobody_takes_waits_for_the_programs_end_at_most(autojump_clock, end, error):
    async def call(request, reply_type, timeout_s, on_output=None):
        if not isinstance(request, Exec):
            await trio.sleep(timeout_s)
            return ExecInputTaken(wanted=False)
        await trio.sleep(1)
        if end is ENDED:
            return ENDED
        raise end or SandboxLost("gone")

    program = Program(call, Exec(argv=["true"], timeout_s=600, input_id=1), 600, nullcontext)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(program.serve)
        for _ in range(2):
            with pytest.raises(trio.BrokenResourceError):
                await program.send(b"x")
        assert trio.current_time() == pytest.approx(1, abs=0.1)
        for ask in (program.wait, program.receive_some):
            with pytest.raises(error) if error else nullcontext():
                await ask()
