"""Parsing of an assistant's text: reasoning, content and tool calls. Total functions: no input makes them raise.

The syntax of calls differs between families (see `families`). The default is the syntax of ChatML models:
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times. An unreadable call is not dropped: it
becomes a `ToolCall` with an `error` to show to the policy.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING

from prorl_trio.chat.families.call_values import Malformed, decode_json, read_call, skip_space
from prorl_trio.chat.families.syntax import HERMES, CallSyntax, SpokenTurn
from prorl_trio.types.models import ToolCall

if TYPE_CHECKING:
    from collections.abc import Collection

    from prorl_trio.chat.families.call_values import Tools

MAX_TOOL_CALLS_PER_TURN = 64
"""Limit of calls parsed in one turn. The text after them becomes one more call, with an error."""

MAX_TAGS_PER_TURN = 500
"""Limit of opening tags read in one turn. The text after them becomes one more call, with an error."""

_EXPECTED = 'a JSON object {"name": "<tool>", "arguments": {...}}'
_FENCE_LINE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([^`\r\n]*)\r?$", re.MULTILINE)
MAX_FENCES = 1000
"""Limit of CommonMark fence lines examined in one turn. The text after them is content."""


def parse_tool_calls(text: str, known_tools: Tools) -> tuple[str, list[ToolCall]]:
    """Return the content outside tool calls and reasoning, and the calls in their order. See `parse_turn`."""
    turn = parse_turn(text, known_tools)
    return turn.content, turn.tool_calls


def parse_turn(
    text: str, known_tools: Tools, *, syntax: CallSyntax = HERMES, opened_thinking: bool = False
) -> SpokenTurn:
    """Parse an assistant's text. Never raises.

    It is lenient only if the text has one possible meaning: arguments given as a JSON string, `parameters` instead of
    `arguments`, raw newlines inside strings, or a missing `</tool_call>` after a complete object. If the text contains
    no call in the family's syntax, a bare object counts that is the whole text or in a fenced block, and names one of
    `known_tools`.

    Args:
        text: without the tokens that structure the dialogue.
        known_tools: the names a call may have; any other name is an error that lists these.
        syntax: the family's syntax of calls and reasoning.
        opened_thinking: the prompt ended with the opening tag of reasoning, so the text starts inside it.
    """
    reader = _TurnReader(text, syntax)
    if opened_thinking and syntax.thoughts:
        reader.think(next(iter(syntax.thoughts)), skip_space(text, 0))
    while (opened := reader.thought_at(start := skip_space(text, reader.position))) is not None:
        reader.think(opened, start)
    rest = text[reader.position :]
    whole = syntax.whole_turn(rest, known_tools) if syntax.whole_turn is not None else None
    if whole is not None:
        return _limited(whole._replace(reasoning="\n".join([*reader.reasoning, whole.reasoning]).strip()))
    if (call := _bare_call(rest, known_tools)) is not None:  # even if its strings contain tags
        return SpokenTurn("", "\n".join(reader.reasoning), [call])
    calls: list[ToolCall] = []
    tags = 0
    while (match := reader.next_tag()) is not None:
        tags += 1
        if tags > MAX_TAGS_PER_TURN:
            calls.append(_unread(text[match.start() :]))
            reader.position = len(text)
        elif match[0] in syntax.thoughts:
            reader.think(match[0], match.start())
        elif len(calls) >= MAX_TOOL_CALLS_PER_TURN:
            calls.append(too_many_calls(text[match.start() :]))
            reader.position = len(text)
        else:
            found, position = syntax.read(text, match.start(), known_tools)
            if found is None:
                reader.content.append(text[match.start() : position])
            calls += found or []
            reader.position = position
    said = "".join([*reader.content, text[reader.position :]]).strip()
    if not calls:
        said, calls = _parse_fences(said, known_tools)
    return _limited(SpokenTurn(said, "\n".join(reader.reasoning), calls))


class _TurnReader:
    """A position in a turn's text, with the content and the reasoning found before it."""

    def __init__(self, text: str, syntax: CallSyntax) -> None:
        self.text = text
        self.position = 0
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self._thoughts = syntax.thoughts
        self._tag = re.compile("|".join([*map(re.escape, syntax.thoughts), syntax.opening.pattern]))

    def next_tag(self) -> re.Match[str] | None:
        """Find the next thought or call; the text up to it is content."""
        match = self._tag.search(self.text, self.position)
        if match is not None:
            self.content.append(self.text[self.position : match.start()])
        return match

    def thought_at(self, start: int) -> str | None:
        """Return the opening tag of reasoning at `start`, if any."""
        for opened in self._thoughts:
            if self.text.startswith(opened, start):
                return opened
        return None

    def think(self, opened: str, start: int) -> None:
        """Read the reasoning at `start`, with or without the `opened` tag there; unclosed, it is all the rest."""
        if self.text.startswith(opened, start):
            start += len(opened)
        close = self._thoughts[opened]
        end = self.text.find(close, start)
        stop = len(self.text) if end < 0 else end
        self.reasoning.append(self.text[start:stop].strip())
        self.position = len(self.text) if end < 0 else end + len(close)


