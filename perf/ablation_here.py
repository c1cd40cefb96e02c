"""The paper's ablation (Table 3) on the real stack of this machine: two vLLM servers, a node, sandboxes, a client.

    python -m perf.ablation_here [--quick] [--json FILE]

Load balancing, efficient bash and the clean-up of stale jobs are left out one at a time. Steps of DAPO are taken with
each system in turn, from the same tasks, whose turns, tokens and commands are drawn.
Without efficient bash an action takes as much longer as OpenHands' terminal on tmux takes here, where it is installed
(`python -m perf.peers setup tmux`), or as in the paper. `perf.ablation` simulates the same at the paper's scale.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from perf.ablation import PAPER, PARTS, VARIANTS, Variant, gain_bars, paper_gain, system_of
from perf.balance_vllm import open_servers
from perf.engine_replay import watch_engine
from perf.harness import CannotRun, Finding, Rows, rotated, rows_of, run_benchmark, tell
from perf.processes import MachineTime, ProcessTime, machine_time, open_child, raise_file_limit, tree_time
from perf.trace import OURS, QUICK_STEPS, load_trace, run_round
from perf.training import (
    PAPER_ACTION_S,
    PAPER_TMUX_ACTION_S,
    DrawnWork,
    GradedHandler,
    Rollouts,
    StepScale,
    StepsTaken,
    Trainer,
    instance_of,
)
from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.session import Accepted
from prorl_launch.paths import engine_python, model_dir
from prorl_trio.client import connect
from prorl_trio.config import load_config
from prorl_trio.edges.endpoints import endpoint_url
from prorl_trio.inference.engines.protocol import CompletionRequest
from prorl_trio.inference.pool.partial import PartialCompletion
from prorl_trio.node.garbage import open_garbage_searches
from prorl_trio.node.parts import engine_finder, open_backends
from prorl_trio.node.serve import serve_node
from prorl_trio.sampling import JobTemplate
from prorl_trio.simulation.config import Distribution, SimulationConfig
from prorl_trio.tasks.handlers.registry import HandlerRegistry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from perf.harness import Options
    from perf.trace import Answered
    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.client import RolloutClient
    from prorl_trio.inference.pool.lease import Lease
    from prorl_trio.types.models import JobSpec, TaskInstance

TOKEN: Final = "a-token-of-the-benchmark"
SHELL_TIMEOUT_S: Final = 120.0
FIRST_TOKEN_ID, TOKEN_IDS = 1000, 40_000
"""A rollout's prompts consist of one token of its own out of these, so that no two share a prefix."""
STEP_TIMEOUT_S: Final = 900.0
"""A step that takes longer hangs."""
GROUPS_APART: Final = 10_000
"""Between the numbers of the groups of two steps: a step begins with the same ones in every system."""
NOTHING: Final = Distribution(value=0)
SMALL_WORK: Final = DrawnWork(
    turns_p50=3.0,
    max_turns=10,
    prompt_tokens=200,
    completion_tokens=6.0,
    observation_tokens=30.0,
    sandbox_start_s=NOTHING,
    prepare_s=NOTHING,
    evaluation_s=NOTHING,
)
"""As in `perf.ablation`, and smaller in all but the actions. Sandboxes take the time that they take."""


# ---------------------------------------------------------------- the node, in a process of its own


class _RealRollouts(Rollouts):
    """Drawn turns over a real engine, and commands in a real shell."""

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

    async def _act_alone(self, context: RolloutContext, random: Random) -> None:
        assert context.sandbox is not None
        seconds = self._config.work.tool_s.draw(random)
        with context.waiting("tool bash", "sandbox"):
            done = await context.sandbox.bash(f"sleep {seconds:.4f}", timeout_s=SHELL_TIMEOUT_S)
        if done.exit_code != 0:
            raise RuntimeError(f"a command ended with {done.exit_code}: {done.output}")

    def _random(self, context: RolloutContext, stage: str) -> Random:
        return Random(f"{_place_of(context)} {stage}")


