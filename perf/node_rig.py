"""The node under test and its environment in separate processes, and a trainer's load.

The load is single jobs for latencies, then thousands at once; and the same jobs in separate processes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import secrets
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
import tomli_w
import trio

from perf.processes import Child, open_child
from perf.rollouts import TOKEN, math_job, open_engine, run_span, serve_handler, submit_all
from prorl_ipc.channel import connect_unix
from prorl_ipc.client import open_rpc_client
from prorl_ipc.errors import IpcError
from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.sandbox_calls import CellResult, IpythonRun, Ping, Pong, SandboxCall
from prorl_ipc.server import CallContext, CallError, serve_rpc
from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.agent.scoring import open_scorer_pool
from prorl_trio.chat.proof import load_chat_format
from prorl_trio.client import RolloutClient, connect
from prorl_trio.config import ModelConfig, NodeConfig, load_config
from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.sandbox.client import DaemonSandbox
from prorl_trio.sandbox.provider import ProviderReport, SandboxProvider, SandboxSpec
from prorl_trio.tasks.handlers.math import MathHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.types.models import Outcome, Trajectory

TURN_TEXT: Final = '<tool_call>{"name": "ipython", "arguments": {"code": "print(6 * 7)"}}</tool_call>'
BACKLOG: Final = 4096
HANDSHAKE_TIMEOUT_S: Final = 60.0


class World(msgspec.Struct, frozen=True):
    """The addresses of a node's environment."""

    model: str
    quick_engine: str
    slow_engine: str
    daemon_socket: str
    daemon_token: str


@asynccontextmanager
async def serve_world(path: str, engine_s: float) -> AsyncIterator[World]:
    """Serve the environment of a node: fake engines over HTTP, and a stand-in for all daemons over the real RPC.

    `path` is a folder for the model and the daemon's socket. Of the two engines one answers at once, the other after
    `engine_s`. Every completion is the same tool call; every tool call is answered at once.
    """
    folder, token = Path(path), secrets.token_hex(16)
    async with (
        open_engine(folder / "model", TURN_TEXT) as quick,
        open_engine(folder / "slow-model", TURN_TEXT, first_token_s=engine_s) as slow,
        open_single_nursery() as nursery,
    ):
        listener = await _listen(folder / "daemon")
        nursery.start_soon(trio.serve_listeners, partial(_serve_daemon, token), [listener])
        yield World(str(folder / "model"), quick.url, slow.url, str(folder / "daemon"), token)
        nursery.cancel_scope.cancel()


async def _listen(path: Path) -> trio.SocketListener:
    """Listen with a backlog for thousands, because connecting to a Unix socket fails if the backlog is full."""
    listener = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    await listener.bind(str(path))
    listener.listen(BACKLOG)
    return trio.SocketListener(listener)


async def _serve_daemon(token: str, stream: trio.SocketStream) -> None:
    try:
        await serve_rpc(stream, _answer, token=token, handshake_timeout_s=HANDSHAKE_TIMEOUT_S)
    except IpcError as exc:
        print(f"a connection of a sandbox ended badly: {exc}", file=sys.stderr)


async def _answer(body: msgspec.Raw, context: CallContext) -> msgspec.Struct:
    del context
    await trio.lowlevel.checkpoint()
    match msgspec.msgpack.decode(body, type=SandboxCall):
        case IpythonRun():
            return CellResult(stdout="42\n", stderr="", result=None, error=None, execution_count=1, duration_s=0.0)
        case Ping():
            return Pong(uptime_s=0.0, open_fds=0)
        case call:
            raise CallError("unknown", f"the stand-in has no {type(call).__name__}")


ENDED_AT = "ended_monotonic_s"
TOKEN_VARIABLE = "DAEMON_TOKEN"


class StandInProvider(SandboxProvider):
    """A provider whose sandbox is a connection to the stand-in. The node's side is real."""

    name: ClassVar[str] = "stand-in"
    isolated: ClassVar[bool] = False

    def __init__(self, socket: Path, token: str) -> None:
        self._socket = socket
        self._token = token
        self._ids = count(1)

    async def probe(self) -> ProviderReport:
        await trio.lowlevel.checkpoint()
        return ProviderReport(name=self.name, usable=True, version="1")

    @asynccontextmanager
    async def open_sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        stream = await connect_unix(self._socket, connect_timeout_s=spec.start_timeout_s)
        async with open_rpc_client(stream, token=self._token, handshake_timeout_s=spec.start_timeout_s) as rpc:
            yield DaemonSandbox(f"stand-in-{next(self._ids)}", rpc, str)


