"""Google's generateContent (https://ai.google.dev/api/generate-content)."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any, Final

from prorl_trio.agent.said import Form, Question, Said, planted
from prorl_trio.edges.gateway import wire
from prorl_trio.edges.gateway.wire import Asked, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prorl_trio.agent.said import Answer
    from prorl_trio.edges.gateway.wire import ProblemKind
    from prorl_trio.types.models import ToolSchema

KNOWN: Final = frozenset({
    "contents", "systemInstruction", "tools", "toolConfig", "toolConfig.functionCallingConfig", "generationConfig",
    "model",
    *(f"generationConfig.{name}" for name in (
        "maxOutputTokens", "stopSequences", "candidateCount", "responseMimeType", "responseJsonSchema", "responseSchema"
    )),
})  # fmt: skip
_FINISH: Final = {"stop": "STOP", "length": "MAX_TOKENS", "abort": "MAX_TOKENS", "tool_call": "STOP"}
_PROBLEMS: Final[dict[ProblemKind, tuple[int, str]]] = {
    "bad_request": (400, "INVALID_ARGUMENT"),
    "unauthorized": (401, "UNAUTHENTICATED"),
    "not_found": (404, "NOT_FOUND"),
    "overflow": (400, "INVALID_ARGUMENT"),
    "over": (403, "PERMISSION_DENIED"),
    "unavailable": (503, "UNAVAILABLE"),
    "too_large": (413, "INVALID_ARGUMENT"),
}


def question(body: Mapping[str, Any], headers: Mapping[str, str], model: str) -> Asked:
    """See `Dialect`."""
    del headers
    body = _named(body)
    config = _named(wire.take(body, "generationConfig", dict, {}))
    if wire.take(config, "candidateCount", int, 1) != 1:
        raise wire.refuse("generationConfig.candidateCount", "one answer is sampled for a request")
    if body.get("cachedContent"):
        raise wire.refuse("cachedContent", "nothing is stored here; send the whole contents")
    choice = _named(wire.take(_named(wire.take(body, "toolConfig", dict, {})), "functionCallingConfig", dict, {}))
    tools, no_calls = _tools(body), choice.get("mode") == "NONE"
    system = body.get("systemInstruction")
    said = []
    if system is not None:
        said += [Said("system", each.text) for each in _said({"role": "user", **_content(system)}, "systemInstruction")]
    for index, content in enumerate(wire.objects(body.get("contents"), "contents")):
        said += _said(content, f"contents[{index}]")
    return Asked(
        question=Question(
            messages=said,
            tools=tools,
            max_tokens=wire.limit_of(config, "maxOutputTokens"),
            stops=wire.stops_of(config.get("stopSequences"), "generationConfig.stopSequences"),
            form=_chosen(choice) or _json_form(config, calls=bool(tools) and not no_calls),
            no_calls=no_calls,
        ),
        model=model,
        id=wire.new_id("resp"),
        ignored=[*wire.unread({**body, "generationConfig": config}, KNOWN), *_unkept(body, choice)],
    )


def _named(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with field names in camel case, because the API accepts both spellings."""
    return {re.sub("_(.)", lambda found: found[1].upper(), name): value for name, value in message.items()}


