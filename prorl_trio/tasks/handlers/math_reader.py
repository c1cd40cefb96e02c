"""Parse a final answer in mathematics: a typed value if it is completely understood, otherwise only its text. Pure.

The same function (`read`) parses gold answers and policies' answers. If the grammar does not consume an answer
completely, it becomes `Text`, which equals only the same text.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Final, NamedTuple

import mpmath

from prorl_trio.tasks.handlers.math_formula import (
    NAMES,
    Formula,
    Point,
    Undefined,
    Unreadable,
    agree,
    parse,
    same,
    wide,
)
from prorl_trio.tasks.handlers.math_numbers import (
    Number,
    number,
    number_in_prose,
    only_formula,
    significant_digits,
    stated,
)
from prorl_trio.tasks.handlers.math_text import normalised, with_plain_numbers

MAX_CHARS: Final = 2_000
"""A longer final answer is not parsed: it equals only its own text."""


class Text(NamedTuple):
    """Text that was not understood, or words, in normalised form."""

    text: str


class Items(NamedTuple):
    """Several values, with enclosing brackets (`(]`, `{}`) or without (`,`)."""

    brackets: str
    items: tuple[Any, ...]


class Ranges(NamedTuple):
    """A set of real numbers: ordered disjoint intervals, each (low, low is in, high, high is in)."""

    ranges: tuple[tuple[Any, bool, Any, bool], ...]


class Named(NamedTuple):
    """A value with a name: `x = 5`, `f(x) = 2x`, `x > 1`."""

    name: str
    value: Any


class Relation(NamedTuple):
    """An unsolved equation or inequality: `difference` compared with 0 by `sign` (`=`, `<`, `≤`, `≠`).

    `total` is the right side if the left side is a sum of unknowns: `m + n = 73`.
    """

    sign: str
    difference: Formula
    total: Number | None = None


class Congruence(NamedTuple):
    """`name` is congruent to one of `residues` modulo `modulus`."""

    name: str
    residues: tuple[Formula, ...]
    modulus: str


class Ratio(NamedTuple):
    """A ratio `a : b : c`. If it may be a time of day (`10:30`), it is not treated as a quotient."""

    parts: tuple[Formula, ...]
    time: bool = False
    half: str = ""


class Matrix(NamedTuple):
    """A matrix or a column, by rows."""

    rows: tuple[tuple[Number, ...], ...]


Reading = Text | Number | Items | Ranges | Named | Relation | Congruence | Ratio | Matrix

MAX_ORDER: Final = 4
"""Number of rows of the largest computed determinant."""
MAX_DEPTH: Final = 40
"""Maximal nesting of brackets in an answer."""
_OPEN: Final = r"\\begin(?![A-Za-z])|\\\{|[(\[{]|\\lfloor|\\lceil"
_CLOSE: Final = r"\\end(?![A-Za-z])|\\\}|[)\]}]|\\rfloor|\\rceil"
_LIST: Final = re.compile(
    rf"(?P<open>{_OPEN})|(?P<close>{_CLOSE})|(?P<sep>(?:[,;]\s*)*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])(?:\s*[,;])*|[,;&])"
)
_SETS: Final = re.compile(rf"(?P<open>{_OPEN})|(?P<close>{_CLOSE})|(?P<sep>\\(?:cup|cap|backslash)(?![A-Za-z]))")
_MEMBER: Final = re.compile(
    rf"(?P<open>{_OPEN})|(?P<close>{_CLOSE})|(?P<sep>\\in(?![A-Za-z])|(?<=\w )in(?=\s*[\[(\\]))"
)
_SIDES: Final = re.compile(
    rf"(?P<open>{_OPEN})|(?P<close>{_CLOSE})|(?P<sep>\\(?:le|ge|ne|approx)(?![A-Za-z])|<=|>=|!=|==?|[<>])"
)
_COLONS: Final = re.compile(rf"(?P<open>{_OPEN})|(?P<close>{_CLOSE})|(?P<sep>:)")
_COMPARED: Final = {r"\le": "≤", "<=": "≤", r"\ge": "≥", ">=": "≥", r"\ne": "≠", "!=": "≠", "==": "="}
_TURNED: Final = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "≠": "≠"}
_TIME: Final = re.compile(r"(\d{1,2}:\d{2}(?::\d{2})?)(?:\s*([ap])\.?\s?m\.?)?", re.IGNORECASE)
_MATRIX: Final = re.compile(
    r"(?P<before>.*?)[(\[]?\s*\\begin\s*\{(?P<kind>[pbv]?(?:small)?matrix|Bmatrix|array)\}(?:\s*\{[lcr| ]*\})?"
    r"(?P<body>.*)\\end\s*\{(?P=kind)\}\s*[)\]]?",
    re.DOTALL,
)
_CONGRUENT: Final = re.compile(
    r"(?:(?P<name>[^=]*?)\\equiv)?(?P<residues>.+?)\s*\(?\s*\\?[pb]?mod(?:ulo)?(?![A-Za-z])\s*\{?\s*(?P<modulus>\w+)\s*\}?\s*\)?"
)
_FRENCH: Final = re.compile(r"([\[\]])((?:[^\[\]()]|\([^()]*\))+[,;](?:[^\[\]()]|\([^()]*\))+)([\[\]])")
_NAME: Final = re.compile(
    r"(?:[A-Za-z]|\\[A-Za-z]+)'*(?:_(?:\w|\{[^{}]*\}))?'*(?:\s*\([^()=]*\))?|\|?[A-Z]{2,}'*\|?|m?\s*\\(?:angle|triangle)\s*[A-Z]+"
    r"|m?\s*\\(?:overline|vec|overrightarrow|hat|bar)\s*\{?[A-Za-z]+\}?|\([A-Za-z](?:_\w)?(?:\s*,\s*(?:[A-Za-z](?:_\w)?|\\theta|\\phi))*\)"
    r"|(?:\\Pr|\\mathbb\s*\{[PE]\}|[PE]|Var)\s*(?:\([^()]*\)|\[[^\[\]]*\])|[A-Za-z]\s*\^\s*(?:-1|\{-1\})\s*\([^()=]*\)|\[[A-Z]{3,}\]|\|[A-Za-z]\||\\frac\s*\{[A-Z]{2}\}\s*\{[A-Z]{2}\}|[A-Za-z]+(?:_\{?\w+\}?)?(?:\s*:\s*[A-Za-z]+(?:_\{?\w+\}?)?)+"
)
_SUM: Final = re.compile(
    r"[A-Za-z](?:_\w)?(?:\s*[-+]\s*[A-Za-z](?:_\w)?)+|[A-Z]{2}(?:\s*\^\s*\{?2\}?|(?:\s*(?:\\cdot|[-+])\s*[A-Z]{2})+)"
)
_POINT: Final = re.compile(r"([ABD-Z])\s*(\([^()]*,[^()]*\))")
_CONSTANTS: Final = re.compile(r"\\pi|e|i")
_CONDITION: Final = re.compile(r"\s*[A-Za-z](?:\s*\\in\s*\\mathbb\{R\})?\s*[:|](.*)", re.DOTALL)
_WORDS: Final = re.compile(r"[A-Za-z]+(?:[ '-]+[A-Za-z]+)*")
_PLAIN: Final = re.compile(r"-?\d+(?:\.\d+)?")
_ALL_REAL: Final = re.compile(
    r"(?:(?:the )?set of )?(?:(?:all|any|every) )?(?:the )?"
    r"(?:reals|real (?:numbers?|values?)(?: of)?(?: [xyz])?|(?<=all )real [xyz])"
    r"|\\mathbb\s*\{?R\}?|-\\infty\s*<\s*[A-Za-z]\s*<\s*\\infty",
    re.IGNORECASE,
)
_ALL_BUT: Final = re.compile(
    rf"(?:{_ALL_REAL.pattern})\s+(?:except\s+(?:for\s+)?(?:[a-z]\s*=\s*)?(?P<but>.*)|such that\s+(?P<where>.*))",
    re.IGNORECASE,
)
_EMPTY: Final = re.compile(
    r"\\emptyset|\\?\{\s*\\?\}|(?:the )?empty set|(?:there (?:is|are) |(?:the )?(?:equation|system|inequality) has )?"
    r"no (?:real )?solutions?(?: exists?)?",
    re.IGNORECASE,
)


def read(text: str) -> Reading:
    """Return the meaning of a final answer; `Text` if a part was not understood. Raises nothing."""
    plain = normalised(text)
    if not plain or len(plain) > MAX_CHARS:
        return Text(plain)
    try:
        return (
            _plain(plain)
            if _PLAIN.fullmatch(plain)
            else _alone(_value(_FRENCH.sub(_french, with_plain_numbers(plain))))
        )
    except (Unreadable, Undefined, ArithmeticError, ValueError, TypeError, LookupError, RecursionError):
        return Text(plain)


def read_prose(text: str) -> Reading:
    """Return the meaning of the single formula or number of a sentence; `Text` if it has none or several."""
    if len(text) <= MAX_CHARS and (formula := only_formula(text)) is not None:
        return read(formula)
    plain = normalised(text)
    if len(plain) <= MAX_CHARS and (said := stated(plain)) is not None and not isinstance(value := read(said), Text):
        return value
    return (number_in_prose(plain) if len(plain) <= MAX_CHARS else None) or Text(plain)


def _plain(text: str) -> Number:
    value = Fraction(text)
    return Number(Formula(lambda p: value, frozenset()), significant_digits(text))


def _value(text: str) -> Reading:
    text = text.strip()
    if not text or r"\ldots" in text:
        raise Unreadable("no value")
    if _ALL_REAL.fullmatch(text):
        return Ranges(((-mpmath.inf, False, mpmath.inf, False),))
    if "t" in text and (but := _ALL_BUT.fullmatch(text)) is not None:  # pre-check for `except` and `that`
        return _value(but["where"] or rf"\mathbb{{R}}\backslash\{{{but['but']}\}}")
    if _EMPTY.fullmatch(text):
        return Ranges(())
    if "mod" in text and (congruent := _CONGRUENT.fullmatch(text)) is not None:
        residues = tuple(map(parse, _split(_LIST, congruent["residues"])[0]))
        name = (congruent["name"] or "").strip()
        if name and not _NAME.fullmatch(name):
            parse(name)
        return Congruence(name.replace(" ", ""), residues, congruent["modulus"])
    parts, separators = _split(_LIST, text)
    if separators:
        return _several(parts, [separator.strip(",; ") for separator in separators])
    if r"\pm" in text or r"\mp" in text:
        if text.startswith(r"\{") and (inner := _bracketed(text)) is not None:
            return inner
        both = (text.replace(r"\pm", a).replace(r"\mp", b) for a, b in (("+", "-"), ("-", "+")))
        return Items(",", tuple(map(_value, both)))
    sides, separators = _split(_MEMBER, text)
    if separators:
        if len(sides) > 2 or not _NAME.fullmatch(sides[0]):
            raise Unreadable("a membership of something else than an unknown")
        members = _value(sides[1])
        if not isinstance(members, Ranges | Items) and not sides[1].startswith(r"\mathbb"):
            raise Unreadable("a membership in something else than a set")
        return Named(_name(sides[0]), members)
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
    label = bool(separators) and _WORDS.fullmatch(sides[0]) and NAMES.isdisjoint(sides[0].split())
    if label and (len(sides) == 2 or len(sides[0]) > 1):
        return _value(":".join(sides[1:]))
    if (time := _TIME.fullmatch(text)) is not None:
        return Ratio(tuple(map(parse, time[1].split(":"))), time=True, half=(time[2] or "").casefold())
    return Ratio(tuple(map(parse, sides))) if separators else number(text)


def _split(pattern: re.Pattern[str], text: str) -> tuple[list[str], list[str]]:
    """Split `text` at separators outside of brackets; return the parts and the separators."""
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
    if all(_WORDS.fullmatch(part) and re.search("[A-Za-z]{3}", part) for part in parts):
        return Items(",", tuple(map(Text, parts)))
    values = [_value(part) for part in parts]
    named = [value for value in values if isinstance(value, Named) and isinstance(value.value, Ranges)]
    if (
        set(words) in ({"or"}, {"and"}, {""})
        and len(named) == len(values)
        and len({value.name for value in named}) == 1
    ):
        both = _united([value.value for value in named], [r"\cap"] * len(words))
        either = words[0] == "or" or (words[0] != "and" and not both.ranges)  # `x < 1, x > 2` would be empty
        return Named(
            named[0].name, _united([value.value for value in named], [r"\cup"] * len(words)) if either else both
        )
    return Items("or" if set(words) == {"or"} else ",", tuple(_flat(values)))


def _bracketed(text: str) -> Reading | None:
    """Parse the inside of one pair of brackets around the whole `text`; None if there is no such pair."""
    opening = r"\{" if text.startswith(r"\{") else text[0]
    closing = r"\}" if text.endswith(r"\}") else text[-1]
    if opening not in ("(", "[", "{", r"\{") or closing not in (")", "]", "}", r"\}"):
        return None
    inside = text[len(opening) : -len(closing)]
    if opening in (r"\{", "{") and (condition := _CONDITION.fullmatch(inside)) is not None:
        return _value(condition[1])
    try:
        parts, separators = _split(_LIST, inside)
    except Unreadable:  # `(a)(b)`
        return None
    brackets = (opening + closing).replace("\\", "")
    if not separators:
        if brackets not in ("()", "[]", "{}"):
            return None
        value = _value(inside)
        return _set(value) if opening == r"\{" and not (isinstance(value, Items) and value.brackets == "()") else value
    if brackets not in ("()", "[]", "{}", "(]", "[)"):
        raise Unreadable("brackets that do not belong together")
    values = [_value(part) for part in parts]
    return Items(brackets, tuple(values)) if brackets != "{}" else _set(Items(",", tuple(_flat(values))))


def _flat(values: list[Any]) -> list[Any]:
    """Return values with lists without brackets (`\\pm 1`) replaced by their items."""
    return [item for each in values for item in (each.items if isinstance(each, Items) and each[0] == "," else [each])]


def _set(value: Any) -> Reading:
    """Return the set of the elements in braces; conditions on an unknown already form a set."""
    if isinstance(value, Named) and isinstance(value.value, Ranges):
        return value
    if isinstance(value, Items) and len({each.name[:1] for each in value.items if isinstance(each, Named)}) > 1:
        return value._replace(brackets=",")  # `{x: 2, y: -3}`
    return Items("{}", value.items if isinstance(value, Items) and value.brackets == "," else (value,))


def _alone(value: Reading) -> Reading:
    """Return the value of a set with a single number: `\\{5\\}` also answers 5."""
    if isinstance(value, Named):
        return value._replace(value=_alone(value.value))
    match value:
        case Items("{}", ((Number() | Named()) as only,)):
            return only
    return value


def _french(found: re.Match[str]) -> str:
    opening, closing = ("[" if found[1] == "[" else "("), ("]" if found[3] == "]" else ")")
    return f"{opening}{found[2]}{closing}" if found[1] == "]" or found[3] == "[" else found[0]


def _matrix(found: re.Match[str]) -> Reading:
    body = re.sub(r"\\hline(?![A-Za-z])", "", found["body"])
    rows = [row.split("&") for row in re.split(r"\\\\(?:\[\d+\w\w\])?|\\cr(?![A-Za-z])", body) if row.strip()]
    if len({len(row) for row in rows}) != 1:
        raise Unreadable("rows of different lengths")
    cells = tuple(tuple(number(cell.strip()) for cell in row) for row in rows)
    if before := re.sub(r"(?:\\cdot|\*)\s*$", "", found["before"].strip()):
        factor = parse(before)
        cells = tuple(tuple(cell._replace(formula=factor.times(cell.formula)) for cell in row) for row in cells)
    if found["kind"].startswith("v"):
        if before or len(cells) != len(cells[0]) or len(cells) > MAX_ORDER:
            raise Unreadable("no determinant")
        return Number(_determinant([[cell.formula for cell in row] for row in cells]))
    return Matrix(cells)


def _determinant(rows: list[list[Formula]]) -> Formula:
    if not rows:
        return parse("1")
    total = parse("0")
    for column, cell in enumerate(rows[0]):
        minor = _determinant([[*row[:column], *row[column + 1 :]] for row in rows[1:]])
        total = total.minus(cell.times(minor).times(parse("1" if column % 2 else "-1")))
    return total


# --- equations, inequalities, sets of numbers -------------------------------------------------------------------------


def _name(text: str) -> str:
    return re.sub(r"[\s{}|]|^m(?=\\)|\\(?:overline|bar)(?=\{?[A-Z]{2})", "", text)


def _constant(formula: Formula) -> Any:
    if formula.unknowns:
        raise Unreadable("an unknown where a number is wanted")
    return formula.value(Point({}))


def _compared(sides: list[str], signs: list[str]) -> Reading:
    if len(sides) > 2 and (sides[0], signs[0]) in (("-\\infty", "<"), ("\\infty", ">")):
        sides, signs = sides[1:], signs[1:]
    if len(sides) > 2 and (sides[-1], signs[-1]) in (("\\infty", "<"), ("-\\infty", ">")):
        sides, signs = sides[:-1], signs[:-1]
    if r"\approx" in signs:
        at = signs.index(r"\approx") + 1
        if at == 1 and len(signs) == 1 and _NAME.fullmatch(sides[0]) and not _CONSTANTS.fullmatch(sides[0]):
            return Named(_name(sides[0]), number(sides[1]))
        left, right = (
            _value("".join(f"{a}{b}" for a, b in zip(sides[:at], [*signs[: at - 1], ""], strict=True))),
            number(sides[-1]),
        )
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
    named = [pair for pair in pairs if isinstance(pair, Named)]
    if len(named) < 2 or named[0].name != named[1].name:
        raise Unreadable("a chain of comparisons of several unknowns")
    return Named(named[0].name, _united([pair.value for pair in named], [r"\cap"]))


def _equation(sides: list[str]) -> Reading:
    """Parse `x = 5`, `9 * 2 = 18`, `A = 2 * 9 = 18`: the value is the last side. Unequal numbers give no value."""
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
    formulas = [_hundredth(number(side)) for side in (others[:-1] if named else sides[:-1])]
    last = _hundredth(value)
    if all(agree(formula, last) for formula in formulas if named is False or formula.unknowns <= last.unknowns):
        return Named(_name(first), value) if named else value
    a_sum = _SUM.fullmatch(first) is not None and not last.unknowns
    steps = all(agree(formula, last) for formula in formulas[1:] if a_sum)
    if (len(sides) > 2 and not (a_sum and steps)) or not (formulas[0].unknowns | last.unknowns):
        raise Unreadable("sides that differ")
    return Relation("=", formulas[0].minus(last), value if a_sum else None)


def _hundredth(side: Number) -> Formula:
    return side.formula.times(parse("1/100")) if side.percent else side.formula


def _inequality(left: str, sign: str, right: str) -> Reading:
    a, b = parse(left), parse(right)
    difference = a.minus(b)
    solved = None
    if len(difference.unknowns) == 1:
        bars = [
            re.fullmatch(r"\|([^|]*)\|", side) or re.fullmatch(r"\\lvert(.*)\\rvert", side) for side in (left, right)
        ]
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
    """Return where a linear difference satisfies the comparison `sign` with 0; None if it is not linear."""
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
    """Return where `|inside| sign bound` holds; None if `inside` is not linear."""
    high_end, low_end = Formula(lambda p: bound, frozenset()), Formula(lambda p: -bound, frozenset())
    if bound < 0 or sign == "≠":
        return None
    low, high = _solved(inside.minus(low_end), _TURNED[sign]), _solved(inside.minus(high_end), sign)
    if low is None or high is None:
        return None
    return _united([low, high], [r"\cap" if sign in ("<", "≤") else r"\cup"])


def as_ranges(value: Any) -> Ranges:
    """Return `value` as a set of real numbers.

    Raises:
        Unreadable: `value` is something else.
    """
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
    """Combine sets by union, intersection or difference, from the left."""
    result = sets[0]
    for other, sign in zip(sets[1:], signs, strict=True):
        result = _combined(result, other, sign)
    return result


def _combined(a: Ranges, b: Ranges, sign: str) -> Ranges:
    """Split both sets at all their ends: each end and each gap between two is entirely inside or outside."""
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
        x = (
            0
            if mpmath.isinf(cell[0]) and mpmath.isinf(cell[2])
            else cell[2] - 1
            if mpmath.isinf(cell[0])
            else cell[0] + 1
        )
    else:
        x = (cell[0] + cell[2]) / 2
    return any(
        low < x < high or (low_in and same(low, x)) or (high_in and same(high, x))
        for low, low_in, high, high_in in ranges.ranges
    )
