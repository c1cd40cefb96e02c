from __future__ import annotations

import importlib.util
import io
import json
from typing import TYPE_CHECKING

import pytest
import trio
from rich.console import Console

from perf.harness import (
    CAPTIONS,
    CannotRun,
    Case,
    Options,
    Report,
    Series,
    caption_of,
    measure_interleaved,
    rows_of,
    run_benchmark,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path


def recorder(log: list[str], name: str) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        await trio.lowlevel.checkpoint()
        log.append(name)

    return run


def series(name: str, samples: list[float], **options: object) -> Series:
    return Series(case=Case(name=name, run=recorder([], name), **options), samples=samples)  # type: ignore[arg-type]


async def test_cases_are_interleaved_and_take_turns_at_being_first():
    log: list[str] = []
    cases = [Case(name=name, run=recorder(log, name)) for name in "abc"]
    measured = await measure_interleaved(cases, rounds=3, warm_up_rounds=0)
    assert "".join(log) == "abcbcacab"
    assert [one.case.name for one in measured] == ["a", "b", "c"]
    assert [len(one.samples) for one in measured] == [3, 3, 3]


async def test_warm_up_counts_nothing_and_rare_cases_run_in_it_too():
    log: list[str] = []
    cases = [
        Case(name="often", run=recorder(log, "o"), burst=2),
        Case(name="rare", run=recorder(log, "r"), every=4),
    ]
    often, rare = await measure_interleaved(cases, rounds=8, warm_up_rounds=4)
    assert (len(often.samples), len(rare.samples)) == (16, 2)
    assert (log.count("o"), log.count("r")) == (24, 6)


async def test_time_is_taken_in_the_unit_of_the_case(monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(1_000))
    monkeypatch.setattr("perf.harness.time.perf_counter", lambda: next(clock) * 0.002)
    cases = [Case(name="a", run=recorder([], "a")), Case(name="b", run=recorder([], "b"), unit="us")]
    in_ms, in_us = await measure_interleaved(cases, rounds=2, warm_up_rounds=1)
    assert in_ms.samples == pytest.approx([2, 2])
    assert in_us.samples == pytest.approx([2_000, 2_000])


async def test_a_case_may_time_itself():
    async def timed() -> float:
        await trio.lowlevel.checkpoint()
        return 0.25

    (measured,) = await measure_interleaved([Case(name="a", run=timed, self_timed=True)], rounds=2, warm_up_rounds=1)
    assert measured.samples == [250, 250]


async def test_a_case_without_a_run_cannot_be_measured():
    with pytest.raises(RuntimeError, match="not for"):
        await measure_interleaved([Case(name="a")], rounds=1, warm_up_rounds=0)


async def test_an_error_of_a_case_ends_the_measurement():
    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise RuntimeError("no daemon")

    with pytest.raises(RuntimeError, match="no daemon"):
        await measure_interleaved([Case(name="a", run=fail)], rounds=1, warm_up_rounds=0)


async def test_two_cases_of_one_name_are_a_mistake():
    cases = [Case(name="a", run=recorder([], "a"))] * 2
    with pytest.raises(ValueError, match="the same name"):
        await measure_interleaved(cases, rounds=1, warm_up_rounds=0)


def report() -> Report:
    return Report(
        title="a title",
        series=[
            series("ours", [3.0, 1.0, 2.0], floor="floor", max_p50=2, max_x_floor=3),
            series("floor", [0.5] * 100),
            series("quick", [float(number) for number in range(101)], unit="us", max_p50=51),
        ],
        more_metrics={"stalls": 7.0},
        detail_metrics={"trace.wrong": 0.0},
        at_least={"stalls": 8, "absent": 1},
        notes=["left out: a peer"],
    )


def test_metrics_are_flat_and_named_by_case_percentile_and_unit():
    assert report().metrics() == {
        "ours.p50_ms": 2.0,
        "ours.p95_ms": 2.9,
        "ours.p99_ms": 2.98,
        "ours.x_floor": 4.0,
        "floor.p50_ms": 0.5,
        "floor.p95_ms": 0.5,
        "floor.p99_ms": 0.5,
        "quick.p50_us": 50.0,
        "quick.p95_us": 95.0,
        "quick.p99_us": 99.0,
        "stalls": 7.0,
        "trace.wrong": 0.0,
    }


def test_missed_targets_are_said_with_limit_and_value():
    assert report().missed() == [
        "ours: p50 is 2 ms, to be below 2",
        "ours: is 4.00 times floor, to be below 3",
        "stalls: is 7, to be at least 8",
    ]


def test_the_table_shows_every_case_with_its_target():
    console = Console(width=120, file=io.StringIO())
    with console.capture() as capture:
        console.print(report().table().shown())
    text = capture.get()
    assert "a title" in text
    for shown in ("ours", "floor", "quick", "stalls", "4.00", "< 2 ms, < 3 x", "< 51 us", "95 us"):
        assert shown in text


def test_two_reports_become_one():
    joined = report().joined_with(Report(title="other", series=[series("more", [1.0])], notes=["a note"]))
    assert joined.title == "a title"
    assert joined.metrics() == report().metrics() | {"more.p50_ms": 1.0, "more.p95_ms": 1.0, "more.p99_ms": 1.0}
    assert joined.notes == ["left out: a peer", "a note"]
    assert joined.at_least == report().at_least


def test_a_plot_is_written_only_where_matplotlib_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "plot.png"
    if importlib.util.find_spec("matplotlib") is not None:
        assert report().write_plot(path)
        assert path.read_bytes().startswith(b"\x89PNG")
        path.unlink()
    monkeypatch.setattr("perf.harness.importlib.util.find_spec", lambda name: None)
    assert not report().write_plot(path)
    assert not path.exists()


def test_the_command_line_of_every_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    seen: list[Options] = []

    async def benchmark(options: Options) -> Report:
        await trio.lowlevel.checkpoint()
        seen.append(options)
        return report()

    json_path = tmp_path / "new" / "out.json"
    assert run_benchmark(benchmark, ["--quick", "--json", str(json_path)]) == 0
    assert run_benchmark(benchmark, []) == 0
    assert seen == [Options(quick=True, json_path=json_path), Options(quick=False, json_path=None)]
    assert run_benchmark(benchmark, ["--plot", str(tmp_path / "plot.svg")]) == 0
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
    assert json.loads(json_path.read_text()) == report().metrics()
    printed = capsys.readouterr().out
    assert "a title" in printed
    assert "missed: ours: is 4.00 times floor" in printed
    assert "left out: a peer" in printed
    assert "measured on: " in printed


def test_a_benchmark_that_cannot_run_here_ends_with_what_to_do():
    async def benchmark(_options: Options) -> Report:
        await trio.lowlevel.checkpoint()
        raise CannotRun("there is no engine here: run `make engine`")

    with pytest.raises(SystemExit, match="run `make engine`"):
        run_benchmark(benchmark, [])


def test_a_table_has_a_row_for_each_key_and_a_column_for_each_function():
    rows = rows_of("squares", [2, 3], {"n": str, "n * n": lambda n: f"{n * n}"})
    assert rows.headings == ["n", "n * n"]
    assert rows.rows == [["2", "4"], ["3", "9"]]


def test_a_column_may_be_a_text_with_the_metrics_of_its_key():
    metrics = {"fleet.1.times": 1.0, "fleet.1.low": 0.5, "fleet.2.times": 1.9, "other.1.times": 7.0}
    rows = rows_of("fleets", [1, 2], {"times": "{times:.1f} x", "lowest": "{low:.0%}"}, metrics=metrics, of="fleet")
    assert rows.rows == [["1.0 x", "50%"], ["1.9 x", ""]]


def test_a_caption_has_values_in_its_braces_and_no_empty_paragraphs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(CAPTIONS, "speed", ["{scale.quick} of {metrics[a.b]:.1f}", "{more}"])
    options, metrics = Options(quick=True, json_path=None), {"a.b": 1.25}
    assert caption_of("speed", scale=options, metrics=metrics, more="") == ["True of 1.2"]
    assert caption_of("speed", scale=options, metrics=metrics, more="or so")[1:] == ["or so"]


@pytest.mark.parametrize("nested", [False, True])
def test_ctrl_c_ends_a_benchmark_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], nested: bool):
    async def benchmark(_options: Options) -> Report:
        await trio.lowlevel.checkpoint()
        raise BaseExceptionGroup("of a nursery", [KeyboardInterrupt()]) if nested else KeyboardInterrupt

    assert run_benchmark(benchmark, ["--json", str(tmp_path / "figures.json")]) == 130
    assert capsys.readouterr().err == "ended by Ctrl-C: nothing is reported, nothing was written\n"
    assert not list(tmp_path.iterdir())


def test_help_shows_the_benchmarks_own_words(capsys: pytest.CaptureFixture[str]):
    from perf import tools

    with pytest.raises(SystemExit) as exit_info:
        run_benchmark(tools.benchmark, ["--help"])
    assert exit_info.value.code == 0
    assert "measures a bare pty" in capsys.readouterr().out
