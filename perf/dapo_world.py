"""The world of `perf.dapo` and `perf.ablation`: training steps of DAPO over a simulated node, in simulated time.

The pipeline, the backend pool and the sampler's state machine (`GroupSampler`) are the real ones. Engines and sandboxes
only take their time (`prorl_trio.simulation`). A rollout draws its work from its own id, so all policies meet the same
tasks in the same order.
"""

from __future__ import annotations

from collections import deque
from contextlib import AsyncExitStack
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from ipc.nursery import open_single_nursery
from perf.balance_world import ENGINE, ENGINE_OF_TWO
from perf.dapo_work import GradedHandler, instance_of
from prorl_trio.client.sampling import GroupRules, JobTemplate
from prorl_trio.client.sampling.events import Advanced, Arrived, Finished, Opened, Taken
from prorl_trio.client.sampling.sampler import GroupSampler
from prorl_trio.config import BackendConfig, BudgetConfig, SandboxConfig, StagesConfig
from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.node.parts import open_backends
from prorl_trio.pipeline.pipeline import Job
from prorl_trio.simulation.config import SimulationConfig
from prorl_trio.simulation.run import open_simulated_node, run_in_simulated_time
from prorl_trio.simulation.use import UseMeter, UseSource

if TYPE_CHECKING:
    from perf.dapo_work import Conditions
    from prorl_trio.chat.format import ChatFormat
    from prorl_trio.client.sampling.events import Event
    from prorl_trio.simulation.run import SimulatedNode
    from prorl_trio.types.models import Outcome, Status

__all__ = ["NO_LIMIT_S", "Steps", "simulate_steps"]

