from __future__ import annotations

import json
from random import Random

import msgspec
import pytest
from click.testing import CliRunner

from prorl_trio.cli import main
from prorl_trio.config import BackendConfig, BudgetConfig, HealthConfig, LoadConfig, SandboxConfig, StagesConfig
from prorl_trio.simulation.config import (
    Distribution,
    EngineModel,
    FailureRates,
    SimulationConfig,
    WorkModel,
    load_simulation,
)
from prorl_trio.simulation.run import double_each, enough, resized, run_simulation, sweep
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import RetryPolicy

pytestmark = pytest.mark.timeout(60)


def always(value):
    return Distribution(value=value)


# Everything takes the same time, so that throughput can be worked out by hand.
PLAIN = WorkModel(
    turns=always(2),
    prompt_tokens=always(100),
    completion_tokens=always(100),
    observation_tokens=always(0),
    tool_s=always(2.0),
    sandbox_start_s=always(0.5),
    prepare_s=always(0.5),
    evaluation_s=always(1.0),
)
FAST = EngineModel(max_batch=1000, tokens_per_s=always(100), max_tokens_per_s=1e6, prefill_tokens_per_s=1e9)
BASE = SimulationConfig(jobs=80, work=PLAIN, engine=FAST, sandbox=SandboxConfig(max_warm=0))


def changed(config=BASE, **fields):
    return msgspec.structs.replace(config, **fields)


def test_the_same_seed_gives_the_same_figures_and_another_one_others():
    config = SimulationConfig(
        jobs=60,
        failures=FailureRates(sandbox_start=0.1, tool_call=0.01, completion=0.01, evaluation=0.1, handler=0.05),
        retry=RetryPolicy(max_attempts=2),
    )
    first = run_simulation(config)
    assert run_simulation(config) == first
    assert run_simulation(changed(config, seed=1)) != first
    assert first.failures
    assert first.retried


@pytest.mark.parametrize(
    ("stages", "engine", "bottleneck", "jobs_per_h"),
    [
        # RUN takes 1 + 2 + 1 s of each of 4 workers.
        (StagesConfig(init_workers=8, run_workers=4, eval_workers=8), FAST, "run_workers", 3600),
        # INIT takes 1 s of each of 2 workers, EVAL 1 s of one.
        (StagesConfig(init_workers=2, run_workers=64, eval_workers=8), FAST, "init_workers", 7200),
        (StagesConfig(init_workers=8, run_workers=64, eval_workers=1), FAST, "eval_workers", 3600),
        # 200 tokens a job, decoded at 200 a second by all together.
        (
            StagesConfig(init_workers=8, run_workers=16, eval_workers=8),
            msgspec.structs.replace(FAST, max_tokens_per_s=200.0),
            "engine_decode",
            3600,
        ),
        # One completion of 1 s at a time, two a job.
        (
            StagesConfig(init_workers=8, run_workers=8, eval_workers=8),
            msgspec.structs.replace(FAST, max_batch=1),
            "engine_batch",
            1800,
        ),
        # Room for one context of at most 400 tokens, and not for two of at least 200.
        (
            StagesConfig(init_workers=8, run_workers=8, eval_workers=8),
            msgspec.structs.replace(FAST, kv_tokens=399),
            "engine_batch",
            1800,
        ),
    ],
)
def test_throughput_is_what_the_bottleneck_allows(stages, engine, bottleneck, jobs_per_h):
    report = run_simulation(changed(stages=stages, engine=engine))
    assert report.jobs_per_h == pytest.approx(jobs_per_h, rel=0.12)
    assert report.completed == 80
    if engine.kv_tokens > 399:
        assert report.bottleneck == bottleneck


def test_engines_that_fail_and_are_watched_give_the_same_figures_too():
    """Both are out at times, and then many rollouts get a backend at the same moment."""
    config = SimulationConfig(
        jobs=40,
        stages=StagesConfig(init_workers=16, run_workers=32),
        engine=EngineModel(count=2, kv_tokens=30_000, max_batch=4, speeds=(0.2,)),
        backends=BackendConfig(health=HealthConfig(open_after_failures=1, close_after_successes=1)),
        failures=FailureRates(completion=0.05),
    )
    first = run_simulation(config)
    assert set(first.moves) == {"skew", "failure"}
    assert [run_simulation(config) == first for _ in range(2)] == [True, True]


