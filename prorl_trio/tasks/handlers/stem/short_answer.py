# ruff: noqa: RUF001 - unusual signs are the subject of this module
"""Short answers in words: normalised exact match, and F1 over words."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from prorl_trio.tasks.handlers.stem.plain_text import plain
from prorl_trio.tasks.handlers.stem.stated import stated_answers, without_reason

if TYPE_CHECKING:
    from collections.abc import Sequence

_GREEK: Final = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "ι": "iota", "κ": "kappa", "λ": "lambda", "µ": "mu", "ν": "nu", "ξ": "xi", "π": "pi", "ρ": "rho", "σ": "sigma",
    "ς": "sigma", "τ": "tau", "υ": "upsilon", "φ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Γ": "Gamma",
    "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega",
}  # fmt: skip
_LETTERS: Final = str.maketrans(
    {"ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "đ": "d", "ß": "ss", "ı": "i"}
)
_BLANKS: Final = re.compile(r"\s{2,}")
_WORD: Final = re.compile(r"[^\W\d_]{2,}")
_MARK: Final = re.compile(r"([_^])\((-?[\w+]{1,12}-?)\)")
_RULES: Final = tuple(
    (re.compile(rule), by)
    for rule, by in (
        (r"(?<=[A-Za-z]{2})_(?=[A-Za-z]{2})|__", "‗"),  # in a program's names; not a subscript
        (
            r"(?<=[\d)\]])\s?\^(?!\d?[+-](?!\w))|\^(?=[^\W\d_])(?![A-Za-z]*[+-](?:\s|$))",
            "↑",
        ),  # a power, not a charge or an isotope
        (r"√\((\w+)\)(?!\w)", r"√\1"),
        (r"\((\d+/\d+)\)", r"\1"),
        (r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])", ","),  # grouped digits
        (r"(?<=\d),\s?(?=[-+]?\d)", " "),
        (r"(?<=\d)\s*[×·*]\s*(?=\d)", "*"),
        (r"\s*&\s*", " and "),
        (r"(?<![^\W\d_])([^\W\d_])\.(?=[^\W\d_]\.?)", r"\1"),  # U.S.
        (r"(?<=[^\W\d_])\.(?=[^\W\d_])", ""),  # Ph.D., node.js
        (r"(?<=[^\W\d_])'(?=[^\W\d_])", ""),  # Newton's
        (r"(?<=[^\W\d_]{2})'(?=\s|$)", ""),
        (r"(?<![\w)\]}'\"′″])['\"](?=\S)", " "),
        (r"(?<=[^\s\d])\"|(?<=[^\W\d_]{2}[.,;!?])'", " "),
        (r"(?<=[^\W\d_]{2})[!?](?=\s|$)", " "),
        (r"[,;:?](?=\s|$)|(?<=\D)[,;](?=\D)", " "),
        (r"(?<!\.)\.(?=\s|$)", " "),
        (r"(?<=[^\W\d_]{3})\s?\(([IVX])\)", r" \1 "),  # copper(I)
        (r"[(\[]([^\W\d_]{2,}(?:[\s-][^\W\d_]+)*)[)\]]", r" \1 "),
        (r"(?<=[^\W\d_]{2})[-–](?=[^\W_])|(?<=[^\W_])[-–](?=[^\W\d_]{2})", " "),  # a hyphen
        (r"(?<=[^\W\d_]{2})\s+[-–]\s+(?=[^\W\d_]{2})", " "),
        (r"–", "-"),
        (r"(?<=[\w)])\s+(?=[%!‰°])", ""),
        (r"\s*([<>=≤≥≠≈+*/^×÷±→⇌∪∩∈⊂⊆∧∨|↑])\s*", r"\1"),
        (r"(?<=[^\s])\s+-\s*(?=\S)|(?<=\S)-\s+(?=\S)", "-"),
    )
)
"""Forms that may be written in more than one way. Signs without a rule are significant."""
_KEYS: Final = frozenset({"minor", "major", "flat", "sharp"})


def normalise(text: str, *, case_sensitive: bool = False, articles: bool = False) -> str:
    """Return a text in its normalised form, for comparison by `are_same`.

    The form lacks case, accents, markdown and LaTeX's display; articles, unless `articles` is set; the punctuation of
    prose, hyphens, dots of abbreviations, and commas in numbers. Greek letters become their names. Meaningful signs
    stay: `<`, `%`, `#`, `!` of a number, `*`, `^`, `'` of a derivative, the charge of an ion. Linear in the text.
    """
    text = plain(text)
    if not text.isascii():
        text = " ".join(map(_without_accents, text.split(" ")))
        for greek, name in _GREEK.items():
            text = text.replace(greek, name)
    text = _MARK.sub(r"\1\2", text)
    for rule, by in () if text.replace(" ", "").isalnum() else _RULES:  # all rules are about signs
        changed = rule.sub((lambda found: found[1].replace(",", "")) if by == "," else by, text)
        if changed is not text:  # several blanks would make the next rule's search for them quadratic
            text = _BLANKS.sub(" ", changed)
    words = text.split()
    if not articles:
        words = [word for place, word in enumerate(words) if not _is_article(words, place)]
    joined = " ".join(words)
    return joined if case_sensitive else joined.casefold()


def _without_accents(word: str) -> str:
    """Return a word without accents; a single letter keeps its accent."""
    if word.isascii() or len(word) < 2:
        return word
    out = []
    for letter in unicodedata.normalize("NFC", word).translate(_LETTERS):
        base = unicodedata.normalize("NFD", letter)[0] if unicodedata.category(letter)[0] == "L" else letter
        out.append(base if unicodedata.name(base, "").startswith(("LATIN", "GREEK")) else letter)
    return "".join(out)


def _is_article(words: list[str], place: int) -> bool:
    """Return whether a word is an article; not so in `Vitamin A`, `Class A amplifier` and `A minor`."""
    word = words[place]
    if word.casefold() not in ("a", "an", "the") or place + 1 == len(words):
        return False
    following = words[place + 1]
    if not _WORD.match(following):
        return word.casefold() == "the" and following[0].isalnum()
    return word.casefold() != "a" or word == "a" or (place == 0 and following.casefold() not in _KEYS)


def are_same(first: str, second: str) -> bool:
    """Return whether two normalised texts are the same.

    Superscripts and subscripts may be marked in only one text (`Ca^2+`, `H_2O`; `Ca2+`, `H2O`), but a superscript never
    equals a subscript.
    """
    if first == second:
        return True
    if not ("^" in first or "_" in first or "^" in second or "_" in second):
        return False
    bare, marks = _unmarked(first)
    others, other_marks = _unmarked(second)
    return bare == others and all(other_marks.get(place, mark) == mark for place, mark in marks.items())


def _unmarked(text: str) -> tuple[str, dict[int, str]]:
    parts: list[str] = []
    marks: dict[int, str] = {}
    for sign in text:
        if sign in "^_":
            marks[len(parts)] = sign
        else:
            parts.append(sign)
    return "".join(parts), marks


def compare_short_answer(text: str, golds: Sequence[str], *, case_sensitive: bool = False) -> dict[str, Any]:
    """Return `equal`, whether the answer is one of `golds`, and `f1`, the best harmonic mean of precision and recall.

    An exact copy of a gold answer is correct. F1 counts words as SQuAD's evaluation does (Rajpurkar et al., 2016).
    """
    stated = stated_answers(text)[0]
    said = normalise(stated, case_sensitive=case_sensitive)
    wanted = [normalise(gold, case_sensitive=case_sensitive) for gold in golds]
    others = {text.strip(), without_reason(stated)} - {stated}
    forms = [said, *(normalise(form, case_sensitive=case_sensitive) for form in others)]
    equal = text.strip() in {gold.strip() for gold in golds} or any(
        bool(each) and any(are_same(form, each) for form in forms) for each in wanted
    )
    return {
        "equal": equal,
        "f1": 1.0 if equal else max((_f1(said.split(), each.split()) for each in wanted), default=0.0),
        "parsed_answer": said,
    }


def _f1(said: list[str], wanted: list[str]) -> float:
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0