NO_LIMIT_S: Final = 1e6
"""No rollout ends by a budget here; in longer runs than this something hangs."""
SPACING_S: Final = 1e-3
ENGINES: Final = {1: ENGINE, 2: ENGINE_OF_TWO}
"""By the GPUs that each has."""


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a simulated training.

    Attributes:
        wall_s: all steps together. `steps`: how many.
        trained: rollouts that were trained on. `ended`: that came to their own end, `uninformative` ones included.
        cancelled: that were cut before it. `surplus`: that ended in an informative group, and were thrown away.
        action_s: mean time of an action.
        engine_busy: share of the time in which an engine had a completion to work on, mean over the engines.
        decode_use: tokens sampled, over what the engines can sample.
        staleness: mean policy updates between a group's begin and its training.
    """

    wall_s: float
    steps: int
    trained: int
    ended: int
    uninformative: int
    cancelled: int
    surplus: int
    action_s: float
    engine_busy: float
    decode_use: float
    staleness: float

    @property
    def trained_per_s(self) -> float:
        """Rollouts trained on, a second."""
        return self.trained / self.wall_s

    @property
    def steps_per_h(self) -> float:
        """Training steps an hour."""
        return 3600 * self.steps / self.wall_s

    @property
    def wasted(self) -> float:
        """Share of the rollouts that were begun and taught nothing, though their group was not uninformative."""
        begun = self.trained + self.uninformative + self.cancelled + self.surplus
        return (self.cancelled + self.surplus) / begun if begun else 0.0


class _Trainer:
    """Drives a sampler straight over a pipeline, by one of the policies."""

    session_id = "dapo"

    def __init__(self, conditions: Conditions, node: SimulatedNode, handler: GradedHandler) -> None:
        self._conditions, self._node, self._handler = conditions, node, handler
        self._jobs: dict[str, Job] = {}
        self._unsubmitted: deque[str] = deque()
        self._more = trio.Event()
        self._next_group = 0
        self._feeding = False
        self._changed = trio.Event()
        self.ended = self.trained = self.uninformative = self.cancelled = self.surplus = 0
        self.over = False
        self.staleness: list[int] = []
        self._sampler = self._begin(0)

    def _begin(self, step: int) -> GroupSampler:
        conditions = self._conditions
        carry = conditions.policy == "carry"
        rules = GroupRules(
            size=conditions.size,
            groups_per_step=conditions.groups,
            max_staleness=int(carry),
            early_stop="keep" if carry else "cancel",
            patience_groups=100 * conditions.groups,
        )
        sampler = GroupSampler.begin("dapo", rules, str(step))
        sampler.state.next_group = self._next_group  # so that a rollout has the same id, and work, whatever the policy
        return sampler

    def deliver(self, outcome: Outcome) -> None:
        """See `JobSink`."""
        del self._jobs[outcome.job_id]
        if self.over:
            return
        if outcome.status not in ("completed", "cancelled"):
            raise RuntimeError(f"job {outcome.job_id} {outcome.status}: {outcome.error}")
        self.ended += outcome.status == "completed"
        if self._sampler.awaits(outcome.job_id):
            self._apply(Arrived(outcome, outcome.reward == 1.0))
        self._feed()
        self._changed.set()

    def report(self, job_id: str, status: Status, detail: str) -> None:
        """See `JobSink`."""

    async def submit(self) -> None:
        """Submit what there is to submit, for ever, one by one: no two rollouts begin at the very same moment."""
        while True:
            while self._unsubmitted:
                self._node.pipeline.submit(self._jobs[self._unsubmitted.popleft()])
                await trio.sleep(SPACING_S)
            self._more = trio.Event()
            await self._more.wait()

    async def step(self, step: int) -> None:
        """Sample the batch of a step, and take it."""
        conditions, policy = self._conditions, self._conditions.policy
        if policy == "naive":
            while len(self._sampler.state.ready) < conditions.groups:
                for _ in range(conditions.groups):
                    self._open()
                await self._until(lambda: not self._sampler.state.running)
        else:
            self._feeding = True
            self._feed()
            await self._until(lambda: self._sampler.choose(conditions.groups) is not None)
            self._feeding = policy == "carry"
        if policy == "refill":
            await self._until(lambda: not self._sampler.state.running)
        groups = self._sampler.choose(conditions.groups)
        assert groups is not None
        self._apply(Taken(groups, confirms=True))
        self.staleness += [group.staleness for group in self._sampler.state.given[-1].groups]
        if policy != "carry":
            self.surplus += len(self._sampler.state.ready) * conditions.size
            self._apply(Finished())
        self._feed()
        await trio.sleep(conditions.training_s)
        if policy == "carry":
            self._apply(Advanced(str(step + 1), confirms=True))
            self._feed()
        else:
            await self._until(lambda: not self._jobs)  # what was cancelled is gone
            self._sampler = self._begin(step + 1)

    async def _until(self, reached: object) -> None:
        assert callable(reached)
        while not reached():
            self._changed = trio.Event()
            await self._changed.wait()

    def _feed(self) -> None:
        """Have as many jobs as are to be submitted at once, in whole groups, as far as the sampler lets."""
        conditions = self._conditions
        while self._feeding and len(self._jobs) < conditions.workers + conditions.ahead:
            state = self._sampler.state
            room = 2 * conditions.groups - len(state.ready) - len(state.running) - state.taken_at[-1]
            if conditions.policy == "carry" and room <= 0:
                return
            self._open()

    def _open(self) -> None:
        self._apply(Opened(instance_of(self._conditions.seed, self._next_group), JobTemplate()))
        self._next_group += 1

    def _apply(self, event: Event) -> None:
        effects = self._sampler.apply(event)
        for line in effects.lines:
            self.trained += line.fate == "trained"
            self.uninformative += line.fate == "uninformative"
            self.cancelled += line.fate == "cancelled"
        for job_id, _ in effects.submit:
            spec = self._sampler.spec(job_id)
            assert spec is not None
            self._jobs[job_id] = Job(spec, self._handler, self._node.resources, self)
            self._unsubmitted.append(job_id)
            self._more.set()
        for job_id in effects.cancel:
            if job_id in self._unsubmitted:
                self._unsubmitted.remove(job_id)
                del self._jobs[job_id]
            elif job_id in self._jobs:
                self._node.pipeline.cancel_soon(self._jobs[job_id], "its batch is complete")


async def _train(conditions: Conditions, config: SimulationConfig, chat_format: ChatFormat) -> Steps:
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(open_simulated_node(config, chat_format))
        engines = {engine.url: engine for engine in node.engines}
        handler = GradedHandler(conditions, config)
        if not conditions.balanced:
            shares = [
                await stack.enter_async_context(
                    open_backends(
                        msgspec.structs.replace(config.backends, urls=[url]),
                        made_by(engines.__getitem__),
                        random=Random(url),
                    )
                )
                for url in engines
            ]
            handler.bind(shares)
        trainer = _Trainer(conditions, node, handler)
        meter = UseMeter(_sources(node), lambda: True)
        trio.lowlevel.add_instrument(meter)
        nursery = await stack.enter_async_context(open_single_nursery())
        nursery.start_soon(trainer.submit)
        began_s = trio.current_time()
        for step in range(conditions.steps):
            with trio.fail_after(NO_LIMIT_S):
                await trainer.step(step)
        wall_s = trio.current_time() - began_s
        trio.lowlevel.remove_instrument(meter)
        busy, decode = meter.uses()
        trainer.over = True
        nursery.cancel_scope.cancel()
        await node.pipeline.cancel_all("the training is over")
    return Steps(
        wall_s=wall_s,
        steps=conditions.steps,
        trained=trainer.trained,
        ended=trainer.ended,
        uninformative=trainer.uninformative,
        cancelled=trainer.cancelled,
        surplus=trainer.surplus,
        action_s=handler.action_s,
        engine_busy=busy.mean / busy.capacity,
        decode_use=decode.mean / decode.capacity,
        staleness=sum(trainer.staleness) / len(trainer.staleness),
    )


def _sources(node: SimulatedNode) -> list[UseSource]:
    engines = node.engines
    return [
        UseSource("engines", len(engines), lambda: sum(engine.running > 0 for engine in engines)),
        UseSource(
            "decode",
            sum(engine.decoder.max_tokens_per_s for engine in engines),
            lambda: sum(min(e.decoder.wanted_tokens_per_s, e.decoder.max_tokens_per_s) for e in engines),
        ),
    ]


def simulate_steps(conditions: Conditions) -> Steps:
    """Simulate a training in a loop of its own. Blocks; the same conditions give the same figures."""
    width = conditions.workers
    config = SimulationConfig(
        seed=conditions.seed,
        jobs=100 * conditions.groups * conditions.size,
        engine=msgspec.structs.replace(ENGINES[conditions.engine_gpus], count=conditions.engines),
        stages=StagesConfig(init_workers=width, run_workers=width, eval_workers=width, ready_queue=width),
        budgets=BudgetConfig(
            init_s=NO_LIMIT_S, run_s=NO_LIMIT_S, eval_s=NO_LIMIT_S, total_s=NO_LIMIT_S, agent_s=NO_LIMIT_S
        ),
        backends=BackendConfig(request_timeout_s=NO_LIMIT_S, lease_timeout_s=NO_LIMIT_S),
        sandbox=SandboxConfig(max_warm=0, max_concurrent_starts=width, max_concurrent_starts_per_image=width),
    )
    return run_in_simulated_time(lambda config, chat_format: _train(conditions, config, chat_format), config)
