"""A tool: a name, a JSON schema that the policy sees, and the code of its calls."""

from __future__ import annotations

import abc
import logging
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import msgspec
import trio

from prorl_ipc.errors import IpcError
from prorl_ipc.nursery import leaves
from prorl_ipc.portable_text import portable_text
from prorl_trio.chat.families.call_values import Malformed, check_portable
from prorl_trio.sandbox.sandbox import ShellBusy, ShellIdle
from prorl_trio.tools.arguments import read_arguments
from prorl_trio.types.errors import ProrlError, SandboxCallFailed, TooManyDialogues
from prorl_trio.types.models import ToolOutcome, ToolResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.types.models import ToolCall

logger = logging.getLogger(__name__)

_FOR_THE_POLICY: Final = (SandboxCallFailed, TooManyDialogues, ShellBusy, ShellIdle)
"""Errors of the node that describe an action of the policy."""
_OF_THE_MACHINE: Final = (
    ProrlError,
    OSError,
    MemoryError,
    trio.TooSlowError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)
"""Errors that no argument causes, if a tool follows the rules of `Tool.call`: they end the rollout by their cause."""
_MAX_LOGGED_BUGS: Final = 1000
_logged_bugs: set[tuple[str, type[BaseException], str, int]] = set()
"""Bugs whose traceback was logged, by tool and by kind and place of the error. Places are lines of code, so they are
few."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The `text` that the policy sees of a tool call, and the result of the call.

    `answer` is set when the call ends the episode with an answer. `exit_code` is set if a command ended.
    """

    text: str
    answer: str | None = None
    outcome: ToolOutcome = "ok"
    exit_code: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None

    @classmethod
    def refused(cls, why: str, outcome: ToolOutcome = "error") -> Observation:
        """Return the observation of a call that could not be carried out."""
        return cls(text=f"Error: {why}", outcome=outcome)

    @property
    def result(self) -> ToolResult:
        """The part of the observation that is recorded in addition to the text."""
        return ToolResult(outcome=self.outcome, exit_code=self.exit_code)

    def with_text(self, text: str) -> Observation:
        return msgspec.structs.replace(self, text=text)


class Tool(abc.ABC):
    """A tool of the policy. Stateless and shared by all tasks; each call gets its sandbox."""

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
        """Carry out the call and return its result. Mistakes of the policy become observations (`Observation.refused`).

        `arguments` are values of JSON: valid Unicode, integers of 64 bits, finite numbers, at most 64 levels of lists
        and objects. `ToolSet.call` has already converted them by the schema where possible (`read_arguments`). It also
        turns calls that the sandbox refused into observations, so errors of `Sandbox` may propagate.

        Raises:
            RolloutError: infrastructure failed; the rollout ends with the error's cause, and without a reward.
            OSError, MemoryError, trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError: likewise. Catch
                them where the policy's arguments can cause them.
            Exception: any other error is a bug of the tool, and becomes an observation with the outcome `crashed`.
        """


