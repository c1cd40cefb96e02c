"""`python -m perf.paper`: its sections, the processes that measure them, and the two files that it writes."""

from __future__ import annotations

import ast
import base64
import importlib
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio

from perf import features
from perf.features import FEATURES, Feature, proof_of, report_of
from perf.harness import (
    Bar,
    Bars,
    CannotRun,
    Case,
    Line,
    Lines,
    Options,
    Report,
    Rows,
    Series,
    draw,
)
from perf.paper import __main__ as paper
from perf.paper import sections
from perf.paper.__main__ import measure_section
from perf.paper.sections import SECTIONS, Said, Section
from perf.paper.written import Finding, Measured, Run, to_html, to_markdown

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
NO_ENGINE = "there is no engine: run `make engine`"
BARS = Bars(
    title="bars <of> values",
    unit="ms",
    bars=[
        Bar(label="our value", value=1.5, high=2.0),
        Bar(label="their value", value=30.0, role="peer"),
        Bar(label="the floor", value=1.0, role="floor"),
        Bar(label="the printed value", value=42.0, role="paper"),
    ],
    logarithmic=True,
)
LINES = Lines(
    title="lines",
    x_label="nodes",
    y_label="times",
    lines=[
        Line(label="linear", points=[(1, 1), (2, 2)], role="floor"),
        Line(label="our line", points=[(1, 1), (2, 1.9)]),
    ],
    logarithmic=True,
)
FINDING = Finding(
    tables=[Rows(title="a table", headings=["case", "ms"], rows=[["a|b", "1.5"], ["<b>", "2"]])],
    figures=[BARS, LINES],
    caption=["What differs: `all` of it & more."],
    metrics={"a.b": 1.5},
)


REPORT = Report(
    title="", detail_metrics=FINDING.metrics, tables=FINDING.tables, figures=FINDING.figures, notes=FINDING.caption
)
RUNS: dict[str, Callable[[], Report]] = {}


async def measured(options: Options) -> Report:
    await trio.lowlevel.checkpoint()
    assert options.quick
    return RUNS["one"]()


def section_of(run: Callable[[], Report]) -> Section:
    RUNS["one"] = run
    return Section(name="one", title="Section one", paper="Table 0.", benchmark=f"{__name__}:measured")


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_every_section_names_a_benchmark_that_exists(section: Section):
    module, _, function = section.benchmark.partition(":")
    assert inspect.iscoroutinefunction(getattr(importlib.import_module(module), function))


def measured_one(**fields: object) -> Measured:
    base = Measured(name="one", title="Section one", paper="Table 0.", machine="a machine, load 1.0", took_s=2.0)
    return msgspec.structs.replace(base, **fields)


def run_of(*sections: Measured) -> Run:
    return Run(command="python -m perf.paper", began="today", machine="a machine", took_s=60.0, sections=list(sections))


def test_sections_have_names_of_their_own_and_say_what_the_paper_has():
    names = [section.name for section in SECTIONS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch("[a-z]+", name) for name in names)
    assert all(section.paper.endswith(".") for section in SECTIONS)


