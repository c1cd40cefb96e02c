"""A node in a child process, as `prorl-trio serve` runs it, that never outlives this process."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
import trio

from prorl_ipc.nursery import single_exception
from prorl_launch.supervised import Supervised, open_supervised
from prorl_trio.types.errors import InternalError, ServiceError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NODE_START_TIMEOUT_S = 120.0
NODE_STOP_TIMEOUT_S = 30.0
NODE_GRACE_S = 3.0
ENDPOINT_POLL_S = 0.05
LOG_TAIL_BYTES = 4000


def serve_command(config_file: Path) -> list[str]:
    """Return the command that runs a node with this node.toml."""
    return [sys.executable, "-m", "prorl_trio.cli", "serve", "--config", str(config_file)]


def head_command(config_file: Path) -> list[str]:
    """Return the command that runs the head of a fleet with this configuration."""
    return [sys.executable, "-m", "prorl_trio.cli", "fleet", "--config", str(config_file)]


class NodeLost(ServiceError):
    """The node process ended unexpectedly, or did not listen in time."""


class NodeProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A listening node in its own process."""

    url: str
    token: str
    pid: int


@asynccontextmanager
async def open_node_process(config: dict[str, object], *, folder: Path, log_file: Path) -> AsyncIterator[NodeProcess]:
    """Run `prorl-trio serve` with `config` (as in node.toml, without `listen`) during the block.

    It listens on the loopback interface with a fresh token. When the block ends, the node is drained. After an error or
    a cancel, its jobs are cancelled. Its whole process tree then ends, also if this process is killed.

    Args:
        config: tables of node.toml.
        folder: the folder for `node.toml` and `endpoint.json`. Neither file contains the token.
        log_file: the file for its output.

    Raises:
        NodeLost: it does not start, or ends during the block (which is cancelled).
        InternalError: it did not end cleanly.
    """
    token = secrets.token_urlsafe(32)
    endpoint_file, config_file = folder / "endpoint.json", folder / "node.toml"
    listen = {"port": 0, "endpoint_file": str(endpoint_file)}
    endpoint_file.unlink(missing_ok=True)  # from the previous node of a resumed run
    await trio.to_thread.run_sync(config_file.write_bytes, msgspec.toml.encode({**config, "listen": listen}))
    command = serve_command(config_file)
    env = {**os.environ, "PRORL_TOKEN": token}
    async with open_supervised(command, env=env, log_file=log_file, grace_s=NODE_GRACE_S) as process:
        url = await _endpoint(process, endpoint_file, log_file)
        with single_exception():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_fail_at_end, process, log_file)
                try:
                    yield NodeProcess(url=url, token=token, pid=process.pid)
                    clean = True
                except BaseException:
                    clean = False
                    raise
                finally:
                    nursery.cancel_scope.cancel()
                    with trio.move_on_after(NODE_STOP_TIMEOUT_S + NODE_GRACE_S, shield=True):
                        await _stop(process, log_file, drain=clean)


async def _stop(process: Supervised, log_file: Path, *, drain: bool) -> None:
    """Stop the node with one SIGTERM to `drain`, or with two.

    A failed drain is an error. A failed cancel is left to the supervisor.
    """
    with trio.move_on_after(NODE_STOP_TIMEOUT_S if drain else NODE_GRACE_S):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        if not drain:
            await trio.sleep(ENDPOINT_POLL_S)  # two signals at once would count as one
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        code = await process.wait()
        if code and drain:
            raise InternalError(f"the node ended with exit code {code}; see {log_file}")
        return
    if drain:
        raise InternalError(f"the node did not end within {NODE_STOP_TIMEOUT_S:g} s of SIGTERM; see {log_file}")


async def _fail_at_end(process: Supervised, log_file: Path) -> None:
    code = await process.wait()
    raise NodeLost(f"the node ended with exit code {code} in the middle of the run; see {log_file}")


async def _endpoint(process: Supervised, endpoint_file: Path, log_file: Path) -> str:
    """Return the node's URL, once its listener is open."""
    found = trio.Path(endpoint_file)
    with trio.move_on_after(NODE_START_TIMEOUT_S) as patience:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_at_end, process, patience)
            while not await found.exists():  # noqa: ASYNC110 - another process makes it
                await trio.sleep(ENDPOINT_POLL_S)
            nursery.cancel_scope.cancel()
        return str(msgspec.json.decode(await found.read_bytes())["url"])
    tail = await trio.to_thread.run_sync(lambda: log_file.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace"))
    raise NodeLost(f"the node did not start. The end of {log_file}:\n{tail}")


async def _cancel_at_end(process: Supervised, scope: trio.CancelScope) -> None:
    await process.wait()
    scope.cancel()
