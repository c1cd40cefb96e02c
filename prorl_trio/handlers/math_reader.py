"""Read a final answer of mathematics: a typed value of which everything was understood, or its text alone. Pure.

Gold answers and policies' answers are read by the same function (`read`). What the grammar does not consume to the
last sign is `Text`, which equals nothing but the same text.
"""

# ruff: noqa: RUF001 - signs that look alike are what this is about
from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Final, NamedTuple

import mpmath

from prorl_trio.handlers.formula import Formula, Point, Undefined, Unreadable, agree, parse, same, wide

__all__ = ["Congruence", "Items", "Matrix", "Named", "Number", "Ranges", "Ratio", "Reading", "Relation", "Text", "read"]

MAX_CHARS: Final = 2_000
"""A longer final answer is not read: it equals its own text."""


class Text(NamedTuple):
    """What was not understood, or words: its normalised text."""

    text: str


class Number(NamedTuple):
    """A number or a formula, the significant digits of a decimal (0 for an exact one), a percent sign, and the unit."""

    formula: Formula
    digits: int = 0
    percent: bool = False
    unit: str = ""


class Items(NamedTuple):
    """Several values: with the brackets around them (`(]`, `{}`), or without (`,`)."""

    brackets: str
    items: tuple[Any, ...]


class Ranges(NamedTuple):
    """A set of real numbers: disjoint intervals in order, each (low, low is in, high, high is in)."""

    ranges: tuple[tuple[Any, bool, Any, bool], ...]


class Named(NamedTuple):
    """A value that the answer gives a name: `x = 5`, `f(x) = 2x`, `x > 1`."""

    name: str
    value: Any


class Relation(NamedTuple):
    """An equation or inequality that is no solution yet: `difference` compared with 0 by `sign` (`=`, `<`, `≤`, `≠`)."""

    sign: str
    difference: Formula


class Congruence(NamedTuple):
    """`name` is congruent to one of `residues` modulo `modulus`."""

    name: str
    residues: tuple[Formula, ...]
    modulus: str


class Ratio(NamedTuple):
    """`a : b : c`; what may be a time of day (`10:30`) is no quotient."""

    parts: tuple[Formula, ...]
    time: bool = False


class Matrix(NamedTuple):
    """A matrix or a column, by rows."""

    rows: tuple[tuple[Number, ...], ...]


Reading = Text | Number | Items | Ranges | Named | Relation | Congruence | Ratio | Matrix

# --- the same text, however it is dressed -----------------------------------------------------------------------------

