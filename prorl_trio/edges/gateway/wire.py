"""Common parts of the translators: a parsed request, problems to report to clients, and helpers for both.

A translator is a module with the functions of `Dialect`.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec

from prorl_trio.agent.said import Form, SaidCall, planted_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prorl_trio.agent.said import Answer, Question
    from prorl_trio.types.models import ToolSchema

ProblemKind = Literal[
    "bad_request",  # never answerable: see the message
    "unauthorized",  # the key is missing, or belongs to another session
    "not_found",  # unknown path, session or model
    "overflow",  # the prompt leaves no room for a turn
    "over",  # the rollout has ended, or the agent's calls are used up
    "unavailable",  # infrastructure failed, or is paused: it may be tried again
    "too_large",  # the body
]


MAX_STOPS: Final = 64
MAX_STOP_CHARS: Final = 1_000
"""Maximum length of stop texts. They are searched for in the loop whenever tokens arrive."""


class Problem(Exception):
    """A problem that is reported to a client.

    Attributes:
        kind: the kind, for programs.
        field: the wrong field of the request; empty if none.
        prompt_tokens, limit_tokens: numbers of an overflow.
        retry_after_s: seconds after which to retry; None: a retry does not help.
    """

    def __init__(
        self,
        kind: ProblemKind,
        message: str,
        *,
        field: str = "",
        prompt_tokens: int = 0,
        limit_tokens: int = 0,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.field = field
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens
        self.retry_after_s = retry_after_s


@dataclass(slots=True, kw_only=True)
class Asked:
    """A parsed request.

    Attributes:
        question: the request to the gateway.
        id: the response's id, if it is sent before the turn is sampled.
        model: the model name from the client.
        stream: the client requests events.
        ignored: ignored fields, because the trainer sets the value (temperature), or they have no effect.
        extra: further data that the translator needs for its answer.
    """

    question: Question
    model: str
    id: str = ""
    stream: bool = False
    ignored: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


class Dialect(Protocol):
    """A translator. Pure; accepts arbitrary input."""

    @staticmethod
    def question(body: Mapping[str, Any], headers: Mapping[str, str], model: str) -> Asked:
        """Parse a request; `model` is the name in the path. Raises Problem."""

    @staticmethod
    def whole(answer: Answer, asked: Asked) -> dict[str, Any]:
        """Return the body of a response that is not a stream."""

    @staticmethod
    def opening(asked: Asked) -> bytes:
        """Return the events at the start of a stream, independent of the sampled turn."""

    @staticmethod
    def keep_alive(asked: Asked) -> bytes:
        """Return an event for after `opening` that clients accept as a sign that the turn is still being sampled."""

    @staticmethod
    def events(answer: Answer, asked: Asked) -> bytes:
        """Return the events of a turn, after those of `opening`, to the end of the stream."""

    @staticmethod
    def problem(problem: Problem) -> tuple[int, dict[str, Any]]:
        """Return the status and body of a response that reports a problem."""

    @staticmethod
    def problem_event(problem: Problem, asked: Asked) -> bytes:
        """Return the event by which a started stream reports a problem."""


def event(data: object, name: str = "") -> bytes:
    """Return a server-sent event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def take(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """Return a field, or `default` if it is missing or null. Raises Problem if it has another type."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or ".join(each.__name__ for each in kinds)
        raise Problem("bad_request", f"{name}: expected {wanted}, got {type(value).__name__}", field=name)
    return value


def objects(values: object, name: str) -> Iterable[Mapping[str, Any]]:
    """Yield the items of a list of objects. Raises Problem for anything else."""
    if not isinstance(values, list):
        raise Problem("bad_request", f"{name}: expected a list of objects", field=name)
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise Problem("bad_request", f"{name}[{index}]: expected an object", field=f"{name}[{index}]")
        yield value


def refuse(name: str, why: str) -> Problem:
    """Return the problem for a field that cannot be honoured."""
    return Problem("bad_request", f"{name}: {why}", field=name)


def text_of(content: object, name: str, kinds: tuple[str, ...] = ("text", "input_text", "output_text")) -> str:
    """Return the text of a string or a list of parts; refuse other kinds of parts by name."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in objects(content, name):
        kind = part.get("type", "text")
        if kind not in kinds:
            raise refuse(name, f"a part of type {kind!r} is not text, and this model takes text only")
        texts.append(text_in(part, name))
    return "\n".join(texts)


def text_in(part: Mapping[str, Any], name: str) -> str:
    """Return the text of a part. Refusals use another field name. Raises Problem."""
    text = part.get("text", part.get("refusal"))
    if not isinstance(text, str):
        raise refuse(name, f"expected a text in a part of type {part.get('type', 'text')!r}, got {text!r:.40}")
    return text


def unread(body: Mapping[str, Any], known: frozenset[str]) -> list[str]:
    """Return the fields that are not honoured.

    `known` contains fields of an object with the object's name before a dot.
    """
    names = [name for name in body if name not in known]
    for parent in {name.partition(".")[0] for name in known if "." in name} & body.keys():
        inner = body[parent]
        names += (
            [f"{parent}.{each}" for each in inner if f"{parent}.{each}" not in known] if isinstance(inner, dict) else []
        )
    return sorted(names)


def function(name: object, description: object, parameters: object, at: str) -> ToolSchema:
    """Return a function in the form for chat templates."""
    if not isinstance(name, str) or not name:
        raise refuse(at, "a function needs a name")
    schema = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": name, "description": str(description or ""), "parameters": schema},
    }


def said_call(name: object, arguments: object, call_id: object) -> SaidCall:
    """Return a call of an assistant's message."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return SaidCall(str(name or ""), text, str(call_id or ""))


def json_form(wanted: Mapping[str, Any], name: str, *, calls: bool) -> Form | None:
    """Return the form that a field describes in the syntax of OpenAI's and Anthropic's APIs; None: text.

    Raises Problem.

    With `calls`, tools may be called instead.
    """
    match wanted.get("type", "text"):
        case "text":
            return None
        case "json_object":
            schema: Any = {"type": "object", "additionalProperties": True}
        case "json_schema":
            schema = take(wanted, "json_schema", dict, wanted).get("schema")
        case kind:
            raise refuse(name, f"{kind!r} is none of text, json_object, json_schema")
    if not isinstance(schema, dict):
        raise refuse(name, "json_schema needs a schema")
    return Form(field=name, schema=schema, calls=calls)


def key_of(*fields: object) -> str:
    """Return the first planted key in these fields."""
    return next((key for each in fields if isinstance(each, str) and (key := planted_key(each))), "")


def stops_of(value: object, name: str) -> list[str]:
    """Return the texts that stop a turn, from a single text or a list."""
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise refuse(name, "expected a text, or a list of texts")
    if len(stops) > MAX_STOPS or any(len(each) > MAX_STOP_CHARS for each in stops):
        raise refuse(name, f"at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters are looked for")
    return [each for each in stops if each]


def new_id(prefix: str) -> str:
    """Return a unique id."""
    return f"{prefix}_{secrets.token_hex(12)}"


def now_s() -> int:
    """Return the time of day in the unit of OpenAI's answers, seconds."""
    return int(time.time())


def limit_of(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these limits that is given. Raises Problem if it is below 1."""
    for name in names:
        if (limit := take(body, name, int)) is not None:
            if limit < 1:
                raise refuse(name, f"{limit} is below 1; leave it out for the most that the trainer allows")
            return int(limit)
    return None