class WorkedHandler(GradedHandler):
    """`GradedHandler` over real engines and shells. All systems meet the same tasks, whatever a run is called."""

    name = "ablation"

    async def init(self, context: RolloutContext) -> None:
        """Start the shell."""
        assert context.sandbox is not None
        with context.waiting("start of the shell", "sandbox"):
            await context.sandbox.bash("true", timeout_s=SHELL_TIMEOUT_S)

    def _place_of(self, context: RolloutContext) -> str:
        return _place_of(context)


def _place_of(context: RolloutContext) -> str:
    """Return the instance's number and the place in its group: the end of the job's id."""
    return context.spec.job_id.rpartition("-g")[2]


@asynccontextmanager
async def serve_worked(config_file: str) -> AsyncIterator[str]:
    """Serve a node of this node.toml whose rollouts are drawn; yield its URL."""
    config = load_config(Path(config_file))
    async with AsyncExitStack() as stack:
        shares = []
        for url in config.backends.urls:
            alone = msgspec.structs.replace(config.backends, urls=[url])
            shares.append(await stack.enter_async_context(open_backends(alone, engine_finder(alone, None))))
        config_of_work = SimulationConfig(work=SMALL_WORK.model(1.0))
        handler = WorkedHandler(config_of_work, SMALL_WORK, shares, rollouts=_RealRollouts)

        async def serve(*, task_status: trio.TaskStatus[Any]) -> None:  # noqa: ASYNC128 - serve_node does
            await serve_node(config, HandlerRegistry([handler]), task_status=task_status)

        await stack.enter_async_context(open_garbage_searches())
        nursery = await stack.enter_async_context(open_single_nursery())
        yield endpoint_url(await nursery.start(serve))
        os.kill(os.getpid(), signal.SIGTERM)


# ---------------------------------------------------------------- steps


class System(msgspec.Struct, frozen=True, kw_only=True):
    """A system, by what it does. `extra_action_s` is added to each action."""

    balanced: bool = True
    extra_action_s: float = 0.0
    cleans_up: bool = True

    def instance(self, number: int) -> TaskInstance:
        """Return the instance of that number for it."""
        return instance_of(
            number, split=not self.balanced, extra_action_s=self.extra_action_s, handler=WorkedHandler.name
        )


class _ClientTrainer(Trainer):
    """Steps through a real node, by a real client."""

    def __init__(self, client: RolloutClient, system: System, scale: StepScale) -> None:
        super().__init__(scale, "early" if system.cleans_up else "refill", system.instance)
        self._client = client

    async def submit(self, spec: JobSpec) -> None:
        await _submit(self._client, [spec])

    async def cancel(self, job_id: str) -> None:
        await self._client.cancel([job_id], "its batch is complete")

    async def receive(self) -> None:
        """Take outcomes for ever."""
        async for outcome in self._client.results(follow=True):
            self.arrived(outcome)


async def take_steps(
    client: RolloutClient, system: System, scale: StepScale, steps: Sequence[int], *, run: str
) -> StepsTaken:
    """Take the steps of these numbers, one after the other, each from nothing. `run` begins the ids of their jobs.

    Raises:
        RuntimeError: a rollout failed or was rejected.
        trio.TooSlowError: a step takes longer than `STEP_TIMEOUT_S`.
    """
    trainer = _ClientTrainer(client, system, scale)
    async with open_single_nursery() as nursery:
        nursery.start_soon(trainer.send)
        nursery.start_soon(trainer.receive)
        for number in steps:
            with trio.fail_after(STEP_TIMEOUT_S):
                await trainer.step(f"{run}-{number}", number, GROUPS_APART * number)
        nursery.cancel_scope.cancel()
    return trainer.taken


async def warm_up(client: RolloutClient, rollouts: int) -> None:
    """Run so many rollouts of an easy instance at once: engines and sandboxes have then started all that they need."""
    easy = next(each for each in map(System().instance, range(1000)) if each.payload["level"] == 0)
    specs = [JobTemplate().spec(f"warm-up-g{easy.instance_id}-{index}-1", "", easy) for index in range(rollouts)]
    await _submit(client, specs)
    async for outcome in client.results(rollouts):
        if outcome.status != "completed":
            raise RuntimeError(f"job {outcome.job_id} {outcome.status}: {outcome.error}")