_SIGNS: Final = {
    "−": "-", "–": "-", "﹣": "-", "－": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/",
    "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∓": r"\mp ", "½": " 1/2", "⅓": " 1/3", "¼": " 1/4",
    "¾": " 3/4", "⅔": " 2/3", "⅛": " 1/8", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "√": r"\sqrt ", "∛": r"\sqrt[3]",
    "…": r"\ldots ", "≡": r"\equiv ", "≈": r"\approx ", "ℝ": r"\mathbb{R}", "（": "(", "）": ")", "，": ",",
    "≦": r"\le ", "≧": r"\ge ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "°C": "^\\circ C",
}  # fmt: skip
_SIGN: Final = re.compile("|".join(sorted(_SIGNS, key=len, reverse=True)))
_RAISED: Final = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_LOWERED: Final = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SYNONYMS: Final = {
    **dict.fromkeys((r"\leq", r"\leqslant", r"\leqq"), r"\le"), **dict.fromkeys((r"\geq", r"\geqslant", r"\geqq"), r"\ge"),
    **dict.fromkeys((r"\neq", r"\not="), r"\ne"), r"\lt": "<", r"\gt": ">", r"\varnothing": r"\emptyset",
    **dict.fromkeys((r"\lbrace",), r"\{"), r"\rbrace": r"\}", r"\lparen": "(", r"\rparen": ")", r"\lbrack": "[",
    r"\rbrack": "]", **dict.fromkeys((r"\dots", r"\cdots", r"\dotsc", r"\dotsb", "..."), r"\ldots"),
    r"\land": " and ", r"\wedge": " and ", r"\lor": " or ", r"\vee": " or ", r"\colon": ":", r"\rvert": r"\rvert",
    r"\langle": "(", r"\rangle": ")", r"\setminus": r"\backslash", r"\R": r"\mathbb{R}", r"\simeq": r"\approx",
    r"\infin": r"\infty", r"\degree": r"^\circ", r"\iff": " or ", r"\dfrac": r"\frac", r"\tfrac": r"\frac",
}  # fmt: skip
_SYNONYM: Final = re.compile("|".join(re.escape(key) + ("(?![A-Za-z])" if key[-1].isalpha() else "") for key in _SYNONYMS))
_FONT: Final = r"\\(?:text(?:bf|it|rm|normal|sf|tt|color\s*\{[a-z]+\})?|mathrm|mathbf|mathit|mathsf|bf|rm|it|sf|bm|boldsymbol|mbox|hbox|operatorname\*?|color\s*\{[a-z]+\}|f?boxed|fbox)(?![A-Za-z])"
_FONT_GROUP: Final = re.compile(rf"(?P<script>[\^_]\s*)?{_FONT}\s*\{{(?P<text>[^{{}}]*)\}}")
_FONT_ALONE: Final = re.compile(_FONT)
_MATH_MODE: Final = re.compile(
    r"(?<!\\)\\[()\[\]]|(?<!\\)\$|\\(?:left|right)\s*\.|\\(?:displaystyle|textstyle|limits|left|right|mathopen|mathclose"
    r"|middle|[bB]igg?[lrm]?)(?![A-Za-z])|(?<!\\)\\[!;:>]|\\phantom\s*\{[^{}]*\}"
)
_SPACE: Final = re.compile(r"(?:\\,|(?<!\\)\\(?=\s)|~(?!~)|\s)+")
_QUAD: Final = re.compile(r"(?:\s*[,;]\s*)?(?:\\q?quad(?![A-Za-z])\s*)+(?:[,;]\s*)?")
_MARKDOWN: Final = re.compile(r"(?<![\w)}\]])(\*\*|__|``?|~~|\*)(?=\S)(.+?)(?<=\S)\1(?![\w({\[])", re.DOTALL)
_LEADING: Final = re.compile(
    r"^(?:(?:so|thus|hence|therefore|then|finally),?\s+)?(?:it(?:'s|\s+is)\s+)?(?:we\s+(?:get|have|find|obtain)\s+)?(?:(?:=|\\approx|\\sim|≈|~|is|are|approximately|about|exactly|roughly|equals?|equal to)\s+|=|\\approx"
    r"|(?:the\s+|an?\s+)?(?:ordered\s+|open\s+|closed\s+)?(?:points?|coordinates?|pairs?|triples?|vectors?|intervals?|sets?"
    r"|solutions?|roots?|matrix|values?|numbers?|ratio|no\.(?=\s*\d))\s*(?:(?:is|are|of)\s+)?:?\s*(?=[^\s,.a-z])|)", re.IGNORECASE
)
_HAT: Final = re.compile(r"\\hat\s*\{?\s*\\?([ijk])(?:math)?\s*\}?(?![A-Za-z])")
_WITHOUT: Final = re.compile(r"(?<=[})\]])\s*-\s*(?=\\\{)")
_REMARK: Final = re.compile(r"\s*(?:\\(?:checkmark|blacksquare|square|qed)|[✓✔])$|\s+\((?:approximately|approx\.?|rounded[^()]*|exactly|about)\)$")
_LATEX_GROUPED: Final = re.compile(r"(?<=\d)(?:\{,\}|\\,|,\\!\s*|\\!,)(?=\d{3}(?!\d))")
_GROUPED: Final = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACE_GROUPED: Final = re.compile(r"(?<![\d.,])-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_MIXED: Final = re.compile(r"(?<![\w.)}/^_])(\d+)\s*(?:\\frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))|\s(\d+)\s*/\s*(\d+)(?![\w.]))")
_TIMES_TEN: Final = re.compile(r"(?<=[\d.])\s*[xX*]\s*10\s*(?=\^|\*\*)")
_REPEATING: Final = re.compile(
    r"(?<![\w.])(\d*)\.(\d*?)(?:\\(?:overline|bar|dot|overset\{\.\})\s*(?:\{\s*(\d+)\s*\}|(\d))|\((\d+)\))(?:(\d*)\\dot\s*(?:\{(\d)\}|(\d)))?(?![\w.(\\])"
)
_GOES_ON: Final = re.compile(r"(?<![\w.])(\d*)\.(\d*?)(\d+?)\3{2,}\s*\\ldots\s*$")
_BASED: Final = re.compile(r"(?<![\w.}\\])\(?(\d[\dA-Fa-f]*)\)?\s*_\s*(?:\{\s*\(?(\d{1,2})\)?\s*\}|(\d))(?!\w)")
_MODULE: Final = re.compile(r"(?<![A-Za-z.])(?:math|cmath|np|numpy|sympy|sp)\.(?=[A-Za-z])")
_EULER: Final = re.compile(r"(?<![A-Za-z\\])E(?=\s*\*)|(?<=\*)E(?![A-Za-z])")
_COMPLEX: Final = re.compile(r"(\(?[-+\d.eE ]*\d)j(\)?)")
_LOG_BASE: Final = re.compile(r"(?<![A-Za-z\\])\\?log_?\{?(2|10)\}?\s*(?=\()")


