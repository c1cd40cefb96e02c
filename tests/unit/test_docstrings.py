"""Docstrings open with a verb in the imperative, or with the noun of the thing: a stranger reads them one at a time."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPENING = re.compile(r"(What|Of|One|As|How|Whether|When|Where|Which|Who|Whose|Those|That)\b")
PRODUCT = ("prorl_trio", "sandbox_daemon", "ipc", "launch", "perf")


def modules():
    for path in sorted(path for package in PRODUCT for path in (ROOT / package).rglob("*.py")):
        yield str(path.relative_to(ROOT))


def docstrings(tree):
    """Yield those of modules, classes and functions, and the texts below variables."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield statement.lineno, text.strip()


@pytest.mark.parametrize("module", list(modules()))
def test_docstrings_open_with_a_verb_or_a_noun(module):
    found = [
        f"{module}:{line}: {text[:60]}"
        for line, text in docstrings(ast.parse((ROOT / module).read_text()))
        if OPENING.match(text)
    ]
    assert not found
