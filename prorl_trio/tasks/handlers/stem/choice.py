"""Answers to multiple-choice questions: a letter, or the text of a choice."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from prorl_trio.tasks.handlers.stem.plain_text import plain
from prorl_trio.tasks.handlers.stem.short_answer import are_same, normalise
from prorl_trio.tasks.handlers.stem.stated import HEDGES, REASON, first_sentence, stated_answers, without_reason

if TYPE_CHECKING:
    from collections.abc import Sequence

LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_BEYOND_CHARS: Final = 600
"""An answer longer than the longest choice by more than this names none."""
_LEAD: Final = re.compile(
    r"(?:(?:so|thus|hence|therefore|then|the|correct|right|best|final|most|likely|appropriate|suitable|accurate|answer|"
    r"option|choice|letter|statement|is|it|its|it's|that|would|be|must|should|we|i(?=\s+[a-z]{2})|choose|chose|pick|select|"
    r"i'd|selected|chosen|say|think|believe|go|with|going|my|to|this|question)(?![A-Za-z'])[\s:,]*|[=:\s]|-\s)*",
    re.IGNORECASE,
)
_LETTER: Final = re.compile(
    r"(?P<open>[(\[{<\"']*)\s*(?P<letter>[A-Za-z])(?P<close>\s?[)\]}>\"'][)\]}>\"']*)?(?P<mark>\s?[.:,;]|\s?[-–](?=\s))?"  # noqa: RUF001
    r"(?P<rest>(?![\w+#^_'*/=&%-]).*)?",
    re.DOTALL,
)
_LONE: Final = re.compile(r"(?:#+\s)?[(\[{<\"'*`\s✓✔✅]*([A-Za-z])\s?[)\]}>\"'*`]*\s?[.,:;!]?[*\s✓✔✅]*")
_EXPLAINS: Final = re.compile(
    r"(?:it|this|that|the|these|those|they|here|so|thus|hence|therefore|in|for|by|we|when|given|using|from|at|an?)\s",
    re.IGNORECASE,
)
_IS_RIGHT: Final = re.compile(
    r"\s*(?:is|would be|must be|should be)\s+(?:(?:the|my|a)\s+)?(?:only\s+)?(?:(?:most|best|single)\s+)?"
    r"(?:(?:correct|right|best|final|true|accurate|appropriate|likely)\s*)?(?:one|answer|option|choice|statement)?[.!]?\s*",
    re.IGNORECASE,
)
_BEHIND: Final = re.compile(
    r"(.+?\S)(?:\s?[(\[](?:(?:option|choice|answer)\s)?|,\s(?:option|choice)\s)([A-Z])[)\]]?\.?", re.DOTALL
)
"""The text of a choice, followed by its letter."""
_NEEDLESS_SPACE: Final = re.compile(r"(?<=\W) | (?=\W)|(?<=\d) (?=[^\W\d])")
_IDLE_ZEROS: Final = re.compile(r"(?<![\w.,])(\d+)(?:\.0+|(\.\d*[1-9])0+)(?![\d.])")
_NO_ZERO: Final = re.compile(r"(?<![\w.,)])\.(?=\d)")
_NOT_OTHER: Final = re.compile(r"\W{0,4}(?:and\s)?not\s(?:option\s|choice\s)?\W?([A-Z])\W{0,3}", re.IGNORECASE)
_SIMPLE_FRACTION: Final = re.compile(r"\((\d{1,9}/\d{1,9})\)")
_ALSO: Final = re.compile(r"(?<![A-Za-z])(?:or|but|wait|actually|maybe|perhaps)[\s,]+[(\[]?[A-Z](?![A-Za-z])")
"""A second letter that may also be meant."""
_OTHER_LETTER: Final = re.compile(r"(?<![A-Za-z'])(?:[(\[]([A-Za-z])[)\]]|([B-HJ-Z])(?![A-Za-z'’]))")  # noqa: RUF001


def read_choice(text: str, choices: Sequence[str]) -> str | None:
    """Return the letter of the single choice that an answer names; None if it names none or several.

    Accepted forms are `C`, `(c)`, `C.`, `Option C`, `\\boxed{C}`, `the answer is C`, `C is correct`, `C. the text of C`
    or a part of that text, and the text of exactly one choice. Choices are compared first as written, then step by step
    without the parts that `normalise` removes. So choices that differ only in case or in one sign can be named. A
    letter with the text of another choice names none. Neither does an answer that is revoked or extended by another
    one.
    """
    texts = _texts(tuple(choices))
    for stated in stated_answers(text):
        if len(stated) <= texts.longest + MAX_BEYOND_CHARS and (found := texts.read(stated)) is not None:
            return LETTERS[found]
    return None


class _Texts:
    """The choices in the forms with which answers are compared."""

    def __init__(self, choices: Sequence[str]) -> None:
        self._count = len(choices)
        self._choices = choices
        self._forms: list[list[str]] = []
        self.longest = max(map(len, choices))

    def read(self, said: str) -> int | None:
        """Return the index of the named choice."""
        bare = plain(said)
        alone = _alone(bare)
        if len(alone) == 1 and alone in LETTERS[: self._count]:
            return LETTERS.index(alone)
        strict = self._same(said, STRICT)
        if len(alone) == 1 and (place := LETTERS.find(alone.upper())) in range(self._count):
            return place if strict in (None, place) else None
        if strict is not None:
            return strict
        head, _, tail = said.strip().partition("\n")
        place = LETTERS.find(_alone(plain(head)) or "?") if tail else -1
        if place in range(self._count) and self._explains(plain(tail), place):
            return place
        named, is_named = self._lettered(bare)
        if is_named:
            return named
        if (named := self._same(said)) is not None:
            return named
        if (behind := _BEHIND.fullmatch(bare)) is not None and (place := LETTERS.find(behind[2])) in range(self._count):
            return place if self._same(behind[1]) == place else None
        return self._same(first_sentence(without_reason(bare)))

    def _same(self, said: str, forms: int | None = None) -> int | None:
        """Return the only choice with this text, by the first of `forms` that matches any; None for several."""
        for number, form in enumerate(_FORMS[:forms]):
            wanted = form(said)
            same = [place for place, text in enumerate(self._in_form(number)) if text and are_same(text, wanted)]
            if same:
                return same[0] if len(same) == 1 else None
        return None

    def _in_form(self, number: int) -> list[str]:
        """Return the choices in a form of `_FORMS`, computed lazily because most answers need only the first forms."""
        while len(self._forms) <= number:
            self._forms.append([_FORMS[len(self._forms)](choice) for choice in self._choices])
        return self._forms[number]

    def _lettered(self, said: str) -> tuple[int | None, bool]:
        """Return the choice named by its letter, and whether any letter is named."""
        lead = _LEAD.match(said)
        start = lead.end() if lead else 0
        found = _LETTER.fullmatch(said[start:])
        if found is None:
            return None, False
        is_marked = bool(found["open"] and found["close"]) or bool(found["close"] or found["mark"])
        led = bool(said[:start].strip(" =:-"))
        letter, rest = found["letter"], (found["rest"] or "").strip()
        if letter.islower() and rest and not is_marked and not (led and _IS_RIGHT.fullmatch(rest)):
            return None, False  # an article
        place = LETTERS.find(letter.upper())
        if place >= self._count:
            return None, is_marked
        return (place if self._agrees(rest, place) else None), True

    def _agrees(self, rest: str, own: int) -> bool:
        """Return whether the text after a letter does not contradict that letter's choice."""
        said = self._same(rest)
        rest = re.sub(r"^[-–]\s", "", rest).strip(" .()[]{}\"':,;")  # noqa: RUF001
        if not rest or _IS_RIGHT.fullmatch(rest):
            return said in (None, own)
        said = self._same(rest) if said is None else said
        if said is not None:
            return said == own
        texts = self._in_form(len(_FORMS) - 1)
        if _loosest(rest) == texts[own]:
            return True  # another choice has the same text
        if (reason := REASON.search(rest)) is not None and not HEDGES.search(rest[: reason.start()]):
            head = rest[: reason.start()]
            return not _ALSO.search(rest, reason.end()) and (not head or self._agrees(head, own))
        if (right := _IS_RIGHT.match(rest)) is not None and right.end() and right[0].strip().casefold() != "is":
            return self._agrees(rest[right.end() :], own)
        sentence = first_sentence(rest)
        if sentence != rest:
            return self._agrees(sentence, own)
        if (other := _NOT_OTHER.fullmatch(rest)) is not None:
            return other[1].upper() != LETTERS[own]
        words, mine = _loosest(rest), texts[own]
        if _EXPLAINS.match(rest) and not HEDGES.search(rest) and not _has_other(rest, own):
            return not self._others_within(words, own)
        if not words or not mine:
            return False
        if _within(mine, words):
            beyond = f" {words} ".replace(f" {mine} ", " ", 1)
            return not HEDGES.search(beyond) and not self._others_within(beyond, own) and not _has_other(rest, own)
        shortened = words.rstrip(".").strip()
        return bool(shortened) and _within(shortened, mine) and len(shortened) > 2

    def _explains(self, text: str, own: int) -> bool:
        """Return whether the text after a letter neither revokes it nor names another choice."""
        doubtful = HEDGES.search(text) or _has_other(text, own)
        return not doubtful and not self._others_within(_loosest(text), own)

    def _others_within(self, words: str, own: int) -> bool:
        return any(
            place != own and text and _within(text, words) for place, text in enumerate(self._in_form(len(_FORMS) - 1))
        )


