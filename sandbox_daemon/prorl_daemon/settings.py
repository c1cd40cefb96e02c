"""The daemon's settings from the process that starts it, and the environment of its tools."""

from __future__ import annotations

import functools
import os
import pwd
import select
import sys
import time

import msgspec

from prorl_ipc.limits import SandboxLimits

MAX_START_LINE_BYTES = 1024 * 1024
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RUNTIME_PREFIXES = ("PYTHON", "LD_")
"""Prefixes of variables that the daemon's own interpreter may need and tools must not see."""
LAUNCHER_PREFIXES = ("APPTAINER", "SINGULARITY", "SING_")
LAUNCHER_VARIABLES = ("HOME", "OLDPWD", "PROMPT_COMMAND", "PS1", "PWD", "SHLVL", "TERM", "USER", "_")
"""Variables that a container's launcher sets, not its image."""
LAUNCHER_LIBRARIES = "/.singularity.d/libs"
LAUNCHER_LOCALE = "C"


class StartLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of standard input, as JSON, so that the token appears in no argument list and no environment.

    `env` is added to the tools' environment. `cwd` is where shells start; empty means the home directory.
    `prestart_bash`: start a shell at once, not with the first command. `prestart_ipython`: as the option of that name.
    `inherit_env`: the daemon's environment is its image's, and tools get the image's variables as well; otherwise they
    only get PATH and HOME. `limits`: limits of the tools. `isolated`: this process sees and may signal only the
    sandbox, and file systems in memory are its own. `fakeroot`: this process is root inside, with capabilities that the
    tools only partly get. `listen_fd`: the inherited socket to listen on, if the option `--socket` is not used.
    `ports_fd`: an inherited socket on which listening sockets of the sandbox's own network are sent; see `PortOpen`.
    """

    token: str
    env: dict[str, str] = {}
    cwd: str = ""
    prestart_bash: bool = True
    prestart_ipython: bool = False
    inherit_env: bool = False
    limits: SandboxLimits = SandboxLimits()
    isolated: bool = False
    fakeroot: bool = False
    listen_fd: int = -1
    ports_fd: int = -1


_decoder = msgspec.json.Decoder(StartLine)


def read_start_line(fd: int, *, timeout_s: float) -> StartLine | None:
    """Read the start line from `fd`; return None if `fd` ends before it. Data after the line is ignored.

    Blocks; for use before the event loop runs.

    Raises:
        TimeoutError: it did not arrive in time.
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
    return _decoder.decode(line.partition(b"\n")[0])


def tool_environment(extra: dict[str, str], *, inherit_env: bool = False) -> dict[str, str]:
    """Return the environment of bash and IPython: clean, without pagers, then `extra` over it.

    With `inherit_env`, the image's variables come between the two.
    """
    home, user = _home_and_name(os.getuid())
    return {
        "PATH": os.environ.get("PATH", DEFAULT_PATH),
        "HOME": os.environ.get("HOME", home),
        "USER": user,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        **(_image_environment() if inherit_env else {}),
        **extra,
    }


@functools.cache
def _home_and_name(uid: int) -> tuple[str, str]:
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return "/", str(uid)
    return account.pw_dir, account.pw_name


def _image_environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_PREFIXES) and name not in LAUNCHER_VARIABLES
    }
    if kept.get("LANG") == LAUNCHER_LOCALE:
        del kept["LANG"]
    libraries = [path for path in kept.pop("LD_LIBRARY_PATH", "").split(":") if path != LAUNCHER_LIBRARIES]
    if any(libraries):
        kept["LD_LIBRARY_PATH"] = ":".join(libraries)
    return kept


def runtime_environment() -> dict[str, str]:
    """Return the variables for a Python started with the daemon's interpreter, until it gets the tools' environment.

    An interpreter that ignores variables needs none, and the image's would only mislead its children.
    """
    prefixes = () if sys.flags.isolated else RUNTIME_PREFIXES
    kept = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    return {"PATH": os.environ.get("PATH", DEFAULT_PATH), "LANG": "C.UTF-8", **kept}