async def _submit(client: RolloutClient, specs: Sequence[JobSpec]) -> None:
    for answer in await client.submit(specs):
        if not isinstance(answer, Accepted):
            raise RuntimeError(f"job {answer.job_id} was rejected: {answer.message}")


# ---------------------------------------------------------------- what tmux adds to an action

TMUX: Final = "tmux"
PAPER_EXTRA_S: Final = PAPER_TMUX_ACTION_S - PAPER_ACTION_S


class ExtraAction(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that tmux adds to an action; `measured`: here, over so many commands, or 0: they are the paper's.

    `why`: why they are not measured.
    """

    seconds: float
    measured: int = 0
    why: str = ""


async def measure_extra_action() -> ExtraAction:
    """Run the first commands of the recorded trace through both; take the paper's difference where tmux is missing."""
    if shutil.which("git") is None or importlib.util.find_spec("pytest") is None:
        return ExtraAction(seconds=PAPER_EXTRA_S, why="the trace runs git and pytest, and one of them is missing")
    tell(f"{QUICK_STEPS} recorded commands through our shell and through OpenHands' terminal on tmux")
    failures: dict[str, str] = {}
    answers = await run_round(load_trace()[:QUICK_STEPS], [OURS, TMUX], failures)
    return extra_of(answers, failures.get(TMUX, ""))


def extra_of(answers: Mapping[str, Sequence[Answered]], failure: str) -> ExtraAction:
    """Return the mean difference over the commands that both have answered alike; the paper's after a failure."""
    ours, theirs = answers.get(OURS, []), answers.get(TMUX, [])
    pairs = [] if failure else list(zip(ours, theirs, strict=True))
    both = [(one, other) for one, other in pairs if one.exit_code == other.exit_code]
    if not both:
        return ExtraAction(seconds=PAPER_EXTRA_S, why=failure or "tmux answered no command as our shell did")
    extra_s = fmean(other.elapsed_s - one.elapsed_s for one, other in both)
    return ExtraAction(seconds=max(0.0, extra_s), measured=len(both))


# ---------------------------------------------------------------- measuring


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """The amounts of a measurement: `rounds` of one step of each system. `workers`: of the node."""

    step: StepScale
    workers: int
    rounds: int


QUICK: Final = Scale(step=StepScale(groups=4, size=4, at_once=12), workers=8, rounds=1)
FULL: Final = Scale(step=StepScale(groups=8, size=4, at_once=12), workers=8, rounds=4)
"""There are as many instances at work as engines, as in the paper, and about a third of a batch is at work at once.
Every worker is busy, and the next group is at hand."""


class SystemRun(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a system.

    Attributes:
        taken: its rollouts.
        engine_busy: share of the time in which each engine had a request, mean over the engines.
        others_busy: share of the processors' time that went to processes which are none of the measurement's.
    """

    taken: StepsTaken
    engine_busy: float
    others_busy: float

    @property
    def trained_per_s(self) -> float:
        """Return the rollouts trained on, a second."""
        return self.taken.trained / self.taken.wall_s


Runs = dict[tuple[Variant, int], SystemRun]
"""By system and round."""


async def measure_ablation_here(options: Options) -> Finding:
    """Start engines and a node, and take steps with each system in turn.

    Raises:
        CannotRun: there is no engine here.
    """
    if not engine_python().exists():
        raise CannotRun("there is no engine here to measure: run `make engine`")
    scale = QUICK if options.quick else FULL
    raise_file_limit()
    extra = await measure_extra_action()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-ablation-")))
        urls = await stack.enter_async_context(open_servers(folder))
        path, workers = folder / "node.toml", scale.workers
        config = {
            "model": {"path": str(model_dir())},
            "listen": {"port": 0, "token": TOKEN},
            "backends": {"urls": urls, "required": True},
            "stages": {"init_workers": workers, "run_workers": workers, "eval_workers": workers},
        }
        await trio.Path(path).write_bytes(msgspec.toml.encode(config))
        _, url = await stack.enter_async_context(open_child(serve_worked, str(path), ready=str))
        client = await stack.enter_async_context(connect(url, TOKEN))
        return ablation_here_finding(await take_rounds(client, urls, scale, systems_of(extra)), scale, extra)


def systems_of(extra: ExtraAction) -> dict[Variant, System]:
    """Return the whole system, and those that lack a part."""
    return {
        "full": System(),
        "no_balancing": System(balanced=False),
        "no_bash": System(extra_action_s=extra.seconds),
        "no_cleanup": System(cleans_up=False),
    }


async def take_rounds(
    client: RolloutClient, urls: Sequence[str], scale: Scale, systems: Mapping[Variant, System]
) -> Runs:
    """Take a step with each system in each round, another one first each time."""
    await warm_up(client, scale.workers)
    runs: Runs = {}
    for number in range(scale.rounds):
        for variant in rotated(list(systems), number):
            tell(f"round {number + 1} of {scale.rounds}: {PARTS.get(variant, 'nothing')} left out")
            async with AsyncExitStack() as stack:
                seen = [await stack.enter_async_context(watch_engine(url)) for url in urls]
                machine, own = machine_time(), tree_time(os.getpid())
                taken = await take_steps(client, systems[variant], scale.step, [number], run=variant)
                others_busy = _others_busy(machine, own)
            tell(f"  {taken.trained} trained on, {taken.ended} finished in {taken.wall_s:.0f} s")
            engine_busy = fmean(engine.busy_share for engine in seen)
            runs[variant, number] = SystemRun(taken=taken, engine_busy=engine_busy, others_busy=others_busy)
    return runs


def _others_busy(machine: MachineTime, own: ProcessTime) -> float:
    """Return the share of the processors' time since then that others than this process and its children took."""
    now = machine_time()
    own_share = tree_time(os.getpid()).since(own).all_s / (now.all_s - machine.all_s)
    return max(0.0, now.busy_share_since(machine) - own_share)


# ---------------------------------------------------------------- what came out


def ablation_here_finding(runs: Runs, scale: Scale, extra: ExtraAction) -> Finding:
    """Return the tables of runs by system and round; every round has every system."""
    metrics: dict[str, float] = {"ablation_here.extra_action_s": extra.seconds}
    for variant in VARIANTS:
        of, steps = f"ablation_here.{variant}", _of(runs, variant)
        wall_s = sum(run.taken.wall_s for run in steps)
        actions_s = [seconds for run in steps for seconds in run.taken.actions_s]
        metrics[f"{of}.trained_per_s"] = sum(run.taken.trained for run in steps) / wall_s
        metrics[f"{of}.ended_per_s"] = sum(run.taken.ended for run in steps) / wall_s
        metrics[f"{of}.cancelled"] = float(sum(run.taken.cancelled for run in steps))
        metrics[f"{of}.surplus"] = float(sum(run.taken.surplus for run in steps))
        metrics[f"{of}.action_s"] = fmean(actions_s) if actions_s else 0.0
        metrics[f"{of}.engine_busy"] = sum(run.engine_busy * run.taken.wall_s for run in steps) / wall_s
        metrics[f"{of}.others_busy"] = sum(run.others_busy * run.taken.wall_s for run in steps) / wall_s
    for variant in PARTS:
        of, full = f"ablation_here.{variant}", "ablation_here.full"
        metrics[f"{of}.gain"] = metrics[f"{full}.trained_per_s"] / metrics[f"{of}.trained_per_s"] - 1
        metrics[f"{of}.ended_gain"] = metrics[f"{full}.ended_per_s"] / metrics[f"{of}.ended_per_s"] - 1
        pairs = zip(_of(runs, "full"), _of(runs, variant), strict=True)
        gains = [whole.trained_per_s / without.trained_per_s - 1 for whole, without in pairs]
        metrics[f"{of}.gain_min"], metrics[f"{of}.gain_max"] = min(gains), max(gains)
        metrics[f"{of}.paper_gain"] = paper_gain(variant)
    return Finding(
        title="Table 3, on this machine",
        tables=[_table(metrics)],
        figures=[gain_bars(metrics, "ablation_here", "here")],
        caption=_caption(runs, scale, extra, metrics),
        metrics=metrics,
    )


def _of(runs: Runs, variant: Variant) -> list[SystemRun]:
    return [run for (left_out, _), run in sorted(runs.items()) if left_out == variant]


def _table(metrics: Mapping[str, float]) -> Rows:
    def value(variant: Variant, name: str) -> float:
        return metrics[f"ablation_here.{variant}.{name}"]

    def gain(text: str) -> Any:
        return lambda variant: (
            ""
            if variant == "full"
            else text.format(
                **{name: value(variant, name) for name in ("gain", "gain_min", "gain_max", "ended_gain", "paper_gain")}
            )
        )

    return rows_of(
        "Table 3 on this machine",
        VARIANTS,
        {
            "system (in brackets: the paper)": system_of,
            "action": lambda variant: f"{value(variant, 'action_s'):.2f} s ({PAPER[variant].action_s:.2f} s)",
            "engines busy": lambda variant: f"{value(variant, 'engine_busy'):.0%} ({PAPER[variant].gpu_use:.0%})",
            "others' load": lambda variant: f"{value(variant, 'others_busy'):.0%}",
            "rollouts/s, trained on": lambda variant: (
                f"{value(variant, 'trained_per_s'):.3f} ({PAPER[variant].instances_per_s:.2f})"
            ),
            "finished": lambda variant: f"{value(variant, 'ended_per_s'):.3f}",
            "gain by it": gain("{gain:+.0%}"),
            "in single steps": gain("{gain_min:+.0%} to {gain_max:+.0%}"),
            "gain in those finished": gain("{ended_gain:+.0%}"),
            "paper's gain": gain("{paper_gain:+.0%}"),
        },
    )


def _caption(runs: Runs, scale: Scale, extra: ExtraAction, metrics: Mapping[str, float]) -> list[str]:
    step, work = scale.step, SMALL_WORK
    rounds = len(_of(runs, "full"))
    if extra.measured:
        of_tmux = (
            f"{extra.seconds:.3f} s, measured here over {extra.measured} recorded commands through OpenHands' terminal "
            "on tmux and through our shell"
        )
    else:
        of_tmux = f"{extra.seconds:.2f} s, the paper's difference ({extra.why})"
    directions = [
        f"{part} gains {metrics[f'ablation_here.{variant}.gain']:+.0%} (the paper: {paper_gain(variant):+.0%})"
        for variant, part in PARTS.items()
    ]
    return [
        "Measured here: two vLLM servers of SmolLM2-135M on a core each, one node with real sandboxes, one client. "
        f"{rounds} steps of each system, in turn, each until {step.groups} informative groups of {step.size} rollouts "
        f"are there; {scale.workers} rollouts run at once. Node and sandboxes run on the engines' cores.",
        "The work is drawn, and not the policy's: rollouts of "
        f"{work.turns_p50:g} turns (median, at most {work.max_turns}) over a prompt of {work.prompt_tokens} tokens, "
        f"completions of {work.completion_tokens:g} (median), and commands that sleep, for {work.action_s:g} s on "
        "average, the paper's action. Each step begins with the same instances in every system, some harder than "
        "others.",
        f"What is left out: without balancing, each instance has the engine of its number, with all its rollouts; "
        f"without efficient bash, an action takes longer by {of_tmux}; without clean-up, all that runs when the batch "
        "is complete is awaited.",
        f"What differs: {'; '.join(directions)}. Throughput is of informative rollouts that are trained on; few steps "
        "of few groups scatter, as the column of single steps shows: the direction, not the size. The busy share is "
        "the time in which an engine had anything to do; others' load is the share of the processors that went to "
        "processes which have nothing to do with this: where it differs between systems, so do their engines.",
    ]


if __name__ == "__main__":
    sys.exit(run_benchmark(measure_ablation_here))
