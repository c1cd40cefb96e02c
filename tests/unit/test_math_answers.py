"""Golds of mathematics with answers that are right and wrong, by what graders get wrong; and hostile ones."""

# ruff: noqa: RUF001 - signs that look alike are what this is about
from __future__ import annotations

import importlib

import pytest

from prorl_trio.tasks.handlers.final_answer import MAX_TAIL_CHARS, extract_boxed, find_final_answer, last_number
from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.tasks.handlers.math_scorer import check_gold, score
from support.answer_tables import mismatches, read_table

PAIRS = read_table("maths_forms.txt")
GOLDS = list(dict.fromkeys(pair.key for pair in PAIRS))


def test_the_table_has_both_kinds():
    verdicts = [pair.right for pair in PAIRS]
    assert len(GOLDS) > 259
    assert min(verdicts.count(True), verdicts.count(False)) > 493


@pytest.mark.parametrize("gold", GOLDS)
def test_an_answer_is_the_gold_one_or_not(gold):
    pairs = [pair for pair in PAIRS if pair.key == gold]
    wrong = mismatches((pair, score({"gold": gold, "answer": pair.answer})["equal"]) for pair in pairs)
    assert not wrong, wrong


@pytest.mark.parametrize("gold", GOLDS)
def test_a_gold_answer_can_be_graded_and_equals_itself_in_a_box(gold):
    assert check_gold({"payload": {"answer": gold}}) == {"error": "", "path": ""}
    assert score({"gold": gold, "answer": rf"So it is $\boxed{{{gold.strip('$')}}}$."})["equal"] is True


UNIVERSAL = r"""
x=x
0=0
1=1
x
n
yes
true
0
1
\mathbb{R}
\infty
\emptyset
{}
[]
()
?
...
\ldots
=
the answer
any number
NaN
None
inf-inf
0/0
\frac{0}{0}
\text{}
\boxed{}
\pm
-
%
$
\
x or y
a,b
0*x
x^0
|
\left.\right.
(-1)^n
""".strip().splitlines()


@pytest.mark.parametrize("answer", UNIVERSAL)
def test_no_answer_is_right_for_many_golds(answer):
    fits = [gold for gold in GOLDS if score({"gold": gold, "answer": answer})["equal"]]
    assert len(fits) <= 2, fits


HOSTILE = [
    r"10^{10^{10}}",
    "9^9^9^9",
    r"2^{2^{2^{2^{2^{2}}}}}",
    "100000!",
    "((((9!)!)!)!)",
    r"e^{e^{e^{e^{9}}}}",
    "1e9999",
    r"\sin(10^{100})",
    "(" * 900 + "1" + ")" * 900,
    "{" * 1900,
    "-" * 1900 + "1",
    r"\frac" * 380 + "12",
    "x^" * 900 + "x",
    r"\sqrt" * 380 + "2",
    "1/" * 900 + "3",
    r"\binom{100000}{50000}",
    r"\sqrt[99999]{2}",
    "1," * 990 + "1",
    "|" * 1001,
    r"\pm" * 300 + "1",
    "!" * 1900,
    "x y " * 490,
    "a=b=" * 400 + "1",
    "1<x<" * 300,
    "[0,1]" + r"\cup[0,1]" * 200,
    "$" * 1900,
    "((x+1)^{300})^{300}",
    "x^{x^{x^{x^{x}}}}",
    "(1+1/x)^{10^5}",
    r"\text{a" * 200 + "}" * 200,
    "and " * 490,
    "**" * 900,
    r"\begin{pmatrix}" * 100 + "1" + r"\end{pmatrix}" * 100,
    r"\overline{" * 180 + "x" + "}" * 180,
    "1 1/2" * 300,
    "sin x " * 300,
    "mod 5" * 300,
    "0." + r"\overline{3}" * 130,
    "2 cm " * 390,
    "12:30" * 300,
    "f(" * 600,
    "\ud800",
]


@pytest.mark.parametrize("answer", HOSTILE)
def test_a_hostile_answer_is_wrong_and_nothing_else(answer):
    for gold in ("42", r"\frac{\sqrt2}{2}", "x^2+1", "(1,2)", "[0,1)", "even"):
        assert score({"gold": gold, "answer": answer})["equal"] is False


# --- where the answer is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Let me think. " * 400 + r"So it is \boxed{42}.", "42"),
        ("Let me think. " * 400 + "The answer is 42.", "42"),
        ("**Final Answer:**\n\\[\n18\n\\]", "18"),
        ("Final Answer:\n$$\n18\n$$", "18"),
        ("**Final Answer**\n\\[\n18\n\\]", "18"),
        ("<answer>18</answer>", "18"),
        ("Answer: <answer>17</answer> No: <answer>$18$</answer>", "$18$"),
        ("The answer is 18, as 9*2=18.", "18"),
        ("The answer is 18 because 9 x 2 is 18.", "18"),
        ("Answer: 18 (since 9*2 = 18)", "18"),
        ("The answer is 18 (9 × 2).", "18"),
        ("Answer: 18 dollars per day (2 × 9)", "18 dollars per day"),
        ("Answer: 18; checked", "18"),
        ("Answer: \n- 18", "18"),
        ("The answer is x = 3 (mod 7)", "x = 3 (mod 7)"),
        (r"\boxed{(2,2)} \text{ and } \boxed{(6,2)}", "(2,2), (6,2)"),
        (r"\boxed{1} \quad \text{and} \quad \boxed{2}", "1, 2"),
        (r"\boxed{1}. Or rather \boxed{2}", "2"),
        (r"\boxed{\left\{1,2\right\}}", r"\left\{1,2\right\}"),
        (r"\boxed{72} \boxed{}", "72"),
        (r"\boxed {72}", "72"),
        (r"\boxed 72.", "72"),
        (r"\fbox{72}", "72"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"\boxed{2\boxed{5}}", r"2\boxed{5}"),
    ],
)
def test_the_final_answer_is_found(text, answer):
    assert find_final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "equal"),
    [
        ("So 2*9 = 18.", True),
        ("Total = 2*9 = 18 dollars", True),
        ("She sells 9 eggs and makes $18.", True),
        ("The value of the sum is $18$.", True),
        ("The answer is 17, not 18.", False),
        ("The answer is 18 or 19", False),
        ("Answer: 17 (18 is wrong)", False),
        ("The answer is between 17 and 18", False),
        ("For odd n the value is $18$.", False),
        ("There are 18 apples in 3 boxes.", False),
    ],
)
def test_prose_has_an_answer_only_if_it_is_the_one_number_in_it(text, equal):
    assert score({"gold": "18", "answer": text})["equal"] is equal