class StampedHandler(MathHandler):
    """The mathematics handler, with a timestamp at the end of the rollout. It is never given an answer to score."""

    async def prepare(self, resources: Resources) -> None:
        """Do nothing, because nothing is scored."""

    def final_result(self, context: RolloutContext, outcome: Outcome) -> Outcome:
        """Add a timestamp. The monotonic clock is the same in every process of a machine."""
        return msgspec.structs.replace(outcome, details={**outcome.details, ENDED_AT: time.monotonic()})


@asynccontextmanager
async def serve_rig_node(config_file: str, daemon_socket: str) -> AsyncIterator[str]:
    """Serve a complete node with this node.toml and the stand-in's sandboxes; yield its URL.

    The daemon's token is in the environment.
    """
    config = load_config(Path(config_file))
    provider = StandInProvider(Path(daemon_socket), os.environ[TOKEN_VARIABLE])
    async with serve_handler(config, StampedHandler(), provider) as url:
        yield url


QUESTION: Final = {
    "question": "A farmer has 6 fields with 7 trees each, and each tree bears 12 apples. How many apples are there?",
    "answer": "504",
}
RESULT_TIMEOUT_S = 300.0


class JobProcesses(msgspec.Struct, frozen=True):
    """The cost of each process: seconds of CPU, and bytes of unshared memory."""

    cpu_s: list[float]
    private_bytes: list[int]


async def _roll_out(world: World, number: int, turns: int) -> Trajectory:
    handler = StampedHandler()
    async with AsyncExitStack() as stack:
        backends = Backends(made_by(VllmClient))
        stack.push_async_callback(backends.aclose)
        await backends.add(world.quick_engine)
        model = ModelConfig(path=world.model)
        resources = Resources(
            config=NodeConfig(model=model),
            chat_format=load_chat_format(model, proven=False),
            backends=backends,
            scorers=await stack.enter_async_context(open_scorer_pool(1)),
        )
        spec = math_job(f"process-{number}", max_turns=turns, **QUESTION)
        context = RolloutContext(spec=spec, resources=resources)
        provider = StandInProvider(Path(world.daemon_socket), world.daemon_token)
        context.sandbox = await stack.enter_async_context(provider.open_sandbox(SandboxSpec()))
        await handler.init(context)
        await handler.run(context)
        await handler.eval(context)
        trajectory = context.trajectory()
    assert trajectory is not None
    return trajectory


def _job(world: World, number: int, turns: int, results: Any) -> None:
    """Run one job as the whole work of a process."""
    trajectory = trio.run(_roll_out, world, number, turns)
    results.put((number, msgspec.msgpack.encode(trajectory), *_own_cost()))


def _own_cost() -> tuple[float, int]:
    gc.collect()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private_kib = sum(int(line.split()[1]) for line in lines if line.startswith("Private"))
    return usage.ru_utime + usage.ru_stime, 1024 * private_kib


@asynccontextmanager
async def run_job_processes(world: dict[str, str], jobs: int, turns: int) -> AsyncIterator[JobProcesses]:
    """Run jobs in the reference's way, for comparison: a spawned OS process for each, all at once.

    Each process imports the code of a rollout, loads the model's tokenizer, probes the engine, and opens its sandbox.
    It runs our own turn loop once, with the same engine and stand-in, and returns its trajectory over a queue of a
    `multiprocessing` manager. A process reports its own cost at its end. The cost of the parent and the manager is
    therefore omitted, in favour of this way.
    """
    yield await trio.to_thread.run_sync(_spawn, msgspec.convert(world, World), jobs, turns)


def _spawn(world: World, jobs: int, turns: int) -> JobProcesses:
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as shared:
        results: Any = shared.Queue()
        processes = [spawn.Process(target=_job, args=(world, number, turns, results)) for number in range(jobs)]
        for process in processes:
            process.start()
        costs = [results.get(timeout=RESULT_TIMEOUT_S)[2:] for _ in processes]
        for process in processes:
            process.join()
    return JobProcesses([cpu_s for cpu_s, _ in costs], [size for _, size in costs])


BYTES_PER_TOKEN: Final = 9
RSS_INTERVAL_S: Final = 0.25
CONCURRENT_STARTS: Final = 64


class NodeRig(msgspec.Struct, frozen=True):
    """A running node, its world, and a trainer's connection to it."""

    node: Child
    world_child: Child
    world: World
    client: RolloutClient


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """Many rollouts at once.

    Attributes:
        turns, tokens: totals. `concurrent`: maximum number of rollouts in RUN at the same time.
        cpu_s: CPU of the node's process, from the first submission to the last outcome. `world_cpu_s`: CPU of the
            process with the engines and the stand-in for the daemons. `wall_s`: wall-clock time of the same period.
        rss_bytes: maximum memory of the node, and `rss_before_bytes` before the load.
        stalls: as the node reports them.
    """

    concurrent: int
    turns: int
    tokens: int
    cpu_s: float
    world_cpu_s: float
    wall_s: float
    rss_bytes: int
    rss_before_bytes: int
    stalls: dict[str, Any]


