"""The paper's comparison of features (Table 1), each cell of ours proven by tests that run now.

    python -m perf.features [--quick] [--json FILE]

The cells of other frameworks are the paper's word. Ours say `yes` only if every test that they name has passed; a test
that is skipped here proves nothing.
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

from perf.finding_report import report_finding
from perf.findings import CannotRun, Finding, Rows
from perf.harness import run_benchmark, tell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.harness import Options, Report

__all__ = ["FEATURES", "Feature", "Proof", "measure_features"]

ROOT: Final = Path(__file__).parents[1]
WROTE_RESULTS: Final = (0, 1)
"""Exit codes of pytest: all tests passed, or some failed."""


class Feature(msgspec.Struct, frozen=True, kw_only=True):
    """A feature, and the tests that prove it: `FILE::FUNCTION`, with all their parameters.

    `claim` is where the paper has it, `column` whether it is one of Table 1.
    """

    name: str
    claim: str
    tests: list[str]
    column: bool = False


FEATURES: Final = [
    Feature(
        name="Training-rollout decoupled",
        claim="Table 1",
        column=True,
        tests=[
            "tests/integration/test_node.py::test_a_trainer_that_comes_back_finds_its_outcomes",
            "tests/integration/test_any_trainer.py::test_a_loop_of_ones_own",
            "tests/integration/test_stranger_client.py::test_a_client_written_from_the_page_alone_gets_its_rollouts",
        ],
    ),
    Feature(
        name="Rootless sandbox",
        claim="Table 1",
        column=True,
        tests=[
            "tests/integration/test_sandbox_leaks.py::test_as_a_normal_user",
            "tests/integration/test_sandbox_escape.py::test_no_mounts_and_no_privileges",
        ],
    ),
    Feature(
        name="Scaffold-independent",
        claim="Table 1",
        column=True,
        tests=[
            "tests/integration/test_handler_example.py::test_the_handler_of_the_example",
            "tests/component/test_agent_dialogues.py::test_agents_that_are_asked_have_segments_of_their_own",
        ],
    ),
    Feature(
        name="Clients of the paper's HTTP interface work",
        claim="3.1",
        tests=["tests/integration/test_prorl_client.py::test_a_batch_as_its_trainers_run_one"],
    ),
    Feature(
        name="A failing stage gives a well-formed outcome",
        claim="3.2.1, 3.3.4",
        tests=["tests/component/test_pipeline.py::test_a_failure_is_data_with_its_cause_and_without_a_reward"],
    ),
    Feature(
        name="One sandbox cannot reach another, or the network",
        claim="3.2.2",
        tests=[
            "tests/integration/test_sandbox_escape.py::test_one_sandbox_cannot_reach_another",
            "tests/integration/test_sandbox_escape.py::test_no_network_not_even_loopback_or_abstract_sockets",
        ],
    ),
    Feature(
        name="LLM servers come and go while jobs run",
        claim="3.3.2",
        tests=["tests/integration/test_node.py::test_jobs_wait_for_a_backend_and_backends_come_and_go"],
    ),
    Feature(
        name="Token in, token out",
        claim="3.3.3",
        tests=["tests/integration/test_node.py::test_a_rollout_from_the_trainer_to_the_sandbox_and_back"],
    ),
    Feature(
        name="Time in queues is charged to no budget",
        claim="3.3.4",
        tests=["tests/component/test_pipeline.py::test_waiting_in_a_queue_is_not_charged_to_a_budget"],
    ),
    Feature(
        name="A cancelled job leaves nothing",
        claim="3.3.4",
        tests=["tests/integration/test_node.py::test_cancel_ends_the_sandbox_and_the_call"],
    ),
    Feature(
        name="A shutdown drains, and leaves no container",
        claim="3.3.4",
        tests=[
            "tests/integration/test_node.py::test_drain_lets_jobs_finish_and_takes_nothing_new",
            "tests/integration/test_node.py::test_a_second_signal_cancels",
        ],
    ),
]
PAPER_TABLE: Final = [
    ["SkyRL-Agent", "no", "no", "yes"],
    ["VeRL-Tool", "no", "no", "yes"],
    ["Agent Lightning", "no", "no", "no"],
    ["rLLM", "no", "no", "yes"],
    ["GEM", "no", "no", "yes"],
    ["ProRL Agent", "yes", "yes", "yes"],
]
CAPTION: Final = [
    "The rows of other frameworks, and that of ProRL Agent, are the paper's word; nothing of them was run here. A "
    "`yes` of ours is the result of the tests in the table below it, which ran for this report.",
    "What differs: the paper lists its features, and this table tests them. Those below Table 1's three columns are "
    "what the paper's section 3 claims of itself.",
]


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a feature's tests in this run, with all their parameters; `reasons` of those that were skipped."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    reasons: list[str] = []

    @property
    def word(self) -> str:
        """The cell."""
        if self.failed:
            return f"no: {self.failed} of {self.passed + self.failed} tests failed"
        if self.skipped or not self.passed:
            return f"not proven here: {self.skipped} skipped, {self.passed} passed"
        return f"yes ({self.passed} tests passed)"


async def measure_features(options: Options) -> Finding:
    """Run the tests, and make the tables of what they say.

    Raises:
        CannotRun: there are no tests here, or no pytest.
    """
    del options  # there are no fewer tests to run
    if not (ROOT / "tests").is_dir() or importlib.util.find_spec("pytest") is None:
        raise CannotRun("the tests are not here: run it in a checkout, with pip install 'prorl-trio[dev]'")
    tell(f"running the tests that prove {len(FEATURES)} features")
    with tempfile.TemporaryDirectory(prefix="pf-") as folder:  # short: sockets lie in it
        junit = Path(folder, "junit.xml")
        ids = [test for feature in FEATURES for test in feature.tests]
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}"]
        argv += [f"--basetemp={folder}/t", *ids]
        done = await trio.run_process(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
        if done.returncode not in WROTE_RESULTS:
            raise RuntimeError(f"pytest ran no tests; its exit code is {done.returncode}")
        results = await trio.to_thread.run_sync(junit.read_text)
    return finding_of([proof_of(feature, results) for feature in FEATURES])


def proof_of(feature: Feature, junit: str) -> Proof:
    """Read the results of a feature's tests out of pytest's junit file. A test that is not in it has failed."""
    passed = failed = skipped = 0
    reasons = []
    cases = list(ET.fromstring(junit).iter("testcase"))
    for test in feature.tests:
        file, _, function = test.partition("::")
        module = file.removesuffix(".py").replace("/", ".")
        results = [
            case
            for case in cases
            if case.get("classname") == module and case.get("name", "").partition("[")[0] == function
        ]
        failed += not results
        for case in results:
            if (skip := case.find("skipped")) is not None:
                skipped += 1
                reasons.append(skip.get("message", ""))
            elif case.find("failure") is not None or case.find("error") is not None:
                failed += 1
            else:
                passed += 1
    return Proof(passed=passed, failed=failed, skipped=skipped, reasons=reasons)


def finding_of(proofs: Sequence[Proof]) -> Finding:
    """Return the tables of the proofs, which are in the order of `FEATURES`."""
    columns = [(feature, proof) for feature, proof in zip(FEATURES, proofs, strict=True) if feature.column]
    comparison = Rows(
        title="Table 1 of the paper, with a row of ours",
        headings=["framework", *(feature.name for feature, _ in columns)],
        rows=[*PAPER_TABLE, ["prorl-trio", *(proof.word for _, proof in columns)]],
    )
    evidence = Rows(
        title="Features and the tests that prove them, as they ran for this report",
        headings=["feature", "the paper has it in", "ours", "tests", "skipped because"],
        rows=[
            [feature.name, feature.claim, proof.word, ", ".join(feature.tests), "; ".join(dict.fromkeys(proof.reasons))]
            for feature, proof in zip(FEATURES, proofs, strict=True)
        ],
    )
    return Finding(
        tables=[comparison, evidence],
        caption=CAPTION,
        metrics={
            "features.proven": float(
                sum(not proof.failed and not proof.skipped and proof.passed > 0 for proof in proofs)
            ),
            "features.tests_passed": float(sum(proof.passed for proof in proofs)),
            "features.tests_failed": float(sum(proof.failed for proof in proofs)),
            "features.tests_skipped": float(sum(proof.skipped for proof in proofs)),
        },
    )


async def features(options: Options) -> Report:
    """Table 1, as a benchmark on its own."""
    return report_finding("features, proven by tests", await measure_features(options))


if __name__ == "__main__":
    sys.exit(run_benchmark(features))
