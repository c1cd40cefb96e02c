"""Forms that an engine can keep a turn to: JSON of a schema, and calls of tools; as xgrammar's structural tags."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.types.models import ToolSchema


MAX_CHARS: Final = 64_000
MAX_DEPTH: Final = 100
MAX_PATTERN_CHARS: Final = 2_000
"""Limits of all schemas of a turn together. At each of them xgrammar 0.2 compiles for about a second, and for minutes
beyond some of them, in which an engine answers nobody."""


def excess(schemas: Sequence[object]) -> str:
    """Return which limit schemas exceed; empty if none."""
    if (chars := len(str(schemas))) > MAX_CHARS:
        return f"they have {chars} characters, and at most {MAX_CHARS} are compiled"
    patterns, waiting = 0, [(schema, 1) for schema in schemas]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return f"they are nested more than {MAX_DEPTH} deep"
        if isinstance(value, dict):
            patterns += len(str(value.get("pattern", "")))
            waiting += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, list):
            waiting += [(each, depth + 1) for each in value]
    if patterns > MAX_PATTERN_CHARS:
        return f"their patterns have {patterns} characters, and at most {MAX_PATTERN_CHARS} are compiled"
    return ""


def json_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the format of a turn that is JSON of that schema."""
    return {"type": "json_schema", "json_schema": schema}


def calls_format(tools: Sequence[ToolSchema], *, one: bool) -> dict[str, Any]:
    """Return the format of a turn that is calls of these tools, at least one, in the syntax `HERMES`."""
    tags = []
    for tool in tools:
        function = tool["function"]
        begin = f'<tool_call>\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        content = json_format(function.get("parameters") or {"type": "object", "properties": {}})
        tags.append({"type": "tag", "begin": begin, "content": content, "end": "}\n</tool_call>"})
    return {
        "type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True, "stop_after_first": one
    }  # fmt: skip


def structural_tag(formats: Sequence[dict[str, Any]], closing: str = "") -> str:
    """Return what makes a turn one of these formats, after reasoning that `closing` ends, where it is open already."""
    form = formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}
    if closing:
        thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": f"{closing}\n\n"}
        form = {"type": "sequence", "elements": [thought, form]}
    return json.dumps({"type": "structural_tag", "format": form})
