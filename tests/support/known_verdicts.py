"""Small tasks of each handler with their right verdict, and a policy that solves them or does not, as it is told."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from prorl_trio.types.models import TaskInstance
from support.code_policy import call

if TYPE_CHECKING:
    from pathlib import Path

Answer = Literal["gold", "wrong"]

_CODE: Final = {
    "output": {"kind": "output", "cases": [{"input": f"{n}\n", "output": f"{2 * n}"} for n in range(3)]},
    "function": {"kind": "function", "function": "double", "cases": [{"args": [n], "result": 2 * n} for n in range(3)]},
    "assert": {
        "kind": "assert",
        "functions": ["double"],
        "setup": "",
        "code": "def check(double):\n    assert double(4) == 8\n",
        "tests": ["check(candidate)", "assert candidate(0.5) == 1"],
    },
    "unittest": {
        "kind": "unittest",
        "code": "import unittest\nclass TestCases(unittest.TestCase):\n"
        "    def test_number(self):\n        self.assertEqual(double(4), 8)\n"
        "    def test_text(self):\n        self.assertEqual(double('a'), 'aa')\n",
    },
}
SOLUTIONS: Final = {
    "gold": "def double(x):\n    return 2 * x\nif __name__ == '__main__':\n    print(double(int(input())))\n",
    "wrong": "def double(x):\n    return x\nif __name__ == '__main__':\n    print(double(int(input())))\n",
}
_MODULE: Final = "def double(x):\n    return x\n"
_CHANGED: Final = {"gold": "def double(x): return 2 * x", "wrong": "def double(x): return 3 * x"}
_TESTS: Final = "from calc import double\n\n\ndef test_double():\n    assert double(4) == 8\n"
# By what is built into the shell alone: of a program that the script starts, and that is killed, nobody learns.
_CHECK: Final = """\
#!/bin/sh
line=
read line < /home/agent/doubled.txt
if [ "$line" = 8 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
KINDS: Final = (*_CODE, "swe", "shared", "separate", "text", "number", "math")


class KnownTask(NamedTuple):
    """A task, and the reward that its answer earns."""

    instance: TaskInstance
    reward: float


def known_task(name: str, kind: str, answer: Answer, layer: Path) -> KnownTask:
    """Return a task of one of `KINDS`, which the policy gives that answer to. `layer` is a folder for `swe`'s files."""
    told = f"Double it. [{answer} {kind}]"
    handler, payload = _payload(kind, told, layer)
    plain = msgspec.json.decode(msgspec.json.encode(payload))
    return KnownTask(TaskInstance(instance_id=name, handler=handler, payload=plain), float(answer == "gold"))


def _payload(kind: str, told: str, layer: Path) -> tuple[str, dict[str, Any]]:
    if kind in _CODE:
        return "code", {"prompt": told, "tests": _CODE[kind]}
    if kind == "swe":
        # With a history, whose folders are removed first: not every overlay can do that.
        for path, text in (("calc.py", _MODULE), ("tests/test_calc.py", ""), (".git/refs/heads/old", "")):
            file = layer / "testbed" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        path, test = "tests/test_calc.py", "tests/test_calc.py::test_double"
        tests = {"kind": "pytest", "arguments": [path], "fail_to_pass": [test]}
        return "swe", {
            "problem_statement": told,
            "layers": [str(layer)],
            "test_files": {path: _TESTS},
            "tests": tests,
        }
    if kind in ("shared", "separate"):
        verifier = {"files": {"/tests/test.sh": {"content": _CHECK.encode()}}, "separate": kind == "separate"}
        step = {"instruction": told, "verifier": {**verifier, "artifacts": ["/home/agent/doubled.txt"]}}
        return "shell", {"steps": [step]}
    if kind == "math":
        return "math", {"question": told, "answer": "8"}
    grader = {"kind": "text", "answer": "eight"} if kind == "text" else {"kind": "number", "answer": 8, "unit": "m"}
    return "stem", {"question": told, "grader": grader, "tools": []}


def swe_patch(answer: Answer) -> bytes:
    """Return the difference that the policy makes of the repository of `swe`."""
    lines = _MODULE.splitlines()
    changed = f"+{_CHANGED[answer]}"
    hunk = "\n".join([f"@@ -1,{len(lines)} +1,1 @@", *(f"-{line}" for line in lines), changed])
    return f"diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n{hunk}\n".encode()


def policy(prompt: str) -> str:
    """Return the next turn: what writes the answer, until it is told that it is written; then the end."""
    found = re.search(r"\[(gold|wrong) (\w+)\]", prompt)
    assert found is not None, prompt
    answer, kind = found.groups()
    if kind in _CODE:
        return call("finish", answer=SOLUTIONS[answer])
    if kind in ("text", "number", "math"):
        right = {"text": "eight", "number": "800 cm", "math": "8"}[kind]
        return rf"\boxed{{{right if answer == 'gold' else '7'}}}"
    if "IS-WRITTEN" in prompt.rpartition("<tool_response>")[2]:
        return call("finish", answer="done")
    line, path = {
        "swe": (_CHANGED[answer], "/testbed/calc.py"),
        "shared": ("8" if answer == "gold" else "7", "/home/agent/doubled.txt"),
        "separate": ("8" if answer == "gold" else "7", "/home/agent/doubled.txt"),
    }[kind]
    return call("bash", command=f"echo '{line}' > {path} && echo IS-'WRITTEN'")