LONG = msgspec.structs.replace(
    PLAIN, turns=always(8), prompt_tokens=always(1000), completion_tokens=always(200), tool_s=always(0.5)
)
# A turn takes 4 s, for 8 rollouts at once; on the first of three engines it takes 16 s.
UNEVEN = EngineModel(count=3, max_batch=8, tokens_per_s=always(50), max_tokens_per_s=400, speeds=(0.25,))


def test_rollouts_move_off_an_engine_that_is_slower_than_the_others():
    config = changed(jobs=120, work=LONG, engine=UNEVEN, stages=StagesConfig(init_workers=8, run_workers=48))
    still = run_simulation(changed(config, backends=BackendConfig(load=LoadConfig(interval_s=0))))
    moving = run_simulation(config)
    assert (still.completed, moving.completed) == (120, 120)
    assert still.moves == {}
    assert set(moving.moves) == {"skew"}
    assert moving.moves["skew"] >= 10
    assert moving.jobs_per_h > 1.1 * still.jobs_per_h


def test_fewer_rollouts_at_once_keep_their_prefixes_in_a_full_cache():
    engine = EngineModel(kv_tokens=30_000, prefill_tokens_per_s=2000, max_tokens_per_s=4000)
    config = changed(jobs=100, work=LONG, engine=engine, stages=StagesConfig(init_workers=8, run_workers=48))
    limits = [LoadConfig(max_kv_usage=usage) for usage in (0, 0.8)]
    blind, adaptive = (run_simulation(changed(config, backends=BackendConfig(load=load))) for load in limits)
    assert adaptive.prefix_hit_rate > 2 * blind.prefix_hit_rate
    assert adaptive.makespan_s < blind.makespan_s


def test_a_rollout_goes_on_elsewhere_when_its_engine_fails_it():
    config = changed(jobs=60, work=LONG, failures=FailureRates(completion=0.05))
    one = run_simulation(config)
    assert one.failures == {"inference": 60 - one.completed}
    assert one.failures["inference"] > 5
    two = run_simulation(changed(config, engine=msgspec.structs.replace(FAST, count=2)))
    assert (two.completed, set(two.moves)) == (60, {"failure"})


def test_only_more_of_the_bottleneck_helps():
    config = changed(stages=StagesConfig(init_workers=8, run_workers=4, eval_workers=8))
    base = run_simulation(config).jobs_per_h
    gain = {next(iter(one.setting)): one.report.jobs_per_h / base for one in double_each(config)}
    assert gain.pop("run_workers") == pytest.approx(2.0, rel=0.15)
    assert all(ratio == pytest.approx(1.0, abs=0.05) for ratio in gain.values()), gain


def test_the_gate_of_sandbox_starts_is_a_resource_of_its_own():
    work = msgspec.structs.replace(PLAIN, sandbox_start_s=always(4.0), prepare_s=always(0.0))
    sandbox = SandboxConfig(max_warm=0, max_concurrent_starts=2, max_concurrent_starts_per_image=2)
    stages = StagesConfig(init_workers=8, run_workers=64, eval_workers=8)
    report = run_simulation(changed(work=work, sandbox=sandbox, stages=stages))
    assert report.bottleneck == "sandbox_starts"
    assert report.jobs_per_h == pytest.approx(1800, rel=0.1)


def test_queue_waits_and_stages_are_those_of_the_real_pipeline():
    report = run_simulation(changed(jobs=4, stages=StagesConfig(init_workers=1, run_workers=1, eval_workers=1)))
    assert report.waits["init"].mean_s == pytest.approx(1.0)
    assert report.waits["run"].mean_s == pytest.approx(4.0)
    assert report.waits["eval"].mean_s == pytest.approx(1.0)
    assert report.waits["queued_run"].p95_s > 2.0
    assert report.makespan_s == pytest.approx(1 + 4 * 4 + 1, abs=0.1)


def test_the_prefix_of_a_job_is_read_once_while_the_cache_has_room_for_it():
    roomy = run_simulation(BASE)
    assert roomy.prefix_hit_rate == pytest.approx(200 / (100 + 200))
    stages = StagesConfig(init_workers=8, run_workers=64)
    tight = run_simulation(changed(stages=stages, engine=msgspec.structs.replace(FAST, kv_tokens=700, max_batch=2)))
    assert tight.prefix_hit_rate < roomy.prefix_hit_rate


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        ("sandbox_start", "sandbox"),
        ("tool_call", "sandbox"),
        ("completion", "inference"),
        ("evaluation", "evaluator"),
        ("handler", "handler"),
    ],
)
def test_a_failure_has_its_cause(failure, cause):
    report = run_simulation(changed(jobs=10, failures=FailureRates(**{failure: 1.0})))
    assert (report.completed, report.failures) == (0, {cause: 10})


