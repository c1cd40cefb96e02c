"""Anthropic's Messages (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prorl_trio.agent.said import Form, Question, Said, planted
from prorl_trio.edges.gateway import wire
from prorl_trio.edges.gateway.wire import Asked, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prorl_trio.agent.said import Answer
    from prorl_trio.edges.gateway.wire import ProblemKind
    from prorl_trio.types.models import SegmentReason, ToolSchema

KNOWN: Final = frozenset({
    "model", "messages", "system", "tools", "tool_choice", "max_tokens", "stream", "context_management",
    "stop_sequences", "output_format", "output_config", "output_config.format"
})  # fmt: skip
_STOPS: Final = {"stop": "end_turn", "length": "max_tokens", "abort": "max_tokens", "tool_call": "end_turn"}
_CLASSES: Final[dict[str, SegmentReason]] = {
    "subagent": "sub_agent",
    "workflow": "sub_agent",
    "compaction": "compaction",
    "auxiliary": "side_call",
    "side_reply": "side_call",
}
"""The kinds of requests that claude-code sends in `x-claude-code-request-class`."""
_HARMLESS: Final = "clear_thinking_20251015"
"""An edit of the history that has no effect with `keep: all`."""
_PROBLEMS: Final[dict[ProblemKind, tuple[int, str]]] = {
    "bad_request": (400, "invalid_request_error"),
    "unauthorized": (401, "authentication_error"),
    "not_found": (404, "not_found_error"),
    "overflow": (400, "invalid_request_error"),
    "over": (403, "permission_error"),
    "unavailable": (529, "overloaded_error"),
    "too_large": (413, "request_too_large"),
}


def question(body: Mapping[str, Any], headers: Mapping[str, str], model: str) -> Asked:
    """See `Dialect`."""
    for edit in wire.objects(
        wire.take(body, "context_management", dict, {}).get("edits", []), "context_management.edits"
    ):
        if edit.get("type") != _HARMLESS or edit.get("keep", "all") != "all":
            raise wire.refuse("context_management", "edits that change the history are the client's to make")
    wanted = wire.take(body, "output_format", dict) or wire.take(
        wire.take(body, "output_config", dict, {}), "format", dict, {}
    )
    choice = wire.take(body, "tool_choice", dict, {})
    if body.get("mcp_servers"):
        raise wire.refuse("mcp_servers", "they are called at the vendor's, and not here; offer their tools as tools")
    tools, no_calls = _tools(body), choice.get("type") == "none"
    form = _chosen(choice) or wire.json_form(wanted, "output_config.format", calls=bool(tools) and not no_calls)
    said = [Said("system", wire.text_of(body["system"], "system"))] if body.get("system") else []
    for index, message in enumerate(wire.objects(body.get("messages"), "messages")):
        said += _said(message, f"messages[{index}]")
    return Asked(
        question=Question(
            messages=said,
            tools=tools,
            max_tokens=wire.limit_of(body, "max_tokens"),
            stops=wire.stops_of(body.get("stop_sequences"), "stop_sequences"),
            agent=headers.get("x-claude-code-agent-id", ""),
            agent_type=headers.get("x-claude-code-agent-type", ""),
            form=form,
            no_calls=no_calls,
            kind=_CLASSES.get(headers.get("x-claude-code-request-class", "")),
        ),
        model=wire.take(body, "model", str, model),
        stream=wire.take(body, "stream", bool, False),
        id=wire.new_id("msg"),
        ignored=[*wire.unread(body, KNOWN), *_unkept(body, choice, form)],
    )


def _tools(body: Mapping[str, Any]) -> list[ToolSchema]:
    tools = []
    for index, tool in enumerate(wire.objects(body.get("tools") or [], "tools")):
        kind = tool.get("type") or "custom"
        if kind != "custom":
            raise wire.refuse(f"tools[{index}]", f"a tool of type {kind!r} runs at its vendor's, and not here")
        tools.append(
            wire.function(tool.get("name"), tool.get("description"), tool.get("input_schema"), f"tools[{index}]")
        )
    return tools


def _chosen(choice: Mapping[str, Any]) -> Form | None:
    match choice.get("type", "auto"):
        case "auto" | "none":
            return None
        case "any":
            return Form(field="tool_choice", calls=True, one=choice.get("disable_parallel_tool_use") is True)
        case "tool":
            return Form(field="tool_choice", calls=True, tools=[str(choice.get("name"))], one=True)
        case kind:
            raise wire.refuse("tool_choice", f"{kind!r} is none of auto, none, any, tool")


def _unkept(body: Mapping[str, Any], choice: Mapping[str, Any], form: Form | None) -> list[str]:
    """Return the fields that are only honoured for forced calls, if calls are not forced."""
    if form is not None and form.calls and form.schema is None:
        return []
    several = ["tool_choice.disable_parallel_tool_use"] if choice.get("disable_parallel_tool_use") is True else []
    return several + ["tools.strict"] * any(tool.get("strict") is True for tool in body.get("tools") or [])


def _said(message: Mapping[str, Any], at: str) -> Iterable[Said]:
    """Yield the normal form of one API message. Tool results become separate messages."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise wire.refuse(f"{at}.role", f"{role!r} is none of user, assistant, system")
    if isinstance(content, str) or role == "system":
        yield Said(role, wire.text_of(content, f"{at}.content"))
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls = []
    keys: list[object] = []
    for index, block in enumerate(wire.objects(content, f"{at}.content")):
        where = f"{at}.content[{index}]"
        match block.get("type", "text"):
            case "text":
                texts.append(wire.text_in(block, where))
            case "thinking" if role == "assistant":
                thoughts.append(str(block.get("thinking", "")))
                keys.append(block.get("signature"))
            case "redacted_thinking" if role == "assistant":
                keys.append(block.get("data"))
            case "tool_use" if role == "assistant":
                calls.append(wire.said_call(block.get("name"), _input(block.get("input")), block.get("id")))
                keys.append(block.get("id"))
            case "tool_result" if role == "user":
                if texts:
                    yield Said(role, "\n".join(texts))
                    texts.clear()
                result = wire.text_of(block.get("content"), f"{where}.content", ("text", "tool_reference"))
                yield Said("tool", result, call_id=str(block.get("tool_use_id") or ""))
            case kind:
                raise wire.refuse(where, f"a block of type {kind!r} has no place in a dialogue of text")
    if role == "assistant":
        yield Said(role, "\n".join(texts), "\n".join(thoughts), calls, key=wire.key_of(*keys))
    elif texts:
        yield Said(role, "\n".join(texts))


