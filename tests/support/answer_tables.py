"""Tables of answers with their verdicts: files of `tests/data`, and pairs that are built from numbers.

A table has sections (`## name`), in them keys (lines without indentation: a gold answer, a quantity, a list of choices)
and below each key its answers, separated by `¦`:

    ~  equal, also with the two exchanged       =  equal
    ?  a convention decides: not asserted       !  not equal

`⏎` is a line break in an answer. A section whose name ends with `(prose)` has texts as a policy gives them to `finish`;
of all others the test puts half of the answers into a box. Lines that begin with `#`, after any blanks, are comments.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import permutations, product
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DATA: Final = Path(__file__).parents[1] / "data"
BRACKETS: Final = ("()", "[]", "(]", "[)")


class Pair(NamedTuple):
    """An answer, the key that it stands under, and whether it is right."""

    section: str
    key: str
    answer: str
    right: bool


def read_table(name: str) -> list[Pair]:
    """Return the pairs of a file of `tests/data` that are asserted, each once."""
    pairs: dict[Pair, None] = {}
    section = key = ""
    for line in (DATA / name).read_text().splitlines():
        if line.startswith("## "):
            section = line[3:].strip()
        elif not line.strip() or line.lstrip().startswith("# "):
            continue
        elif not line.startswith("  "):
            key = line.replace("⏎", "\n")
        else:
            kind, answers = line[2], [each.strip(" ").replace("⏎", "\n") for each in line[4:].split("¦")]
            if kind not in "~=?!" or line[3] != " ":
                raise ValueError(f"{name}: {line}")
            for answer in answers if kind != "?" else ():
                pairs[Pair(section, key, answer, kind != "!")] = None
                if kind == "~":
                    pairs[Pair(section, answer, key, right=True)] = None
    verdicts: dict[tuple[str, str], bool] = {}
    for pair in pairs:
        if verdicts.setdefault((pair.key, pair.answer), pair.right) is not pair.right:
            raise ValueError(f"{name}: two verdicts of {pair}")
    return list({(pair.key, pair.answer): pair for pair in pairs}.values())


def generated_pairs() -> list[Pair]:
    """Return pairs whose verdicts follow from the numbers that they were built of."""
    found = {(pair.key, pair.answer): pair for make in _MAKERS for pair in make()}
    return list(found.values())


def _sorted_out(section: str, key: str, value: object, answers: Iterable[tuple[str, object]]) -> Iterator[Pair]:
    """Yield a pair for each answer: right if its value is the key's."""
    for answer, found in answers:
        yield Pair(section, key, answer, found == value)


def _integers() -> Iterator[Pair]:
    for number in (7, 13, 60, 144, 336, 1001, 2025, 31415, 104729, 7654321, -8, -250, -1729):
        digits, sign = str(abs(number)), "-" if number < 0 else ""
        swapped = [digits[:i] + digits[i + 1] + digits[i] + digits[i + 2 :] for i in range(len(digits) - 1)]
        answers: list[tuple[str, object]] = [
            (f"{number}.00", number),
            (f"{number:,}", number),
            (f"x = {number}", number),
            (rf"\frac{{{number * 6}}}{{6}}", number),
            (rf"{number - 5} + 5", number),
            (rf"{sign}\sqrt{{{number**2}}}", number),
            (f"{number} units", number),
            (str(-number), -number),
            (f"{number}0", number * 10),
            (f"{number}.5", number + Fraction(1 if number > 0 else -1, 2)),
            (rf"\frac{{1}}{{{number}}}", Fraction(1, number)),
            (rf"{number}, {number + 1}", None),
            (rf"{number} \text{{ or }} {number + 2}", None),
            (rf"{number - 1} = {number}", None),
            *((f"{number + step}", number + step) for step in (1, -1, 10, -10, 100, -100)),
            *((f"{sign}{each}", int(f"{sign}{each}")) for each in swapped if each[0] != "0"),
        ]
        yield from _sorted_out("built: integers", str(number), number, answers)


def _fractions() -> Iterator[Pair]:
    for above, below in ((1, 6), (5, 12), (-7, 9), (22, 7), (101, 2024), (-3, 16), (17, 25), (4, 1001)):
        value = Fraction(above, below)
        sign, size = ("-", -value) if value < 0 else ("", value)
        whole, rest = divmod(size.numerator, size.denominator)
        answers: list[tuple[str, object]] = [
            (f"{above}/{below}", value),
            (rf"\dfrac{{{3 * above}}}{{{3 * below}}}", value),
            (rf"{sign}\frac{{{abs(above)}}}{{{below}}}", value),
            (rf"\frac{{{-above}}}{{{-below}}}", value),
            (f"{float(value):.12f}", value),
            (rf"{value + 1} - 1", value),
            (f"{float(value):.2f}", Fraction(f"{float(value):.2f}")),
            (rf"\frac{{{below}}}{{{above}}}", 1 / value),
            (rf"{'' if sign else '-'}\frac{{{abs(above)}}}{{{below}}}", -value),
            *((rf"\frac{{{above + step}}}{{{below}}}", Fraction(above + step, below)) for step in (1, -1)),
            *((rf"\frac{{{above}}}{{{below + step}}}", Fraction(above, below + step)) for step in (1, -1)),
            (str(above), Fraction(above)),
            (str(below), Fraction(below)),
            (f"{above}, {below}", None),
        ]
        if whole:
            answers.append((rf"{sign}{whole}\frac{{{rest}}}{{{below}}}", value))
            answers.append((rf"{sign}{whole}\frac{{{rest + 1}}}{{{below}}}", None))
        yield from _sorted_out("built: fractions", rf"\frac{{{above}}}{{{below}}}", value, answers)


