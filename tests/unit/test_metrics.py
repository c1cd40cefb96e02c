from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prorl_trio.observe.metrics import MAX_LABEL_VALUES, Metrics
from prorl_trio.observe.stall import LoopStalls
from prorl_trio.pipeline.observer import JobView
from prorl_trio.testing.fake_sandbox import FakeSandbox
from prorl_trio.tools import BashTool, ToolSet
from prorl_trio.types.models import Timing, ToolCall, ToolResult, Trajectory, Turn
from support.fake_node import make_outcome, make_spec


def view(job_id="job", **fields):
    defaults = {
        "job_id": job_id,
        "session_id": "trainer",
        "group_id": "",
        "instance_id": "i",
        "handler": "math",
        "priority": "train",
        "attempt": 1,
        "tags": {},
        "status": "run",
        "age_s": 3.0,
        "status_age_s": 1.0,
        "turns": 1,
        "last_progress_s": 0.0,
        "waiting_on": "",
        "stuck": False,
    }
    return JobView(**{**defaults, **fields})


def turn(calls=(), results=()):
    return Turn(
        segment=0,
        completion_start=2,
        completion_end=7,
        text="",
        finish_reason="stop",
        tool_calls=list(calls),
        observations=["Error"] * len(results),
        inference_s=0.2,
        tools_s=0.1,
        tool_results=list(results),
    )


def samples(metrics):
    content_type, body = metrics.render()
    assert content_type.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def value(metrics, name, **labels):
    return samples(metrics).get((name, tuple(sorted(labels.items()))))


def test_a_job_from_its_acceptance_to_its_end():
    metrics = Metrics()
    outcome = make_outcome(make_spec("job"), tokens=12, reward=0.5)
    (first,) = outcome.trajectory.segments
    broken = [msgspec.structs.replace(first, parent=0, reason=why) for why in ("compaction", "compaction", "retry")]
    trajectory = Trajectory(segments=[first, *broken], turns=[turn()], stop_reason="finished")
    timing = Timing(queued_init_s=0.3, init_s=0.02, queued_run_s=0.0, run_s=40.0)
    metrics.job_moved(view(), "queued", "")
    metrics.job_moved(view(), "init", "")
    metrics.turn_done(view(), turn())
    metrics.job_ended(view(), msgspec.structs.replace(outcome, trajectory=trajectory, timing=timing))
    assert value(metrics, "prorl_jobs_accepted_total", handler="math", priority="train") == 1
    assert value(metrics, "prorl_outcomes_total", handler="math", status="completed", cause="") == 1
    assert value(metrics, "prorl_turns_total", handler="math") == 1
    assert value(metrics, "prorl_tokens_total", kind="sampled") == 5
    assert metrics.totals() == {"jobs_ended": 1, "turns": 1, "tokens_sampled": 5}
    assert value(metrics, "prorl_tokens_total", kind="given") == 4 * 12 - 5
    assert value(metrics, "prorl_segment_breaks_total", reason="compaction") == 2
    assert value(metrics, "prorl_segment_breaks_total", reason="retry") == 1
    assert value(metrics, "prorl_reward_sum", handler="math") == 0.5
    assert value(metrics, "prorl_stage_duration_seconds_sum", stage="run") == 40
    assert value(metrics, "prorl_queue_wait_seconds_sum", stage="init") == 0.3
    assert value(metrics, "prorl_stage_duration_seconds_count", stage="eval") is None, "it never came there"
    assert value(metrics, "prorl_job_duration_seconds_sum", status="completed") == 3
    assert value(metrics, "prorl_turn_inference_seconds_sum") == 0.2


def test_early_stops_are_counted_with_what_came_too_late():
    metrics = Metrics()
    metrics.turn_done(view(), turn())
    metrics.turn_done(view(), msgspec.structs.replace(turn(), finish_reason="tool_call", dropped_tokens=3))
    assert value(metrics, "prorl_completions_total", finish_reason="stop") == 1
    assert value(metrics, "prorl_completions_total", finish_reason="tool_call") == 1
    assert value(metrics, "prorl_tokens_total", kind="dropped") == 3
    assert value(metrics, "prorl_tokens_total", kind="sampled") == 10


