"""Compare two answers in mathematics. Runs in a scoring process (`prorl_trio.agent.scoring`)."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

import mpmath

from prorl_trio.tasks.handlers.final_answer import find_final_answer
from prorl_trio.tasks.handlers.math_formula import Formula, Point, agree, parse, same, wide
from prorl_trio.tasks.handlers.math_numbers import Number
from prorl_trio.tasks.handlers.math_reader import (
    Congruence,
    Items,
    Matrix,
    Named,
    Ranges,
    Ratio,
    Reading,
    Relation,
    Text,
    as_ranges,
    read,
    read_prose,
)
from prorl_trio.tasks.handlers.math_text import normalised

MAX_SHOWN_CHARS: Final = 500
"""Number of characters of an answer shown in a result."""
MIN_DIGITS: Final = 6
"""A decimal with at least this many significant digits also matches numbers that round to it."""
FLOAT_DIGITS: Final = 15
"""A decimal with this many significant digits may be a printed float, of which `SHOWN_DIGITS` are reliable."""
SHOWN_DIGITS: Final = 12
MAX_GOLD_WORDS: Final = 8
_PLACEHOLDERS: Final = frozenset(
    (
        "proof",
        "notfound",
        "not found",
        "n/a",
        "na",
        "null",
        "nan",
        "see solution",
        "omitted",
        "todo",
        "tbd",
        "-",
        "?",
        "answer",
    )
)


_NO_VALUE: Final = re.compile(r"#(?:n/a|ref!|value!|div/0!|name\?|num!|null!)|<na>", re.IGNORECASE)
_SENTENCES: Final = re.compile(
    r"(?:\d|(?<![A-Z])[a-z])\.\s+[A-Z][a-z]*\W+[a-z\d]|,\s*(?:because|since|so|then|which|therefore|thus|hence)\s"
)


def score(payload: dict[str, Any]) -> dict[str, Any]:
    """Compare `payload["answer"]`, given by an agent, with `payload["gold"]`.

    The same functions extract and parse both. Returns `equal` (bool) and both extracted answers. An answer that is not
    understood equals only its own text, up to spacing and markup.

    Raises:
        ValueError: the gold answer is empty, which is an error of the task.
    """
    gold, answer = _find_gold(payload["gold"]), find_final_answer(payload["answer"])
    if not normalised(gold):
        raise ValueError(f"the gold answer {payload['gold'][:MAX_SHOWN_CHARS]!r} is empty")
    return {
        "equal": equal(gold, answer),
        "parsed_gold": gold[:MAX_SHOWN_CHARS],
        "parsed_answer": answer[:MAX_SHOWN_CHARS],
    }


def check_gold(payload: dict[str, Any]) -> dict[str, Any]:
    """Parse the gold answers of `payload["payload"]` and grade each against itself.

    Returns `error` (empty if all can be graded) and the `path` of the field.
    """
    answer = payload["payload"].get("answer")
    golds = answer if isinstance(answer, list) else [answer]
    for number, gold in enumerate(golds):
        path = "$.instance.payload.answer" + (f"[{number}]" if isinstance(answer, list) else "")
        if error := _fault_of(gold):
            return {"error": error, "path": path}
    return {"error": "", "path": ""}


def _fault_of(gold: Any) -> str:
    shown = repr(gold)[:200]
    if not isinstance(gold, str):
        return f"the gold answer {shown} is no text; write it as one"
    plain = normalised(find_final_answer(gold))
    if not plain or _key(plain) in _PLACEHOLDERS or _NO_VALUE.fullmatch(plain):
        return f"the gold answer {shown} is missing or a placeholder; give the final answer, or leave the row out"
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", plain)
    if len(words) > MAX_GOLD_WORDS or _SENTENCES.search(plain):
        return (
            f"the gold answer {shown} is prose, which no answer would equal; give the final answer alone, or use a "
            "handler that grades texts"
        )
    if not score({"gold": gold, "answer": gold})["equal"]:
        return f"the gold answer {shown} does not equal itself; write it as a number, a formula or a word"
    return ""


# --- equality ---------------------------------------------------------------------------------------------------------


def equal(gold: str, answer: str) -> bool:
    """Return whether an answer equals the gold answer: the same text up to markup, or the same value."""
    plain_gold, plain_answer = normalised(gold), normalised(answer)
    if _INTEGER.fullmatch(plain_gold) and _INTEGER.fullmatch(plain_answer):  # the most frequent and cheapest case
        return int(plain_gold) == int(plain_answer)
    if not plain_gold or not plain_answer:
        return False
    if _key(plain_gold) == _key(plain_answer):
        return True
    try:
        expected, said = _read_gold(gold), read(answer)
        if isinstance(said, Text) and not isinstance(expected, Text):  # the words of a gold answer count as well
            said = read_prose(answer)
        return _equal(expected, said)
    except Exception:  # an answer must not void its rollout because mpmath fails
        return False


_INTEGER: Final = re.compile(r"-?\d{1,40}")
_WORD_FORMS: Final = {"solutions": "solution", "exist": "", "exists": "", "infinity": "infinite"}
_find_gold = lru_cache(maxsize=256)(find_final_answer)
_read_gold = lru_cache(maxsize=256)(read)


def _key(text: str) -> str:
    """Return the key for comparing texts: words without case and articles, formulas without redundant spaces."""
    if re.fullmatch(r"\(?[A-Za-z]\)?", text):
        return text.strip("()").casefold()
    if re.fullmatch(r"[A-Za-z' .!-]+", text) and re.search(r"[A-Za-z]{2}", text) and " - " not in text:
        words = text.casefold().rstrip(" .!").split()
        words = [_WORD_FORMS.get(word, word) for word in words if word not in ("the", "a", "an") or len(words) == 1]
        return " ".join(filter(None, words))
    if "\\" not in text and re.search(r"[A-Za-z]{4}", text):  # `December 25`
        text = text.casefold()
    text = re.sub(r"(\\[A-Za-z]+)\s+(?=[A-Za-z])", "\\1\x1f", text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    return re.sub(r"\{(\w)\}", r"\1", text)


def _equal(gold: Reading, answer: Reading) -> bool:
    match gold, answer:
        case Text(), Text():
            return _key(gold.text) == _key(answer.text)
        case (Text(), _) | (_, Text()):
            return False
        case Named(), Named():
            return _are_one(gold.name, answer.name) and _equal(gold.value, answer.value)
        case Named(), Relation():
            return _equal_relations(_as_relation(gold), answer)
        case Relation(), Named():
            return _equal_relations(gold, _as_relation(answer))
        case Named(), _:
            return _equal(gold.value, answer)
        case _, Named():
            return _equal(gold, answer.value)
        case Number(), Number():
            return _equal_numbers(gold, answer)
        case Number(), Relation(total=Number() as total):
            return _equal_numbers(gold, total)
        case _, Items("or", items) if not isinstance(gold, Items):
            return all(_equal(gold, item) for item in items)
        case Items(), Items():
            return _equal_items(gold, answer)
        case (Ranges(), _) | (_, Ranges()):
            return _equal_ranges(as_ranges(gold), as_ranges(answer))
        case (Matrix(), _) | (_, Matrix()):
            return _equal_rows(_rows(gold), _rows(answer))
        case Congruence(), Congruence():
            return _congruent(gold, answer)
        case Relation(), Relation():
            return _equal_relations(gold, answer)
        case Ratio(), Ratio() if gold.time or answer.half:
            return (gold.half == answer.half or not gold.half or not answer.half) and [
                f.value(Point({})) for f in gold.parts
            ] == [f.value(Point({})) for f in answer.parts]
        case (Ratio(time=True), _) | (Number(), Ratio(time=True)):
            return False
        case (Ratio(), _) | (_, Ratio()):
            return _equal_ratios(_parts(gold), _parts(answer))
    return False


def _equal_numbers(gold: Number, answer: Number) -> bool:
    degrees = answer.unit == "deg" and gold.unit in ("degC", "degF")  # `25 degrees`, of either scale
    if gold.unit and answer.unit and gold.unit != answer.unit and not degrees:
        return False
    if answer.percent and gold.unit:
        return False
    if answer.percent and not gold.percent:
        whole = not gold.formula.unknowns and abs(wide(_value(gold))) >= 1
        return _equal_formulas(gold, _hundredth(answer)) or (whole and _equal_formulas(gold, answer))
    if gold.percent and not answer.percent and _equal_formulas(_hundredth(gold), answer):
        return True
    return _equal_formulas(gold, answer)


def _value(number: Number) -> Any:
    return number.formula.value(Point({}))


def _hundredth(number: Number) -> Number:
    formula = number.formula
    return number._replace(formula=Formula(lambda p: formula.value(p) / 100, *formula[1:]))


def _renamed(formula: Formula, values: dict[str, Any]) -> Formula:
    """Return the formula with some unknowns replaced by numbers or other unknowns."""

    def value(p: Point) -> Any:
        more = {name: p.values[v] if isinstance(v, str) else v for name, v in values.items()}
        return formula.value(p._replace(values={**p.values, **more}))

    names = {values.get(name, name) for name in formula.unknowns}
    return Formula(value, frozenset(name for name in names if isinstance(name, str)), formula.plain_log)


def _equal_formulas(gold: Number, answer: Number) -> bool:
    a, b = gold.formula, answer.formula
    if not a.unknowns and len(b.unknowns) == 1 and b.unknowns < {"k", "K", "?"}:  # 2.5k is 2,500
        b = _renamed(b, dict.fromkeys(b.unknowns, Fraction(1000)))
    if "C" in a.unknowns and "c" not in a.unknowns and "c" in b.unknowns and "C" not in b.unknowns:
        b = _renamed(b, {"c": "C"})  # the constant of integration
    if agree(a, b):
        return True
    if a.unknowns or b.unknowns or not (gold.digits or answer.digits):
        return False
    x, y = a.value(Point({})), b.value(Point({}))
    long = [side.digits >= FLOAT_DIGITS for side in (gold, answer)]
    if all(long):
        return bool(_rounded_to(x, FLOAT_DIGITS) == _rounded_to(y, FLOAT_DIGITS))
    if any(long) and (y if long[0] else x) == _rounded_to(x if long[0] else y, SHOWN_DIGITS):
        return True  # Python's output for a float: 0.30000000000000004
    if gold.digits:
        return (not answer.digits or answer.digits > gold.digits) and _stands_for(
            x, gold.digits, y, cut=not answer.digits
        )
    return not (isinstance(x, Fraction) and x.denominator == 1) and _stands_for(y, answer.digits, x)


def _stands_for(decimal: Fraction, digits: int, exact: Any, *, cut: bool = True) -> bool:
    """Return whether a decimal with enough significant digits is `exact`, rounded (or `cut` off) at its last digit."""
    if digits < MIN_DIGITS or not decimal:
        return False
    if digits >= FLOAT_DIGITS:
        decimal, digits = _rounded_to(decimal, SHOWN_DIGITS), SHOWN_DIGITS
    last = mpmath.mpf(10) ** (mpmath.floor(mpmath.log10(abs(wide(decimal)))) + 1 - digits)
    away = (wide(exact) - wide(decimal)) * mpmath.sign(wide(decimal))
    return bool(-last / 2 <= away <= last / 2) or (cut and bool(0 <= away < last))


def _rounded_to(x: Any, digits: int) -> Any:
    if not isinstance(x, Fraction) or not x:
        return x
    place = Fraction(10) ** (int(mpmath.floor(mpmath.log10(abs(wide(x))))) + 1 - digits)
    return round(x / place) * place


def _equal_items(gold: Items, answer: Items) -> bool:
    ordered = {"()", "[]", "(]", "[)"}
    if gold.brackets == answer.brackets or {gold.brackets, answer.brackets} <= {",", "or", "{}"}:
        in_order = gold.brackets in ordered
    elif {gold.brackets, answer.brackets} <= {",", "()"}:
        in_order = True
    elif answer.brackets == "[]" and gold.brackets in (",", "or", "{}") and not _is_pair(gold):
        in_order = False  # a Python list
    else:
        return False
    if len(gold.items) != len(answer.items):
        return False
    names = [{item.name.partition("_")[0] for item in side.items if isinstance(item, Named)} for side in (gold, answer)]
    if max(map(len, names)) > 1:  # values of several unknowns: not a set; without names, in alphabetical order
        if "{}" in (gold.brackets, answer.brackets) or (gold.brackets == "or") != (answer.brackets == "or"):
            return False
        if not all(names):
            gold, answer, in_order = _by_name(gold), _by_name(answer), True
    if in_order:
        return all(_equal(g, a) for g, a in zip(gold.items, answer.items, strict=True))
    left = list(answer.items)
    for item in gold.items:
        found = next((n for n, other in enumerate(left) if _equal(item, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _are_one(gold: str, answer: str) -> bool:
    """Return whether two names may denote the same unknown: `x_1` is `x` if `x` lacks an index there."""
    first, second = gold.partition("_"), answer.partition("_")
    return gold == answer or {gold, answer} == {"y", "f(x)"} or (first[0] == second[0] and first[1] != second[1])


def _by_name(items: Items) -> Items:
    named = all(isinstance(item, Named) for item in items.items)
    return items._replace(items=tuple(sorted(items.items, key=lambda item: item.name))) if named else items


def _is_pair(items: Items) -> bool:
    values = [item.value if isinstance(item, Named) else item for item in items.items]
    return len(values) == 2 and all(isinstance(value, Number) for value in values)


def _equal_ranges(gold: Ranges, answer: Ranges) -> bool:
    return len(gold.ranges) == len(answer.ranges) and all(
        g[1] == a[1] and g[3] == a[3] and same(g[0], a[0]) and same(g[2], a[2])
        for g, a in zip(gold.ranges, answer.ranges, strict=True)
    )


def _rows(value: Reading) -> tuple[tuple[Any, ...], ...]:
    """Return the rows of a matrix, a list of lists, or a column written as a tuple."""
    if isinstance(value, Matrix):
        return value.rows
    if isinstance(value, Items) and value.brackets == "[]" and all(isinstance(row, Items) for row in value.items):
        return tuple(row.items for row in value.items)
    return tuple((item,) for item in value.items) if isinstance(value, Items) and value.brackets == "()" else ()


def _equal_rows(gold: tuple[tuple[Any, ...], ...], answer: tuple[tuple[Any, ...], ...]) -> bool:
    return [len(row) for row in gold] == [len(row) for row in answer] and all(
        _equal(g, a) for left, right in zip(gold, answer, strict=True) for g, a in zip(left, right, strict=True)
    )


def _congruent(gold: Congruence, answer: Congruence) -> bool:
    if gold.modulus != answer.modulus or (gold.name and answer.name and gold.name != answer.name):
        return False
    if not gold.modulus.isdigit() or int(gold.modulus) == 0:
        return len(gold.residues) == len(answer.residues) and all(map(agree, gold.residues, answer.residues))
    both = [sorted(f.value(Point({})) % int(gold.modulus) for f in side.residues) for side in (gold, answer)]
    return both[0] == both[1]


def _as_relation(named: Named) -> Relation | None:
    value = named.value
    return Relation("=", parse(named.name).minus(value.formula)) if isinstance(value, Number) else None


def _equal_relations(gold: Relation | None, answer: Relation | None) -> bool:
    return gold is not None and answer is not None and gold.sign == answer.sign and _proportional(gold, answer)


def _proportional(gold: Relation, answer: Relation) -> bool:
    """Return whether one difference is a multiple of the other, with a positive factor unless both are equations."""
    a, b = gold.difference, answer.difference
    names = sorted(a.unknowns | b.unknowns)
    if not names:
        return False
    point = Point({name: Fraction(n, 1009) for n, name in zip(range(2011, 9000, 577), names, strict=False)})
    factor = a.value(point) / b.value(point)
    if not factor or (gold.sign != "=" and factor < 0):
        return False
    scaled = Formula(lambda p: a.value(point) / b.value(point), frozenset()).times(b)  # with the current digits
    return agree(a, scaled)


def _parts(value: Reading) -> tuple[Formula, ...]:
    if isinstance(value, Ratio):
        return value.parts
    return (value.formula, Formula(lambda p: Fraction(1), frozenset())) if isinstance(value, Number) else ()


def _equal_ratios(gold: tuple[Formula, ...], answer: tuple[Formula, ...]) -> bool:
    if len(gold) != len(answer) or not gold:
        return False

    return all(agree(g.times(answer[0]), a.times(gold[0])) for g, a in zip(gold[1:], answer[1:], strict=True))
