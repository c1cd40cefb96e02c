"""An agent's dialogue that grows turn by turn to any length, and what each of its turns takes."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from prorl_trio.chat.conversation import Conversation
from prorl_trio.types.models import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prorl_trio.chat.format import ChatFormat

__all__ = [
    "OPENING",
    "TOOLS",
    "Dialogue",
    "DialogueTurn",
    "TurnTimes",
    "draw_turns",
    "sampled_ids",
    "time_turns",
    "whole_dialogue",
]

SAID_WORDS, RESULT_WORDS = 30, 150
TURN_TOKENS = 300
"""Tokens that so many words make, about; three quarters are a tool's result."""
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
    """A text of the policy, with a tool call in it, and the tool's result."""

    said: str
    result: str


class TurnTimes(NamedTuple):
    """The times of a turn of ours, at a context of `context_tokens` before it, in this thread's own CPU time.

    That is all that it takes, and other programs do not add to it.

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
    """Return the ids that a policy that says this samples, the end of its turn included."""
    return [*chat.codec.encode(chat.codec.mark(said, speech=True)), chat.end_of_turn_id]


def whole_dialogue(turns: list[DialogueTurn]) -> list[ChatMessage]:
    """Every message so far."""
    messages = [*OPENING]
    for turn in turns:
        messages.append(ChatMessage(role="assistant", content=turn.said))
        messages.append(ChatMessage(role="tool", content=turn.result, name="bash"))
    return messages


class Dialogue:
    """A dialogue that is held with our own code, and grows turn by turn. Blocks."""

    def __init__(self, chat: ChatFormat, seed: int) -> None:
        self._chat = chat
        self._turns = draw_turns(seed)
        self._conversation = Conversation(chat, OPENING, TOOLS)

    def __len__(self) -> int:
        """Tokens of the next prompt."""
        return len(self._conversation)

    def turn(self) -> TurnTimes:
        """The next one, timed."""
        turn = next(self._turns)
        ids = sampled_ids(self._chat, turn.said)
        logprobs = [-0.5] * len(ids)
        result = [ChatMessage(role="tool", content=turn.result, name="bash")]
        context = len(self)
        started = time.thread_time()
        self._conversation.prompt_token_ids()
        prompted = time.thread_time()
        self._conversation.add_completion(ids, logprobs, policy_version="1", engine="perf")
        recorded = time.thread_time()
        self._conversation.add_messages(result)
        extended = time.thread_time()
        return TurnTimes(context, prompted - started, recorded - prompted, extended - recorded)


def time_turns(chat: ChatFormat, seed: int, contexts: Sequence[int], rounds: int) -> dict[int, list[TurnTimes]]:
    """Turns at each length of context, interleaved: each round has one of each, another one first each time.

    So a slow spell of the machine meets short and long contexts alike. Before that, untimed, a dialogue grows to each
    length, and somewhat less, so that what is timed lies around it.
    """
    # Each says other things: a tokenizer is faster with what it has seen (Gemma's, by the line).
    dialogues = {context: Dialogue(chat, seed * len(contexts) + n) for n, context in enumerate(contexts)}
    for context, dialogue in dialogues.items():
        while len(dialogue) < context - rounds * TURN_TOKENS // 2:
            dialogue.turn()
    times: dict[int, list[TurnTimes]] = {context: [] for context in contexts}
    for number in range(rounds):
        first = number % len(contexts)
        for context in (*contexts[first:], *contexts[:first]):
            times[context].append(dialogues[context].turn())
    return times
