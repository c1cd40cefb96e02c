"""A tool: a name, a JSON schema the policy sees, and what happens when it is called."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from ipc.errors import IpcError
from prorl_trio.tools.arguments import read_arguments
from prorl_trio.types.errors import SandboxCallFailed, TooManyDialogues
from prorl_trio.types.models import ToolOutcome, ToolResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.types.models import ToolCall

__all__ = ["Observation", "Tool", "ToolSet"]


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The `text` that the policy sees of a tool call, and how the call went.

    `answer` is set when the call ends the episode with it. `exit_code` is that of a command, if one ended.
    """

    text: str
    answer: str | None = None
    outcome: ToolOutcome = "ok"
    exit_code: int | None = None

    @classmethod
    def refused(cls, why: str, outcome: ToolOutcome = "error") -> Observation:
        """Return the observation of a call that could not be carried out."""
        return cls(text=f"Error: {why}", outcome=outcome)

    @property
    def result(self) -> ToolResult:
        """The part of it that is recorded beside the text."""
        return ToolResult(outcome=self.outcome, exit_code=self.exit_code)

    def with_text(self, text: str) -> Observation:
        """Return the same with another text: a shorter one, say."""
        return msgspec.structs.replace(self, text=text)


class Tool(abc.ABC):
    """A tool of the policy. Stateless and shared by all tasks; the sandbox comes with each call."""

    name: ClassVar[str]
    description: ClassVar[str]
    parameters: ClassVar[Mapping[str, Any]]
    """JSON schema of the arguments object."""

    def schema(self) -> dict[str, Any]:
        """The function description that chat templates render."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }

    @abc.abstractmethod
    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """Do it, and say how it went. What the policy did wrong is an observation (`Observation.refused`).

        Only infrastructure errors are raised, and what `Sandbox` raises: a call that the sandbox did not take becomes
        an observation in `ToolSet.call`, which has also read `arguments` by the schema (`read_arguments`).
        """


class ToolSet:
    """The tools of one agent, by name, with one limit on how long a result may be.

    Args:
        tools: each with a name of its own.
        max_observation_chars: of what the policy sees of a call.
        described: whether the policy is told of them; False for one that was trained to call them without.
    """

    def __init__(self, tools: Sequence[Tool], *, max_observation_chars: int, described: bool = True) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._max_observation_chars = max_observation_chars
        self._described = described

    @property
    def names(self) -> frozenset[str]:
        """Names the policy may call."""
        return frozenset(self._tools)

    @property
    def parameters(self) -> dict[str, Mapping[str, Any]]:
        """The JSON schema of each tool's arguments, by the tool's name."""
        return {name: tool.parameters for name, tool in self._tools.items()}

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas that the chat template shows to the policy, in the order of the tools, if any."""
        return [tool.schema() for tool in self._tools.values()] if self._described else []

    async def call(self, call: ToolCall, sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """Carry out one call of the policy.

        A malformed call, an unknown tool, and what the sandbox refuses, or cannot do any more, are observations, not
        errors.
        """
        if call.error:
            return Observation.refused(call.error, "malformed")
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(sorted(self._tools))
            return Observation.refused(f"there is no tool {call.name!r}. The tools are: {known}.", "unknown")
        call = msgspec.structs.replace(call, arguments=read_arguments(call.arguments, tool.parameters))
        missing = [key for key in tool.parameters.get("required", ()) if key not in call.arguments]
        if missing:
            return Observation.refused(f"{tool.name} needs the argument {missing[0]!r}.")
        try:
            observation = await tool.call(call.arguments, sandbox, timeout_s=timeout_s)
        except (SandboxCallFailed, TooManyDialogues) as exc:
            observation = Observation.refused(str(exc))
        except (OSError, ValueError) as exc:
            if not isinstance(exc.__cause__, IpcError | UnicodeEncodeError):  # of the tool's own code
                raise
            observation = Observation.refused(str(exc))
        return observation.with_text(self._shorten(observation.text))

    def _shorten(self, text: str) -> str:
        limit = self._max_observation_chars
        if len(text) <= limit:
            return text
        half = limit // 2
        return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
