"""Calls between tags with one argument in each: Qwen3-Coder's, GLM's, and DeepSeek's DSML. Values are not quoted."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from prorl_trio.chat.families.call_values import (
    Malformed,
    Tools,
    add_once,
    checked_name,
    failed_call,
    skip_space,
    typed_value,
)
from prorl_trio.chat.families.syntax import CallSyntax, read_tagged_json
from prorl_trio.types.models import ToolCall

__all__ = ["GLM_XML", "QWEN_XML", "read_dsml"]


class _Tags(NamedTuple):
    """A dialect of XML-like calls. `key` and `close` consume the space after them; `value_end` ends a value.

    A value may contain anything, its own end tag included: it ends at the first one that something sensible follows.
    `call_end` may be a group of several tags; `stray` is where reading goes on after a broken call.
    """

    head: re.Pattern[str]
    key: re.Pattern[str]
    value_end: re.Pattern[str]
    call_end: re.Pattern[str]
    stray: re.Pattern[str]
    expected: str
    trims_newlines: bool


_QWEN = _Tags(
    head=re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]{1,200})>\s*"),
    key=re.compile(r"<parameter=([^<>\n]{1,200})>"),
    value_end=re.compile(
        r"</parameter>\s*(?=<parameter=|</function>|</tool_call>)"
        r"|(?=\n<parameter=|\n</function>\s*(?:</tool_call>\s*)?(?:<tool_call>|<function=|\Z))"
    ),
    call_end=re.compile(r"</function>(?:\s*</tool_call>)?|</tool_call>"),
    stray=re.compile(r"</tool_call>|(?=<tool_call>)"),
    expected="<tool_call>\n<function=tool>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>",
    trims_newlines=True,
)
_GLM = _Tags(
    head=re.compile(r"<tool_call>\s*([^<>\s{]{1,200})\s*"),
    key=re.compile(r"<arg_key>([^<>\n]{1,200})</arg_key>\s*<arg_value>"),
    value_end=re.compile(r"</arg_value>\s*(?=<arg_key>|</tool_call>)|(?=</tool_call>\s*(?:<tool_call>|\Z))"),
    call_end=re.compile(r"</tool_call>"),
    stray=re.compile(r"</tool_call>|(?=<tool_call>)"),
    expected="<tool_call>tool\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>",
    trims_newlines=False,
)
_DSML = _Tags(
    head=re.compile(r'<｜DSML｜ ?invoke\s+name="([^"\n]{1,200})"\s*(?:>\s*|(?=/>))'),
    key=re.compile(r'<｜DSML｜ ?parameter\s+name="([^"\n]{1,200})"(?:\s+string="(?P<string>true|false)")?\s*>'),
    value_end=re.compile(r"</｜DSML｜ ?parameter>\s*(?=<｜DSML｜ ?parameter|</｜DSML｜ ?invoke)"),
    call_end=re.compile(r"</｜DSML｜ ?invoke>|/>"),
    stray=re.compile(r"</｜DSML｜ ?\w*calls>|(?=<｜DSML｜ ?invoke)"),
    expected='<｜DSML｜invoke name="tool">\n<｜DSML｜parameter name="key" string="true">value</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>",
    trims_newlines=False,
)


def _read_qwen(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    if text.startswith("{", skip_space(text, start + len("<tool_call>"))):
        return read_tagged_json(text, start, tools)
    return _read(_QWEN, text, start, tools)


def _read_glm(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    if text.startswith("{", skip_space(text, start + len("<tool_call>"))):
        return read_tagged_json(text, start, tools)
    return _read(_GLM, text, start, tools)


def read_dsml(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    """Read the call whose `<｜DSML｜invoke` is at `start`; see `CallSyntax.read`."""
    return _read(_DSML, text, start, tools)


def _read(tags: _Tags, text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    head = tags.head.match(text, start)
    name = head[1].strip() if head else ""
    try:
        if head is None:
            raise Malformed("the call does not begin with the name of a tool")
        arguments, end = _arguments(tags, text, head.end(), tools, name)
        checked_name(name, tools)
    except Malformed as exc:
        stray = tags.stray.search(text, head.end() if head else start + 1)
        end = stray.end() if stray else len(text)
        return [failed_call(text[start:end], str(exc), tags.expected, name)], end
    return [ToolCall(name=name, arguments=arguments, raw=text[start:end])], end


def _arguments(tags: _Tags, text: str, position: int, tools: Tools, name: str) -> tuple[dict[str, Any], int]:
    """Return the arguments that begin at `position`, and where the call ends. Raises Malformed."""
    arguments: dict[str, Any] = {}
    while (key := tags.key.match(text, position)) is not None:
        end = tags.value_end.search(text, key.end())
        parameter = key[1].strip()
        if end is None:
            raise Malformed(f"the value of {parameter!r} does not end")
        value = text[key.end() : end.start()]
        if tags.trims_newlines:
            value = value.removeprefix("\n").removesuffix("\n")
        stated = key.groupdict().get("string")
        as_tools = tools if stated is None else _stated(name, parameter, stated == "true")
        add_once(arguments, parameter, typed_value(value, as_tools, name, parameter))
        position = skip_space(text, end.end())
    close = tags.call_end.match(text, position)
    if close is None:
        seen = text[position : position + 20]
        raise Malformed(f"unexpected text in the call: {seen!r}" if seen else "the call does not end")
    return arguments, close.end()


def _stated(name: str, key: str, is_string: bool) -> Tools:
    """Return a schema for one parameter whose type the call itself tells."""
    return {name: {"properties": {key: {"type": "string"} if is_string else {}}}}


QWEN_XML = CallSyntax(re.compile(r"<tool_call>|<function="), _read_qwen, closing="</tool_call>")
"""Qwen3-Coder, Qwen3.5 and later: `<function=tool><parameter=key>value</parameter></function>` in `<tool_call>`."""

GLM_XML = CallSyntax(re.compile("<tool_call>"), _read_glm, closing="</tool_call>")
"""GLM-4.5 and later: `<tool_call>tool<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""
