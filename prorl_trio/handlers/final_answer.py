"""A final answer told apart from the prose around it, and written so that math-verify can read it. Pure."""

# ruff: noqa: RUF001 - signs that look alike are what this is about
from __future__ import annotations

import re
from typing import Final, NamedTuple

__all__ = ["FinalAnswer", "extract_boxed", "find_final_answer", "is_words", "last_number", "read_final_answer"]

_ANCHOR: Final = re.compile(
    r"(?:\banswer(?:\s+(?:is|equals|should be|must be)\s*:?|\s*[:=])|####)[\s*_]*",
    re.IGNORECASE,
)
_SENTENCE_END: Final = re.compile(r"(?<=[^\s.])[.!?](?=\s+[A-Z]|\s*$)|\n")

_SIGNS: Final = {
    "−": "-", "–": "-", "﹣": "-", "－": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/",
    "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "½": "(1/2)", "⅓": "(1/3)", "¼": "(1/4)", "¾": "(3/4)",
    "⅔": "(2/3)", "\u00a0": r"\,", "\u202f": r"\,", "\u2009": r"\,", "√": r"\sqrt ",
}  # fmt: skip
_RAISED: Final = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
_LOWERED: Final = str.maketrans(_RAISED, "0123456789-")
_TEMPERATURE: Final = re.compile(r"\^\\circ\s*[CF](?![A-Za-z])")
_MARKDOWN: Final = re.compile(r"(?<![\w)}\]])(\*\*|__|``?|~~|\*)(?=\S)(.+?)(?<=\S)\1(?![\w({\[])", re.DOTALL)
_MATH_MODE: Final = re.compile(r"\\[()\[\]]|(?<!\\)\$|\\displaystyle|\\(?:left|right|big|Big)(?![a-zA-Z])|\\[!;:]")
_SPACE: Final = re.compile(r"\\,(?!\d)|(?<!\\)\\ |~(?!~)")
_CURRENCY: Final = {
    "$": "usd", "\\$": "usd", "€": "eur", "£": "gbp", "¥": "jpy", "₹": "inr", "₽": "rub", "₩": "krw", "usd": "usd",
    "eur": "eur", "gbp": "gbp", "dollar": "usd", "euro": "eur", "pound": "pound", "cent": "cent", "yen": "jpy",
}  # fmt: skip
_UNITS: Final = {
    **_CURRENCY,
    "km": "km", "kilometer": "km", "kilometre": "km", "m": "m", "meter": "m", "metre": "m", "cm": "cm", "mm": "mm",
    "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "millimetre": "mm", "mile": "mile", "mi": "mile",
    "inch": "in", "in": "in", "foot": "ft", "feet": "ft", "ft": "ft", "yard": "yd", "yd": "yd", "second": "s",
    "sec": "s", "s": "s", "minute": "min", "min": "min", "hour": "h", "hr": "h", "h": "h", "day": "day", "week": "week",
    "month": "month", "year": "year", "yr": "year", "g": "g", "gram": "g", "kg": "kg", "kilogram": "kg", "mg": "mg",
    "lb": "lb", "ounce": "oz", "oz": "oz", "l": "l", "liter": "l", "litre": "l", "ml": "ml", "milliliter": "ml",
    "gallon": "gal", "mph": "mile/h", "kph": "km/h", "degree": "deg", "deg": "deg", "radian": "rad", "rad": "rad",
}  # fmt: skip
"""Units by what they are: two that are known, and differ, are two answers."""
_MULTIPLES: Final = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip
_NEGATIVE: Final = re.compile(r"^(?:minus|negative)\s+", re.IGNORECASE)
_CHANGES: Final = frozenset({
    "not", "no", "never", "isnt", "isn't", "cannot", "can't", "wasn't", "doesn't", "neither", "nor", "none", "minus",
    "negative", "plus", "half", "halves", "third", "thirds", "quarter", "quarters", "twice", "double", "triple",
    "times", "squared", "square", "cubed", "cube", "root", "factorial", "divided", "multiplied", "least", "most",
    "more", "less", "fewer", "greater", "smaller", "larger", "above", "below", "over", "under", "between",
    "or", "either", "except", "but", "unless", "without", "maybe", "perhaps", "possibly", "wrong", "incorrect",
    "false", "if", "until", "power", "reciprocal", "inverse", "opposite", "hundred", "hundreds", "thousand",
    "thousands", "million", "millions", "billion", "billions", "trillion", "trillions", "dozen", "dozens", "score",
    "ten", "tens", "percentile", "modulo", "mod", "log", "ln", "sqrt", "sin", "cos", "tan", "per-cent",
    "unlike", "instead", "excluding", "other", "than", "different",
})  # fmt: skip
"""A word beside a number that makes another number of it, or none."""

