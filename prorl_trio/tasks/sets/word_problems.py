"""Sums and short word problems: generated, seeded, in twelve families, for models that are tiny or learn.

The problems to train on and those held out share no wording, no name, no thing and no number: a policy that solves
held-out ones has learned to read such problems, not these.
"""

from __future__ import annotations

import re
from random import Random
from typing import Final

import msgspec

from prorl_trio.tasks.sets.word_problem_families import DIGITS, DRILLS, FAMILIES, NAMES, THINGS, Family, Split
from prorl_trio.types.models import TaskInstance


class WordProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem and its answer, which is the value of `expression`, in Python.

    `problem_id` begins with its family and a hyphen.
    """

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


EASY: Final = tuple(
    family
    for family in (*DRILLS, *FAMILIES)
    if family.name in ("sum", "difference", "product", "gain", "boxes", "twice")
)
"""Families of which an untrained model solves some."""

RIGHTLY: Final = 0.2
"""Share of the demonstrations that calculate what is asked for, but for those that do so by chance."""
OPERATIONS: Final = ("+", "-", "*", "//")
_OPERATION: Final = re.compile(r"//|[-+*]")


def held_out_number(number: int) -> bool:
    """Return whether problems with this number are held out: every fourth number is."""
    return number % 4 == 3


def demonstrated(number: int, *, seed: int = 0) -> WordProblem:
    """Return problem `number` of those that show a policy how it calculates, but hardly what a question asks for.

    The operations are right in `RIGHTLY` of the problems, so that each family's are seen, and are drawn at random in
    the others; `answer` is what the program prints, right or not.
    """
    problem = _problem(FAMILIES, number, "train", f"demonstrated-{seed}")
    rng = Random(f"operations-{seed}-{number}")
    if rng.random() < RIGHTLY:
        return problem
    expression = _OPERATION.sub(lambda _: rng.choice(OPERATIONS), problem.expression)
    return msgspec.structs.replace(problem, expression=expression, answer=_value(expression))


def easy_problem(number: int, *, seed: int = 0) -> WordProblem:
    """Return a drill or a problem to train on of an easy family; all its numbers have one digit (not the answer)."""
    return _problem(EASY, number, "train", f"easy-{seed}", among=DIGITS)


def word_problem(number: int, *, split: Split = "train", seed: int = 0, family: str | None = None) -> WordProblem:
    """Return problem `number` of a split: a pure function.

    The families take turns, so any twelve in a row have each once; unless `family` names the one to take.
    """
    families = tuple(each for each in FAMILIES if family in (None, each.name))
    return _problem(families, number, split, f"{split}-{seed}")


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
