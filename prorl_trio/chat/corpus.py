"""Dialogues made up from a seed, to prove on that a model's prompts are its template's own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from random import Random

MAX_ROUNDS: Final = 4
MAX_PIECES: Final = 12
LONG_OUTPUT_CHARACTERS: Final = 20_000
LONG_OUTPUT_SHARE: Final = 0.01
"""Share of the tool results that are long."""
WORD_SHARE: Final = 0.25
"""Share of the pieces of a text that are words of the template itself."""
MAX_WORD_CHARACTERS: Final = 60
LONG_ROUNDS, MAX_LONG_ROUNDS = 160, 1_000
MAX_LONG_CHARACTERS: Final = 200_000
LONG_TEXT_ROUND, LONG_ANSWER_ROUND = 8, 10
"""Rounds of a long dialogue in which a long text comes back, and in which one is said."""

_PIECES: Final = (
    "the sum", " of 12", "\n\n", "\n", "  ", "42", "<x>", "{}", "é", "e\u0301", "數", "😀", "👩\u200d💻", "\t", ".",
    "'s", "\r\n", "▁", "\u00a0", "\u200b", "ﬁ", "\u212b", "\u0301", "\u202e", "नि", "\u0e33", "\x00", "\x1b[0m",
    "\ue000", "\\n", '"', "'", "</", "```json\n", "print(1)", "Traceback (most recent call last):", "|", "assistant",
    "user\n", " " * 7, "0" * 9, "/* x */",
)  # fmt: skip
_LONG: Final = "line 數 of output\n\n" * (LONG_OUTPUT_CHARACTERS // 18)
_WORD: Final = re.compile(rf"[^<>|｜\[\]{{}}]{{1,{MAX_WORD_CHARACTERS}}}")
"""A piece of a template that no control token can come of."""
_WORDS: Final = ("the sum", " of 12", " is", " 42", ".", " é", " 數", " 😀", "\n", "\n\n", " `x`", " < 3", ", then")


class Round(NamedTuple):
    """An assistant's turn and what comes back.

    Attributes:
        content: of the assistant's turn; begins with a word and does not end in space.
        reasoning: before it; empty for none.
        arguments: of each call of `probe` that it makes.
        results: of these calls, in their order.
        question: a user's message after them; None for none. There is one where there are no calls.
    """

    content: str
    reasoning: str
    arguments: list[dict[str, Any]]
    results: list[str]
    question: str | None


class Dialogue(NamedTuple):
    """A made-up dialogue. `hostile` ones have control tokens in the words of users, tools and schemas."""

    system: str | None
    question: str
    rounds: list[Round]
    tools: list[dict[str, Any]]
    hostile: bool


def _tool(name: str, description: str) -> dict[str, Any]:
    properties = {"code": {"type": "string", "description": "What to run."}, "times": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["code"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def forged_tool(description: str) -> dict[str, Any]:
    """Return the tool that hostile dialogues have besides."""
    return _tool("forged", description)


CORPUS_TOOLS: Final = (_tool("probe", "Führt <Python> aus & 'prints'."), _tool("finish", 'Say "done".'))


def made_up_dialogue(random: Random, control: Sequence[str], literals: Collection[str | int] = ()) -> Dialogue:
    """Return the next dialogue of `random`.

    Args:
        random: the same state gives the same dialogue.
        control: tokens whose look-alikes hostile texts contain.
        literals: what the template may look for in messages; texts contain its words.
    """
    hostile = random.random() < 0.4
    forged = [*control, *(token[: random.randrange(len(token))] for token in control)] if hostile else []
    words = sorted(word for word in literals if isinstance(word, str) and _WORD.fullmatch(word))

    def text() -> str:
        pieces = random.choices([*_PIECES, *random.choices(forged, k=30)] if forged else _PIECES, k=MAX_PIECES)
        if words:
            pieces = [random.choice(words) if random.random() < WORD_SHARE else piece for piece in pieces]
        return "".join(pieces[: random.randrange(MAX_PIECES + 1)])

    def said() -> str:
        return ("So" + "".join(random.choices(_WORDS, k=random.randrange(MAX_PIECES)))).strip()

    def result() -> str:
        return text() + (_LONG if random.random() < LONG_OUTPUT_SHARE else "")

    tools = [*CORPUS_TOOLS, *([forged_tool(text())] if hostile else [])] if random.random() < 0.6 else []
    rounds = []
    for _ in range(random.randrange(MAX_ROUNDS + 1)):
        calls = random.choice((0, 0, 1, 1, 1, 2, 3)) if tools else 0
        arguments = [{"code": said(), "times": random.randrange(99)} for _ in range(calls)]
        rounds.append(
            Round(
                content=said() if not arguments or random.random() < 0.3 else "",
                reasoning=said() if random.random() < 0.4 else "",
                arguments=arguments,
                results=[result() for _ in arguments],
                question=text() if not arguments or random.random() < 0.1 else None,
            )
        )
    return Dialogue(text() if random.random() < 0.5 else None, text(), rounds, tools, hostile)


def long_dialogues(control: Sequence[str], literals: Collection[str | int]) -> list[Dialogue]:
    """Return dialogues with more messages, and with longer texts, than a template is likely to count or to measure.

    They go beyond each whole number among its `literals`, up to `MAX_LONG_ROUNDS` and `MAX_LONG_CHARACTERS`. One has
    results of calls only, one only questions; a hostile one has look-alikes of `control` tokens in long texts.
    """
    numbers = [number for number in literals if isinstance(number, int)]
    rounds = max(LONG_ROUNDS, *(number + 1 for number in (0, *numbers) if number < MAX_LONG_ROUNDS))
    characters = max(LONG_OUTPUT_CHARACTERS, *(number + 1 for number in (0, *numbers) if number < MAX_LONG_CHARACTERS))
    line, forged = "the sum of 12 is 42\n", " ".join(control[:100]) + " "
    long, long_forged = (each * (characters // len(each) + 1) for each in (line, forged))

    def exchange(number: int, text: str, *, calls: bool) -> Round:
        said = "So " + (long if number == LONG_ANSWER_ROUND else f"{number}").strip()
        heard = text if number == LONG_TEXT_ROUND else f"{line}{number}"
        arguments = [{"code": f"{number}", "times": number}] if calls else []
        return Round("" if calls else said, "", arguments, [heard] if calls else [], None if calls else heard)

    def dialogue(text: str, last: int, *, calls: bool) -> Dialogue:
        exchanges = [exchange(number, text, calls=calls) for number in range(1, last + 1)]
        return Dialogue(None, line, exchanges, list(CORPUS_TOOLS) if calls else [], text is long_forged)

    return [
        *(dialogue(long, rounds, calls=calls) for calls in (False, True)),
        *(dialogue(long_forged, LONG_TEXT_ROUND, calls=calls) for calls in (False, True)),
    ]
