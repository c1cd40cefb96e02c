"""Turns of gpt-oss (the harmony format): messages on channels, some addressed to a tool."""

from __future__ import annotations

import re

from prorl_trio.chat.families.call_values import Malformed, Tools, decode_json, failed_call, read_call
from prorl_trio.chat.families.syntax import HERMES, CallSyntax, SpokenTurn
from prorl_trio.types.models import ToolCall

_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?P<role>[^<]{0,300})"
    r"(?:<\|channel\|>(?P<channel>[^<]{0,300}))?"
    r"(?:<\|constrain\|>[^<]{0,100})?<\|message\|>"
)
_END = re.compile(r"<\|(?:end|call|return)\|>(?=\s*(?:<\|start\|>|<\|channel\|>|\Z))")
_BROKEN = re.compile(r"(?:<\|start\|>)?[^<]*(?:<\|channel\|>)?")
"""The beginning of a broken header, up to where a new header can begin."""
_NEXT = re.compile(r"(?=<\|start\|>|<\|channel\|>)|<\|(?:end|call|return)\|>")
_MARKS = re.compile(r"<\|(?:start|channel|constrain|end|call|return)\|>")
MAX_MESSAGES = 500
"""Limit of messages read in one turn, including broken ones."""
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_EXPECTED = "<|channel|>commentary to=functions.<tool> <|constrain|>json<|message|>{...}<|call|>"


def _whole_turn(text: str, tools: Tools) -> SpokenTurn:
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    position = messages = 0
    while position < len(text):
        messages += 1
        if messages > MAX_MESSAGES:
            error = f"more than {MAX_MESSAGES} messages in one turn; what follows was not read"
            calls.append(ToolCall(name="", arguments={}, raw=text[position:], error=error))
            break
        header = _HEADER.match(text, position)
        if header is None:
            stop, position = position, _after_broken(text, position)
            broken = text[stop:position]
            if (called := _broken_call(broken)) is not None:
                calls.append(failed_call(broken, "there is no <|message|> before the arguments", _EXPECTED, called))
            elif "<|channel|>analysis" in broken:
                reasoning.append(_MARKS.sub("", broken).removeprefix("assistant").removeprefix("analysis").strip())
            elif not _MARKS.match(broken) and not broken.startswith(" to="):
                content.append(broken)  # a turn without any header
            continue
        end = _END.search(text, header.end())
        stop = len(text) if end is None else end.start()
        body = text[header.end() : stop]
        recipient = _RECIPIENT.search(header["role"]) or _RECIPIENT.search(header["channel"] or "")
        channel = (header["channel"] or "").split()
        if recipient is None and not text.startswith("<|start|>", position) and "to=" not in header["role"]:
            content.append(header["role"])  # the turn began without a header
        if recipient is not None:
            name = recipient[1].removeprefix("functions.")
            calls.append(_call(name, body, text[position:stop], tools))
        elif channel[:1] == ["analysis"]:
            reasoning.append(body.strip())
        else:
            content.append(body)
        position = len(text) if end is None else end.end()
    return SpokenTurn("".join(content).strip(), "\n".join(filter(None, reasoning)), calls)


def _after_broken(text: str, position: int) -> int:
    """Return where the next message may begin after a broken header, without losing another message."""
    broken = _BROKEN.match(text, position)
    following = _NEXT.search(text, max(position + 1, broken.end() if broken else 0))
    return len(text) if following is None else following.end()


def _broken_call(broken: str) -> str | None:
    """Return the tool that a message without `<|message|>` addressed; None if it lacks arguments or a tool."""
    called = _RECIPIENT.search(_MARKS.sub(" ", broken))
    if called is None or not called[1].startswith("functions.") or "{" not in broken:
        return None
    return called[1].removeprefix("functions.").partition("{")[0]


def _call(name: str, body: str, raw: str, tools: Tools) -> ToolCall:
    try:
        stripped = body.strip()
        arguments, end = decode_json(stripped, 0) if stripped else ({}, 0)
        if end != len(stripped):
            raise Malformed(f"unexpected text after the JSON object: {stripped[end : end + 20]!r}")
        name, arguments = read_call({"name": name, "arguments": arguments}, tools)
    except Malformed as exc:
        return failed_call(raw, str(exc), _EXPECTED, name)
    return ToolCall(name=name, arguments=arguments, raw=raw)


HARMONY = CallSyntax(HERMES.opening, HERMES.read, {}, whole_turn=_whole_turn)
