from __future__ import annotations

import io
import re
import resource

import msgspec
import numpy as np
import pytest
from rich.console import Console

from prorl_trio.chat.format import ChatFormat
from prorl_trio.runs import to_columns
from prorl_trio.runs.recording import (
    OutcomeFile,
    RunInfo,
    length_of,
    read_outcomes,
    read_run_info,
    run_folder,
    summarise,
    write_json,
)
from prorl_trio.runs.report import (
    errors,
    group_table,
    outcome_list,
    summary_table,
    timing_line,
    token_lines,
    turn_table,
)
from prorl_trio.runs.transcript import render_trajectory
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import ChatMessage, Outcome, Segment, Timing, Trajectory, Turn
from support.fake_node import make_outcome, make_spec


def an_outcome(job_id="job", *, status="completed", reward=1.0, cause=None, trajectory=None):
    return Outcome(
        job_id=job_id, instance_id="i", group_id="g", status=status, reward=reward, cause=cause,
        error="" if cause is None else "went wrong", trajectory=trajectory, details={"answer": "4"},
        timing=Timing(run_s=2.0),
    )  # fmt: skip


def a_trajectory(tiny):
    prompt, sampled, observed = tiny.turn("question"), tiny.turn("2+2 is 4"), tiny.turn("tool says 4")
    ids = prompt + sampled + observed + sampled
    mask = [0] * len(prompt) + [1] * len(sampled) + [0] * len(observed) + [1] * len(sampled)
    turns = [
        Turn(
            segment=0, completion_start=start, completion_end=start + len(sampled), text="2+2 is 4",
            finish_reason="stop", tool_calls=[], observations=["tool says 4"], inference_s=1.0, tools_s=0.1,
        )
        for start in (len(prompt), len(ids) - len(sampled))
    ]  # fmt: skip
    segment = Segment.from_arrays(ids, [-0.5] * len(ids), mask, [])
    return Trajectory(segments=[segment], turns=turns, stop_reason="finished")


def test_the_file_is_valid_after_every_append(tmp_path):
    path = tmp_path / "trajectories.msgpack"
    with OutcomeFile(path) as file:
        for n in range(3):
            assert [outcome.job_id for outcome in read_outcomes(path)] == [str(m) for m in range(n)]
            file.append(an_outcome(str(n)))
    assert len(read_outcomes(path)) == 3
    assert len(msgspec.msgpack.decode(path.read_bytes())) == 3


def test_what_a_kill_cut_off_is_left_out_and_written_over(tmp_path):
    path = tmp_path / "trajectories.msgpack"
    outcomes = [an_outcome(str(n), trajectory=a_trajectory(make_tiny_model(tmp_path / str(n)))) for n in range(3)]
    with OutcomeFile(path) as file:
        file.append(outcomes[0])
        whole = path.read_bytes()
    following = msgspec.msgpack.encode(outcomes[1])
    for cut in range(0, len(following) + 1, 7):  # the count is written last
        path.write_bytes(whole + following[:cut])
        assert [outcome.job_id for outcome in read_outcomes(path)] == ["0"]
        with OutcomeFile(path, go_on=True) as file:
            file.append(outcomes[2])
        assert [outcome.job_id for outcome in read_outcomes(path)] == ["0", "2"]


@pytest.mark.parametrize("content", [b"", b"no msgpack", b"\xdd\x00\x00\x00\x01", b"\x90"])
def test_a_file_of_something_else_is_not_gone_on_with(tmp_path, content):
    path = tmp_path / "other"
    with pytest.raises(ConfigError, match="other"):
        OutcomeFile(path, go_on=True)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="other"):
        OutcomeFile(path, go_on=True)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "value",
    [
        [None, True, False, -1, 200, 70_000, 2**40, -200, -70_000, -(2**40), 1.5],
        {str(n): n for n in range(20)},
        [{"a" * n: b"b" * n} for n in (1, 40, 300, 70_000)],
        [list(range(70_000)), {str(n): None for n in range(70_000)}],
        [msgspec.msgpack.Ext(3, b"x" * n) for n in (1, 2, 4, 8, 16, 17, 300, 70_000)],
    ],
    ids=["numbers", "map", "texts", "long", "extensions"],
)
def test_the_length_of_a_value_is_that_of_its_encoding(value):
    encoded = msgspec.msgpack.encode(value)
    assert length_of(encoded + b"\xa1") == len(encoded)
    assert length_of(encoded[:-1]) is None
    assert length_of(b"\xc1") is None