@asynccontextmanager
async def open_node_rig(folder: Path, *, rollouts: int, engine_s: float) -> AsyncIterator[NodeRig]:
    """Start environment, node and trainer, with the fast engine. All end with the block."""
    async with open_child(serve_world, str(folder), engine_s, ready=World) as (world_child, world):
        config = {
            "model": {"path": world.model},
            "listen": {"port": 0, "token": TOKEN, "max_message_bytes": 256 * 2**20},
            "backends": {"urls": [world.quick_engine], "required": True, "max_connections_per_backend": rollouts},
            "sandbox": {
                "max_warm": 0,
                "max_concurrent_starts": CONCURRENT_STARTS,
                "max_concurrent_starts_per_image": CONCURRENT_STARTS,
            },
            "stages": {"init_workers": CONCURRENT_STARTS, "run_workers": rollouts, "eval_workers": 4},
            "budgets": {"run_s": 3600.0},
            "monitoring": {"stall_warn_s": 3600.0},
        }
        path = folder / "node.toml"
        path.write_text(tomli_w.dumps(config))
        env = {"DAEMON_TOKEN": world.daemon_token}
        async with (
            open_child(serve_rig_node, str(path), world.daemon_socket, ready=str, env=env) as (node, url),
            connect(url, TOKEN) as client,
        ):
            yield NodeRig(node, world_child, world, client)


async def measure_latencies(rig: NodeRig, jobs: int) -> tuple[list[float], list[float]]:
    """Measure jobs of one turn, one at a time, on an otherwise idle node.

    Returns:
        Milliseconds from the submission to its answer, and from a rollout's end to its arrival at the trainer.
    """
    accept_ms, deliver_ms = [], []
    for number in range(jobs):
        started = time.perf_counter()
        await submit_all(rig.client, [math_job(f"single-{number}", max_turns=1, **QUESTION)])
        accept_ms.append(1e3 * (time.perf_counter() - started))
        deliver_ms += [1e3 * (time.monotonic() - _ended_s(outcome)) async for outcome in rig.client.results(1)]
    return accept_ms, deliver_ms


async def measure_crowd(rig: NodeRig, rollouts: int, turns: int) -> Crowd:
    """Run all rollouts at once, on the slow engine."""
    client = rig.client
    await client.add_backend(rig.world.slow_engine)
    await client.remove_backend(rig.world.quick_engine)
    before_bytes = rig.node.rss_bytes()
    peak = [before_bytes]
    spans: list[tuple[float, float]] = []
    done_turns = tokens = 0
    cpu_s, world_cpu_s, started = rig.node.cpu_s(), rig.world_child.cpu_s(), time.perf_counter()
    async with open_single_nursery() as nursery:
        nursery.start_soon(_watch_memory, rig.node, peak)
        jobs = [math_job(f"crowd-{number}", max_turns=turns, **QUESTION) for number in range(rollouts)]
        await submit_all(client, jobs)
        async for outcome in client.results(rollouts):
            if outcome.status != "completed" or outcome.trajectory is None:
                raise RuntimeError(f"job {outcome.job_id} {outcome.status}: {outcome.error}")
            spans.append(run_span(outcome, _ended_s(outcome)))
            done_turns += len(outcome.trajectory.turns)
            tokens += sum(len(segment) for segment in outcome.trajectory.segments)
        wall_s = time.perf_counter() - started
        cpu_s, world_cpu_s = rig.node.cpu_s() - cpu_s, rig.world_child.cpu_s() - world_cpu_s
        nursery.cancel_scope.cancel()
    status: Any = await client.status()
    return Crowd(
        concurrent=_most_at_once(spans),
        turns=done_turns,
        tokens=tokens,
        cpu_s=cpu_s,
        world_cpu_s=world_cpu_s,
        wall_s=wall_s,
        rss_bytes=peak[0],
        rss_before_bytes=before_bytes,
        stalls=status["loop"],
    )


async def _watch_memory(node: Child, peak: list[int]) -> None:
    while True:
        peak[0] = max(peak[0], node.rss_bytes())
        await trio.sleep(RSS_INTERVAL_S)


def _ended_s(outcome: Outcome) -> float:
    return float(outcome.details[ENDED_AT])


def _most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    steps = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    now = most = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most