def test_a_failure_has_a_cause_and_no_reward():
    metrics = Metrics()
    outcome = make_outcome(make_spec("job"), reward=None)
    metrics.job_ended(
        view(), msgspec.structs.replace(outcome, status="failed", cause="sandbox", trajectory=None, reward=None)
    )
    assert value(metrics, "prorl_outcomes_total", handler="math", status="failed", cause="sandbox") == 1
    assert value(metrics, "prorl_reward_count", handler="math") is None


def test_tool_calls_are_told_apart_and_made_up_names_are_no_labels():
    def call(name, error=""):
        return ToolCall(name=name, arguments={}, raw="", error=error)

    metrics = Metrics()
    calls = [call("bash"), call("bash"), call("x" * 50), call("y", error="not JSON"), call("finish")]
    outcomes = ["ok", "error", "unknown", "malformed", "not_run"]
    metrics.turn_done(view(), turn(calls, [ToolResult(outcome=outcome) for outcome in outcomes]))
    counted = {labels: n for (name, labels), n in samples(metrics).items() if name == "prorl_tool_calls_total"}
    assert counted == {
        (("result", "ok"), ("tool", "bash")): 1,
        (("result", "error"), ("tool", "bash")): 1,
        (("result", "unknown"), ("tool", "")): 1,
        (("result", "malformed"), ("tool", "")): 1,
        (("result", "not_run"), ("tool", "")): 1,
    }


async def test_what_a_tool_printed_does_not_say_how_it_went():
    metrics, tools = Metrics(), ToolSet([BashTool()], max_observation_chars=1000)
    for command in ("echo Errors found: 0", "false", "echo [exit code 1]"):
        call = ToolCall(name="bash", arguments={"command": command}, raw="")
        observation = await tools.call(call, FakeSandbox("fake", {}), timeout_s=5)
        assert observation.text in ("Errors found: 0", "[exit code 1]")
        metrics.turn_done(view(), turn([call], [observation.result]))
    assert value(metrics, "prorl_tool_calls_total", tool="bash", result="ok") == 2
    assert value(metrics, "prorl_tool_calls_total", tool="bash", result="error") == 1


@pytest.mark.parametrize("name", ["drift_tokens", "undelivered_tokens"])
def test_tokens_that_went_wrong_are_counted(name):
    metrics = Metrics()
    outcome = make_outcome(make_spec("job"))
    metrics.job_ended(view(), outcome)
    assert value(metrics, f"prorl_{name}_total") == 0
    drifted = msgspec.structs.replace(outcome.trajectory, **{name: 2})
    metrics.job_ended(view(), msgspec.structs.replace(outcome, status="failed", trajectory=drifted))
    assert value(metrics, f"prorl_{name}_total") == 2


def test_turns_that_come_back_are_counted_by_how():
    metrics = Metrics()
    outcome = make_outcome(make_spec("job"))
    echoed = msgspec.structs.replace(outcome.trajectory, echoes={"exact": 3, "rewrite": 1})
    metrics.job_ended(view(), msgspec.structs.replace(outcome, trajectory=echoed))
    assert value(metrics, "prorl_echoes_total", how="exact") == 3
    assert value(metrics, "prorl_echoes_total", how="rewrite") == 1


def test_waits_for_sandboxes_are_told_apart():
    metrics = Metrics()
    for start, waited_s in (("cold", 0.4), ("warm", 0.002), ("warm", 0.003)):
        metrics.sandbox_opened("bubblewrap", start, waited_s)
    assert value(metrics, "prorl_sandbox_open_seconds_sum", provider="bubblewrap", start="cold") == 0.4
    assert value(metrics, "prorl_sandbox_open_seconds_count", provider="bubblewrap", start="warm") == 2
    assert value(metrics, "prorl_sandbox_open_seconds_bucket", provider="bubblewrap", start="warm", le="0.005") == 2


