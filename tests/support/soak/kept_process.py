"""Processes that are killed, and started again each time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import trio

if TYPE_CHECKING:
    import signal
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from random import Random

KILL_TIMEOUT_S: Final = 10.0
PROGRESS_LOOK_INTERVAL_S: Final = 0.02
"""How often the journal, which another process writes, is looked at."""
_TESTS: Final = Path(__file__).parents[2]


def rig_environment(**more: str) -> dict[str, str]:
    """Return this process's environment and `more`, for a Python that is to find the rigs in `tests/support`."""
    return {**os.environ, "PYTHONPATH": str(_TESTS), **more}


class Victim(Protocol):
    """What `kill_at_random` kills. `kills`: how often it was killed; `done`: there is nothing to kill any more."""

    kills: int
    done: trio.Event

    def kill(self) -> None:
        """SIGKILL, and count it. Nothing happens if nothing runs."""


class KeptProcess:
    """Runs `python -m MODULE ARGUMENTS`, and again whenever it was killed by `kill`.

    Attributes:
        kills: how often it was killed.
        done: set when it has exited with 0.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        before: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    ) -> None:
        """`log` gets its output and error, appended. `before` is awaited before each start."""
        self.name = name
        self.kills = 0
        self.done = trio.Event()
        self._command = [sys.executable, "-m", module, *arguments]
        self._env = dict(env)
        self._before = before
        self._log = log
        self._process: trio.Process | None = None
        self._killed = False

    def __repr__(self) -> str:
        return f"<KeptProcess {self.name}, killed {self.kills} times>"

    async def run(self) -> None:
        """Return after it has exited with 0. Kills it when cancelled.

        Raises:
            RuntimeError: it ended in another way than by `kill`; what it logged last is in the message.
        """
        while not self.done.is_set():
            await self._before()
            code = await self._run_once()
            if code == 0:
                self.done.set()
            elif not self._killed:
                tail = (await trio.Path(self._log).read_text(errors="replace"))[-3000:]
                raise RuntimeError(f"{self.name} exited with {code}:\n{tail}")

    async def _run_once(self) -> int:
        with self._log.open("ab") as log:
            process = await trio.lowlevel.open_process(
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self._env
            )
        assert process.stdin is not None
        self._process, self._killed = process, False
        try:
            async with process.stdin:
                return await process.wait()
        finally:
            process.kill()
            with trio.move_on_after(KILL_TIMEOUT_S, shield=True):
                await process.wait()

    def kill(self) -> None:
        """SIGKILL, to it alone. Nothing happens if it does not run."""
        if self.runs and self._process is not None:
            self._killed = True
            self.kills += 1
            self._process.kill()

    def send_signal(self, number: signal.Signals) -> None:
        """A signal other than SIGKILL. Nothing happens if it does not run."""
        if self.runs and self._process is not None:
            self._process.send_signal(number)

    @property
    def runs(self) -> bool:
        """There is a process, and nobody knows of its end."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        assert self._process is not None, f"{self.name} has not been started"
        return self._process.pid


async def kill_at_random(
    victims: Mapping[Victim, int], random: Random, progress: Callable[[], int], total: int
) -> None:
    """Kill each of `victims` so many times, in random order, at random points of the way of `progress` to `total`.

    One that is done before is left alone: compare its `kills`.
    """
    order = [victim for victim, times in victims.items() for _ in range(times)]
    random.shuffle(order)
    points = sorted(random.sample(range(total * 9 // 10), len(order)))
    for victim, point in zip(order, points, strict=True):
        while progress() < point:  # noqa: ASYNC110 - another process makes it
            await trio.sleep(PROGRESS_LOOK_INTERVAL_S)
        kills = victim.kills
        while victim.kills == kills and not victim.done.is_set():  # it may just be starting
            await trio.sleep(random.uniform(0, 2 * PROGRESS_LOOK_INTERVAL_S))
            victim.kill()
