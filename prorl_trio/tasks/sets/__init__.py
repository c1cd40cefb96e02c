"""Task sets: named sets from a package, files of published rows, and folders of Harbor tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable  # noqa: TC003 - evaluated by msgspec and readers
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from prorl_ipc.portable_text import printable
from prorl_trio.tasks.sets.agentbench import load_agentbench_os
from prorl_trio.tasks.sets.code import (
    load_dataframebench,
    load_dataframebench_test,
    load_humaneval,
)
from prorl_trio.tasks.sets.fields import RowError
from prorl_trio.tasks.sets.forms import UnknownForm, known_forms, read_row
from prorl_trio.tasks.sets.generated import PREFIX, load_reasoning_gym
from prorl_trio.tasks.sets.harbor import load_harbor, read_stand_ins
from prorl_trio.tasks.sets.math_rows import load_compmath
from prorl_trio.tasks.sets.maths import load_gsm8k, load_sums
from prorl_trio.tasks.sets.mined import is_mined, load_mined, load_sdist_swe
from prorl_trio.tasks.sets.row_files import read_rows
from prorl_trio.tasks.sets.science import load_gpqa_diamond, load_supergpqa
from prorl_trio.tasks.sets.swe_rows import read_specifications, read_swe_row
from prorl_trio.tasks.sets.task_checks import check_instances
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

__all__ = ["TASK_SETS", "TaskSet", "load_task_set", "open_task_set", "skipped"]

logger = logging.getLogger(__name__)

MAX_BAD_ROWS: Final = 5
"""Number of bad rows named in a message."""
MAX_SENTENCE_CHARS: Final = 600
TASK_SETS: Final[dict[str, Callable[[], list[TaskInstance]]]] = {
    "agentbench-os": load_agentbench_os,
    "compmath": load_compmath,
    "dataframebench": load_dataframebench,
    "dataframebench-test": load_dataframebench_test,
    "gpqa-diamond": load_gpqa_diamond,
    "gsm8k": load_gsm8k,
    "humaneval": load_humaneval,
    "sdist-swe": load_sdist_swe,
    "sums": load_sums,
    "supergpqa": load_supergpqa,
}


class TaskSet(NamedTuple):
    """A loaded set.

    Attributes:
        instances: the tasks, in order.
        refused: a sentence for each skipped row with its place, field, problem and remedy.
    """

    instances: list[TaskInstance]
    refused: list[str]


class _Row(NamedTuple):
    """A row of a file: its place, and its instance or the reason why it cannot be used."""

    place: str
    found: TaskInstance | RowError


def load_task_set(
    name_or_path: str, *, specs: Path | None = None, solutions: bool = False, skip_bad: bool = False, check: bool = True
) -> list[TaskInstance]:
    """Return the instances of a named task set, of a file with one row per line, or of a folder of tasks.

    Like `open_task_set`, but returns only the instances. A warning is logged for skipped rows.
    """
    found = open_task_set(name_or_path, specs=specs, solutions=solutions, skip_bad=skip_bad, check=check)
    if found.refused:
        logger.warning("%s", skipped(name_or_path, found))
    return found.instances


def open_task_set(
    name_or_path: str,
    *,
    specs: Path | None = None,
    solutions: bool = False,
    skip_bad: bool = False,
    check: bool = True,
    limit: int | None = None,
) -> TaskSet:
    """Load a named task set, a file of rows, or a folder of tasks, and check that every task can be graded.

    `reasoning-gym:FAMILY[:N[:SEED]]` names an endless set (`generated.load_reasoning_gym`). A folder contains Harbor
    tasks, see `load_harbor`.

    A file is JSONL, a JSON array, CSV or Parquet, optionally compressed with gzip. A row has `instance_id`, `handler`,
    `payload` and optionally `family`, or it has one of the published forms (`forms.FORMS`, `read_swe_row`). Blocks on
    the disk and, for tasks with a gold answer, on scoring processes (see `check_instances`).

    Args:
        name_or_path: the set.
        specs: a JSON file with the test commands of published repositories, see `read_specifications`.
        solutions: include the tasks' own solutions; only tasks of a folder have them.
        skip_bad: skip rows that cannot be used, instead of refusing the whole file. Unusable tasks of a named set are
            always skipped.
        check: let handlers check payloads and gold answers. Otherwise only the form of rows is checked.
        limit: return only this many tasks; None for all.

    Raises:
        ConfigError: unknown name, unreadable or empty file, an unusable row (unless `skip_bad`), or a repeated
            instance_id. The message contains the number of bad rows, and the place, field, problem and remedy of the
            first ones. Also raised if solutions are requested but missing.
    """
    path = Path(name_or_path)
    is_file = False
    if path.is_dir() and name_or_path not in TASK_SETS:
        rows = _named(load_harbor(path, solutions=solutions))
    elif solutions:
        raise ConfigError(f"{name_or_path!r} brings no solutions: folders of Harbor tasks do")
    elif name_or_path in TASK_SETS:
        rows, skip_bad = _named(TASK_SETS[name_or_path]()), True
    elif name_or_path.startswith(PREFIX):
        rows = _named(load_reasoning_gym(name_or_path))
    elif not path.exists() and is_mined(name_or_path):
        rows = _named(load_mined(name_or_path))
    else:
        rows, is_file = _read_file(path, specs), True
    if limit is not None:
        rows = rows[:limit]
    if check:
        rows = _checked(rows)
    refused = [_sentence(row.place, row.found) for row in rows if isinstance(row.found, RowError)]
    instances = [row.found for row in rows if isinstance(row.found, TaskInstance)]
    if refused and not (skip_bad and instances):
        is_unknown = any(isinstance(row.found, UnknownForm) for row in rows)
        raise ConfigError(_refusal(name_or_path, refused, len(instances), is_unknown=is_unknown))
    if not instances:
        raise ConfigError(f"{path} holds no task instance" if is_file else f"{name_or_path} holds no task")
    return TaskSet(instances, refused)


def skipped(name_or_path: str, found: TaskSet) -> str:
    """Return a message about the skipped rows of a set."""
    total = len(found.instances) + len(found.refused)
    return "\n".join([f"{name_or_path}: {len(found.refused)} of {total} rows are left out:", *_first(found.refused)])


def _named(instances: list[TaskInstance]) -> list[_Row]:
    return [_Row(each.instance_id, each) for each in instances]


def _read_file(path: Path, specs: Path | None) -> list[_Row]:
    stand_ins = cache(partial(read_stand_ins, path.parent))
    read_swe = partial(read_swe_row, specifications=read_specifications(specs), stand_ins=stand_ins)
    rows: list[_Row] = []
    places: dict[str, str] = {}
    try:
        for place, row in read_rows(path):
            rows.append(_Row(place, _read(row, f"{path.stem}-{place.rpartition(' ')[2]}", read_swe)))
            found = rows[-1].found
            if isinstance(found, TaskInstance) and places.setdefault(found.instance_id, place) != place:
                first = places[found.instance_id]
                rows[-1] = _Row(place, RowError(f"{found.instance_id!r} is the id of {first} as well", "instance_id"))
    except OSError as exc:
        names = ", ".join([*sorted(TASK_SETS), f"{PREFIX}FAMILY"])
        raise ConfigError(f"{str(path)!r} is neither a task set ({names}) nor a readable file: {exc.strerror}") from exc
    return rows


def _read(
    row: dict[str, Any] | RowError, name: str, read_swe: Callable[[dict[str, Any], str], TaskInstance | None]
) -> TaskInstance | RowError:
    if isinstance(row, RowError):
        return row
    try:
        return read_row(row, name, read_swe)
    except RowError as exc:
        return exc


def _checked(rows: list[_Row]) -> list[_Row]:
    """Replace instances refused by their handlers with the reasons."""
    good = [(place, row.found) for place, row in enumerate(rows) if isinstance(row.found, TaskInstance)]
    errors = check_instances([instance for _, instance in good])
    rows = list(rows)
    for number, error in errors.items():
        place = good[number][0]
        rows[place] = _Row(rows[place].place, error)
    return rows


def _sentence(place: str, error: RowError) -> str:
    said = f"{place}, field `{error.field}`: {error.problem}" if error.field else f"{place}: {error.problem}"
    return printable(said[:MAX_SENTENCE_CHARS], keep="")


def _first(refused: list[str]) -> list[str]:
    more = len(refused) - MAX_BAD_ROWS
    return [*(f"  {each}" for each in refused[:MAX_BAD_ROWS]), *([f"  and {more} more"] if more > 0 else [])]


def _refusal(name: str, refused: list[str], good: int, *, is_unknown: bool) -> str:
    lines = [f"{name}: {len(refused)} of {good + len(refused)} rows cannot be used, so none is:", *_first(refused)]
    if is_unknown:
        lines.append(f"Known forms: {known_forms()}.")
    if good:
        lines.append(f"Correct them, or use the other {good} rows with --skip-bad (skip_bad=True).")
    return "\n".join(lines)
