"""TRL never has a reason to throw a row away: its loader, played step by step over the sampler's state machine."""

from __future__ import annotations

import queue
from random import Random
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_trio.integrations.trl import async_worker
from prorl_trio.integrations.trl.async_worker import RolloutWorker, group_rules, rows_per_update
from prorl_trio.sampling.rules import JobTemplate
from prorl_trio.sampling.sampler import GroupSampler
from prorl_trio.sampling.state import Advanced, Arrived, Opened, Taken
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import Outcome, PolicySpan, Segment, TaskInstance, Timing, Trajectory
from support.trl_arguments import async_arguments


def test_the_rules_follow_from_the_arguments():
    assert rows_per_update(async_arguments(world_size=2, weight_sync_steps=3)) == 48
    rules = group_rules(async_arguments(world_size=2), 1, {"dynamic": False})
    assert (rules.size, rules.groups_per_step, rules.max_staleness, rules.dynamic) == (4, 4, 1, False)
    assert group_rules(async_arguments(max_staleness=7), 3, {}).max_staleness == 1
    assert group_rules(async_arguments(num_generations=3, max_staleness=1), 1, {}).groups_per_step == 2
    assert group_rules(async_arguments(num_generations=16), 1, {}).groups_per_step == 1
    for asked, rows, options, error in [
        (async_arguments(token_budget=None), 1, {}, "token_budget is None"),
        (async_arguments(), 1, {"size": 8}, "size: follows from AsyncGRPOConfig"),
        (async_arguments(), 1, {"patience": 3}, "patience"),
        (async_arguments(num_generations=1), 1, {}, "size must be >= 2, got 1"),
        (async_arguments(max_staleness=0), 1, {}, "must be at least 1 with 8 rows an update"),
        (async_arguments(max_staleness=2), 3, {}, "must be at least 3 with .* up to 3 rows a rollout"),
        (
            async_arguments(max_staleness=1, num_generations=16),
            1,
            {},
            "must be at least 2 with 8 rows an update, groups of 16",
        ),
    ]:
        with pytest.raises(ConfigError, match=error):
            group_rules(asked, rows, options)


class Groups:
    """`BlockingGroups` over the state machine alone. `choose` says which rollout ends next, and what it is."""

    most_segments = 1

    def __init__(self, rules, version, choose):
        self._sampler = GroupSampler.begin("run", rules, version)
        self._rules = rules
        self._version = version
        self._choose = choose
        self._work = []  # (job id, version at which it was begun)
        self._groups = 0

    def take(self, k, *, timeout_s):
        while (numbers := self._sampler.choose(k)) is None:
            assert self._work, f"the trainer waits for ever: {self._sampler.progress()}"
            self._end_one()
        self._sampler.apply(Taken(groups=numbers, confirms=True))
        self.work_on()
        return self._sampler.state.given[-1]

    def advance(self, version):
        self._sampler.check_advance(version)
        self._sampler.apply(Advanced(version=version, confirms=True))
        self.work_on()

    def work_on(self):
        """Let some rollouts end, as they do at any time, and begin what there is room for."""
        self._begin()
        for _ in range(self._choose(1 + len(self._work))):
            self._end_one()

    def _end_one(self):
        name, version = self._work.pop(self._choose(len(self._work)))
        segments, right = 1 + self._choose(self.most_segments), bool(self._choose(2))
        self._sampler.apply(Arrived(outcome=rollout(name, version, segments, right), correct=right))
        self._begin()

    def _begin(self):
        for _ in range(self._sampler.room(1)):
            instance = TaskInstance(instance_id=f"q{self._groups}", handler="h", payload={})
            effects = self._sampler.apply(Opened(instance=instance, template=JobTemplate()))
            self._groups += 1
            self._work += [(name, self.engine_version()) for name, _ in effects.submit]


def rollout(job_id, version, segments, right):
    spans = [PolicySpan(start=1, end=2, policy_version=version, engine="fake 1")]
    record = [Segment.from_arrays([1, 2], [0, -1], [0, 1], spans) for _ in range(segments)]
    return Outcome(
        job_id=job_id,
        instance_id="q",
        group_id="g",
        status="completed",
        reward=float(right),
        cause=None,
        error="",
        trajectory=Trajectory(segments=record, turns=[], stop_reason="finished"),
        details={},
        timing=Timing(),
    )