def _input(value: object) -> object:
    """Return the arguments of a call.

    Arguments that claude-code could not parse are restored to their original text.
    """
    raw = value.get("__unparsedToolInput") if isinstance(value, dict) else None
    return raw.get("raw", value) if isinstance(raw, dict) else value


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": planted(answer.key)})
    if answer.text or not (answer.calls or blocks):
        blocks.append({"type": "text", "text": answer.text})
    for call in answer.calls:
        value = call.parsed
        used = {"raw": call.arguments} if value is None else value
        blocks.append({"type": "tool_use", "id": f"toolu_{call.id}", "name": call.name, "input": used})
    return blocks


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
    }


def _stop(answer: Answer) -> str:
    if answer.calls:
        return "tool_use"
    return "stop_sequence" if answer.stopped_at else _STOPS[answer.finish_reason]


def _message(asked: Asked) -> dict[str, Any]:
    return {
        "id": asked.id,
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def whole(answer: Answer, asked: Asked) -> dict[str, Any]:
    """See `Dialect`."""
    return {
        **_message(asked),
        "content": _blocks(answer),
        "stop_reason": _stop(answer),
        "stop_sequence": answer.stopped_at or None,
        "usage": _usage(answer),
    }


def opening(asked: Asked) -> bytes:
    """See `Dialect`. The usage at the end of the stream replaces this one."""
    return wire.event({"type": "message_start", "message": _message(asked)}, "message_start")


def keep_alive(asked: Asked) -> bytes:
    """See `Dialect`."""
    del asked
    return wire.event({"type": "ping"}, "ping")


def events(answer: Answer, asked: Asked) -> bytes:
    """See `Dialect`."""
    del asked
    sent: list[dict[str, Any]] = []
    blocks = _blocks(answer)
    first_call = len(blocks) - len(answer.calls)
    for index, block in enumerate(blocks):
        match block["type"]:
            case "thinking":
                empty = {**block, "thinking": "", "signature": ""}
                deltas = [
                    {"type": "thinking_delta", "thinking": block["thinking"]},
                    {"type": "signature_delta", "signature": block["signature"]},
                ]
            case "text":
                empty, deltas = {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
            case _:
                arguments = answer.calls[index - first_call].arguments
                empty, deltas = {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
        sent.append({"type": "content_block_start", "index": index, "content_block": empty})
        sent += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        sent.append({"type": "content_block_stop", "index": index})
    stop = {"stop_reason": _stop(answer), "stop_sequence": answer.stopped_at or None}
    sent += [{"type": "message_delta", "delta": stop, "usage": _usage(answer)}, {"type": "message_stop"}]
    return b"".join(wire.event(each, str(each["type"])) for each in sent)


def problem(told: Problem) -> tuple[int, dict[str, Any]]:
    """See `Dialect`."""
    status, kind = _PROBLEMS[told.kind]
    message = told.message
    if told.kind == "overflow":
        message = f"prompt is too long: {told.prompt_tokens} tokens > {told.limit_tokens} maximum"
    return status, {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


def problem_event(told: Problem, asked: Asked) -> bytes:
    """See `Dialect`."""
    del asked
    return wire.event(problem(told)[1], "error")
