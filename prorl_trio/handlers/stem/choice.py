"""Answers to multiple choice: a letter, or the text of a choice."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from prorl_trio.handlers.final_answer import find_final_answer
from prorl_trio.handlers.stem.short_answer import normalise

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LETTERS", "read_choice"]

LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_TEXT: Final = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_DRESS: Final = re.compile(r"\\[()\[\]]|[*_$`]")
_LETTER: Final = re.compile(
    r"(?:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)\s*(?:is)?\s*:?\s*)?"
    r"(?P<open>[(\[]?)(?P<letter>[A-Za-z])(?P<close>[)\].:]*)(?P<rest>\s.*)?",
    re.DOTALL | re.IGNORECASE,
)


def read_choice(text: str, choices: Sequence[str]) -> str | None:
    """Return the letter of the one choice that an answer names; None if it names none, or more than one.

    `C`, `(c)`, `C.`, `Option C`, `\\boxed{C}`, `the answer is C`, `C. the text of C`, and the text of exactly one
    choice. A letter with the text of another choice names none.
    """
    said = _DRESS.sub("", _TEXT.sub(r"\1", find_final_answer(text))).strip()
    texts = [normalise(choice) for choice in choices]
    found = _LETTER.fullmatch(said)
    if found is not None and (place := LETTERS.find(found["letter"].upper())) < len(choices):
        rest = normalise(found["rest"] or "")
        if not rest or rest == texts[place]:
            return LETTERS[place]
    same = [place for place, each in enumerate(texts) if each and each == normalise(said)]
    return LETTERS[same[0]] if len(same) == 1 else None
