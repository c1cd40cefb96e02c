"""OpenAI's Chat Completions (https://platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prorl_trio.agent.said import Form, Question, Said, planted
from prorl_trio.edges.gateway import wire
from prorl_trio.edges.gateway.wire import Asked, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.agent.said import Answer
    from prorl_trio.edges.gateway.wire import ProblemKind
    from prorl_trio.types.models import ToolSchema

KNOWN: Final = frozenset({
    "model", "messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "max_completion_tokens",
    "stream", "stream_options", "stream_options.include_usage", "n", "response_format", "stop"
})  # fmt: skip
_FINISH: Final = {"stop": "stop", "length": "length", "abort": "length", "tool_call": "stop"}
_ROLES: Final = {"developer": "system", "function": "tool"}
_PROBLEMS: Final[dict[ProblemKind, tuple[int, str, str]]] = {
    "bad_request": (400, "invalid_request_error", "invalid_value"),
    "unauthorized": (401, "authentication_error", "invalid_api_key"),
    "not_found": (404, "invalid_request_error", "model_not_found"),
    "overflow": (400, "invalid_request_error", "context_length_exceeded"),
    "over": (403, "permission_error", "rollout_over"),
    "unavailable": (503, "server_error", "server_error"),
    "too_large": (413, "invalid_request_error", "request_too_large"),
}


def question(body: Mapping[str, Any], headers: Mapping[str, str], model: str) -> Asked:
    """See `Dialect`."""
    del headers
    if wire.take(body, "n", int, 1) != 1:
        raise wire.refuse("n", "one answer is sampled for a request; ask again for another one")
    for name in ("functions", "function_call"):
        if body.get(name):
            raise wire.refuse(name, "OpenAI has replaced it; use tools and tool_choice")
    tools, no_calls = tools_of(body), wants_no_calls(body)
    wanted = wire.json_form(
        wire.take(body, "response_format", dict, {}), "response_format", calls=bool(tools) and not no_calls
    )
    form = chosen(body) or wanted
    return Asked(
        question=Question(
            messages=[_said(each, index) for index, each in enumerate(wire.objects(body.get("messages"), "messages"))],
            tools=tools,
            max_tokens=wire.limit_of(body, "max_completion_tokens", "max_tokens"),
            stops=wire.stops_of(body.get("stop"), "stop"),
            form=form,
            no_calls=no_calls,
        ),
        model=wire.take(body, "model", str, model),
        stream=wire.take(body, "stream", bool, False),
        ignored=[*wire.unread(body, KNOWN), *unkept(body, form)],
        extra={"usage": bool(wire.take(body, "stream_options", dict, {}).get("include_usage"))},
    )


def tools_of(body: Mapping[str, Any]) -> list[ToolSchema]:
    """Return the offered functions."""
    tools = []
    for index, tool in enumerate(wire.objects(body.get("tools") or [], "tools")):
        if tool.get("type", "function") != "function":
            raise wire.refuse(f"tools[{index}]", f"a tool of type {tool.get('type')!r} is no function")
        offered = tool.get("function", tool)
        offered = offered if isinstance(offered, dict) else {}
        tools.append(
            wire.function(offered.get("name"), offered.get("description"), offered.get("parameters"), f"tools[{index}]")
        )
    return tools


def chosen(body: Mapping[str, Any]) -> Form | None:
    """Return the form of a turn that must call tools; None if calls are optional."""
    choice, field, one = body.get("tool_choice"), "tool_choice", body.get("parallel_tool_calls") is False
    match choice.get("type") if isinstance(choice, dict) else choice:
        case None | "auto" | "none":
            return None
        case "required":
            return Form(field=field, calls=True, one=one)
        case "function" if isinstance(choice, dict):
            named = wire.take(choice, "function", dict, choice).get("name")
            return Form(field=field, calls=True, tools=[str(named)], one=True)
        case "allowed_tools" if isinstance(choice, dict):
            allowed = wire.take(choice, "allowed_tools", dict, choice)
            if allowed.get("mode") == "required":
                tools = [wire.take(each, "function", dict, each) for each in wire.objects(allowed.get("tools"), field)]
                return Form(field=field, calls=True, tools=[str(each.get("name")) for each in tools], one=one)
    raise wire.refuse(
        field, f"{choice!r} is not honoured; use 'auto', 'required', a wire.function, or offer other tools"
    )


def wants_no_calls(body: Mapping[str, Any]) -> bool:
    """Return whether calls are forbidden."""
    choice = body.get("tool_choice")
    return (choice.get("type") if isinstance(choice, dict) else choice) == "none"


def unkept(body: Mapping[str, Any], form: Form | None) -> list[str]:
    """Return the fields that are only honoured for forced calls, if calls are not forced."""
    if form is not None and form.calls and form.schema is None:
        return []
    tools = [wire.take(each, "function", dict, each) for each in body.get("tools") or []]
    several = ["parallel_tool_calls"] if body.get("parallel_tool_calls") is False and tools else []
    return several + ["tools.strict"] * any(each.get("strict") is True for each in tools)


def _said(message: Mapping[str, Any], index: int) -> Said:
    at = f"messages[{index}]"
    role = wire.take(message, "role", str, "")
    role = _ROLES.get(role, role)
    if role not in ("system", "user", "assistant", "tool"):
        raise wire.refuse(f"{at}.role", f"{role!r} is none of system, developer, user, assistant, tool")
    text = wire.text_of(message.get("content"), f"{at}.content", ("text", "refusal"))
    if role != "assistant":
        return Said(role, text, call_id=str(message.get("tool_call_id") or ""), name=str(message.get("name") or ""))
    if message.get("function_call"):
        raise wire.refuse(f"{at}.function_call", "OpenAI has replaced it; use tool_calls, and role tool for results")
    calls = []
    for call in wire.objects(message.get("tool_calls") or [], f"{at}.tool_calls"):
        made = call.get("function")
        made = made if isinstance(made, dict) else {}
        calls.append(wire.said_call(made.get("name"), made.get("arguments"), call.get("id")))
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    key = wire.key_of(*(call.id for call in calls))
    return Said("assistant", text, str(reasoning), calls, key=key)


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": f"call_{call.id}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]


def _finish(answer: Answer) -> str:
    return "tool_calls" if answer.calls else _FINISH[answer.finish_reason]


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
    }


def whole(answer: Answer, asked: Asked) -> dict[str, Any]:
    """See `Dialect`."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = _calls(answer)
    elif not answer.text:
        message["content"] = ""
    return {
        "id": f"chatcmpl-{planted(answer.key)}",
        "object": "chat.completion",
        "created": wire.now_s(),
        "model": asked.model,
        "choices": [{"index": 0, "message": message, "finish_reason": _finish(answer), "logprobs": None}],
        "usage": _usage(answer),
    }


