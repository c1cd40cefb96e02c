"""Parse and evaluate one formula in LaTeX, Python or SymPy notation; a partial parse is an error. Pure.

Rational numbers are exact (`Fraction`); everything else is evaluated by mpmath with `DIGITS` digits. There is no
symbolic algebra: two formulas are compared by their values at points (`math_scorer`).
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import mpmath

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DIGITS: Final = 120
mpmath.mp.dps = DIGITS
MORE_DIGITS: Final = 3 * DIGITS
MAX_BITS: Final = 200_000
"""Formulas with exact numbers of more bits are rejected."""
MAX_INEXACT_BITS: Final = 1_000
"""Limit for irrational values: bits of a fraction's numerator and denominator, and between two terms. It is below the
precision of `MORE_DIGITS`."""
MAX_ROOT: Final = 99
"""Higher odd roots of negative numbers are not taken as real: the values of unknown exponents have large denominators.
"""
MAX_FACTORIAL: Final = 5_000
MAX_TERMS: Final = 100
"""Maximal number of terms of a finite sum or product written with \\sum or \\prod."""
MAX_WORK: Final = 5_000
"""Maximal number of terms of such sums computed for a comparison."""
MAX_EXPONENT: Final = 10**6
"""Natural logarithm of the largest evaluated number."""


class Unreadable(Exception):
    """The text does not match the grammar, or its numbers are too large."""


class Undefined(Exception):
    """A formula lacks a value at a point, or a real value where one is required."""


class Point(NamedTuple):
    """A point for evaluation: the values of the unknowns, whether only real numbers count, the base of log (0: e).

    `work` counts the terms of sums computed for it.
    """

    values: Mapping[str, Fraction]
    real: bool = True
    log_base: int = 0
    work: Counter[str] | None = None


Number = Any  # Fraction, mpf or mpc; mpmath lacks type hints


class Formula(NamedTuple):
    """A formula: its value at a point, its unknowns, whether it contains a logarithm without base, and pieces."""

    value: Callable[[Point], Number]
    unknowns: frozenset[str]
    plain_log: bool = False
    in_pieces: bool = False

    def times(self, other: Formula) -> Formula:
        """Return the product of both."""
        return self._joined(_node(_multiply, self.value, other.value), other)

    def minus(self, other: Formula) -> Formula:
        """Return the difference of both."""
        negative = _node(_multiply, _number(-1), other.value)
        return self._joined(_node(_add, self.value, negative), other)

    def _joined(self, value: Callable[[Point], Number], other: Formula) -> Formula:
        return Formula(
            value,
            self.unknowns | other.unknowns,
            self.plain_log or other.plain_log,
            self.in_pieces or other.in_pieces,
        )


def same(a: Number, b: Number) -> bool:
    """Return whether two numbers are equal: rational ones exactly, others relatively, except for the last digit."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a, b = wide(a), wide(b)
    if not (mpmath.isfinite(a) and mpmath.isfinite(b)):
        return bool(a == b)
    return bool(abs(a - b) <= max(abs(a), abs(b)) * mpmath.mpf(10) ** (25 - mpmath.mp.dps))


def agree(a: Formula, b: Formula) -> bool:
    """Return whether two formulas have the same values wherever both are real, or else as complex numbers.

    They are evaluated at points with random rational coordinates of both signs, so that `\\sqrt{ab}` equals
    `\\sqrt{a}\\sqrt{b}`, but `|x|` does not equal `x`. Piecewise formulas (`|x|`, `\\lfloor x \\rfloor`) are also
    evaluated at all scales and close to whole numbers, where pieces end. Unknowns that are whole numbers by convention
    (`n`) may take only whole values. A logarithm without a base is natural or decimal, the same in both. An irrational
    value is computed twice, the second time with enough digits to detect the smallest terms that matter.
    """
    names = sorted(a.unknowns | b.unknowns)
    bases = (0, 10) if a.plain_log or b.plain_log else (0,)
    points = _points(names, in_pieces=a.in_pieces or b.in_pieces)
    if any(_agree_at(a, b, points, base) for base in bases):
        return True
    return bool(a.unknowns and b.unknowns) and _WHOLE_UNKNOWNS.issuperset(names) and _agree_at(a, b, _wholes(names), 0)


