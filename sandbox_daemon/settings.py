"""What the daemon is told by whoever starts it, and the environment of the tools it starts."""

from __future__ import annotations

import os
import pwd
import select
import time

import msgspec

__all__ = ["StartLine", "read_start_line", "runtime_environment", "tool_environment"]

MAX_START_LINE_BYTES = 1024 * 1024
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RUNTIME_PREFIXES = ("PYTHON", "LD_")
"""Variables the daemon's own interpreter may need and no tool may see."""


class StartLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of standard input, as JSON: there the token shows in no argument list and no environment.

    `env` is added to the tools' environment. `cwd` is where shells start; empty takes the home directory.
    `prestart_ipython`: as the option of that name.
    """

    token: str
    env: dict[str, str] = {}
    cwd: str = ""
    prestart_ipython: bool = False


def read_start_line(fd: int, *, timeout_s: float) -> StartLine | None:
    """Read the start line from `fd`; None if `fd` ends before it. What follows the line is ignored.

    Blocks; for use before the event loop runs.

    Raises:
        TimeoutError: it did not come in time.
        ValueError: it is too long, not JSON, or not a `StartLine`.
    """
    deadline = time.monotonic() + timeout_s
    line = bytearray()
    while b"\n" not in line:
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"no start line on standard input within {timeout_s:g} s")
        piece = os.read(fd, 4096)
        if not piece:
            return None
        line += piece
        if len(line) > MAX_START_LINE_BYTES:
            raise ValueError(f"the start line has more than {MAX_START_LINE_BYTES} bytes")
    return msgspec.json.decode(line.partition(b"\n")[0], type=StartLine)


def tool_environment(extra: dict[str, str]) -> dict[str, str]:
    """The environment of bash and IPython: clean, without pagers, then `extra` over it."""
    try:
        account = pwd.getpwuid(os.getuid())
        home, user = account.pw_dir, account.pw_name
    except KeyError:
        home, user = "/", str(os.getuid())
    return {
        "PATH": os.environ.get("PATH", DEFAULT_PATH),
        "HOME": os.environ.get("HOME", home),
        "USER": user,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        **extra,
    }


def runtime_environment() -> dict[str, str]:
    """What a Python started with the daemon's interpreter needs until it has taken the tools' environment."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(RUNTIME_PREFIXES)}
    return {"PATH": os.environ.get("PATH", DEFAULT_PATH), "LANG": "C.UTF-8", **kept}
