"""The shell of a `FakeSandbox`: a few words of bash, on trio's clock, without a process."""

from __future__ import annotations

from collections import deque
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final, Literal

import trio

if TYPE_CHECKING:
    from collections.abc import Mapping

HOME: Final = "/home/agent"
INTERRUPTED: Final = 130
_INTERRUPT_KEY: Final = b"\x03"

How = Literal["ended", "quiet", "timed_out"]


class FakeShell:
    """A shell of a few words.

    It knows `NAME=VALUE`, `echo WORDS` with `$NAME` and `$?`, `cd DIR`, `pwd`, `true`, `false`, `read NAME`, `sleep
    SECONDS` and `exit CODE`, one command a line or after `;`.

    Attributes:
        cwd, exit_code: as the last command left them.
        is_running: whether a command goes on.
        restarted: whether the last command ended the shell.
    """

    def __init__(self, env: Mapping[str, str], lost: trio.Event) -> None:
        self._env = env
        self._lost = lost
        self.restart()

    def restart(self) -> None:
        """Forget everything."""
        self.cwd = HOME
        self.exit_code = 0
        self.restarted = False
        self._variables: dict[str, str] = {}
        self._lines: deque[str] = deque()
        self._typed = ""
        self._wake_s: float | None = None

    @property
    def is_running(self) -> bool:
        return bool(self._lines)

    def begin(self, command: str) -> None:
        """Lay `command` ready for `go_on`."""
        self.restarted = False
        self._lines.extend(line.strip() for line in command.replace(";", "\n").splitlines())

    def type_keys(self, keys: bytes) -> None:
        """C-c drops the command; anything else is for its `read`."""
        if _INTERRUPT_KEY in keys:
            self._drop(INTERRUPTED)
        else:
            self._typed += keys.decode(errors="replace")

    async def go_on(self, output: list[str], *, timeout_s: float, quiet_timeout_s: float | None) -> How:
        """Run to the end, to the deadline, or until it waited for `quiet_timeout_s`. A cancel drops the command."""
        deadline_s = trio.current_time() + timeout_s
        try:
            while self._lines and not self._lost.is_set():
                quiet_at_s = deadline_s if quiet_timeout_s is None else trio.current_time() + quiet_timeout_s
                if not await self._waited(self._lines[0], min(deadline_s, quiet_at_s)):
                    if quiet_at_s < deadline_s:
                        return "quiet"
                    self._drop(0)
                    return "timed_out"
                if not self._run_line(self._lines.popleft(), output):
                    exit_code = self.exit_code
                    self.restart()
                    self.exit_code, self.restarted = exit_code, True
        except trio.Cancelled:
            self._drop(INTERRUPTED)
            raise
        self._typed = ""
        return "ended"

    def _drop(self, exit_code: int) -> None:
        self._lines.clear()
        self._wake_s, self.exit_code = None, exit_code

    async def _waited(self, line: str, until_s: float) -> bool:
        """Return whether what `line` waits for has come by then."""
        word, _, rest = line.partition(" ")
        if word == "sleep":
            self._wake_s = self._wake_s or trio.current_time() + float(rest)
            await self._wait_until(min(self._wake_s, until_s))
            if self._wake_s > trio.current_time():
                return False
            self._wake_s = None
        elif word == "read" and "\n" not in self._typed:
            await self._wait_until(until_s)
            return False
        return True

    async def _wait_until(self, time_s: float) -> None:
        with trio.move_on_at(time_s):
            await self._lost.wait()

    def _run_line(self, line: str, output: list[str]) -> bool:
        """Run one simple command; False if it ended the shell."""
        word, _, rest = line.partition(" ")
        name, assigned, value = word.partition("=")
        rest = self._expand(rest)
        self.exit_code = 0
        if assigned and name.isidentifier():
            self._variables[name] = self._expand(value)
        elif word == "read":
            self._variables[rest], _, self._typed = self._typed.partition("\n")
        elif word == "echo":
            output.append(rest + "\n")
        elif word == "pwd":
            output.append(self.cwd + "\n")
        elif word == "cd":
            self.cwd = str(PurePosixPath(self.cwd) / (rest or HOME))
        elif word == "false":
            self.exit_code = 1
        elif word == "exit":
            self.exit_code = int(rest or 0)
            return False
        elif word not in ("", "true", "sleep"):
            output.append(f"bash: {word}: command not found\n")
            self.exit_code = 127
        return True

    def _expand(self, text: str) -> str:
        for name, value in {"?": str(self.exit_code), **self._env, **self._variables}.items():
            text = text.replace(f"${name}", value)
        return text


def cap_bytes(raw: bytes, max_bytes: int) -> tuple[bytes, int]:
    """Return the head and the tail of an output that is too long, and how much was left out."""
    if len(raw) <= max_bytes:
        return raw, 0
    head, tail = raw[: max_bytes // 2], raw[len(raw) - max_bytes // 2 :]
    dropped = len(raw) - len(head) - len(tail)
    return head + f"\n[... {dropped} bytes left out ...]\n".encode() + tail, dropped