def normalised(text: str) -> str:
    """Return `text` in ASCII and plain LaTeX: without math mode, fonts, markdown, or spaces that mean nothing."""
    if not text.isascii():
        text = _SIGN.sub(lambda found: _SIGNS[found[0]], text)
        text = _RAISED.sub(lambda found: f"^{{{found[0].translate(_LOWERED)}}}", text)
    before = None
    if "\\" in text:
        text = _QUAD.sub(", ", _LATEX_GROUPED.sub("", text))
        while before != text:
            before, text = text, _FONT_GROUP.sub(_without_font, text)
        text = _FONT_ALONE.sub(" ", text)
    while before != text:
        before, text = text, _MARKDOWN.sub(r"\2", text.strip())
    text = _MATH_MODE.sub(lambda found: "$" if found[0] == "$" and _is_price(text, found.end()) else "", text)
    text = _SYNONYM.sub(lambda found: _SYNONYMS[found[0]] + (" " if found[0][-1].isalpha() else ""), text)
    text = _HAT.sub(r" \1 ", text)
    text = _WITHOUT.sub(r"\\backslash ", text)
    text = text.replace("\\%", "%").replace("\\$", "$").replace("\\#", "#").replace("\\&", "&").replace("\\_", "_")
    text = _SPACE.sub(" ", text).strip("*_` ")
    text = re.sub(r"^[\"'“”‘]+(.*?)[\"'“”’]+\.?$", r"\1", text).strip()
    text = re.sub(r"(?<![\\.])[.,;:]$|(?<![\w)}\]!])!$", "", text).rstrip()
    return _REMARK.sub("", _LEADING.sub("", text)).strip()


def _without_font(found: re.Match[str]) -> str:
    return f"{found['script']}{{{found['text']}}}" if found["script"] else f" {found['text']} "


def _is_price(text: str, at: int) -> bool:
    """Return whether a dollar sign is a price's, not one of a pair around a formula."""
    return text.count("$") % 2 == 1 and re.match(r"\s*-?[\d.]", text[at:]) is not None


def _numbers(text: str) -> str:
    """The text with its numbers in the form that formulas have."""
    text = _EULER.sub("e", _MODULE.sub("", text))
    text = _COMPLEX.sub(r"\1i\2", text) if _COMPLEX.fullmatch(text) else text
    text = _REPEATING.sub(_repeating, text)
    text = _BASED.sub(_based, text)
    text = _GOES_ON.sub(lambda m: _fraction(m[1], m[2], m[3]), text)
    if not re.search(r"[(\[{]", text):  # in brackets it is a list
        text = _GROUPED.sub(lambda found: found[0].replace(",", ""), text)
    text = _SPACE_GROUPED.sub(lambda found: found[0].replace(" ", ""), text)
    text = _TIMES_TEN.sub(r"\\times 10", text)
    text = _LOG_BASE.sub(r"\\log_{\1}", text)
    return _MIXED.sub(_mixed, text)


def _based(found: re.Match[str]) -> str:
    try:
        return str(int(found[1], int(found[2] or found[3])))
    except ValueError:  # digits that the base does not have
        return found[0]


def _mixed(found: re.Match[str]) -> str:
    over, under = next((a, b) for a, b in (found.group(2, 3), found.group(4, 5), found.group(6, 7)) if a)
    return f"({found[1]}+{over}/{under})" if int(over) < int(under) else found[0]


def _repeating(found: re.Match[str]) -> str:
    period = next(filter(None, found.group(3, 4, 5)))
    return _fraction(found[1], found[2], period + (found[6] or "") + (found[7] or found[8] or ""))


def _fraction(whole: str, fixed: str, period: str) -> str:
    value = Fraction(int((whole + fixed) or 0)) + Fraction(int(period), 10 ** len(period) - 1)
    value /= 10 ** len(fixed)
    return f"({value.numerator}/{value.denominator})"


# --- what the text is -------------------------------------------------------------------------------------------------

