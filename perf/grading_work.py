"""The work of `perf.grading`: answers, solutions and patches whose verdicts are known."""

from __future__ import annotations

import base64
import importlib
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.config import ModelConfig, NodeConfig, SandboxConfig
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.tasks.grading import (
    AssertTests,
    FunctionCase,
    FunctionTests,
    OutputCase,
    OutputTests,
    UnitTests,
    grade_code,
)
from prorl_trio.tasks.handlers.shell.handler import ShellHandler
from prorl_trio.tasks.handlers.swe import SweHandler
from prorl_trio.types.models import JobSpec, TaskInstance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AsyncExitStack

    from prorl_trio.sandbox.host import SandboxHost
    from prorl_trio.tasks.grading import CodeTests

GRADE_TIMEOUT_S: Final = 120.0
STEM_REPEATS: Final = 100
"""Repetitions in a pass. These verdicts take a tenth of a millisecond each, too short to be timed."""

# ---------------------------------------------------------------- answers for the scorers


def _maths(rng: random.Random) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the payloads of a pass with their verdicts. The numbers are new in each pass, to avoid caches."""
    for _ in range(4):
        n, k, p = rng.randint(11, 9999), rng.randint(2, 97), rng.choice((3, 7, 11, 13))
        for gold, answer, right in (
            (f"{n}", f"{n}", True),
            (f"{n}", f"The answer is {n}.", True),
            (f"{n}", f"{n + 1}", False),
            (f"{n}", rf"\boxed{{{n}}}", True),
            (f"{n}", f"{n} dollars", True),
            (rf"\frac{{{n * p + 1}}}{{{p}}}", f"{n * p + 1}/{p}", True),
            (rf"\frac{{{n * p + 1}}}{{{p}}}", rf"\boxed{{\frac{{{n * p + 2}}}{{{p}}}}}", False),
            (rf"{k}\sqrt{{{p}}}", rf"\sqrt{{{k * k * p}}}", True),
            (rf"{k}\sqrt{{{p}}}", rf"{k + 1}\sqrt{{{p}}}", False),
            (rf"x^2-{k * k}", rf"(x-{k})(x+{k})", True),
            (rf"x^2-{k * k}", rf"(x-{k})(x+{k + 1})", False),
            (rf"({k},{n})", rf"\left({k}, {n}\right)", True),
            (rf"({k},{n})", rf"({n}, {k})", False),
            (rf"{k}, {n}", rf"{n}, {k}", True),
            (rf"[{k},{n})", rf"[{k}, {n}]", False),
            (rf"{n}\pi", rf"{n}\pi", True),
            (r"\text{even}", "even", True),
            (r"\text{even}", "odd", False),
        ):
            yield {"gold": gold, "answer": answer}, right


def _numbers(rng: random.Random) -> Iterator[tuple[dict[str, Any], bool]]:
    for _ in range(STEM_REPEATS):
        n = rng.randint(11, 999)
        for unit, answer, right in (
            ("m/s", f"{n} m/s", True),
            ("m/s", f"{n * 3.6:.4f} km/h", True),
            ("m/s", f"{n} m", False),
            ("J", rf"{n}\ \text{{J}}", True),
            ("J", f"{n / 1000:.6f} kJ", True),
            ("kJ/mol", f"{n * 2} kJ/mol", False),
            ("K", f"{n} K", True),
            ("", f"{n}", True),
            ("", f"about {n + n // 2}", False),
        ):
            yield {"grader": {"kind": "number", "answer": n, "unit": unit}, "answer": answer}, right


def _choices(rng: random.Random) -> Iterator[tuple[dict[str, Any], bool]]:
    for _ in range(STEM_REPEATS):
        n = rng.randint(11, 999)
        grader = {"kind": "choice", "choices": [f"{n * factor} kg of iron" for factor in (2, 3, 5, 7)], "answer": "C"}
        for answer, right in (
            ("C", True),
            ("The answer is C.", True),
            (f"C. {n * 5} kg of iron", True),
            (f"{n * 5} kg of iron", True),
            (r"\boxed{C}", True),
            ("B", False),
            (f"{n * 3} kg of iron", False),
            ("A or C", False),
        ):
            yield {"grader": grader, "answer": answer}, right


def _texts(rng: random.Random) -> Iterator[tuple[dict[str, Any], bool]]:
    for _ in range(STEM_REPEATS):
        name = "".join(rng.choices("abcdefghijklmnop", k=9))
        for answer, right in (
            (f"The {name}.", True),
            (f"the answer is {name}", True),
            (f"{name} cell", False),
            ("", False),
        ):
            yield {"grader": {"kind": "text", "answer": name}, "answer": answer}, right


class _Scored(NamedTuple):
    scorer: str
    payloads: Callable[[random.Random], Iterator[tuple[dict[str, Any], bool]]]


SCORED_CASES: Final = {
    "math": _Scored("prorl_trio.tasks.handlers.math_scorer:score", _maths),
    "stem.number": _Scored("prorl_trio.tasks.handlers.stem.scorer:score", _numbers),
    "stem.choice": _Scored("prorl_trio.tasks.handlers.stem.scorer:score", _choices),
    "stem.text": _Scored("prorl_trio.tasks.handlers.stem.scorer:score", _texts),
}
"""Cases for a scoring process; this process replaces it."""


class Pass(NamedTuple):
    """A pass of a case: CPU seconds of this process, number of verdicts, and number of correct ones."""

    cpu_s: float
    verdicts: int
    agree: int


def score(case: str, seed: int) -> Pass:
    """Return a pass of one of `SCORED_CASES`. Blocks."""
    scored = SCORED_CASES[case]
    module, _, name = scored.scorer.partition(":")
    scorer = getattr(importlib.import_module(module), name)
    payloads = list(scored.payloads(random.Random(seed)))
    began_s = time.process_time()
    verdicts = [scorer(payload)["equal"] for payload, _ in payloads]
    taken_s = time.process_time() - began_s
    agree = sum(verdict is right for verdict, (_, right) in zip(verdicts, payloads, strict=True))
    return Pass(taken_s, len(payloads), agree)


# ---------------------------------------------------------------- sandboxed grading

CODE_CASES: Final[dict[str, tuple[str, CodeTests]]] = {
    "code.output": (
        "print(2 * int(input()))",
        OutputTests(cases=[OutputCase(input=f"{n}\n", output=f"{2 * n}") for n in range(5)]),
    ),
    "code.function": (
        "def square(x):\n    return x * x",
        FunctionTests(function="square", cases=[FunctionCase(args=[n], result=n * n) for n in range(50)]),
    ),
    "code.assert": (
        "def add(x, y):\n    return x + y",
        AssertTests(functions=["add"], tests=[f"assert add({n}, 1) == {n + 1}" for n in range(20)]),
    ),
    "code.unittest": (
        "def clip(x):\n    return min(10, max(0, x))",
        UnitTests(
            code="import unittest\nclass TestCases(unittest.TestCase):\n"
            + "".join(
                f"    def test_{n}(self):\n        self.assertEqual(clip({n}), {min(n, 10)})\n" for n in range(20)
            )
        ),
    ),
}
SANDBOXED_CASES: Final = (*CODE_CASES, "swe.pytest", "shell")
"""Cases graded in their own sandboxes."""
_MODULE: Final = "def add(a, b):\n    return a - b\n"
_PATCH: Final = (
    "diff --git a/calc/__init__.py b/calc/__init__.py\n--- a/calc/__init__.py\n+++ b/calc/__init__.py\n"
    "@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
)
_TESTS: Final = "from calc import add\n\n\n" + "".join(
    f"def test_add_{n}():\n    assert add({n}, 1) == {n + 1}\n\n\n" for n in range(20)
)
_CHECK: Final = '#!/bin/bash\n[ "$(cat greeting.txt)" = hello ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n'


class Sandboxes:
    """A host of sandboxes, and the handlers that grade in them."""

    def __init__(self, host: SandboxHost, resources: Resources, layer: Path) -> None:
        self._host = host
        self._resources = resources
        self._layer = layer
        self._shell = ShellHandler()

    async def grade(self, case: str) -> bool:
        """Grade the correct work of one of `SANDBOXED_CASES`; return whether the verdict was correct."""
        with trio.fail_after(GRADE_TIMEOUT_S):
            if case in CODE_CASES:
                solution, tests = CODE_CASES[case]
                verdict = await grade_code(self._context("code", {}), solution, tests, SandboxSpec())
                return verdict.resolved
            return await (self._swe() if case == "swe.pytest" else self._in_shell())

    def _context(self, handler: str, payload: dict[str, Any]) -> RolloutContext:
        instance = TaskInstance(instance_id="i", handler=handler, payload=payload)
        spec = JobSpec(job_id="j", instance=instance)
        return RolloutContext(spec=spec, resources=self._resources, sandboxes=self._host)

    async def _swe(self) -> bool:
        tests = {
            "kind": "pytest",
            "arguments": ["tests/test_calc.py"],
            "fail_to_pass": [f"tests/test_calc.py::test_add_{n}" for n in range(20)],
            "pass_to_pass": [],
        }
        files = {"tests/test_calc.py": _TESTS}
        payload = {
            "problem_statement": "add subtracts",
            "test_files": files,
            "tests": tests,
            "layers": [str(self._layer)],
        }
        context = self._context("swe", payload)
        context.answer = base64.b64encode(_PATCH.encode()).decode()
        return (await SweHandler().eval(context)).reward == 1.0

    async def _in_shell(self) -> bool:
        files = {"/tests/test.sh": {"content": base64.b64encode(_CHECK.encode()).decode(), "mode": 0o755}}
        payload = {"steps": [{"instruction": "Write hello to greeting.txt.", "verifier": {"files": files}}]}
        await self._shell.prepare(self._resources)
        context = self._context("shell", payload)
        async with context.open_sandbox(self._shell.sandbox_spec(context)) as context.sandbox:
            await self._shell.init(context)
            await context.sandbox.bash("echo hello > greeting.txt", timeout_s=GRADE_TIMEOUT_S)
            return (await self._shell.eval(context)).reward == 1.0


def _write_layer(folder: Path) -> Path:
    """Write the repository of `swe.pytest` as a layer of a sandbox."""
    folder.chmod(0o755)
    layer = folder / "layer"
    for path, text in {"calc/__init__.py": _MODULE, "tests/test_calc.py": "def test_nothing():\n    pass\n"}.items():
        file = layer / "testbed" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return layer


async def open_sandboxes(stack: AsyncExitStack) -> Sandboxes:
    """Return a host of sandboxes, which ends with `stack`.

    Raises:
        ConfigError: neither Apptainer nor bubblewrap works here.
    """
    layer = _write_layer(Path(stack.enter_context(TemporaryDirectory(prefix="prorl-perf-"))))
    config = NodeConfig(model=ModelConfig(path="none"), sandbox=SandboxConfig(packages=("pytest",)))
    # Graders in sandboxes only use the configuration.
    resources: Any = Resources(config=config, chat_format=None, backends=None, scorers=None)  # type: ignore[arg-type]
    host = await stack.enter_async_context(open_sandbox_host(await choose_provider(config.sandbox)))
    return Sandboxes(host, resources, layer)
