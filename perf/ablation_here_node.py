"""The node of `perf.ablation_here`, in a process of its own: real engines and sandboxes, work that is drawn.

    python -m perf.ablation_here_node CONFIG WORK

CONFIG is a node.toml, WORK a `DrawnWork` in JSON. A rollout asks the engine for as many tokens, and runs commands in
its sandbox's shell for as long, as are drawn from its own number: so all systems meet the same tasks, whatever the
policy says. Ends with its standard input.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from ipc.nursery import open_single_nursery
from perf.balance_batch import HEAVY
from perf.children import raise_file_limit, say_ready
from perf.dapo_work import lognormal, mean_of
from perf.node_served import Served
from prorl_trio.config import load_config
from prorl_trio.handlers.base import Evaluation
from prorl_trio.handlers.registry import HandlerRegistry
from prorl_trio.inference.engines.protocol import CompletionRequest
from prorl_trio.inference.pool.partial import PartialCompletion
from prorl_trio.node.garbage import open_garbage_searches
from prorl_trio.node.parts import engine_finder, open_backends
from prorl_trio.node.serve import serve_node
from prorl_trio.service.endpoints import endpoint_url
from prorl_trio.simulation.config import Distribution, SimulationConfig, WorkModel
from prorl_trio.simulation.work import SimulatedHandler
from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.config import NodeConfig
    from prorl_trio.inference.pool.lease import Lease
    from prorl_trio.inference.pool.pool import Backends
    from prorl_trio.types.models import Outcome

__all__ = ["ACTIONS", "DrawnWork", "TaskPayload", "WorkedHandler", "instance_of", "payload_of"]

ACTIONS: Final = "actions_s"
"""The detail of an outcome that has the seconds of each of its actions."""
SHELL_TIMEOUT_S: Final = 120.0
LEVELS: Final = 20
"""Hardness comes in so many levels, all equally likely."""
FIRST_TOKEN_ID, TOKEN_IDS = 1000, 40_000
"""A rollout's prompts consist of one token of its own out of these, so that no two share a prefix."""


class DrawnWork(msgspec.Struct, frozen=True, kw_only=True):
    """The distributions that rollouts are drawn from, as in `perf.dapo_work`, and smaller in all but the actions.

    Attributes:
        turns_p50, max_turns: of the median rollout of the median instance, and at most.
        instance_sigma: standard deviation of the logarithm of an instance's hardness, which its rollouts share.
        prompt_tokens: of the first prompt. `completion_tokens`, `observation_tokens`: medians of a turn.
        action_s: mean of a command's own time, lognormal.
    """

    turns_p50: float = 3.0
    max_turns: int = 10
    instance_sigma: float = HEAVY.instance_sigma
    prompt_tokens: int = 200
    completion_tokens: float = 6.0
    observation_tokens: float = 30.0
    action_s: float = 0.42

    def model(self, hardness: float) -> WorkModel:
        """Return the work of rollouts of an instance so hard. Sandboxes take the time that they take."""
        nothing = Distribution(value=0)
        action = lognormal(self.action_s / mean_of(lognormal(1.0, HEAVY.tool_sigma)), HEAVY.tool_sigma)
        return WorkModel(
            turns=lognormal(self.turns_p50 * hardness, HEAVY.turns_sigma, least=1, most=self.max_turns),
            prompt_tokens=Distribution(value=self.prompt_tokens),
            completion_tokens=lognormal(self.completion_tokens, HEAVY.turn_tokens_sigma),
            observation_tokens=lognormal(self.observation_tokens, HEAVY.turn_tokens_sigma),
            tool_s=action,
            sandbox_start_s=nothing,
            prepare_s=nothing,
            evaluation_s=nothing,
        )

    def hardness(self, level: int) -> float:
        """Return by how much the rollouts of a level are longer than the median's."""
        return math.exp(self.instance_sigma * NormalDist().inv_cdf((level + 0.5) / LEVELS))


