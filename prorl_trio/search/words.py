"""The rule that splits documents and queries into comparable words."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

WORDS_VERSION: Final = 1
"""Increment this when `words_of` changes, so that existing indexes are rebuilt."""
_WORD: Final = re.compile(r"\w+")
_STOP_WORDS: Final = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "from", "if", "in", "into", "is", "it", "its",
    "of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was", "were",
    "what", "which", "who", "will", "with",
})  # fmt: skip
MAX_WORD_CHARS: Final = 64


def words_of(text: str) -> list[str]:
    """Return the words of a text: letters and digits, without case and compatibility forms, without stop words.

    A word longer than `MAX_WORD_CHARS` characters (a sequence, an encoded file) is truncated.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return [word[:MAX_WORD_CHARS] for word in _WORD.findall(folded) if word not in _STOP_WORDS]
