"""Rows of programming problems in Python: HumanEval, MBPP, BigCodeBench, APPS and their relatives."""

from __future__ import annotations

import ast
import json
from typing import Any, Final

from prorl_trio.tasks.sets.code import humaneval_payload, tests_of_pairs
from prorl_trio.tasks.sets.fields import Fields, RowError, kind_of
from prorl_trio.types.models import TaskInstance

BIGCODEBENCH_TEST_TIMEOUT_S: Final = 60.0
MBPP_PROMPT: Final = """\
You are an expert Python programmer, and here is your task: {text}

Your code should pass these tests:

```python
{tests}
```"""
"""The prompt of Austin et al., 2021 (arXiv 2108.07732), without its examples: the tests name the function."""


def read_humaneval_row(fields: Fields, name: str) -> TaskInstance:
    """Return the instance for a row of HumanEval or HumanEval+: `check(candidate)` in `test` decides.

    Raises:
        RowError: `test` does not define `check`, or a field cannot be used.
    """
    prompt, entry_point, test = fields.text("prompt"), fields.text("entry_point"), fields.text("test")
    fields.ignore("canonical_solution", "task_id", "contract", "base_input", "plus_input", "atol")
    fields.finish()
    if not entry_point.isidentifier():
        fields.refuse(f"{entry_point[:40]!r} is no name of a Python function", "entry_point")
    if "check" not in _defined(test, fields, "test"):
        fields.refuse("it defines no function `check(candidate)`", "test")
    setup = next((code for code in (prompt, f"{prompt.rstrip()}\n    pass\n") if _is_python(code)), None)
    if setup is None:
        fields.refuse("it is not the beginning of a Python function", "prompt")
    return TaskInstance(
        instance_id=fields.label("task_id") or name,
        handler="code",
        payload=humaneval_payload(prompt, entry_point, test, setup),
    )


def read_mbpp_row(fields: Fields, name: str) -> TaskInstance:
    """Return the instance for a row of MBPP, its sanitized form or MBPP+.

    The prompt shows `test_list`, as the set's authors do, because only the tests name the function. These tests decide,
    or `test` if the row has it (MBPP+). Tests that create objects of a class of the solution run in its process, as
    kind `unittest`, because such objects cannot be passed to another process.

    Raises:
        RowError: the tests do not call a function of `code`, or a field cannot be used.
    """
    text = fields.text("text", "prompt")
    tests = fields.take("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(each, str) for each in tests):
        fields.refuse(f"it is {kind_of(tests)}, where a list of assert statements is needed", "test_list")
    code = fields.text("code", "canonical_solution") if "code" in fields or "canonical_solution" in fields else ""
    imports = fields.take("test_imports") or []
    setup = "\n".join([str(fields.take("test_setup_code") or ""), *map(str, imports)]).strip()
    decisive = [fields.text("test")] if "test" in fields else tests
    fields.ignore("task_id", "source_file", "challenge_test_list")
    fields.finish()
    used = {each.id for test in (setup, *tests, *decisive) for each in ast.walk(_parsed(test, fields, "test_list"))
            if isinstance(each, ast.Name)}  # fmt: skip
    defined = _defined(code, fields, "code")
    functions = [each for each, kind in defined.items() if each in used and kind == "function"]
    if not functions:
        fields.refuse("it defines no function that `test_list` calls", "code")
    graded: dict[str, Any] = {"kind": "assert", "functions": functions, "setup": setup, "tests": decisive}
    if any(kind == "class" and each in used for each, kind in defined.items()):
        graded = {"kind": "unittest", "code": _as_unittest(setup, decisive)}
    return TaskInstance(
        instance_id=fields.label("task_id") or name,
        handler="code",
        payload={"prompt": MBPP_PROMPT.format(text=text.strip(), tests="\n".join(tests)), "tests": graded},
    )


def read_bigcodebench_row(fields: Fields, name: str) -> TaskInstance:
    """Return the instance for a row of BigCodeBench: `instruct_prompt`, and the `unittest` cases in `test`.

    Raises:
        RowError: `test` lacks a test case, or a field cannot be used.
    """
    prompt = fields.text("instruct_prompt") if "instruct_prompt" in fields else fields.text("complete_prompt")
    test = fields.text("test")
    fields.ignore(
        "canonical_solution", "code_prompt", "complete_prompt", "doc_struct", "entry_point", "libs", "question", "q_idx"
    )
    found = fields.label("task_id")
    fields.finish()
    _parsed(test, fields, "test")
    tests = {"kind": "unittest", "code": test, "test_timeout_s": BIGCODEBENCH_TEST_TIMEOUT_S}
    return TaskInstance(instance_id=found or name, handler="code", payload={"prompt": prompt, "tests": tests})


def read_apps_row(fields: Fields, name: str) -> TaskInstance:
    """Return the instance for a row of APPS or TACO: programs, or calls if `input_output` contains a `fn_name`.

    Raises:
        RowError: tests are missing, the task has pictures, or a field cannot be used.
    """
    question = fields.text("question")
    stored = fields.take("input_output")
    tests = _decoded(stored)
    if not isinstance(tests, dict) or not {"inputs", "outputs"} <= tests.keys():
        fields.refuse("it is no JSON object with `inputs` and `outputs`", "input_output")
    starter = str(fields.take("starter_code") or "")
    if str(fields.take("picture_num") or "0") != "0":
        fields.refuse("the problem has pictures, which the policy cannot see", "picture_num")
    fields.ignore(
        "solutions", "raw_tags", "skill_types", "expected_auxiliary_space", "expected_time_complexity", "time_limit",
        "memory_limit",
    )  # fmt: skip
    found, family = fields.label("problem_id", "id"), fields.label("difficulty")
    fields.finish()
    how = (
        "Write the function that is asked for."
        if tests.get("fn_name")
        else "Read standard input, and print to standard output."
    )
    prompt = f"{question.strip()}\n\n{how}"
    if starter.strip():
        prompt = f"{prompt} Complete this:\n\n```python\n{starter}\n```"
    try:
        graded = tests_of_pairs(tests)
    except (ValueError, TypeError, KeyError) as exc:
        raise RowError("its `inputs` and `outputs` do not fit together", fields.spelled("input_output")) from exc
    return TaskInstance(
        instance_id=found or name, handler="code", payload={"prompt": prompt, "tests": graded}, family=family
    )


def _decoded(stored: Any) -> Any:
    try:
        return json.loads(stored) if isinstance(stored, str) else stored
    except (ValueError, RecursionError):
        return None


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _parsed(code: str, fields: Fields, field: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        fields.refuse("it is no Python 3 code", field)


def _defined(code: str, fields: Fields, field: str) -> dict[str, str]:
    """Return the functions and classes defined at a module's top level, by name."""
    return {
        each.name: "class" if isinstance(each, ast.ClassDef) else "function"
        for each in _parsed(code, fields, field).body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


def _as_unittest(setup: str, tests: list[str]) -> str:
    lines = ["import unittest", setup, "class TestCases(unittest.TestCase):"]
    for number, test in enumerate(tests):
        lines += [f"    def test_{number}(self):", *(f"        {line}" for line in test.splitlines())]
    return "\n".join(lines) + "\n"