def _content(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        return {"parts": [{"text": value}]}
    return {**value} if isinstance(value, dict) else {"parts": value}


def _tools(body: Mapping[str, Any]) -> list[ToolSchema]:
    tools = []
    for index, tool in enumerate(wire.objects(body.get("tools") or [], "tools")):
        declared = _named(tool).get("functionDeclarations")
        if declared is None:
            raise wire.refuse(
                f"tools[{index}]", f"{', '.join(tool) or 'nothing'} runs at its vendor's, and is no function"
            )
        for each in map(_named, wire.objects(declared, f"tools[{index}].functionDeclarations")):
            schema = each.get("parametersJsonSchema") or each.get("parameters")
            tools.append(wire.function(each.get("name"), each.get("description"), schema, f"tools[{index}]"))
    return tools


def _unkept(body: Mapping[str, Any], choice: Mapping[str, Any]) -> list[str]:
    """Return the other fields that are not fully honoured."""
    kinds = {name for tool in body.get("tools") or [] for name in _named(tool)} - {"functionDeclarations"}
    loose = ["toolConfig.functionCallingConfig"] if choice.get("mode") == "VALIDATED" else []
    return [f"tools.{kind}" for kind in sorted(kinds)] + loose


def _chosen(choice: Mapping[str, Any]) -> Form | None:
    field = "toolConfig.functionCallingConfig"
    match choice.get("mode", "AUTO"):
        case "AUTO" | "NONE" | "VALIDATED":
            return None
        case "ANY":
            return Form(
                field=field, calls=True, tools=list(map(str, wire.take(choice, "allowedFunctionNames", list, [])))
            )
        case mode:
            raise wire.refuse(field, f"{mode!r} is none of AUTO, ANY, NONE, VALIDATED")


def _json_form(config: Mapping[str, Any], *, calls: bool) -> Form | None:
    mime = config.get("responseMimeType", "text/plain")
    if mime not in ("text/plain", "application/json"):
        raise wire.refuse("generationConfig.responseMimeType", f"{mime!r} is none of text/plain, application/json")
    schema = wire.take(config, "responseJsonSchema", dict) or _lowered(wire.take(config, "responseSchema", dict))
    if mime == "text/plain" and not schema:
        return None
    field = "generationConfig.responseJsonSchema" if schema else "generationConfig.responseMimeType"
    return wire.json_form({"type": "json_schema" if schema else "json_object", "schema": schema}, field, calls=calls)


def _lowered(schema: Any) -> Any:
    """Return a schema with lower-case type names, as in JSON Schema. Google uses capitals."""
    if isinstance(schema, list):
        return [_lowered(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value.lower() if key == "type" and isinstance(value, str) else _lowered(value)
        for key, value in schema.items()
        if key != "propertyOrdering"
    }


def _said(content: Mapping[str, Any], at: str) -> Iterable[Said]:
    role = content.get("role") or "user"
    if role not in ("user", "model", "function"):
        raise wire.refuse(f"{at}.role", f"{role!r} is none of user, model, function")
    texts: list[str] = []
    thoughts: list[str] = []
    calls = []
    keys: list[object] = []
    for index, part in enumerate(map(_named, wire.objects(content.get("parts") or [], f"{at}.parts"))):
        where = f"{at}.parts[{index}]"
        keys.append(_planted(part.get("thoughtSignature")))
        called = part.get("functionCall")
        result = part.get("functionResponse")
        if isinstance(called, dict):
            calls.append(wire.said_call(called.get("name"), called.get("args"), called.get("id")))
            keys.append(called.get("id"))
        elif isinstance(result, dict):
            if texts:
                yield Said("user", "".join(texts))
                texts.clear()
            yield Said(
                "tool", _result(result.get("response")), call_id=str(result.get("id") or ""),
                name=str(result.get("name") or ""),
            )  # fmt: skip
        elif isinstance(part.get("text"), str):
            (thoughts if part.get("thought") else texts).append(part["text"])
        elif set(part) - {"thoughtSignature", "thought"}:
            raise wire.refuse(where, f"{', '.join(sorted(part))} has no place in a dialogue of text")
    if role == "model":
        yield Said("assistant", "".join(texts), "".join(thoughts), calls, key=wire.key_of(*keys))
    elif texts:
        yield Said("user", "".join(texts))


def _planted(signature: object) -> str:
    """Return the decoded content of a signature, which the API requires to be base64."""
    try:
        return base64.b64decode(str(signature or ""), validate=True).decode("ascii", "replace")
    except ValueError:
        return str(signature)


def _result(response: object) -> str:
    """Return the text of a result: its only text field, as most clients send it, or else its JSON."""
    if isinstance(response, dict) and len(response) == 1:
        (value,) = response.values()
        if isinstance(value, str):
            return value
    return wire.said_call("", response, "").arguments


def _parts(answer: Answer) -> list[dict[str, Any]]:
    signature = base64.b64encode(planted(answer.key).encode()).decode()
    parts: list[dict[str, Any]] = []
    if answer.reasoning:
        parts.append({"text": answer.reasoning, "thought": True})
    if answer.text or not answer.calls:
        parts.append({"text": answer.text})
    for call in answer.calls:
        value = call.parsed
        if value is None:  # the wire format only has objects
            parts.append({"text": call.arguments})
        else:
            parts.append({"functionCall": {"id": call.id, "name": call.name, "args": value}})
    said = next(part for part in parts if not part.get("thought"))
    said["thoughtSignature"] = signature
    return parts


def whole(answer: Answer, asked: Asked) -> dict[str, Any]:
    """See `Dialect`."""
    content = {"role": "model", "parts": _parts(answer)}
    return {
        "candidates": [{"content": content, "finishReason": _FINISH[answer.finish_reason], "index": 0}],
        "usageMetadata": {
            "promptTokenCount": answer.prompt_tokens,
            "candidatesTokenCount": answer.completion_tokens - answer.reasoning_tokens,
            "thoughtsTokenCount": answer.reasoning_tokens,
            "cachedContentTokenCount": answer.cached_tokens,
            "totalTokenCount": answer.prompt_tokens + answer.completion_tokens,
        },
        "modelVersion": asked.model,
        "responseId": asked.id,
    }


def opening(asked: Asked) -> bytes:
    """See `Dialect`."""
    del asked
    return b""


def keep_alive(asked: Asked) -> bytes:
    """See `Dialect`. Every client accepts an empty line, and nothing else."""
    del asked
    return b"\n"


def events(answer: Answer, asked: Asked) -> bytes:
    """See `Dialect`."""
    return wire.event(whole(answer, asked))


def problem(told: Problem) -> tuple[int, dict[str, Any]]:
    """See `Dialect`."""
    status, name = _PROBLEMS[told.kind]
    message = told.message
    if told.kind == "overflow":
        message = (
            f"The input token count ({told.prompt_tokens}) exceeds the maximum number of tokens allowed "
            f"({told.limit_tokens})."
        )
    error: dict[str, Any] = {"code": status, "message": message, "status": name}
    if told.retry_after_s is not None:
        kind = "type.googleapis.com/google.rpc.RetryInfo"
        error["details"] = [{"@type": kind, "retryDelay": f"{told.retry_after_s:g}s"}]
    return status, {"error": error}


def problem_event(told: Problem, asked: Asked) -> bytes:
    """See `Dialect`."""
    del asked
    return wire.event(problem(told)[1])
