"""Answers to science questions, understood and compared: choices, numbers with units, short answers."""

# ruff: noqa: RUF001 - signs of many kinds
from __future__ import annotations

import pytest

from prorl_trio.tasks.handlers.stem.choice import read_choice
from prorl_trio.tasks.handlers.stem.generated import may_be_evaluated
from prorl_trio.tasks.handlers.stem.quantity import Quantity, read_number, read_quantities
from prorl_trio.tasks.handlers.stem.scorer import check_gold, score
from prorl_trio.tasks.handlers.stem.short_answer import compare_short_answer, normalise
from support.stem_tables import CHOICES, QUANTITIES, TEXTS, UNITS


def grade(said, **grader):
    return score({"answer": said, "grader": grader})


def test_choices_are_read_by_letter_or_text_and_by_nothing_else():
    rows = [(choices, said, letter) for choices, letter, answers in CHOICES for said in answers]
    wrong = [row for row in rows if read_choice(row[1], row[0]) != row[2]]
    assert len(rows) > 240
    assert not wrong


def test_quantities_are_right_or_wrong_as_a_whole():
    wrong = [
        (options, said)
        for options, right, answers in QUANTITIES
        for said in answers
        if grade(said, kind="number", **options)["equal"] is not right
    ]
    assert not wrong


def test_a_unit_means_the_same_in_every_spelling_in_the_task_and_in_the_answer():
    wrong = []
    for unit, spellings in UNITS.items():
        for each in spellings:
            gold = {"kind": "number", "answer": 5, "unit": unit, "unit_required": True}
            rows = [(gold, f"5 {each}", True), (gold, f"50 {each}", False), (gold, f"-5 {each}", False)]
            rows.append(({**gold, "unit": each}, f"5 {unit}", True))
            wrong += [(options, said) for options, said, right in rows if grade(said, **options)["equal"] is not right]
    assert not wrong


def test_short_answers_are_equal_as_words_with_their_signs():
    wrong = [row for row in TEXTS if compare_short_answer(row[1], [row[0]])["equal"] is not row[2]]
    assert not wrong


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("9.81 m/s^2", [Quantity(9.81, "m/s^2")]),
        (r"$6.02 \times 10^{23}$", [Quantity(6.02e23)]),
        ("500 nm (0.5 µm)", [Quantity(500, "nm"), Quantity(0.5, "µm")]),
        ("F = 2*3 = 6 N", [Quantity(6, "N")]),
    ],
)
def test_what_a_text_states_is_read_with_all_its_forms(said, found):
    assert read_quantities(said) == found


@pytest.mark.parametrize(
    "said",
    [
        *(
            "",
            "m",
            "5, 6",
            "1/0",
            "1e999",
            "nan",
            "inf",
            "9**9**9",
            "5^",
            "1.2.3",
            "9" * 400,
            "((((",
            "x > 5",
            "\udcff",
        ),
        *("5-6", "5–6", "6*7", "2 + 3", "52_8", "10:30", "5!", "3,14", "12 34", "1/2π", "x=5, y=6", "not 5", "5 ± 1"),
    ],
)
def test_what_is_no_number_is_none_and_raises_nothing(said):
    assert read_number(said) is None


def test_a_number_alone():
    assert read_number("1e3") == 1000
    assert read_number("1 m") is None


def test_units_that_are_required_and_bare_numbers():
    required = {"kind": "number", "answer": "9.81", "unit": "m/s^2", "unit_required": True}
    assert not grade("9.81", **required)["equal"]
    assert grade("9.81 m/s**2", **required)["equal"]
    assert grade("12 %", kind="number", answer=0.12)["equal"]
    assert not grade("0.12 m", kind="number", answer=0.12)["equal"]
    exact = {"kind": "number", "answer": 0, "absolute_tolerance": 0.5}
    assert [grade(said, **exact)["equal"] for said in ("0.4", "-0.5", "0.6")] == [True, True, False]


def test_a_unit_of_the_task_that_is_none_is_the_tasks_fault():
    for unit in ("zorks", "m^", "__import__('os')", "furlongx"):
        for said in ("5 m", "5"):
            with pytest.raises(ValueError, match="the task's unit"):
                grade(said, kind="number", answer=5, unit=unit)


NUMBER = {"kind": "number", "answer": 5}
CHOICE = {"kind": "choice", "choices": ["+", "-", "×"], "answer": "C"}


