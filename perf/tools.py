"""What the tool path costs: bash and IPython through a Unix socket and the real daemon, beside a bare pty and a bare
`run_cell`, interleaved in one run.

    python -m perf.tools [--quick] [--json FILE]
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio

from ipc.channel import connect_unix
from ipc.rpc import CallContext, RpcClient, open_rpc_client, serve_rpc
from ipc.wire import BashResult, BashRun, CellResult, IpythonRun, Ping, Pong, SandboxCall
from perf.floors import open_bare_echo, open_bare_ipython, open_bare_pty
from perf.harness import Case, Options, Report, measure_interleaved, run_benchmark

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

QUICK_ROUNDS, ROUNDS = 200, 2_000
WARM_UP_ROUNDS = 10
LARGE_EVERY = 10
RPC_BURST = 10
START_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 30.0
END_TIMEOUT_S = 10.0

PIPE = "ls / | wc -l"
OUTPUT_1MB = "head -c 1000000 /dev/zero | tr '\\0' x"


async def benchmark(options: Options) -> Report:
    """Every case, floors included, interleaved."""
    async with AsyncExitStack() as stack:
        runtime_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-perf-")))
        pty = stack.enter_context(open_bare_pty())
        run_cell = stack.enter_context(open_bare_ipython(str(runtime_dir / "ipython")))
        bare_echo = await stack.enter_async_context(open_bare_echo())
        echo = await stack.enter_async_context(open_echo())
        daemon = await stack.enter_async_context(open_daemon(runtime_dir))

        async def bash(command: str) -> None:
            result = await daemon.call(
                BashRun(command=command, timeout_s=CALL_TIMEOUT_S), BashResult, timeout_s=CALL_TIMEOUT_S
            )
            assert result.exit_code == 0, result

        async def ipython(code: str) -> None:
            result = await daemon.call(
                IpythonRun(code=code, timeout_s=CALL_TIMEOUT_S), CellResult, timeout_s=CALL_TIMEOUT_S
            )
            assert result.error is None, result

        async def ping() -> None:
            await daemon.call(Ping(), Pong, timeout_s=CALL_TIMEOUT_S)

        async def bare_bash(command: str) -> None:
            pty.run(command)

        async def bare_cell(code: str) -> None:
            run_cell(code)

        cases = [
            Case(name="bash.true", run=partial(bash, "true"), floor="bash.floor_true", max_p50=1),
            Case(name="bash.floor_true", run=partial(bare_bash, "true")),
            Case(
                name="bash.bin_true",
                run=partial(bash, "/bin/true"),
                floor="bash.floor_bin_true",
                max_p50=3,
                max_x_floor=2,
            ),
            Case(name="bash.floor_bin_true", run=partial(bare_bash, "/bin/true")),
            Case(name="bash.pipe", run=partial(bash, PIPE), floor="bash.floor_pipe", max_x_floor=2),
            Case(name="bash.floor_pipe", run=partial(bare_bash, PIPE)),
            Case(
                name="bash.output_1mb", run=partial(bash, OUTPUT_1MB), floor="bash.floor_output_1mb", every=LARGE_EVERY
            ),
            Case(name="bash.floor_output_1mb", run=partial(bare_bash, OUTPUT_1MB), every=LARGE_EVERY),
            Case(name="ipython.assign", run=partial(ipython, "x = 1"), floor="ipython.floor", max_p50=1, max_x_floor=3),
            Case(name="ipython.floor", run=partial(bare_cell, "x = 1")),
            Case(name="ipython.print", run=partial(ipython, "print(x)"), max_p50=1),
            Case(name="uds.rpc", run=echo, unit="us", burst=RPC_BURST, floor="uds.floor"),
            Case(name="uds.floor", run=bare_echo, unit="us", burst=RPC_BURST),
            Case(name="uds.daemon_ping", run=ping, unit="us", burst=RPC_BURST),
        ]
        await ipython("x = 1")
        series = await measure_interleaved(
            cases, rounds=QUICK_ROUNDS if options.quick else ROUNDS, warm_up_rounds=WARM_UP_ROUNDS
        )
    return Report(title="tools: through a Unix socket and the daemon, and bare", series=series)


@asynccontextmanager
async def open_echo() -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """A trivial call of the RPC, between two tasks over a Unix socket."""
    calls: msgspec.msgpack.Decoder[SandboxCall] = msgspec.msgpack.Decoder(SandboxCall)

    async def handle(body: msgspec.Raw, context: CallContext) -> Pong:
        calls.decode(body)
        return Pong(uptime_s=0.0, open_fds=0)

    ours, theirs = (trio.SocketStream(sock) for sock in trio.socket.socketpair())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(serve_rpc, theirs, handle, token="perf"))
        async with open_rpc_client(ours, token="perf") as client:
            yield partial(client.call, Ping(), Pong, timeout_s=CALL_TIMEOUT_S)


@asynccontextmanager
async def open_daemon(runtime_dir: Path) -> AsyncIterator[RpcClient]:
    """A daemon of its own, on this machine itself; it ends with the connection.

    Raises:
        RuntimeError: it did not start, or did not end by itself.
    """
    socket_path = runtime_dir / "daemon.sock"
    token = secrets.token_hex(16)
    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(
            partial(
                trio.run_process,
                [sys.executable, "-m", "sandbox_daemon", "--socket", str(socket_path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdin.send_all(msgspec.json.encode({"token": token}) + b"\n")
        with trio.move_on_after(START_TIMEOUT_S):
            said = await process.stdout.receive_some()
            if said != b"READY\n":
                raise RuntimeError(f"the daemon did not get ready within {START_TIMEOUT_S:g} s; it said {said!r}")
        stream = await connect_unix(socket_path, connect_timeout_s=START_TIMEOUT_S)
        async with open_rpc_client(stream, token=token) as client:
            yield client
        with trio.fail_after(END_TIMEOUT_S):
            await process.wait()


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark))
