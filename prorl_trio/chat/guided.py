"""Forms to which an engine can constrain a turn, JSON of a schema or calls of tools, as xgrammar's structural tags."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence


MAX_CHARS: Final = 64_000
MAX_DEPTH: Final = 100
MAX_WORK: Final = 2_000
"""Limits for all schemas of a turn together. At each limit xgrammar 0.2 compiles for about a second. Beyond some limits
it compiles for minutes, in which the engine does not respond. The unit of work is a character of a pattern, some 0.5
ms."""
MAX_BLANKS: Final = 16
"""The longest run of whitespace in JSON. Without it, small models repeat line breaks until they run out of tokens."""
_REPEATS_IN_A_CHAR: Final = 8
_MOST_REPEATS: Final = 1_000
"""Limit for one character; larger values would not cost more."""
_FORMAT_WORK: Final = {"email": 64, "hostname": 48}
_WORK: Final = {
    "format": 10,
    "minItems": 20,
    "maxItems": 20,
    "minLength": 2,
    "maxLength": 2,
    "minimum": 3,
    "maximum": 3,
}
_PROPERTIES_IN_A_CHAR: Final = 2.5
_REPEAT: Final = re.compile(r"\\.|\(|\)(?:\{(\d*),?(\d*)\})?|\{(\d*),?(\d*)\}", re.DOTALL)


def excess(schemas: Sequence[object]) -> str:
    """Return which limit the schemas exceed, or an empty string."""
    chars, work, waiting = 0, 0.0, [(schema, 1) for schema in schemas]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return f"they are nested more than {MAX_DEPTH} deep"
        if isinstance(value, dict):
            chars += sum(map(len, value))
            work += _work(value)
            waiting += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, list):
            waiting += [(each, depth + 1) for each in value]
        chars += len(value) if isinstance(value, str) else 4
        if chars > MAX_CHARS:
            return f"they have more than {MAX_CHARS} characters"
    if work > MAX_WORK:
        return (
            f"their patterns, formats, and limits of counts and lengths are as much work as a pattern of {work:.0f} "
            f"characters, and at most {MAX_WORK} are compiled"
        )
    return ""


def _work(schema: dict[str, Any]) -> float:
    """Return the work to compile a schema without its nested schemas, in characters of a pattern."""
    work = float(sum(each for name, each in _WORK.items() if isinstance(schema.get(name), str | int | float)))
    named, properties = schema.get("patternProperties"), schema.get("properties")
    for pattern in (schema.get("pattern"), *(named if isinstance(named, dict) else ())):
        if isinstance(pattern, str):
            work += len(pattern) + _repeats(pattern) / _REPEATS_IN_A_CHAR
    work += _FORMAT_WORK.get(str(schema.get("format")), 0)
    bounds = [each for each in (schema.get("minProperties"), schema.get("maxProperties")) if isinstance(each, int)]
    if bounds and isinstance(properties, dict):
        work += len(properties) * min(len(properties), max(bounds)) / _PROPERTIES_IN_A_CHAR
    return work


def _repeats(pattern: str) -> float:
    """Return how often bounded quantifiers repeat a part of the pattern, with nested ones multiplied."""
    groups = [0.0]
    for found in _REPEAT.finditer(pattern):
        most = min(_MOST_REPEATS, max((float(each) for each in found.groups() if each), default=1.0))
        if found[0] == "(":
            groups.append(0.0)
        elif found[0].startswith(")") and len(groups) > 1:
            inner = groups.pop()
            groups[-1] += inner if most == 1 else max(1.0, inner) * most
        elif not found[0].startswith("\\"):
            groups[-1] += most
    return sum(groups)


def json_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the format of a turn that is JSON with that schema."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_BLANKS}


def calls_format(functions: Sequence[dict[str, Any]], *, one: bool) -> dict[str, Any]:
    """Return the format of a turn with at least one call of these functions, in the syntax `HERMES`."""
    tags = []
    for function in functions:
        begin = f'<tool_call>\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        content = json_format(function.get("parameters") or {"type": "object", "properties": {}})
        tags.append({"type": "tag", "begin": begin, "content": content, "end": "}\n</tool_call>"})
    return {
        "type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True, "stop_after_first": one
    }  # fmt: skip


def structural_tag(formats: Sequence[dict[str, Any]], closing: str = "") -> str:
    """Return the structural tag for any of these formats, after reasoning that `closing` ends if it is already open."""
    form = formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}
    if closing:
        thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": f"{closing}\n\n"}
        form = {"type": "sequence", "elements": [thought, form]}
    return json.dumps({"type": "structural_tag", "format": form})