def too_many_calls(raw: str) -> ToolCall:
    """Return the call that represents all calls beyond `MAX_TOOL_CALLS_PER_TURN`; `raw` is their text."""
    error = f"more than {MAX_TOOL_CALLS_PER_TURN} tool calls in one turn; these and what follows were not run"
    return ToolCall(name="", arguments={}, raw=raw, error=error)


def _unread(raw: str) -> ToolCall:
    error = f"more than {MAX_TAGS_PER_TURN} tags in one turn; what follows was not read"
    return ToolCall(name="", arguments={}, raw=raw, error=error)


def _limited(turn: SpokenTurn) -> SpokenTurn:
    """Enforce the limit of calls in a turn even if many are read at once."""
    calls = turn.tool_calls
    if len(calls) <= MAX_TOOL_CALLS_PER_TURN:
        return turn
    kept = [*calls[:MAX_TOOL_CALLS_PER_TURN], too_many_calls(calls[MAX_TOOL_CALLS_PER_TURN].raw)]
    return turn._replace(tool_calls=kept)


def _parse_fences(said: str, known_tools: Collection[str]) -> tuple[str, list[ToolCall]]:
    """Find calls in fenced blocks instead of in the family's syntax. All other text is content."""
    calls: list[ToolCall] = []
    content: list[str] = []
    position, opened = 0, None
    for line in islice(_FENCE_LINE.finditer(said), MAX_FENCES):
        if opened is None:
            opened = line
        elif line[1].startswith(opened[1]) and not line[2]:
            call = None
            if opened[2].strip().lower() in ("", "json") and len(calls) < MAX_TOOL_CALLS_PER_TURN:
                call = _bare_call(said[opened.end() : line.start()], known_tools)
            if call is not None:
                content.append(said[position : opened.start()])
                calls.append(call)
                position = line.end()
            opened = None
    return "".join([*content, said[position:]]).strip(), calls


def _bare_call(text: str, known_tools: Collection[str]) -> ToolCall | None:
    """Return the call that `text` is as a whole, or None: without a tag, broken JSON is not an attempt at a call."""
    text = text.strip()
    if not text.startswith("{"):
        return None
    try:
        value, end = decode_json(text, 0)
    except Malformed:
        return None
    if end != len(text) or not isinstance(value, dict) or not {"arguments", "parameters"} & value.keys():
        return None
    name = value.get("name")
    if not isinstance(name, str) or name not in known_tools:
        return None
    try:
        name, arguments = read_call(value, known_tools)
    except Malformed as exc:
        return ToolCall(name=name, arguments={}, raw=text, error=f"{exc}; expected {_EXPECTED}")
    return ToolCall(name=name, arguments=arguments, raw=text)
