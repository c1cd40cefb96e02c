"""Run one short command of a provider and report how it went."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PROBE_TIMEOUT_S", "run_probe"]

PROBE_TIMEOUT_S: Final = 20.0


async def run_probe(argv: Sequence[str], env: Mapping[str, str]) -> tuple[str, str]:
    """Run `argv` to its end. Returns what it printed, and what went wrong (empty if it exited with 0). Cancellable."""
    try:
        with trio.fail_after(PROBE_TIMEOUT_S):
            done = await trio.run_process(
                argv, env=env, cwd="/", stdin=subprocess.DEVNULL, capture_stdout=True, capture_stderr=True, check=False
            )
    except trio.TooSlowError:
        return "", f"{argv[0]} did not end within {PROBE_TIMEOUT_S:g} s"
    except OSError as exc:
        return "", f"{argv[0]} cannot be run: {exc.strerror}"
    printed = done.stdout.decode(errors="replace").strip()
    said = done.stderr.decode(errors="replace").strip()
    return (
        printed,
        "" if done.returncode == 0 else f"exit code {done.returncode}: {said or printed or 'it said nothing'}",
    )
