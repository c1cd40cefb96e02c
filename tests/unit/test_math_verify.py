"""Where our reader and math-verify decide differently, and why. Its own test cases agree otherwise.

Each row is a class of differences: a gold, an answer, our verdict (math-verify has the opposite one), and the reason.
"""

from __future__ import annotations

import logging

import pytest
from math_verify import parse, verify

from prorl_trio.tasks.handlers.math_scorer import score

DIFFERENCES = [
    (r"1.6 \times 10^{-19}", r"3.2 \times 10^{-19}", False, "it rounds to six decimals, whatever the size"),
    (r"\frac{1}{2^{99}}", "0.0000001", False, "the same"),
    (r"1, 3, 5, \ldots, 99", "99", False, "it drops what stands before an ellipsis"),
    (r"n \equiv 1 \pmod{4}", r"n \equiv 1 \pmod{7}", False, "it drops a modulus"),
    ("52_8", "52", False, "it drops a base"),
    ("42", "41 = 42", False, "it takes the last side of any equation"),
    (r"3\mathbf{i}+4\mathbf{j}", r"3\mathbf{i}-4\mathbf{j}", False, "it stops at a command with braces"),
    (r"\{1,2\}", "x=1,y=2", False, "values of two unknowns are no set"),
    ("1+2i", "1 + 2 i", True, "the imaginary unit, however it is spaced"),
    (r"e^{2x}", "exp(2x)", True, "names of Python's functions"),
    (r"\frac{1}{3}", "0.(3)", True, "repeating decimals"),
    (r"\log_2 3", "log2(3)", True, "names of Python's functions"),
    ("[-2,7]", r"-2 \le x \le 7", True, "inequalities are intervals, in both directions"),
]


def _theirs(gold: str, answer: str) -> bool:
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    read = [parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer)]
    return bool(verify(*read, timeout_seconds=None))


@pytest.mark.parametrize(("gold", "answer", "ours", "why"), DIFFERENCES)
def test_a_difference_is_one_that_is_meant(gold, answer, ours, why):
    assert score({"gold": gold, "answer": answer})["equal"] is ours, why
    assert _theirs(gold, answer) is not ours