MAX_DEPTH: Final = 40
"""Brackets within brackets of an answer that is read."""
_OPEN: Final = r"\\begin(?![A-Za-z])|\\\{|[(\[{]|\\lfloor|\\lceil"
_CLOSE: Final = r"\\end(?![A-Za-z])|\\\}|[)\]}]|\\rfloor|\\rceil"
_LIST: Final = re.compile(
    rf"(?P<open>{_OPEN})|(?P<close>{_CLOSE})|(?P<sep>(?:[,;]\s*)*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])(?:\s*[,;])*|[,;])"
)
_SETS: Final = re.compile(rf"(?P<open>{_OPEN})|(?P<close>{_CLOSE})|(?P<sep>\\(?:cup|cap|backslash)(?![A-Za-z]))")
_MEMBER: Final = re.compile(rf"(?P<open>{_OPEN})|(?P<close>{_CLOSE})|(?P<sep>\\in(?![A-Za-z])|(?<=\w )in(?=\s*[\[(\\]))")
_SIDES: Final = re.compile(
    rf"(?P<open>{_OPEN})|(?P<close>{_CLOSE})|(?P<sep>\\(?:le|ge|ne|approx)(?![A-Za-z])|<=|>=|!=|==?|[<>])"
)
_COLONS: Final = re.compile(rf"(?P<open>{_OPEN})|(?P<close>{_CLOSE})|(?P<sep>:)")
_COMPARED: Final = {r"\le": "≤", "<=": "≤", r"\ge": "≥", ">=": "≥", r"\ne": "≠", "!=": "≠", "==": "="}
_TURNED: Final = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "≠": "≠"}
_TIME: Final = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?")
_MATRIX: Final = re.compile(
    r"(?P<before>.*?)[(\[]?\s*\\begin\s*\{(?P<kind>[pb]?(?:small)?matrix|Bmatrix|array)\}(?:\s*\{[lcr| ]*\})?"
    r"(?P<body>.*)\\end\s*\{(?P=kind)\}\s*[)\]]?", re.DOTALL
)
_CONGRUENT: Final = re.compile(
    r"(?:(?P<name>[^=]*?)\\equiv)?(?P<residues>.+?)\s*\(?\s*\\?[pb]?mod(?:ulo)?(?![A-Za-z])\s*\{?\s*(?P<modulus>\w+)\s*\}?\s*\)?"
)
_FRENCH: Final = re.compile(r"([\[\]])((?:[^\[\]()]|\([^()]*\))+[,;](?:[^\[\]()]|\([^()]*\))+)([\[\]])")
_NAME: Final = re.compile(
    r"(?:[A-Za-z]|\\[A-Za-z]+)'*(?:_(?:\w|\{[^{}]*\}))?'*(?:\s*\([^()=]*\))?|\|?[A-Z]{2,}'*\|?|m?\s*\\(?:angle|triangle)\s*[A-Z]+"
    r"|m?\s*\\(?:overline|vec|overrightarrow|hat|bar)\s*\{?[A-Za-z]+\}?|\([A-Za-z](?:_\w)?(?:\s*,\s*[A-Za-z](?:_\w)?)*\)"
    r"|\[[A-Z]{3,}\]|\|[A-Za-z]\||\\frac\s*\{[A-Z]{2}\}\s*\{[A-Z]{2}\}|[A-Z]+(?:_\{?\w+\}?)?(?:\s*:\s*[A-Z]+(?:_\{?\w+\}?)?)+"
)
_POINT: Final = re.compile(r"([ABD-Z])\s*(\([^()]*,[^()]*\))")
_CONSTANTS: Final = re.compile(r"\\pi|e|i")
_WORDS: Final = re.compile(r"[A-Za-z]+(?:[ '-]+[A-Za-z]+)*")
_DECIMAL: Final = re.compile(r"[-+]?\s*(\d*\.\d+)(?:[eE][+-]?\d+|\s*\\times\s*10\s*\^\s*(?:\{\s*[+-]?\d+\s*\}|[+-]?\d+))?")
_PLAIN: Final = re.compile(r"-?\d+(?:\.\d+)?")
_ALL_REAL: Final = re.compile(r"(?:all )?(?:the )?(?:real numbers|reals)|\\mathbb\s*\{?R\}?", re.IGNORECASE)


def read(text: str) -> Reading:
    """Return the meaning of a final answer; `Text` where a part of it was not understood. Raises nothing."""
    plain = normalised(text)
    if not plain or len(plain) > MAX_CHARS:
        return Text(plain)
    try:
        return _plain(plain) if _PLAIN.fullmatch(plain) else _value(_FRENCH.sub(_french, _numbers(plain)))
    except (Unreadable, Undefined, ArithmeticError, ValueError, TypeError, RecursionError):
        if (formula := _only_formula(text)) is not None:
            return read(formula)
        return number_in_prose(plain) or Text(plain)


def _plain(text: str) -> Number:
    value = Fraction(text)
    return Number(Formula(lambda p: value, frozenset()), _digits(text))


def _value(text: str) -> Reading:
    text = text.strip()
    if not text or r"\ldots" in text:
        raise Unreadable("no value")
    if _ALL_REAL.fullmatch(text):
        return Ranges(((-mpmath.inf, False, mpmath.inf, False),))
    if text in (r"\emptyset", r"\{\}", "{}", "empty set", "the empty set"):
        return Ranges(())
    if "mod" in text and (congruent := _CONGRUENT.fullmatch(text)) is not None:
        residues = tuple(map(parse, _split(_LIST, congruent["residues"])[0]))
        return Congruence((congruent["name"] or "").replace(" ", ""), residues, congruent["modulus"])
    parts, separators = _split(_LIST, text)
    if separators:
        return _several(parts, [separator.strip(",; ") for separator in separators])
    if r"\pm" in text or r"\mp" in text:
        both = (text.replace(r"\pm", a).replace(r"\mp", b) for a, b in (("+", "-"), ("-", "+")))
        return Items(",", tuple(map(_value, both)))
    sides, separators = _split(_MEMBER, text)
    if separators:
        if len(sides) > 2 or not _NAME.fullmatch(sides[0]):
            raise Unreadable("a membership of something else than an unknown")
        return Named(_name(sides[0]), _value(sides[1]))
    sides, separators = _split(_SETS, text)
    if separators:
        return _united([as_ranges(_value(side)) for side in sides], separators)
    sides, separators = _split(_SIDES, text)
    if separators:
        return _compared(sides, [_COMPARED.get(sign, sign) for sign in separators])
    if (matrix := _MATRIX.fullmatch(text)) is not None:
        return _matrix(matrix)
    if (inner := _bracketed(text)) is not None:
        return inner
    if (point := _POINT.fullmatch(text)) is not None:
        return Named(point[1], _value(point[2]))
    sides, separators = _split(_COLONS, text)
    if separators and _WORDS.fullmatch(sides[0]):
        return _value(":".join(sides[1:]))
    return Ratio(tuple(map(parse, sides)), _TIME.fullmatch(text) is not None) if separators else number(text)


