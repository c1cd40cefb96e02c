"""The lines by which a run shows itself in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from rich.text import Text

from prorl_launch.learning.record import EVENT, Ended, Evaluated, Shown, Stepped

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from prorl_launch.learning.record import Event

POLL_S = 0.3


async def follow(path: Path, console: Console, offset: int = 0) -> None:
    """Print each event that is appended to `path` after `offset` bytes. Runs until it is cancelled."""
    while True:
        chunk = await trio.to_thread.run_sync(_read, path, offset)
        lines, _, _ = chunk.rpartition(b"\n")
        for line in filter(None, lines.split(b"\n")):
            console.print(describe(EVENT.decode(line)), soft_wrap=True)
        offset += len(lines) + bool(lines)
        await trio.sleep(POLL_S)


def _read(path: Path, offset: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read()


def describe(event: Event) -> Text:
    """Return the line for an event."""
    match event:
        case Shown(step, of, loss):
            return Text(f"  demonstrations {step:2}/{of}  loss {loss:.3f}", style="dim")
        case Evaluated(record):
            line = Text(f"held out after {record.step:3} updates: ")
            line.append(f"greedy {record.greedy:.2f}  T = 1 {record.sampled:.2f}", style="bold green")
            return line.append(f"  tool used in {record.tool_share:.0%}  gap {record.gap:.4f}", style="dim")
        case Ended(step, why):
            return Text(f"ended after {step} updates: {why}", style="bold")
        case Stepped(record, of):
            seconds = record.wait_s + record.update_s + record.sync_s + record.checkpoint_s
            line = Text(f"step {record.step:3}/{of}  ")
            line.append(f"reward {record.reward_sampled or record.reward:.2f}", style="bold")
            line.append(f"  informative {record.informative_share or 0.0:.0%}  {record.length:.0f} tokens")
            parts = f"rollouts {record.wait_s:.0f} + training {record.update_s:.0f} + weights {record.sync_s:.1f}"
            return line.append(f"  {seconds:.0f} s ({parts})", style="dim")
