"""Calls that a policy writes into its text, as JSON objects or code blocks. For models without a call syntax.

The chat layer reads a family's own syntax, and a bare JSON call that is the whole text or a whole block. This module
reads the remaining forms: JSON between sentences, with other names, or broken; and code that should run. An unreadable
attempt becomes a call with an `error`, which shows the policy where it breaks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, Protocol

from prorl_trio.agent.fences import MAX_BLOCKS, fenced_blocks
from prorl_trio.agent.style import PLAIN, AgentStyle
from prorl_trio.chat.families.call_values import Malformed, decode_json, failed_call, read_call
from prorl_trio.chat.tool_calls import MAX_TOOL_CALLS_PER_TURN, too_many_calls
from prorl_trio.types.models import ToolCall

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.agent.fences import FencedBlock
    from prorl_trio.chat.conversation import ParsedTurn
    from prorl_trio.tools import ToolSet

EXPECTED: Final = 'a JSON object {"name": "<tool>", "arguments": {...}}'
_NAMES: Final = ("name", "tool", "tool_name", "action")
_ARGUMENTS: Final = ("arguments", "parameters", "args", "input", "tool_input", "action_input")
_KEYS: Final = "|".join((*_NAMES, *_ARGUMENTS, "function"))
_START: Final = re.compile(rf"""\{{\s*["'](?:{_KEYS})["']\s*:""")
_SAYS_ARGUMENTS: Final = re.compile(rf"""["'](?:{"|".join(_ARGUMENTS)})["']\s*:""")
MAX_BROKEN: Final = 32
"""Limit of broken objects examined in one turn, since each may be as long as the rest."""
MAX_OTHERS: Final = 2000
"""Limit of other objects that are not calls. The text after them becomes one more call, with an error, if it is an
attempt."""


class CallReader(Protocol):
    """Reads calls out of a text. Pure; no text makes it raise."""

    def read(self, text: str) -> list[ToolCall]:
        """Return the calls in their order; a broken call has an `error`.

        The text after `MAX_TOOL_CALLS_PER_TURN` calls becomes one more call, with an error.
        """


class JsonCalls:
    """JSON objects anywhere in a text that name a tool and have arguments.

    The tool is `name`, `tool`, `tool_name` or `action`; the arguments are `arguments`, `parameters`, `args`, `input`,
    `tool_input` or `action_input`; both may be inside `function`. An object without arguments is a call only if it
    names a tool, so that other JSON is ignored.
    """

    def __init__(self, tools: ToolSet) -> None:
        self._parameters = tools.parameters

    def read(self, text: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        position = broken = others = 0
        while (match := _START.search(text, position)) is not None:
            start = match.start()
            if len(calls) >= MAX_TOOL_CALLS_PER_TURN:
                calls.append(too_many_calls(text[start:]))
                break
            if broken >= MAX_BROKEN or others >= MAX_OTHERS:
                if self._is_attempt(text[start:]):
                    what = f"{MAX_BROKEN} broken" if broken >= MAX_BROKEN else f"{MAX_OTHERS} other"
                    error = f"more than {what} JSON objects in one turn; what follows was not read"
                    calls.append(ToolCall(name="", arguments={}, raw=text[start:], error=error))
                break
            try:
                value, position = decode_json(text, start)
            except Malformed as exc:
                broken += 1
                position = self._broken_end(text, match.end())
                raw = text[start:position].rstrip()
                if self._is_attempt(raw):
                    calls.append(failed_call(raw, str(exc), EXPECTED))
                continue
            call = self._call(value, text[start:position])
            if call is None:
                others += 1
            else:
                calls.append(call)
        return calls

    def _call(self, value: dict[str, Any], raw: str) -> ToolCall | None:
        inner = value.get("function")
        if isinstance(inner, dict):
            value = inner
        elif isinstance(inner, str):
            value = {"name": inner, **value}
        named = next((value[key] for key in _NAMES if key in value), None)
        given = [value[key] for key in _ARGUMENTS if key in value]
        if not given and not (isinstance(named, str) and named in self._parameters):
            return None
        try:
            name, arguments = read_call(
                {"name": named, **({"arguments": given[0]} if given else _others(value))}, self._parameters
            )
            self._check_complete(name, arguments)
        except Malformed as exc:
            return failed_call(raw, str(exc), EXPECTED, named if isinstance(named, str) else "")
        return ToolCall(name=name, arguments=arguments, raw=raw)

    def _check_complete(self, name: str, arguments: Mapping[str, Any]) -> None:
        required = self._parameters[name].get("required", ())
        missing = [repr(key) for key in required if key not in arguments]
        if missing:
            raise Malformed(f"the call of {name} has no argument {', '.join(missing)}")

    def _is_attempt(self, raw: str) -> bool:
        """Return whether broken JSON was meant as a call: it has arguments, or names a tool."""
        return _SAYS_ARGUMENTS.search(raw) is not None or any(
            f'"{name}"' in raw or f"'{name}'" in raw for name in self._parameters
        )

    @staticmethod
    def _broken_end(text: str, position: int) -> int:
        """Return where broken JSON ends: at the end of its block, at the next call, or with the text."""
        following = _START.search(text, position)
        end = following.start() if following else len(text)
        fence = text.find("```", position, end)
        return fence if fence >= 0 else end


def _others(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other fields of an object without arguments; `read_call` refuses them unless they are empty."""
    return {key: each for key, each in value.items() if key not in _NAMES and key != "function"}


class CodeBlocks:
    """Fenced blocks of the languages in `runs`: by language, in lower case, the tool and its argument for the code.

    `fenced_blocks` finds the blocks. A block that is not closed, or empty, is a broken attempt. Blocks of other
    languages are text.
    """

    def __init__(self, runs: Mapping[str, tuple[str, str]]) -> None:
        self._runs = runs

    def read(self, text: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for number, block in enumerate(fenced_blocks(text)):
            if number >= MAX_BLOCKS:
                error = f"more than {MAX_BLOCKS} fenced blocks in one turn; what follows was not read"
                calls.append(ToolCall(name="", arguments={}, raw=text[block.start :], error=error))
                break
            if block.language not in self._runs:
                continue
            if len(calls) >= MAX_TOOL_CALLS_PER_TURN:
                calls.append(too_many_calls(text[block.start :]))
                break
            calls.append(self._call(block, text))
        return calls

    def _call(self, block: FencedBlock, text: str) -> ToolCall:
        language, (tool, argument) = block.language, self._runs[block.language]
        wrong = "" if block.closed else f"the ```{language} block is not closed"
        if not block.code.strip():
            wrong = f"the ```{language} block is empty"
        if wrong:
            raw = text[block.start : block.end]
            return failed_call(raw, wrong, f"```{language}, the code, and ``` on a line of its own", tool)
        return ToolCall(name=tool, arguments={argument: block.code}, raw=block.raw)


class WrittenStyle(AgentStyle):
    """Another style, for a policy that writes calls as `reader` reads them.

    If no part of a turn can be parsed, the error is reported to the policy, `max_reflections` times in a rollout; then
    the loop ends with `parse_error`. A final answer in the text takes precedence over a broken attempt.
    """

    def __init__(self, reader: CallReader, base: AgentStyle = PLAIN, *, max_reflections: int = 1) -> None:
        self._reader = reader
        self._base = base
        self.max_reflections = max_reflections

    def implied_calls(self, parsed: ParsedTurn) -> list[ToolCall]:
        calls = self._reader.read(parsed.content)
        only_broken = calls and all(call.error for call in calls)
        return [] if only_broken and self._base.final_answer(parsed) is not None else calls

    def final_answer(self, parsed: ParsedTurn) -> str | None:
        return self._base.final_answer(parsed)

    def nudge(self) -> str:
        return self._base.nudge()
