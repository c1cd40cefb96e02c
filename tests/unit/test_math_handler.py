from __future__ import annotations

import pytest

from prorl_trio.tasks.handlers.final_answer import last_number
from prorl_trio.tasks.handlers.math import MathHandler, extract_boxed
from prorl_trio.tasks.handlers.math_scorer import score
from prorl_trio.types.errors import MalformedJob


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{18}.", "18"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed{3} and then \boxed{unclosed", "3"),
        (r"\boxed{}", None),
        ("boxed{5}", None),
        ("", None),
        (r"\boxed{{{", None),
    ],
)
def test_the_last_complete_box_is_the_answer(text, answer):
    assert extract_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7.", "7"),
        ("It is 1,024, or so.", "1,024"),
        ("7-3", "3"),
        ("That makes -3.", "-3"),
        ("about 2.50 dollars", "2.50"),
        ("x2 and 3rd and 0x10", None),
        ("seven", None),
    ],
)
def test_the_last_number_that_stands_alone(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("18", "18", True),
        ("18.0", "18", True),
        ("$1,000", "1000", True),
        ("18 dollars", "18", True),
        ("Janet makes 18 dollars.", "18", True),
        (r"\frac{1}{2}", "0.5", True),
        ("x+1", "1+x", True),
        ("19", "18", False),
        ("18 dollars and 19", "18", False),
        ("no idea", "18", False),
        ("", "18", False),
        ("9" * 5000, "18", False),
    ],
)
def test_equality_of_answers(answer, gold, equal):
    assert score({"answer": answer, "gold": gold})["equal"] is equal


def test_an_unreadable_gold_answer_is_the_tasks_fault():
    with pytest.raises(ValueError, match="gold answer"):
        score({"answer": "1", "gold": "$"})


@pytest.mark.parametrize(
    ("payload", "path"),
    [
        ({"question": "1+1?"}, "$.instance.payload"),
        ({"question": "1+1?", "answer": 2}, "$.instance.payload.answer"),
        ({"question": " ", "answer": "2"}, "$.instance.payload"),
        ({"question": "1+1?", "answer": []}, "$.instance.payload"),
        ({"question": "1+1?", "answer": ["2", " "]}, "$.instance.payload"),
        ({"question": "1+1?", "answer": "2", "anwser": "2"}, "$.instance.payload"),
    ],
)
def test_a_malformed_instance_names_its_field(payload, path):
    with pytest.raises(MalformedJob) as caught:
        MathHandler().validate(payload)
    assert caught.value.path == path
