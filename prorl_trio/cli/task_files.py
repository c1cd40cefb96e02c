"""The loading of task sets for commands, and the report of unusable rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from prorl_trio.client.terminal import say
from prorl_trio.tasks.sets import TASK_SETS, open_task_set, skipped

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_trio.tasks.sets import TaskSet

TASKS_HELP: Final = (
    f"A task set ({', '.join(sorted(TASK_SETS))}), a file of rows (JSONL, JSON, CSV or Parquet), "
    "or a folder of Harbor tasks."
)

skip_bad_option = click.option(
    "--skip-bad",
    is_flag=True,
    help="Skip and report unusable rows. Without this option they cause an error.",
)
agent_option = click.option(
    "--agent",
    metavar="NAME",
    help="Agent program instead of the node's own agent; `prorl-trio agents list` has the names.",
)


def load_tasks(
    tasks: str, *, specs: Path | None, skip_bad: bool, limit: int | None, solutions: bool = False
) -> TaskSet:
    """Load a task set and print the omitted rows to standard error.

    Raises:
        ConfigError: the set cannot be used, see `open_task_set`.
    """
    found = open_task_set(tasks, specs=specs, solutions=solutions, skip_bad=skip_bad, limit=limit)
    if found.refused:
        say(skipped(tasks, found), err=True)
    return found