def _split(pattern: re.Pattern[str], text: str) -> tuple[list[str], list[str]]:
    """The parts of `text` and the separators between them that stand outside of all brackets."""
    parts, separators, depth, start = [], [], 0, 0
    for found in pattern.finditer(text):
        depth += bool(found["open"]) - bool(found["close"])
        if not 0 <= depth <= MAX_DEPTH:
            raise Unreadable("a bracket too many")
        if found["sep"] and not depth:
            parts.append(text[start : found.start()].strip())
            separators.append(found["sep"])
            start = found.end()
    if depth:
        raise Unreadable("an open bracket")
    return [*parts, text[start:].strip()], separators


def _several(parts: list[str], words: list[str]) -> Reading:
    values = [_value(part) for part in parts]
    if set(words) in ({"or"}, {"and"}):
        ranges = [value.value for value in values if isinstance(value, Named) and isinstance(value.value, Ranges)]
        if len(ranges) == len(values) and len({value.name for value in values}) == 1:
            return Named(values[0].name, _united(ranges, [r"\cup" if words[0] == "or" else r"\cap"] * len(words)))
    flat = [item for value in values for item in (value.items if isinstance(value, Items) and value[0] == "," else [value])]
    return Items("or" if set(words) == {"or"} else ",", tuple(flat))


def _bracketed(text: str) -> Reading | None:
    """What stands in the one pair of brackets around all of `text`; None if there is no such pair."""
    opening = r"\{" if text.startswith(r"\{") else text[0]
    closing = r"\}" if text.endswith(r"\}") else text[-1]
    if opening not in ("(", "[", "{", r"\{") or closing not in (")", "]", "}", r"\}"):
        return None
    inside = text[len(opening) : -len(closing)]
    try:
        parts, separators = _split(_LIST, inside)
    except Unreadable:  # `(a)(b)`
        return None
    brackets = (opening + closing).replace("\\", "")
    if not separators:
        if opening == r"\{":
            named = re.fullmatch(r"\s*([A-Za-z])(?:\s*\\in\s*\\mathbb\{R\})?\s*(?::|\\mid|\|)(.*)", inside)
            if named is not None:
                return _value(named[2])
        return _value(inside) if brackets in ("()", "[]", "{}") else None
    if brackets not in ("()", "[]", "{}", "(]", "[)"):
        raise Unreadable("brackets that do not belong together")
    return Items(brackets, tuple(map(_value, parts)))


def _french(found: re.Match[str]) -> str:
    opening, closing = ("[" if found[1] == "[" else "("), ("]" if found[3] == "]" else ")")
    return f"{opening}{found[2]}{closing}" if found[1] == "]" or found[3] == "[" else found[0]


def _matrix(found: re.Match[str]) -> Reading:
    body = re.sub(r"\\hline(?![A-Za-z])", "", found["body"])
    rows = [row.split("&") for row in re.split(r"\\\\(?:\[\d+\w\w\])?", body) if row.strip()]
    if len({len(row) for row in rows}) != 1:
        raise Unreadable("rows of different lengths")
    cells = tuple(tuple(number(cell.strip()) for cell in row) for row in rows)
    if found["before"].strip():
        raise Unreadable("a factor before a matrix")
    return Matrix(cells)


# --- equations, inequalities, sets of numbers -------------------------------------------------------------------------


def _name(text: str) -> str:
    return re.sub(r"[\s{}]", "", text)


def _constant(formula: Formula) -> Any:
    if formula.unknowns:
        raise Unreadable("an unknown where a number is wanted")
    return formula.value(Point({}))