def _agree_at(a: Formula, b: Formula, points: list[dict[str, Fraction]], base: int) -> bool:
    work: Counter[str] = Counter()
    for real in (True, False):
        met = 0
        for values in points:
            point = Point(values, real, base, work)
            try:
                if not _same_at(a, b, point):
                    return False
                if not met:
                    with mpmath.workdps(MORE_DIGITS):
                        if not _same_at(a, b, point):
                            return False
            except (Unreadable, Undefined, ArithmeticError, ValueError, TypeError):
                if work["terms"] > MAX_WORK:
                    return False
                continue
            met += 1
        if met >= min(2, len(points)):
            return True
    return False


def _same_at(a: Formula, b: Formula, point: Point) -> bool:
    x, y = a.value(point), b.value(point)
    if same(x, y):
        return True
    digits = mpmath.mp.dps
    size = max(abs(wide(x)), abs(wide(y)))
    if size > mpmath.mpf(10) ** (30 - digits):
        return False
    with mpmath.workdps(2 * digits):  # is it a small value, or 0 plus cancellation error?
        return bool(max(abs(wide(a.value(point))), abs(wide(b.value(point)))) < size * mpmath.mpf(10) ** (-digits // 2))


@lru_cache(maxsize=64)
def _random_points(count: int, in_pieces: bool) -> list[list[Fraction]]:
    """Return fixed pseudo-random points of `count` coordinates."""
    choose = random.Random(count)
    spans = [(1, 999, 1009), (1009, 3000, 1009), (2000, 9000, 1009), (-999, -1, 1009), (-3000, 3000, 1013)]
    points = [[Fraction(choose.randint(low, high), under) for _ in range(count)] for low, high, under in spans]
    if in_pieces:
        for scale in range(-6, 16):
            for size in (Fraction(10) ** scale, -(Fraction(10) ** scale)):
                points.append([choose.randint(1009, 9999) * size / 1009 for _ in range(count)])
                points.append([60 * (n + 1) + (1 / size if scale > 0 else Fraction(0)) for n in range(count)])
    return points


def _points(names: list[str], *, in_pieces: bool) -> list[dict[str, Fraction]]:
    if not names:
        return [{}]
    return [dict(zip(names, point, strict=True)) for point in _random_points(len(names), in_pieces)]


def _wholes(names: list[str]) -> list[dict[str, Fraction]]:
    choose = random.Random(len(names))
    highest = [*range(2, 14), 97, 480, *(10**n for n in range(3, 13))]
    return [{name: Fraction(choose.randint(high // 2, high + n)) for n, name in enumerate(names)} for high in highest]


# --- numbers ----------------------------------------------------------------------------------------------------------


def wide(x: Number) -> Number:
    """Return a number as an mpmath number with `DIGITS` digits."""
    if not isinstance(x, Fraction):
        return x
    if min(x.numerator.bit_length(), x.denominator.bit_length()) > MAX_INEXACT_BITS:
        raise Unreadable("a fraction has more digits than are computed")
    return mpmath.mpf(x.numerator) / x.denominator


def _exact(x: Fraction) -> Fraction:
    if max(x.numerator.bit_length(), x.denominator.bit_length()) > MAX_BITS:
        raise Unreadable("a number is too large")
    return x


def _add(p: Point, a: Number, b: Number) -> Number:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _exact(a + b)
    a, b = wide(a), wide(b)
    if a and b and abs(mpmath.mag(a) - mpmath.mag(b)) > MAX_INEXACT_BITS:
        raise Unreadable("a term is too small to be seen beside another")
    return a + b


def _multiply(p: Point, a: Number, b: Number) -> Number:
    return _exact(a * b) if isinstance(a, Fraction) and isinstance(b, Fraction) else wide(a) * wide(b)


def _divide(p: Point, a: Number, b: Number) -> Number:
    return _exact(a / b) if isinstance(a, Fraction) and isinstance(b, Fraction) else wide(a) / wide(b)


def _whole(x: Number) -> int:
    if not isinstance(x, Fraction) or x.denominator != 1:
        raise Undefined("not a whole number")
    return x.numerator


def _root(n: int, degree: int) -> int | None:
    """Return the exact root of a natural number if it is whole."""
    if degree == 2:
        root = math.isqrt(n)
    elif degree > 64 or n.bit_length() > 4_000:
        return None
    else:
        with mpmath.workdps(n.bit_length() // 3 + 20):
            root = int(mpmath.nint(mpmath.root(n, degree)))
    return root if root**degree == n else None


def _power(p: Point, a: Number, b: Number) -> Number:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        if b.denominator == 1:
            bits = max(a.numerator.bit_length(), a.denominator.bit_length())
            if abs(b) > 1 and bits > 1 and bits * abs(b) > MAX_BITS:
                raise Unreadable("a power is too large")
            return a ** int(b) if abs(a) != 1 else (a if b % 2 else Fraction(1))
        sign = 1
        if a < 0 and p.real:  # the real root, as taught in schools
            if b.denominator % 2 == 0 or b.denominator > MAX_ROOT:
                raise Undefined("a root of a negative number")
            sign, a = (-1 if b.numerator % 2 else 1), -a
        if a >= 0 and (over := _root(a.numerator, b.denominator)) is not None:
            under = _root(a.denominator, b.denominator)
            if under is not None:
                return sign * _power(p, Fraction(over, under), Fraction(b.numerator))
        return sign * _powerwide(p, wide(a), wide(b))
    return _powerwide(p, wide(a), wide(b))


def _powerwide(p: Point, a: Number, b: Number) -> Number:
    if a == 0:
        return a**b
    if abs(b * mpmath.log(abs(a))) > MAX_EXPONENT:
        raise Unreadable("a power is too large")
    return a**b


def _factorial(p: Point, x: Number, step: int = 1) -> Number:
    if abs(wide(x)) > MAX_FACTORIAL:
        raise Unreadable("a factorial is too large")
    if isinstance(x, Fraction) and x.denominator == 1 and x >= 0:
        return Fraction(math.factorial(int(x)) if step == 1 else math.prod(range(int(x), 0, -step)))
    return mpmath.factorial(wide(x)) if step == 1 else mpmath.fac2(wide(x))


def _binomial(p: Point, n: Number, k: Number) -> Number:
    if max(abs(wide(n)), abs(wide(k))) > MAX_FACTORIAL:
        raise Unreadable("a binomial coefficient is too large")
    if all(isinstance(x, Fraction) and x.denominator == 1 and x >= 0 for x in (n, k)):
        return Fraction(math.comb(int(n), int(k)))
    return mpmath.binomial(wide(n), wide(k))


def _log(p: Point, x: Number, base: Number = None) -> Number:
    below = mpmath.e if base is None and not p.log_base else wide(Fraction(p.log_base) if base is None else base)
    if base is None and not p.log_base:
        return mpmath.log(wide(x))
    value = mpmath.log(wide(x)) / mpmath.log(below)
    near = mpmath.nint(mpmath.re(value)) if abs(value) < MAX_EXPONENT else 0
    exact = Fraction(int(near))
    whole = isinstance(x, Fraction) and isinstance(base, Fraction) and _power(p, base, exact) == x
    return exact if whole else value


def _plain(function: Callable[..., Number]) -> Callable[..., Number]:
    """Guard a function of mpmath that needs too much memory for large arguments."""

    def checked(p: Point, x: Number) -> Number:
        x = wide(x)
        if abs(x) > MAX_EXPONENT:
            raise Unreadable("the argument of a function is too large")
        return function(x)

    return checked


def _integers(function: Callable[..., int]) -> Callable[..., Number]:
    return lambda p, *xs: Fraction(function(*map(_whole, xs)))


def _rounded(function: Callable[..., Number], wide: Callable[..., Number]) -> Callable[..., Number]:
    return lambda p, x: Fraction(function(x)) if isinstance(x, Fraction) else Fraction(int(wide(x)))


_TRIGONOMETRIC: Final = ("sin", "cos", "tan", "cot", "sec", "csc")
_FUNCTIONS: Final[dict[str, Callable[..., Number]]] = {
    **{name + tail: _plain(getattr(mpmath, name + tail)) for name in _TRIGONOMETRIC for tail in ("", "h")},
    **{
        prefix + name + tail: _plain(getattr(mpmath, f"a{name}{tail}"))
        for name in _TRIGONOMETRIC for tail in ("", "h") for prefix in ("a", "arc", "ar")
    },
    "exp": _plain(mpmath.exp), "ln": lambda p, x: mpmath.log(wide(x)), "log": _log,
    "lg": lambda p, x: _log(p, x, Fraction(10)), "sqrt": lambda p, x, n=Fraction(2): _power(p, x, 1 / n),
    "cbrt": lambda p, x: _power(p, x, Fraction(1, 3)), "abs": lambda p, x: abs(x),
    "floor": _rounded(math.floor, mpmath.floor), "ceil": _rounded(math.ceil, mpmath.ceil),
    "factorial": _factorial, "binom": _binomial, "gcd": _integers(math.gcd), "lcm": _integers(math.lcm),
    "max": lambda p, *xs: max(xs, key=wide), "min": lambda p, *xs: min(xs, key=wide), "Rational": _divide,
    "complex": lambda p, a, b: _add(p, a, _multiply(p, b, _imaginary(p))),
    "conj": lambda p, x: mpmath.conj(wide(x)),
    "Re": lambda p, x: mpmath.re(wide(x)), "Im": lambda p, x: mpmath.im(wide(x)),
}  # fmt: skip
_ALIASES: Final = {
    "sum": "sum", "prod": "prod", "product": "prod",
    "Fraction": "Rational", "conjugate": "conj",
    "ceiling": "ceil", "Abs": "abs", "binomial": "binom", "comb": "binom", "tg": "tan", "ctg": "cot", "cosec": "csc",
    "arctg": "arctan", "re": "Re", "im": "Im", "dbinom": "binom", "tbinom": "binom", "infinity": "infty",
    "inf": "infty", "oo": "infty", "Infinity": "infty", "imath": "i",
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac"), "frac"),
}  # fmt: skip
_CONSTANTS: Final = {"pi": lambda: +mpmath.pi, "infty": lambda: mpmath.inf, "e": lambda: +mpmath.e}
_GREEK: Final = frozenset(
    """
    alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau
    upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar
    """.split()  # noqa: SIM905 - a list of strings is harder to read
)
_DECORATIONS: Final = frozenset(
    """
    vec hat bar overline underline tilde widehat widetilde overrightarrow overleftarrow dot ddot mathbb mathcal
    """.split()  # noqa: SIM905 - a list of strings is harder to read
)
_TIMES: Final = frozenset({"*", r"\cdot", r"\times", r"\ast"})
_CLOSING: Final = {
    "(": ")", "[": "]", "{": "}", r"\{": r"\}", "|": "|", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil",
    r"\lvert": r"\rvert",
}  # fmt: skip
_WRAPPED: Final = {r"\lfloor": "floor", r"\lceil": "ceil", r"\lvert": "abs", "|": "abs"}

_WHOLE_UNKNOWNS: Final = frozenset("kmnKMN")
_IN_PIECES: Final = frozenset(
    {"|", "//", r"\lvert", r"\lfloor", r"\lceil"}
    | {rf"\{name}" for name in ("abs", "Abs", "floor", "ceil", "ceiling", "max", "min")}
)
_TOKEN: Final = re.compile(
    r"(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d{1,4}(?![\w.]))?|\.\d+)|\\[A-Za-z]+|\\.|[A-Za-z]+|\*\*|//|\S", re.DOTALL
)
NAMES: Final = frozenset({*_FUNCTIONS, *_ALIASES, *_CONSTANTS, *_GREEK} - {"i", "e"})
_NAME_FIRST: Final = re.compile(
    "|".join(
        sorted(
            (n for n in _FUNCTIONS if n not in ("Re", "Im", "complex", "conj", "max", "min", "lg", "abs")),
            key=len,
            reverse=True,
        )
    )
)
_SHORT_WORDS: Final = frozenset(
    {"no", "yes", "odd", "one", "two", "six", "ten", "is", "if", "not", "the", "for", "all", "any"}
)
MAX_PRODUCT: Final = 3
"""Adjacent letters up to this number are read as a product (`xyz`), more as a word."""


def tokens_of(text: str) -> list[str]:
    """Return the tokens of `text`: numbers, commands, names, and runs of letters split into unknowns.

    Raises:
        Unreadable: a run of letters is a word.
    """
    tokens: list[str] = []
    for found in _TOKEN.finditer(text):
        token = found[0]
        if not token[0].isalpha():
            tokens.append("^" if token == "**" else token)
            continue
        while token:
            head = _NAME_FIRST.match(token)
            if token in NAMES:
                tokens.append("\\" + token)
                break
            if head is None or len(head[0]) < 2:
                if len(token) > MAX_PRODUCT or token.casefold() in _SHORT_WORDS:
                    raise Unreadable(f"{token!r} is a word")
                tokens.extend(token)
                break
            tokens.append("\\" + head[0])
            token = token[head.end() :]
    return tokens


def parse(text: str) -> Formula:
    """Return the formula that makes up the whole `text`.

    Raises:
        Unreadable: the text is not a formula, or a part would be left over.
    """
    try:
        parser = _Parser(tokens_of(text))
        node = parser.whole()
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None
    if r"\infty" in parser.tokens and len([token for token in parser.tokens if token not in ("+", "-")]) > 1:
        raise Unreadable("infinity is no number to compute with")
    if parser.at < len(parser.tokens):
        raise Unreadable(f"{parser.tokens[parser.at]!r} is left over")
    in_pieces = bool(parser.unknowns) and not _IN_PIECES.isdisjoint(parser.tokens)
    return Formula(node, frozenset(parser.unknowns), parser.plain_log, in_pieces)


class _Parser:
    """Recursive descent over tokens. Each method consumes the tokens of its node, or raises `Unreadable`."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = list(tokens)
        self.at = 0
        self.unknowns: set[str] = set()
        self.plain_log = False
        self._bars = 0
        self._angles = 0
        self._indices: frozenset[str] = frozenset()

    @property
    def _next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _take(self, *expected: str) -> str:
        token = self._next
        if not token or (expected and token not in expected):
            raise Unreadable(f"{token!r} where {' or '.join(expected) or 'more'} is expected")
        self.at += 1
        return token

    def _skip(self, *tokens: str) -> bool:
        if self.tokens[self.at : self.at + len(tokens)] != list(tokens):
            return False
        self.at += len(tokens)
        return True

    def whole(self) -> Any:
        """Parse a sum, or two sums separated by TeX's \\over or \\choose."""
        node = self.sum()
        if self._next in (r"\over", r"\choose"):
            node = _node(_divide if self._take() == r"\over" else _binomial, node, self.sum())
        return node

    def sum(self) -> Any:
        node = self._product()
        while self._next in ("+", "-"):
            sign = self._take()
            right = self._product()
            node = _node(_add, node, right if sign == "+" else _node(_multiply, _number(-1), right))
        return node

    def _product(self) -> Any:
        node = self._signed()
        while True:
            if self._next in _TIMES:
                self._take()
                node = _node(_multiply, node, self._signed())
            elif self._next in ("/", r"\div"):
                self._take()
                node = _node(_divide, node, self._signed())
            elif self._next == "//":
                self._take()
                node = _node(_FUNCTIONS["floor"], _node(_divide, node, self._signed()))
            elif self._starts_factor():
                node = _node(_multiply, node, self._power())
            else:
                return node

    def _signed(self) -> Any:
        if self._next == "-":
            self._take()
            return _node(_multiply, _number(-1), self._signed())
        if self._next == "+":
            self._take()
            return self._signed()
        return self._power()

    def _starts_factor(self) -> bool:
        """Return whether the next token may be multiplied implicitly; two adjacent numbers may not."""
        token = self._next
        if token[:1].isdigit():
            return self.tokens[self.at - 1] in ("}", ")", "!")
        if token == "|":
            return not self._bars
        name = token[1:]
        return (
            token.isalpha() or token in _CLOSING or token in (r"\frac", r"\sum", r"\prod")
            or (token[:1] == "\\" and (name in NAMES or name in _DECORATIONS or name in ("e", "i")))
        )  # fmt: skip

    def _power(self) -> Any:
        node = self._postfixed()
        while self._next == "^":
            if self._skip("^", r"\circ") or self._skip("^", "{", r"\circ", "}"):
                if self._angles:
                    node = _node(lambda p, x: wide(x) * mpmath.pi / 180, node)
                continue
            self._take()
            node = _node(_power, node, self._argument(signed=True))
        return node

    def _argument(self, *, signed: bool = False) -> Any:
        """Parse the argument of `^` or of a command: a group or a single item."""
        if signed and self._next in ("-", "+"):
            return _node(_multiply, _number(-1 if self._take() == "-" else 1), self._argument(signed=True))
        node = self._atom() if self._next == "{" else self._postfixed()
        return _node(_power, node, self._argument(signed=True)) if signed and self._skip("^") else node

    def _postfixed(self) -> Any:
        node = self._atom()
        while self._next == "!":
            double = self._skip("!", "!") or not self._take()
            node = _node(lambda p, x, step=2 if double else 1: _factorial(p, x, step), node)
        return node

    def _atom(self) -> Any:
        token = self._take()
        if token[0].isdigit() or token[0] == ".":
            return _number(token)
        if token in _CLOSING:
            return self._group(token)
        if token in self._indices:
            return self._unknown(token)
        if token in ("i", r"\i", "I", r"\imath") and self._next != "_":
            return _imaginary
        if token == "e" and self._next != "_":
            return _constant("e")
        if token.isalpha():
            return self._unknown(token)
        name = _ALIASES.get(token[1:], token[1:])
        if name == "frac":
            return _node(_divide, self._one(), self._one())
        if name == "sqrt":
            return self._sqrt()
        if name in _FUNCTIONS:
            return self._function(name)
        if name in ("sum", "prod"):
            return self._series(_add if name == "sum" else _multiply, _number(int(name == "prod")))
        if name in _CONSTANTS:
            return _constant(name)
        if name in _GREEK:
            return self._unknown(token)
        if name in ("overline", "bar") and self._next == "{" and self._is_complex():
            return _node(_FUNCTIONS["conj"], self._argument())
        if name in _DECORATIONS:
            return self._unknown(token + self._raw())
        raise Unreadable(f"{token!r} is not known")

    def _group(self, opening: str) -> Any:
        bars = opening == "|"
        before, self._bars = self._bars, int(bars)
        node = self.whole() if opening == "{" else self.sum()
        self._take(_CLOSING[opening])
        self._bars = before
        return _node(_FUNCTIONS[_WRAPPED[opening]], node) if opening in _WRAPPED else node

    def _one(self) -> Any:
        """Parse an argument of \\frac: a group, or a single digit, letter or command."""
        token = self._next
        if len(token) > 1 and token.isdigit():
            self.tokens[self.at] = token[1:]
            return _number(token[0])
        return self._atom()

    def _sqrt(self) -> Any:
        degree = _number(2)
        if self._skip("["):
            degree = self.sum()
            self._take("]")
        if self._next in ("(", "["):
            arguments = self._arguments()
            return _node(_FUNCTIONS["sqrt"], arguments[0], *(arguments[1:] or [degree]))
        return _node(_FUNCTIONS["sqrt"], self._argument(), degree)

    def _function(self, name: str) -> Any:
        base = power = None
        while self._next in ("_", "^") and name != "exp":
            if self._take() == "_":
                base = self._argument()
            else:
                start = self.at
                power = self._argument(signed=True)
                if "".join(self.tokens[start : self.at]).strip("{}") == "-1":  # the inverse function
                    name, power = f"a{name}", None
                    if name not in _FUNCTIONS:
                        raise Unreadable(f"{name!r} is not known")
        self._angles += name in _TRIGONOMETRIC
        arguments = self._arguments()
        self._angles -= name in _TRIGONOMETRIC
        if base is not None:
            if name != "log":
                raise Unreadable(f"{name} has no base")
            arguments.append(base)
        self.plain_log |= name == "log" and len(arguments) == 1
        node = _node(_FUNCTIONS[name], *arguments)
        return node if power is None else _node(_power, node, power)

    def _arguments(self) -> list[Any]:
        """Parse the arguments of a function: in brackets, or implicit factors up to the next function."""
        if self._next in ("(", "[", "{"):
            opening = self._take()
            before, self._bars = self._bars, 0
            arguments = [self.sum()]
            while self._skip(","):
                arguments.append(self.sum())
            self._take(_CLOSING[opening])
            self._bars = before
            while opening == "{" and self._next == "{":  # \binom{n}{k}
                arguments.append(self._argument())
            return arguments
        if _ALIASES.get(self.tokens[self.at - 1][1:], self.tokens[self.at - 1][1:]) == "binom":  # \binom n2
            return [self._one(), self._one()]
        node = _node(_multiply, _number(-1), self._power()) if self._skip("-") else self._power()
        while self._starts_factor() and self._next not in ("(", "[") and self._next[1:] not in _FUNCTIONS:
            node = _node(_multiply, node, self._power())
        return [node]

    def _is_complex(self) -> bool:
        """Return whether the next group is a sum with the imaginary unit."""
        group = self.tokens[self.at : self.tokens.index("}", self.at)] if "}" in self.tokens[self.at :] else []
        return "i" in group and ("+" in group or "-" in group)

    def _series(self, join: Callable[..., Number], neutral: Any) -> Any:
        """Parse `_{k=1}^{n}` and the factors after it: a finite sum or product."""
        self._take("_")
        closing = _CLOSING[self._take("{", "(")]
        name = self._take()
        self._take("=")
        first = self.sum()
        self._take(closing)
        self._take("^")
        last = self._argument()
        known = name in self.unknowns
        if len(self._indices) > 1:
            raise Unreadable("a sum in a sum in a sum")
        outside, self._indices = self._indices, self._indices | {name}
        term = self._product()
        self._indices = outside
        if not name.isalpha() or known:
            raise Unreadable("a sum over no unknown of its own")
        self.unknowns.discard(name)

        def value(p: Point) -> Number:
            low, high = _whole(first(p)), _whole(last(p))
            if not 0 <= high - low < MAX_TERMS:
                raise Unreadable("too many terms")
            if p.work is not None:
                p.work["terms"] += high - low + 1
                if p.work["terms"] > MAX_WORK:
                    raise Unreadable("too many terms")
            result = neutral(p)
            for number in range(low, high + 1):
                result = join(p, result, term(p._replace(values={**p.values, name: Fraction(number)})))
            return result

        return value

    def _raw(self) -> str:
        """Return the text of a group or of one token that is part of a name."""
        token = self._take()
        if token != "{":
            return token
        start, depth = self.at, 1
        while depth:
            depth += {"{": 1, "}": -1}.get(self._take(), 0)
        return "".join(self.tokens[start : self.at - 1])

    def _unknown(self, name: str) -> Any:
        if name == "C" and self._next in ("_", "^"):  # C_{10}^3 or C^3_{10}, a number of combinations
            start, first, low = self.at, self._take(), self._argument()
            if self._skip("^" if first == "_" else "_"):
                high = self._argument()
                return _node(_binomial, *((low, high) if first == "_" else (high, low)))
            self.at = start
        if self._skip("_"):
            name = f"{name}_{self._raw()}"
        elif name == "C" and "".join(self.tokens[self.at : self.at + 5]).count(",") == 1 and self._next == "(":
            return _node(_binomial, *self._arguments())
        self.unknowns.add(name)
        return _unknown_value(name)


def _unknown_value(name: str) -> Any:
    def value(p: Point) -> Number:
        if name not in p.values:
            raise Undefined(f"{name} has no value")
        return p.values[name]

    return value


def _number(text: str | int) -> Any:
    value = Fraction(text)
    return lambda p: value


def _constant(name: str) -> Any:
    return lambda p: _CONSTANTS[name]()


def _imaginary(p: Point) -> Number:
    if p.real:
        raise Undefined("the imaginary unit")
    return mpmath.mpc(0, 1)


def _node(function: Callable[..., Number], *nodes: Any) -> Any:
    def value(p: Point) -> Number:
        result = function(p, *[node(p) for node in nodes])
        if p.real and isinstance(result, mpmath.mpc):
            raise Undefined("it is not real")
        return result

    return value
