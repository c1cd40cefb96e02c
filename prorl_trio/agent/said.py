"""Messages of a program to a model in normal form, independent of its API; questions, and answers.

Translators of the APIs convert a request to a `Question`, and an `Answer` to a response. The normal form preserves the
content and drops its notation: lists of blocks become text, arguments are parsed, cache markers are removed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from prorl_trio.types.models import Echo, FinishReason, SegmentReason, ToolSchema

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prorl_trio.chat.conversation import ParsedTurn
    from prorl_trio.types.models import ToolCall

KEY_DIGITS = 16
_KEY = re.compile(rf"prorl([0-9a-f]{{{KEY_DIGITS}}})(?:c([0-9]+))?")
"""A planted key: of a turn, or of a numbered call of the turn."""

_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
_CLOSED = re.compile(r"\s*</\w+>\s*$")
"""The closing tag of a call whose arguments are incomplete."""
_canonical = msgspec.json.Encoder(order="sorted").encode


def planted(key: str, call: int | None = None) -> str:
    """Return the key of a turn, or of its call with that number, in the form for clients: only letters and digits."""
    return f"prorl{key}" if call is None else f"prorl{key}c{call}"


def planted_key(text: str) -> str:
    """Return the key of a turn in a field that a client has echoed, or an empty string."""
    found = _KEY.search(text)
    return found[1] if found else ""


def planted_call(text: str) -> int | None:
    """Return the number of the call in an id that a client has echoed; None if the id is not ours."""
    found = _KEY.search(text)
    return int(found[2]) if found and found[2] else None


class SaidCall(msgspec.Struct, frozen=True):
    """A call in a message. `arguments` is JSON text, or other text at the same place."""

    name: str
    arguments: str
    id: str = ""

    @property
    def parsed(self) -> Any:
        """Return the arguments as an object, or None."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def says(self) -> tuple[str, str]:
        """Return the name, and the arguments in one canonical form."""
        value = self.parsed
        return self.name, self.arguments if value is None else json.dumps(value, sort_keys=True)


class Said(msgspec.Struct, frozen=True):
    """A message in normal form.

    Attributes:
        text: its text, without reasoning and calls.
        reasoning, calls: the reasoning and calls of an assistant message.
        call_id: for a tool's result, the call that it answers.
        name: for a tool's result, the name of the tool.
        key: the echoed key that was planted in an assistant message; empty if the client dropped it.
    """

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    reasoning: str = ""
    calls: Sequence[SaidCall] = ()
    call_id: str = ""
    name: str = ""
    key: str = ""


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """The form that a client requests for a turn: JSON, or calls of tools, or either if both are allowed.

    Attributes:
        field: the field of the request that asks for it.
        schema: schema of the JSON; None: JSON is not allowed.
        calls: calls are allowed.
        tools: tools that may be called; empty: all offered tools.
        one: at most one call.
    """

    field: str
    schema: dict[str, Any] | None = None
    calls: bool = False
    tools: list[str] = []
    one: bool = False


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one turn.

    Attributes:
        messages: in order; the last is not an assistant message.
        tools: in the form of chat templates.
        max_tokens: the client's limit, or None.
        stops: texts that end the turn; only the part before the first occurrence is served.
        agent, agent_type: the client's names for the requesting agent.
        kind: the client's reason for a new segment, if one begins; None if not stated.
        form: the required form; None: any form.
        no_calls: the whole turn is served as text, even text that would be a call.
    """

    messages: list[Said]
    tools: list[ToolSchema] = []
    max_tokens: int | None = None
    stops: list[str] = []
    agent: str = ""
    agent_type: str = ""
    kind: SegmentReason | None = None
    form: Form | None = None
    no_calls: bool = False

    @property
    def wants(self) -> Wants:
        """Return the requirements for a turn that can answer this question."""
        return Wants(self.form, self.no_calls, tuple(self.stops))


class Wants(NamedTuple):
    """The requirements of a question for its turn, except a limit of its length: see `Question`."""

    form: Form | None = None
    no_calls: bool = False
    stops: tuple[str, ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the policy, for the client.

    Attributes:
        key: key of the turn; see `planted`.
        text, reasoning: the content of the turn.
        calls: the calls, with planted ids. An unreadable call has its raw text as arguments if it names a tool;
            otherwise it is part of `text`.
        finish_reason: why it ended.
        stopped_at: the text of `Question.stops` that ended it, or empty.
        prompt_tokens, completion_tokens: token counts of the engine.
        cached_tokens: tokens of the prompt that the dialogue had before.
        reasoning_tokens: tokens of the reasoning, approximately.
    """

    key: str
    text: str
    reasoning: str
    calls: list[SaidCall]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    stopped_at: str = ""
    cached_tokens: int = 0
    reasoning_tokens: int = 0


