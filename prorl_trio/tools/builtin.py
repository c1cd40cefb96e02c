"""The tools every handler may offer: `ipython`, `bash` and `finish`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from prorl_trio.errors import HandlerError
from prorl_trio.tools.base import Observation, Tool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ipc.wire import BashResult, CellResult
    from prorl_trio.sandbox.provider import Sandbox

__all__ = ["BashTool", "FinishTool", "IpythonTool", "render_bash", "render_cell"]


def _text_argument(arguments: Mapping[str, Any], key: str) -> str | None:
    value = arguments[key]
    return value if isinstance(value, str) else None


def _need(sandbox: Sandbox | None, tool: str) -> Sandbox:
    if sandbox is None:
        raise HandlerError(f"the tool {tool!r} needs a sandbox, but this handler opens none")
    return sandbox


def render_cell(result: CellResult, timeout_s: float) -> str:
    """What the policy reads after a cell: output, the last value, images by name, the traceback, and what was lost."""
    parts = [part.rstrip("\n") for part in (result.stdout, result.stderr) if part.strip()]
    if result.result is not None:
        parts.append(result.result)
    images = [display for display in result.displays if display.mime.startswith("image/")]
    parts += [f"[{image.mime}, {image.size_bytes} bytes]" for image in images]
    if result.dropped_displays:
        parts.append(f"[{result.dropped_displays} more were not kept]")
    if result.error is not None:
        parts.append(result.error.traceback.rstrip("\n") or f"{result.error.name}: {result.error.value}")
    if result.breach_text:
        parts.append(f"[{result.breach_text}]")
    if result.timed_out:
        parts.append(f"[stopped after {timeout_s:g} s]")
    if result.restarted:
        parts.append("[the shell was restarted; its variables are gone]")
    return "\n".join(parts) or "[no output]"


def render_bash(result: BashResult, timeout_s: float) -> str:
    """What the policy reads after a command: output, the exit code if not 0, and whether state was lost."""
    parts = [result.output.rstrip("\n")] if result.output.strip() else []
    if result.breach_text:
        parts.append(f"[{result.breach_text}]")
    if result.timed_out:
        parts.append(f"[stopped after {timeout_s:g} s]")
    elif result.exit_code:
        parts.append(f"[exit code {result.exit_code}]")
    if result.restarted:
        parts.append("[the shell was restarted; its variables are gone]")
    return "\n".join(parts) or "[no output]"


class IpythonTool(Tool):
    """Runs a cell in the sandbox's persistent IPython shell."""

    name = "ipython"
    description = "Run Python code in a persistent IPython shell and see its output and the value of its last line."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The Python code to run."}},
        "required": ["code"],
    }

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """Raises SandboxLost when the sandbox is gone."""
        code = _text_argument(arguments, "code")
        if code is None:
            return Observation(text="Error: the argument 'code' must be a string.")
        result = await _need(sandbox, self.name).ipython(code, timeout_s=timeout_s)
        return Observation(text=render_cell(result, timeout_s))


class BashTool(Tool):
    """Runs a command in the sandbox's persistent bash."""

    name = "bash"
    description = "Run a command in a persistent bash shell and see its output."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "The command to run."}},
        "required": ["command"],
    }

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """Raises SandboxLost when the sandbox is gone."""
        command = _text_argument(arguments, "command")
        if command is None:
            return Observation(text="Error: the argument 'command' must be a string.")
        result = await _need(sandbox, self.name).bash(command, timeout_s=timeout_s)
        return Observation(text=render_bash(result, timeout_s))


class FinishTool(Tool):
    """Ends the episode with an answer."""

    name = "finish"
    description = "Give the final answer and end the task."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The final answer, without explanation."}},
        "required": ["answer"],
    }

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """Never fails; any JSON value is taken as its text."""
        del sandbox, timeout_s
        return Observation(text="The task has ended.", answer=str(arguments["answer"]))
