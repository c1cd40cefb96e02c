"""On the simulator, where hard tasks take longer: `keep` trains on groups as long as those submitted, not so `cancel`.

The pipeline, its engines and its sandboxes are those of `prorl_trio.simulation`, in simulated time; a rollout draws its
work from its id alone, so that the duration of every group is known, also of one that was cancelled.
"""

from __future__ import annotations

import sys
from random import Random

import pytest
import trio

from prorl_trio.config import StagesConfig
from prorl_trio.pipeline.job import Job
from prorl_trio.sampling import GroupRules, JobTemplate
from prorl_trio.sampling.accounts import ks_distance
from prorl_trio.sampling.sampler import GroupSampler
from prorl_trio.sampling.state import Advanced, Arrived, Opened, Taken
from prorl_trio.simulation.config import Distribution, EngineModel, SimulationConfig, WorkModel
from prorl_trio.simulation.run import SimulatedHandler, open_simulated_node, run_in_simulated_time
from prorl_trio.tasks.handlers.base import Evaluation
from prorl_trio.types.models import TaskInstance

LEVELS = 10
SIZE = 6
STEPS = 18
PER_STEP = 4
TRAINING_S = 1.0
RULES = {"size": SIZE, "groups_per_step": PER_STEP, "max_staleness": 2, "ahead": 2.0}
WORK = WorkModel(
    prompt_tokens=Distribution(value=100),
    completion_tokens=Distribution(p50=200, p95=600),
    observation_tokens=Distribution(value=20),
    tool_s=Distribution(p50=0.5, p95=2),
    sandbox_start_s=Distribution(value=0.1),
    prepare_s=Distribution(value=0.1),
    evaluation_s=Distribution(value=0.5),
)
CONFIG = SimulationConfig(
    jobs=2000,
    work=WORK,
    # So wide that nobody waits for anybody: what a rollout takes is its own doing.
    engine=EngineModel(max_batch=2000, max_tokens_per_s=1e6, prefill_tokens_per_s=1e9, kv_tokens=10**8),
    stages=StagesConfig(init_workers=400, run_workers=400, eval_workers=400),
)


class GradedHandler(SimulatedHandler):
    """A task of level L takes about L turns; the harder, the longer, and the more seldom right."""

    def __init__(self, config):
        super().__init__(config)
        self._levels = [
            SimulatedHandler(with_turns(config, Distribution(p50=1 + 0.4 * level, p95=2 + 0.6 * level)))
            for level in range(LEVELS)
        ]

    async def run(self, context):
        await self._levels[level_of(context.spec.instance)].run(context)

    async def eval(self, context):
        await super().eval(context)
        chance = 0.7 - 0.4 * level_of(context.spec.instance) / (LEVELS - 1)
        return Evaluation(reward=float(Random(f"right {context.spec.job_id}").random() < chance), details={})


def with_turns(config, turns):
    fields = {name: getattr(config.work, name) for name in config.work.__struct_fields__}
    return SimulationConfig(seed=config.seed, work=WorkModel(**{**fields, "turns": turns}), failures=config.failures)


def level_of(instance):
    return instance.payload["level"]


def task(number):
    return TaskInstance(instance_id=f"t{number}", handler="simulated", payload={"level": number * 7 % LEVELS})


class Trainer:
    """Drives a sampler straight over a pipeline. `durations_s`: of each rollout that ended by itself."""

    session_id = "simulation"

    def __init__(self, sampler, node, handler):
        self.sampler, self.node, self.handler = sampler, node, handler
        self.durations_s = {}
        self.lines = []
        self.jobs = {}
        self.over = False
        self.changed = trio.Event()

    def deliver(self, outcome):
        if self.over:
            return
        del self.jobs[outcome.job_id]
        if outcome.status == "completed":
            timing = outcome.timing
            self.durations_s[outcome.job_id] = timing.init_s + timing.run_s + timing.eval_s
        self.apply(Arrived(outcome, outcome.reward == 1.0))
        self.replenish()
        self.changed.set()

    def report(self, job_id, status, detail):
        pass

    def apply(self, event):
        effects = self.sampler.apply(event)
        self.lines += effects.lines
        for job_id, _ in effects.submit:
            spec = self.sampler.spec(job_id)
            self.jobs[job_id] = Job(spec, self.handler, self.node.resources, self)
            self.node.pipeline.submit(self.jobs[job_id])
        for job_id in effects.cancel:
            self.node.pipeline.cancel_soon(self.jobs[job_id], "early stop")

    def replenish(self):
        for _ in range(self.sampler.room()):
            self.apply(Opened(task(self.sampler.state.next_group), JobTemplate()))

    async def take(self):
        while (groups := self.sampler.choose(PER_STEP)) is None:
            self.changed = trio.Event()
            await self.changed.wait()
        self.apply(Taken(groups, confirms=True))
        self.statistics = self.sampler.state.given[-1].statistics
        self.replenish()


