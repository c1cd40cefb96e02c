"""The paper's ablation (Table 3) on the real stack of this machine: two vLLM servers, a node, sandboxes, a client.

    python -m perf.ablation_here [--quick] [--json FILE]

Load balancing, efficient bash and the clean-up of stale jobs are removed one at a time. Each system in turn takes steps
of DAPO, from the same tasks, with random turns, tokens and commands. Without efficient bash, an action takes the
additional time of OpenHands' terminal on tmux. It is measured if installed (`python -m perf.peers setup tmux`), and
otherwise taken from the paper. `perf.ablation` simulates the same at the paper's scale.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from perf.ablation import PARTS, VARIANTS, Variant, gain_bars, paper_figures, paper_gain, system_of
from perf.engine_replay import watch_engine
from perf.harness import CannotRun, Report, caption_of, rotated, rows_of, run_benchmark, tell
from perf.processes import MachineTime, ProcessTime, machine_time, open_child, raise_file_limit, tree_time
from perf.rollouts import TOKEN, serve_handler, submit_all
from perf.trace import OURS, QUICK_STEPS, load_trace, run_round
from perf.training import (
    PAPER_ACTION_S,
    PAPER_TMUX_ACTION_S,
    Conditions,
    GradedHandler,
    Rollouts,
    Steps,
    Trainer,
    instance_of,
)
from prorl_ipc.nursery import open_single_nursery
from prorl_launch.paths import engine_python, model_dir
from prorl_launch.vllm import open_vllm
from prorl_trio.client import connect
from prorl_trio.config import load_config
from prorl_trio.inference.engines.protocol import CompletionRequest
from prorl_trio.inference.pool.partial import PartialCompletion
from prorl_trio.node.parts import engine_finder, open_backends
from prorl_trio.sampling import JobTemplate
from prorl_trio.simulation.config import Distribution, SimulationConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from perf.harness import Options
    from perf.trace import Answered
    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.client import RolloutClient
    from prorl_trio.inference.pool.lease import Lease
    from prorl_trio.types.models import JobSpec

SERVERS: Final = 2
SERVER_ARGUMENTS: Final = ("--block-size", "32", "--num-gpu-blocks-override", "300")
"""Caches for about six rollouts, so that more rollouts on one server evict each other's prefixes."""
SHELL_TIMEOUT_S: Final = 120.0
FIRST_TOKEN_ID, TOKEN_IDS = 1000, 40_000
"""Range of token ids. A rollout's prompts repeat a single id from it, so that no two rollouts share a prefix."""
STEP_TIMEOUT_S: Final = 900.0
"""Seconds after which a step counts as hung."""
GROUPS_APART: Final = 10_000
"""Distance between the group numbers of two steps. A step starts with the same numbers in every system."""
NOTHING: Final = Distribution(value=0)
FULL: Final = Conditions(
    turns_p50=3.0,
    max_turns=10,
    prompt_tokens=200,
    completion_tokens=6.0,
    observation_tokens=30.0,
    sandbox_start_s=NOTHING,
    prepare_s=NOTHING,
    evaluation_s=NOTHING,
    groups=8,
    size=4,
    workers=8,
    ahead=4,
)
"""As in `perf.ablation`, but smaller except for the actions. Sandboxes take their real time. As in the paper, the
number of active instances equals the number of engines, and about a third of a batch is active. Every worker is busy,
and the next group is ready."""
QUICK: Final = msgspec.structs.replace(FULL, groups=4)
QUICK_ROUNDS, ROUNDS = 1, 4
"""Rounds of one step for each system."""


# ---------------------------------------------------------------- the node, in its own process


class _RealRollouts(Rollouts):
    """Random turns on a real engine, and commands in a real shell."""

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
    """`GradedHandler` over real engines and shells. All systems get the same tasks, independent of the run's name."""

    name = "ablation"

    async def init(self, context: RolloutContext) -> None:
        assert context.sandbox is not None
        with context.waiting("start of the shell", "sandbox"):
            await context.sandbox.bash("true", timeout_s=SHELL_TIMEOUT_S)

    def _place_of(self, context: RolloutContext) -> str:
        return _place_of(context)


