"""Parse a number or a formula with its unit, percent sign or noun, and the single number of a sentence. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from prorl_trio.tasks.handlers.math_formula import NAMES, Formula, Unreadable, parse


class Number(NamedTuple):
    """A number or a formula, the significant digits of a decimal (0 for an exact one), a percent sign, and the unit."""

    formula: Formula
    digits: int = 0
    percent: bool = False
    unit: str = ""


_CURRENCY: Final = {
    "$": "usd", "€": "eur", "£": "gbp", "¥": "jpy", "₹": "inr", "₽": "rub", "₩": "krw", "usd": "usd",
    "eur": "eur", "gbp": "gbp", "dollar": "usd", "euro": "eur", "pound": "pound", "cent": "cent", "yen": "jpy",
    "yuan": "cny", "rupee": "inr", "Rs": "inr",
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
    "mol": "mol", "mole": "mol", "hz": "hz", "hertz": "hz", "newton": "n", "joule": "j", "kj": "kj", "watt": "w",
    "kw": "kw", "kwh": "kwh", "pascal": "pa", "pa": "pa", "kpa": "kpa", "volt": "v", "ohm": "ohm", "kelvin": "k",
    "rpm": "rpm",
}  # fmt: skip
"""Units by dimension: two different known units make two different answers."""
_MULTIPLES: Final = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip
_SMALL: Final = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS: Final = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SPELLED: Final = {
    **{word: n for n, word in enumerate(_SMALL)},
    **{word: 10 * n for n, word in enumerate(_TENS, 2)},
    **{f"{ten} {one}": 10 * n + k for n, ten in enumerate(_TENS, 2) for k, one in enumerate(_SMALL[1:10], 1)},
    "one half": "1/2", "a half": "1/2", "half": "1/2", "one third": "1/3", "two thirds": "2/3", "one quarter": "1/4",
    "one fourth": "1/4", "three quarters": "3/4", "three fourths": "3/4", "one hundred": 100, "one thousand": 1000,
}  # fmt: skip
"""Number words."""
_ORDINALS: Final = "first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth"
_SPELLED_FIRST: Final = re.compile(
    rf"({'|'.join(sorted(_SPELLED, key=len, reverse=True))})(?=\s)(?<!one(?=\s+of\b))(?!\s+(?:{_ORDINALS})\b)",
    re.IGNORECASE,
)
_CHANGES: Final = frozenset(
    """
    not no never isnt isn't cannot can't wasn't doesn't neither nor none minus negative plus half halves third thirds
    quarter quarters twice double triple times squared cubed root factorial divided multiplied least most more less
    fewer greater smaller larger above below over under between or and either except but unless without maybe perhaps
    possibly wrong incorrect false if when for until power reciprocal inverse opposite hundred hundreds thousand
    thousands million millions billion billions trillion trillions dozen dozens score ten tens percentile modulo mod
    base per-cent unlike instead excluding percent think guess whenever provided given assuming where otherwise while
    such with quadrillion quintillion lakh crore gross fifth fifths sixth sixths seventh sevenths eighth eighths
    ninth ninths tenth tenths twelfth twelfths hundredth hundredths thousandth thousandths factorials squares cubes
    roots percentiles cis choose point suppose assume doubt upward upwards onward onwards
    """.split()  # noqa: SIM905 - a list of strings is harder to read
)
"""A word next to a number that changes its value, negates it, or adds a condition."""
_CHANGES_BEFORE: Final = (_CHANGES - {"and"}) | {
    "square",
    "cube",
    "other",
    "than",
    "different",
    "log",
    "sin",
    "any",
    "including",
}
_RELATED: Final = re.compile(
    r"(?:([A-Za-z]+)\s+)?(?<![A-Za-z])(of|to|by|from|like|near|after|before|within|into)\s*$", re.IGNORECASE
)
"""A preposition directly before a number that makes it part of another quantity: `a multiple of 18`."""
_STATING: Final = {
    "of": frozenset((
        "total", "value", "result", "answer", "amount", "sum", "cost", "price", "profit", "average", "maximum",
        "minimum", "mean", "length", "area", "volume", "distance", "speed", "count", "probability",
    )),
    "to": frozenset(("equal", "equals", "comes", "amounts", "adds", "sums", "back")),
}  # fmt: skip
"""Words that make the number after such a preposition the answer itself: `a total of 18`."""
_NEGATIVE: Final = re.compile(r"^(?:minus|negative)\s+", re.IGNORECASE)
_RATE: Final = re.compile(r"(?:\s*/\s*|\s+(?:per|an?|every)\s+)(?!hundred|thousand|dozen)[A-Za-z]{3,}$|\s+each$")
_PRICE: Final = re.compile(r"(?P<sign>-?)\s*(?:US)?(?P<currency>[$€£¥₹₽₩]|Rs(?=\.?\s))\.?\s*(?P<inner>-?)\s*(?=[\d.])")
_BEHIND: Final = re.compile(r"(?:(?<=[\d)}\]!|.])|(?<=[\w)}\]!|.]\s))[A-Za-z$€£¥₹]")
_PHRASE: Final = re.compile(r"[A-Za-z$€£¥₹](?:[A-Za-z$€£¥₹./^{}()'\s\d*-]|\\cdot(?![A-Za-z]))*")
_ANGLE: Final = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*([CF])?$")
_QUOTIENT: Final = re.compile(r"\\frac\s*\{\s*([A-Za-z]+)\s*\}\s*\{\s*([A-Za-z]+\s*(?:\^\s*\{?2\}?)?)\s*\}$")
_ALTOGETHER: Final = re.compile(r"(?:^|\s)(?:in (?:total|all)|altogether|overall)$")
_SHORT_NOUNS: Final = frozenset(
    """
    a.m p.m am pm of egg men cup day car cat dog pen box bag way pie toy kid boy hen cow pig bus key hat jar can bar
    sq ft gal tie set row job fan map bpm pts fps
    """.split()  # noqa: SIM905 - a list of strings is harder to read
)
_TRIGONOMETRIC: Final = re.compile("sin|cos|tan|cot|sec|csc")
_IN_PROSE: Final = re.compile(
    r"(?<![\w.,\\^{-])(?P<currency>[$€£¥₹₽₩])?(?P<number>-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?)(?<=\d)(?![\d^/*+=:])"
)
_IN_MATH_MODE: Final = re.compile(r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PROSE: Final = re.compile(r"[A-Za-z\s,.:!'\"%-]*")
"""The text around a number; mathematical signs and brackets would carry meaning."""
_SINGLE_LETTER: Final = re.compile(r"(?<![A-Za-z'])[B-HJ-Zb-z](?![A-Za-z'])")
_STATED: Final = re.compile(
    r"([A-Za-z][A-Za-z ,'-]{2,}?|[a-z]) (?:is|are|equals)(?: equal to)? ([^A-Za-z\s].*)", re.DOTALL
)
_FOR_WHOM: Final = re.compile(r"\bsuch (?!that|as)|\b(?:for|with) (?:the|her|his|their|its|an?|each|every|this|that)\b")
_DECIMAL: Final = re.compile(
    r"[-+]?\s*(\d*\.\d+)(?:[eE][+-]?\d+|\s*\\times\s*10\s*\^\s*(?:\{\s*[+-]?\d+\s*\}|[+-]?\d+))?"
)
MAX_PHRASES: Final = 12


def number(text: str) -> Number:
    """Return the formula in `text`, with its unit, percent sign, or noun.

    Raises:
        Unreadable: a part of the text is something else.
    """
    text, unit, percent = text.strip(), "", False
    if (negative := _NEGATIVE.match(text)) is not None:
        text = f"-({text[negative.end() :]})"
        inner = number(text[2:-1])
        return inner._replace(formula=parse("0").minus(inner.formula))
    if text[:1].isalpha() and (spelled := _SPELLED.get(text.casefold().replace("-", " "))) is not None:
        return Number(parse(str(spelled)))
    spelled_first = _SPELLED_FIRST.match(re.sub(r"(?<=ty)-", " ", text))
    if spelled_first is not None and _SPELLED.keys().isdisjoint(text[spelled_first.end() :].casefold().split()):
        text = f"{_SPELLED[spelled_first[1].casefold()]}{text[spelled_first.end() :]}"
    if (price := _PRICE.match(text)) is not None:
        unit, text = _CURRENCY[price["currency"]], price["sign"] + price["inner"] + _RATE.sub("", text[price.end() :])
    if (angle := _ANGLE.search(text)) is not None and not _TRIGONOMETRIC.search(text):
        unit, text = "deg" + (angle[1] or ""), text[: angle.start()]
    if text.endswith(("%", "percent", "per cent", "pct")):
        percent, text = True, re.sub(r"\s*(?:%|per ?cent|pct)$", "", text)
    if (quotient := _QUOTIENT.search(text)) is not None and _unit(f"{quotient[1]}/{quotient[2]}"):
        text = f"{text[: quotient.start()].rstrip()} {quotient[1]}/{quotient[2]}"
    starts = [found.start() for found in _BEHIND.finditer(text)][-MAX_PHRASES:] if not percent else []
    for start in starts:
        phrase, before = text[start:], text[:start]
        if (
            not _PHRASE.fullmatch(phrase)
            or phrase.count("{") != phrase.count("}")
            or (measured := _measure(phrase, attached=not before[-1].isspace())) is None
        ):
            continue
        factor, named = measured
        formula = parse(f"({before}) * {factor}" if factor != 1 else before)
        if formula.unknowns and (not named or re.match(r"[A-Za-z](?![A-Za-z])", phrase)):
            continue
        return Number(formula, significant_digits(before), False, named or unit)
    return Number(parse(text), significant_digits(text), percent, unit)


def significant_digits(text: str) -> int:
    """Return the number of significant digits of a decimal; 0 if the text is not a decimal."""
    found = _DECIMAL.fullmatch(text.strip())
    return len(found[1].replace(".", "").lstrip("0")) if found else 0


def _measure(phrase: str, *, attached: bool) -> tuple[int, str] | None:
    """Return the multiple and the unit that the words after a number form; None if they may mean something else."""
    phrase = _ALTOGETHER.sub("", phrase)
    if not phrase:
        return 1, ""
    first, _, rest = phrase.partition(" ")
    multiple = _MULTIPLES.get(first.casefold().removesuffix("s"))
    if multiple is not None and not attached:
        beyond = _measure(rest, attached=False) if rest.strip() else (1, "")
        return None if beyond is None or beyond[0] != 1 else (multiple, beyond[1])
    if (unit := _unit(phrase)) and not (attached and len(first) == 1 and first.isalpha()):
        return 1, unit
    return None if attached or not _harmless(phrase, _CHANGES) or not _is_noun_phrase(phrase) else (1, "")


def _is_noun_phrase(phrase: str) -> bool:
    """Return whether words can be a noun: not a product of unknowns, a function or a constant."""
    if re.search(r"[()*\\]", phrase):
        return False
    first, *others = (word.strip(".").casefold() for word in re.sub(r"\s*\^.*|[./]+$", "", phrase).split())
    is_long = len(first) > 3 or (len(first) == 3 and others and len(others[0]) > 3)  # `red marbles`
    if first not in _SHORT_NOUNS and not (is_long and re.search("[aeiouy]", first)):
        return False
    return not any((len(word) == 1 and word != "a") or word in NAMES for word in (first, *others))


def _unit(text: str) -> str:
    """Return the unit that makes up the whole text, in a comparable form; empty if unknown."""
    text = re.sub(r"\b(square|cubic|sq|cu)\.?\s+([A-Za-z]+)", lambda f: f"{f[2]}^{2 if f[1][0] == 's' else 3}", text)
    text = re.sub(r"\b([A-Za-z]+)\s+(squared|cubed)$", lambda f: f"{f[1]}^{2 if f[2][0] == 's' else 3}", text)
    text = re.sub(r"(?:^|\s+)per\s+(?:an?\s+)?", "/", text.strip().strip(".")).replace("US dollar", "dollar")
    known: tuple[list[str], list[str]] = ([], [])
    for place, part in enumerate(re.split(r"\s*/\s*", re.sub(r"(?<=/)\s*\(([^()]*)\)|[{}]", r"\1", text))):
        for factor in re.split(r"\s*\\cdot(?![A-Za-z])\s*|\s*\*\s*|\s+(?![\^\d-])", part) if part or place else ():
            unit = re.fullmatch(r"([A-Za-z]+|[$€£¥₹])\.?(?:(?:\s*\^\s*)?(-?)([1-4]))?", factor.strip())
            name = unit[1].casefold() if unit else ""
            found = _UNITS.get(name) or _UNITS.get(name.removesuffix("s")) or _UNITS.get(name.removesuffix("es"))
            if unit is None or found is None:
                return ""
            known[bool(place) != bool(unit[2])].append(found + (unit[3] or "").replace("1", ""))
    return "/".join("*".join(sorted(side)) for side in known if side or known[1])


def _harmless(words: str, changes: frozenset[str]) -> bool:
    """Return whether words next to a number leave its value unchanged and do not add an answer."""
    words = _FOR_WHOM.sub("", words.casefold())
    return not (set(re.findall(r"[a-z'-]+", words)) & changes or re.search(r"(?<!\^)(?<!\^\{)\d", words))


def only_formula(text: str) -> str | None:
    """Return the only formula in math mode of a sentence without other numbers or words that change its value."""
    found = list(_IN_MATH_MODE.finditer(text))
    if len(found) != 1:
        return None
    rest = text[: found[0].start()] + " " + text[found[0].end() :]
    if (
        not re.search("[A-Za-z]{2}", rest)
        or not _PROSE.fullmatch(rest)
        or not _harmless(rest, _CHANGES | _CHANGES_BEFORE)
    ):
        return None
    return next(filter(None, found[0].groups()), None)


def stated(text: str) -> str | None:
    """Return the statement after "is" in a sentence: `The probability is \\frac{3}{4}`."""
    found = _STATED.fullmatch(text)
    return found[2] if found and _harmless(found[1], _CHANGES_BEFORE) else None


def _is_part(before: str) -> bool:
    """Return whether the words before a number make it part of another quantity."""
    found = _RELATED.search(re.sub(r"\b(adds|sums|comes) up(?= to\s*$)", r"\1", before.rstrip(" $")))
    return found is not None and (found[1] or "").casefold() not in _STATING.get(found[2].casefold(), ())


def number_in_prose(text: str) -> Number | None:
    """Return the number of a sentence with one number, or one price at its end, and no word that changes it."""
    numbers = list(_IN_PROSE.finditer(text))
    if numbers and numbers[-1]["currency"] and not text[numbers[-1].end() :].strip(" .!"):
        prices = [found for found in numbers if found["currency"]]
        numbers = prices if len(prices) == 1 else numbers
    if len(numbers) != 1 or not re.search("[A-Za-z]{3}", text):
        return None
    found = numbers[0]
    before, after = text[: found.start()], text[found.end() :].strip(" .!")
    bare = re.sub(r"\b(?:minus|negative)\s*$", "", before, flags=re.IGNORECASE)
    if (
        bare.rstrip().endswith(",")
        or _SINGLE_LETTER.search(bare)
        or _is_part(bare)
        or not _harmless(re.sub(r"\d", "", bare), _CHANGES_BEFORE)
        or not _PROSE.fullmatch(re.sub(r"\d", "", before) + ("" if _unit(after) else after))
        or (after and not re.match(r"[\s.!%]", text[found.end() :]))
    ):
        return None
    try:
        return number(f"{'-' if bare != before else ''}{found[0].replace(',', '')} {after}".strip())
    except (Unreadable, RecursionError):
        return None
