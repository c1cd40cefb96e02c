"""A local vLLM server as a child process that never outlives us."""

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
"""Flags of a CPU in /proc/cpuinfo: x86's, and Arm's."""
_PASSED_ENV = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "TORCH_COMPILE_DISABLE")
_PASSED_ENV_PREFIXES = ("CUDA_", "NVIDIA_", "NCCL_", "VLLM_", "OMP_")


class VllmProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A server that has answered its first request. `url` is its origin, `pid` that of vLLM's API server."""

    url: str
    pid: int


_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The model in the process of the scheduler. On a CPU vLLM has two, and the first spins on a core while the second
computes: on two cores that took a quarter of the tokens per second and half of the CPU time (measured with 0.32). By
its short name, `uni`, it is not to be had there."""


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
    """Start vLLM's OpenAI server on the loopback interface, wait until it has answered a request, end it on leaving.

    The first request is part of the start, because it takes many times as long as any later one. On leaving, whether by
    return, error or cancellation, the whole process tree has gone (SIGTERM, 3 s, SIGKILL), and so have its temporary
    folder and what it left in /dev/shm; if this process is killed, that happens within 5 s without us. A server that
    dies inside the block is not restarted: its requests fail.

    Args:
        engine_python: the interpreter of an environment with vLLM (`prorl_launch.paths.engine_python`).
        model_dir: a model in Hugging Face's format. The server's model name is this path.
        log_file: gets all output of the server, appended. Its folder must exist.
        port: 0 takes a free one.
        max_model_len: tokens of prompt and completion together.
        dtype: of weights and activations; empty: see `default_dtype`.
        startup_timeout_s: from the start of the process to the answer to the first request.
        extra_args: more of vLLM's own options; they overrule ours.
        env: variables besides those of `vllm_env`, or in their place.

    Raises:
        BackendError: it ended, or was not ready in time, or is unfit. Carries the end of the log.
        InternalError: something of it could not be killed.
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
    """`bfloat16`, but `float32` on a CPU that cannot multiply bfloat16 itself: there it is three times as fast."""
    if (kind or default_engine()) == "gpu":
        return "bfloat16"
    flags = cpu_info.read_text(encoding="ascii", errors="replace").split()
    return "bfloat16" if _BFLOAT16_FLAGS.intersection(flags) else "float32"


def vllm_env() -> dict[str, str]:
    """The environment of a server: offline, no usage reports, caches in our cache folder, one thread per usable core.

    Of ours it gets what finds programs and devices, and variables named `VLLM_*`, `OMP_*`, `CUDA_*`, `NVIDIA_*`,
    `NCCL_*` or `TORCH_COMPILE_DISABLE`, which overrule the values chosen here.
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
        # Eager, as `--enforce-eager` asks: what vLLM compiles all the same, at the first request for log-probabilities,
        # takes a C++ compiler, without which the server dies of that request.
        "TORCH_COMPILE_DISABLE": "1",
        "XDG_CACHE_HOME": str(cache_dir() / "engine-cache"),
        "XDG_CONFIG_HOME": str(cache_dir() / "engine-config"),
    }
    return chosen | passed


async def _problem_until_ready(url: str, server: Supervised, timeout_s: float) -> str:
    """Empty once the server has answered a request; else why it never will."""
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
    """Return when `GET` of the path answers with 200. Asks again and again: vLLM cannot announce that it listens."""
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
    """A port that is free now. Should another program take it before the server does, the server ends, and says so."""
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path, start: int) -> str:
    """The last `_LOG_TAIL_BYTES` of `path` that lie after `start`."""
    with path.open("rb") as file:
        file.seek(max(start, _size(path) - _LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").strip()
