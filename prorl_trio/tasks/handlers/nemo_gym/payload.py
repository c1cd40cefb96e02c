"""A row of a NeMo Gym data set as a task: its messages, its tools, and the server that verifies it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from prorl_trio.types.errors import malformed_job
from prorl_trio.types.models import ChatMessage, ToolCall

RESERVED: Final = frozenset({"seed_session", "verify", "aggregate_metrics", "mcp", "docs", "redoc", "stats"})
"""Paths of a resources server that are not tools. A row that offers one would let the policy grade itself."""
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
"""The names of functions in OpenAI's API. They need no quoting in a path."""


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, tag="function"):
    """A tool of a row: a `POST` to the path with its name."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in RESERVED:
            raise ValueError(f"{self.name!r} cannot be the name of a tool of a resources server")
        _check_schema(self.parameters or {})


class _Text(msgspec.Struct, frozen=True):
    """A part of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class _Item(msgspec.Struct, frozen=True, kw_only=True):
    """An item of the input: a message, a function call, or its output. Other items are refused."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[_Text] = ""
    name: str = ""
    arguments: str = "{}"
    call_id: str = ""
    output: str = ""

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Params(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `responses_create_params` that this handler reads."""

    input: str | list[_Item]
    instructions: str | None = None
    tools: list[FunctionTool] = []


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    responses_create_params: Params


class NemoGymPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`TaskInstance.payload` of a task of NeMo Gym.

    Attributes:
        server: name of a resources server in the node's `nemo_gym.servers`.
        row: the row of its data set, complete. The policy sees `input`, `instructions` and `tools` of its
            `responses_create_params`; the server gets everything.
    """

    server: str
    row: dict[str, Any]

    @property
    def params(self) -> Params:
        return msgspec.convert(self.row, _Row).responses_create_params

    def messages(self) -> list[ChatMessage]:
        """Return the opening of the dialogue. A developer's message becomes a system message."""
        params = self.params
        said = [ChatMessage(role="system", content=params.instructions)] if params.instructions else []
        items = [_Item(content=params.input)] if isinstance(params.input, str) else params.input
        names: dict[str, str] = {}
        for item in items:
            if item.type == "function_call":
                names[item.call_id] = item.name
                before = (
                    said.pop() if said and said[-1].role == "assistant" else ChatMessage(role="assistant", content="")
                )
                arguments = msgspec.json.decode(item.arguments, type=dict[str, Any])
                call = ToolCall(name=item.name, arguments=arguments, raw=item.arguments, id=item.call_id)
                said.append(msgspec.structs.replace(before, tool_calls=[*before.tool_calls, call]))
            elif item.type == "function_call_output":
                name = names.get(item.call_id)
                said.append(ChatMessage(role="tool", content=item.output, name=name, tool_call_id=item.call_id))
            else:
                role = "system" if item.role == "developer" else item.role
                said.append(ChatMessage(role=role, content=item.text))
        return said


def read_payload(payload: Mapping[str, Any]) -> NemoGymPayload:
    """Return a checked payload.

    Raises:
        MalformedJob: it has another form, or contains items or tools that this handler does not support.
    """
    try:
        found = msgspec.convert(payload, NemoGymPayload)
        tools = [tool.name for tool in found.params.tools]
        if len(set(tools)) < len(tools):
            raise msgspec.ValidationError("two tools have the same name")
        if not found.messages():
            raise msgspec.ValidationError("the input is empty")
    except (msgspec.DecodeError, ValueError) as exc:
        raise malformed_job(exc, prefix="$.instance.payload") from exc
    return found


def _check_schema(schema: Any) -> None:
    """Raise ValueError unless arguments can be read by this JSON schema."""
    if not isinstance(schema, Mapping):
        raise ValueError("a schema of a tool's parameters is no object")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError("`required` of a tool's parameters is no list of names")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ValueError("`properties` of a tool's parameters is no object")
    for inner in properties.values():
        _check_schema(inner)
    if "items" in schema:
        _check_schema(schema["items"])
