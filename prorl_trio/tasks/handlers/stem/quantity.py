# ruff: noqa: RUF001 - unusual signs are the subject of this module
"""Parse a number with its unit in an answer: the number, and the text of its unit. Needs no other package."""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

from prorl_trio.tasks.handlers.stem.plain_text import plain
from prorl_trio.tasks.handlers.stem.stated import first_sentence, without_reason

MAX_QUANTITY_CHARS: Final = 600
MAX_SIDES: Final = 8
MAX_DEPTH: Final = 8
MAX_EXPONENT: Final = 400
_DECIMAL: Final = re.compile(r"[+-]?[0-9]{1,60}(?:\.[0-9]{1,60})?(?:[eE][+-]?[0-9]{1,4})?")
_NUMBER: Final = re.compile(
    r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d{1,3}(?: \d{3})+(?! ?\d)|\d{1,3}(?:_\d{3})+(?!\w)|\d{1,60})(?:\.\d{0,60})?"
    r"|\.\d{1,60}"
)
_EXPONENT: Final = re.compile(r"[eE]([+-]?\d{1,4})(?![\d.])")
_POWER: Final = re.compile(r"\s*(?:\^|\*\*)\s*")
_MIXED: Final = re.compile(r" (\d{1,9})/(\d{1,9})(?![\d./]|\s*[(π√])")
_FUNCTION: Final = re.compile(r"(?:(?:math|np|numpy|sp|sympy)\.)?(sqrt|exp|ln|pi)(?![A-Za-z])|[π√]|e(?=\s?(?:\^|\*\*))")
_MULTIPLES: Final = {
    "hundred": 1e2, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12,
}  # fmt: skip
_MULTIPLE: Final = re.compile(rf"\s*({'|'.join(_MULTIPLES)})(?![A-Za-z])")
_ABOUT: Final = r"(?:about|approximately|approx\.?|around|roughly|nearly|almost|exactly|precisely|ca\.?|circa|[≈~])"
_SIGN: Final = re.compile(r"\s*(?:([+-])|(–)(?=\s*[\d.(π√])|(minus|negative|plus|positive)\s)\s*", re.IGNORECASE)
_CONNECTOR: Final = re.compile(
    rf"(?:(?<![A-Za-z])(?:is|are|was|were|be|becomes|equals?|yields|gives|get|obtain|find|found|have|has|takes|moves|travels|weighs|contains)(?![A-Za-z])|:)"
    rf"\s*(?:equal\s+to\s*)?(?:{_ABOUT}\s*)*(?:an?\s+)?(?=[-+–]?\s?[\d.(√π\\]|(?:minus|negative)\s)",
    re.IGNORECASE,
)
_NAMING: Final = re.compile(r"(?:[^\d=≈<>≤≥≠±]|(?<=[A-Za-z_)\]])\d)*")
"""Prose before a number; digits in it belong to symbols."""
_SYMBOL: Final = re.compile(r"\s*p[A-Z][A-Za-z]?(?:_\w+)?\s+(?=[-+]?[\d.])")
_ABOUTS: Final = re.compile(rf"(?:{_ABOUT}\s*)*", re.IGNORECASE)
_LOGIC: Final = re.compile(
    r"(?<![A-Za-z])(?:not|no|never|neither|nor|or|and|if|unless|isn't|isnt|wasn't|cannot|can't|between|than|less|more|"
    r"least|most|either|maybe|perhaps|possibly|might|could|may|can|wrong|incorrect|false|instead|half|twice|double|to|from|error|"
    r"uncertainty|minus|negative)(?![A-Za-z])|n't",
    re.IGNORECASE,
)
_FORMULA: Final = re.compile(r"[\w\\(){}\[\]^+\-*/·×÷√|'′.°%Å⟨⟩ ]*", re.DOTALL)
_OF: Final = re.compile(
    r"(?<=\S) (?:of (?:the )?[A-Za-z][\w()+]{0,20}(?: [A-Za-z][a-z]{0,20}){0,2}|"
    r"(?:down|up|left|right|north|south|east|west|for|back)wards?|downhill|uphill|(?:counter)?clockwise|"
    r"long|tall|high|wide|deep|thick|away|apart|old|in (?:all|total|length|height|width|depth|diameter|magnitude))$"
)
"""Words after a unit that name the measured object or dimension."""
_THEREFORE: Final = re.compile(r"(?:so|thus|hence|therefore|then|finally|now)(?![A-Za-z])[\s,:]*", re.IGNORECASE)
_ALSO: Final = re.compile(
    r"\s*[,;]?\s\((?:or|i\.e\.,?|that is,?|=|≈|~|about|approximately|\s)*([-+]?[\d.√π][^()]*(?:\([^()]*\)[^()]*)?)\)$"
)
_SIDES: Final = re.compile(r"==|[=≈]|,?\s+or\s+|,\s*i\.e\.,?\s+")