def test_a_figure_names_each_role_once_in_its_legend(tmp_path: Path):
    drawn = tmp_path / "figure.svg"
    assert draw([BARS, LINES], drawn)
    svg = drawn.read_text()
    for words in ("ours, measured in this run", "the paper's number", "the floor", "a peer, measured"):
        assert len(re.findall(f"<!-- {words}.* -->", svg)) >= 1, words
    assert draw([BARS, LINES], tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == svg
    assert not draw([], tmp_path / "none.svg")


def test_the_page_needs_no_other_file_and_its_texts_are_escaped():
    page = to_html(run_of(measured_one(finding=FINDING), measured_one(name="two", problem="there is no <engine>")))
    (picture,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert b"<svg" in base64.b64decode(picture)
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert "<td>&lt;b&gt;</td>" in page
    assert "<code>all</code> of it &amp; more." in page
    assert "there is no &lt;engine&gt;" in page
    assert "1 of 2 sections measured" in page


def test_markdown_has_every_table_caption_and_section_that_is_missing():
    text = to_markdown(run_of(measured_one(finding=FINDING), measured_one(name="two", problem="no Slurm")), "r.html")
    assert "| a\\|b | 1.5 |" in text
    assert "What differs: `all` of it & more." in text
    assert "[Plot](r.html#one)" in text
    assert "**Not measured:** no Slurm" in text
    assert text.count("Measured on: a machine, load 1.0") == 1


def test_a_table_has_as_many_cells_as_headings():
    with pytest.raises(ValueError, match="a table: a row has not 2 cells"):
        Rows(title="a table", headings=["a", "b"], rows=[["1"]])


def test_cases_of_another_benchmark_stand_beside_the_papers_numbers():
    series = [
        Series(case=Case(name="call", unit="us", floor="bare"), samples=[2000.0] * 3),
        Series(case=Case(name="bare", unit="us"), samples=[1000.0] * 3),
    ]
    report = Report(title="", series=series, more_metrics={"calls_per_s": 7.0}, notes=["a note"])
    section = Section(
        name="one",
        title="Section one",
        paper="Table 0.",
        benchmark="",
        of="calls",
        shown=[("call", "our call", "ours"), ("bare", "a bare call", "floor"), ("gone", "not measured here", "ours")],
        beside_ms={"the paper's call": 30.0},
        metrics={"calls_per_s": "calls a second", "missing": "never shown"},
        caption=["a caption"],
    )
    finding = section.finding_of(report)
    calls, more = finding.tables
    assert calls.rows[0] == ["our call", "ours", "3", "2", "2", "2", "2.00 x"]
    assert calls.rows[-1][:2] == ["the paper's call", "paper"]
    assert more.rows == [["calls a second", "7"]]
    assert [bar.value for bar in finding.figures[0].bars] == [2.0, 1.0, 30.0]
    assert finding.caption == ["a caption", "Not measured here: not measured here; never shown.", "a note"]


def test_the_process_of_a_section_writes_its_finding_or_what_is_missing(tmp_path: Path, monkeypatch):
    def no_engine() -> Report:
        raise CannotRun(NO_ENGINE)

    for run, said in ((lambda: REPORT, Said(finding=FINDING)), (no_engine, Said(cannot_run=NO_ENGINE))):
        monkeypatch.setattr(sections, "SECTIONS", (section_of(run),))
        assert sections.main(["one", str(tmp_path / "said.json"), "--quick"]) == 0
        assert msgspec.json.decode((tmp_path / "said.json").read_bytes(), type=Said) == said


async def test_a_section_whose_process_fails_or_has_no_time_says_so():
    with trio.fail_after(120):
        failed = await measure_section(section_of(lambda: REPORT), quick=True, limit_s=100)
        assert failed.failed
        assert failed.finding is None
        assert "exit code 2" in failed.problem
        assert "invalid choice: 'one'" in failed.problem
        slow = await measure_section(SECTIONS[0], quick=True, limit_s=0.01)
        assert (slow.failed, slow.finding) == (False, None)
        assert "was not done within" in slow.problem
        late = await measure_section(SECTIONS[0], quick=True, limit_s=-1)
        assert "used up by the sections before it" in late.problem


def test_one_command_writes_both_files_of_the_sections_chosen(tmp_path: Path, monkeypatch, capsys):
    asked: list[tuple[str, bool]] = []

    async def measured(section: Section, *, quick: bool, limit_s: float) -> Measured:
        await trio.lowlevel.checkpoint()
        asked.append((section.name, quick))
        assert 0 < limit_s <= paper.QUICK_S
        failed = section.name == "dapo"
        return measured_one(
            name=section.name, finding=None if failed else FINDING, failed=failed, problem="it broke" if failed else ""
        )

    monkeypatch.setattr(paper, "measure_section", measured)
    assert paper.main(["--quick", "--only", "shell", "features", "--out", str(tmp_path)]) == 0
    assert asked == [("features", True), ("shell", True)]
    assert "2 of 2 sections measured" in (tmp_path / "report.md").read_text()
    assert "`python -m perf.paper --quick --only" in (tmp_path / "report.md").read_text()
    assert paper.main(["--quick", "--only", "dapo", "--out", str(tmp_path)]) == 1
    assert "it broke" in (tmp_path / "report.html").read_text()
    assert "0 of 1 sections measured" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        paper.main(["--only", "nothing"])


# ------------------------------------------------------------------------------------------------- features


@pytest.mark.parametrize("test", [test for feature in FEATURES for test in feature.tests])
def test_every_test_that_proves_a_feature_exists(test: str):
    file, _, function = test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def junit(*cases: str) -> str:
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


PASSED = '<testcase classname="tests.unit.test_x" name="test_a[one]"/>'
FAILED = '<testcase classname="tests.unit.test_x" name="test_a[two]"><failure message="no"/></testcase>'
BROKEN = '<testcase classname="tests.unit.test_x" name="test_a[two]"><error message="no"/></testcase>'
SKIPPED = '<testcase classname="tests.unit.test_x" name="test_a[six]"><skipped message="no Apptainer"/></testcase>'
OTHER = '<testcase classname="tests.unit.test_x" name="test_ab"/>'


@pytest.mark.parametrize(
    ("results", "word"),
    [
        (junit(PASSED, OTHER), "yes (1 tests passed)"),
        (junit(PASSED, FAILED), "no: 1 of 2 tests failed"),
        (junit(PASSED, BROKEN), "no: 1 of 2 tests failed"),
        (junit(PASSED, SKIPPED), "not proven here: 1 skipped, 1 passed"),
        (junit(OTHER), "no: 1 of 1 tests failed"),
    ],
)
def test_a_cell_says_yes_only_if_all_of_its_tests_have_passed(results: str, word: str):
    feature = Feature(name="a", claim="Table 1", tests=["tests/unit/test_x.py::test_a"])
    assert proof_of(feature, results).word == word


def test_the_table_of_features_has_our_cells_from_the_tests_and_the_others_from_the_paper():
    proofs = [features.Proof(passed=2) for _ in FEATURES]
    proofs[1] = features.Proof(passed=1, skipped=1, reasons=["no Apptainer"])
    report = report_of(proofs)
    comparison, evidence = report.tables
    assert comparison.rows[-1] == [
        "prorl-trio",
        "yes (2 tests passed)",
        "not proven here: 1 skipped, 1 passed",
        "yes (2 tests passed)",
    ]
    assert comparison.rows[-2] == ["ProRL Agent", "yes", "yes", "yes"]
    assert evidence.rows[1][-1] == "no Apptainer"
    assert report.metrics()["features.proven"] == len(FEATURES) - 1


async def test_without_tests_features_cannot_be_proven(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(features, "ROOT", tmp_path)
    with pytest.raises(CannotRun, match="run it in a checkout"):
        await features.measure_features(Options(quick=True, json_path=None))
