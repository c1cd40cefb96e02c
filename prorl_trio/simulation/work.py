"""A handler and a sandbox provider that only take their time, and fail as often as they are told to."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Final

import trio

from prorl_trio.agent.turns import lease_backend
from prorl_trio.handlers.base import AgentHandler, Evaluation
from prorl_trio.inference.engines.protocol import CompletionRequest
from prorl_trio.inference.pool.partial import PartialCompletion
from prorl_trio.sandbox.provider import ProviderReport, SandboxProvider, SandboxSpec
from prorl_trio.testing.fake_sandbox import FakeSandbox
from prorl_trio.types.errors import EvaluationError, SandboxLost, SandboxUnavailable
from prorl_trio.types.models import Turn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.inference.pool.lease import Lease
    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.simulation.config import SimulationConfig

STAGGER_S: Final = 1e-3
"""Rollouts that get a backend at the same moment, as when one is well again, ask it within this time, one by one: trio
runs what is due at one moment in any order."""


class SimulatedProvider(SandboxProvider):
    """Starts `FakeSandbox`es in the time the model says. `starting`: how many starts go on."""

    name: ClassVar[str] = "simulated"
    isolated: ClassVar[bool] = False

    def __init__(self, config: SimulationConfig) -> None:
        self._config = config
        self._random = Random(f"{config.seed} sandboxes")
        self._started = 0
        self.starting = 0

    async def probe(self) -> ProviderReport:
        await trio.lowlevel.checkpoint()
        return ProviderReport(name=self.name, usable=True, version="simulated")

    @asynccontextmanager
    async def open_sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        start_s = self._config.work.sandbox_start_s.draw(self._random)
        fails = self._random.random() < self._config.failures.sandbox_start
        self._started += 1
        sandbox = FakeSandbox(f"simulated-{self._started}", {})
        self.starting += 1
        try:
            with trio.move_on_after(spec.start_timeout_s) as patience:
                await trio.sleep(start_s)
        finally:
            self.starting -= 1
        if patience.cancelled_caught or fails:
            raise SandboxUnavailable(f"{sandbox.sandbox_id}: simulated failure of its start")
        try:
            yield sandbox
        finally:
            sandbox.lose("it was closed")


class SimulatedHandler(AgentHandler):
    """Goes through the turns of `agent.run_agent` without a model's text: what a job draws depends on its id only."""

    name = "simulated"

    def __init__(self, config: SimulationConfig) -> None:
        self._config = config
        self._draws: Counter[tuple[str, str]] = Counter()

    def validate(self, payload: Mapping[str, Any]) -> None:
        """Anything goes."""

    def sandbox_spec(self, context: RolloutContext) -> SandboxSpec:
        """The node's default image."""
        sandbox = context.resources.config.sandbox
        return SandboxSpec(image=sandbox.image, start_timeout_s=sandbox.start_timeout_s)

    async def init(self, context: RolloutContext) -> None:
        """Uploads, environments, shells."""
        await trio.sleep(self._config.work.prepare_s.draw(self._random(context, "init")))

    async def run(self, context: RolloutContext) -> None:
        """Turns on one backend, leased for all of them."""
        work, failures, random = self._config.work, self._config.failures, self._random(context, "run")
        turns = work.turns.draw_count(random)
        fails_at = random.randrange(turns) if random.random() < failures.handler else turns
        context_tokens = work.prompt_tokens.draw_count(random)
        async with AsyncExitStack() as stack:
            lease = await self._lease(context, stack, random)
            for turn in range(turns):
                if turn == fails_at:
                    raise RuntimeError("simulated failure of the handler")
                began_s = trio.current_time()
                sampled = work.completion_tokens.draw_count(random)
                await self._sample(context, lease, turn, context_tokens, sampled)
                sampled_s = trio.current_time()
                if turn + 1 < turns:
                    await self._act(context, random)
                context.record(_turn(context_tokens, sampled, sampled_s - began_s, trio.current_time() - sampled_s))
                context_tokens += sampled + work.observation_tokens.draw_count(random, least=0)
        context.stop_reason = "finished"

    async def eval(self, context: RolloutContext) -> Evaluation:
        """Takes its time; the reward says nothing."""
        random = self._random(context, "eval")
        fails = random.random() < self._config.failures.evaluation
        await trio.sleep(self._config.work.evaluation_s.draw(random))
        if fails:
            raise EvaluationError("simulated failure of the evaluation")
        return Evaluation(reward=1.0, details={})

    async def _lease(self, context: RolloutContext, stack: AsyncExitStack, random: Random) -> Lease:
        """See `STAGGER_S`. Who did not wait goes on at once."""
        asked_s = trio.current_time()
        lease = await lease_backend(context, stack)
        if trio.current_time() > asked_s:
            await trio.sleep(random.random() * STAGGER_S)
        return lease

    async def _sample(self, context: RolloutContext, lease: Lease, turn: int, prompt_tokens: int, sampled: int) -> None:
        attempt = self._draws[context.spec.job_id, "run"]
        asked = CompletionRequest(
            prompt_token_ids=[0] * prompt_tokens,
            sampling=context.spec.sampling,
            max_tokens=sampled,
            request_id=f"{context.spec.job_id}.{attempt}-t{turn}",
            timeout_s=context.resources.config.backends.request_timeout_s,
        )
        await lease.complete(PartialCompletion(asked), calling=partial(context.waiting, charge="inference"))

    async def _act(self, context: RolloutContext, random: Random) -> None:
        """Make a tool call in the sandbox."""
        assert context.sandbox is not None
        fails = random.random() < self._config.failures.tool_call
        tool_s = self._config.work.tool_s.draw(random)
        with context.waiting("tool", "sandbox"):
            await context.sandbox.exec(["sleep", str(tool_s)], timeout_s=context.resources.config.agent.tool_timeout_s)
        if fails:
            raise SandboxLost("simulated loss of the sandbox")

    def _random(self, context: RolloutContext, stage: str) -> Random:
        """Return the random numbers of one stage of a job, which are the same whatever else goes on.

        An attempt after a failure draws anew.
        """
        self._draws[context.spec.job_id, stage] += 1
        return Random(f"{self._config.seed} {context.spec.job_id} {stage} {self._draws[context.spec.job_id, stage]}")


def _turn(prompt_tokens: int, sampled: int, inference_s: float, tools_s: float) -> Turn:
    return Turn(
        segment=0,
        completion_start=prompt_tokens,
        completion_end=prompt_tokens + sampled,
        text="",
        finish_reason="stop",
        tool_calls=[],
        observations=[],
        inference_s=inference_s,
        tools_s=tools_s,
    )
