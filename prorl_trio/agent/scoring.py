"""Scoring code runs in worker processes that can be killed: a reward function may loop for ever, crash, or use signals.

A scorer is a plain function `module:name` from a dict to a dict, both JSON-like. Each worker process serves the
functions of one module, one call at a time, is kept for the next call, and is killed by a time-out or a cancel. It has
limits of its own (`config.ScoringConfig`), because it reads the policy's text.
"""

from __future__ import annotations

import logging
import os
import signal
import struct
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from prorl_ipc.portable_text import portable
from prorl_ipc.wire import UNDECODABLE
from prorl_trio.config import ScoringConfig
from prorl_trio.sandbox.silence import is_held
from prorl_trio.types.errors import EvaluationError, HostileAnswer, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

logger = logging.getLogger(__name__)

MAX_REPLY_BYTES: Final = 4 * 1024 * 1024
START_TIMEOUT_S: Final = 60.0
MAX_STARTS: Final = 5
"""Starts of a process for one call, where those before it were killed meanwhile."""
REFUSED_DELAY_S: Final = 0.5
"""Wait after the machine has refused a process; doubled each time, up to `MAX_REFUSED_DELAY_S`."""
MAX_REFUSED_DELAY_S: Final = 16.0
KILL_TIMEOUT_S: Final = 5.0
HEADER: Final = struct.Struct("<I")


class ScoreCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of the function `name` of the worker's module."""

    name: str
    payload: dict[str, Any]


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer: a `result`, or an `error` with a traceback. The first one only says that it is ready.

    `is_missing`: the scorer was not called, because its module or function cannot be loaded.
    """

    result: dict[str, Any] | None = None
    error: str = ""
    is_missing: bool = False


class NotScored(EvaluationError):
    """The call has no result, and nothing shows that its payload is at fault: the machine may be busy or broken."""


class _WorkerKilled(NotScored):
    """The scoring process was killed (SIGKILL): by its machine, or because of what it scored. Nobody can tell."""


class _StoodStill(NotScored):
    """The scoring process did not run: it was stopped or frozen, or waited for a disk. No answer brings that about."""


class _NotStarted(NotScored):
    """There is no process for the scorer, so that nothing was scored: no answer is at fault for that."""


class _Worker:
    """A scoring process. After any exception from `ask` it is in an unknown state and must be killed."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, module: str, limits: ScoringConfig) -> _Worker:
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "prorl_trio.agent.scoring_worker", module, msgspec.json.encode(limits).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        worker = cls(process)
        try:
            async with worker.killed_on_error():
                with trio.fail_after(START_TIMEOUT_S):
                    reply = await worker._receive()
                if reply.error:
                    raise _NotStarted(f"scorer {module} cannot be loaded: {reply.error}")
        except trio.TooSlowError:
            raise _NotStarted(
                f"scorer {module} was not ready within {START_TIMEOUT_S:g} s", error_code="evaluator_timeout"
            ) from None
        return worker

    @asynccontextmanager
    async def killed_on_error(self) -> AsyncIterator[None]:
        """Whatever leaves the block but its end kills the process: nobody knows what it is doing then."""
        try:
            yield
        except BaseException:
            await self.kill()  # noqa: ASYNC102 - it shields itself
            raise

    @property
    def is_running(self) -> bool:
        """Return whether its process has not ended yet, as far as is known."""
        return self._process.poll() is None

    @property
    def is_held(self) -> bool:
        """Return whether its process cannot run now, see `prorl_trio.sandbox.silence.is_held`."""
        return is_held(self._process.pid)

    async def ask(self, name: str, payload: Mapping[str, Any]) -> ScoreReply:
        try:
            raw = msgspec.msgpack.encode(ScoreCall(name=name, payload=dict(payload)))
        except UnicodeEncodeError:  # a lone surrogate of the policy's: UTF-8 has no form for it
            raw = msgspec.msgpack.encode(ScoreCall(name=name, payload=portable(dict(payload))))
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(trio.BrokenResourceError):  # how it ended is asked for below
            await stdin.send_all(HEADER.pack(len(raw)) + raw)
        reply = await self._receive()
        if reply.is_missing:
            raise _NotStarted(f"scorer {name} cannot be loaded: {reply.error}")
        return reply

    async def _receive(self) -> ScoreReply:
        (size,) = HEADER.unpack(await self._read_exactly(HEADER.size))
        if size > MAX_REPLY_BYTES:
            raise EvaluationError(
                f"the scorer's reply of {size} bytes exceeds {MAX_REPLY_BYTES}", error_code="evaluator_malformed"
            )
        try:
            return msgspec.msgpack.decode(await self._read_exactly(size), type=ScoreReply)
        except UNDECODABLE as exc:
            raise EvaluationError(f"the scorer's reply is malformed: {exc}", error_code="evaluator_malformed") from exc

    async def _read_exactly(self, size: int) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        data = bytearray()
        while len(data) < size:
            chunk = await stdout.receive_some(size - len(data))
            if not chunk:
                code = await self._process.wait()
                # The kernel's limit of CPU time, not ours of wall time: an answer that keeps the scorer busy.
                if code == -signal.SIGXCPU:
                    raise EvaluationError("the scorer used up its CPU time", error_code="evaluator_timeout")
                kind = _WorkerKilled if code == -signal.SIGKILL else EvaluationError
                raise kind(f"the scorer's process ended in the middle of a call (exit status {code})")
            data += chunk
        return bytes(data)

    async def kill(self) -> None:
        """End the process and everything in its group, within `KILL_TIMEOUT_S`; a cancel does not cut it short."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        with trio.move_on_after(KILL_TIMEOUT_S, shield=True):
            await self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    await stream.aclose()


def _reason_first(trace: str) -> str:
    """Return a traceback with the exception that it ends with also before it."""
    lines = trace.rstrip().splitlines()
    last_frame = max((place for place, line in enumerate(lines) if line.startswith(" ")), default=-1)
    return "\n".join([*lines[last_frame + 1 :], trace]) if trace else ""


class ScorerPool:
    """At most `max_workers` scoring processes; a call beyond that waits. Use `open_scorer_pool`."""

    def __init__(self, max_workers: int, limits: ScoringConfig) -> None:
        self._limiter = trio.CapacityLimiter(max_workers)
        self._limits = limits
        self._idle: dict[str, list[_Worker]] = {}

    async def score(
        self,
        function: str,
        payload: Mapping[str, Any],
        *,
        timeout_s: float,
        harmless: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Call the scorer `module:name` with `payload` and return its dict.

        Args:
            function: `module:name`, importable in a process of this project's Python.
            payload: its one argument; plain data.
            timeout_s: for the call itself; starting a process is not charged to it. A time-out or a cancel kills the
                process; the next call gets a fresh one.
            harmless: `payload` with an answer that is known to be sound in place of the policy's: the gold one. It is
                scored where `payload` is not, to tell whose doing that is.

        Raises:
            HostileAnswer: there is no score of `payload`, but one of `harmless`: what the policy answered is at fault.
            EvaluationError: the scorer raised, timed out, died, or cannot be loaded. The message tells which.
            SandboxUnavailable: the machine refuses a process for the scorer.
        """
        try:
            return await self._score(function, payload, timeout_s)
        except (_NotStarted, _StoodStill):
            raise
        except EvaluationError as exc:
            if harmless is None:
                raise
            failure = exc
        try:
            await self._score(function, harmless, timeout_s)
        except EvaluationError:
            raise failure from None
        raise HostileAnswer(f"the answer cannot be scored, which others can: {failure}") from failure

    async def _score(self, function: str, payload: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            return await self._score_once(function, payload, timeout_s)
        except (_WorkerKilled, _StoodStill):  # once more: if it is killed again, it may be by what it scores
            return await self._score_once(function, payload, timeout_s)

    async def _score_once(self, function: str, payload: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        module, _, name = function.partition(":")
        async with self._limiter:
            worker = await self._take_idle(module) or await self._start(module)
            async with worker.killed_on_error():
                with trio.move_on_after(timeout_s) as patience:
                    reply = await worker.ask(name, payload)
                if patience.cancelled_caught:
                    late = _StoodStill if worker.is_held else EvaluationError
                    raise late(
                        f"scorer {function} gave no score within {timeout_s:g} s", error_code="evaluator_timeout"
                    )
            self._idle.setdefault(module, []).append(worker)
        if reply.result is None:
            raise EvaluationError(
                f"scorer {function} failed: {_reason_first(reply.error) or 'it returned no dict'}",
                error_code="evaluator_crashed" if reply.error else "evaluator_malformed",
            )
        return reply.result

    async def prewarm(self, function: str) -> None:
        """Start one process for `function` now, so that the first score does not wait for its imports."""
        module = function.partition(":")[0]
        async with self._limiter:
            self._idle.setdefault(module, []).append(await self._start(module))

    async def _take_idle(self, module: str) -> _Worker | None:
        """Return a worker that waits for a call; those that have been ended meanwhile are thrown away."""
        idle = self._idle.get(module)
        while idle:
            worker = idle.pop()
            if worker.is_running:
                return worker
            await worker.kill()
        return None

    async def _start(self, module: str) -> _Worker:
        """Start a worker; one that idles for another module makes room, so that the limit counts processes.

        There may be none: the pool was made smaller while the calls in flight go on.

        Raises:
            _NotStarted: it cannot be loaded, took too long, or was killed each time.
            SandboxUnavailable: the machine refuses a process for some 30 s.
        """
        while sum(map(len, self._idle.values())) + self._limiter.borrowed_tokens > self._limiter.total_tokens:
            idle = next(filter(None, self._idle.values()), None)
            if idle is None:
                break
            await idle.pop().kill()
        failure, kills, delay_s = "", 0, REFUSED_DELAY_S
        while kills < MAX_STARTS:
            try:
                return await _Worker.start(module, self._limits)
            except _WorkerKilled as exc:
                kills += 1
                failure = f"scorer {module} cannot be started: {exc}"
            except OSError as exc:
                if delay_s > MAX_REFUSED_DELAY_S:
                    raise SandboxUnavailable.refused(f"scorer {module} cannot be started", exc) from exc
                logger.warning("scorer %s cannot be started, again in %g s: %s", module, delay_s, exc)
                await trio.sleep(delay_s)
                delay_s *= 2
        raise _NotStarted(failure)

    async def aclose(self) -> None:
        """Kill every idle worker. Calls in flight must have ended."""
        for idle in self._idle.values():
            while idle:
                await idle.pop().kill()

    def resize(self, max_workers: int) -> None:
        """Have at most so many processes from now on.

        Calls in flight, also those that wait for their process to start, go on; a process that idles makes room when
        the next one starts.
        """
        self._limiter.total_tokens = max_workers

    def statistics(self) -> dict[str, int]:
        """Return the number of processes: `busy` with a call (or starting), `idle` waiting for one."""
        return {"busy": int(self._limiter.borrowed_tokens), "idle": sum(map(len, self._idle.values()))}


@asynccontextmanager
async def open_scorer_pool(max_workers: int, limits: ScoringConfig | None = None) -> AsyncIterator[ScorerPool]:
    """Open a pool of at most `max_workers` scoring processes; on leaving the block, they are killed.

    `limits` hold for each process; None: the default configuration's.
    """
    pool = ScorerPool(max_workers, limits or ScoringConfig())
    try:
        yield pool
    finally:
        with trio.move_on_after(KILL_TIMEOUT_S, shield=True):
            await pool.aclose()