def test_budgets_hold_in_simulated_time():
    report = run_simulation(changed(jobs=5, budgets=BudgetConfig(run_s=3.5)))
    assert report.failures == {"sandbox": 5}  # of the 3.5 s, 2 s went to the tool


def test_a_sweep_finds_what_is_enough():
    config = changed(stages=StagesConfig(init_workers=8, run_workers=1, eval_workers=4))
    tried = list(sweep(config, {"run_workers": [2, 16, 64], "eval_workers": [4, 8]}))
    assert [one.setting for one in tried][:3] == [
        {"run_workers": 2, "eval_workers": 4},
        {"run_workers": 2, "eval_workers": 8},
        {"run_workers": 16, "eval_workers": 4},
    ]
    assert enough(tried).report.jobs_per_h >= 0.95 * max(one.report.jobs_per_h for one in tried)
    with pytest.raises(ConfigError, match="1024 combinations"):
        list(sweep(config, {"run_workers": [1] * 32, "eval_workers": [1] * 32}))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"nope": 1}, "unknown field `nope`"),
        ({"work.nope": 1}, "unknown field `nope`"),
        ({"run_workers": 0}, r"`int` >= 1 - at `\$\.stages\.run_workers`"),
        ({"work.tool_s.value": 1}, "one of: value; p50 and p95; percentiles"),
        ({"engine.max_batch": "many"}, "Expected `int`"),
        ({"failures.completion": 2}, "must be a probability"),
        ({"engine.speeds": [1, 0]}, "speeds must be > 0"),
        ({"work.tool_s": {"percentiles": [[0, 1], [50, 2]]}}, "rise from 0 to 100"),
        ({"work.tool_s": {"percentiles": [[0, 1], [100, 0.5]]}}, "must not fall"),
    ],
)
def test_what_cannot_be_simulated_is_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        resized(SimulationConfig(), setting)


def test_distributions_have_the_percentiles_they_say():
    random = Random(0)
    lognormal = sorted(Distribution(p50=2.0, p95=10.0).draw(random) for _ in range(20_000))
    assert lognormal[10_000] == pytest.approx(2.0, rel=0.05)
    assert lognormal[19_000] == pytest.approx(10.0, rel=0.08)
    table = sorted(Distribution(percentiles=((0, 1), (50, 2), (100, 12))).draw(random) for _ in range(20_000))
    assert table[5_000] == pytest.approx(1.5, rel=0.05)
    assert table[15_000] == pytest.approx(7.0, rel=0.05)
    assert 1 <= table[0] <= table[-1] <= 12


def test_the_command(tmp_path):
    file = tmp_path / "sim.toml"
    file.write_text(
        "jobs = 20\n[stages]\nrun_workers = 2\neval_workers = 16\n[work]\nturns = { value = 2 }\n[engine]\ncount = 2\n"
    )
    assert load_simulation(file).engine.count == 2
    run = CliRunner().invoke
    shown = run(main, ["simulate", "--config", str(file), "--double"])
    assert shown.exit_code == 0, shown.output
    assert "the bottleneck: run_workers" in shown.output
    assert "engines = 4" in shown.output
    report = json.loads(run(main, ["simulate", "--config", str(file), "--json"]).stdout)
    assert report["completed"] == 20
    swept = run(main, ["simulate", "--config", str(file), "--sweep", "run_workers=2,4", "--set", "seed=3", "--json"])
    assert [one["setting"] for one in json.loads(swept.stdout)] == [{"run_workers": 2}, {"run_workers": 4}]
    swept = run(main, ["simulate", "--jobs", "9", "--sweep", "run_workers=2,4"]).output
    assert "enough: run_workers = 4; what limits then: run_workers, and more of it was not tried\n" in swept
    swept = run(main, ["simulate", "--jobs", "9", "--set", "run_workers=2", "--sweep", "engines=1,2"]).output
    assert "enough: " in swept
    assert "not tried" not in swept
    file.write_text("[work]\nnope = 1\n")
    assert run(main, ["simulate", "--config", str(file)]).exit_code == 1
    assert run(main, ["simulate", "--sweep", "x"]).exit_code == 2
    several = run(main, ["simulate", "--set", "run_workers=1,2"])
    assert (several.exit_code, "use --sweep" in several.output) == (2, True)
