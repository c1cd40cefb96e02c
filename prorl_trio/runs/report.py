"""Human-readable views of a run: its final table, its outcomes, and the figures of one trajectory."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import numpy as np
from rich.table import Table
from rich.text import Text

from prorl_ipc.portable_text import printable
from prorl_trio.client.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.chat.format import ChatFormat
    from prorl_trio.runs.recording import Summary
    from prorl_trio.types.models import Outcome, Segment, Trajectory

_LOGPROB_STYLES: Final = ((-0.11, "green"), (-0.7, ""), (-2.3, "yellow"), (-np.inf, "red"))
"""Lowest log-probability of each style: probability 0.9, 0.5, 0.1, and below."""
MAX_ERRORS: Final = 3
MAX_ERROR_CHARS: Final = 400
MAX_GROUPS: Final = 40
MAX_NAME_CHARS: Final = 36


def summary_table(summary: Summary, outcomes: Sequence[Outcome]) -> Table:
    """Return a table of outcomes, rewards, stop reasons, turns, tool calls, seconds per stage and token throughput."""
    table = Table(title="rollouts", show_header=False, title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("jobs", str(summary.jobs))
    if summary.rejected:
        table.add_row("  rejected, besides", str(summary.rejected), style="red")
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


def group_table(groups: Sequence[tuple[str, Sequence[Outcome]]]) -> Table:
    """Return a table with a row for each of the first `MAX_GROUPS` named groups: its rewards, their mean and spread.

    A rollout without a reward is shown as a dash, and is left out of mean and spread. `ended` contains the status of
    each such rollout, and the reason. Groups with differing rewards are informative: they are bold and counted in the
    title.
    """
    differ = sum(len({outcome.reward for outcome in group} - {None}) > 1 for _, group in groups)
    title = f"{len(groups)} groups; in {differ} of them rewards differ"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("group", no_wrap=True, max_width=MAX_NAME_CHARS)
    for column in ("rewards", "mean", "spread"):
        table.add_column(column, no_wrap=True, min_width=len(column), justify="right")
    table.add_column("ended", overflow="fold")
    for name, group in groups[:MAX_GROUPS]:
        rewards = [outcome.reward for outcome in group if outcome.reward is not None]
        ends = Counter(_end_of(outcome) for outcome in group)
        table.add_row(
            one_line(name),
            " ".join("-" if outcome.reward is None else f"{outcome.reward:g}" for outcome in group),
            f"{np.mean(rewards):.2f}" if rewards else "-",
            f"{np.std(rewards):.2f}" if rewards else "-",
            one_line(", ".join(f"{count} {end}" for end, count in ends.most_common())),
            style="bold" if len(set(rewards)) > 1 else "",
        )
    if len(groups) > MAX_GROUPS:
        table.caption = f"{len(groups) - MAX_GROUPS} more groups"
    return table


def _end_of(outcome: Outcome) -> str:
    if outcome.cause is not None or outcome.trajectory is None:
        return f"{outcome.status}: {outcome.cause}"
    return outcome.trajectory.stop_reason


def errors(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the `MAX_ERRORS` most frequent errors, one line each, with their counts."""
    counts = Counter(one_line(f"{each.cause}: {_reason(each.error)}").plain for each in outcomes if each.error)
    return [f"{count} x {error[:MAX_ERROR_CHARS]}" for error, count in counts.most_common(MAX_ERRORS)]


def _reason(error: str) -> str:
    """Return an error without its traceback. If the traceback precedes the reason, the reason remains."""
    head, found, trace = error.partition("Traceback (most recent call last):")
    head = head.rstrip()
    if not found or (head and not head.endswith(":")):
        return head
    lines = trace.rstrip().splitlines()
    last_frame = max((place for place, line in enumerate(lines) if line.startswith(" ")), default=-1)
    return f"{head} {' '.join(lines[last_frame + 1 :])}".strip()


def outcome_list(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with one row per outcome; `logprob` is the mean over the sampled tokens."""
    table = Table(title=f"{len(outcomes)} outcomes", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("job", "status", "reward", "turns", "tokens", "logprob", "run s", "stopped"):
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
            _mean_logprob(trajectory.segments) if trajectory else "-",
            f"{outcome.timing.run_s:.2f}",
            trajectory.stop_reason if trajectory else "-",
            one_line(outcome.error),
        )
    return table


def timing_line(outcome: Outcome) -> str:
    """Return one line with the seconds of each stage, and in brackets the seconds in its queue."""
    timing = outcome.timing
    stages = [
        f"{stage} {getattr(timing, f'{stage}_s'):.2f} s (queued {getattr(timing, f'queued_{stage}_s'):.2f})"
        for stage in ("init", "run", "eval")
    ]
    return ", ".join(stages)


def turn_table(trajectory: Trajectory) -> Table:
    """Return a table with one row per turn: sampled tokens, log-probabilities, finish reason, calls and seconds."""
    table = Table(title="turns", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("turn", "segment", "tokens", "logprob mean", "min", "finish", "calls", "inference s", "tools s"):
        table.add_column(column, no_wrap=True, justify="left" if column == "finish" else "right")
    for number, turn in enumerate(trajectory.turns, start=1):
        logprobs = trajectory.segments[turn.segment].logprobs[turn.completion_start : turn.completion_end]
        table.add_row(
            str(number),
            str(turn.segment),
            str(turn.completion_end - turn.completion_start),
            f"{logprobs.mean():.3f}" if len(logprobs) else "-",
            f"{logprobs.min():.3f}" if len(logprobs) else "-",
            turn.finish_reason,
            str(len(turn.tool_calls)),
            f"{turn.inference_s:.2f}",
            f"{turn.tools_s:.2f}",
        )
    return table


def token_lines(trajectory: Trajectory, chat_format: ChatFormat | None) -> Text:
    """Return one line per sampled token: segment, position, id, log-probability and, with `chat_format`, its text."""
    text = Text("segment  position      id   logprob  token\n", style="bold dim")
    for index, segment in enumerate(trajectory.segments):
        for position in np.flatnonzero(segment.loss_mask).tolist():
            token_id, logprob = int(segment.token_ids[position]), float(segment.logprobs[position])
            said = "" if chat_format is None else repr(chat_format.decode([token_id]))
            style = next(style for bound, style in _LOGPROB_STYLES if logprob >= bound)
            text.append(f"{index:7}  {position:8}  {token_id:6}  {logprob:8.4f}  {printable(said)}\n", style=style)
    return text


def _mean_logprob(segments: Sequence[Segment]) -> str:
    sampled = [segment.logprobs[segment.loss_mask == 1] for segment in segments]
    count = sum(map(len, sampled))
    return f"{sum(map(np.sum, sampled)) / count:.3f}" if count else "-"