def _compared(sides: list[str], signs: list[str]) -> Reading:
    if r"\approx" in signs:
        at = signs.index(r"\approx") + 1
        if at == 1 and len(signs) == 1 and _NAME.fullmatch(sides[0]) and not _CONSTANTS.fullmatch(sides[0]):
            return Named(_name(sides[0]), number(sides[1]))
        left, right = _value("".join(f"{a}{b}" for a, b in zip(sides[:at], [*signs[: at - 1], ""], strict=True))), number(sides[-1])
        bare = left.value if isinstance(left, Named) else left
        if at != len(signs) or not isinstance(bare, Number):
            raise Unreadable("an approximation of no number")
        a, b = (wide(_constant(formula)) for formula in (bare.formula, right.formula))
        if abs(a - b) > abs(a) / 100:
            raise Unreadable("an approximation of another number")
        return left
    if set(signs) == {"="}:
        return _equation(sides)
    if "=" in signs or len(signs) > 2:
        raise Unreadable("a chain of comparisons")
    pairs = [_inequality(a, sign, b) for a, sign, b in zip(sides, signs, sides[1:], strict=False)]
    if len(pairs) == 1:
        return pairs[0]
    if not all(isinstance(pair, Named) for pair in pairs) or pairs[0].name != pairs[1].name:
        raise Unreadable("a chain of comparisons of several unknowns")
    return Named(pairs[0].name, _united([pair.value for pair in pairs], [r"\cap"]))


def _equation(sides: list[str]) -> Reading:
    """`x = 5`, `9 * 2 = 18`, `A = 2 * 9 = 18` have a value: the last side. Sides that differ have none."""
    first, *others = sides
    if _WORDS.fullmatch(first) and re.search("[A-Za-z]{3}", first) and not _NAME.fullmatch(first):
        return _equation(others) if len(others) > 1 else _value(others[0])
    named = _NAME.fullmatch(first) is not None
    if not named and len(sides) == 2 and _NAME.fullmatch(sides[1]):
        return Named(_name(sides[1]), _value(first))
    value = _value(sides[-1])
    if named and len(others) == 1:
        return Named(_name(first), value)
    if not isinstance(value, Number):
        raise Unreadable("an equation of no number")
    formulas = [number(side).formula for side in (others[:-1] if named else sides[:-1])]
    last = value.formula
    if all(agree(formula, last) for formula in formulas if named is False or formula.unknowns <= last.unknowns):
        return Named(_name(first), value) if named else value
    if len(sides) > 2 or not (formulas[0].unknowns | last.unknowns):
        raise Unreadable("sides that differ")
    return Relation("=", formulas[0].minus(last))


def _inequality(left: str, sign: str, right: str) -> Reading:
    a, b = parse(left), parse(right)
    difference = a.minus(b)
    solved = None
    if len(difference.unknowns) == 1:
        bars = [re.fullmatch(r"\|([^|]*)\|", side) or re.fullmatch(r"\\lvert(.*)\\rvert", side) for side in (left, right)]
        if bars[0] and not b.unknowns:
            solved = _distance(parse(bars[0][1]), sign, _constant(b))
        elif bars[1] and not a.unknowns:
            solved = _distance(parse(bars[1][1]), _TURNED[sign], _constant(a))
        else:
            solved = _solved(difference, sign)
    if solved is not None:
        return Named(min(difference.unknowns), solved)
    if sign in (">", "≥"):
        sign, difference = _TURNED[sign], b.minus(a)
    return Relation(sign, difference)


def _solved(difference: Formula, sign: str) -> Ranges | None:
    """Where a linear difference compares with 0; None if it is not linear."""
    (name,) = difference.unknowns
    zero, one, five = (difference.value(Point({name: Fraction(x)})) for x in (0, 1, 5))
    slope = one - zero
    if same(slope, 0 * slope) or not same(5 * slope, five - zero):
        return None
    root = wide(0 - zero / slope)
    return _beside(root, _TURNED[sign] if slope < 0 else sign)


def _beside(root: Any, sign: str) -> Ranges:
    below, above = (-mpmath.inf, False, root, sign == "≤"), (root, sign == "≥", mpmath.inf, False)
    return Ranges((below, above) if sign == "≠" else (below,) if sign in ("<", "≤") else (above,))


def _distance(inside: Formula, sign: str, bound: Any) -> Ranges | None:
    """Where `|inside| sign bound` holds, for a linear `inside`."""
    negative, positive = (Formula(lambda p, s=s: inside.value(p) + s * bound, inside.unknowns) for s in (1, -1))
    if bound < 0 or sign == "≠":
        return None
    low, high = _solved(negative, _TURNED[sign]), _solved(positive, sign)
    if low is None or high is None:
        return None
    return _united([low, high], [r"\cap" if sign in ("<", "≤") else r"\cup"])


def as_ranges(value: Any) -> Ranges:
    """The set of real numbers that `value` is."""
    if isinstance(value, Named):
        value = value.value
    if isinstance(value, Number):
        value = Items("{}", (value,))
    if isinstance(value, Items) and all(isinstance(item, Number) for item in value.items):
        numbers = [wide(_constant(item.formula)) for item in value.items]
        if value.brackets == "{}":
            return Ranges(tuple((x, True, x, True) for x in sorted(numbers)))
        if value.brackets in ("()", "[]", "(]", "[)") and len(numbers) == 2 and numbers[0] < numbers[1]:
            return Ranges(((numbers[0], value.brackets[0] == "[", numbers[1], value.brackets[1] == "]"),))
    if not isinstance(value, Ranges):
        raise Unreadable("no set of real numbers")
    return value