def _spelled(call: ToolCall) -> str:
    """Return the sampled arguments of an unreadable call; the whole call if no JSON marks the arguments.

    A client parses them as a prefix of JSON, or discovers only now that the tool does not exist.
    """
    found = _ARGUMENTS.search(call.raw)
    if found is None:
        return call.raw
    rest = call.raw[found.end() :]
    try:
        return rest[: json.JSONDecoder().raw_decode(rest)[1]]
    except (ValueError, RecursionError):
        return _CLOSED.sub("", rest)


def served_calls(turn: ParsedTurn, key: str, *, no_calls: bool = False) -> tuple[str, list[SaidCall]]:
    """Return the served text of a turn, and its calls. See `Question.no_calls`."""
    text, calls = turn.content, list[SaidCall]()
    for call in turn.tool_calls:
        if no_calls or (call.error and not call.name):
            text += call.raw
            continue
        arguments = _spelled(call) if call.error else json.dumps(call.arguments, ensure_ascii=False)
        calls.append(SaidCall(call.name, arguments, planted(key, len(calls))))
    return text, calls


def cut(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return a text up to the first occurrence of any of `stops`, and that stop; the whole text and "" without one."""
    found = [(at, stop) for stop in stops if stop and (at := text.find(stop)) >= 0]
    at, stop = min(found, default=(len(text), ""))
    return text[:at], stop


def rest_of(answer: Answer, has: Said) -> Answer | None:
    """Return the part of an answer after the client's part; None if the answer does not begin with that part."""
    had = [call.says() for call in has.calls]
    if not answer.text.startswith(has.text) or [call.says() for call in answer.calls[: len(had)]] != had:
        return None
    if has.reasoning.split() not in ([], answer.reasoning.split()):
        return None
    return msgspec.structs.replace(
        answer,
        text=answer.text.removeprefix(has.text),
        reasoning="" if has.reasoning else answer.reasoning,
        calls=answer.calls[len(had) :],
    )


def normal(messages: Iterable[Said]) -> list[Said]:
    """Return a history in normal form: each turn is one message, and results are named and in the order of its calls.

    Some clients write a message for each part of a turn. Their key counts only if all parts have the same key, because
    other messages may have been joined, and are no longer that turn.
    """
    whole: list[Said] = []
    calls: Sequence[SaidCall] = ()
    for role, run in groupby(messages, key=lambda message: message.role):
        if role == "assistant":
            turn = _merged(list(run))
            calls = turn.calls
            whole.append(turn)
        elif role == "tool":
            answers = sorted(((_number(each.call_id, calls), each) for each in run), key=lambda answer: answer[0])
            whole += (
                msgspec.structs.replace(each, name=calls[at].name) if at < len(calls) else each for at, each in answers
            )
        else:
            whole += run
    return whole


def _merged(parts: Sequence[Said]) -> Said:
    if len(parts) == 1:
        return parts[0]
    return Said(
        "assistant",
        text="\n".join(part.text for part in parts if part.text),
        reasoning="\n".join(part.reasoning for part in parts if part.reasoning),
        calls=[call for part in parts for call in part.calls],
        key=parts[0].key if len({part.key for part in parts}) == 1 else "",
    )


def _number(call_id: str, calls: Sequence[SaidCall]) -> int:
    """Return the number of the call that a result answers; an unknown call comes after all others."""
    found = next((number for number, call in enumerate(calls) if call_id and call.id == call_id), None)
    if found is None:
        found = planted_call(call_id)
    return len(calls) if found is None else found


def digest(*parts: object) -> bytes:
    """Return a digest of values that can be encoded as JSON."""
    try:
        encoded = _canonical(parts)
    except (UnicodeEncodeError, OverflowError):  # a lone surrogate, or an integer of more than 64 bits
        encoded = json.dumps(parts, sort_keys=True, default=msgspec.to_builtins).encode()
    return hashlib.blake2b(encoded, digest_size=16).digest()


def context_digest(messages: Sequence[Said]) -> bytes:
    """Return a digest of the messages between two turns of the policy, without ids of calls."""
    return digest([(each.role, each.text) for each in messages])


def alike(said: Said, served: Said, *, drops_reasoning: bool) -> Echo | None:
    """Return how an assistant message echoes a served turn, or None.

    It is `exact`, `respelled` (different white space, or different notation of arguments), or `reasoning_dropped`, if
    that is allowed.
    """
    if (said.text, said.reasoning, [*said.calls]) == (served.text, served.reasoning, [*served.calls]):
        return "exact"
    words = (said.text.split(), [call.says() for call in said.calls])
    if words != (served.text.split(), [call.says() for call in served.calls]):
        return None
    if said.reasoning.split() != served.reasoning.split():
        return "reasoning_dropped" if not said.reasoning.strip() and drops_reasoning else None
    calls = [(call.name, call.arguments) for call in said.calls]
    same = said.text == served.text and calls == [(call.name, call.arguments) for call in served.calls]
    return "exact" if same else "respelled"
