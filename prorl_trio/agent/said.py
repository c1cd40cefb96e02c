"""What a program says to a model, whatever its API: messages in normal form, questions, and answers.

Translators of the APIs make a `Question` of a request and a response of an `Answer`. The normal form keeps what was
said, and drops how it was spelled: lists of blocks become text, arguments are parsed, marks of caches are gone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from prorl_trio.types.models import Echo, FinishReason, SegmentReason, ToolSchema

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prorl_trio.chat.conversation import ParsedTurn
    from prorl_trio.types.models import ToolCall

KEY_DIGITS = 16
_KEY = re.compile(rf"prorl([0-9a-f]{{{KEY_DIGITS}}})(?:c([0-9]+))?")
"""A key as it is planted: of a turn, or of a call of it, which has a number."""

_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
_CLOSED = re.compile(r"\s*</\w+>\s*$")
"""What ends a call, where its arguments do not end."""
_canonical = msgspec.json.Encoder(order="sorted").encode


def planted(key: str, call: int | None = None) -> str:
    """Return the key of a turn, or of its call of that number, as clients get it: letters and digits alone."""
    return f"prorl{key}" if call is None else f"prorl{key}c{call}"


def planted_key(text: str) -> str:
    """Return the key of a turn in a field that a client has echoed; empty if there is none."""
    found = _KEY.search(text)
    return found[1] if found else ""


def planted_call(text: str) -> int | None:
    """Return the number of the call in an id that a client has echoed; None if it is not one of ours."""
    found = _KEY.search(text)
    return int(found[2]) if found and found[2] else None


class SaidCall(msgspec.Struct, frozen=True):
    """A call in a message. `arguments` is JSON text, or what stands there in its place."""

    name: str
    arguments: str
    id: str = ""

    @property
    def parsed(self) -> Any:
        """Return the arguments as an object; None if they are none."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def says(self) -> tuple[str, str]:
        """Return the name, and the arguments in one spelling."""
        value = self.parsed
        return self.name, self.arguments if value is None else json.dumps(value, sort_keys=True)


class Said(msgspec.Struct, frozen=True):
    """A message in normal form.

    Attributes:
        text: what it says, without reasoning and calls.
        reasoning, calls: of an assistant's message.
        call_id: of a tool's result: the call that it answers.
        name: of the tool.
        key: planted in an assistant's message, and echoed; empty where the client has kept none.
    """

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    reasoning: str = ""
    calls: Sequence[SaidCall] = ()
    call_id: str = ""
    name: str = ""
    key: str = ""


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants a turn to be: JSON, or calls of tools, or one of the two where it has both.

    Attributes:
        field: of the request, that says so.
        schema: of the JSON; None: it may not be JSON.
        calls: it may be calls.
        tools: that may be called; empty: all that are offered.
        one: no more than one call.
    """

    field: str
    schema: dict[str, Any] | None = None
    calls: bool = False
    tools: list[str] = []
    one: bool = False


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one turn.

    Attributes:
        messages: in order; the last is no assistant's.
        tools: as chat templates take them.
        max_tokens: the most that the client wants; None: it does not say.
        stops: texts at the first of which the turn ends, and what is served of it before.
        agent, agent_type: who asks, as the client calls it.
        kind: why a new segment begins, if one does, as the client says; None: it does not say.
        form: that the turn is to be kept to; None: it may be anything.
        no_calls: whatever the turn says is served as text, also what would be a call.
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
    def wants(self) -> tuple[Form | None, bool]:
        """Return what a turn has to be, to answer this question too."""
        return self.form, self.no_calls


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the policy, for the client.

    Attributes:
        key: of the turn; see `planted`.
        text, reasoning: what it says.
        calls: what it calls, with planted ids. One that could not be read has its raw text as arguments where it names
            a tool; else that is part of `text`.
        finish_reason: why it ended.
        stopped_at: the text of `Question.stops` that ended it; empty if none did.
        prompt_tokens, completion_tokens: as the engine had them.
        cached_tokens: of the prompt, that the dialogue had before.
        reasoning_tokens: of the completion, about.
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
    """Return the arguments of a call that could not be read as they were sampled; where no JSON names them, all of it.

    A client reads them as a prefix of JSON, or finds only now that it has no such tool.
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
    """Return the text of a turn as it is served, and its calls. See `Question.no_calls`."""
    text, calls = turn.content, list[SaidCall]()
    for call in turn.tool_calls:
        if no_calls or (call.error and not call.name):
            text += call.raw
            continue
        arguments = _spelled(call) if call.error else json.dumps(call.arguments, ensure_ascii=False)
        calls.append(SaidCall(call.name, arguments, planted(key, len(calls))))
    return text, calls


def cut(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return a text up to the first of `stops` in it, and that one; all of it, and nothing, where there is none."""
    found = [(at, stop) for stop in stops if stop and (at := text.find(stop)) >= 0]
    at, stop = min(found, default=(len(text), ""))
    return text[:at], stop


def rest_of(answer: Answer, has: Said) -> Answer | None:
    """Return what of an answer comes after the part that a client has; None if that part is not its beginning."""
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
    """Return a history in normal form: a turn is one message, and results are in the order of its calls, and named.

    Some clients write a message for each part of a turn. Its key counts where all of them have it: others may have been
    put beside each other, and are not that turn any more.
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
    """Return the number of the call that a result answers; that of none behind them, if it is not known."""
    found = next((number for number, call in enumerate(calls) if call_id and call.id == call_id), None)
    if found is None:
        found = planted_call(call_id)
    return len(calls) if found is None else found


def digest(*parts: object) -> bytes:
    """Return a digest of values that JSON has a form for."""
    try:
        encoded = _canonical(parts)
    except (UnicodeEncodeError, OverflowError):  # half a character, or a number of more than 64 bits
        encoded = json.dumps(parts, sort_keys=True, default=msgspec.to_builtins).encode()
    return hashlib.blake2b(encoded, digest_size=16).digest()


def context_digest(messages: Sequence[Said]) -> bytes:
    """Return a digest of what was said between two turns of the policy. Ids of calls are none of it."""
    return digest([(each.role, each.text) for each in messages])


def alike(said: Said, served: Said, *, drops_reasoning: bool) -> Echo | None:
    """Return how an assistant's message echoes a turn as it was served; None if it does not.

    `exact`, `respelled` (white space, or the arguments of a call, are written otherwise), or `reasoning_dropped`, if
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
