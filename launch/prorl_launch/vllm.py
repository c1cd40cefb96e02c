"""A local vLLM server as a child process that never outlives this process."""

from __future__ import annotations

import os
import socket
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import trio

from prorl_launch.paths import default_engine
from prorl_launch.supervised import Supervised, open_supervised
from prorl_trio.http.client import HttpClient
from prorl_trio.http.connection import HttpError
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from prorl_launch.environments import EngineKind

Dtype = Literal["float32", "bfloat16"]

_HOST = "127.0.0.1"
_GRACE_S = 3.0
_HEALTH_INTERVAL_S = 0.25
_HEALTH_TIMEOUT_S = 5.0
_LOG_TAIL_BYTES = 4096
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})
"""CPU flags in /proc/cpuinfo for bfloat16, of x86 and Arm."""
_PASSED_ENV = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "TORCH_COMPILE_DISABLE")
_PASSED_ENV_PREFIXES = ("CUDA_", "NVIDIA_", "NCCL_", "VLLM_", "OMP_")


class VllmProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A server that has answered its first request. `url` is its origin, `pid` the process of vLLM's API server."""

    url: str
    pid: int


_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The model runs in the scheduler's process. On a CPU vLLM otherwise has two processes, and the first spins on a core
while the second computes. On two cores that cost a quarter of the tokens per second and half of the CPU time (measured
with 0.32). Its short name, `uni`, does not work there."""


@asynccontextmanager
async def open_vllm(
    engine_python: Path,
    model_dir: Path,
    *,
    log_file: Path,
    port: int = 0,
    max_model_len: int = 2048,
    dtype: str = "",
    startup_timeout_s: float = 300.0,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[VllmProcess]:
    """Start vLLM's OpenAI server on the loopback interface and wait until it has answered a request.

    Stop it on leaving.

    The first request is part of the start, because it takes many times as long as any later one. On leaving, whether by
    return, error or cancellation, the whole process tree is stopped (SIGTERM, 3 s, SIGKILL). Its temporary folder and
    its files in /dev/shm are removed. If this process is killed, the same happens within 5 s. A server that dies inside
    the block is not restarted: its requests fail.

    Args:
        engine_python: the interpreter of an environment with vLLM (`prorl_launch.paths.engine_python`).
        model_dir: a model in Hugging Face's format. The server's model name is this path.
        log_file: all output of the server is appended here. The folder must exist.
        port: the port; 0: a free one.
        max_model_len: tokens of prompt and completion together.
        dtype: dtype of weights and activations; empty: see `default_dtype`.
        startup_timeout_s: seconds from the start of the process to the answer to the first request.
        extra_args: further options of vLLM; they override ours.
        env: variables that extend or override `vllm_env`.

    Raises:
        BackendError: it ended, was not ready in time, or is unfit. The message has the end of the log.
        InternalError: a process of the server could not be killed.
    """
    port = port or _free_port()
    url = f"http://{_HOST}:{port}"
    command = [str(engine_python), "-m", "vllm.entrypoints.openai.api_server", "--host", _HOST, "--port", str(port)]
    dtype = dtype or await trio.to_thread.run_sync(default_dtype)
    command += ["--model", str(model_dir), "--dtype", dtype, "--max-model-len", str(max_model_len), "--enforce-eager"]
    if default_engine() == "cpu":
        command += ["--distributed-executor-backend", _IN_PROCESS]
    command += extra_args
    log_offset = await trio.to_thread.run_sync(_size, log_file)
    async with open_supervised(
        command, env=vllm_env() | dict(env or {}), log_file=log_file, grace_s=_GRACE_S
    ) as server:
        problem = f"was not ready within {startup_timeout_s:g} s"
        with trio.move_on_after(startup_timeout_s):
            problem = await _problem_until_ready(url, server, startup_timeout_s)
        if problem:
            tail = await trio.to_thread.run_sync(_tail, log_file, log_offset)
            raise BackendError(f"vLLM for {model_dir} {problem}. The end of {log_file}:\n{tail}", retryable=False)
        yield VllmProcess(url=url, pid=server.pid)


def default_dtype(kind: EngineKind | None = None, cpu_info: Path = Path("/proc/cpuinfo")) -> Dtype:
    """Return `bfloat16`.

    On a CPU without native bfloat16 multiplication, return `float32`, which is three times as fast there.
    """
    if (kind or default_engine()) == "gpu":
        return "bfloat16"
    flags = cpu_info.read_text(encoding="ascii", errors="replace").split()
    return "bfloat16" if _BFLOAT16_FLAGS.intersection(flags) else "float32"


def vllm_env() -> dict[str, str]:
    """Return a server's environment: offline, no usage reports, our cache folder, one thread per usable core.

    It inherits variables that locate programs and devices. Variables named `VLLM_*`, `OMP_*`, `CUDA_*`, `NVIDIA_*`,
    `NCCL_*` or `TORCH_COMPILE_DISABLE` are inherited as well, and override the values chosen here.
    """
    passed = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_ENV or name.startswith(_PASSED_ENV_PREFIXES)
    }
    chosen = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        # Eager, like `--enforce-eager`. vLLM would still compile at the first request for log-probabilities. That needs
        # a C++
        # compiler, without which the server dies.
        "TORCH_COMPILE_DISABLE": "1",
        "XDG_CACHE_HOME": str(cache_dir() / "engine-cache"),
        "XDG_CONFIG_HOME": str(cache_dir() / "engine-config"),
    }
    return chosen | passed


async def _problem_until_ready(url: str, server: Supervised, timeout_s: float) -> str:
    """Return an empty string once the server has answered a request; otherwise why it never will."""
    problem = ""

    async def watch(scope: trio.CancelScope) -> None:
        nonlocal problem
        problem = f"ended with exit code {await server.wait()} before it was ready"
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, nursery.cancel_scope)
        await wait_healthy(url)
        client = VllmClient(url)
        try:
            await client.probe(timeout_s=timeout_s)
        except BackendError as error:
            problem = f"is unfit: {error}"
        finally:
            client.http.close()
        nursery.cancel_scope.cancel()
    return problem


async def wait_healthy(url: str, path: str = "/health") -> None:
    """Return when `GET` of the path answers with 200. It polls, because vLLM does not announce that it listens."""
    client = HttpClient(url)
    try:
        while True:
            try:
                if (await client.request("GET", path, timeout_s=_HEALTH_TIMEOUT_S)).status == 200:
                    return
            except HttpError:
                pass
            await trio.sleep(_HEALTH_INTERVAL_S)
    finally:
        client.close()


def _free_port() -> int:
    """Return a port that is currently free. If another program takes it first, the server exits and reports that."""
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path, start: int) -> str:
    """Return the last `_LOG_TAIL_BYTES` of `path` that lie after `start`."""
    with path.open("rb") as file:
        file.seek(max(start, _size(path) - _LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").strip()