def _place_of(context: RolloutContext) -> str:
    """Return the instance's number and the place in its group, from the end of the job's id."""
    return context.spec.job_id.rpartition("-g")[2]


@asynccontextmanager
async def serve_worked(config_file: str) -> AsyncIterator[str]:
    """Serve a node with this node.toml and random rollouts; yield its URL."""
    config = load_config(Path(config_file))
    async with AsyncExitStack() as stack:
        shares = []
        for url in config.backends.urls:
            alone = msgspec.structs.replace(config.backends, urls=[url])
            shares.append(await stack.enter_async_context(open_backends(alone, engine_finder(alone, None))))
        handler = WorkedHandler(SimulationConfig(work=FULL.model(1.0)), FULL, shares, rollouts=_RealRollouts)
        yield await stack.enter_async_context(serve_handler(config, handler))


@asynccontextmanager
async def open_servers(folder: Path) -> AsyncIterator[list[str]]:
    """Serve the demo's model twice, with one core each and small caches. Their logs are in `folder`."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # an idle server does not lend its core
    async with AsyncExitStack() as stack:
        urls = []
        for number in range(1, SERVERS + 1):
            tell(f"vLLM {number} of {SERVERS} starts")
            log_file = folder / f"vllm-{number}.log"
            server = open_vllm(engine_python(), model_dir(), log_file=log_file, extra_args=SERVER_ARGUMENTS)
            urls.append((await stack.enter_async_context(server)).url)
        yield urls


# ---------------------------------------------------------------- steps


class _ClientTrainer(Trainer):
    """A trainer that steps through a real node with a real client."""

    handler = WorkedHandler.name

    def __init__(self, client: RolloutClient, conditions: Conditions) -> None:
        super().__init__(conditions)
        self._client = client

    async def submit(self, spec: JobSpec) -> None:
        await submit_all(self._client, [spec])

    async def cancel(self, job_id: str) -> None:
        await self._client.cancel([job_id], "its batch is complete")

    async def receive(self) -> None:
        async for outcome in self._client.results(follow=True):
            self.arrived(outcome)


async def take_steps(client: RolloutClient, conditions: Conditions, steps: Sequence[int], *, run: str) -> Steps:
    """Take the steps with these numbers, one after the other, each from an empty state. `run` is the prefix of job ids.

    Raises:
        RuntimeError: a rollout failed or was rejected.
        trio.TooSlowError: a step takes longer than `STEP_TIMEOUT_S`.
    """
    trainer = _ClientTrainer(client, conditions)
    async with open_single_nursery() as nursery:
        nursery.start_soon(trainer.send)
        nursery.start_soon(trainer.receive)
        for number in steps:
            with trio.fail_after(STEP_TIMEOUT_S):
                await trainer.step(f"{run}-{number}", number, GROUPS_APART * number)
        nursery.cancel_scope.cancel()
    return trainer.taken


async def warm_up(client: RolloutClient, rollouts: int) -> None:
    """Run this many rollouts of an easy instance at once, so that engines and sandboxes finish their lazy start."""
    instances = (instance_of(number, FULL, handler=WorkedHandler.name) for number in range(1000))
    easy = next(each for each in instances if each.payload["level"] == 0)
    specs = [JobTemplate().spec(f"warm-up-g{easy.instance_id}-{index}-1", "", easy) for index in range(rollouts)]
    await submit_all(client, specs)
    async for outcome in client.results(rollouts):
        if outcome.status != "completed":
            raise RuntimeError(f"job {outcome.job_id} {outcome.status}: {outcome.error}")


# ---------------------------------------------------------------- the additional time of tmux

TMUX: Final = "tmux"
PAPER_EXTRA_S: Final = PAPER_TMUX_ACTION_S - PAPER_ACTION_S


class ExtraAction(msgspec.Struct, frozen=True, kw_only=True):
    """Additional seconds per action of tmux. `measured`: number of commands measured here, or 0 for the paper's value.

    `why`: the reason why they were not measured.
    """

    seconds: float
    measured: int = 0
    why: str = ""

    def __str__(self) -> str:
        if not self.measured:
            return f"{self.seconds:.2f} s, the paper's difference ({self.why})"
        return (
            f"{self.seconds:.3f} s, measured here over {self.measured} recorded commands through OpenHands' terminal "
            "on tmux and through our shell"
        )


async def measure_extra_action() -> ExtraAction:
    """Run the first commands of the recorded trace through both. Use the paper's difference if tmux is missing."""
    if shutil.which("git") is None or importlib.util.find_spec("pytest") is None:
        return ExtraAction(seconds=PAPER_EXTRA_S, why="the trace runs git and pytest, and one of them is missing")
    tell(f"{QUICK_STEPS} recorded commands through our shell and through OpenHands' terminal on tmux")
    failures: dict[str, str] = {}
    answers = await run_round(load_trace()[:QUICK_STEPS], [OURS, TMUX], failures)
    return extra_of(answers, failures.get(TMUX, ""))


