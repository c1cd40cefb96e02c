"""What the translators share: a request that was read, problems that a client is told of, and helpers for both.

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
    "bad_request",  # it can never be answered: see the message
    "unauthorized",  # the key is none, or another session's
    "not_found",  # there is no such path, session or model
    "overflow",  # the prompt leaves no room for a turn
    "over",  # the rollout has ended, or the agent's calls are used up
    "unavailable",  # infrastructure failed, or is paused: it may be tried again
    "too_large",  # the body
]


MAX_STOPS: Final = 64
MAX_STOP_CHARS: Final = 1_000
"""They are looked for whenever tokens come, while the loop waits."""


class Problem(Exception):
    """Something that a client is told of.

    Attributes:
        kind: for programs.
        field: of the request, that is wrong; empty if none is.
        prompt_tokens, limit_tokens: of an overflow.
        retry_after_s: after which it may be tried again; None: it need not be.
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
    """A request that was read.

    Attributes:
        question: for the gateway.
        id: of the response, where it is sent before the turn is sampled.
        model: the name that the client gave.
        stream: it wants events.
        ignored: fields that are not honoured, since the trainer decides (temperature), or they change nothing.
        extra: what else the translator needs for its answer.
    """

    question: Question
    model: str
    id: str = ""
    stream: bool = False
    ignored: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


class Dialect(Protocol):
    """A translator. Pure; anything may be sent to it."""

    @staticmethod
    def question(body: Mapping[str, Any], headers: Mapping[str, str], model: str) -> Asked:
        """Read a request; `model` is what the path names. Raises Problem."""

    @staticmethod
    def whole(answer: Answer, asked: Asked) -> dict[str, Any]:
        """Return the body of a response that is no stream."""

    @staticmethod
    def opening(asked: Asked) -> bytes:
        """Return the events that a stream begins with, whatever is sampled."""

    @staticmethod
    def keep_alive(asked: Asked) -> bytes:
        """Return what says, after `opening`, that a turn is still being sampled, as clients of the API count it."""

    @staticmethod
    def events(answer: Answer, asked: Asked) -> bytes:
        """Return the events of a turn, after those of `opening`, to the end of the stream."""

    @staticmethod
    def problem(problem: Problem) -> tuple[int, dict[str, Any]]:
        """Return status and body of a response that tells of a problem."""

    @staticmethod
    def problem_event(problem: Problem, asked: Asked) -> bytes:
        """Return the event by which a stream that has begun tells of a problem."""


def event(data: object, name: str = "") -> bytes:
    """Return a server-sent event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def take(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """Return a field, or `default` where it is missing or null. Raises Problem: it is of another type."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or ".join(each.__name__ for each in kinds)
        raise Problem("bad_request", f"{name}: expected {wanted}, got {type(value).__name__}", field=name)
    return value


def objects(values: object, name: str) -> Iterable[Mapping[str, Any]]:
    """Yield the items of a list of objects. Raises Problem: it is something else."""
    if not isinstance(values, list):
        raise Problem("bad_request", f"{name}: expected a list of objects", field=name)
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise Problem("bad_request", f"{name}[{index}]: expected an object", field=f"{name}[{index}]")
        yield value


def refuse(name: str, why: str) -> Problem:
    """Return the problem of a field that cannot be honoured."""
    return Problem("bad_request", f"{name}: {why}", field=name)


def text_of(content: object, name: str, kinds: tuple[str, ...] = ("text", "input_text", "output_text")) -> str:
    """Return the text of a content, be it a string or a list of parts; refuse parts of other kinds by name."""
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
    """Return the text of a part: that of a refusal is named otherwise. Raises Problem."""
    text = part.get("text", part.get("refusal"))
    if not isinstance(text, str):
        raise refuse(name, f"expected a text in a part of type {part.get('type', 'text')!r}, got {text!r:.40}")
    return text


def unread(body: Mapping[str, Any], known: frozenset[str]) -> list[str]:
    """Return the fields that are not honoured. `known` has those of an object with its name before a dot."""
    names = [name for name in body if name not in known]
    for parent in {name.partition(".")[0] for name in known if "." in name} & body.keys():
        inner = body[parent]
        names += (
            [f"{parent}.{each}" for each in inner if f"{parent}.{each}" not in known] if isinstance(inner, dict) else []
        )
    return sorted(names)


def function(name: object, description: object, parameters: object, at: str) -> ToolSchema:
    """Return a function as chat templates take it."""
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
    """Return the form that a field describes as OpenAI's APIs and Anthropic's do; None: text. Raises Problem.

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
    """Return the texts at which a turn is to end: a text, or a list of such."""
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise refuse(name, "expected a text, or a list of texts")
    if len(stops) > MAX_STOPS or any(len(each) > MAX_STOP_CHARS for each in stops):
        raise refuse(name, f"at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters are looked for")
    return [each for each in stops if each]


def new_id(prefix: str) -> str:
    """Return an id that nobody else has."""
    return f"{prefix}_{secrets.token_hex(12)}"


def now_s() -> int:
    """Return the time of day as OpenAI's answers give it, in seconds."""
    return int(time.time())


def limit_of(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these limits that is given. Raises Problem: it is below 1."""
    for name in names:
        if (limit := take(body, name, int)) is not None:
            if limit < 1:
                raise refuse(name, f"{limit} is below 1; leave it out for the most that the trainer allows")
            return int(limit)
    return None
