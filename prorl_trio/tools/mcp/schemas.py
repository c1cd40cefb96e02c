"""Names and schemas of a server's tools, in the form that chat templates and `read_arguments` understand. Pure.

A server may be hostile, or belong to the policy. Whatever it reports, the result is small and well-formed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.chat.families.call_values import Malformed, check_portable

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_NAME_CHARS: Final = 64
"""Limit of most APIs and families."""
MAX_SCHEMA_BYTES: Final = 16 * 1024
MAX_SCHEMA_NODES: Final = 1_000
"""Limit of the parts of a schema, with the repetitions that its references cause."""

_REFUSED: Final = re.compile(r"[^A-Za-z0-9_-]")
_DROPPED: Final = frozenset({"$defs", "definitions", "$schema", "$id", "$ref", "$anchor", "$comment"})


def tool_name(server: str, name: str) -> str:
    """Return the name under which the policy sees a tool."""
    return f"{server}__{_REFUSED.sub('_', name)}"[:MAX_NAME_CHARS]


def parameters_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments, without references, unions with null and lists of types.

    The properties and items are always objects, and the required properties exist.

    Raises:
        Malformed: it is too large, nested too deeply, or cannot be sent.
    """
    check_portable(schema)
    parameters = _Translation(schema).of(schema)
    parameters = {**parameters, "type": "object", "properties": parameters.get("properties", {})}
    if (size := len(msgspec.json.encode(parameters))) > MAX_SCHEMA_BYTES:
        raise Malformed(f"its schema has {size} bytes, and the limit is {MAX_SCHEMA_BYTES}")
    return parameters


class _Translation:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._nodes = 0
        self._open: list[str] = []

    def of(self, schema: Any) -> dict[str, Any]:
        self._nodes += 1
        if self._nodes > MAX_SCHEMA_NODES:
            raise Malformed(f"its schema has more than {MAX_SCHEMA_NODES} parts")
        if not isinstance(schema, dict):  # true and false are schemas as well
            return {}
        told = {key: value for key, value in schema.items() if key not in _DROPPED}
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(variants := told.get(key), list):
                told[key] = [each for each in map(self.of, variants) if each.get("type") != "null"]
                if len(told[key]) == 1:
                    told |= {**told.pop(key)[0], **told}
        if isinstance(told.get("type"), list):
            told["type"] = next((each for each in told["type"] if each != "null"), "string")
        if "properties" in told:
            properties = told["properties"] if isinstance(told["properties"], dict) else {}
            told["properties"] = {name: self.of(each) for name, each in properties.items()}
        if "required" in told:
            names = told["required"] if isinstance(told["required"], list) else []
            told["required"] = [each for each in told.get("properties", {}) if each in names]
        for key in ("items", "additionalProperties"):
            if key in told and not isinstance(told[key], bool):
                told[key] = self.of(told[key])
        return {**self._referred(schema.get("$ref")), **told}

    def _referred(self, reference: object) -> dict[str, Any]:
        """Return the part of the document that a reference names; nothing for others, and inside of itself."""
        if not isinstance(reference, str) or not reference.startswith("#/") or reference in self._open:
            return {}
        found: Any = self._root
        for step in reference[2:].split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        self._open.append(reference)
        try:
            return self.of(found)
        finally:
            self._open.pop()