def _united(sets: list[Ranges], signs: list[str]) -> Ranges:
    """Sets joined by union, intersection or difference, from the left."""
    result = sets[0]
    for other, sign in zip(sets[1:], signs, strict=True):
        result = _combined(result, other, sign)
    return result


def _combined(a: Ranges, b: Ranges, sign: str) -> Ranges:
    """Both sets, cut at all their ends: each end and each gap between two is inside or outside as a whole."""
    ends: list[Any] = []
    for x in sorted(x for low, _, high, _ in (*a.ranges, *b.ranges) for x in (low, high)):
        if not ends or not same(ends[-1], x):
            ends.append(x)
    cells: list[tuple[Any, bool, Any, bool]] = []
    for low, high in zip(ends, [*ends[1:], None], strict=True):
        if mpmath.isfinite(low):
            cells.append((low, True, low, True))
        if high is not None:
            cells.append((low, False, high, False))
    result: list[tuple[Any, bool, Any, bool]] = []
    for cell in cells:
        in_a, in_b = _holds(a, cell), _holds(b, cell)
        if not {r"\cup": in_a or in_b, r"\cap": in_a and in_b, r"\backslash": in_a and not in_b}[sign]:
            continue
        if result and result[-1][2] == cell[0] and (result[-1][3] or cell[1]):
            result[-1] = (*result[-1][:2], *cell[2:])
        else:
            result.append(cell)
    return Ranges(tuple(result))


def _holds(ranges: Ranges, cell: tuple[Any, bool, Any, bool]) -> bool:
    if cell[1]:
        x = cell[0]
    elif mpmath.isinf(cell[0]) or mpmath.isinf(cell[2]):
        x = 0 if mpmath.isinf(cell[0]) and mpmath.isinf(cell[2]) else cell[2] - 1 if mpmath.isinf(cell[0]) else cell[0] + 1
    else:
        x = (cell[0] + cell[2]) / 2
    return any(low < x < high or (low_in and same(low, x)) or (high_in and same(high, x)) for low, low_in, high, high_in in ranges.ranges)


# --- numbers with units, and in prose ---------------------------------------------------------------------------------

