"""Runners of a repository's tests: their drivers, requirements and canaries. Pure."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from prorl_trio.tasks.grading.repository_tests import RunnerName


class Canaries(NamedTuple):
    """Tests that must fail: their files by path in the repository, and arguments that run them around others."""

    files: dict[str, str]
    arguments: list[str]


class Runner(NamedTuple):
    """A way to run a repository's tests.

    Attributes:
        driver: the program of `drivers` that reports their results.
        look: Python code that exits with 0 if the driver can run. Empty: the driver's own `look` is used, which prints
            the required facts about the repository before the patch is applied.
        needs: a description of the requirements.
        canaries: the number of tests that must fail; their ids all contain the canary's name.
        place: returns the canaries of a name, to run before and after the tests selected by some arguments.
    """

    driver: str
    look: str
    needs: str
    canaries: int
    place: Callable[[Sequence[str], str], Canaries]


PYTEST_CANARY: Final = """\
import random
import unittest

import pytest

NUMBER = random.randrange(10**9)


def test_by_statement():
    assert NUMBER < 0


def test_by_raises():
    with pytest.raises(KeyError):
        str(NUMBER)


def test_by_fail():
    pytest.fail(str(NUMBER))


def test_by_exception():
    raise ZeroDivisionError(NUMBER)


class TestPlain:
    def test_by_statement(self):
        assert NUMBER < 0


class TestUnittest(unittest.TestCase):
    def test_by_statement(self):
        assert NUMBER < 0

    def test_by_assertion(self):
        self.assertEqual(NUMBER, -1)

    def test_by_raises(self):
        with self.assertRaises(KeyError):
            str(NUMBER)

    def test_by_fail(self):
        self.fail(str(NUMBER))

    def test_by_exception(self):
        raise ZeroDivisionError(NUMBER)
"""

DJANGO_CANARY: Final = """\
import random
import unittest

from django.test import SimpleTestCase, TestCase

NUMBER = random.randrange(10**9)


class Canary:
    def test_by_statement(self):
        assert NUMBER < 0

    def test_by_assertion(self):
        self.assertEqual(NUMBER, -1)

    def test_by_raises(self):
        with self.assertRaises(KeyError):
            str(NUMBER)

    def test_by_fail(self):
        self.fail(str(NUMBER))

    def test_by_exception(self):
        raise ZeroDivisionError(NUMBER)

    def test_by_a_part(self):
        with self.subTest():
            self.assertLess(NUMBER, 0)


class WithDatabase(Canary, TestCase):
    databases = frozenset()


class WithoutDatabase(Canary, SimpleTestCase):
    pass


class Plain(Canary, unittest.TestCase):
    pass
"""
"""Django runs tests with a database first and plain unittest tests last, so each module contains all kinds."""

SYMPY_CANARY: Final = """\
import random

from sympy import Integer

try:
    from sympy.testing.pytest import raises
except ImportError:
    from sympy.utilities.pytest import raises

NUMBER = random.randrange(10**9)


def test_by_statement():
    assert NUMBER < 0


def test_by_equality():
    assert Integer(NUMBER) == Integer(-1)


def test_by_raises():
    raises(KeyError, lambda: str(NUMBER))


def test_by_exception():
    raise ZeroDivisionError(NUMBER)
"""
"""Its functions contain the canary's name, because SymPy reports only the function's name."""


def _around_files(arguments: Sequence[str], canary: str) -> Canaries:
    """Place files next to the row's first file."""
    folder = ""
    for argument in arguments:
        path = argument.partition("::")[0]
        if not argument.startswith("-"):
            folder = os.path.dirname(path) if re.search(r"\.\w+$", path) else path
            break
    first, last = (os.path.join(folder, f"{canary}_{place}.py") for place in ("first", "last"))
    return Canaries(dict.fromkeys((first, last), PYTEST_CANARY), [first, *arguments, last])


def _around_labels(arguments: Sequence[str], canary: str) -> Canaries:
    """Place separate packages, because the canaries must not belong to an application of the row's tests."""
    options = [each for each in arguments if each.startswith("-")]
    labels = [each for each in arguments if not each.startswith("-")]
    first, last = (f"{canary}_{place}" for place in ("first", "last"))
    files = {f"tests/{each}/__init__.py": "" for each in (first, last)}
    files |= {f"tests/{each}/tests.py": DJANGO_CANARY for each in (first, last)}
    return Canaries(files, [*options, f"{first}.tests", *labels, f"{last}.tests"])


def _around_sorted_files(arguments: Sequence[str], canary: str) -> Canaries:
    """Place files in folders that sort before and after all others, because SymPy sorts files."""
    first, last = (f"sympy/{at}_{canary}_{place}/test_it.py" for at, place in (("0", "first"), ("zz", "last")))
    text = SYMPY_CANARY.replace("def test_", f"def {canary}_")
    return Canaries(dict.fromkeys((first, last), text), [first, *arguments, last])


RUNNERS: Final[Mapping[RunnerName, Runner]] = {
    "pytest": Runner(
        "pytest_run",
        "",
        "`python3` there has to be 3.8 or later, and to have pytest",
        2 * 10,
        _around_files,
    ),
    "django": Runner(
        "django_run",
        "import os, sys; sys.exit(sys.version_info < (3, 5) or not os.path.isfile('tests/runtests.py'))",
        "`python3` there has to be 3.5 or later, and the repository to have tests/runtests.py",
        2 * 3 * 6,
        _around_labels,
    ),
    "sympy": Runner(
        "sympy_run",
        "import os, sys; sys.exit(sys.version_info < (3, 8) or not os.path.isfile('sympy/__init__.py'))",
        "`python3` there has to be 3.8 or later, and the repository to be SymPy's",
        2 * 4,
        _around_sorted_files,
    ),
}