@pytest.mark.parametrize("content", [b"", b"no msgpack", b"\xdd\x00\x00\x00\x01\x80", b"\x91\x81\xa6job_id\xa1\xff"])
def test_a_file_of_something_else_is_named(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="other"):
        read_outcomes(path)


def test_a_file_that_is_cut_within_what_it_counts_is_named_with_what_is_left_and_the_way_on(tmp_path):
    path = tmp_path / "trajectories.msgpack"
    with OutcomeFile(path) as file:
        for n in range(3):
            file.append(an_outcome(str(n)))
    path.write_bytes(path.read_bytes()[:-20])
    for use in (lambda: read_outcomes(path), lambda: OutcomeFile(path, go_on=True)):
        with pytest.raises(ConfigError, match=r"counts 3 outcomes, and 2 of them are whole.*copy the file again"):
            use()


def test_two_runs_in_one_second_get_folders_of_their_own(tmp_path):
    assert run_folder(tmp_path) != run_folder(tmp_path)


def test_the_summary_counts_what_it_says(tmp_path):
    tiny = make_tiny_model(tmp_path)
    outcomes = [
        an_outcome("a", trajectory=a_trajectory(tiny)),
        an_outcome("b", reward=0.0, trajectory=a_trajectory(tiny)),
        an_outcome("c", status="failed", reward=None, cause="sandbox"),
        an_outcome("d", status="timed_out", reward=None, cause="agent_budget"),
    ]
    summary = summarise(outcomes, wall_s=2.0)
    assert (summary.jobs, summary.completed, summary.failed, summary.cancelled, summary.timed_out) == (4, 2, 1, 0, 1)
    assert (summary.reward_mean, summary.turns_mean) == (0.5, 2.0)
    assert summary.tokens_per_s == 4 * len(tiny.turn("2+2 is 4")) / 2.0
    text = io.StringIO()
    Console(file=text, width=100).print(summary_table(summary, outcomes), outcome_list(outcomes))
    for expected in ("prefix breaks", "cause sandbox", "stopped: finished", "0.500"):
        assert expected in text.getvalue()


def test_groups_show_rewards_and_failures_side_by_side(tmp_path):
    trajectory = a_trajectory(make_tiny_model(tmp_path))
    mixed = [an_outcome(reward=reward, trajectory=trajectory) for reward in (1.0, 0.0, 0.0)]
    mixed.append(an_outcome(status="failed", reward=None, cause="sandbox"))
    lost = [an_outcome(status="timed_out", reward=None, cause="node")] * 2
    text = io.StringIO()
    Console(file=text, width=100).print(group_table([("What is 3 * 4?", mixed), ("lost", lost)] + [("x", lost)] * 39))
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    assert lines[0] == "41 groups; in 1 of them rewards differ"
    assert "What is 3 * 4? 1 0 0 - 0.33 0.47 3 finished, 1 failed: sandbox" in lines
    assert "lost - - - - 2 timed_out: node" in lines
    assert lines[-1] == "1 more groups"


def test_no_outcomes_is_a_summary_too():
    assert summarise([], 0.0).reward_mean is None


def test_failures_have_no_reward_and_are_told_the_most_frequent_first():
    outcomes = [an_outcome(str(n), status="failed", reward=None, cause="sandbox") for n in range(3)]
    outcomes += [msgspec.structs.replace(outcomes[0], error=f"{n} \x1b[2J [/b] " + "x" * 1000) for n in range(5)]
    summary = summarise(outcomes, 1.0)
    assert summary.reward_mean is None
    text = io.StringIO()
    Console(file=text, width=100).print(summary_table(summary, outcomes))
    assert "0.000" not in text.getvalue()
    lines = errors(outcomes)
    assert lines[0] == "3 x sandbox: went wrong"
    assert len(lines) == 3
    assert lines[1].startswith(r"1 x sandbox: 0 \x1b[2J [/b] xxx")
    assert max(map(len, lines)) < 420


def test_marks_and_colours_tell_sampled_tokens_tool_output_and_the_masked_prompt_apart(tmp_path):
    tiny = make_tiny_model(tmp_path)
    shown = render_trajectory(an_outcome(trajectory=a_trajectory(tiny)), ChatFormat.load(tmp_path))
    lines = [" ".join(line.split()) for line in drawn(shown).splitlines()]
    for line in (". question<|im_end|>", "> 2+2 is 4<|im_end|>", "| tool says 4<|im_end|>"):
        assert line in lines
    coloured = drawn(shown, color_system="standard")
    for code, said in (("1;32", "2+2 is 4"), ("36", "tool says 4"), ("2", "question")):
        assert f"\x1b[{code}m{said}" in coloured