async def _train(config, chat_format, rules):
    async with open_simulated_node(config, chat_format) as node:
        trainer = Trainer(GroupSampler.begin("run", rules, "0"), node, GradedHandler(config))
        trainer.replenish()
        for step in range(1, STEPS + 1):
            await trainer.take()
            await trio.sleep(TRAINING_S)
            trainer.apply(Advanced(str(step), confirms=True))
            trainer.replenish()
        trainer.over = True
        return trainer


async def _run_all(config, chat_format, groups):
    """Return how long each of the first groups takes, if nobody cancels it."""
    async with open_simulated_node(config, chat_format) as node:
        rules = GroupRules(size=SIZE, groups_per_step=groups)
        trainer = Trainer(GroupSampler.begin("run", rules, "0"), node, GradedHandler(config))
        for number in range(groups):
            trainer.apply(Opened(task(number), JobTemplate()))
        while trainer.sampler.state.running:
            trainer.changed = trio.Event()
            await trainer.changed.wait()
    jobs = [[f"run-g{number}-{member}-1" for member in range(SIZE)] for number in range(groups)]
    return [max(trainer.durations_s[job_id] for job_id in group) for group in jobs]


LIMIT = 0.05


class Measured:
    """A run of training, and the groups in it whose fate is known.

    These are the groups that were submitted before the oldest one whose fate is still open.
    """

    def __init__(self, early_stop):
        rules = GroupRules(early_stop=early_stop, **RULES)
        trainer = run_in_simulated_time(lambda config, chat: _train(config, chat, rules), CONFIG)
        state = trainer.sampler.state
        self.metric = trainer.statistics
        self.fates = {line.group: line.fate for line in trainer.lines if line.fate != "resampled"}
        self.known = range(min(*state.running, *state.ready, state.next_group))
        assert set(self.known) <= set(self.fates)

    def distance(self, durations_s):
        """Return the KS distance of the trained groups' true durations from the submitted ones'."""
        self.trained = [number for number in self.known if self.fates[number] == "trained"]
        return ks_distance([durations_s[n] for n in self.trained], [durations_s[n] for n in self.known])


@pytest.fixture(scope="module")
def measured():
    runs = {early_stop: Measured(early_stop) for early_stop in ("keep", "cancel")}
    groups = max(len(run.known) for run in runs.values())
    durations_s = run_in_simulated_time(lambda config, chat: _run_all(config, chat, groups), CONFIG)
    return {early_stop: (run.distance(durations_s), run) for early_stop, run in runs.items()}


def test_keep_is_without_bias_and_cancel_is_not(measured, capsys):
    with capsys.disabled():
        for early_stop, (ks, run) in measured.items():
            sys.stderr.write(
                f"\n{early_stop}: KS distance of durations {ks:.3f} ({len(run.trained)} groups trained on, of "
                f"{len(run.known)}); reported by the last batch: {run.metric.duration_ks:.3f}, without what was "
                f"uninformative {run.metric.early_stop_ks:.3f}\n"
            )
    (keep, kept), (cancel, cancelled) = measured["keep"], measured["cancel"]
    assert keep < LIMIT
    assert cancel > 3 * LIMIT, "the same test fails where rollouts are cancelled"
    assert kept.metric.early_stop_ks < 2 * LIMIT < cancelled.metric.early_stop_ks, "a trainer can see it"