def opening(asked: Asked) -> bytes:
    """See `Dialect`."""
    del asked
    return b""


def keep_alive(asked: Asked) -> bytes:
    """See `Dialect`."""
    del asked
    return b": \n\n"


def events(answer: Answer, asked: Asked) -> bytes:
    """See `Dialect`."""
    head = {
        "id": f"chatcmpl-{planted(answer.key)}",
        "object": "chat.completion.chunk",
        "created": wire.now_s(),
        "model": asked.model,
    }
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if answer.reasoning:
        deltas.append({"reasoning_content": answer.reasoning})
    if answer.text:
        deltas.append({"content": answer.text})
    for index, call in enumerate(_calls(answer)):
        made = call["function"]
        begun = {**call, "index": index, "function": {"name": made["name"], "arguments": ""}}
        deltas += [
            {"tool_calls": [begun]},
            {"tool_calls": [{"index": index, "function": {"arguments": made["arguments"]}}]},
        ]
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": _finish(answer)})
    chunks: list[dict[str, Any]] = [{**head, "choices": [choice]} for choice in choices]
    if asked.extra["usage"]:
        chunks.append({**head, "choices": [], "usage": _usage(answer)})
    return b"".join(map(wire.event, chunks)) + b"data: [DONE]\n\n"


def problem(told: Problem) -> tuple[int, dict[str, Any]]:
    """See `Dialect`."""
    status, kind, code = _PROBLEMS[told.kind]
    message = told.message
    if told.kind == "overflow":
        message = (
            f"This model's maximum context length is {told.limit_tokens} tokens. However, your messages resulted in "
            f"{told.prompt_tokens} tokens. Your input exceeds the context window of this model; reduce the length of "
            "the messages."
        )
    return status, {"error": {"message": message, "type": kind, "param": told.field or None, "code": code}}


def problem_event(told: Problem, asked: Asked) -> bytes:
    """See `Dialect`."""
    del asked
    return wire.event(problem(told)[1])