@pytest.mark.timeout(120)
@settings(deadline=None, max_examples=60)
@given(
    micro_batch=st.integers(1, 8),
    accumulation=st.sampled_from([1, 2, 4]),
    size=st.integers(2, 5),
    segments=st.integers(1, 3),
    spare=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_no_row_is_older_than_trl_allows_and_no_step_waits_for_ever(
    micro_batch, accumulation, size, segments, spare, seed
):
    rows = micro_batch * accumulation
    least = -(-max(1, rows // size) * size * segments // rows)
    args = async_arguments(
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        num_generations=size,
        max_staleness=least + spare,
    )
    now, made = [1], []

    def open_groups(_client, _tasks, rules, *, version, **_options):
        made.append(Groups(rules, version, Random(seed).randrange))
        made[0].most_segments, made[0].engine_version = segments, lambda: str(now[0])
        made[0].work_on()
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_worker, "BlockingGroups", open_groups)
        patch.setattr(async_worker, "_sample_class", lambda: SimpleNamespace)
        patch.setattr(async_worker, "check_tokenizer", lambda *_: None)
        patch.setattr(async_worker, "model_facts", lambda _: None)
        patch.setattr(async_worker, "newest_version", lambda _: 1)
        worker = RolloutWorker(None, [], args, tokenizer=SimpleNamespace(eos_token_id=0), rows_per_rollout=segments)
        worker.update_model_version(1)
        worker.start()

    ages = []

    def pull(count):
        for _ in range(count):
            sample = worker.rollout_buffer.get(timeout=5.0)
            ages.append(now[0] - sample.model_version)
            made[0].work_on()

    pull(micro_batch)  # the loader takes one ahead of each step
    for step in range(1, 25):
        pull(rows)
        now[0] = step + 1  # the engines have the new weights first
        made[0].work_on()
        worker.update_model_version(now[0])
    assert max(ages) <= args.max_staleness


# ---------------------------------------------------------------- the worker over groups that a test makes


class Given:
    """`BlockingGroups` with given outcomes. `figures` are its statistics."""

    def __init__(self, *outcomes):
        self.figures, self.closed = {"ended": 0}, False
        self._batches = [batch(group) for group in outcomes]

    def take(self, k, *, timeout_s):
        if not self._batches:
            raise TimeoutError
        return self._batches.pop(0)

    def advance(self, version):
        pass

    def statistics(self):
        return dict(self.figures)

    def close(self):
        self.closed = True


def batch(outcomes):
    rewards = np.array([each.reward for each in outcomes], np.float32)
    group = SimpleNamespace(number=3, outcomes=outcomes, rewards=rewards)
    figures = dict.fromkeys(("solved_groups", "unsolved_groups", "resampled", "cancelled", "carried_groups"), 1)
    statistics = SimpleNamespace(**figures, running_groups=1, informative_share=0.5, duration_ks=None)
    return SimpleNamespace(groups=[group], statistics=statistics)


@pytest.fixture
def open_worker(monkeypatch):
    """A function that starts a worker over outcomes; the node's versions began at 5, and TRL counts from 1."""

    def start(*outcomes, client=None, **options):
        given = Given(*outcomes)
        monkeypatch.setattr(async_worker, "BlockingGroups", lambda *_, **__: given)
        monkeypatch.setattr(async_worker, "_sample_class", lambda: SimpleNamespace)
        monkeypatch.setattr(async_worker, "check_tokenizer", lambda *_: None)
        monkeypatch.setattr(async_worker, "model_facts", lambda _: None)
        monkeypatch.setattr(async_worker, "newest_version", lambda _: 5)
        worker = RolloutWorker(client, [], async_arguments(), tokenizer=SimpleNamespace(eos_token_id=9), **options)
        worker.update_model_version(1)
        worker.start()
        return worker, given

    return start


def nothing_said(reward):
    return msgspec.structs.replace(rollout("n", "5", 1, False), trajectory=None, reward=reward)


def test_every_segment_is_a_row_with_the_advantage_of_its_rollout_and_its_oldest_version(open_worker):
    spans = [PolicySpan(start=n, end=n + 1, policy_version=str(6 + n), engine="fake 1") for n in (1, 0)]
    mixed = Segment.from_arrays([1, 2], [-0.5, -1], [1, 1], spans)
    both = msgspec.structs.replace(rollout("a", "7", 2, True), reward=1.0)
    record = msgspec.structs.replace(both.trajectory, segments=[both.trajectory.segments[0], mixed])
    group = [msgspec.structs.replace(both, trajectory=record), rollout("b", "5", 1, False), nothing_said(0.0)]
    worker, _ = open_worker(group, rows_per_rollout=2)
    worker.update_model_version(3)
    rows = [worker.rollout_buffer.get() for _ in range(4)]
    assert [row.model_version for row in rows] == [3, 2, 1, 3]
    assert np.allclose([row.advantage for row in rows], [2**0.5, 2**0.5, -(0.5**0.5), 0.0])
    assert [row.input_ids.tolist() for row in rows] == [[1, 2], [1, 2], [1, 2], [9, 9]]
    assert {row.group_id for row in rows} == {3}
    assert [row.metrics["reward"] for row in rows] == [1.0, 1.0, 0.0, 0.0]
    logged = worker.metrics_queue.get_nowait()
    assert logged["rollout/informative_share"] == 0.5
    assert "rollout/duration_ks" not in logged


def test_more_segments_than_were_announced_are_an_error(open_worker):
    worker, _ = open_worker([rollout("a", "5", 2, True), rollout("b", "5", 1, False)])
    with pytest.raises(ConfigError, match="job a has 2 segments, and rows_per_rollout is 1"):
        worker.rollout_buffer.get()


def test_a_version_that_is_no_number_is_an_error(open_worker):
    worker, _ = open_worker([rollout("a", "mine", 1, True), rollout("b", "mine", 1, False)])
    with pytest.raises(ConfigError, match="policy version 'mine'"):
        worker.rollout_buffer.get()


def test_a_worker_is_well_as_long_as_rollouts_end(open_worker, monkeypatch):
    pool = {"backends": [{"url": "http://e", "state": "down", "error": "no answer"}]}
    client = SimpleNamespace(list_backends=lambda: SimpleNamespace(pool=pool))
    clock = [0.0]
    monkeypatch.setattr(async_worker.time, "monotonic", lambda: clock[0])
    worker, given = open_worker(client=client)
    for ended, at_s in [(0, 0), (0, 299), (1, 301), (1, 600)]:
        clock[0], given.figures["ended"] = at_s, ended
        worker.check_health(300)
    clock[0] = 602
    with pytest.raises(TimeoutError, match=r"no rollout has ended for 300 s .* http://e down no answer"):
        worker.check_health(300)
    with pytest.raises(queue.Empty):
        worker.rollout_buffer.get(timeout=0.1)
    worker.stop()
    worker.stop()
    assert given.closed
    worker.check_health(0)