class ToolSet:
    """The tools of one agent, by name, with one limit on the length of results.

    Args:
        tools: the tools, each with a unique name.
        max_observation_chars: limit of the text that the policy sees of a call.
        described: whether the prompt describes the tools; False for a policy that was trained to call them without.
    """

    def __init__(self, tools: Sequence[Tool], *, max_observation_chars: int, described: bool = True) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._max_observation_chars = max_observation_chars
        self._described = described

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tools)

    @property
    def parameters(self) -> dict[str, Mapping[str, Any]]:
        return {name: tool.parameters for name, tool in self._tools.items()}

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas that the chat template shows to the policy, in order; none unless `described`."""
        return [tool.schema() for tool in self._tools.values()] if self._described else []

    def with_more(self, tools: Sequence[Tool]) -> ToolSet:
        """Return a set with further tools, under the same limit."""
        more = [*self._tools.values(), *tools]
        return ToolSet(more, max_observation_chars=self._max_observation_chars, described=self._described)

    async def call(self, call: ToolCall, sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """Carry out one call of the policy.

        Malformed calls, unknown tools, and refusals or failures of the sandbox become observations, not errors. A bug
        of the tool also becomes an observation, with the outcome `crashed`: the policy may have provoked it, and must
        not be able to end its rollout that way. Its traceback is logged the first time.

        Raises:
            RolloutError, OSError, MemoryError, trio.TooSlowError: infrastructure failed, as in `Tool.call`.
        """
        if call.error:
            return self._portable(Observation.refused(call.error, "malformed"))
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(sorted(self._tools))
            unknown = Observation.refused(f"there is no tool {call.name!r}. The tools are: {known}.", "unknown")
            return self._portable(unknown)
        try:
            check_portable(call.arguments)
            arguments = read_arguments(call.arguments, tool.parameters)
            missing = [key for key in tool.parameters.get("required", ()) if key not in arguments]
            if missing:
                return Observation.refused(f"{tool.name} needs the argument {missing[0]!r}.")
            return self._portable(await tool.call(arguments, sandbox, timeout_s=timeout_s))
        except Malformed as exc:
            return Observation.refused(str(exc), "malformed")
        except (Exception, SystemExit) as exc:  # errors that a policy can provoke must not end its rollout
            observation = _observation_of(tool.name, exc)
            if observation is None:
                raise
            return self._portable(observation)

    def _portable(self, observation: Observation) -> Observation:
        """Return the observation in a form that can be shown and recorded, whatever the tool has put into it.

        Raises:
            TypeError, msgspec.ValidationError: it is not an observation.
        """
        text, answer = observation.text, observation.answer
        if not text.isascii() or len(text) > self._max_observation_chars:
            text = self._shorten(portable_text(text))
        if answer is not None and not answer.isascii():
            answer = portable_text(answer)
        return msgspec.convert({**msgspec.structs.asdict(observation), "text": text, "answer": answer}, Observation)

    def _shorten(self, text: str) -> str:
        limit = self._max_observation_chars
        if len(text) <= limit:
            return text
        half = limit // 2
        return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _observation_of(tool: str, error: Exception | SystemExit) -> Observation | None:
    """Return the observation for a call that `error` ended; None if no argument can cause that error."""
    causes = leaves(error)
    if all(isinstance(cause, _FOR_THE_POLICY) or _is_refusal(cause) for cause in causes):
        return Observation.refused(str(causes[0]))
    if any(isinstance(cause, _OF_THE_MACHINE) for cause in causes):
        return None
    _report_bug(tool, causes[0])
    return Observation.refused(
        f"the tool {tool} itself failed ({type(causes[0]).__name__}), maybe with a part of its work done. "
        "Try other arguments.",
        "crashed",
    )


def _is_refusal(error: BaseException) -> bool:
    """Return whether the sandbox refused the call, or the call could not be encoded for the sandbox."""
    return isinstance(error, OSError | ValueError) and isinstance(error.__cause__, IpcError)


def _report_bug(tool: str, bug: BaseException) -> None:
    """Log the traceback of a tool's bug when it first occurs; the metric of tool calls counts every occurrence."""
    file, line = _place_of(bug.__traceback__)
    kind = (tool, type(bug), file, line)
    if kind in _logged_bugs or len(_logged_bugs) >= _MAX_LOGGED_BUGS:
        return
    _logged_bugs.add(kind)
    logger.error(
        "the tool %s has a bug: %s in %s, line %d. The policy got an observation instead. Further ones are only "
        "counted (prorl_tool_calls_total, result `crashed`)",
        tool,
        type(bug).__name__,
        file,
        line,
        exc_info=bug,
    )


def _place_of(trace: TracebackType | None) -> tuple[str, int]:
    place = ("?", 0)
    while trace is not None:
        place = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return place