def _scientific() -> Iterator[Pair]:
    for mantissa, power in (("1.38", -23), ("9.11", -31), ("6.674", -11), ("2.5", -7), ("5.97", 24), ("8.85", -12)):
        value, digit = Fraction(mantissa) * Fraction(10) ** power, Fraction(1, 10 ** (len(mantissa) - 2))
        near = [f"{float(Fraction(mantissa) + step * digit):.{len(mantissa) - 2}f}" for step in (1, -1)]
        answers: list[tuple[str, object]] = [
            (f"{mantissa}e{power}", value),
            (rf"{mantissa} \cdot 10^{{{power}}}", value),
            (rf"{float(Fraction(mantissa) / 10):.{len(mantissa) - 1}f}\times10^{{{power + 1}}}", value),
            (f"{mantissa}*10**({power})", value),
            (rf"-{mantissa}\times10^{{{power}}}", -value),
            (rf"{mantissa}\times10^{{{-power}}}", Fraction(mantissa) * Fraction(10) ** -power),
            (mantissa, Fraction(mantissa)),
            (rf"10^{{{power}}}", Fraction(10) ** power),
            ("0", Fraction(0)),
            *((rf"{mantissa}\times10^{{{power + step}}}", value * Fraction(10) ** step) for step in (1, -1)),
            *((rf"{each}\times10^{{{power}}}", Fraction(each) * Fraction(10) ** power) for each in near),
        ]
        yield from _sorted_out("built: scientific notation", rf"{mantissa}\times10^{{{power}}}", value, answers)


def _radicals() -> Iterator[Pair]:
    """A value is the signed square, which tells real square roots apart."""
    for factor, root in ((2, 7), (5, 3), (-3, 11), (10, 2), (7, 15)):
        value, sign = factor * abs(factor) * root, "-" if factor < 0 else ""
        answers: list[tuple[str, object]] = [
            (f"{factor}*sqrt({root})", value),
            (f"{factor}√{root}", value),
            (rf"{sign}\sqrt{{{factor**2 * root}}}", value),
            (rf"\frac{{{factor * root}}}{{\sqrt{{{root}}}}}", value),
            (rf"{factor}\cdot{root}^{{1/2}}", value),
            (rf"{factor}\sqrt{{{root + 1}}}", factor * abs(factor) * (root + 1)),
            (rf"{factor + 1}\sqrt{{{root}}}", None),
            (rf"{'' if sign else '-'}{abs(factor)}\sqrt{{{root}}}", -value),
            (rf"\sqrt{{{abs(factor) * root}}}", abs(factor) * root),
            (rf"{factor}\sqrt[3]{{{root}}}", None),
            (rf"{factor}+\sqrt{{{root}}}", None),
            (rf"\pm{abs(factor)}\sqrt{{{root}}}", None),
            (rf"\sqrt{{{root}}}", root),
        ]
        yield from _sorted_out("built: radicals", rf"{factor}\sqrt{{{root}}}", value, answers)


def _intervals() -> Iterator[Pair]:
    for (low, high), (gold, said) in product(((-4, 9), (0, 12), (3, 8)), product(BRACKETS, BRACKETS)):
        left, right = "<" if said[0] == "(" else r"\le", "<" if said[1] == ")" else r"\le"
        answers = [(f"{low} {left} x {right} {high}", said), (f"{said[0]}{low}, {high}{said[1]}", said)]
        if gold == said:
            answers += [(f"{said[0]}{low}, {high + 1}{said[1]}", ""), (rf"\{{{low}, {high}\}}", "")]
        yield from _sorted_out("built: intervals", f"{gold[0]}{low},{high}{gold[1]}", gold, answers)


