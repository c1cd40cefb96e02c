"""A run of `prorl-trio learn`, without a node."""

from __future__ import annotations

import os
from typing import Any

from prorl_launch.learning.curriculum import Curriculum
from prorl_launch.learning.record import EVENTS, RunRecord, Settings, StepRecord
from prorl_launch.learning.train import Run
from support.learn_checks.made_up import refused


class Examined(Run):
    """It solves its held-out problems by noting that it should."""

    evaluated: list[int]

    def evaluate(self, _):
        self.evaluated.append(self.step)


class NoBatches:
    """Groups of which no batch is ever whole."""

    version = "2"

    def take(self, *, timeout_s):
        assert timeout_s > 0
        raise TimeoutError("no batch within 600 s")


def run_with(folder, reward_sampled):
    step: dict[str, Any] = dict.fromkeys(StepRecord.__struct_fields__, 1.0)
    step |= {"step": 2, "staleness": {}, "reward_sampled": reward_sampled}
    record = RunRecord(settings=Settings(model="m", steps=9, evaluate_every=4), steps=[StepRecord(**step)])
    no_trainer: Any = None
    run = Examined(folder, no_trainer, record, Curriculum(0), 2)
    run.evaluated = []
    return run


def check_a_run_that_finds_nothing_left_to_learn_is_evaluated_and_ends(folder):
    os.environ["PRORL_ENGINE_URL"] = "http://127.0.0.1:9"
    run = run_with(folder, 0.97)
    run.go(None, None, NoBatches())
    assert run.evaluated == [2]
    assert "too few groups are left to learn from: no batch within 600 s" in (folder / EVENTS).read_text()


def check_a_run_that_gets_no_batch_for_another_reason_fails(folder):
    os.environ["PRORL_ENGINE_URL"] = "http://127.0.0.1:9"
    assert "no batch within 600 s" in refused(TimeoutError, run_with(folder, 0.5).go, None, None, NoBatches())
