"""A peer's process. It receives one command at a time, and returns the result with its own timing."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from perf.peers.environments import Peer, PeerUnavailable, peer_python
from perf.processes import gets_ready
from prorl_launch.slurm.cluster import free_ports
from prorl_launch.supervised import Supervised, open_supervised
from prorl_launch.vllm import wait_healthy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

LOG_CHARS: Final = 400


@asynccontextmanager
async def open_peer_server(
    peer: Peer,
    arguments: Sequence[str],
    *,
    url: str,
    folder: Path,
    health: str = "/health",
    variables: Mapping[str, str] | None = None,
) -> AsyncIterator[Supervised]:
    """Run the peer's Python with `arguments` in `folder`; yield when `GET` of `health` at `url` answers with 200.

    Its whole process tree ends with the block, however it is left. Its output is in `folder`, in a log with the peer's
    name.

    Raises:
        PeerUnavailable: it is not installed, or does not become ready; the message has the end of its log.
    """
    log_file = folder / f"{peer.name}.log"
    command = ["env", f"--chdir={folder}", str(peer_python(peer)), *arguments]
    async with open_supervised(
        command, env={**os.environ, **(variables or {})}, log_file=log_file, grace_s=END_TIMEOUT_S
    ) as server:
        if not await gets_ready(server, partial(wait_healthy, url, health), START_TIMEOUT_S):
            said = (await trio.Path(log_file).read_text(errors="replace"))[-LOG_CHARS:]
            raise PeerUnavailable(f"{peer.title} did not get ready; it said: {said}")
        yield server


def free_port() -> int:
    """Return a port that is currently free.

    If another program takes it first, the peer does not become ready.
    """
    return free_ports(1)


WORKER = Path(__file__).with_name("worker.py")
START_TIMEOUT_S = 90.0
COMMAND_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 5.0
GROUP_POLL_S = 0.02
MAX_LINE_BYTES = 8 * 1024 * 1024
READ_BYTES = 64 * 1024
ERROR_BYTES = 400


class PeerAnswer(msgspec.Struct, frozen=True):
    """The result of a command, and the time of the peer's call. `exit_code` is None if the peer did not provide it."""

    output: str
    exit_code: int | None
    elapsed_s: float


class PeerProcess:
    """A client of `worker.py`. Not for concurrent use."""

    def __init__(self, peer: Peer, process: trio.Process, log: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.peer = peer
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._log = log
        self._answers = msgspec.json.Decoder(PeerAnswer)

    async def run(self, command: str, *, timeout_s: float | None = None) -> PeerAnswer:
        """Run one command. After a cancel or an error the peer is unusable.

        Raises:
            PeerUnavailable: it ended, or did not answer within `timeout_s` (`COMMAND_TIMEOUT_S`).
        """
        try:
            await self._stdin.send_all(msgspec.json.encode({"command": command}) + b"\n")
        except trio.BrokenResourceError as exc:
            raise await self._ended(command) from exc
        line = await self._line(COMMAND_TIMEOUT_S if timeout_s is None else timeout_s, command)
        return self._answers.decode(line)

    async def wait_ready(self) -> None:
        """Wait until it has started.

        Raises:
            PeerUnavailable: it ended, or was not ready within `START_TIMEOUT_S`.
        """
        await self._line(START_TIMEOUT_S, "its start")

    async def _line(self, timeout_s: float, what: str) -> bytes:
        with trio.move_on_after(timeout_s):
            return await self._receive_line(what)
        raise self._failed(f"did not finish {what!r} within {timeout_s:g} s")

    async def _receive_line(self, what: str) -> bytes:
        received = bytearray()
        while not received.endswith(b"\n"):
            piece = await self._stdout.receive_some(READ_BYTES)
            if not piece:
                raise await self._ended(what)
            received += piece
            if len(received) > MAX_LINE_BYTES:
                raise self._failed(f"answered {what!r} with over {MAX_LINE_BYTES} bytes")
        return bytes(received)

    async def _ended(self, what: str) -> PeerUnavailable:
        with trio.move_on_after(END_TIMEOUT_S):  # until then its last output may be missing
            await self._process.wait()
        return self._failed(f"ended at {what!r}")

    def _failed(self, what: str) -> PeerUnavailable:
        said = self._log.read_text(errors="replace")[-ERROR_BYTES:].strip()
        return PeerUnavailable(f"{self.peer.title} {what}" + (f"; it said: {said}" if said else ""))


@asynccontextmanager
async def open_peer(
    peer: Peer, *, env: dict[str, str], cwd: Path, log: Path, worker: Sequence[str] = ()
) -> AsyncIterator[PeerProcess]:
    """Start `peer` in `cwd` with exactly `env`, and stop it on leaving.

    It ends at the end of its input, else by SIGTERM, else by SIGKILL, and so does its whole process group. `log` is the
    file for its output. `worker` replaces the arguments `worker.py` and its name, for a program with the same protocol.

    Raises:
        PeerUnavailable: it is not installed, or does not start.
    """
    argv = [str(peer_python(peer)), "-B", *(worker or (str(WORKER), peer.name))]
    with log.open("wb") as log_file:
        process = await trio.lowlevel.open_process(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
    try:
        talk = PeerProcess(peer, process, log)
        await talk.wait_ready()
        yield talk
    finally:
        with trio.move_on_after(END_TIMEOUT_S + 3 * KILL_TIMEOUT_S, shield=True):
            await _end(process, peer, env)


async def _end(process: trio.Process, peer: Peer, env: dict[str, str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdin.aclose()
    with trio.move_on_after(END_TIMEOUT_S):
        await process.wait()
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGTERM)  # so that it releases shared memory
        with trio.move_on_after(KILL_TIMEOUT_S):
            await process.wait()
            while _has_members(process.pid):  # noqa: ASYNC110 - other processes are waited for by others
                await trio.sleep(GROUP_POLL_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    await process.stdout.aclose()
    if peer.clean_up:
        with trio.move_on_after(KILL_TIMEOUT_S):
            await trio.run_process(peer.clean_up, env=env, capture_stdout=True, capture_stderr=True, check=False)


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