def _tuples() -> Iterator[Pair]:
    """The order matters in a tuple, and does not in a list or a set."""
    for three in ((1, 4, 6), (-2, 0, 5)):
        gold = ",".join(map(str, three))
        for order in permutations(three):
            said = ", ".join(map(str, order))
            yield Pair("built: tuples", f"({gold})", f"({said})", order == three)
            yield Pair("built: tuples", gold, said, right=True)
            yield Pair("built: tuples", rf"\{{{gold}\}}", rf"\{{{said}\}}", right=True)
        for wrong in (three[:2], three[1:], (*three, 9), (*three[:2], three[2] + 1), tuple(-each for each in three)):
            said = ", ".join(map(str, wrong))
            yield Pair("built: tuples", f"({gold})", f"({said})", right=False)
            yield Pair("built: tuples", gold, said, right=False)
            yield Pair("built: tuples", rf"\{{{gold}\}}", rf"\{{{said}\}}", right=False)


def _bases() -> Iterator[Pair]:
    for digits, base in (("110", 2), ("2102", 3), ("431", 5), ("345", 6), ("7052", 8)):
        value = int(digits, base)
        answers: list[tuple[str, object]] = [
            (f"{digits}_{base}", value),
            (f"{value}", value),
            (f"{digits}", int(digits)),
            (rf"{digits}_{{{base + 1}}}", int(digits, base + 1)),
            (rf"{digits}_{{{base + 2}}}", int(digits, base + 2)),
            (rf"{digits[::-1]}_{{{base}}}", int(digits[::-1], base)),
            (rf"{digits[:-1]}_{{{base}}}", int(digits[:-1], base)),
            (f"{value + 1}", value + 1),
        ]
        yield from _sorted_out("built: bases", rf"{digits}_{{{base}}}", value, answers)


def _congruences() -> Iterator[Pair]:
    for rest, modulus in ((2, 5), (1, 6), (7, 12)):
        answers: list[tuple[str, object]] = [
            (rf"x \equiv {rest + step * modulus} \pmod {{{modulus}}}", (rest, modulus)) for step in (0, 1, -1)
        ]
        answers += [(rf"x \equiv {rest + step} \pmod{{{modulus}}}", None) for step in (1, -1)]
        answers += [(rf"x \equiv {rest} \pmod{{{modulus + step}}}", None) for step in (1, -1, modulus)]
        answers += [(f"x = {rest}", None), (str(rest), None), (str(modulus), None), (rf"x \equiv {rest}", None)]
        yield from _sorted_out("built: congruences", rf"x\equiv {rest}\pmod{{{modulus}}}", (rest, modulus), answers)


def _complex() -> Iterator[Pair]:
    for real, imaginary in ((3, 4), (-2, 5), (7, -1), (-6, -8)):
        value = complex(real, imaginary)
        parts = [(real, imaginary), (imaginary, real), (real, -imaginary), (-real, imaginary), (real + 1, imaginary)]
        answers: list[tuple[str, object]] = [(f"{a}{b:+d}i", complex(a, b)) for a, b in parts]
        answers += [(f"{b}i{a:+d}", complex(a, b)) for a, b in parts]
        answers += [(f"{a} {'+-'[b < 0]} {abs(b)}*I", complex(a, b)) for a, b in parts]
        answers += [(f"({a}, {b})", None) for a, b in parts[:1]]
        answers += [(str(real), complex(real)), (f"{imaginary}i", complex(0, imaginary))]
        answers += [(str(real + imaginary), complex(real + imaginary)), (rf"{real} \pm {abs(imaginary)}i", None)]
        yield from _sorted_out("built: complex numbers", f"{real}{imaginary:+d}i", value, answers)


def _long_texts() -> Iterator[Pair]:
    """The answer is at the end of a long text, or is contradicted there."""
    thoughts = "Let me think. " * 200
    for number, form in product((42, 17, -3), (r"So it is \boxed{%s}.", "The answer is %s.", "**Answer:** %s")):
        said = thoughts + form % number
        yield Pair("built: long texts (prose)", str(number), said, right=True)
        yield Pair("built: long texts (prose)", str(number + 1), said, right=False)
        yield Pair("built: long texts (prose)", str(number + 1), form % (number + 1) + thoughts + said, right=False)


_MAKERS: Final = (
    *(_integers, _fractions, _scientific, _radicals, _intervals, _tuples, _bases, _congruences, _complex, _long_texts),
)


def mismatches(found: Iterable[tuple[Pair, object]]) -> str:
    """Return the pairs whose verdict is not the table's, by section, with a count; empty if there are none.

    A verdict that is no bool is shown as it is: what the grader raised, say.
    """
    wrong: dict[str, list[str]] = {}
    tried: Counter[str] = Counter()
    for pair, verdict in found:
        tried[pair.section] += 1
        if verdict is not pair.right:
            said = {True: "false reward", False: "false zero"}.get(verdict, verdict)  # type: ignore[call-overload]
            wrong.setdefault(pair.section, []).append(f"  {said}: {pair.key!r} <- {pair.answer!r}")
    parts = [f"{name}: {len(lines)} of {tried[name]}\n" + "\n".join(lines) for name, lines in wrong.items()]
    return "\n".join([f"{sum(map(len, wrong.values()))} of {tried.total()} verdicts differ", *parts]) if wrong else ""