def extra_of(answers: Mapping[str, Sequence[Answered]], failure: str) -> ExtraAction:
    """Return the mean difference over commands with equal answers, or the paper's after a failure."""
    ours, theirs = answers.get(OURS, []), answers.get(TMUX, [])
    pairs = [] if failure else list(zip(ours, theirs, strict=True))
    both = [(one, other) for one, other in pairs if one.exit_code == other.exit_code]
    if not both:
        return ExtraAction(seconds=PAPER_EXTRA_S, why=failure or "tmux answered no command as our shell did")
    extra_s = fmean(other.elapsed_s - one.elapsed_s for one, other in both)
    return ExtraAction(seconds=max(0.0, extra_s), measured=len(both))


# ---------------------------------------------------------------- measuring

Runs = dict[tuple[Variant, int], Steps]
"""Runs by system and round."""


async def measure_ablation_here(options: Options) -> Report:
    """Start engines and a node, and take steps with each system in turn.

    Raises:
        CannotRun: no engine is installed.
    """
    if not engine_python().exists():
        raise CannotRun("there is no engine here to measure: run `make engine`")
    work, rounds = (QUICK, QUICK_ROUNDS) if options.quick else (FULL, ROUNDS)
    raise_file_limit()
    extra = await measure_extra_action()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-ablation-")))
        urls = await stack.enter_async_context(open_servers(folder))
        config = {
            "model": {"path": str(model_dir())},
            "listen": {"port": 0, "token": TOKEN},
            "backends": {"urls": urls, "required": True},
            "stages": {f"{stage}_workers": work.workers for stage in ("init", "run", "eval")},
        }
        path = trio.Path(folder / "node.toml")
        await path.write_bytes(msgspec.toml.encode(config))
        _, url = await stack.enter_async_context(open_child(serve_worked, str(path), ready=str))
        client = await stack.enter_async_context(connect(url, TOKEN))
        return ablation_here_report(await take_rounds(client, urls, rounds, systems_of(work, extra)), work, extra)


def systems_of(work: Conditions, extra: ExtraAction) -> dict[Variant, Conditions]:
    """Return the full system, and the systems without one part."""
    systems = {variant: msgspec.structs.replace(work, **lacking) for variant, lacking in VARIANTS.items()}
    return systems | {"no_bash": msgspec.structs.replace(work, extra_action_s=extra.seconds)}


async def take_rounds(
    client: RolloutClient, urls: Sequence[str], rounds: int, systems: Mapping[Variant, Conditions]
) -> Runs:
    """Take a step with each system in each round, starting with a different system each time."""
    await warm_up(client, systems["full"].workers)
    runs: Runs = {}
    for number in range(rounds):
        for variant in rotated(list(systems), number):
            tell(f"round {number + 1} of {rounds}: {PARTS.get(variant, 'nothing')} left out")
            async with AsyncExitStack() as stack:
                seen = [await stack.enter_async_context(watch_engine(url)) for url in urls]
                machine, own = machine_time(), tree_time(os.getpid())
                taken = await take_steps(client, systems[variant], [number], run=variant)
                taken.others_busy = _others_busy(machine, own)
            tell(f"  {taken.trained} trained on, {taken.ended} finished in {taken.wall_s:.0f} s")
            taken.engine_busy = fmean(engine.busy_share for engine in seen)
            runs[variant, number] = taken
    return runs