_SEPARATING: Final = frozenset({"and", "or"})

_NUMBER: Final = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_PLAIN: Final = re.compile(rf"(?=[-.\d])(?=.*\d){_NUMBER}")
_STANDING_ALONE: Final = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)")
_LEADING: Final = re.compile(
    rf"(?P<number>(?=[-.\d])(?=\S*\d){_NUMBER})(?P<space>[\s~-]*)(?P<rest>[A-Za-z\\€£¥₹].*)", re.DOTALL
)
_IN_PROSE: Final = re.compile(
    rf"(?<![\w.,\\^{{-])(?P<currency>\\?\$|[€£¥₹₽₩])?(?P<number>(?=[-.\d])(?=\S*\d){_NUMBER})(?![\d^/*+=])"
)
_GROUPED: Final = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_LATEX_GROUPED: Final = re.compile(r"(?<=\d)(?:\{,\}|\\,|,\\!)(?=\d{3}(?!\d))")
_SPACE_GROUPED: Final = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_FORMULA_WITH_UNIT: Final = re.compile(r"(?P<formula>.*[\d)}])\s+(?P<unit>[A-Za-z][A-Za-z /^\d{}]*)", re.DOTALL)
_MIXED: Final = re.compile(r"(-?)(\d+) +(\d+)/(\d+)")
_SCIENTIFIC: Final = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,4})(?![\w.])")
_TIMES_TEN: Final = re.compile(r"(?<=\d)\s*[xX*]\s*10\^")
_TEXT: Final = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_FUNCTIONS: Final = re.compile(
    r"(?<![\\A-Za-z])(sqrt|log|ln|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|pi|infty)(?![A-Za-z])"
)
_CONSTANTS: Final = ("pi", "infty")
_INFINITE: Final = re.compile(r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", re.IGNORECASE)
_COMMAND: Final = re.compile(r"\\(?:begin|end)\s*\{[a-z]+\*?\}|\\[A-Za-z]+")
_LETTERS: Final = re.compile(r"[A-Za-z]+")


class FinalAnswer(NamedTuple):
    """An answer in LaTeX for math-verify, and the unit beside it, if it is known."""

    text: str
    unit: str = ""


def extract_boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{...}` in `text`, braces balanced; None without one or if empty."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for index in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : index].strip() or None
        start = text.rfind("\\boxed{", 0, start)
    return None


def find_final_answer(text: str) -> str:
    """The answer in what an agent gave as final: in a box, after `####`, after "the answer is", or all of it."""
    if (boxed := extract_boxed(text)) is not None:
        return boxed
    anchors = list(_ANCHOR.finditer(text))
    if not anchors:
        return text.strip()
    rest = text[anchors[-1].end() :].strip()
    end = _SENTENCE_END.search(rest)
    return (rest[: end.start()] if end else rest).strip()


def last_number(text: str) -> str | None:
    """Return the last number of `text` that stands alone, in digits; None without one. `3 + 4 = 7.` gives `7`."""
    numbers = _STANDING_ALONE.findall(text)
    return numbers[-1] if numbers else None


def is_words(text: str) -> bool:
    """Return whether an answer is words (`even`, `no solution`) or a letter to choose (`A`, `(a)`), and no formula."""
    bare = _spoken(text)
    return bool(re.fullmatch(r"\([A-Za-z]\)|[A-Z]|[Nn]o|[A-Za-z][A-Za-z' -]+[A-Za-z]", bare)) and not (
        _FUNCTIONS.fullmatch(bare) or _INFINITE.fullmatch(bare)
    )


def words_of(text: str) -> str:
    """Words as they are compared: without case, punctuation and articles."""
    bare = re.sub(r"[^a-z0-9' ]+", " ", _spoken(text).casefold())
    return " ".join(word for word in bare.split() if word not in ("the", "a", "an") or bare.strip() == word)


def _spoken(text: str) -> str:
    return _TEXT.sub(r"\1", text).replace("\\ ", " ").replace("~", " ").strip(" .!$")


def read_final_answer(text: str, *, k_is_thousand: bool = True) -> FinalAnswer | None:
    """Return the meaning of an answer without most of its prose; None if it has none, or more than one.

    Markdown, currency, units, thousands separators and what LaTeX has for display are taken off. A comma separates
    thousands only where digits stand in such groups: `1,234` is a number, `1, 2` and `1,2` are two. A number among
    words counts if no word beside it changes it, and there is no other. Raises nothing.

    Args:
        text: the answer.
        k_is_thousand: `2k` is 2000; otherwise it is twice a `k`.
    """
    text = _undress(text)
    if k_is_thousand:
        text = re.sub(r"(?<=\d)[kK]$", " thousand", text)
    if not text:
        return None
    if (number := _number_with_words(text)) is not None:
        return number if number.text else None
    return FinalAnswer(_latex(text))


def _undress(text: str) -> str:
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    text = re.sub(f"[{_RAISED}]+", lambda found: f"^{{{found[0].translate(_LOWERED)}}}", text)
    text = _SPACE.sub(" ", _TEMPERATURE.sub(" degrees", text))
    before = ""
    while before != text:
        before, text = text, _MARKDOWN.sub(r"\2", text.strip())
    text = _MATH_MODE.sub(lambda found: "$" if found[0] == "$" and _is_price(text, found.end()) else "", text)
    text = text.replace("\\%", "%").replace("\\{,\\}", ",").strip().strip('"“”').strip()
    text = re.sub(r"(?<!\\)[.,;]$|(?<![\d)}])!$", "", text.strip("*_` ")).rstrip()
    return re.sub(r"^(?:=|≈|~|is)\s*", "", text)


def _is_price(text: str, at: int) -> bool:
    """Return whether a dollar sign is a price's, not one of a pair around a formula."""
    return text.count("$") % 2 == 1 and re.match(r"\s*-?[\d.]", text[at:]) is not None


def _number_with_words(text: str) -> FinalAnswer | None:
    """Return the one number among words, currency and units; None if this is no such text.

    Its text is empty where the words make another number of it, or there are several.
    """
    sign = ""
    if (negative := _NEGATIVE.match(text)) is not None:
        sign, text = "-", text[negative.end() :].strip()
    plain = text.replace("\\$", "$")
    prose = _TEXT.sub(lambda found: f" {found[1]} ", plain)
    if (priced := re.fullmatch(r"(-?)\s*([$€£¥₹₽₩])\s*(-?)\s*(.+)", prose, re.DOTALL)) is not None and _PLAIN.match(
        priced[4]
    ):
        inner = _number_with_words(priced[4]) or FinalAnswer(priced[4])
        text = inner.text and f"{sign}{priced[1]}{priced[3]}{inner.text}"
        return FinalAnswer(_without_groups(text), inner.unit or _CURRENCY[priced[2]])
    if _PLAIN.fullmatch(prose) or _SPACE_GROUPED.fullmatch(prose):
        return FinalAnswer(sign + _without_groups(prose.replace(" ", "")))
    if (leading := _LEADING.fullmatch(prose)) is not None:
        counted = _measured(leading["number"], leading["rest"].strip(), attached=not leading["space"])
        if counted is not None:
            return FinalAnswer(counted.text and sign + counted.text, counted.unit)
    measured = _FORMULA_WITH_UNIT.fullmatch(prose)
    if measured is not None and not _is_prose(measured["formula"]):
        unit, words = _unit_of(measured["unit"]), measured["unit"]
        if unit or (_is_prose(words) and _harmless(words)):
            return FinalAnswer(f"{sign}{_latex(measured['formula'])}", unit)
    if sign and not _is_prose(prose):
        return FinalAnswer(f"-({_latex(text)})")
    if not _is_prose(prose):
        return None
    return _single_number(prose)


def _measured(number: str, rest: str, *, attached: bool) -> FinalAnswer | None:
    """A number and what stands behind it, if that is a multiple, a unit, or words that change nothing."""
    value = _without_groups(number)
    first = _LETTERS.match(rest)
    word = first[0].casefold() if first else ""
    if (multiple := _MULTIPLES.get(word.removesuffix("s"))) is not None:
        beyond = rest[len(word) :].strip()
        if _LETTERS.search(beyond) and not _harmless(beyond):
            return FinalAnswer("")
        return FinalAnswer(f"{value}*{multiple}", _unit_of(beyond))
    unit = _unit_of(rest)
    if unit:
        return FinalAnswer(value, unit)
    if attached or "\\" in rest or not _is_prose(rest):
        return None
    return FinalAnswer(value) if _harmless(rest) else FinalAnswer("")


def _unit_of(text: str) -> str:
    """The unit that all of `text` is, in a form to be compared; empty if it is none that is known."""
    text = re.sub(r"\b(square|cubic|sq|cu)\.?\s+([A-Za-z]+)", lambda f: f"{f[2]}^{2 if f[1][0] == 's' else 3}", text)
    text = re.sub(r"\s+per\s+(?:an?\s+)?", "/", text.strip().strip(".")).replace("{", "").replace("}", "")
    known: list[str] = []
    for part in re.split(r"\s*/\s*", text):
        unit = re.fullmatch(r"\\?([A-Za-z]+|[$€£¥₹])\s*(?:\^?([1-4]))?", part.strip())
        if unit is None:
            return ""
        name = unit[1].casefold()
        found = _UNITS.get(name) or _UNITS.get(name.removesuffix("s")) or _UNITS.get(name.removesuffix("es"))
        if found is None:
            return ""
        known.append(found + (unit[2] or ""))
    return "/".join(known)


def _is_prose(text: str) -> bool:
    """Return whether it has words that are no function, command or product of letters."""
    rest = _INFINITE.sub(" ", _FUNCTIONS.sub(" ", _COMMAND.sub(" ", text)))
    return any(len(letters) > 2 and letters.casefold() not in _SEPARATING for letters in _LETTERS.findall(rest))


def _harmless(words: str) -> bool:
    """Return whether words beside a number leave it as it is, and are no second answer."""
    return not (set(re.findall(r"[a-z'-]+", words.casefold())) & _CHANGES or re.search(r"\d", words))


def _single_number(prose: str) -> FinalAnswer:
    """The number of a sentence with no other, and no word that changes it; empty text otherwise."""
    numbers = list(_IN_PROSE.finditer(prose))
    if len(numbers) != 1 or "\\" in prose:
        return FinalAnswer("")
    found = numbers[0]
    before, after = prose[: found.start()], prose[found.end() :].strip()
    unit = _CURRENCY[found["currency"]] if found["currency"] else ""
    before = re.sub(r"\b(?:minus|negative)\s*$", "", before, flags=re.IGNORECASE)
    sign = "-" if len(before) < found.start() and prose[: found.start()] != before else ""
    if not _harmless(before):
        return FinalAnswer("")
    if not after.strip(" .!%"):
        percent = "%" if "%" in after else ""
        return FinalAnswer(sign + _without_groups(found["number"]) + percent, unit)
    if not re.match(r"\s|[.!]", prose[found.end() :]):
        return FinalAnswer("")
    measured = _measured(found["number"], after.rstrip(" .!"), attached=False)
    if measured is None or not measured.text:
        return FinalAnswer("")
    return FinalAnswer(sign + measured.text, measured.unit or unit)


def _without_groups(number: str) -> str:
    return number.replace(",", "") if _GROUPED.search(number) else number


def _latex(text: str) -> str:
    """A formula in the words of LaTeX."""
    text = _LATEX_GROUPED.sub("", text)
    if not re.search(r"[(\[{]", text):  # in brackets it is a list
        text = _GROUPED.sub(lambda found: found[0].replace(",", ""), text)
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    text = _TIMES_TEN.sub(r"\\times 10^", text)
    text = re.sub(r"10\^([+-]?\d+)", r"10^{\1}", text)
    text = _MIXED.sub(lambda m: f"{m[1]}({m[2]}+\\frac{{{m[3]}}}{{{m[4]}}})", text)
    text = text.replace("**", "^").replace("%", "\\%")
    text = _INFINITE.sub(r"\\infty ", text)
    return _FUNCTIONS.sub(_command, text).strip()


def _command(found: re.Match[str]) -> str:
    name = found[1]
    if name == "sqrt":  # math-verify puts what follows into braces itself
        return name
    return f"\\{name} " if name in _CONSTANTS else f"\\{name}"
