"""The part of a dialogue that decides what its chat template writes next. No more is rendered, or kept."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final, Literal, get_args

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prorl_trio.types.models import Message

History = Literal["none", "kinds", "shape", "whole"]
"""The part of the messages before an assistant turn that decides what follows it: nothing; which kinds there have been,
and what came last; the roles and calls of all of them; or what they say."""

STAND_IN: Final[tuple[Message, ...]] = ({"role": "user", "content": "probe-user"},)
"""A history that is as good as any other, where none is needed."""


class Recall(msgspec.Struct, frozen=True):
    """The part of a dialogue that has to be remembered for what comes next. The default is always enough.

    Attributes:
        history: of its messages.
        tools: whether the tools' schemas have to be known, too.
    """

    history: History = "whole"
    tools: bool = True


RECALLS: Final = tuple(Recall(history, tools) for history in get_args(History) for tools in (False, True))
"""All there are, the shortest first."""


def remembered(messages: Sequence[Message], history: History) -> list[Message]:
    """Return what stands for `messages`. A dialogue may be shortened as it grows: the result is the same.

    The length is bounded for `none` and, but for how many messages can come back in one turn, `kinds`.
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
    """Return `messages` without what they say: who spoke, and whether a tool was called."""
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
    """Return the rounds (an assistant's turn, and what came back) that have a message of a new kind, and the last."""
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
