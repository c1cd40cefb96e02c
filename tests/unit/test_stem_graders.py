"""Answers to science questions, understood and compared: choices, numbers with units, short answers."""

# ruff: noqa: RUF001 - signs of many kinds
from __future__ import annotations

import pytest

from prorl_trio.handlers.stem.choice import read_choice
from prorl_trio.handlers.stem.generated import may_be_evaluated
from prorl_trio.handlers.stem.quantity import read_number, read_quantities
from prorl_trio.handlers.stem.scorer import score
from prorl_trio.handlers.stem.short_answer import compare_short_answer, normalise

CHOICES = ["a sheet of paper", "iron", "a block of grass", "Iron (III) oxide", "none of these"]


@pytest.mark.parametrize(
    "said",
    [
        *("C", "c", "(C)", "C.", "C)", "[C]", "**C**", "$C$", r"\boxed{C}", r"\text{C}", r"\boxed{\text{(C)}}"),
        *("The answer is C.", "Option C", "Answer: C", "the correct option is C", "C. a block of grass", "#### C"),
        *("a block of grass", "Block of grass.", "I first thought of B, but the answer is C."),
    ],
)
def test_a_choice_is_told_by_its_letter_or_its_text(said):
    assert read_choice(said, CHOICES) == "C"


@pytest.mark.parametrize(
    "said",
    [
        *("", " ", "A or C", "A, B, C, D, E", "ABCDE", "C. iron", "F", "Z", "not C", "A B C D", "C or", "1", "\x00"),
        *("all of them", "the block", "a", "CC", "C C"),
    ],
)
def test_what_names_no_choice_or_several_is_none(said):
    assert read_choice(said, CHOICES) in ((None, "A") if said == "a" else (None,))


def test_texts_that_are_the_same_name_no_choice():
    assert read_choice("iron", ["iron", "Iron.", "gold"]) is None


@pytest.mark.parametrize(
    ("said", "value", "unit"),
    [
        ("42", 42, ""),
        ("-1.5e-3", -0.0015, ""),
        ("1,234.5", 1234.5, ""),
        ("3/4", 0.75, ""),
        ("9.81 m/s^2", 9.81, "m / s**2"),
        ("9.81 m s⁻²", 9.81, "m * s**-2"),
        (r"\boxed{9.81\,\text{m}/\text{s}^2}", 9.81, "m / s**2"),
        ("g ≈ 9.81 m/s2", 9.81, "m / s**2"),
        ("about 3.0 × 10^8 meters per second", 3e8, "meters / second"),
        (r"$6.02 \times 10^{23}$", 6.02e23, ""),
        ("10^-7", 1e-7, ""),
        ("25 °C", 25, "degC"),
        ("12%", 12, "percent"),
        (r"\frac{1}{2} kg", 0.5, "kg"),
        ("the answer is 5 kJ/(mol K).", 5, "kJ / ( mol * K )"),
        ("5 1/s", 5, "1 / s"),
        ("4.7 kΩ", 4.7, "kΩ"),
    ],
)
def test_quantities_are_read(said, value, unit):
    found = read_quantity(said)
    assert found == Quantity(pytest.approx(value), unit)


@pytest.mark.parametrize(
    "said",
    [
        *(
            "",
            "m",
            "5 or 6 m",
            "5, 6",
            "1/0",
            "1e999",
            "nan",
            "inf",
            "9**9**9",
            "1 m^9^9",
            "2 m^999",
            "5 m; 6 m",
            "1.2.3",
        ),
        *("5 __import__('os')", "5 m.real", "9" * 400, "5 " + "m" * 100, "((((", "5 ^", "= 5 = 6", "12 34"),
        *("\udcff", "5 m and 6 m!"),
    ],
)
def test_what_is_no_quantity_is_none_and_raises_nothing(said):
    assert read_quantity(said) is None


def test_a_number_alone():
    assert read_number("1e3") == 1000
    assert read_number("1 m") is None


def grade(said, **grader):
    return score({"answer": said, "grader": grader})


@pytest.mark.parametrize(
    ("said", "right"),
    [
        *(("9.81", True), ("9.8 m/s^2", True), ("981 cm/s^2", True), ("32.2 ft/s^2", True), ("35.3 km/h/s", True)),
        *(("9.81 m/s", False), ("9.81 kg", False), ("9.81 zorks", False), ("10.5", False), ("-9.81", False)),
        *(("9.81 m/s^2 or 5", False), ("gravity", False), ("9.81 m/s^2 + 0*x", False), ("9.81 %", False)),
        *(("1 " + "(" * 50, False), ("9.81e5e5", False), ("9.81 m/s^2 )", False), ("9.81 m/0", False)),
    ],
)
def test_a_number_is_right_in_any_unit_of_its_dimension(said, right):
    assert grade(said, kind="number", answer=9.81, unit="m/s^2")["equal"] is right


def test_units_that_are_required_temperatures_and_bare_numbers():
    required = {"kind": "number", "answer": "9.81", "unit": "m/s^2", "unit_required": True}
    assert not grade("9.81", **required)["equal"]
    assert grade("9.81 m/s**2", **required)["equal"]
    kelvin = {"kind": "number", "answer": 298.15, "unit": "K", "relative_tolerance": 1e-4}
    assert grade("25 °C", **kelvin)["equal"]
    assert not grade("25", **kelvin)["equal"]
    assert grade("12 %", kind="number", answer=0.12)["equal"]
    assert not grade("0.12 m", kind="number", answer=0.12)["equal"]
    exact = {"kind": "number", "answer": 0, "absolute_tolerance": 0.5}
    assert [grade(said, **exact)["equal"] for said in ("0.4", "-0.5", "0.6")] == [True, True, False]


def test_a_unit_of_the_task_that_is_none_is_the_tasks_fault():
    for unit in ("zorks", "m^", "__import__('os')"):
        with pytest.raises(ValueError, match="the task's unit"):
            grade("5 m", kind="number", answer=5, unit=unit)


@pytest.mark.parametrize(
    ("said", "gold", "right"),
    [
        ("The mitochondria.", "mitochondria", True),
        ("the answer is Mitochondria", "mitochondria", True),
        ("H₂O", "H2O", True),
        ("beta carotene", "β", False),
        ("beta-carotene", "Beta Carotene", True),
        ("-5", "5", False),
        ("1.5", "15", False),
        ("1/2", "12", False),
        ("Cl-", "Cl", False),
        ("mitochondria nucleus ribosome", "mitochondria", False),
        ("", "mitochondria", False),
        ("the", "a", False),
    ],
)
def test_short_answers_are_equal_as_words(said, gold, right):
    assert compare_short_answer(said, [gold])["equal"] is right


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