def drawn(*parts, **how):
    text = io.StringIO()
    Console(file=text, width=120, force_terminal="color_system" in how, **how).print(*parts)
    return text.getvalue()


def test_log_probabilities_and_times_are_shown_by_turn_and_by_token(tmp_path):
    tiny = make_tiny_model(tmp_path)
    trajectory = a_trajectory(tiny)
    (segment,) = trajectory.segments
    sampled = np.flatnonzero(segment.loss_mask)
    logprobs = np.where(segment.loss_mask == 1, -0.25, 0.0)
    logprobs[sampled[0]] = -3.0
    segment = Segment.from_arrays(segment.token_ids, logprobs, segment.loss_mask, [])
    trajectory = msgspec.structs.replace(trajectory, segments=[segment])
    outcome = an_outcome(trajectory=trajectory)
    assert timing_line(outcome) == "init 0.00 s (queued 0.00), run 2.00 s (queued 0.00), eval 0.00 s (queued 0.00)"
    n = len(tiny.turn("2+2 is 4"))
    lines = drawn(turn_table(trajectory)).splitlines()
    assert lines[2].split() == ["1", "0", str(n), f"{-0.25 - 2.75 / n:.3f}", "-3.000", "stop", "0", "1.00", "0.10"]
    assert lines[3].split()[3:5] == ["-0.250", "-0.250"]
    tokens = token_lines(trajectory, ChatFormat.load(tmp_path)).plain.splitlines()[1:]
    assert len(tokens) == 2 * n
    assert tokens[0].split() == ["0", str(sampled[0]), str(segment.token_ids[sampled[0]]), "-3.0000", "'2'"]
    assert "'" not in token_lines(trajectory, None).plain
    assert f"{-0.25 - 2.75 / (2 * n):.3f}" in drawn(outcome_list([outcome]))


def test_without_the_model_the_turns_are_shown_as_text(tmp_path):
    tiny = make_tiny_model(tmp_path)
    text = drawn(render_trajectory(an_outcome(trajectory=a_trajectory(tiny)), None))
    assert "> 2+2 is 4" in text
    assert "| tool says 4" in text
    failed = render_trajectory(an_outcome(status="failed", reward=None, cause="node"), None)
    assert "no trajectory was recorded" in drawn(failed)


def two_agents(tiny):
    """A rollout with a sub-agent, whose segment shares the prompt with its parent."""
    first = a_trajectory(tiny)
    prompt, sampled = tiny.turn("question"), tiny.turn("I look")
    ids = prompt + tiny.turn("look there") + sampled
    mask = [0] * (len(ids) - len(sampled)) + [1] * len(sampled)
    of = {"parent": 0, "reason": "sub_agent", "shared": len(prompt)}
    second = Segment.from_arrays(ids, [-0.5] * len(ids), mask, [], **of)
    second = msgspec.structs.replace(second, agent="a1", agent_type="explorer")
    turn = msgspec.structs.replace(
        first.turns[0],
        segment=1,
        completion_start=len(ids) - len(sampled),
        completion_end=len(ids),
        text="I look",
        observations=[],
        messages=[ChatMessage(role="user", content="look there", name=None)],
    )
    return Trajectory(
        segments=[*first.segments, second], turns=[*first.turns, turn], stop_reason="finished", echoes={"exact": 1}
    )


def test_a_sub_agent_is_a_lane_of_its_own_that_says_where_it_comes_from(tmp_path):
    tiny = make_tiny_model(tmp_path)
    trajectory = two_agents(tiny)
    shared = len(tiny.turn("question"))
    lines = drawn(render_trajectory(an_outcome(trajectory=trajectory), ChatFormat.load(tmp_path))).splitlines()
    title = next(line for line in lines if "segment 1 of 2" in line)
    assert f"sub_agent of segment 0, whose first {shared} tokens it shares; by explorer a1" in title
    assert title.startswith("    segment")
    after = [line.rstrip() for line in lines[lines.index(title) + 1 :]]
    assert after[:3] == [f"    = {shared} tokens", "    | look there<|im_end|>", "    > I look<|im_end|>"]
    assert "echoes: 1 exact" in after[4]
    sampled = sum(int(segment.loss_mask.sum()) for segment in trajectory.segments)
    assert f"{sampled} sampled tokens delivered, 0 not" in after[4]