def _others_busy(machine: MachineTime, own: ProcessTime) -> float:
    """Return the share of processor time since then that other processes used."""
    now = machine_time()
    own_share = tree_time(os.getpid()).since(own).all_s / (now.all_s - machine.all_s)
    return max(0.0, now.busy_share_since(machine) - own_share)


# ---------------------------------------------------------------- results

COLUMNS: Final[dict[str, Callable[[Variant], str] | str]] = {
    "system (in brackets: the paper)": system_of,
    "action": "{action_s:.2f} s ({paper_action_s:.2f} s)",
    "engines busy": "{engine_busy:.0%} ({paper_gpu_use:.0%})",
    "others' load": "{others_busy:.0%}",
    "rollouts/s, trained on": "{trained_per_s:.3f} ({paper_instances_per_s:.2f})",
    "finished": "{ended_per_s:.3f}",
    "gain by it": "{gain:+.0%}",
    "in single steps": "{gain_min:+.0%} to {gain_max:+.0%}",
    "gain in those finished": "{ended_gain:+.0%}",
    "paper's gain": "{paper_gain:+.0%}",
}


def ablation_here_report(runs: Runs, work: Conditions, extra: ExtraAction) -> Report:
    """Return the tables of runs by system and round. Every round contains every system."""
    metrics: dict[str, float] = {"ablation_here.extra_action_s": extra.seconds}
    for variant in VARIANTS:
        metrics |= {f"ablation_here.{variant}.{name}": value for name, value in _sums(_of(runs, variant)).items()}
    for variant in PARTS:
        of, full = f"ablation_here.{variant}", "ablation_here.full"
        metrics[f"{of}.gain"] = metrics[f"{full}.trained_per_s"] / metrics[f"{of}.trained_per_s"] - 1
        metrics[f"{of}.ended_gain"] = metrics[f"{full}.ended_per_s"] / metrics[f"{of}.ended_per_s"] - 1
        pairs = zip(_of(runs, "full"), _of(runs, variant), strict=True)
        gains = [whole.trained_per_s / without.trained_per_s - 1 for whole, without in pairs]
        metrics[f"{of}.gain_min"], metrics[f"{of}.gain_max"] = min(gains), max(gains)
        metrics[f"{of}.paper_gain"] = paper_gain(variant)
    cells = metrics | paper_figures("ablation_here")
    differs = [
        f"{part} gains {metrics[f'ablation_here.{variant}.gain']:+.0%} (the paper: {paper_gain(variant):+.0%})"
        for variant, part in PARTS.items()
    ]
    rounds = len(_of(runs, "full"))
    return Report(
        title="Table 3, on this machine",
        tables=[rows_of("Table 3 on this machine", VARIANTS, COLUMNS, metrics=cells, of="ablation_here")],
        figures=[gain_bars(metrics, "ablation_here", "here")],
        notes=caption_of("ablation_here", rounds=rounds, work=work, of_tmux=extra, differs="; ".join(differs)),
        detail_metrics=metrics,
    )


def _sums(steps: Sequence[Steps]) -> dict[str, float]:
    wall_s = sum(run.wall_s for run in steps)
    return {
        "trained_per_s": sum(run.trained for run in steps) / wall_s,
        "ended_per_s": sum(run.ended for run in steps) / wall_s,
        "cancelled": float(sum(run.cancelled for run in steps)),
        "surplus": float(sum(run.surplus for run in steps)),
        "action_s": fmean([seconds for run in steps for seconds in run.actions_s] or [0.0]),
        "engine_busy": sum(run.engine_busy * run.wall_s for run in steps) / wall_s,
        "others_busy": sum(run.others_busy * run.wall_s for run in steps) / wall_s,
    }


def _of(runs: Runs, variant: Variant) -> list[Steps]:
    return [run for (left_out, _), run in sorted(runs.items(), key=lambda one: one[0]) if left_out == variant]


if __name__ == "__main__":
    sys.exit(run_benchmark(measure_ablation_here))
