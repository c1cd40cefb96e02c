from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from perf import trace
from perf.project_tree import write_project
from perf.trace import (
    FLOOR,
    FLOOR_AGAIN,
    OURS,
    Answered,
    Step,
    details_of,
    figures_of,
    load_trace,
    report_of,
    words_of,
)

if TYPE_CHECKING:
    from pathlib import Path

STEPS = [Step(kind="builtin", command="true", exit_code=0), Step(kind="read", command="cat a", exit_code=1)]


def answered(seconds: list[float], *, codes: tuple[int | None, ...] = (0, 1), word: str = "a") -> list[Answered]:
    return [Answered(elapsed_s, code, (word,)) for elapsed_s, code in zip(seconds, codes, strict=True)]


def test_the_recorded_trace_is_200_commands_of_many_kinds():
    steps = load_trace()
    assert len(steps) == 200
    kinds = {step.kind for step in steps}
    assert kinds == {"builtin", "list", "read", "search", "test", "edit", "git", "python", "pipe"}
    assert kinds == {step.kind for step in steps[: trace.QUICK_STEPS]}, "the quick part has some of each"
    text = "\n".join(step.command for step in steps)
    for program in ("ls", "cat", "grep -rn", "find", "sed -i", "python -c", "git diff", "pytest", "<<'EOF'", "export"):
        assert program in text
    assert {step.exit_code for step in steps} > {0, 1}


def test_the_project_is_always_the_same(tmp_path: Path):
    copies = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_project(tmp_path / name)
        root = tmp_path / name / "project"
        files = sorted(path for path in root.rglob("*") if path.is_file())
        copies.append([(path.relative_to(root), path.read_bytes(), path.stat().st_mtime) for path in files])
    assert copies[0] == copies[1]
    assert len(copies[0]) > 20


@pytest.mark.parametrize(
    "output",
    [
        "a b\r\nc\r\n",
        "c   a\tb",
        "\x1b[31ma\x1b[0m b \x1b]0;title\x07c",
        "\x1b[?2004ha b c\x1b[?2004l",
        "cat  list\na b c",
        "==== a b ____ c =====",
    ],
)
def test_words_leave_out_what_terminals_differ_in(output: str):
    assert words_of(output, root="/r", command="cat list") == ("a", "b", "c")


def test_words_leave_out_folders_and_clocks_and_keep_the_rest():
    words = words_of("/tmp/x-1/work 3 passed in 0.12s at 10:55", root="/tmp/x-1", command="pytest")
    assert words == tuple(sorted(["ROOT/work", "3", "passed", "in", "TIME", "at", "TIME"]))
    assert words_of("2 failed", root="/r", command="x") != words_of("3 failed", root="/r", command="x")


def test_overhead_is_the_median_of_differences_within_rounds():
    rounds = [answered([1.1, 2.0]), answered([5.1, 2.5]), answered([1.3, 9.0])]
    floors = [answered([1.0, 1.9]), answered([5.0, 2.1]), answered([1.0, 2.0])]
    figures = figures_of(STEPS, rounds, floors)
    assert list(figures) == [0, 1]
    assert [one.overhead_s for one in figures.values()] == pytest.approx([0.1, 0.4])
    assert [one.elapsed_s for one in figures.values()] == pytest.approx([1.3, 2.5])
    assert [one.first_s for one in figures.values()] == [1.1, 2.0]
    assert details_of(STEPS, {OURS: figures})["trace.ours.overhead_p50_ms"] == pytest.approx(250)


@pytest.mark.parametrize(
    "bad",
    [
        answered([1.0, 1.0], codes=(0, 0)),
        answered([1.0, 1.0], codes=(0, None)),
        [*answered([1.0, 1.0])[:1], Answered(1.0, 1, ("other",))],
        answered([1.0, 1.0])[:1],
    ],
    ids=["exit code", "no exit code", "output", "no answer"],
)
def test_a_wrong_answer_counts_for_nothing(bad: list[Answered]):
    floors = [answered([1.0, 1.0])] * 2
    figures = figures_of(STEPS, [bad], floors)
    assert list(figures) == [0]
    if len(bad) == 2:
        assert list(figures_of(STEPS, [answered([1.0, 1.0]), bad], floors)) == [0], "wrong in one round is wrong"


def test_a_floor_that_differs_from_the_record_excludes_the_step_for_all():
    floors = [answered([1.0, 1.0], codes=(0, 0))]
    assert list(figures_of(STEPS, [answered([1.0, 1.0], codes=(0, 0))], floors)) == [0]


def test_the_report_compares_on_what_both_got_right():
    floors = [answered([0.01, 0.02])]
    figures = {
        FLOOR: figures_of(STEPS, floors, floors),
        OURS: figures_of(STEPS, [answered([0.012, 0.026])], floors),
        FLOOR_AGAIN: figures_of(STEPS, [answered([0.0105, 0.0205])], floors),
        "tmux": figures_of(STEPS, [answered([0.61, 9.0], codes=(0, None))], floors),
    }
    report = report_of(STEPS, figures, {"swerex": "SWE-ReX is not installed"})
    metrics = report.metrics()
    assert metrics["trace.tmux_over_ours"] == pytest.approx(0.6 / 0.002)
    assert metrics["trace.tmux_over_ours_whole"] == pytest.approx(0.61 / 0.012, rel=1e-3)
    assert metrics["trace.ours_over_pty"] == pytest.approx(0.019 / 0.015, rel=1e-3)
    assert metrics["trace.ours_over_pty_total"] == pytest.approx(0.038 / 0.03, rel=1e-3)
    assert metrics["trace.ours.overhead_total_s"] == pytest.approx(0.008)
    assert metrics["trace.tmux.wrong"] == 1
    assert not [name for name in metrics if "swerex" in name]
    assert "left out: SWE-ReX is not installed" in report.notes
    assert "tmux answered wrong: 'cat a'" in report.notes
    assert all(isinstance(value, int | float) for value in metrics.values())


def test_noise_stands_in_for_an_overhead_that_is_smaller():
    floors = [answered([0.01, 0.02])]
    figures = {
        FLOOR: figures_of(STEPS, floors, floors),
        OURS: figures_of(STEPS, [answered([0.009, 0.02])], floors),
        FLOOR_AGAIN: figures_of(STEPS, [answered([0.012, 0.022])], floors),
        "tmux": figures_of(STEPS, [answered([0.41, 0.42])], floors),
    }
    metrics = report_of(STEPS, figures, {}).metrics()
    assert metrics["trace.noise_total_s"] == pytest.approx(0.004)
    assert metrics["trace.tmux_over_ours"] == pytest.approx(0.8 / 0.004)
