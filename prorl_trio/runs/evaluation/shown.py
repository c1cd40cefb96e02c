"""The report of an evaluation: a table for people, flat figures for programs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec
from rich.table import Table

from prorl_trio.client.terminal import one_line
from prorl_trio.runs.evaluation.folder import REPORT
from prorl_trio.runs.evaluation.score import LEVEL, LOST, score_families
from prorl_trio.runs.recording import TRAJECTORIES, named_path
from prorl_trio.runs.report import errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from prorl_trio.runs.evaluation.folder import EvaluationFolder
    from prorl_trio.runs.evaluation.score import FamilyScore, PassAtK

ALL: Final = "all"
MAX_REJECTIONS: Final = 5
MAX_UNSOLVED: Final = 20
"""Maximum number of tasks to list."""
MAX_LOG_LINES: Final = 10
Figure = str | int | float | None


def figures(folder: EvaluationFolder, scores: Sequence[FamilyScore]) -> dict[str, Figure]:
    """Return the report as one flat mapping. Keys of a family begin with its name and `/`.

    Shares are in [0, 1]. `reward_mean` is the mean over tasks of a task's mean reward. `pass@K`, its interval (`_low`,
    `_high`) and its `_tasks` count only rollouts with a reward. `_if_failed` and `_if_passed` count all tasks, with
    missing rewards taken as wrong and as correct.
    """
    plan = folder.plan
    flat: dict[str, Figure] = {
        "task_set": plan.tasks,
        "rollouts_per_task": plan.rollouts,
        "temperature": plan.sampling.temperature,
        "correct_from": plan.correct_from,
        "confidence": LEVEL,
        "rows_left_out": plan.left_out,
    }
    for score in scores:
        prefix = f"{score.family}/" if score.family else ""
        flat |= {f"{prefix}tasks": score.tasks, f"{prefix}rollouts": score.rollouts, f"{prefix}graded": score.graded}
        flat |= {f"{prefix}{why}": count for why, count in score.lost.items()}
        flat |= {f"{prefix}reward_mean": score.reward.value, f"{prefix}reward_mean_tasks": score.reward.tasks}
        flat |= {f"{prefix}reward_mean_low": score.reward.low, f"{prefix}reward_mean_high": score.reward.high}
        for passed in score.passes:
            flat |= {f"{prefix}{name}": value for name, value in _pass_figures(passed).items()}
    return flat


def _pass_figures(passed: PassAtK) -> dict[str, Figure]:
    name = f"pass@{passed.k}"
    return {
        name: passed.value,
        f"{name}_low": passed.low,
        f"{name}_high": passed.high,
        f"{name}_tasks": passed.tasks,
        f"{name}_if_failed": passed.if_failed,
        f"{name}_if_passed": passed.if_passed,
    }


def score_table(scores: Sequence[FamilyScore]) -> Table:
    """Return the table of the scores, with intervals, and with the bounds from rollouts without a reward.

    Pass@k is in per cent; the mean reward is unscaled.
    """
    table = Table(title="scores (pass@k in %)", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("family", overflow="fold")
    table.add_column("", no_wrap=True)
    table.add_column("tasks", justify="right", no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column(f"{100 * LEVEL:g} % interval", no_wrap=True)
    table.add_column("bounds", no_wrap=True)
    for score in scores:
        name, style = one_line(score.family or ALL), "" if score.family else "bold"
        reward = score.reward
        mean, low, high = map(_reward, (reward.value, reward.low, reward.high))
        table.add_row(name, "reward", str(reward.tasks), mean, f"{low} .. {high}", "", style=style)
        for passed in score.passes:
            known, low, high = map(_per_cent, (passed.value, passed.low, passed.high))
            bounds = f"{_per_cent(passed.if_failed)} .. {_per_cent(passed.if_passed)}"
            table.add_row(name, f"pass@{passed.k}", str(passed.tasks), known, f"{low} .. {high}", bounds, style=style)
    return table


def count_table(scores: Sequence[FamilyScore]) -> Table:
    """Return the table of rollouts with a reward, and of the reasons of all others."""
    table = Table(title="rollouts", title_justify="left", box=None, padding=(0, 1, 0, 0))  # fits into 80 columns
    table.add_column("family", overflow="fold")
    for column in ("tasks", "rollouts", "graded", *(why.replace("_", " ") for why in LOST)):
        table.add_column(column, justify="right", no_wrap=True)
    for score in scores:
        counts = (score.tasks, score.rollouts, score.graded, *(score.lost[why] for why in LOST))
        table.add_row(one_line(score.family or ALL), *map(str, counts), style="" if score.family else "bold")
    return table


def _per_cent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _reward(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"


def write_report(folder: EvaluationFolder) -> tuple[list[FamilyScore], bytes]:
    """Compute the scores, write them to `report.json` in the folder, and return them together with that JSON.

    Raises:
        ConfigError: it cannot be written.
    """
    scores = score_families(folder.tallies(), folder.plan.ks)
    encoded = msgspec.json.format(msgspec.json.encode(figures(folder, scores)), indent=2)
    with named_path(folder.path / REPORT):
        (folder.path / REPORT).write_bytes(encoded)
    return scores, encoded


def print_report(folder: EvaluationFolder, scores: Sequence[FamilyScore], out: Console) -> None:
    """Print the table, an explanation, and the reasons of missing rewards."""
    out.print(count_table(scores))
    out.print(score_table(scores))
    few = any(passed.tasks < score.tasks for score in scores for passed in score.passes)
    lines = [
        f"means over tasks, of rollouts with a reward, with {100 * LEVEL:g} % intervals (Wilson, tasks as trials)",
        f"correct: from a reward of {folder.plan.correct_from:g}; bounds: rollouts without a reward as all "
        "wrong .. all right",
    ]
    if folder.plan.left_out:
        lines.append(f"{folder.plan.left_out} rows of {folder.plan.tasks} could not be used, and are in no figure")
    if few:
        lines.append("some tasks have fewer than k rollouts with a reward: they are in the bounds alone")
    for line in lines:
        out.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    reasons = Counter(one_line(why).plain for why in folder.rejected.values())
    for line in [*errors(folder.last_outcomes), *(why for why, _ in reasons.most_common(MAX_REJECTIONS))]:
        out.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    recorded = f"recorded in {folder.path}: {REPORT}, and every rollout in {TRAJECTORIES}"
    out.print(recorded, markup=False, highlight=False, soft_wrap=True)


def print_unsolved(folder: EvaluationFolder, out: Console) -> int:
    """Print the tasks whose solution is not correct, with the last lines of their verifiers' logs.

    Return their number.
    """
    unsolved = [each for each in folder.outcomes if each.reward is not None and each.reward < folder.plan.correct_from]
    for outcome in unsolved[:MAX_UNSOLVED]:
        said = f"{outcome.instance_id}: its solution earned {outcome.reward:g}"
        out.print(one_line(said), style="red", markup=False, highlight=False, soft_wrap=True)
        for line in outcome.evaluation_log.splitlines()[-MAX_LOG_LINES:]:
            out.print(one_line(f"    {line}"), markup=False, highlight=False, soft_wrap=True)
    if len(unsolved) > MAX_UNSOLVED:
        out.print(f"and {len(unsolved) - MAX_UNSOLVED} more", style="red", markup=False, highlight=False)
    return len(unsolved)