_CURRENCY: Final = {
    "$": "usd", "€": "eur", "£": "gbp", "¥": "jpy", "₹": "inr", "₽": "rub", "₩": "krw", "usd": "usd",
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
_CHANGES: Final = frozenset(
    "not no never isnt isn't cannot can't wasn't doesn't neither nor none minus negative plus half halves third thirds"
    " quarter quarters twice double triple times squared cubed root factorial divided multiplied least most more less"
    " fewer greater smaller larger above below over under between or and either except but unless without maybe perhaps"
    " possibly wrong incorrect false if when for until power reciprocal inverse opposite hundred hundreds thousand"
    " thousands million millions billion billions trillion trillions dozen dozens score ten tens percentile modulo mod"
    " base per-cent unlike instead excluding percent think guess".split()
)
"""A word beside a number that makes another number of it, or none, or a condition."""
_CHANGES_BEFORE: Final = _CHANGES - {"and", "for", "if", "when"} | {"square", "cube", "other", "than", "different", "log", "sin"}
_NEGATIVE: Final = re.compile(r"^(?:minus|negative)\s+", re.IGNORECASE)
_PRICE: Final = re.compile(r"(?P<sign>-?)\s*(?P<currency>[$€£¥₹₽₩])\s*(?P<inner>-?)\s*(?=[\d.])")
_BEHIND: Final = re.compile(r"(?:(?<=[\d)}\]!|.])|(?<=[\w)}\]!|.]\s))[A-Za-z€£¥₹]")
_PHRASE: Final = re.compile(r"[A-Za-z€£¥₹][A-Za-z€£¥₹./^{}'\s\d-]*")
_ANGLE: Final = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*[CF]?$")
_TRIGONOMETRIC: Final = re.compile("sin|cos|tan|cot|sec|csc")
_IN_PROSE: Final = re.compile(r"(?<![\w.,\\^{-])(?P<currency>[$€£¥₹₽₩])?(?P<number>-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?)(?<=\d)(?![\d^/*+=:])")
_IN_MATH_MODE: Final = re.compile(r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
MAX_PHRASES: Final = 12


def number(text: str) -> Number:
    """Return the formula that `text` is, with its unit, percent sign, or noun.

    Raises:
        Unreadable: a part of it is something else.
    """
    text, unit, percent = text.strip(), "", False
    if (negative := _NEGATIVE.match(text)) is not None:
        text = f"-({text[negative.end() :]})"
        inner = number(text[2:-1])
        return inner._replace(formula=parse("0").minus(inner.formula))
    if (price := _PRICE.match(text)) is not None:
        unit, text = _CURRENCY[price["currency"]], price["sign"] + price["inner"] + text[price.end() :]
    if (angle := _ANGLE.search(text)) is not None and not _TRIGONOMETRIC.search(text):
        unit, text = "deg", text[: angle.start()]
    if text.endswith(("%", "percent", "per cent", "pct")):
        percent, text = True, re.sub(r"\s*(?:%|per ?cent|pct)$", "", text)
    starts = [found.start() for found in _BEHIND.finditer(text)][-MAX_PHRASES:] if not percent else []
    for start in starts:
        phrase, before = text[start:], text[:start]
        if not _PHRASE.fullmatch(phrase) or phrase.count("{") != phrase.count("}") or (measured := _measure(phrase, attached=not before[-1].isspace())) is None:
            continue
        factor, named = measured
        formula = parse(f"({before}) * {factor}" if factor != 1 else before)
        if formula.unknowns and (len(phrase) == 1 or not named):
            continue
        return Number(formula, _digits(before), False, named or unit)
    return Number(parse(text), _digits(text), percent, unit)


def _digits(text: str) -> int:
    found = _DECIMAL.fullmatch(text.strip())
    return len(found[1].replace(".", "").lstrip("0")) if found else 0


def _measure(phrase: str, *, attached: bool) -> tuple[int, str] | None:
    """A multiple and a unit that the words behind a number are; None if they may mean something else."""
    first, _, rest = phrase.partition(" ")
    multiple = _MULTIPLES.get(first.casefold().removesuffix("s"))
    if multiple is not None and not attached:
        beyond = _measure(rest, attached=False) if rest.strip() else (1, "")
        return None if beyond is None or beyond[0] != 1 else (multiple, beyond[1])
    if (unit := _unit(phrase)) and not (attached and len(first) == 1):
        return 1, unit
    return None if attached or not _harmless(phrase, _CHANGES) or not _is_noun(first) else (1, "")


def _is_noun(word: str) -> bool:
    return len(word) > 2 and re.search("[aeiouy]", word.casefold()) is not None or word.casefold().rstrip(".") in ("a.m", "p.m", "am", "pm", "of")


def _unit(text: str) -> str:
    """The unit that all of `text` is, in a form to be compared; empty if it is none that is known."""
    text = re.sub(r"\b(square|cubic|sq|cu)\.?\s+([A-Za-z]+)", lambda f: f"{f[2]}^{2 if f[1][0] == 's' else 3}", text)
    text = re.sub(r"\s+per\s+(?:an?\s+)?", "/", text.strip().strip(".")).replace("{", "").replace("}", "")
    known: list[str] = []
    for part in re.split(r"\s*/\s*", text):
        unit = re.fullmatch(r"([A-Za-z]+|[€£¥₹])\s*(?:\^?\s*([1-4]))?", part.strip())
        name = unit[1].casefold() if unit else ""
        found = _UNITS.get(name) or _UNITS.get(name.removesuffix("s")) or _UNITS.get(name.removesuffix("es"))
        if unit is None or found is None:
            return ""
        known.append(found + (unit[2] or ""))
    return "/".join(known)


def _harmless(words: str, changes: frozenset[str]) -> bool:
    """Return whether words beside a number leave it as it is, and are no second answer."""
    return not (set(re.findall(r"[a-z'-]+", words.casefold())) & changes or re.search(r"(?<!\^)(?<!\^\{)\d", words))


def _only_formula(text: str) -> str | None:
    """The one formula in math mode that a sentence has, if the rest has no number and no word that changes it."""
    found = list(_IN_MATH_MODE.finditer(text))
    if len(found) != 1:
        return None
    rest = text[: found[0].start()] + " " + text[found[0].end() :]
    if not re.search("[A-Za-z]{2}", rest) or re.search(r"[\d\\$=?]", rest) or not _harmless(rest, _CHANGES_BEFORE):
        return None
    return next(filter(None, found[0].groups()), None)


def number_in_prose(text: str) -> Number | None:
    """Return the number of a sentence that has one, or one price at its end, and no word that changes it."""
    numbers = list(_IN_PROSE.finditer(text))
    if numbers and numbers[-1]["currency"] and not text[numbers[-1].end() :].strip(" .!"):
        prices = [found for found in numbers if found["currency"]]
        numbers = prices if len(prices) == 1 else numbers
    if len(numbers) != 1 or "\\" in text or "?" in text or not re.search("[A-Za-z]{3}", text):
        return None
    found = numbers[0]
    before, after = text[: found.start()], text[found.end() :].strip(" .!")
    bare = re.sub(r"\b(?:minus|negative)\s*$", "", before, flags=re.IGNORECASE)
    if not _harmless(re.sub(r"\d", "", bare), _CHANGES_BEFORE) or re.search(r"[=<>^*/+]", text) or (
        after and not re.match(r"[\s.!%]", text[found.end() :])
    ):
        return None
    try:
        return number(f"{'-' if bare != before else ''}{found[0].replace(',', '')} {after}".strip())
    except (Unreadable, RecursionError):
        return None