def test_what_was_said_is_shown_beside_what_the_engine_received(tmp_path):
    tiny = make_tiny_model(tmp_path)
    outcome = an_outcome(trajectory=two_agents(tiny))
    rows = [
        line.split("  ")
        for line in drawn(render_trajectory(outcome, ChatFormat.load(tmp_path), sides=True)).splitlines()
    ]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert ["said", "received by the engine", "sampled"] in cells
    assert ["tool says 4", "tool says 4<|im_end|>", "2+2 is 4"] in cells
    assert ["user: look there", "look there<|im_end|>", "I look"] in cells
    assert "tokens" in drawn(render_trajectory(outcome, None, sides=True))


@pytest.mark.parametrize("root", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, root):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{tmp_path / root}: cannot be written: Not a directory"):
        run_folder(tmp_path / root)


def test_a_disk_that_gets_full_leaves_what_was_written_before(tmp_path):
    """The file size limit makes the kernel take a part of what is written, as a full disk does."""
    path = tmp_path / "trajectories.msgpack"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with OutcomeFile(path) as file:
        file.append(an_outcome("first"))
        whole = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, limits[1]))
        try:
            with pytest.raises(ConfigError, match=rf"{path}: cannot be written: File too large"):
                file.append(an_outcome("second"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == whole
        file.append(an_outcome("third"))
    assert [outcome.job_id for outcome in read_outcomes(path)] == ["first", "third"]


def test_what_is_remembered_of_a_run(tmp_path):
    assert read_run_info(tmp_path) is None
    info = RunInfo(model="/m", tasks="gsm8k", started="now")
    write_json(tmp_path / "run.json", info)
    assert read_run_info(tmp_path) == info
    (tmp_path / "run.json").write_bytes(b'{"model": "\xff"}')
    with pytest.raises(ConfigError, match=r"run\.json does not describe a run"):
        read_run_info(tmp_path)
    with pytest.raises(ConfigError, match="none/x: cannot be written: No such file"):
        write_json(tmp_path / "none" / "x", info)


def test_what_a_policy_or_a_sender_wrote_is_shown_and_not_obeyed(tmp_path):
    tiny = make_tiny_model(tmp_path / "model")
    trajectory = a_trajectory(tiny)
    hostile = "\x1b[2J\x9b2J\a[/bold]"
    turn = msgspec.structs.replace(trajectory.turns[0], text=hostile, observations=[hostile])
    ids = tiny.turn(f"a\n\tb{hostile}")
    segment = Segment.from_arrays(ids, [-0.5] * len(ids), [1] * len(ids), [])
    trajectory = msgspec.structs.replace(trajectory, turns=[turn], segments=[segment])
    outcome = msgspec.structs.replace(
        an_outcome(hostile, status="failed", cause="node", trajectory=trajectory), error=hostile
    )
    for chat_format in (None, ChatFormat.load(tmp_path / "model")):
        text = drawn(render_trajectory(outcome, chat_format))
        assert not {"\x1b", "\x9b", "\a"} & set(text)
        assert r"\x1b[2J" in text
        assert "[/bold]" in text
    assert re.search(r"a\s*\n +b\\x1b", text)
    console = Console(file=io.StringIO(), width=200)
    console.print(outcome_list([outcome]))
    assert r"\x1b[2J\x9b2J\x07[/bold]" in console.file.getvalue()


def test_a_notebook_gets_outcomes_as_columns(tmp_path):
    whole = msgspec.structs.replace(make_outcome(make_spec("a", group_id="g"), tokens=8, reward=0.5), tags={"run": "7"})
    failed = msgspec.structs.replace(whole, job_id="b", reward=None, trajectory=None, tags={}, cause="sandbox")
    with OutcomeFile(tmp_path / "trajectories.msgpack") as file:
        file.append(whole)
        file.append(failed)
    columns = to_columns(read_outcomes(tmp_path))
    assert {len(column) for column in columns.values()} == {2}
    assert columns["job_id"].tolist() == ["a", "b"]
    assert columns["cause"].tolist() == ["", "sandbox"]
    assert columns["tag:run"].tolist() == ["7", ""]
    assert columns["tokens"].tolist() == [8, 0]
    assert columns["sampled_tokens"][0] == whole.trajectory.segments[0].loss_mask.sum()
    assert columns["reward"][0] == 0.5
    assert np.isnan(columns["reward"][1])
    assert columns["logprob_mean"].dtype == columns["run_s"].dtype == np.float64
    assert to_columns([])["turns"].tolist() == []
