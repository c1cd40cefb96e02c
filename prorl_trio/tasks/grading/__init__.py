"""Grading in sandboxes that the agent has never touched, so that verdicts resist cheating.

`grade_code` runs tests on a module. A missing verdict is an error, never a reward of 0. A failure caused by the
candidate's own code is a failed test.
"""

from __future__ import annotations

from prorl_trio.tasks.grading.code import SOLUTION_PATH, grade_code
from prorl_trio.tasks.grading.code_tests import (
    AssertTests,
    CodeTests,
    FunctionCase,
    FunctionTests,
    OutputCase,
    OutputTests,
    UnitTests,
)
from prorl_trio.tasks.grading.compare import Tolerance
from prorl_trio.tasks.grading.verdict import TestResult, Verdict

__all__ = [
    "SOLUTION_PATH",
    "AssertTests",
    "CodeTests",
    "FunctionCase",
    "FunctionTests",
    "OutputCase",
    "OutputTests",
    "TestResult",
    "Tolerance",
    "UnitTests",
    "Verdict",
    "grade_code",
]
