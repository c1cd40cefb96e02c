"""Execution of set-up's slow commands: quiet on the terminal, with a complete log and clear errors.

Standard library only.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from prorl_ipc.portable_text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import IO

_HEARTBEAT_S = 30.0
_STATUS_COLUMNS = 100
_TAIL_LINES = 25
_TERM_GRACE_S = 5.0
_MISLEADING_ENV = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_USER", "PIP_TARGET", "PIP_PREFIX"}
_PIP_ENV = {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


class SetupError(Exception):
    """Set-up cannot continue. The message contains the problem and the remedy."""


def say(message: str) -> None:
    """Print one line immediately, also if the output is a pipe."""
    print(printable(f"setup: {message}"), flush=True)  # noqa: T201  its whole purpose


def run_step(
    title: str,
    argv: Sequence[str],
    *,
    log_file: Path,
    hint: str = "",
    keep_open: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run one command to its end; its output is appended to `log_file`.

    A terminal shows the command's latest line. A pipe gets a line every 30 s, so that a CI log shows progress. The
    command has no standard input, and lacks variables that would misdirect pip or Python. `variables` are added to its
    environment. It inherits the descriptors `keep_open`. On Ctrl-C, or any other error in this process, it is stopped
    before this returns.

    Raises:
        SetupError: it failed. The message has the end of its output, the log's path and `hint`.
    """
    started = time.monotonic()
    log_file.parent.mkdir(parents=True, exist_ok=True)
    env = {name: value for name, value in os.environ.items() if name not in _MISLEADING_ENV} | _PIP_ENV
    env |= variables or {}
    say(title)
    with log_file.open("ab", buffering=0) as log:  # so that `tail -f` shows it
        log.write(f"\n$ {' '.join(argv)}\n".encode())
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=tuple(keep_open),
        )
        with process:
            try:
                tail = _follow(process, log, title, started)
            except BaseException:
                _end(process)
                raise
    if process.returncode:
        raise SetupError(
            "\n".join(
                [*tail, f"{title}: failed with exit code {process.returncode}; the whole output is in {log_file}"]
            )
            + (f"\n{hint}" if hint else "")
        )


def _follow(process: subprocess.Popen[bytes], log: IO[bytes], title: str, started: float) -> list[str]:
    """Copy the command's output to the log until end of file. Return the last lines, decoded."""
    assert process.stdout is not None
    on_terminal = sys.stdout.isatty()
    latest = b""
    spoken = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=1.0 if on_terminal else _HEARTBEAT_S):
                chunk = os.read(process.stdout.fileno(), 65536)
                if not chunk:
                    break
                log.write(chunk)
                latest = (latest + chunk)[-16384:]
            lines = latest.decode(errors="replace").replace("\r", "\n").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "")
            status = f"  {time.monotonic() - started:4.0f} s  {printable(last.strip(), keep='')}"[:_STATUS_COLUMNS]
            if on_terminal:
                sys.stdout.write(f"\r\033[K{status}")
                sys.stdout.flush()
            elif time.monotonic() - spoken >= _HEARTBEAT_S:
                spoken = time.monotonic()
                say(f"{title}: {status.strip()}")
    if on_terminal:
        sys.stdout.write("\r\033[K")
    return printable(latest.decode(errors="replace").replace("\r", "\n")).strip().splitlines()[-_TAIL_LINES:]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_TERM_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