@pytest.mark.parametrize(
    "part",
    [
        "\\boxed{",
        "\\boxed",
        "\\fbox{",
        "{",
        "}",
        "\\boxed{1} and ",
        "answer is ",
        "answer\n",
        "<answer>",
        "####",
        " ",
        "1,000,",
        "-1",
        "$",
        "\\[",
        "(since ",
        " because",
        "\\boxed 7 ",
    ],
)
@pytest.mark.parametrize(("before", "after"), [("", ""), ("\\boxed{", ""), ("the answer is ", "}"), ("", "\\boxed{7}")])
def test_a_degenerate_turn_is_read_in_linear_time(part, before, after):
    """With a quadratic reader, these texts of 200,000 characters take minutes."""
    text = before + part * (200_000 // len(part)) + after
    boxed = extract_boxed(text)
    last_number(text)
    assert find_final_answer(text) is not None
    if after == "\\boxed{7}" and part not in ("\\boxed{1} and ",):
        assert boxed is not None
        assert boxed.endswith("7")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "part", ["_", "__", "\\[", " __a", "**a ", "✅", "\\begin{cases}1\\\\", "x=1\n", "\\\\frac", "or 1. "]
)
@pytest.mark.parametrize("before", ["", "\\boxed{", "The answer is 1. "])
def test_a_degenerate_answer_is_graded_in_linear_time(part, before):
    text = before + part * (100_000 // len(part)) + "}" * before.startswith("\\")
    assert score({"gold": "42", "answer": text})["equal"] is False


def test_only_the_end_of_a_long_turn_is_read():
    assert extract_boxed(r"\boxed{1}" + "x" * MAX_TAIL_CHARS) is None
    assert extract_boxed("x" * 10**6 + r"\boxed{1}") == "1"
    assert last_number("7 " + "x" * MAX_TAIL_CHARS) is None


# --- golds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gold",
    [
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72",
        r"Hence we have $\boxed{72}$.",
        "72",
        "yes",
        "Tuesday",
        "no solution",
        "(B)",
        r"\angle ABC",
        r"\overline{abc}",
        r"f(x)=2x \text{ for } x>0",
        r"5 \text{ for } n=1",
        r"12\text{ hours and }30\text{ minutes}",
        ["5", "five"],
        r"\text{Evelyn}",
        "1, 2, \\ldots, n",
        "St. Louis",
        "Mt. Everest in Nepal",
        "10 marbles remain in the bag",
        "even, odd and prime",
        "The answer is 5.",
    ],
)
def test_a_gold_answer_that_can_be_graded(gold):
    assert check_gold({"payload": {"answer": gold}}) == {"error": "", "path": ""}
    for one in gold if isinstance(gold, list) else [gold]:
        assert score({"gold": one, "answer": one})["equal"] is True


@pytest.mark.parametrize(
    ("gold", "part", "path"),
    [
        ("proof", "missing", "$.instance.payload.answer"),
        ("notfound", "missing", "$.instance.payload.answer"),
        ("", "missing", "$.instance.payload.answer"),
        ("$", "missing", "$.instance.payload.answer"),
        (r"\boxed{}", "missing", "$.instance.payload.answer"),
        (["5", "Proof."], "missing", "$.instance.payload.answer[1]"),
        (
            "We proceed by induction. Let $n$ be the number of sides, and suppose that it holds below.",
            "prose",
            "$.instance.payload.answer",
        ),
        (72, "no text", "$.instance.payload.answer"),
        ("#REF!", "missing", "$.instance.payload.answer"),
        ("<NA>", "missing", "$.instance.payload.answer"),
        ("#DIV/0!", "missing", "$.instance.payload.answer"),
        ("Step: 5+5 = 10. Therefore, there are 10 marbles.", "prose", "$.instance.payload.answer"),
        ("First 2+2 is 4, then add 1, so the result is 5", "prose", "$.instance.payload.answer"),
        ("Yes, because it is prime", "prose", "$.instance.payload.answer"),
        ("42. Because 6*7 is 42.", "prose", "$.instance.payload.answer"),
        ("It is of x. Then it is so.", "prose", "$.instance.payload.answer"),
    ],
)
def test_a_gold_answer_that_cannot_be_graded_is_named_with_a_remedy(gold, part, path):
    found = check_gold({"payload": {"answer": gold}})
    assert part in found["error"]
    assert found["path"] == path


def test_a_gold_answer_in_a_worked_solution_is_found_as_an_answer_is():
    gold = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"
    assert score({"gold": gold, "answer": r"\boxed{72}"})["equal"] is True
    assert score({"gold": gold, "answer": "24"})["equal"] is False


def test_the_handler_names_the_check_of_its_golds():
    module, _, function = MathHandler.gold_check.partition(":")
    assert getattr(importlib.import_module(module), function) is check_gold
