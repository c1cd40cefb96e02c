"""OpenAI's Responses (https://platform.openai.com/docs/api-reference/responses)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from prorl_trio.agent.said import Question, Said, planted
from prorl_trio.edges.gateway import chat, wire
from prorl_trio.edges.gateway.wire import Asked, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prorl_trio.agent.said import Answer, SaidCall
    from prorl_trio.types.models import SegmentReason, ToolSchema

KNOWN: Final = frozenset({
    "model", "instructions", "input", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "stream",
    "store", "include", "previous_response_id", "text", "text.format"
})  # fmt: skip
DROPPED_TOOLS: Final = frozenset({"web_search", "web_search_preview", "image_generation"})
"""Tools that run at the vendor. They are not offered to the policy."""
INCLUDED: Final = ["reasoning.encrypted_content"]
JOINED: Final = "__"
"""The separator between a namespace and a tool's name, in the names that the policy sees."""
_PARTS: Final = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_ROLES: Final[dict[str, Literal["system", "user", "assistant"]]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant"
}  # fmt: skip
_STATUS: Final = {"stop": "completed", "tool_call": "completed", "length": "incomplete", "abort": "incomplete"}


def question(body: Mapping[str, Any], headers: Mapping[str, str], model: str) -> Asked:
    """See `Dialect`."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if body.get(name):
            raise wire.refuse(name, "nothing is stored here; send the whole input")
    said = [Said("system", wire.take(body, "instructions", str, ""))] if body.get("instructions") else []
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for index, item in enumerate(wire.objects(items, "input")):
        said += _said(item, f"input[{index}]")
    tools, namespaces = _tools(body)
    no_calls = chat.wants_no_calls(body)
    wanted = wire.json_form(
        wire.take(wire.take(body, "text", dict, {}), "format", dict, {}),
        "text.format",
        calls=bool(tools) and not no_calls,
    )
    form = chat.chosen(body) or wanted
    is_child = bool(headers.get("x-openai-subagent"))
    turn = headers.get("x-codex-turn-metadata", "")
    kind: SegmentReason | None = "compaction" if '"compaction"' in turn else "sub_agent" if is_child else None
    return Asked(
        question=Question(
            messages=said,
            tools=tools,
            max_tokens=wire.limit_of(body, "max_output_tokens"),
            form=form,
            no_calls=no_calls,
            agent=headers.get("thread-id", "") if is_child else "",
            agent_type=headers.get("x-openai-subagent", ""),
            kind=kind,
        ),
        model=wire.take(body, "model", str, model),
        stream=wire.take(body, "stream", bool, False),
        id=wire.new_id("resp"),
        ignored=[*wire.unread(body, KNOWN), *chat.unkept(body, form), *_unkept(body)],
        extra={"sequence": 0, "namespaces": namespaces, "is_codex": "x-codex-turn-metadata" in headers},
    )


def _tools(body: Mapping[str, Any]) -> tuple[list[ToolSchema], dict[str, tuple[str, str]]]:
    """Return the offered functions, and for functions in a namespace the namespace and their own name."""
    tools: list[ToolSchema] = []
    namespaces: dict[str, tuple[str, str]] = {}
    for index, tool in enumerate(wire.objects(body.get("tools") or [], "tools")):
        at, kind = f"tools[{index}]", str(tool.get("type"))
        if kind == "function":
            tools.append(wire.function(tool.get("name"), tool.get("description"), tool.get("parameters"), at))
        elif kind == "namespace":
            space = str(tool.get("name") or "")
            for each in wire.objects(tool.get("tools") or [], f"{at}.tools"):
                joined = f"{space}{JOINED}{each.get('name')}"
                namespaces[joined] = (space, str(each.get("name")))
                tools.append(wire.function(joined, each.get("description"), each.get("parameters"), at))
        elif kind == "custom":
            schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
            tools.append(wire.function(tool.get("name"), tool.get("description"), schema, at))
            namespaces[str(tool.get("name"))] = ("", "custom")
        elif kind not in DROPPED_TOOLS:
            raise wire.refuse(at, f"a tool of type {kind!r} is no wire.function, and runs at its vendor's")
    return tools, namespaces


def _unkept(body: Mapping[str, Any]) -> list[str]:
    """Return the other fields that are not fully honoured."""
    dropped = {str(tool.get("type")) for tool in body.get("tools") or []} & DROPPED_TOOLS
    included = body.get("include") or []
    names = ["store"] * (body.get("store") is True) + ["include"] * (included not in ([], INCLUDED))
    return names + [f"tools.{kind}" for kind in sorted(dropped)]


def _said(item: Mapping[str, Any], at: str) -> Iterable[Said]:
    """Yield the messages in an input item."""
    match item.get("type", "message"):
        case "message":
            role = _ROLES.get(given := str(item.get("role")))
            if role is None:
                raise wire.refuse(f"{at}.role", f"{given!r} is none of {', '.join(_ROLES)}")
            text = wire.text_of(item.get("content"), f"{at}.content", _PARTS)
            yield Said(role, text, key=wire.key_of(item.get("id")) if role == "assistant" else "")
        case "reasoning":
            text = wire.text_of(item.get("content"), f"{at}.content", _PARTS)
            text = text or wire.text_of(item.get("summary"), f"{at}.summary", _PARTS)
            yield Said("assistant", reasoning=text, key=wire.key_of(item.get("encrypted_content"), item.get("id")))
        case "function_call":
            space = item.get("namespace")
            name = f"{space}{JOINED}{item.get('name')}" if space else item.get("name")
            call = wire.said_call(name, item.get("arguments"), item.get("call_id"))
            yield Said("assistant", calls=[call], key=wire.key_of(call.id, item.get("id")))
        case "custom_tool_call":
            call = wire.said_call(item.get("name"), {"input": item.get("input")}, item.get("call_id"))
            yield Said("assistant", calls=[call], key=wire.key_of(call.id, item.get("id")))
        case "function_call_output" | "custom_tool_call_output":
            text = wire.text_of(item.get("output"), f"{at}.output", _PARTS)
            yield Said("tool", text, call_id=str(item.get("call_id") or ""))
        case kind:
            raise wire.refuse(at, f"an item of type {kind!r} needs what the vendor has stored, or a tool of its own")


def _items(answer: Answer, asked: Asked) -> list[dict[str, Any]]:
    """Return the output. The ids contain the turn's key, because the client sends them back."""
    key, status = planted(answer.key), "completed" if asked.extra["is_codex"] else _STATUS[answer.finish_reason]
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        thought = {"type": "reasoning_text", "text": answer.reasoning}
        items.append(
            {"type": "reasoning", "id": f"rs_{key}", "summary": [], "content": [thought], "encrypted_content": key}
        )
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{key}", "role": "assistant", "status": status, "content": [part]})
    items += [_call(call, asked) for call in answer.calls]
    return items


