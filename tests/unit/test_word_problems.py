"""The generated problems: right, seeded, in equal shares; training and held-out ones have nothing in common."""

from __future__ import annotations

import re
from string import Formatter

import pytest

from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.tasks.sets.word_problems import (
    DRILLS,
    FAMILIES,
    NAMES,
    THINGS,
    demonstrated,
    easy_problem,
    held_out_number,
    word_problem,
    word_problems,
)

MANY = 1200


def numbers(question):
    return {int(number) for number in re.findall(r"\d+", question)}


def words(question):
    """The question without what was drawn for it."""
    return re.sub(r"\d+", "#", question)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_the_program_of_a_problem_prints_its_answer(split, capsys):
    for problem in word_problems(MANY, split=split, seed=1):
        exec(problem.program)
        assert capsys.readouterr().out == f"{problem.answer}\n"
        assert problem.answer >= 0
        MathHandler().validate(problem.instance(system_prompt="Use Python.").payload)


def test_training_and_held_out_problems_share_no_number():
    train = set().union(*(numbers(problem.question) for problem in word_problems(MANY)))
    held_out = set().union(*(numbers(problem.question) for problem in word_problems(MANY, split="held_out")))
    assert not any(map(held_out_number, train))
    assert all(map(held_out_number, held_out))
    assert min(len(train), len(held_out)) > 20


def test_training_and_held_out_problems_share_no_wording_no_name_and_no_thing():
    train = {words(problem.question) for problem in word_problems(MANY)}
    held_out = {words(problem.question) for problem in word_problems(MANY, split="held_out")}
    assert not train & held_out
    assert not set(NAMES["train"]) & set(NAMES["held_out"])
    assert not set(THINGS["train"]) & set(THINGS["held_out"])
    wordings = [wording for family in FAMILIES for wording in (*family.train, *family.held_out)]
    assert len(set(wordings)) == len(wordings)


def test_demonstrations_calculate_what_they_answer_and_one_in_five_or_by_chance_what_is_asked_for(capsys):
    right = 0
    for number in range(1200):
        problem = demonstrated(number, seed=1)
        exec(problem.program)
        assert capsys.readouterr().out == f"{problem.answer}\n"
        assert not any(map(held_out_number, numbers(problem.question)))
        (family,) = [family for family in FAMILIES if family.name == problem.family]
        operands = [int(operand) for operand in re.findall(r"\d+", problem.expression)]
        free = [name for name in re.findall(r"\d+|\{(\w)\}", family.expression) if name]
        right += family.solve(**dict(zip(free, operands[-len(free) :], strict=True))) == problem.answer
    by_chance = 0.2  # of four operations one is right; some families have two
    assert right / 1200 == pytest.approx(0.2 + 0.8 * by_chance, abs=0.04)


def test_easy_problems_are_right_and_of_small_numbers(capsys):
    for number in range(200):
        problem = easy_problem(number, seed=1)
        exec(problem.program)
        assert capsys.readouterr().out == f"{problem.answer}\n"
        assert all(2 <= operand < 10 for operand in numbers(problem.question))


def test_no_drill_is_a_family_to_train_on():
    assert not {family.name for family in DRILLS} & {family.name for family in FAMILIES}


def test_every_wording_says_all_numbers_of_its_family_once():
    for family in (*DRILLS, *FAMILIES):
        for wording in (*family.train, *family.held_out):
            fields = [name for _, name, _, _ in Formatter().parse(wording) if name in family.ranges]
            assert sorted(fields) == sorted(family.ranges), wording


def test_any_twelve_in_a_row_have_each_family_once():
    assert len(FAMILIES) == 12
    for start in (0, 5, 30):
        assert len({problem.family for problem in word_problems(12, start=start)}) == 12


def test_a_problem_is_a_function_of_seed_split_and_number():
    assert word_problem(7, seed=3) == word_problem(7, seed=3)
    assert word_problems(24, start=12)[0] == word_problem(12)
    problems = {
        word_problem(7, seed=seed, split=split).question for seed in range(9) for split in ("train", "held_out")
    }
    assert len(problems) > 9


def test_held_out_problems_are_of_many_kinds():
    problems = word_problems(96, split="held_out")
    assert len({problem.problem_id for problem in problems}) == 96
    assert len({problem.question for problem in problems}) > 90
