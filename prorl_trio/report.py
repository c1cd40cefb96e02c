"""What people see of a run: the final table, and one trajectory with its kinds of tokens told apart by colour."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from rich.table import Table
from rich.text import Text

from prorl_trio.terminal import one_line, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.chat import ChatFormat
    from prorl_trio.client.recording import Summary
    from prorl_trio.models import Outcome, Trajectory

__all__ = ["errors", "outcome_list", "render_trajectory", "summary_table"]

SAMPLED: Final = "bold green"
OBSERVED: Final = "cyan"
MASKED: Final = "dim"
MAX_ERRORS: Final = 3
MAX_ERROR_CHARS: Final = 400


def summary_table(summary: Summary, outcomes: Sequence[Outcome]) -> Table:
    """Outcomes, rewards, stop reasons, turns, tool calls, seconds per stage and token throughput."""
    table = Table(title="rollouts", show_header=False, title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("jobs", str(summary.jobs))
    for status in ("completed", "failed", "cancelled", "timed_out"):
        table.add_row(f"  {status}", str(getattr(summary, status)))
    causes = Counter(outcome.cause for outcome in outcomes if outcome.cause is not None)
    for cause, count in causes.most_common():
        table.add_row(f"    cause {cause}", str(count))
    table.add_row("reward, mean", "-" if summary.reward_mean is None else f"{summary.reward_mean:.3f}")
    rewards = Counter(outcome.reward for outcome in outcomes if outcome.reward is not None)
    for reward, count in sorted(rewards.items()):
        table.add_row(f"  reward {reward:g}", str(count))
    reasons = Counter(outcome.trajectory.stop_reason for outcome in outcomes if outcome.trajectory is not None)
    for reason, count in reasons.most_common():
        table.add_row(f"stopped: {reason}", str(count))
    table.add_row("turns, mean", f"{summary.turns_mean:.2f}")
    table.add_row("tool calls", str(summary.tool_calls))
    for stage in ("init", "run", "eval"):
        seconds = [getattr(outcome.timing, f"{stage}_s") for outcome in outcomes]
        if seconds:
            p50, p95 = np.percentile(seconds, (50, 95))
            table.add_row(f"{stage}, p50 / p95", f"{p50:.2f} / {p95:.2f} s")
    table.add_row("sampled tokens per second", f"{summary.tokens_per_s:.1f}")
    table.add_row("wall clock", f"{summary.wall_s:.1f} s")
    table.add_row("prefix breaks", str(summary.prefix_breaks), style="red" if summary.prefix_breaks else "")
    return table


def errors(outcomes: Sequence[Outcome]) -> list[str]:
    """What went wrong most often, with how often, one line each; at most `MAX_ERRORS`."""
    counts = Counter(one_line(f"{outcome.cause}: {outcome.error}").plain for outcome in outcomes if outcome.error)
    return [f"{count} x {error[:MAX_ERROR_CHARS]}" for error, count in counts.most_common(MAX_ERRORS)]


def outcome_list(outcomes: Sequence[Outcome]) -> Table:
    """One line per outcome, to choose from."""
    table = Table(title=f"{len(outcomes)} outcomes", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("job", "status", "reward", "turns", "tokens", "stopped"):
        table.add_column(column, no_wrap=True, min_width=3)
    table.add_column("error", overflow="fold")
    for outcome in outcomes:
        trajectory = outcome.trajectory
        table.add_row(
            one_line(outcome.job_id),
            outcome.status,
            "-" if outcome.reward is None else f"{outcome.reward:g}",
            str(len(trajectory.turns)) if trajectory else "-",
            str(sum(map(len, trajectory.segments))) if trajectory else "-",
            trajectory.stop_reason if trajectory else "-",
            one_line(outcome.error),
        )
    return table


def render_trajectory(outcome: Outcome, chat_format: ChatFormat | None) -> Text:
    """The trajectory as text: sampled tokens, what came back (tool output, reminders), and masked tokens in colours.

    Without the model's `chat_format` the tokens cannot be decoded: then the recorded text of each turn is shown.
    Control characters are shown, not obeyed.
    """
    text = Text()
    trajectory = outcome.trajectory
    details = msgspec.json.encode(outcome.details).decode()
    text.append(plain(f"{outcome.job_id}  {outcome.status}  reward {outcome.reward}  {details}\n"), style="bold")
    if outcome.error:
        text.append(plain(f"{outcome.cause}: {outcome.error}\n"), style="red")
    if trajectory is None:
        text.append("no trajectory was recorded\n")
        return text
    for style, meaning in ((SAMPLED, "sampled"), (OBSERVED, "tool output and other input"), (MASKED, "masked prompt")):
        text.append(f"[{meaning}] ", style=style)
    text.append("\n\n")
    if chat_format is None:
        _append_turns(text, trajectory)
    else:
        _append_tokens(text, trajectory, chat_format)
    text.append(f"\nstopped: {trajectory.stop_reason}, {len(trajectory.turns)} turns\n", style="bold")
    return text


def _append_turns(text: Text, trajectory: Trajectory) -> None:
    for turn in trajectory.turns:
        text.append(plain(turn.text.rstrip()) + "\n", style=SAMPLED)
        for observation in turn.observations:
            text.append(plain(observation.rstrip()) + "\n", style=OBSERVED)


def _append_tokens(text: Text, trajectory: Trajectory, chat_format: ChatFormat) -> None:
    for segment in trajectory.segments:
        ids, mask = segment.token_ids, segment.loss_mask
        edges = np.flatnonzero(np.diff(mask)) + 1
        starts, ends = [0, *edges.tolist()], [*edges.tolist(), len(ids)]
        for start, end in zip(starts, ends, strict=True):
            style = SAMPLED if mask[start] else OBSERVED if start else MASKED
            text.append(plain(chat_format.decode(ids[start:end].tolist())), style=style)
        text.append("\n")
