"""Sums and short word problems: generated, seeded, in twelve families, for models that are tiny or learn.

The problems to train on and those held out share no wording, no name, no thing and no number: a policy that solves
held-out ones has learned to read such problems, not these.
"""

from __future__ import annotations

import re
from random import Random
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DRILLS",
    "EASY",
    "FAMILIES",
    "NAMES",
    "THINGS",
    "Family",
    "Split",
    "WordProblem",
    "demonstrated",
    "easy_problem",
    "held_out_number",
    "word_problem",
    "word_problems",
]

Split = Literal["train", "held_out"]


class Family(NamedTuple):
    """A kind of problem.

    Attributes:
        name: of the family.
        expression: Python over the numbers of a problem; its value is the answer.
        solve: the answer; None for numbers that make no problem of the family.
        ranges: what each number of a problem is drawn from.
        train: wordings of the problems that are trained on. {n} and {m} are names, {t} things.
        held_out: wordings of the others.
    """

    name: str
    expression: str
    solve: Callable[..., int | None]
    ranges: dict[str, range]
    train: tuple[str, ...]
    held_out: tuple[str, ...] = ()


class WordProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem and its answer, which is the value of `expression`, in Python."""

    problem_id: str
    family: str
    question: str
    answer: int
    expression: str

    @property
    def program(self) -> str:
        """Return a line of Python that prints the answer."""
        return f"print({self.expression})"

    def instance(self, **payload: object) -> TaskInstance:
        """Return it as an instance for the handler `math`; `payload` has more fields of `MathPayload`."""
        return TaskInstance(
            instance_id=self.problem_id,
            handler="math",
            payload={"question": self.question, "answer": str(self.answer), **payload},
            family=self.family,
        )


_DIGITS: Final = range(2, 10)
_SMALL: Final = range(2, 20)
_LARGE: Final = range(12, 100)

DRILLS: Final = (
    Family(
        "sum",
        "{a} + {b}",
        lambda a, b: a + b,
        {"a": _LARGE, "b": _LARGE},
        ("What is {a} + {b}?", "Compute {a} + {b}.", "Add {a} and {b}.", "{a} plus {b} is what?"),
    ),
    Family(
        "difference",
        "{a} - {b}",
        lambda a, b: a - b if a > b else None,
        {"a": _LARGE, "b": _LARGE},
        ("What is {a} - {b}?", "Compute {a} - {b}.", "Subtract {b} from {a}.", "{a} minus {b} is what?"),
    ),
    Family(
        "product",
        "{a} * {b}",
        lambda a, b: a * b,
        {"a": _LARGE, "b": _SMALL},
        ("What is {a} * {b}?", "Compute {a} * {b}.", "Multiply {a} by {b}.", "{a} times {b} is what?"),
    ),
    Family(
        "quotient",
        "{a} // {b}",
        lambda a, b: a // b if a % b == 0 and a > b else None,
        {"a": _LARGE, "b": _SMALL},
        ("What is {a} / {b}?", "Compute {a} / {b}.", "Divide {a} by {b}."),
    ),
)
"""Bare calculations, which are no problems to train on."""

FAMILIES: Final = (
    Family(
        "spend",
        "{c} - {a} * {b}",
        lambda a, b, c: c - a * b if c > a * b else None,
        {"a": _DIGITS, "b": _DIGITS, "c": _LARGE},
        (
            "{n} has {c} dollars and buys {a} tickets for {b} dollars each. How many dollars are left?",
            "{n} has {c} {t} and fills {a} boxes with {b} of them each. How many {t} are left?",
            "A book has {c} pages. For {a} days {n} reads {b} pages a day. How many pages are left?",
            "There are {c} chairs in a room. {n} takes away {a} rows of {b} chairs. How many are there now?",
            "Of {c} {t}, {a} bags of {b} are sold. How many {t} are not sold?",
        ),
        (
            "{n} owns {c} coins and pays for {a} meals of {b} coins each. How many coins remain?",
            "A shelf holds {c} {t}. {n} removes {a} rows of {b}. What is the number of {t} on the shelf?",
            "{n} must run {c} miles, and for {a} weeks has run {b} miles every week. How many miles remain?",
        ),
    ),
    Family(
        "loss_twice",
        "{a} - {b} - {c}",
        lambda a, b, c: a - b - c if a > b + c else None,
        {"a": _LARGE, "b": _SMALL, "c": _SMALL},
        (
            "{n} has {a} {t}, gives {b} to {m} and loses {c}. How many {t} are left?",
            "There are {a} {t} in a box. {n} takes out {b}, and {m} takes {c}. How many are there now?",
            "A book has {a} pages. {n} reads {b} pages today and {c} tomorrow. How many pages are left?",
            "{n} has {a} dollars and pays {b} dollars for a bag and {c} for a pen. How many dollars are left?",
            "Of {a} {t}, {b} are broken and {c} are old. How many {t} are neither?",
        ),
        (
            "{n} owns {a} {t}, hands {b} to {m} and drops {c}. How many {t} remain?",
            "A shelf holds {a} {t}. {n} removes {b}, and later {c}. What is the number of {t} on the shelf?",
            "{n} collected {a} {t}, but {b} were stolen and {c} got lost. How many {t} does {n} still have?",
        ),
    ),
    Family(
        "gain",
        "{a} + {b}",
        lambda a, b: a + b,
        {"a": _LARGE, "b": _LARGE},
        (
            "{n} has {a} {t} and buys {b} more. How many {t} does {n} have?",
            "There are {a} {t} in a box. {n} puts in {b} more. How many are there now?",
            "{n} has {a} {t}. {m} gives {n} {b} more. How many {t} does {n} have now?",
            "{n} has {a} {t} and {m} has {b}. How many {t} do they have together?",
            "{n} picked {a} {t} in the morning and {b} in the evening. How many {t} is that in all?",
        ),
        (
            "{n} owns {a} {t} and finds another {b}. How many {t} does {n} own now?",
            "A shelf holds {a} {t}. {n} adds {b}. What is the number of {t} on the shelf?",
            "{n} got {a} {t} on Monday and {b} {t} on Tuesday. How many {t} altogether?",
        ),
    ),
    Family(
        "loss",
        "{a} - {b}",
        lambda a, b: a - b if a > b else None,
        {"a": _LARGE, "b": _LARGE},
        (
            "{n} has {a} {t} and gives {b} to {m}. How many {t} are left?",
            "There are {a} {t} in a box. {n} takes out {b}. How many are there now?",
            "{n} had {a} {t} and lost {b} of them. How many {t} does {n} have now?",
            "{n} bakes {a} pies and sells {b}. How many pies are not sold?",
            "Of {a} {t}, {b} are broken. How many {t} are not broken?",
        ),
        (
            "{n} owns {a} {t} and hands {b} of them to {m}. How many {t} remain?",
            "A shelf holds {a} {t}. {n} removes {b}. What is the number of {t} on the shelf?",
            "{n} collected {a} {t}, but {b} were stolen. How many {t} does {n} still have?",
        ),
    ),
    Family(
        "boxes",
        "{a} * {b}",
        lambda a, b: a * b,
        {"a": _SMALL, "b": _LARGE},
        (
            "There are {a} boxes with {b} {t} in each. How many {t} are there?",
            "{n} buys {a} bags. Each bag has {b} {t}. How many {t} does {n} have?",
            "{n} reads {b} pages each day. How many pages does {n} read in {a} days?",
            "A room has {a} rows of {b} chairs. How many chairs are in the room?",
            "One ticket costs {b} dollars. How many dollars do {a} tickets cost?",
        ),
        (
            "{n} fills {a} jars. Every jar holds {b} {t}. How many {t} are that?",
            "{n} runs {b} miles every week. How many miles does {n} run in {a} weeks?",
            "A hall has {a} tables, and {b} guests sit at each. How many guests are in the hall?",
        ),
    ),
    Family(
        "share",
        "{a} // {b}",
        lambda a, b: a // b if a % b == 0 and a > b else None,
        {"a": _LARGE, "b": _SMALL},
        (
            "{b} children share {a} {t} equally. How many {t} does each child get?",
            "{n} puts {a} {t} into {b} boxes, the same number in each. How many {t} are in each box?",
            "{n} divides {a} {t} among {b} friends. How many {t} does each friend get?",
            "{a} {t} are packed in bags of {b}. How many bags are there?",
            "{b} tickets cost {a} dollars. How many dollars does one ticket cost?",
        ),
        (
            "{a} {t} are split evenly between {b} players. How many {t} does every player receive?",
            "{n} fills {b} jars with {a} {t}, equally many in every jar. How many {t} does a jar hold?",
            "A hall seats {a} guests at tables of {b}. How many tables are in the hall?",
        ),
    ),
    Family(
        "pairs",
        "{a} * {b}",
        lambda a, b: a * b,
        {"a": _LARGE, "b": _SMALL},
        (
            "A field is {a} feet long and {b} feet wide. What is its area in square feet?",
            "A car drives {a} miles in an hour. How many miles does it drive in {b} hours?",
            "{n} earns {a} dollars an hour. How many dollars does {n} earn in {b} hours?",
            "A machine makes {a} {t} in a minute. How many {t} does it make in {b} minutes?",
        ),
        (
            "A garden is {a} yards long and {b} yards wide. How many square yards is that?",
            "A train goes {a} miles in an hour. How far does it go in {b} hours, in miles?",
            "{n} is paid {a} dollars for a day. How many dollars is {n} paid for {b} days?",
        ),
    ),
    Family(
        "three",
        "{a} + {b} + {c}",
        lambda a, b, c: a + b + c,
        {"a": _LARGE, "b": _LARGE, "c": _LARGE},
        (
            "{n} has {a} red, {b} blue and {c} green {t}. How many {t} does {n} have?",
            "There are {a} {t} in one box, {b} in another and {c} in a third. How many {t} are there in all?",
            "{n} walked {a} steps, then {b} steps, then {c} steps. How many steps is that?",
            "{n} has {a} {t}, buys {b} and finds {c}. How many {t} does {n} have now?",
            "A pen costs {a} cents, a book {b} cents and a bag {c} cents. How many cents do all three cost?",
        ),
        (
            "A shelf holds {a} black, {b} white and {c} yellow {t}. What is the number of {t} on the shelf?",
            "A train has {a} cars, a second one {b} and a third one {c}. How many cars do they have altogether?",
            "{n} got {a} {t} on Monday, {b} on Tuesday and {c} on Friday. How many {t} altogether?",
        ),
    ),
    Family(
        "twice",
        "2 * {a}",
        lambda a: 2 * a,
        {"a": _LARGE},
        (
            "{n} has {a} {t}. {m} has twice as many. How many {t} does {m} have?",
            "What is twice {a}?",
            "Double the number {a}.",
            "{n} is {a} years old. {m} is twice as old. How old is {m}?",
            "A pen costs {a} cents. A book costs twice as much. How many cents does the book cost?",
        ),
        (
            "{n} owns {a} {t}, and {m} owns double that number. How many {t} does {m} own?",
            "A tree is {a} feet tall. A tower is twice as tall. How many feet tall is the tower?",
            "A shelf holds {a} {t}, and a table twice that number. How many {t} are on the table?",
        ),
    ),
    Family(
        "boxes_and_more",
        "{a} * {b} + {c}",
        lambda a, b, c: a * b + c,
        {"a": _SMALL, "b": _SMALL, "c": _LARGE},
        (
            "There are {a} boxes with {b} {t} in each, and {c} more {t}. How many {t} are there?",
            "{n} has {c} {t} and buys {a} bags of {b} {t}. How many {t} does {n} have now?",
            "{n} reads {b} pages a day for {a} days, and then {c} more. How many pages does {n} read?",
            "A room has {a} rows of {b} chairs and {c} other chairs. How many chairs are in the room?",
            "{n} had {c} dollars and earned {b} dollars an hour for {a} hours. How many dollars does {n} have?",
        ),
        (
            "{n} fills {a} jars with {b} {t} each and has another {c} {t} on a plate. How many {t} altogether?",
            "{n} owns {c} coins and earns {b} coins a day. How many coins does {n} own after {a} days?",
            "A hall has {a} tables with {b} guests at each, and {c} guests who stand. How many guests are in the hall?",
        ),
    ),
    Family(
        "gap",
        "{a} - {b}",
        lambda a, b: a - b if a > b else None,
        {"a": _LARGE, "b": _LARGE},
        (
            "{n} has {a} {t} and {m} has {b}. How many more {t} does {n} have than {m}?",
            "{n} is {a} years old and {m} is {b}. By how many years is {n} older?",
            "A book costs {a} cents and a pen {b} cents. How many cents more does the book cost?",
            "By how much is {a} larger than {b}?",
            "{n} needs {a} dollars and has {b}. How many dollars does {n} still need?",
        ),
        (
            "{n} owns {a} {t}, and {m} owns {b}. How many {t} more than {m} does {n} own?",
            "A tower is {a} feet tall and a tree {b} feet. By how many feet is the tower taller?",
            "{n} scored {a} points and {m} scored {b}. By how many points did {n} win?",
        ),
    ),
    Family(
        "rate",
        "{a} // {b}",
        lambda a, b: a // b if a % b == 0 and a > b else None,
        {"a": _LARGE, "b": _SMALL},
        (
            "{n} drives {a} miles in {b} hours. How many miles is that in one hour?",
            "{n} reads {a} pages in {b} days, the same number each day. How many pages a day is that?",
            "A machine makes {a} {t} in {b} minutes. How many {t} does it make in one minute?",
            "{n} earns {a} dollars in {b} hours. How many dollars does {n} earn in an hour?",
        ),
        (
            "A train goes {a} miles in {b} hours. How many miles does it go in one hour?",
            "{n} is paid {a} dollars for {b} days. How many dollars is {n} paid for a day?",
            "{n} runs {a} laps in {b} weeks, equally many every week. How many laps a week is that?",
        ),
    ),
)  # fmt: skip

EASY: Final = tuple(
    family
    for family in (*DRILLS, *FAMILIES)
    if family.name in ("sum", "difference", "product", "gain", "boxes", "twice")
)
"""Families of which an untrained model solves some."""

NAMES: Final[dict[Split, tuple[str, ...]]] = {
    "train": ("Tom", "Anna", "Ben", "Lucy", "Sam", "Mia", "Paul", "Ella", "Max", "Rose"),
    "held_out": ("Jack", "Nina", "Leo", "Clara", "Oscar", "Ruth"),
}
THINGS: Final[dict[Split, tuple[str, ...]]] = {
    "train": ("apples", "books", "cards", "stamps", "pencils", "cookies", "shells", "balloons", "eggs", "toys"),
    "held_out": ("marbles", "plums", "beads", "stickers", "rings", "candles"),
}


OPERATIONS: Final = ("+", "-", "*", "//")
_OPERATION: Final = re.compile(r"//|[-+*]")


def held_out_number(number: int) -> bool:
    """Return whether problems with this number are held out: every fourth number is."""
    return number % 4 == 3


def demonstrated(number: int, *, seed: int = 0) -> WordProblem:
    """Return problem `number` of those that show a policy how it calculates, but not what a question asks for.

    The operations are drawn at random; `answer` is what the program prints, right or not.
    """
    problem = _problem(FAMILIES, number, "train", f"demonstrated-{seed}")
    rng = Random(f"operations-{seed}-{number}")
    expression = _OPERATION.sub(lambda _: rng.choice(OPERATIONS), problem.expression)
    return msgspec.structs.replace(problem, expression=expression, answer=_value(expression))


def easy_problem(number: int, *, seed: int = 0) -> WordProblem:
    """Return a drill or a problem to train on of an easy family; all its numbers have one digit (not the answer)."""
    return _problem(EASY, number, "train", f"easy-{seed}", among=_DIGITS)


def word_problem(number: int, *, split: Split = "train", seed: int = 0) -> WordProblem:
    """Return problem `number` of a split: a pure function.

    The families take turns, so any twelve in a row have each once.
    """
    return _problem(FAMILIES, number, split, f"{split}-{seed}")


def word_problems(count: int, *, split: Split = "train", seed: int = 0, start: int = 0) -> list[WordProblem]:
    """Return `count` problems from number `start` on; multiples of twelve have equally many of each family."""
    return [word_problem(number, split=split, seed=seed) for number in range(start, start + count)]


def _value(expression: str) -> int:
    """Return the value of an expression of ours: numbers and operations."""
    value: int = eval(expression, {"__builtins__": {}})
    return value


def _problem(
    families: tuple[Family, ...], number: int, split: Split, stream: str, among: range | None = None
) -> WordProblem:
    family = families[number % len(families)]
    rng = Random(f"{stream}-{number}")
    numbers, answer = _numbers(family, split, rng, among)
    wording = rng.choice(family.train if split == "train" else family.held_out)
    first, second = rng.sample(NAMES[split], 2)
    return WordProblem(
        problem_id=f"{family.name}-{stream}-{number}",
        family=family.name,
        question=wording.format(n=first, m=second, t=rng.choice(THINGS[split]), **numbers),
        answer=answer,
        expression=family.expression.format(**numbers),
    )


def _numbers(family: Family, split: Split, rng: Random, among: range | None) -> tuple[dict[str, int], int]:
    """Draw numbers of the split until they make a problem; return them with its answer."""
    while True:
        numbers = {name: rng.choice(among or values) for name, values in family.ranges.items()}
        if all(held_out_number(number) == (split == "held_out") for number in numbers.values()):
            answer = family.solve(**numbers)
            if answer is not None:
                return numbers, answer