@pytest.mark.parametrize(
    ("grader", "field", "says"),
    [
        ({**NUMBER, "unit": "zorks"}, "unit", "names or symbols of pint"),
        ({**NUMBER, "unit": "m, s"}, "unit", "cannot be read"),
        ({**NUMBER, "answer": "5 to 6"}, "grader", "no finite number"),
        ({**NUMBER, "relative_tolerance": 1.0}, "relative_tolerance", "twice the answer"),
        ({**NUMBER, "absolute_tolerance": 100.0}, "absolute_tolerance", "as large as the answer"),
        (
            {**NUMBER, "answer": 4e-19, "unit": "J", "absolute_tolerance": 0.01},
            "absolute_tolerance",
            "so that 0 is right",
        ),
        ({**CHOICE, "answer": "D"}, "grader", "answer must be one of A, B, C"),
        ({**CHOICE, "choices": ["+", " ", "×"]}, "choices", "choice B is empty"),
        ({**CHOICE, "choices": ["×", "-", "×"]}, "choices", "choices C and A are the same text"),
        ({"kind": "text", "answer": ["x", " "]}, "grader", "answer is empty"),
        ({"kind": "text", "answer": "x" * 20_001}, "answer", "20000 at most"),
    ],
)
def test_a_gold_answer_that_cannot_be_graded_is_named_with_its_field_and_a_remedy(grader, field, says):
    found = check_gold({"payload": {"question": "?", "grader": grader}})
    assert says in found["error"]
    assert found["path"].startswith("$.instance.payload.grader")
    assert found["path"].endswith(field)


@pytest.mark.parametrize(
    "grader",
    [
        CHOICE,
        {**CHOICE, "choices": ["CO", "Co", "co"]},
        {**CHOICE, "choices": ["A", "C", "B"]},
        {**CHOICE, "choices": ["x^1", "x1", "x_1"]},
        NUMBER,
        {**NUMBER, "unit": "degrees Celsius", "unit_required": True},
        {**NUMBER, "unit": r"\text{J mol}^{-1}"},
        {**NUMBER, "answer": 0, "absolute_tolerance": 3.0},
        {**NUMBER, "answer": 0.02, "absolute_tolerance": 0.05},
        {**NUMBER, "answer": "6.02 × 10^23"},
        {"kind": "text", "answer": "?!"},
        {"kind": "text", "answer": ["C#", "$x_1$"], "case_sensitive": True},
    ],
)
def test_a_gold_answer_that_can_be_graded_is_taken(grader):
    assert check_gold({"payload": {"question": "?", "grader": grader}}) == {"error": "", "path": ""}


def test_several_golds_f1_and_case():
    found = compare_short_answer("red blood cells", ["erythrocytes", "blood cells"])
    assert (found["equal"], found["f1"]) == (False, pytest.approx(0.8))
    assert compare_short_answer("Erythrocytes", ["erythrocytes", "x"]) == {
        "equal": True,
        "f1": 1.0,
        "parsed_answer": "erythrocytes",
    }
    assert compare_short_answer("CO", ["Co"])["equal"]
    assert not compare_short_answer("CO", ["Co"], case_sensitive=True)["equal"]
    assert compare_short_answer("?!", ["x"])["f1"] == 0.0
    assert normalise("The Answer, of it!") == "answer of it"


PIECES = ['"', " ,", "  ", "_(", "\\frac", "{", "^(", "A. ", "é", "a.b", "answer: ", "<answer>", "no wait, ", "*a "]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("piece", PIECES)
def test_degenerate_answers_are_read_in_linear_time(piece):
    """A reader whose time grows with the square of the length takes minutes here."""
    said = piece * (100_000 // len(piece))
    assert read_choice(said, ["red", "green"]) is None
    assert not compare_short_answer(said, ["red"])["equal"]
    assert read_quantities(said) == []


CODE = "__import__('os').system('true')"


@pytest.mark.parametrize(
    ("family", "answer", "may"),
    [
        ("n_queens", "[['Q', '_'], ['_', 'Q']]", True),
        ("n_queens", "Q _\n_ Q", True),
        ("spiral_matrix", "1 2 3", True),
        ("spiral_matrix", CODE, False),
        ("string_insertion", f"[{CODE}]", False),
        ("binary_matrix", "exit", False),
        ("binary_matrix", "(" * 999, False),
        ("countdown", "(2 + 3) * 4 - 1", True),
        ("countdown", "2 ** 9 ** 9", False),
        ("countdown", "1.5 * 2", False),
        ("countdown", CODE, False),
        ("simple_integration", "x**2/2 + sin(3*x) + C", True),
        ("simple_integration", "Integral(x, x)", False),
        ("simple_integration", "x.func", False),
        ("intermediate_integration", "6*x**4 - 2.5*x", True),
        ("intermediate_integration", "x" * 2000, False),
        ("intermediate_integration", CODE, False),
        ("chain_sum", CODE, True),
    ],
)
def test_verifiers_that_evaluate_an_answer_see_nothing_that_runs(family, answer, may):
    assert may_be_evaluated(family, answer) is may
