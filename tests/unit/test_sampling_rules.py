"""The rules of sampling by themselves: bad input, tasks, admission, over-submission, distances, and their pace."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from prorl_trio.runs.collect import make_jobs
from prorl_trio.runs.evaluation.run import EvaluationPlan
from prorl_trio.sampling import GroupRules, JobTemplate, NothingToLearn
from prorl_trio.sampling.accounts import WINDOW, keep_latest, ks_distance
from prorl_trio.sampling.admission import capacity, expected_share, groups_wanted, keeps_deadlines, pick
from prorl_trio.sampling.opening import instance_source
from prorl_trio.sampling.sampler import GroupSampler
from prorl_trio.sampling.state import Advanced, Arrived, Opened, Taken
from prorl_trio.types.models import AgentProgram, SamplingParams, TaskInstance
from support.sampled import make_rollout, make_task


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"size": 1}, r"size must be >= 2, got 1: .* a rollout alone teaches nothing"),
        ({"groups_per_step": 0}, "groups_per_step must be >= 1"),
        ({"max_staleness": -1}, "max_staleness must be >= 0"),
        ({"ahead": 0.5}, r"ahead must be in \[1, 1000\]"),
        ({"ahead": float("nan")}, r"ahead must be in \[1, 1000\]"),
        ({"max_tries": 0}, "max_tries must be >= 1"),
        ({"patience_groups": 0}, "patience_groups must be >= 1"),
        ({"early_stop": "wait"}, "early_stop must be keep or cancel"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        GroupRules(**{"size": 8, "groups_per_step": 4, **rules})


def test_each_epoch_has_every_task_once_in_an_order_of_its_own():
    tasks = [make_task(n) for n in range(20)]
    source = instance_source(tasks, seed=3)
    epochs = [[source(epoch * 20 + n).instance_id for n in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(task.instance_id for task in tasks) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = instance_source(tasks, seed=3)
    assert [again(n).instance_id for n in (45, 3, 27)] == [source(n).instance_id for n in (45, 3, 27)]
    assert [instance_source(tasks, seed=4)(n).instance_id for n in range(20)] != epochs[0]
    assert instance_source(make_task, 0)(7) == make_task(7)


def test_capacity_is_that_of_areal():
    per_step, max_staleness = 4, 2
    for version in range(5):
        taken = version * per_step
        for ready in range(3):
            for running in range(9):
                areal = (max_staleness + version + 1) * per_step - (taken + ready) - running
                ours = capacity(
                    per_step=per_step,
                    max_staleness=max_staleness,
                    taken_here=0,
                    ready=ready,
                    running=running,
                )
                assert ours == areal


def test_the_formula_alone_would_let_slow_groups_get_stale():
    # B = 1, max_staleness 2: two slow groups of version 0 are overtaken at versions 0 and 1, and are both due at 2.
    assert not keeps_deadlines([2, 2], version=2, per_step=1, slots=1)
    # So the group of version 1 waits there until one of them is whole.
    assert pick([(3, 3)], [2, 2], k=1, version=1, per_step=1, slots=1) is None
    assert pick([(2, 1), (3, 3)], [2], k=1, version=1, per_step=1, slots=1) == [1]
    assert pick([(3, 3)], [2], k=1, version=1, per_step=1, slots=1) == [3]


def test_slow_groups_are_waited_for_before_they_get_stale():
    rules = GroupRules(size=2, groups_per_step=1, max_staleness=2, ahead=3.0)
    sampler = GroupSampler.begin("run", rules, "0")
    outstanding: dict = {}

    def end(slow):
        for job_id in [job_id for job_id in outstanding if slow == (job_id.split("-")[1] in ("g0", "g1"))]:
            right = job_id.split("-")[2] == "0"
            outcome = make_rollout(outstanding.pop(job_id), float(right), versions=[sampler.state.versions[0]])
            sampler.apply(Arrived(outcome, right))

    waited = []
    for step in range(1, 8):
        for _ in range(sampler.room()):
            effects = sampler.apply(Opened(make_task(sampler.state.next_group), JobTemplate()))
            outstanding |= {job_id: sampler.spec(job_id) for job_id, _ in effects.submit}
        end(slow=False)
        if (groups := sampler.choose(1)) is None:
            waited.append(step)
            end(slow=True)
            groups = sampler.choose(1)
        assert groups is not None
        sampler.apply(Taken(groups, confirms=True))
        (group,) = sampler.state.given[-1].groups
        assert int(sampler.state.versions[-1]) - int(group.submitted_version) <= 2
        sampler.apply(Advanced(str(step), confirms=True))
    assert waited == [2], "the two slow ones of version 0 are due at versions 1 and 2"


def test_over_submission_follows_the_share_of_informative_groups():
    assert expected_share([]) == 0.5
    assert expected_share([True] * 64) > 0.95
    assert expected_share([False] * 64) < 0.05
    assert groups_wanted(target=8, ready=0, running=0, share=0.5) == 16
    assert groups_wanted(target=8, ready=4, running=6, share=0.5) == 2
    assert groups_wanted(target=8, ready=9, running=0, share=0.5) == 0


def test_the_distance_is_that_of_kolmogorov_and_smirnov():
    assert ks_distance([1, 2, 3], [1, 2, 3]) == 0
    assert ks_distance([1, 2], [3, 4]) == 1
    assert ks_distance([1, 2, 3, 4], [3, 4, 5, 6]) == 0.5
    assert ks_distance([1, 1, 1, 2], [1, 2, 2, 2]) == 0.5  # ties
    assert ks_distance([], [1]) is None
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=200), rng.normal(0.5, size=300)
    slow = max(abs((first <= x).mean() - (second <= x).mean()) for x in (*first, *second))
    assert ks_distance(first, second) == pytest.approx(slow)
    window: list[float] = []
    for value in range(WINDOW + 10):
        keep_latest(window, value)
    assert (len(window), window[0]) == (WINDOW, 10)


def run_steps(rules, reward_of, steps, share_seen=None):
    """Take `steps` batches of what `reward_of(group, member)` gives, one rollout after another; return the sampler."""
    sampler = GroupSampler.begin("run", rules, "0")
    outstanding: dict = {}
    arrived = 0
    for step in range(1, steps + 1):
        while (groups := sampler.choose(rules.groups_per_step)) is None:
            if (trouble := sampler.trouble()) is not None:
                raise trouble
            for _ in range(sampler.room()):
                effects = sampler.apply(Opened(make_task(sampler.state.next_group), JobTemplate()))
                outstanding |= {job_id: sampler.spec(job_id) for job_id, _ in effects.submit}
            if share_seen is not None:
                share_seen.append(len(sampler.state.running))
            job_id = next(iter(outstanding))
            _, group, member, _ = job_id.split("-")
            reward = reward_of(int(group[1:]), int(member))
            sampler.apply(Arrived(make_rollout(outstanding.pop(job_id), reward), reward == 1.0))
            arrived += 1
        sampler.apply(Taken(groups, confirms=True))
        sampler.apply(Advanced(str(step), confirms=True))
    return sampler, arrived


@pytest.mark.parametrize(
    ("met", "staleness"),
    [
        ([["2"], ["2"]], 0),  # sampled anew: the group is older than any of its tokens
        ([["2"], ["1", "2"]], 1),  # one token of the older version is enough
        ([["0"], ["2"]], 2),  # begun under version 1, on an engine that had not got that yet
        ([["2"], ["else"]], 1),  # of a version that was never announced: not older than the group
        ([[], []], 1),  # nothing was sampled
    ],
)
def test_the_staleness_of_a_group_is_that_of_its_oldest_token(met, staleness):
    sampler = GroupSampler.begin("run", GroupRules(size=2, groups_per_step=1, max_staleness=2), "0")
    sampler.apply(Advanced("1", confirms=True))
    submitted = sampler.apply(Opened(make_task(0), JobTemplate())).submit
    sampler.apply(Advanced("2", confirms=True))
    for (job_id, _), versions in zip(submitted, met, strict=True):
        right = job_id == submitted[0][0]
        sampler.apply(Arrived(make_rollout(sampler.spec(job_id), float(right), versions=versions), right))
    sampler.apply(Taken(sampler.choose(1), confirms=True))
    (group,) = sampler.state.given[-1].groups
    assert (group.submitted_version, group.staleness) == ("1", staleness)


def test_more_groups_are_at_work_where_few_are_informative():
    rules = GroupRules(size=2, groups_per_step=4, max_staleness=8, ahead=1.0)
    seldom: list[int] = []
    often: list[int] = []
    run_steps(rules, lambda group, member: float(member == 0 and group % 4 == 0), 12, seldom)
    run_steps(rules, lambda group, member: float(member == 0), 12, often)
    assert np.mean(seldom[len(seldom) // 2 :]) > 2 * np.mean(often[len(often) // 2 :])


def test_a_shaped_reward_is_no_information():
    rules = GroupRules(size=4, groups_per_step=1, patience_groups=5)
    with pytest.raises(NothingToLearn, match="nothing is solved"):  # rewards differ, and none is correct
        run_steps(rules, lambda group, member: 0.1 * member, 1)
    plain = msgspec.structs.replace(rules, dynamic=False)
    sampler, _ = run_steps(plain, lambda group, member: 0.1 * member, 3)
    assert sampler.state.totals.trained_groups == 3
    assert sampler.state.totals.uninformative == 0


@pytest.mark.alone
def test_the_state_takes_ten_thousand_outcomes_a_second():
    rules = GroupRules(size=8, groups_per_step=64, max_staleness=1)
    best_s = float("inf")
    for _ in range(3):
        began_s = time.process_time()
        _, arrived = run_steps(rules, lambda group, member: float(member % 2), 8)
        best_s = min(best_s, (time.process_time() - began_s) / arrived)
    assert 1 / best_s > 10_000, f"{1 / best_s:.0f} outcomes per second of CPU, those that make them up included"


def test_an_agent_of_others_is_asked_for_by_each_kind_of_run():
    task = TaskInstance(instance_id="q", handler="math", payload={})
    plan = EvaluationPlan(
        evaluation_id="e", session_id="s", tasks="t", rollouts=1, ks=(1,), sampling=SamplingParams(), max_turns=3,
        agent="codex",
    )  # fmt: skip
    rollout = next(plan.rollouts_of([task]))
    (submitted,) = make_jobs([task], rollouts=1, sampling=SamplingParams(), max_turns=3, agent="codex")
    for spec in (JobTemplate(agent="codex").spec("j", "g", task), plan.job(task, rollout, "j"), submitted):
        assert spec.agent == AgentProgram(preset="codex")
    assert JobTemplate().spec("j", "g", task).agent is None
    assert msgspec.structs.replace(plan, agent="").job(task, rollout, "j").agent is None