@lru_cache(maxsize=16)
def _texts(choices: tuple[str, ...]) -> _Texts:
    """Return the cached forms, because the rollouts of a group answer the same question."""
    return _Texts(choices)


def _within(part: str, whole: str) -> bool:
    return f" {part} " in f" {' '.join(whole.split())} "


def _has_other(text: str, own: int) -> bool:
    """Return whether another letter is named as well."""
    others = (found[1] or found[2] for found in _OTHER_LETTER.finditer(text))
    return any(other.upper() != LETTERS[own] for other in others)


def _alone(text: str) -> str:
    """Return the single letter in a text, without surrounding brackets, quotes and point; empty if there is none."""
    found = _LONE.fullmatch(text)
    return found[1] if found else ""


def _exact(text: str) -> str:
    return text.strip()


def _undressed(text: str) -> str:
    return _NEEDLESS_SPACE.sub("", _SIMPLE_FRACTION.sub(r"\1", _trimmed(plain(text))))


def _trimmed(text: str) -> str:
    text = text.strip()
    if len(text) > 2 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1].strip()
    return text.removesuffix(".") if len(text) > 1 and not text.endswith("..") else text


def _cased(text: str) -> str:
    return normalise(_trimmed(text), case_sensitive=True, articles=True)


def _folded(text: str) -> str:
    return normalise(_trimmed(text), articles=True)


def _loosest(text: str) -> str:
    return normalise(_IDLE_ZEROS.sub(r"\1\2", _NO_ZERO.sub("0.", _trimmed(text))))


STRICT: Final = 4
"""Number of forms in `_FORMS` that keep articles: `A Green` may be the letter A."""
_FORMS: Final = (_exact, _undressed, _cased, _folded, _loosest)
"""From the exact text to its loosest form."""
