"""An agent's dialogue that grows turn by turn to any length, and what each of its turns takes."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from prorl_trio.models import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_trio.chat import ChatFormat

__all__ = ["OPENING", "TOOLS", "DialogueTurn", "TurnTimes", "draw_turns", "grow", "sampled_ids", "whole_dialogue"]

SAID_WORDS, RESULT_WORDS = 30, 150
"""Of a turn: with them it has some 300 tokens, three quarters of which are a tool's result."""
WORDS = (
    "the of parser error file return value line test index module class def import self None True raise assert list "
    "dict path open read write 0x7f3a 42 1307 src/lexer.py tests/test_lexer.py :: -> == += [] () {} # TODO "
    "Traceback FAILED passed expected got Größe 数 naïve unbelievable_long_identifier_name"
)
OPENING = (
    ChatMessage(role="system", content="You are a careful software engineer."),
    ChatMessage(role="user", content="A test of this project fails since yesterday. Find out why, and repair it."),
)
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    },
)


class DialogueTurn(msgspec.Struct, frozen=True):
    """What the policy says, with a tool call in it, and the tool's result."""

    said: str
    result: str


class TurnTimes(NamedTuple):
    """One turn of ours, at a context of `context_tokens` before it.

    `prompt_s`: the prompt's ids proven and made a list, for the engine. `record_s`: the completion proven, recorded and
    parsed. `extend_s`: the tool's result rendered, encoded and recorded, what was there proven again.
    """

    context_tokens: int
    prompt_s: float
    record_s: float
    extend_s: float


def draw_turns(seed: int) -> Iterator[DialogueTurn]:
    """The same turns for the same seed, without end."""
    rnd, vocabulary = random.Random(seed), WORDS.split()
    while True:
        words = rnd.choices(vocabulary, k=SAID_WORDS)
        call = msgspec.json.encode({"name": "bash", "arguments": {"command": " ".join(words[:8])}}).decode()
        said = f"Let me see {' '.join(words[8:])}.\n\n<tool_call>\n{call}\n</tool_call>"
        lines = (" ".join(rnd.choices(vocabulary, k=10)) for _ in range(RESULT_WORDS // 10))
        yield DialogueTurn(said, "\n".join(lines))


def sampled_ids(chat: ChatFormat, said: str) -> list[int]:
    """What a policy that says this samples, the end of its turn included."""
    return [*chat.codec.encode(chat.codec.mark(said, speech=True)), chat.end_of_turn_id]


def whole_dialogue(turns: list[DialogueTurn]) -> list[ChatMessage]:
    """Every message so far."""
    messages = [*OPENING]
    for turn in turns:
        messages.append(ChatMessage(role="assistant", content=turn.said))
        messages.append(ChatMessage(role="tool", content=turn.result, name="bash"))
    return messages


def grow(chat: ChatFormat, seed: int, context_tokens: int) -> list[TurnTimes]:
    """Hold a dialogue until its context is that long; every turn is timed. Blocks."""
    conversation = chat.open(OPENING, TOOLS)
    times: list[TurnTimes] = []
    for turn in draw_turns(seed):
        if len(conversation) > context_tokens:
            break
        ids = sampled_ids(chat, turn.said)
        logprobs = [-0.5] * len(ids)
        result = [ChatMessage(role="tool", content=turn.result, name="bash")]
        context = len(conversation)
        started = time.perf_counter()
        conversation.prompt_token_ids()
        prompted = time.perf_counter()
        conversation.add_completion(ids, logprobs, policy_version="1", engine="perf")
        recorded = time.perf_counter()
        conversation.add_messages(result)
        extended = time.perf_counter()
        times.append(TurnTimes(context, prompted - started, recorded - prompted, extended - recorded))
    return times
