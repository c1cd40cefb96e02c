"""The figures of `perf.race`, what all who race have to agree on, and the seconds of CPU of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from perf import race as racing
from perf.harness import CannotRun, Options, caption_of
from perf.peers.race_round import (
    CpuClock,
    RaceRecord,
    RaceRollout,
    answer_in,
    code_in,
    read_record,
    read_round,
    reward_of,
)
from perf.processes import tree_cpu
from perf.race import race_problems, serve_folder, with_tool_results
from perf.race_figures import Entrant, Lap, race_report

if TYPE_CHECKING:
    from pathlib import Path

ENTRANTS = [
    Entrant(name="node", title="our node", role="ours"),
    Entrant(name="trl", title="TRL"),
    Entrant(name="bare", title="the engine", role="floor"),
]
CHATML = "{% for message in messages %}{{ message['role'] + message['content'] + '<|im_end|>' }}{% endfor %}"


def lap(
    entrant: str, wall_s: float, *, tokens: int = 30, reward: float = 1.0, starts=(0.0, 0.0), machine_cpu_s=4.75
) -> Lap:
    """Rollouts that all end with the round."""
    rollouts = [
        RaceRollout(start_s=start_s, end_s=wall_s, turns=2, tool_calls=1, tokens=tokens, reward=reward)
        for start_s in starts
    ]
    record = RaceRecord(
        rollouts=rollouts, wall_s=wall_s, framework_cpu_s=0.5, sandboxes_cpu_s=0.25, machine_cpu_s=machine_cpu_s
    )
    return Lap(entrant=entrant, record=record, engine_cpu_s=4.0)


def test_rates_are_medians_over_rounds_with_the_lowest_and_highest():
    laps = [lap("node", wall_s) for wall_s in (10.0, 20.0, 5.0)]
    laps += [lap("trl", 20.0) for _ in range(3)] + [lap("bare", 5.0) for _ in range(3)]
    report = race_report(ENTRANTS, laps, ["a caption"])
    metrics = report.detail_metrics
    assert metrics["race.node.rollouts_per_min"] == 12
    assert (metrics["race.node.tokens_per_s"], metrics["race.node.tokens_per_s_min"]) == (6, 3)
    assert metrics["race.node.tokens_per_s_max"] == 12
    assert metrics["race.node_over_trl"] == 2
    assert metrics["race.node_over_bare"] == 0.5
    assert metrics["race.node.engine_cpu_s"] == 2.0, "of a rollout"
    speed, work = report.tables
    assert [row[0] for row in speed.rows] == ["our node", "TRL", "the engine"]
    assert speed.rows[0][3] == "6.0 (3.0 to 12.0)"
    assert speed.rows[0][5] == "50%"
    assert work.rows[1][-2:] == ["125", "0.00"]
    assert [bar.role for bar in report.figures[0].bars] == ["ours", "peer", "floor"]
    assert report.notes[-1] == "a caption"
    assert report.notes[0] == (
        "The node makes 2.00 times the rollouts, and 2.00 times the tokens, of TRL; in tokens their rounds overlap."
    )


def test_the_tail_is_left_out_of_the_steady_rate():
    begun_late = lap("node", 10.0, tokens=30, starts=(0.0, 5.0))
    assert begun_late.tokens_per_s == 6
    assert begun_late.steady_tokens_per_s == 3
    assert lap("node", 10.0).steady_tokens_per_s == 0


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (lap("trl", 10.0, reward=0.5), "Not the same work: the node's rollouts solve 100%, those of TRL 50%."),
        (lap("trl", 10.0, tokens=60), "Rollouts differ in length: 30.0 tokens through the node, 60.0 through TRL."),
    ],
)
def test_work_that_differs_is_said(theirs: Lap, said: str):
    report = race_report(ENTRANTS, [lap("node", 10.0), theirs, lap("bare", 5.0)], [])
    assert report.notes[1].startswith(said)
    assert report.notes[1].endswith("Compare tokens per second.")


def test_the_same_work_is_not_mentioned():
    assert len(race_report(ENTRANTS, [lap("node", 9.0), lap("trl", 10.0), lap("bare", 5.0)], []).notes) == 1


def test_strangers_on_the_machine_are_told():
    laps = [lap("node", 10.0, machine_cpu_s=9.75), lap("trl", 10.0), lap("bare", 5.0)]
    report = race_report(ENTRANTS, laps, [])
    assert report.detail_metrics["race.node.others_cores"] == 0.5
    assert report.notes[-1].startswith("The machine was not quiet: other programs took 0.00 to 0.50 cores of it")


@pytest.mark.parametrize(
    ("text", "code", "answer"),
    [
        ("```python\nprint(1)\n```", "print(1)\n", None),
        ("So:\n```py\na = 1\nprint(a)\n```\n```python\n2\n```", "a = 1\nprint(a)\n", None),
        ("```python\nprint(1)", None, None),
        ("```python\n\n```", None, None),
        ("\\boxed{3} \\boxed{ 4 }", None, "4"),
        ("```python\nprint(1)\n```\n\\boxed{1}", None, "1"),
    ],
)
def test_calls_and_answers_are_read_as_the_node_reads_them(text: str, code: str | None, answer: str | None):
    assert (code_in(text), answer_in(text)) == (code, answer)
    assert reward_of(text, answer or "1") == float(answer is not None)


def test_a_round_and_its_record_survive_the_way_to_a_peer(tmp_path: Path):
    race = racing.round_of("http://e", tmp_path, racing.QUICK, race_problems(0, 2), "bwrap")
    race.write(tmp_path / "round.json")
    assert read_round(tmp_path / "round.json") == race
    assert race.total == 8
    assert race.tasks[0].prompt[0] == {"role": "system", "content": "Use Python."}
    record = lap("trl", 10.0).record
    assert read_record(record.encoded()) == record
    assert msgspec.json.decode(msgspec.json.encode(record), type=RaceRecord) == record


def test_the_caption_has_the_amounts():
    assert caption_of("race", scale=racing.QUICK)[0] == "2 rounds of 16 tasks with 4 rollouts each, 12 at a time."


def test_no_two_rounds_share_a_question():
    rounds = [{problem.problem_id for problem in race_problems(number, 12)} for number in range(-1, 4)]
    assert len(set().union(*rounds)) == 60


def test_a_policys_folder_has_its_weights_and_renders_results(tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_text("old")
    (model / "config.json").write_text("{}")
    (model / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "new").write_text("new")
    policy = serve_folder(model, tmp_path / "new", tmp_path / "policy")
    assert (policy / "model.safetensors").read_text() == "new"
    assert (policy / "config.json").read_text() == "{}"
    assert "<tool_response>" in (policy / "chat_template.jinja").read_text()
    with pytest.raises(ValueError, match="in 2 places"):
        with_tool_results(CHATML + CHATML)


def test_the_cpu_of_a_tree_has_what_ended_and_what_is_alive():
    burn = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    clock, (_, below_s) = CpuClock(), tree_cpu(os.getpid())
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert tree_cpu(os.getpid())[1] - below_s >= 0.1
    own_s, children_s, machine_s = clock.read()
    assert children_s >= 0.1
    assert machine_s >= own_s + children_s - 0.05, "it counts in ticks"


async def test_what_is_missing_is_said_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = Options(quick=True, json_path=None)
    monkeypatch.setattr(racing, "engine_python", lambda: tmp_path / "none")
    with pytest.raises(CannotRun, match="run `make engine`"):
        await racing.measure_race(options)
    for name in ("engine_python", "model_dir"):
        monkeypatch.setattr(racing, name, lambda: tmp_path)
    monkeypatch.setattr(racing, "trainer_python", lambda _: tmp_path / "none")
    with pytest.raises(CannotRun, match="run `make trainers`"):
        racing.require_all()
    monkeypatch.setattr(racing, "trainer_python", lambda _: tmp_path)
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    with pytest.raises(CannotRun, match=r"TRL 1\.16\.0 is not installed; run: python -m perf\.peers setup trl"):
        racing.require_all()
    monkeypatch.setattr(racing, "peer_python", lambda _: tmp_path)
    monkeypatch.setattr(racing, "find_bubblewrap", lambda: None)
    with pytest.raises(CannotRun, match="there is no bubblewrap"):
        racing.require_all()
