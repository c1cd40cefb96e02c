"""Outputs and values compared with what is expected."""

from __future__ import annotations

import math
import sys

import pytest

from prorl_trio.tasks.grading.compare import Tolerance, same_output, same_value
from prorl_trio.tasks.grading.drivers.values import Unplain, decode, decode_line, encode, encode_line

NEAR = Tolerance(absolute=1e-6, relative=1e-6)


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("  1 2 \n3\n\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("1.0 2.50", "1 2.5", True),
        ("0.1", "0.10000000000000001", False),
        ("0.30000000000000004", "0.3", False),
        ("1e3", "1000", True),
        ("nan", "nan", True),
        ("NaN", "nan", False),
        ("yes", "Yes", False),
        ("", "1", False),
        ("1", "", False),
        ("", "", True),
        ("1" * 5000, "1" * 5000 + ".0", True),
        ("1e999999999999999999999", "1", False),
        ("1\r\n2\r\n", "1\n2", True),
        ("inf", "Infinity", True),
        (".5 5. +5", "0.5 5 5", True),
        ("1_0", "10", False),
        ("\u0663", "3", False),
        ("\uff13", "3", False),
        ("1\x1c2", "1\n2", False),
        ("1\u20282", "1\n2", False),
    ],
)
def test_outputs_are_compared_by_lines_and_exact_decimals(output, expected, same):
    assert same_output(output, expected) is same


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [("0.30000000000000004", "0.3", True), ("1000000.5", "1000000", True), ("1.1", "1", False), ("nan", "1", False)],
)
def test_a_task_may_say_that_numbers_need_not_be_exact(output, expected, same):
    assert same_output(output, expected, NEAR) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ((1, 2), [1, 2], True),
        ([1, [2, (3,)]], [1, [2, [3]]], True),
        ([1, 2], [1, 2, 3], False),
        ({"a": [1]}, {"a": (1,)}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        (True, 1, False),
        (1, True, False),
        (True, True, True),
        (1.0, 1, True),
        (0.1 + 0.2, 0.3, False),
        ("1", 1, False),
        (None, None, True),
        (math.nan, math.nan, True),
        (1.0, math.nan, False),
        (math.nan, 1.0, False),
        (math.inf, math.inf, True),
        (5.0, math.inf, False),
        ({1: "a", 2: "b"}, {"1": "a", "2": "b"}, True),
        ({1: "a", "1": "b"}, {"1": "a", "2": "b"}, False),
        ({1: "a", "1": "a"}, {"1": "a"}, False),
        (10**400, 10**400, True),
    ],
)
def test_values_are_compared_as_they_are(value, expected, same):
    assert same_value(value, expected) is same


def test_values_are_compared_with_a_tolerance_where_the_task_says_so():
    assert same_value([0.1 + 0.2, "x"], [0.3, "x"], NEAR)
    assert not same_value([0.31], [0.3], NEAR)


RELATIVE = Tolerance(relative=1e-6)
INTEGERS = Tolerance(absolute=1e-8, relative=1e-5, exact_integers=True)


@pytest.mark.parametrize("tolerance", [RELATIVE, NEAR, INTEGERS])
@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (5.0, math.inf, False),
        (-math.inf, math.inf, False),
        (math.inf, math.inf, True),
        (math.inf, 5.0, False),
        (math.nan, 5.0, False),
        (5.0, math.nan, False),
        (10**400, 10**400, True),
        (10**400, 1.0, False),
        (1.0, 10**400, False),
        (10**400, 5, False),
        (5, 10**400, False),
        (0.1 + 0.2, 0.3, True),
    ],
)
def test_nothing_is_near_to_what_is_not_finite(tolerance, value, expected, same):
    assert same_value(value, expected, tolerance) is same
    if abs(expected) < 10**300 or expected == math.inf:
        assert same_output(str(value), str(expected), tolerance) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [(1000001, 1000000, False), (1000000, 1000000, True), (1000001.0, 1000000.0, True), (3.0000001, 3, True)],
)
def test_a_task_may_want_its_integers_exact(value, expected, same):
    assert same_value(value, expected, INTEGERS) is same
    assert same_output(f"x {value}".replace("x ", ""), str(expected), INTEGERS) is same


def test_outputs_beyond_the_range_of_floats_are_compared_as_they_are():
    assert same_output("1e400", "1e400", RELATIVE)
    assert not same_output("5", "1e400", RELATIVE)
    assert not same_output("1e400", "5", RELATIVE)


@pytest.mark.parametrize("wrong", [{"absolute": -1.0}, {"relative": math.inf}, {"relative": math.nan}])
def test_a_tolerance_is_finite(wrong):
    with pytest.raises(ValueError, match="must be finite"):
        Tolerance(**wrong)


class AlwaysEqual(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


class Liar(list):
    def __iter__(self):
        return iter([42])

    def __len__(self):
        return 1


VALUES = [
    None,
    True,
    -(10**30),
    7**5000,
    1.5,
    "é\ud800\n",
    b"\x00\xff",
    1 + 2j,
    [1, (2, [3, {4}])],
    {"a": {1: (2,)}, "\x00": 1},
    {(1, 2): "x"},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: hex(value)[:20] if type(value) is int else repr(value))
def test_plain_values_cross_as_they_are(value):
    crossed = decode(decode_line(encode_line({"value": encode(value)}))["value"])
    assert crossed == value
    assert type(crossed) is type(value)


def test_numbers_without_a_name_in_json_cross():
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode([math.inf, -math.inf])) == [math.inf, -math.inf]


def test_classes_of_the_other_side_do_not_cross():
    crossed = decode(encode([AlwaysEqual(3), Liar([1, 2])]))
    assert crossed == [3, [1, 2]]
    assert [type(each) for each in crossed] == [int, list]
    assert crossed[0] != 4


@pytest.mark.parametrize(
    "value", [object(), lambda: 1, {"a": object()}, iter([])], ids=["object", "function", "in", "it"]
)
def test_what_is_not_plain_does_not_cross(value):
    with pytest.raises(Unplain, match="which is not plain"):
        encode(value)


def test_a_value_that_holds_itself_does_not_cross():
    value = []
    value.append(value)
    with pytest.raises(Unplain, match="levels"):
        encode(value)


@pytest.mark.parametrize(
    "forged", [{"\x00": "code"}, {"\x00": "set", "is": [[1]]}, {"\x00": "tuple"}, {"\x00": "complex", "is": 1}]
)
def test_forged_values_are_refused(forged):
    with pytest.raises(ValueError, match=r"no "):
        decode(forged)


@pytest.mark.parametrize("kind", ["set", "dict"])
def test_numbers_of_one_hash_do_not_make_a_table_slow(kind):
    alike = [number * sys.hash_info.modulus for number in range(50_000)]
    forged = {"\x00": kind, "is": [[each, 1] for each in alike] if kind == "dict" else alike}
    with pytest.raises(ValueError, match="one hash"):
        decode(forged)
    assert decode(encode(set(range(50_000)))) == set(range(50_000))


@pytest.mark.parametrize("line", [b"[1]", b"1", b"[" * 100_000, b'"'])
def test_lines_that_are_no_message_are_refused(line):
    with pytest.raises(ValueError, match=r".+"):
        decode_line(line)
