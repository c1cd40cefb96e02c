"""The cost of the tool path: bash and IPython through a Unix socket and the real daemon.

The same run measures a bare pty and a bare `run_cell`, interleaved.

    python -m perf.tools [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from perf import trace
from perf.harness import Case, Options, Report, measure_interleaved, run_benchmark
from perf.peers.environments import PEERS, PeerUnavailable
from perf.peers.process import open_peer
from perf.shells import (
    CALL_TIMEOUT_S,
    open_bare_echo,
    open_bare_ipython,
    open_bare_pty,
    open_daemon,
    open_tcp_echo,
    open_unix_echo,
)
from prorl_ipc.sandbox_calls import BashResult, BashRun, CellResult, IpythonRun, Ping, Pong

if TYPE_CHECKING:
    from collections.abc import Callable

    from perf.shells import BarePty
    from prorl_ipc.client import RpcClient

QUICK_ROUNDS, ROUNDS = 200, 2_000
WARM_UP_ROUNDS = 10
LARGE_EVERY = 10
RPC_BURST = 10
CELL = "x = 1"

MAX_OVERHEAD_MS, MAX_BUILTIN_RATIO, MAX_RPC_RATIO = 0.5, 4.0, 2.0

PIPE = "ls / | wc -l"
OUTPUT_1MB = "head -c 1000000 /dev/zero | tr '\\0' x"


async def benchmark(options: Options) -> Report:
    """Measure every case, including floors, interleaved."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-perf-")))
        pty = stack.enter_context(open_bare_pty())
        bare_cell = stack.enter_context(open_bare_ipython(str(folder / "ipython")))
        rpc = await _rpc_cases(stack)
        peers: list[Case] = []
        notes: list[str] = []
        try:
            peers = await _peer_cases(stack, folder)
        except PeerUnavailable as exc:
            notes.append(f"left out: {exc}")
        daemon = await stack.enter_async_context(open_daemon(folder))
        ping = partial(daemon.call, Ping(), Pong, timeout_s=CALL_TIMEOUT_S)
        cases = [*_tool_cases(daemon, pty, bare_cell), *rpc]
        cases += [Case(name="uds.daemon_ping", run=ping, unit="us", burst=RPC_BURST), *peers]
        await _run_cell(daemon, CELL)
        rounds = QUICK_ROUNDS if options.quick else ROUNDS
        series = await measure_interleaved(cases, rounds=rounds, warm_up_rounds=WARM_UP_ROUNDS)
    p50 = {one.case.name: one.percentile(50) for one in series}
    ratios = {"uds.tcp_over_uds": p50["uds.tcp_rpc"] / p50["uds.rpc"]}
    ratios["bash.overhead_ms"] = p50["bash.true"] - p50["bash.floor_true"]
    if "ipython.zmq_tcp" in p50:
        ratios["ipython.zmq_over_ours"] = p50["ipython.zmq_tcp"] / p50["ipython.assign"]
        ratios["ipython.zmq_ipc_over_ours"] = p50["ipython.zmq_ipc"] / p50["ipython.assign"]
    report = Report(
        title="tools: through a Unix socket and the daemon, and bare",
        series=series,
        more_metrics={name: round(ratio, 3) for name, ratio in ratios.items()},
        at_least={"uds.tcp_over_uds": 1, "ipython.zmq_over_ours": 4},
        at_most={"bash.overhead_ms": MAX_OVERHEAD_MS},
        notes=notes,
    )
    return report.joined_with(await trace.benchmark(options))


def _tool_cases(daemon: RpcClient, pty: BarePty, bare_cell: Callable[[str], object]) -> list[Case]:
    """Return commands and cells through the daemon, each with its floor: the same without our code."""
    bash, ipython = partial(_run_command, daemon), partial(_run_cell, daemon)

    async def bare_bash(command: str) -> None:
        pty.run(command)

    async def bare_ipython(code: str) -> None:
        bare_cell(code)

    floor, large_floor = "bash.floor_bin_true", "bash.floor_output_1mb"
    return [
        Case(name="bash.true", run=partial(bash, "true"), floor="bash.floor_true", max_x_floor=MAX_BUILTIN_RATIO),
        Case(name="bash.floor_true", run=partial(bare_bash, "true")),
        Case(name="bash.bin_true", run=partial(bash, "/bin/true"), floor=floor, max_p50=3, max_x_floor=2),
        Case(name=floor, run=partial(bare_bash, "/bin/true")),
        Case(name="bash.pipe", run=partial(bash, PIPE), floor="bash.floor_pipe", max_x_floor=2),
        Case(name="bash.floor_pipe", run=partial(bare_bash, PIPE)),
        Case(name="bash.output_1mb", run=partial(bash, OUTPUT_1MB), floor=large_floor, every=LARGE_EVERY),
        Case(name=large_floor, run=partial(bare_bash, OUTPUT_1MB), every=LARGE_EVERY),
        Case(name="ipython.assign", run=partial(ipython, CELL), floor="ipython.floor", max_p50=1, max_x_floor=3),
        Case(name="ipython.floor", run=partial(bare_ipython, CELL)),
        Case(name="ipython.print", run=partial(ipython, "print(x)"), max_p50=1),
    ]


async def _run_command(daemon: RpcClient, command: str) -> None:
    call = BashRun(command=command, timeout_s=CALL_TIMEOUT_S)
    result = await daemon.call(call, BashResult, timeout_s=CALL_TIMEOUT_S)
    assert result.exit_code == 0, result


async def _run_cell(daemon: RpcClient, code: str) -> None:
    call = IpythonRun(code=code, timeout_s=CALL_TIMEOUT_S)
    result = await daemon.call(call, CellResult, timeout_s=CALL_TIMEOUT_S)
    assert result.error is None, result


async def _rpc_cases(stack: AsyncExitStack) -> list[Case]:
    """Return a trivial RPC call over a Unix socket and over TCP, and its floor."""
    bare_echo = await stack.enter_async_context(open_bare_echo())
    echo = await stack.enter_async_context(open_unix_echo())
    tcp_echo = await stack.enter_async_context(open_tcp_echo())
    return [
        Case(name="uds.rpc", run=echo, unit="us", burst=RPC_BURST, floor="uds.floor", max_x_floor=MAX_RPC_RATIO),
        Case(name="uds.tcp_rpc", run=tcp_echo, unit="us", burst=RPC_BURST, floor="uds.floor"),
        Case(name="uds.floor", run=bare_echo, unit="us", burst=RPC_BURST),
    ]


async def _peer_cases(stack: AsyncExitStack, folder: Path) -> list[Case]:
    """Return a cell through jupyter_client. Raises PeerUnavailable."""
    peer_dir = folder / "peer"
    peer_dir.mkdir()
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(peer_dir), "LANG": "C.UTF-8"}
    jupyter = await stack.enter_async_context(open_peer(PEERS["jupyter"], env=env, cwd=peer_dir, log=peer_dir / "log"))

    async def zmq(transport: str) -> float:
        answer = await jupyter.run(f"{transport} {CELL}")
        assert answer.exit_code == 0, answer
        return answer.elapsed_s

    return [
        Case(
            name=f"ipython.zmq_{transport}",
            run=partial(zmq, transport),
            self_timed=True,
            floor="ipython.floor",
            peer=True,
        )
        for transport in ("tcp", "ipc")
    ]


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark))
