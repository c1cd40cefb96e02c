"""Scoring in worker processes that can be killed, because a reward function may loop, crash, or use signals.

A scorer is a plain function `module:name` from a dict to a dict, both JSON-like. Each worker process serves the
functions of one module, one call at a time. It is reused for the next call, and killed by a timeout or a cancel. It has
its own limits (`config.ScoringConfig`), because it reads the policy's text.
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
"""Attempts to start a process for one call, if earlier processes are killed before the call."""
REFUSED_DELAY_S: Final = 0.5
"""Delay after the system has refused a process; doubled each time, up to `MAX_REFUSED_DELAY_S`."""
MAX_REFUSED_DELAY_S: Final = 16.0
KILL_TIMEOUT_S: Final = 5.0
HEADER: Final = struct.Struct("<I")


class ScoreCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of the function `name` of the worker's module."""

    name: str
    payload: dict[str, Any]


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer: a `result`, or an `error` with a traceback. The first one only reports readiness.

    `is_missing`: the scorer was not called, because its module or function cannot be loaded.
    """

    result: dict[str, Any] | None = None
    error: str = ""
    is_missing: bool = False


class NotScored(EvaluationError):
    """The call produced no result without evidence against its payload: the machine may be busy or broken."""


class _WorkerKilled(NotScored):
    """The scoring process was killed (SIGKILL), by its machine or because of its payload. The two look the same."""


class _StoodStill(NotScored):
    """The scoring process did not run: it was stopped, frozen, or waited for a disk. An answer cannot cause that."""


class _NotStarted(NotScored):
    """No process could be started for the scorer, so its payload is not at fault."""


class _Worker:
    """A scoring process. After any exception from `ask` its state is unknown, and it must be killed."""

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
        """Kill the process if the block does not complete, because its state is then unknown."""
        try:
            yield
        except BaseException:
            await self.kill()  # noqa: ASYNC102 - it shields itself
            raise

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def is_held(self) -> bool:
        """Return whether its process cannot run now, see `prorl_trio.sandbox.silence.is_held`."""
        return is_held(self._process.pid)

    async def ask(self, name: str, payload: Mapping[str, Any]) -> ScoreReply:
        try:
            raw = msgspec.msgpack.encode(ScoreCall(name=name, payload=dict(payload)))
        except UnicodeEncodeError:  # a lone surrogate of the policy, which UTF-8 cannot encode
            raw = msgspec.msgpack.encode(ScoreCall(name=name, payload=portable(dict(payload))))
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(trio.BrokenResourceError):  # the cause of its end is determined below
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
                # The kernel's limit of CPU time, not our wall-time limit: the answer kept the scorer busy.
                if code == -signal.SIGXCPU:
                    raise EvaluationError("the scorer used up its CPU time", error_code="evaluator_timeout")
                kind = _WorkerKilled if code == -signal.SIGKILL else EvaluationError
                raise kind(f"the scorer's process ended in the middle of a call (exit status {code})")
            data += chunk
        return bytes(data)

    async def kill(self) -> None:
        """Kill the process and its process group within `KILL_TIMEOUT_S`; a cancel does not interrupt it."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        with trio.move_on_after(KILL_TIMEOUT_S, shield=True):
            await self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    await stream.aclose()


def _reason_first(trace: str) -> str:
    """Return a traceback with its final exception repeated at the start."""
    lines = trace.rstrip().splitlines()
    last_frame = max((place for place, line in enumerate(lines) if line.startswith(" ")), default=-1)
    return "\n".join([*lines[last_frame + 1 :], trace]) if trace else ""


class ScorerPool:
    """At most `max_workers` scoring processes; further calls wait. Use `open_scorer_pool`."""

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
            timeout_s: limit for the call itself, without starting a process. A timeout or a cancel kills the process;
                the next call gets a fresh one.
            harmless: `payload` with a known good answer (the gold answer) instead of the policy's. It is scored if
                `payload` produces no result, to determine the cause.

        Raises:
            HostileAnswer: `harmless` was scored but `payload` was not: the policy's answer is at fault.
            EvaluationError: the scorer raised, timed out, died, or cannot be loaded; the message has the cause.
            SandboxUnavailable: the system refuses a process for the scorer.
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
        except (_WorkerKilled, _StoodStill):  # retry once: if it is killed again, the payload may be the cause
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
        """Return an idle worker; workers that have died are discarded."""
        idle = self._idle.get(module)
        while idle:
            worker = idle.pop()
            if worker.is_running:
                return worker
            await worker.kill()
        return None

    async def _start(self, module: str) -> _Worker:
        """Start a worker; an idle worker of another module makes room, so that the limit counts processes.

        There may be no idle worker if the pool was made smaller during calls.

        Raises:
            _NotStarted: it cannot be loaded, took too long, or was killed each time.
            SandboxUnavailable: the system refused a process for some 30 s.
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
        """Set the maximum number of processes.

        Calls in flight continue, also while their process starts. Surplus idle processes make room when the next one
        starts.
        """
        self._limiter.total_tokens = max_workers

    def statistics(self) -> dict[str, int]:
        """Return the number of processes: `busy` with a call (or starting), `idle` waiting for one."""
        return {"busy": int(self._limiter.borrowed_tokens), "idle": sum(map(len, self._idle.values()))}


@asynccontextmanager
async def open_scorer_pool(max_workers: int, limits: ScoringConfig | None = None) -> AsyncIterator[ScorerPool]:
    """Open a pool of at most `max_workers` scoring processes, which are killed when the block exits.

    `limits` apply to each process; None: the default configuration's.
    """
    pool = ScorerPool(max_workers, limits or ScoringConfig())
    try:
        yield pool
    finally:
        with trio.move_on_after(KILL_TIMEOUT_S, shield=True):
            await pool.aclose()
