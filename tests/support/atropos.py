"""The real API server of Atropos, in an environment of its own, and the trainer's side of it."""

from __future__ import annotations

import socket
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest
import trio

from prorl_launch import venv
from prorl_launch.progress import SetupError
from prorl_launch.supervised import open_supervised
from prorl_trio.http.client import HttpClient
from prorl_trio.http.connection import HttpError
from prorl_trio.sandbox.cache import cache_dir
from support.skips import because

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PINS: Final = (
    "atroposlib==0.4.0",
    "annotated-doc==0.0.7",
    "annotated-types==0.8.0",
    "anyio==4.16.0",
    "click==8.5.1",
    "fastapi==0.165.0",
    "h11==0.16.0",
    "idna==3.20",
    "opentelemetry-api==1.45.2",
    "pydantic==2.14.3",
    "pydantic-core==2.50.4",
    "starlette==1.10.0",
    "typing-inspection==0.4.5",
    "typing-extensions==4.16.0",
    "uvicorn==0.54.0",
)
"""All that the server imports; without the rest of what atroposlib requires (1 GB), which its environments use."""
START_TIMEOUT_S: Final = 60.0
TIMEOUT_S: Final = 10.0
OK: Final = 200


def atropos_python() -> Path:
    """Return the interpreter of the server's environment, made in the cache folder once: 50 MB, some seconds."""
    folder = cache_dir() / "test-tools" / "atropos"
    arguments = ["-m", "pip", "install", "--no-deps", "--only-binary", ":all:", *PINS]
    (cache_dir() / "logs").mkdir(parents=True, exist_ok=True)
    log_file = cache_dir() / "logs" / "atropos.log"
    try:
        venv.install(folder, " ".join(PINS), [("Atropos' API server", arguments)], log_file=log_file)
    except (SetupError, subprocess.SubprocessError) as error:
        pytest.skip(because(f"Atropos cannot be had: {error}", "look at the network, or at the package index"))
    return folder / "bin" / "python"


@asynccontextmanager
async def open_atropos(python: Path, log_file: Path) -> AsyncIterator[str]:
    """Run `run-api` on a free port and yield its origin."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [str(python), "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port)]
    async with open_supervised(command, env={}, log_file=log_file, grace_s=5.0):
        http = HttpClient(f"http://127.0.0.1:{port}")
        try:
            with trio.fail_after(START_TIMEOUT_S):
                while True:
                    try:
                        await http.request("GET", "/", timeout_s=TIMEOUT_S)
                        break
                    except HttpError:
                        await trio.sleep(0.05)
        finally:
            http.close()
        yield http.origin


class AtroposTrainer:
    """A trainer as Atropos' own example is one: it registers, and takes batches."""

    def __init__(self, url: str) -> None:
        self._http = HttpClient(url)

    async def register(self, *, batch_size: int, max_token_len: int = 4096, num_steps: int = 1000) -> None:
        """Register, and ask for a first batch, which opens the server to environments."""
        await self.call(
            "POST",
            "/register",
            {
                "wandb_group": "",
                "wandb_project": "",
                "batch_size": batch_size,
                "max_token_len": max_token_len,
                "checkpoint_dir": "",
                "save_checkpoint_interval": 0,
                "starting_step": 0,
                "num_steps": num_steps,
            },
        )
        assert await self.batch() is None

    async def batch(self) -> list[dict[str, Any]] | None:
        """Return the groups of the next batch; None while it is not whole."""
        groups: list[dict[str, Any]] | None = (await self.call("GET", "/batch"))["batch"]
        return groups

    async def wait_batch(self) -> list[dict[str, Any]]:
        """Return the next batch when it is whole."""
        while (groups := await self.batch()) is None:
            await trio.sleep(0.05)
        return groups

    async def call(self, method: str, path: str, content: object = None) -> Any:
        """Send a request and return what is answered."""
        body = b"" if content is None else msgspec.json.encode(content)
        headers = [("Content-Type", "application/json")]
        response = await self._http.request(method, path, body=body, headers=headers, timeout_s=TIMEOUT_S)
        assert response.status == OK, response.body
        return msgspec.json.decode(response.body)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
