"""Calls between tags with one unquoted argument in each: the syntax of Qwen3-Coder and related models."""

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
from prorl_trio.chat.families.syntax import THINK, CallSyntax, read_json_list, read_tagged_json
from prorl_trio.types.models import ToolCall


class _Tags(NamedTuple):
    """A dialect of XML-like calls. `key` and `close` consume the space after them; `value_end` ends a value.

    A value may contain anything, including its own end tag: it ends at the first end tag with a valid continuation.
    `call_end` may be a group of several tags; after a broken call, reading continues at `stray`.
    """

    head: re.Pattern[str]
    key: re.Pattern[str]
    value_end: re.Pattern[str]
    call_end: re.Pattern[str]
    stray: re.Pattern[str]
    expected: str
    trims_newlines: bool


def _functions(opening: str, closing: str) -> _Tags:
    return _Tags(
        head=re.compile(rf"(?:{opening}\s*)?<function=([^<>\n]{{1,200}})>\s*"),
        key=re.compile(r"<parameter=([^<>\n]{1,200})>"),
        value_end=re.compile(
            rf"</parameter>\s*(?=<parameter=|</function>|{closing})"
            rf"|(?=\n<parameter=|\n</function>\s*(?:{closing}\s*)?(?:{opening}|<function=|\Z))"
        ),
        call_end=re.compile(rf"</function>(?:\s*{closing})?|{closing}"),
        stray=re.compile(f"{closing}|(?={opening})"),
        expected=f"{opening}\n<function=tool>\n<parameter=key>\nvalue\n</parameter>\n</function>\n{closing}",
        trims_newlines=True,
    )


def _invocations(prefix: str, stray: str, opening: str = "") -> _Tags:
    """Return tags like `<invoke name="tool">` with a name `prefix`, which must follow `opening` if it is given."""
    quoted = r"""(?:"([^"<>\n]{1,200})"|'([^'<>\n]{1,200})'|([^\s"'<>]{1,200}))\s*>"""
    return _Tags(
        head=re.compile(rf"{opening}<{prefix}invoke\s+name\s*=\s*{quoted}\s*"),
        key=re.compile(rf"<{prefix}parameter\s+name\s*=\s*{quoted}"),
        value_end=re.compile(
            rf"</{prefix}parameter>\s*(?=<{prefix}parameter|</{prefix}invoke)|(?=</{prefix}invoke>\s*(?:{stray}|\Z))"
        ),
        call_end=re.compile(f"</{prefix}invoke>"),
        stray=re.compile(f"{stray}|(?=<{prefix}invoke)"),
        expected=f'<{prefix}invoke name="tool">\n<{prefix}parameter name="key">value</{prefix}parameter>\n'
        f"</{prefix}invoke>",
        trims_newlines=False,
    )


_QWEN = _functions("<tool_call>", "</tool_call>")
_SEED = _functions("<seed:tool_call>", "</seed:tool_call>")
_MINIMAX = _invocations("", "</minimax:tool_call>")
_STEP3_CALL, _STEP3_END = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
_STEP3 = _invocations("steptml:", f"{_STEP3_END}|(?={_STEP3_CALL})", rf"{_STEP3_CALL}\s*function\s*<｜tool_sep｜>\s*")
_GLM = _Tags(
    head=re.compile(r"<tool_call>\s*([^<>\s{]{1,200})\s*(?:<tool_sep>\s*)?"),
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


def _read_seed(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    return _read(_SEED, text, start, tools)


def _read_minimax(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    return _read_in_brackets(_MINIMAX, "<invoke", text, start, tools)


def _read_step3(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    calls, end = _read_in_brackets(_STEP3, _STEP3_CALL, text, start, tools)
    after = skip_space(text, end)
    return calls, after + len(_STEP3_END) if text.startswith(_STEP3_END, after) else end


def _read_in_brackets(tags: _Tags, opening: str, text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    """Read the call that `opening` begins at `start`, or skip the bracket there."""
    if text.startswith(opening, start):
        return _read(tags, text, start, tools)
    return [], text.index(">", start) + 1


def _read_hunyuan(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    """Read a JSON list in `<tool_calls>`, or calls between GLM's tags inside `<tool_calls>`."""
    if text.startswith("<tool_call>", start):
        return _read_glm(text, start, tools)
    body = text.index(">", start) + 1
    if text.startswith("<tool_calls>", start) and text.startswith(("[", "{"), skip_space(text, body)):
        return read_json_list(text, start, body, "</tool_calls>", tools)
    return [], body


def _read_glm(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    if text.startswith("{", skip_space(text, start + len("<tool_call>"))):
        return read_tagged_json(text, start, tools)
    return _read(_GLM, text, start, tools)


def read_dsml(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    """Read the call whose `<｜DSML｜invoke` is at `start`; see `CallSyntax.read`."""
    return _read(_DSML, text, start, tools)


def _read(tags: _Tags, text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    head = tags.head.match(text, start)
    name = _first(head).strip() if head else ""
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
    arguments: dict[str, Any] = {}
    while (key := tags.key.match(text, position)) is not None:
        end = tags.value_end.search(text, key.end())
        parameter = _first(key).strip()
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


def _first(match: re.Match[str]) -> str:
    """Return the first matched group: names may be in two kinds of quotes, or unquoted."""
    return next(group for group in match.groups() if group is not None)


def _stated(name: str, key: str, is_string: bool) -> Tools:
    """Return a schema for one parameter whose type is stated in the call itself."""
    return {name: {"properties": {key: {"type": "string"} if is_string else {}}}}


QWEN_XML = CallSyntax(re.compile(r"<tool_call>|<function="), _read_qwen, closing="</tool_call>")
"""Qwen3-Coder, Qwen3.5 and later: `<function=tool><parameter=key>value</parameter></function>` in `<tool_call>`."""

GLM_XML = CallSyntax(re.compile("<tool_call>"), _read_glm, closing="</tool_call>")
"""GLM-4.5 and later: `<tool_call>tool<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""

SEED_XML = CallSyntax(
    re.compile(r"<seed:tool_call>|<function="),
    _read_seed,
    {"<seed:think>": "</seed:think>", **THINK},
    closing="</seed:tool_call>",
)
"""Seed-OSS: Qwen3-Coder's calls in `<seed:tool_call>`, reasoning in `<seed:think>`."""

MINIMAX = CallSyntax(re.compile(r"</?minimax:tool_call>|<invoke(?=\s)"), _read_minimax, closing="</minimax:tool_call>")
"""MiniMax M2: `<invoke name="tool"><parameter name="key">value</parameter></invoke>` in `<minimax:tool_call>`."""

STEP3 = CallSyntax(
    re.compile(f"<｜tool_calls_(?:begin|end)｜>|{_STEP3_CALL}"), _read_step3, closing="<｜tool_calls_end｜>"
)
"""Step3: `<steptml:invoke>` with `<steptml:parameter>`, each call between the family's own tokens."""

HUNYUAN = CallSyntax(re.compile("</?tool_calls>|<tool_call>"), _read_hunyuan, closing="</tool_calls>")
"""Hunyuan: a JSON list in `<tool_calls>`, or, since V3, `<tool_call>tool<tool_sep>` with GLM's arguments inside."""