class Quantity(NamedTuple):
    """A finite number, and the text of its unit; empty for none. `units.read_unit` reads it."""

    value: float
    unit: str = ""


def read_number(text: str) -> float | None:
    """Return the number that makes up a text; None if it has a unit or is not a number."""
    found = read_quantities(text)
    return found[0].value if len(found) == 1 and not found[0].unit else None


def read_quantities(text: str) -> list[Quantity]:
    """Return the quantity stated in a text, followed by the same in other units; empty if it states none.

    Accepts decimals, grouped thousands, `1.2e-3`, `1.2 \\times 10^{-3}`, fractions, `\\pi`, `\\sqrt{2}`; LaTeX or
    Python. It may be preceded by `v = ...`, `the speed is ...` or `about`, and followed by the same in another unit:
    `500 nm = 0.5 µm`, `500 nm (0.5 µm)`. The caller checks that these agree. Ranges, sums and products (`5-6`, `6*7`)
    are not numbers. Raises nothing.
    """
    if len(text) > MAX_QUANTITY_CHARS:
        return []
    if _DECIMAL.fullmatch(text):  # the most frequent case
        return [Quantity(float(text))] if math.isfinite(float(text)) else []
    whole = plain(text)
    reasoned = without_reason(whole)
    text = _stripped(first_sentence(reasoned if re.search(r"\d", reasoned) else whole))  # `the loss due to ... is 5 W`
    text = re.sub(r"^[\s=≈~]+", "", text)
    if (therefore := _THEREFORE.match(text)) is not None:
        text = text[therefore.end() :]
    also: list[str] = []
    if (inner := _ALSO.search(text)) is not None and text[: inner.start()].strip():
        also, text = [inner[1]], text[: inner.start()]
    sides = _SIDES.split(text)
    if len(sides) > MAX_SIDES:
        return []
    found: list[Quantity] = []
    for place, side in enumerate([*sides, *also]):
        quantity = _quantity(side, first=place == 0)
        if quantity is not None:
            found.append(quantity)
        elif found or place >= len(sides) - 1 or not _is_formula(side, first=place == 0):
            return []
    # In a calculation, `E = 2*3 = 6 J`, the result is meant; in a quantity with two units, the first.
    with_unit = [quantity for quantity in found if quantity.unit]
    if not with_unit:
        return found[::-1]
    return [with_unit[0], *(quantity for quantity in found if quantity is not with_unit[0])]


def _stripped(text: str) -> str:
    text = text.strip().strip("`").strip()
    while (
        len(text) > 1 and text[0] in "([{\"'" and text[-1] in ")]}\"'" and "()[]{}\"\"''".find(text[0] + text[-1]) >= 0
    ):
        inner = text[1:-1]
        if any(sign in inner for sign in "()[]{}\"'"):
            break
        text = inner.strip()
    return re.sub(r"(?<!\.)\.$|[,;]$", "", text).strip()


def _is_formula(side: str, *, first: bool) -> bool:
    """Return whether the text before an equals sign names or computes the value, and is not itself an answer."""
    if first and ":" in side:
        side = side.rpartition(":")[2]
    return any(map(str.isalnum, side)) and _FORMULA.fullmatch(side) is not None and not _LOGIC.search(side)


def _quantity(text: str, *, first: bool) -> Quantity | None:
    start = _ABOUTS.match(text.strip())
    text = text.strip()[start.end() if start else 0 :]
    if (symbol := _SYMBOL.match(text)) is not None:
        text = text[symbol.end() :]
    if first and (connector := _CONNECTOR.search(text)) is not None:
        before = text[: connector.start()]
        if _NAMING.fullmatch(before) and not _LOGIC.search(before.replace("due to", "")):
            text = text[connector.end() :]
    reader = _Reader(text)
    value = reader.closed_form()
    if value is None or not math.isfinite(value):
        return None
    unit = reader.rest()
    if unit and (unit[0] in "+-–,^_*=<>.±!:" or (unit[0].isdigit() and not re.match(r"1\s?/\s?[^\W\d]", unit))):
        return None
    unit = _OF.sub("", unit)
    return Quantity(value, unit)