def _call(call: SaidCall, asked: Asked) -> dict[str, Any]:
    space, name = asked.extra["namespaces"].get(call.name, ("", call.name))
    made: dict[str, Any] = {"id": f"fc_{call.id}", "call_id": f"call_{call.id}", "status": "completed"}
    if name == "custom":
        value = call.parsed
        given = value.get("input", "") if value else call.arguments
        return {"type": "custom_tool_call", **made, "id": f"ctc_{call.id}", "name": call.name, "input": str(given)}
    made = {"type": "function_call", **made, "name": name, "arguments": call.arguments}
    return {**made, "namespace": space} if space else made


def _response(asked: Asked, status: str, output: list[dict[str, Any]], answer: Answer | None = None) -> dict[str, Any]:
    cut = answer is not None and status == "incomplete"
    return {
        "id": asked.id,
        "object": "response",
        "created_at": wire.now_s(),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": asked.model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None if answer is None else _usage(answer),
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _status(answer: Answer, asked: Asked) -> str:
    """Return the response's status. The last response is never `incomplete`, because codex would fail the whole run."""
    return "completed" if asked.extra["is_codex"] or answer.calls else _STATUS[answer.finish_reason]


def whole(answer: Answer, asked: Asked) -> dict[str, Any]:
    """See `Dialect`."""
    return _response(asked, _status(answer, asked), _items(answer, asked), answer)


def _event(asked: Asked, kind: str, **fields: Any) -> bytes:
    number = asked.extra["sequence"]
    asked.extra["sequence"] += 1
    return wire.event({"type": kind, "sequence_number": number, **fields}, kind)


def opening(asked: Asked) -> bytes:
    """See `Dialect`."""
    return _event(asked, "response.created", response=_response(asked, "in_progress", [])) + keep_alive(asked)


def keep_alive(asked: Asked) -> bytes:
    """See `Dialect`. codex counts events, not bytes."""
    return _event(asked, "response.in_progress", response=_response(asked, "in_progress", []))


def events(answer: Answer, asked: Asked) -> bytes:
    """See `Dialect`."""
    items, sent = _items(answer, asked), list[bytes]()
    for index, item in enumerate(items):
        at = {"item_id": item["id"], "output_index": index}
        match item["type"]:
            case "reasoning" | "message":
                part, inside = item["content"][0], {**at, "content_index": 0}
                kind = part["type"]
                more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
                begun = {**item, **({"status": "in_progress"} if more else {}), "content": []}
                sent.append(_event(asked, "response.output_item.added", output_index=index, item=begun))
                sent.append(_event(asked, "response.content_part.added", **inside, part={**part, "text": ""}))
                if part["text"]:
                    sent.append(_event(asked, f"response.{kind}.delta", **inside, delta=part["text"], **more))
                sent.append(_event(asked, f"response.{kind}.done", **inside, text=part["text"], **more))
                sent.append(_event(asked, "response.content_part.done", **inside, part=part))
            case kind:
                field, name = ("input", "custom_tool_call_input") if kind == "custom_tool_call" else (
                    "arguments", "function_call_arguments"
                )  # fmt: skip
                begun = {**item, "status": "in_progress", field: ""}
                sent.append(_event(asked, "response.output_item.added", output_index=index, item=begun))
                sent.append(_event(asked, f"response.{name}.delta", **at, delta=item[field]))
                sent.append(_event(asked, f"response.{name}.done", **at, **{field: item[field]}))
        sent.append(_event(asked, "response.output_item.done", output_index=index, item=item))
    status = _status(answer, asked)
    sent.append(_event(asked, f"response.{status}", response=_response(asked, status, items, answer)))
    return b"".join(sent)


problem = chat.problem


def problem_event(told: Problem, asked: Asked) -> bytes:
    """See `Dialect`."""
    error = chat.problem(told)[1]["error"]
    failed = {**_response(asked, "failed", []), "error": {"code": error["code"], "message": error["message"]}}
    return _event(asked, "response.failed", response=failed)
