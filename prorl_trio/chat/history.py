"""The part of a dialogue that determines the template's next output. Only this part is rendered and stored."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final, Literal, get_args

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prorl_trio.types.models import Message

History = Literal["none", "kinds", "shape", "whole"]
"""The part of the messages before an assistant turn that determines the text after the turn: nothing; the kinds of
messages so far, and the last ones; the roles and calls of all messages; or their whole content."""

STAND_IN: Final[tuple[Message, ...]] = ({"role": "user", "content": "probe-user"},)
"""A history that can replace any other if none is needed."""


class Recall(msgspec.Struct, frozen=True):
    """The part of a dialogue that must be remembered for its continuation. The default always suffices.

    Attributes:
        history: the needed part of its messages.
        tools: whether the tools' schemas are needed as well.
    """

    history: History = "whole"
    tools: bool = True


RECALLS: Final = tuple(Recall(history, tools) for history in get_args(History) for tools in (False, True))
"""All recalls, shortest first."""


def remembered(messages: Sequence[Message], history: History) -> list[Message]:
    """Return a replacement for `messages`. Shortening a dialogue as it grows yields the same result.

    Its length is bounded for `none`, and for `kinds` except for the number of messages in one turn.
    """
    match history:
        case "none":
            return list(STAND_IN)
        case "kinds":
            return shape(_rounds_of_kinds(messages))
        case "shape":
            return shape(messages)
        case "whole":
            return list(messages)


def shape(messages: Iterable[Message]) -> list[Message]:
    """Return `messages` without their text: only the roles, and whether a tool was called."""
    shapes = []
    for message in messages:
        bare = {**message, "content": "x"} | {
            key: "" for key in ("thinking", "reasoning_content", "reasoning") if key in message
        }
        if "tool_calls" in message:
            functions = [(call, call["function"]) for call in message["tool_calls"]]
            bare["tool_calls"] = [
                {**call, "function": {**function, "arguments": type(function["arguments"])()}}
                for call, function in functions
            ]
        shapes.append(bare)
    return shapes


def _rounds_of_kinds(messages: Sequence[Message]) -> list[Message]:
    """Return the last round (an assistant's turn and its replies), and all rounds with a message of a new kind."""
    rounds: list[list[Message]] = []
    for spoken, run in groupby(messages, key=lambda message: message["role"] == "assistant"):
        if spoken:
            rounds += [[message] for message in run]
        elif rounds:
            rounds[-1] += run
        else:
            rounds.append(list(run))
    seen: set[tuple[str, ...]] = set()
    kept: list[Message] = []
    for index, each in enumerate(rounds):
        kinds = {(message["role"], *message) for message in each}
        if not kinds <= seen or index == len(rounds) - 1:
            kept += each
        seen |= kinds
    return kept
