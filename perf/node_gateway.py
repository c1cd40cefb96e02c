"""rllm-model-gateway between a client and the engine: how many calls a second it carries, and what each costs it."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from ipc.nursery import open_single_nursery
from perf.children import Child
from perf.peers.environments import PEERS, PeerUnavailable
from perf.peers.server import free_port, open_peer_server
from prorl_trio.http.client import HttpClient, HttpLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

__all__ = ["GatewayRate", "measure_calls", "open_gateway"]

CALLERS: Final = 32
PROMPT_TOKENS: Final = 1500
CALL_TIMEOUT_S: Final = 60.0


class GatewayRate(msgspec.Struct, frozen=True):
    """Calls a second, and CPU ms a call of the process that was called."""

    calls_per_s: float
    cpu_ms: float


@asynccontextmanager
async def open_gateway(engine_url: str, folder: Path) -> AsyncIterator[tuple[str, Child]]:
    """The gateway in front of the engine, with its own defaults: sqlite traces, one process. It ends with the block.

    Raises:
        PeerUnavailable: it is not installed, or does not get ready.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = ["-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--worker", f"{engine_url}/v1", "--db-path", str(folder / "gateway.db"), "--log-level", "warning"]
    async with open_peer_server(PEERS["gateway"], arguments, url=url, folder=folder) as process:
        yield url, Child(process)


async def measure_calls(url: str, path_prefix: str, called: Child, calls: int) -> GatewayRate:
    """`CALLERS` at a time, each a completion with token ids and log-probabilities, as the node makes them.

    `path_prefix` comes before `/v1/completions`, with `{caller}` for a session of each caller.
    """
    body = msgspec.json.encode(
        {
            "model": "fake-model",
            "prompt": [65] * PROMPT_TOKENS,
            "max_tokens": 200,
            "logprobs": 0,
            "return_token_ids": True,
            "temperature": 1.0,
        }
    )
    http = HttpClient(url, limits=HttpLimits(max_connections=CALLERS))

    async def call(caller: int, times: int) -> None:
        path = f"{path_prefix.format(caller=caller)}/v1/completions"
        headers = [("Content-Type", "application/json")]
        for _ in range(times):
            response = await http.request("POST", path, body=body, headers=headers, timeout_s=CALL_TIMEOUT_S)
            if response.status != 200:
                raise PeerUnavailable(f"{url} answered with {response.status}: {response.body[:200]!r}")

    try:
        async with open_single_nursery() as nursery:  # connections, and what is made at a first call
            for caller in range(CALLERS):
                nursery.start_soon(call, caller, 1)
        cpu_s, started = called.cpu_s(), time.perf_counter()
        async with open_single_nursery() as nursery:
            for caller in range(CALLERS):
                nursery.start_soon(call, caller, calls // CALLERS)
        wall_s = time.perf_counter() - started
    finally:
        http.close()
    made = calls // CALLERS * CALLERS
    return GatewayRate(made / wall_s, 1e3 * (called.cpu_s() - cpu_s) / made)
