"""Which shell a policy's cells run in."""

from __future__ import annotations

import pytest
import trio

from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.registry import ProcessProvider
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.tools import IpythonTool
from prorl_trio.types.errors import SandboxUnavailable


async def test_the_named_kernel_runs_the_cell(tmp_path):
    pytest.importorskip("ipykernel")
    with trio.fail_after(120):
        async with ProcessProvider(tmp_path).open_sandbox(SandboxSpec()) as sandbox:
            code = {"code": "type(get_ipython()).__name__"}
            own = await IpythonTool().call(code, sandbox, timeout_s=60)
            named = await IpythonTool(kernel="python3").call(code, sandbox, timeout_s=60)
    assert "ZMQ" not in own.text
    assert "ZMQInteractiveShell" in named.text


async def test_a_kernel_that_is_not_there_is_no_fault_of_the_policy():
    async with FakeProvider().open_sandbox(SandboxSpec()) as sandbox:
        with pytest.raises(SandboxUnavailable, match="no-such-kernel"):
            await IpythonTool(kernel="no-such-kernel").call({"code": "1"}, sandbox, timeout_s=5)
