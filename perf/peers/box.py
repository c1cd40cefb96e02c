"""The sandbox of the peers' Python tool: bubblewrap around an interpreter, one of each for every call.

Standard library only, since it runs in the environments of peers.

The isolation is that of the node's own sandboxes: namespaces of its own for all, no capabilities, no network, a
read-only system and an empty /tmp. What theirs have besides (limits, a seccomp filter, a shell that keeps its variables
from call to call) would only make this one slower.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

__all__ = ["Box"]

ISOLATION: Final = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--as-pid-1"),
    *("--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"),
)
SYSTEM: Final = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
INTERPRETER: Final = ("-I", "-S", "-c")
"""Without site-packages and environment, which halves its start."""
KILLED_TIMEOUT_S: Final = 5.0
NO_OUTPUT: Final = "[no output]"


class Box:
    """Runs programs, each in a sandbox of its own.

    Args:
        bubblewrap: the program.
        timeout_s: of a call.
        max_chars: of what it printed; more is cut in the middle.
    """

    def __init__(self, bubblewrap: str, *, timeout_s: float, max_chars: int) -> None:
        self._argv = (bubblewrap, *ISOLATION, *_mounts(), "--chdir", "/tmp", "--", os.path.realpath(sys.executable))
        self._timeout_s = timeout_s
        self._max_chars = max_chars

    async def run(self, code: str) -> str:
        """Return what a program printed, its traceback included. A cancel kills it."""
        process = await asyncio.create_subprocess_exec(
            *self._argv,
            *INTERPRETER,
            code,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            printed, _ = await asyncio.wait_for(process.communicate(), self._timeout_s)
        except TimeoutError:
            return f"[stopped after {self._timeout_s:g} s]"
        finally:
            if process.returncode is None:
                process.kill()
                await asyncio.wait_for(process.wait(), KILLED_TIMEOUT_S)
        return self._shorten(printed.decode(errors="replace").rstrip("\n")) or NO_OUTPUT

    def _shorten(self, text: str) -> str:
        if len(text) <= self._max_chars:
            return text
        half = self._max_chars // 2
        return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _mounts() -> list[str]:
    """Return the options for a root that has the system's programs and this interpreter, and nothing of the user's."""
    argv = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for path in SYSTEM:
        if os.path.islink(path):
            argv += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            argv += ["--ro-bind", path, path]
    base = Path(sys.base_prefix).resolve()
    if not base.is_relative_to("/usr"):
        argv += ["--ro-bind", str(base), str(base)]
    return argv
