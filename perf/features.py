"""The paper's comparison of features (Table 1), with each of our cells proven by tests that run now.

    python -m perf.features [--quick] [--json FILE]

The cells of other frameworks are copied from the paper. Ours are `yes` only if every named test has passed. A test that
is skipped here proves nothing.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from perf.harness import CannotRun, Report, Rows, caption_of, rows_of, run_benchmark, tell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.harness import Options

ROOT: Final = Path(__file__).parents[1]
WROTE_RESULTS: Final = (0, 1)
"""Exit codes of pytest: all tests passed, or some failed."""


class Feature(msgspec.Struct, frozen=True, kw_only=True):
    """A feature, and the tests that prove it: `FILE::FUNCTION`, with all their parameters.

    `claim` is its place in the paper, `column` whether it is a column of Table 1.
    """

    name: str
    claim: str
    tests: list[str]
    column: bool = False


class _Table(msgspec.Struct, frozen=True):
    others: list[list[str]]
    feature: list[Feature]


_TABLE: Final = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_Table)
FEATURES: Final = _TABLE.feature
PAPER_TABLE: Final = _TABLE.others


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a feature's tests in this run, with all their parameters; `reasons` explain skipped tests."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    reasons: list[str] = []

    @property
    def word(self) -> str:
        if self.failed:
            return f"no: {self.failed} of {self.passed + self.failed} tests failed"
        if self.skipped or not self.passed:
            return f"not proven here: {self.skipped} skipped, {self.passed} passed"
        return f"yes ({self.passed} tests passed)"


async def measure_features(options: Options) -> Report:
    """Run the tests, and make the tables from their results.

    Raises:
        CannotRun: the tests or pytest are missing.
    """
    del options  # quick runs have the same tests
    if not (ROOT / "tests").is_dir() or importlib.util.find_spec("pytest") is None:
        raise CannotRun("the tests are not here: run it in a checkout, with pip install 'prorl-trio[dev]'")
    tell(f"running the tests that prove {len(FEATURES)} features")
    with tempfile.TemporaryDirectory(prefix="pf-") as folder:  # short: sockets are in it
        junit = Path(folder, "junit.xml")
        ids = [test for feature in FEATURES for test in feature.tests]
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}"]
        argv += [f"--basetemp={folder}/t", *ids]
        done = await trio.run_process(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
        if done.returncode not in WROTE_RESULTS:
            raise RuntimeError(f"pytest ran no tests; its exit code is {done.returncode}")
        results = await trio.to_thread.run_sync(junit.read_text)
    return report_of([proof_of(feature, results) for feature in FEATURES])


def proof_of(feature: Feature, junit: str) -> Proof:
    """Read the results of a feature's tests from pytest's junit file. A missing test counts as failed."""
    by_test: dict[tuple[str, str], list[ET.Element]] = {}
    for case in ET.fromstring(junit).iter("testcase"):
        by_test.setdefault((case.get("classname", ""), case.get("name", "").partition("[")[0]), []).append(case)
    passed = failed = 0
    reasons = []
    for test in feature.tests:
        file, _, function = test.partition("::")
        results = by_test.get((file.removesuffix(".py").replace("/", "."), function), [])
        failed += not results
        for case in results:
            if (skip := case.find("skipped")) is not None:
                reasons.append(skip.get("message", ""))
            elif case.find("failure") is not None or case.find("error") is not None:
                failed += 1
            else:
                passed += 1
    return Proof(passed=passed, failed=failed, skipped=len(reasons), reasons=reasons)


def report_of(proofs: Sequence[Proof]) -> Report:
    """Return the tables of the proofs, in the order of `FEATURES`."""
    pairs = list(zip(FEATURES, proofs, strict=True))
    columns = [(feature, proof) for feature, proof in pairs if feature.column]
    comparison = Rows(
        title="Table 1 of the paper, with a row of ours",
        headings=["framework", *(feature.name for feature, _ in columns)],
        rows=[*PAPER_TABLE, ["prorl-trio", *(proof.word for _, proof in columns)]],
    )
    evidence = rows_of(
        "Features and the tests that prove them, as they ran for this report",
        pairs,
        {
            "feature": lambda pair: pair[0].name,
            "the paper has it in": lambda pair: pair[0].claim,
            "ours": lambda pair: pair[1].word,
            "tests": lambda pair: ", ".join(pair[0].tests),
            "skipped because": lambda pair: "; ".join(dict.fromkeys(pair[1].reasons)),
        },
    )
    sums = {name: float(sum(getattr(proof, name) for proof in proofs)) for name in ("passed", "failed", "skipped")}
    proven = sum(not proof.failed and not proof.skipped and proof.passed > 0 for proof in proofs)
    return Report(
        title="features, proven by tests",
        tables=[comparison, evidence],
        notes=caption_of("features"),
        detail_metrics={
            "features.proven": float(proven),
            **{f"features.tests_{name}": each for name, each in sums.items()},
        },
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(measure_features))