class _Reader:
    """A parser of one number in closed form, at the beginning of a text; `rest` is the remaining text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._is_closed = True
        self._has_irrational = False

    def rest(self) -> str:
        return self._text[self._at :].strip()

    def closed_form(self) -> float | None:
        """Return the number; None if there is none, or an unevaluated sum or product of plain numbers."""
        try:
            value = self._sum(0)
        except (ArithmeticError, ValueError, OverflowError):
            return None
        if (multiple := _MULTIPLE.match(self._text, self._at)) is not None:
            self._at = multiple.end()
            value *= _MULTIPLES[multiple[1]]
        return value if self._is_closed or self._has_irrational else None

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _sum(self, depth: int) -> float:
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        sign = self._take(_SIGN)
        value = self._product(depth)
        if sign is not None and (sign[1] == "-" or sign[2] or (sign[3] or "").casefold() in ("minus", "negative")):
            value = -value
        while (sign := self._take(_PLUS)) is not None:
            self._is_closed = False
            term = self._product(depth)
            value = value + term if sign[1] == "+" else value - term
        return value

    def _product(self, depth: int) -> float:
        value, plain_numbers = self._power(depth)
        while True:
            start = self._at
            if self._take(_OVER):
                divisor, _ = self._power(depth)
                if self._text[self._at : self._at + 1] in ("π", "√") or self._text.startswith("(", self._at):
                    raise ValueError("1/2π may be two things")
                value /= divisor
                continue
            state = self._is_closed, self._has_irrational
            if self._take(_TIMES) is None:
                self._at = self._skip_space()
                if not self._text.startswith(("π", "√", "(", "pi", "sqrt"), self._at):
                    self._at = start
                    return value
            try:
                factor, plain_number = self._power(depth)
            except ValueError:  # the unit follows
                self._at = start
                self._is_closed, self._has_irrational = state
                return value
            if plain_numbers and plain_number:
                self._is_closed = False
            plain_numbers = plain_numbers or plain_number
            value *= factor

    def _skip_space(self) -> int:
        at = self._at
        while at < len(self._text) and self._text[at] == " ":
            at += 1
        return at

    def _power(self, depth: int) -> tuple[float, bool]:
        """Return a base with its exponent, and whether it is a plain number: not a power, root or constant."""
        base, plain_number = self._base(depth)
        start = self._at
        if self._take(_POWER) is None:
            return base, plain_number
        try:
            exponent = self._exponent(depth)
        except ValueError:
            self._at = start
            raise
        if abs(exponent) > MAX_EXPONENT or (self._take(_POWER) is not None):
            raise ValueError("a tower of powers")
        power = base**exponent
        if isinstance(power, complex):
            raise ValueError("it is complex")
        return float(power), False

    def _exponent(self, depth: int) -> float:
        sign = self._take(_SIGN)
        if self._text.startswith("(", self._at):
            self._at += 1
            value = self._closing(depth)
        elif (found := self._take(_NUMBER)) is not None:
            value = float(found[0].replace(",", "").replace(" ", ""))
        else:
            raise ValueError("no exponent")
        return -value if sign is not None and (sign[1] == "-" or sign[2]) else value

    def _closing(self, depth: int) -> float:
        value = self._sum(depth + 1)
        self._at = self._skip_space()
        if not self._text.startswith(")", self._at):
            raise ValueError("a bracket is open")
        self._at += 1
        return value

    def _base(self, depth: int) -> tuple[float, bool]:
        if (found := self._take(_NUMBER)) is not None:
            digits = re.sub(r"[, _]", "", found[0])
            if (exponent := self._take(_EXPONENT)) is not None:
                return float(f"{digits}e{exponent[1]}"), True
            value = float(digits)
            if found[0].isdigit() and (mixed := self._take(_MIXED)) is not None:
                return value + float(mixed[1]) / float(mixed[2]), True
            return value, True
        if (function := self._take(_FUNCTION)) is not None:
            return self._function(function[1] or function[0], depth), False
        if self._text.startswith("(", self._at):
            self._at += 1
            closed, self._is_closed = self._is_closed, True
            value = self._closing(depth)
            self._is_closed = closed and (self._is_closed or self._has_irrational)
            return value, True
        raise ValueError("no number")

    def _function(self, name: str, depth: int) -> float:
        if name in ("π", "pi"):
            self._has_irrational = True
            return math.pi
        if name == "e":
            self._has_irrational = True
            return math.e
        self._at = self._skip_space()
        if self._text.startswith("(", self._at):
            self._at += 1
            value = self._closing(depth)
        elif name == "√" and (found := self._take(_NUMBER)) is not None:
            value = float(re.sub(r"[, _]", "", found[0]))
        else:
            raise ValueError(f"no argument of {name}")
        self._has_irrational = True
        return {"√": math.sqrt, "sqrt": math.sqrt, "exp": math.exp, "ln": math.log}[name](value)


_PLUS: Final = re.compile(r"\s*([+-])\s*(?=[\d.π√(]|sqrt|pi)")
_OVER: Final = re.compile(r"\s*[/÷]\s*(?=[\d.π√(])(?!\([^\d√π.+-])")
_TIMES: Final = re.compile(r"\s*[×*·](?!\*)\s*|\s*[xX]\s*(?=10\s?(?:\^|\*\*))|(?<=\d) (?=10\s?(?:\^|\*\*))")
