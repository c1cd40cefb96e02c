# ruff: noqa: RUF001 - dashes of many kinds are what this file is about
"""Short answers in words: normalised exact match, and F1 over their words."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from prorl_trio.handlers.final_answer import find_final_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["compare_short_answer", "normalise"]

_TEXT: Final = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
_DASHES: Final = str.maketrans("−–—‐‑", "-----")
_PUNCTUATION: Final = re.compile(r"[^\w\s.,/+-]|_|[.,/](?!\d)|(?<!\d)[,/]|(?<=\w)-(?=\w)|(?<!\w)-(?!\w)")
"""Not what belongs to a number (`-5`, `.5`, `1/2`) or to an ion (`Ca2+`, `Cl-`)."""
_ARTICLES: Final = frozenset({"a", "an", "the"})


def normalise(text: str, *, case_sensitive: bool = False) -> str:
    """Return a text as it is compared: without case, punctuation and articles, in compatibility form (`H₂O` is `H2O`).

    As SQuAD's evaluation does it, but for the signs of numbers and ions: `-5`, `1.5`, `1/2` and `Ca2+` keep them.
    """
    text = unicodedata.normalize("NFKC", _TEXT.sub(r"\1", text)).translate(_DASHES)
    if not case_sensitive:
        text = text.casefold()
    words = _PUNCTUATION.sub(" ", text).split()
    return " ".join([word for word in words if word.casefold() not in _ARTICLES] or words)


def compare_short_answer(text: str, golds: Sequence[str], *, case_sensitive: bool = False) -> dict[str, Any]:
    """Return `equal`, whether the answer is one of `golds`, and `f1`, the best harmonic mean of precision and recall.

    F1 counts words as SQuAD's evaluation does (Rajpurkar et al., 2016).
    """
    said = normalise(find_final_answer(text), case_sensitive=case_sensitive)
    wanted = [normalise(gold, case_sensitive=case_sensitive) for gold in golds]
    return {
        "equal": bool(said) and said in wanted,
        "f1": max((_f1(said.split(), each.split()) for each in wanted), default=0.0),
        "parsed_answer": said,
    }


def _f1(said: list[str], wanted: list[str]) -> float:
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0
