"""The parts of `prorl-trio learn` beside its trainer: the record, the curve, the terminal, the engine's load."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest
import trio
from rich.console import Console

from prorl_launch.learn import describe, follow
from prorl_launch.learning.curve import draw_curve, make_figure
from prorl_launch.learning.engine_load import EngineLoad
from prorl_launch.learning.examples import write_examples
from prorl_launch.learning.record import (
    Ended,
    Evaluated,
    Evaluation,
    EventLog,
    RunRecord,
    Settings,
    Shown,
    Stepped,
    StepRecord,
    read_record,
    summary_of,
    write_atomically,
)
from prorl_trio.types.models import ChatMessage, Trajectory, Turn
from support.fake_node import make_outcome, make_spec

SETTINGS = Settings(model="/models/tiny", steps=4, evaluate_every=2)


@pytest.mark.parametrize(
    ("sampled", "is_mastered"), [([], False), ([0.95, 0.5], False), ([0.5, 0.92], True), ([None], False)]
)
def test_what_is_solved_by_nearly_all_rollouts_of_the_last_step_is_mastered(sampled, is_mastered):
    steps = [step(number, reward_sampled=reward) for number, reward in enumerate(sampled, 1)]
    assert RunRecord(settings=SETTINGS, steps=steps).is_mastered() is is_mastered


def test_the_learning_rate_rises_and_falls():
    settings = Settings(model="/models/tiny", steps=18, learning_rate=1.0, rising_steps=3)
    rates = [settings.learning_rate_at(step) for step in range(1, 19)]
    assert rates == [0.25, 0.5, 0.75, *[1.0] * 6, *(left / 10 for left in range(9, 0, -1))]
    assert all(rate > 0 for rate in map(Settings(model="/models/tiny", steps=2).learning_rate_at, (1, 2)))


def step(number, **fields):
    given = {
        "step": number,
        "reward": 0.5,
        "reward_sampled": 0.3 + 0.1 * number,
        "informative_share": 0.4,
        "rollouts": 100 * number,
        "trained": 60,
        "tokens": 1500,
        "length": 25.0,
        "turns": 2.0,
        "staleness": {0: 4, 1: 6},
        "loss": 0.1,
        "gradient_norm": 2.0,
        "capped": 0.0,
        "wait_s": 10.0,
        "update_s": 20.0,
        "sync_s": 1.0,
        "engine_busy": 1.0,
        "engine_tokens_per_s": 100.0,
    }
    return StepRecord(**{**given, **fields})


def evaluation(number, reward):
    return Evaluation(
        step=number,
        greedy=reward,
        sampled=round(reward - 0.1, 6),
        by_family={"gain": reward, "loss": reward / 2},
        tool_share=1.0,
        length=24.0,
        gap=0.001 * (number + 1),
        gap_rollouts=24,
        failed=0,
        at_s=60.0 * number,
        rollouts=100 * number,
    )


def record():
    return RunRecord(
        settings=SETTINGS,
        steps=[step(1), step(2), step(3, wait_s=30.0, engine_busy=0.5, engine_tokens_per_s=20.0), step(4)],
        evaluations=[evaluation(0, 0.3), evaluation(2, 0.6), evaluation(4, 0.9)],
        wall_s=160.0,
    )


def test_the_summary_weighs_the_engine_by_the_time_that_steps_waited():
    figures = summary_of(record())
    assert figures["engine_busy"] == pytest.approx((3 * 10.0 + 30.0 * 0.5) / 60.0)
    assert figures["engine_tokens_per_s"] == pytest.approx((3 * 10.0 * 100.0 + 30.0 * 20.0) / 60.0)
    assert (figures["held_out_greedy_first"], figures["held_out_greedy_last"]) == (0.3, 0.9)
    assert (figures["held_out_sampled_first"], figures["held_out_sampled_last"]) == (0.2, 0.8)
    assert figures["gap_max"] == 0.005
    assert (figures["steps"], figures["rollouts"]) == (4, 400)
    assert figures["step_s"] == pytest.approx((3 * 31.0 + 51.0) / 4)


def test_a_run_that_has_not_begun_has_a_summary():
    figures = summary_of(RunRecord(settings=SETTINGS))
    assert figures["held_out_greedy_first"] is None
    assert figures["rollouts"] == 0


def test_a_record_forgets_what_came_after_its_checkpoint_and_is_read_as_it_was_written(tmp_path):
    whole = record()
    write_atomically(tmp_path / "curve.json", whole)
    read = read_record(tmp_path)
    assert read == whole
    read.cut(2)
    assert [each.step for each in read.steps] == [1, 2]
    assert [each.step for each in read.evaluations] == [0, 2]


def test_a_run_without_a_record_has_an_empty_one(tmp_path):
    write_atomically(tmp_path / "settings.json", SETTINGS)
    assert read_record(tmp_path) == RunRecord(settings=SETTINGS)


@pytest.mark.parametrize("cut", [0, 2, 4])
def test_the_curve_is_drawn_at_any_time_of_a_run(tmp_path, cut):
    part = record()
    part.cut(cut)
    draw_curve(part, tmp_path)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]


def test_no_title_of_the_curve_is_cut_off():
    whole = record()
    whole.summary["engine_busy"] = 1.0
    figure = make_figure(whole)
    figure.draw_without_rendering()
    for ax in figure.axes:
        title = ax.title.get_window_extent()
        assert figure.bbox.x0 <= title.x0, ax.get_title()
        assert title.x1 <= figure.bbox.x1, ax.get_title()
        assert title.width <= ax.get_window_extent().width, ax.get_title()


def test_each_event_has_a_line_with_what_people_look_for():
    assert describe(Shown(step=3, of=12, loss=0.5)).plain == "  demonstrations  3/12  loss 0.500"
    assert "greedy 0.60  T = 1 0.50" in describe(Evaluated(record=evaluation(2, 0.6))).plain
    assert describe(Ended(step=3, why="all is solved")).plain == "ended after 3 updates: all is solved"
    line = describe(Stepped(record=step(2), of=4)).plain
    assert "step   2/4  reward 0.50  informative 40%" in line
    assert "31 s (rollouts 10 + training 20 + weights 1.0)" in line


async def test_events_are_shown_as_they_are_written_and_those_of_before_are_not(tmp_path, capsys):
    path, console = tmp_path / "events.jsonl", Console(width=200)
    log = EventLog(path)
    log.write(Shown(step=1, of=12, loss=0.5))
    seen = path.stat().st_size
    shown = ""
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow, path, console, seen)
            await trio.lowlevel.checkpoint()
            for number in (2, 3):
                log.write(Shown(step=number, of=12, loss=0.25))
                with path.open("ab") as file:
                    file.write(b'{"type":"sho')  # the next one, half written
                while f"{number}/12" not in shown:
                    await trio.sleep(0.05)
                    shown += capsys.readouterr().out
                with path.open("r+b") as file:
                    file.truncate(path.stat().st_size - len(b'{"type":"sho'))
            nursery.cancel_scope.cancel()
    assert shown.split() == ["demonstrations", "2/12", "loss", "0.250", "demonstrations", "3/12", "loss", "0.250"]


def test_examples_show_every_turn_and_what_failed(tmp_path):
    outcome = make_outcome(make_spec("a"))
    turns = [
        Turn(
            segment=0,
            completion_start=0,
            completion_end=4,
            text="```python\nprint(6 * 7)\n```",
            finish_reason="stop",
            tool_calls=[],
            observations=["42"],
            inference_s=0.1,
            tools_s=0.1,
            messages=[ChatMessage(role="user", content="What is 6 * 7?")],
        )
    ]
    trajectory = Trajectory(segments=outcome.trajectory.segments, turns=turns, stop_reason="finished")
    good = msgspec.structs.replace(outcome, trajectory=trajectory, tags={"family": "pairs"})
    failed = msgspec.structs.replace(outcome, trajectory=None, reward=None, error="no disk")
    write_examples(tmp_path / "examples.md", "Held-out problems", [good, failed])
    text = (tmp_path / "examples.md").read_text()
    assert text.startswith("# Held-out problems\n\n## pairs: reward 1.0\n\nPolicy version v0, ended by `finished`.")
    for part in ("**user**\n\n    What is 6 * 7?", "**assistant**\n\n    ```python", "**tool**\n\n    42"):
        assert part in text
    assert "No trajectory: no disk" in text


# ---------------------------------------------------------------- the engine's load


@contextmanager
def metrics_server(texts):
    """A server that answers with each text once, and then with the last one. Yields its address, and an event: all."""
    left, told = list(texts), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            text = left.pop(0) if len(left) > 1 else left[0]
            if len(left) == 1:
                told.set()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", told
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def metrics(running, tokens):
    return (
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {running}\n'
        f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}\n'
    )


def test_the_load_counts_looks_at_a_busy_engine_and_its_tokens(monkeypatch):
    monkeypatch.setattr("prorl_launch.learning.engine_load.INTERVAL_S", 0.02)
    texts = [metrics(4.0, "1.5e+03"), metrics(2.0, 1600.0), metrics(0.0, 1700.0), metrics(0.0, 1700.0)]
    with metrics_server(texts) as (url, told), EngineLoad(url) as load:
        assert told.wait(20)
    assert (load.busy, load.running, load.tokens) == (2, 6.0, 200.0)
    assert load.looks >= 3


def test_the_load_of_an_engine_that_does_not_answer_is_unknown(monkeypatch):
    monkeypatch.setattr("prorl_launch.learning.engine_load.INTERVAL_S", 0.02)
    with metrics_server([""]) as (url, _):
        pass
    with EngineLoad(url) as load:
        pass
    assert load.looks == 0