def test_the_number_of_label_values_is_bounded():
    metrics = Metrics()
    for n in range(MAX_LABEL_VALUES + 50):
        metrics.backend_called(f"http://backend-{n}", "completed", 0.1)
    calls = [key for key in samples(metrics) if key[0] == "prorl_backend_calls_total"]
    assert len(calls) == MAX_LABEL_VALUES + 1
    assert value(metrics, "prorl_backend_calls_total", backend="other", result="other") == 50


def test_what_is_watched_is_read_when_asked_for():
    metrics = Metrics()
    stages = {"init": {"busy": 1, "workers": 4}, "run": {"busy": 9, "workers": 32}}
    arena = {"used_bytes": 5, "spills_total": 7, "path": "/dev/shm/x", "full": False, "blocks": {"free": 3}}
    metrics.watch("stage", lambda: stages, "A stage.", label="stage")
    metrics.watch("arena", lambda: arena)
    arena["full"] = True
    assert value(metrics, "prorl_stage_busy", stage="run") == 9
    assert b"# HELP prorl_stage_busy A stage." in metrics.render()[1]
    assert value(metrics, "prorl_arena_used_bytes") == 5
    assert value(metrics, "prorl_arena_spills_total") == 7
    assert value(metrics, "prorl_arena_full") == 1
    assert value(metrics, "prorl_arena_blocks_free") == 3
    assert b"/dev/shm" not in metrics.render()[1]
    metrics.unwatch("arena")
    assert value(metrics, "prorl_arena_used_bytes") is None


def test_the_loop_and_the_process_are_shown():
    now = [0.0]
    stalls = LoopStalls(warn_s=1e9, clock=lambda: now[0])
    for seconds in (0.0001, 0.0001, 2.0):
        stalls.after_io_wait(0)
        now[0] += seconds
        stalls.before_io_wait(0)
    metrics = Metrics(node_id="n1", version="1.2")
    metrics.watch_loop(stalls)
    assert value(metrics, "prorl_loop_pass_seconds_count") == 3
    assert value(metrics, "prorl_loop_pass_seconds_bucket", le="0.1") == 2
    assert value(metrics, "prorl_loop_pass_seconds_bucket", le="+Inf") == 3
    assert 1.99 < value(metrics, "prorl_loop_pass_max_seconds") < 2.01
    assert value(metrics, "process_resident_memory_bytes") > 1e6
    assert value(metrics, "process_open_fds") > 0
    assert value(metrics, "prorl_node_info", node_id="n1", version="1.2") == 1


def test_two_nodes_in_a_process_share_nothing():
    first, second = Metrics(), Metrics()
    first.backend_called("u", "completed", 0.1)
    assert value(second, "prorl_backend_calls_total", backend="u", result="completed") is None


def test_no_job_id_reaches_a_label():
    metrics = Metrics()
    for n in range(3):
        metrics.job_moved(view(f"secret-job-{n}"), "queued", "")
        metrics.job_ended(view(f"secret-job-{n}"), make_outcome(make_spec(f"secret-job-{n}")))
    assert b"secret-job" not in metrics.render()[1]


def test_requests_of_programs_are_counted_by_dialect_and_result():
    metrics = Metrics()
    results = {("chat", "ok"): 3, ("messages", "overflow"): 1}
    metrics.watch_requests(lambda: results)
    assert value(metrics, "prorl_gateway_requests_total", dialect="chat", result="ok") == 3
    results["chat", "ok"] += 1
    assert value(metrics, "prorl_gateway_requests_total", dialect="chat", result="ok") == 4
    assert value(metrics, "prorl_gateway_requests_total", dialect="messages", result="overflow") == 1