class TaskPayload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task, and what is left out of the system that works on it.

    Attributes:
        number, level: of the instance.
        split: its rollouts have the engine of its number, and not the pool's choice.
        extra_action_s: added to each action.
    """

    number: int
    level: int
    split: bool = False
    extra_action_s: float = 0.0


def instance_of(number: int, *, split: bool = False, extra_action_s: float = 0.0) -> TaskInstance:
    """Return the instance of that number: the same for all systems."""
    level = Random(f"instance {number}").randrange(LEVELS)
    payload = TaskPayload(number=number, level=level, split=split, extra_action_s=extra_action_s)
    return TaskInstance(instance_id=f"i{number}", handler=WorkedHandler.name, payload=msgspec.to_builtins(payload))


class _Rollouts(SimulatedHandler):
    """The rollouts of one level: drawn turns over a real engine, and commands in a real shell."""

    def __init__(self, work: WorkModel, shares: list[Backends]) -> None:
        super().__init__(SimulationConfig(work=work))
        self._shares = shares

    async def _lease(self, context: RolloutContext, stack: AsyncExitStack, random: Random) -> Lease:
        task = payload_of(context)
        if not task.split:
            return await super()._lease(context, stack, random)
        share = self._shares[task.number % len(self._shares)]
        return await stack.enter_async_context(share.lease(context.spec.job_id))

    async def _sample(self, context: RolloutContext, lease: Lease, turn: int, prompt_tokens: int, sampled: int) -> None:
        token_id = FIRST_TOKEN_ID + Random(context.spec.job_id).randrange(TOKEN_IDS)
        asked = CompletionRequest(
            prompt_token_ids=[token_id] * prompt_tokens,
            sampling=context.spec.sampling,
            max_tokens=sampled,
            request_id=f"{context.spec.job_id}-t{turn}",
            timeout_s=context.resources.config.backends.request_timeout_s,
        )
        await lease.complete(PartialCompletion(asked), calling=partial(context.waiting, charge="inference"))

    async def _act(self, context: RolloutContext, random: Random) -> None:
        assert context.sandbox is not None
        seconds = self._config.work.tool_s.draw(random)
        began_s = trio.current_time()
        with context.waiting("tool bash", "sandbox"):
            done = await context.sandbox.bash(f"sleep {seconds:.4f}", timeout_s=SHELL_TIMEOUT_S)
        if done.exit_code != 0:
            raise RuntimeError(f"a command ended with {done.exit_code}: {done.output}")
        await trio.sleep(payload_of(context).extra_action_s)
        context.handler_state.append(trio.current_time() - began_s)

    def _random(self, context: RolloutContext, stage: str) -> Random:
        return Random(f"{_place_of(context)} {stage}")


class WorkedHandler(SimulatedHandler):
    """Rollouts of instances of different hardness: the harder, the longer, and the more seldom right.

    Of the median instance one rollout in five is right, as in `perf.dapo_work`.
    """

    name = "ablation"

    def __init__(self, work: DrawnWork, shares: list[Backends]) -> None:
        super().__init__(SimulationConfig())
        self._hardness = [work.hardness(level) for level in range(LEVELS)]
        self._levels = [_Rollouts(work.model(hardness), shares) for hardness in self._hardness]

    async def init(self, context: RolloutContext) -> None:
        """Start the shell."""
        assert context.sandbox is not None
        context.handler_state = []
        with context.waiting("start of the shell", "sandbox"):
            await context.sandbox.bash("true", timeout_s=SHELL_TIMEOUT_S)

    async def run(self, context: RolloutContext) -> None:
        """Take the turns of the instance's level."""
        await self._levels[payload_of(context).level].run(context)

    async def eval(self, context: RolloutContext) -> Evaluation:
        """Be right by chance, as often as the instance's level has it."""
        await trio.lowlevel.checkpoint()
        chance = 1 / (1 + 4 * self._hardness[payload_of(context).level] ** 2)
        right = Random(f"{_place_of(context)} right").random() < chance
        return Evaluation(reward=float(right), details={})

    def final_result(self, context: RolloutContext, outcome: Outcome) -> Outcome:
        """Add the times of the actions."""
        actions: list[float] = context.handler_state or []
        return msgspec.structs.replace(outcome, details={**outcome.details, ACTIONS: actions})


def payload_of(context: RolloutContext) -> TaskPayload:
    """Return the job's task."""
    return msgspec.convert(context.spec.instance.payload, TaskPayload)


def _place_of(context: RolloutContext) -> str:
    """Return the instance's number and the place in its group: the end of the job's id, whatever the run is called."""
    return context.spec.job_id.rpartition("-g")[2]


async def _main(config: NodeConfig, work: DrawnWork) -> None:
    raise_file_limit()
    async with AsyncExitStack() as stack:
        shares = []
        for url in config.backends.urls:
            alone = msgspec.structs.replace(config.backends, urls=[url])
            shares.append(await stack.enter_async_context(open_backends(alone, engine_finder(alone, None))))
        handlers = HandlerRegistry([WorkedHandler(work, shares)])

        async def serve(*, task_status: trio.TaskStatus[Any]) -> None:  # noqa: ASYNC128 - serve_node does
            await serve_node(config, handlers, task_status=task_status)

        await stack.enter_async_context(open_garbage_searches())
        nursery = await stack.enter_async_context(open_single_nursery())
        say_ready(Served(endpoint_url(await nursery.start(serve))))
        await trio.to_thread.run_sync(sys.stdin.read)
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    trio.run(_main, load_config(Path(sys.argv[1])), msgspec.json.decode(sys.argv[2], type=DrawnWork))
