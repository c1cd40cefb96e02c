"""Task sets: named ones from an installed package, any JSONL file of task instances, and folders of Harbor tasks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import msgspec

from prorl_trio.client.task_sets.agentbench import load_agentbench_os
from prorl_trio.client.task_sets.code import (
    load_dataframebench,
    load_dataframebench_test,
    load_humaneval,
    read_eurus_row,
    read_livecodebench_row,
)
from prorl_trio.client.task_sets.competition import load_compmath, read_math_row
from prorl_trio.client.task_sets.generated import PREFIX, load_reasoning_gym
from prorl_trio.client.task_sets.harbor import load_harbor
from prorl_trio.client.task_sets.maths import load_gsm8k, load_sums
from prorl_trio.client.task_sets.mined import is_mined, load_mined, load_sdist_swe
from prorl_trio.client.task_sets.science import load_gpqa_diamond, load_supergpqa, read_choice_row
from prorl_trio.client.task_sets.stand_ins import read_stand_ins
from prorl_trio.client.task_sets.swe_rows import read_swe_row
from prorl_trio.client.task_sets.swe_tests import read_specifications
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

__all__ = ["TASK_SETS", "load_task_set"]

MAX_BAD_LINES: Final = 5
"""Limit of the bad lines that an error names."""
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
RowReader = Callable[[dict[str, Any], str], TaskInstance | None]
ROW_READERS: Final[tuple[RowReader, ...]] = (
    read_livecodebench_row,
    read_eurus_row,
    read_choice_row,
    read_math_row,
)
"""Each takes a row that is no `TaskInstance`, and the name that it has from its place in the file. The first wins."""


def load_task_set(name_or_path: str, *, specs: Path | None = None, solutions: bool = False) -> list[TaskInstance]:
    """Return the instances of a named task set, of a JSONL file with one instance per line, or of a folder of tasks.

    `reasoning-gym:FAMILY[:N[:SEED]]` names an endless one (`generated.load_reasoning_gym`).

    Each line has `instance_id`, `handler`, `payload` and, if it likes, `family`; or it is a row that one of
    `ROW_READERS` or `read_swe_row` knows (without a `handler`). Empty lines are skipped. A folder has Harbor's tasks,
    see `load_harbor`. Blocks on the disk.

    Args:
        name_or_path: the set.
        specs: a JSON file that says how the tests of published repositories are run, see `read_specifications`.
        solutions: tasks of a folder bring their own solutions; nothing else does.

    Raises:
        ConfigError: unknown name, unreadable or empty file, malformed lines (named by their numbers and field paths),
            or an instance_id that occurs twice. One bad line rejects the whole file. Solutions are asked for, and there
            are none.
    """
    path = Path(name_or_path)
    if path.is_dir() and name_or_path not in TASK_SETS:
        return load_harbor(path, solutions=solutions)
    if solutions:
        raise ConfigError(f"{name_or_path!r} brings no solutions: folders of Harbor tasks do")
    if name_or_path in TASK_SETS:
        return TASK_SETS[name_or_path]()
    if not path.exists() and is_mined(name_or_path):
        return load_mined(name_or_path)
    if name_or_path.startswith(PREFIX):
        return load_reasoning_gym(name_or_path)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        names = ", ".join([*sorted(TASK_SETS), f"{PREFIX}FAMILY"])
        raise ConfigError(
            f"{name_or_path!r} is neither a task set ({names}) nor a readable file: {exc.strerror}"
        ) from exc
    stand_ins = cache(partial(read_stand_ins, path.parent))
    read_swe = partial(read_swe_row, specifications=read_specifications(specs), stand_ins=stand_ins)
    instances: dict[str, TaskInstance] = {}
    bad: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            instance = _read_line(line, f"{path.stem}-{number}", read_swe)
        except (msgspec.DecodeError, ValueError, KeyError, TypeError) as exc:
            bad.append(f"line {number}: {exc}")
            continue
        if instance.instance_id in instances:
            bad.append(f"line {number}: instance_id {instance.instance_id!r} is that of a line before")
        instances[instance.instance_id] = instance
    if bad:
        raise ConfigError(_bad_lines(path, bad, len(instances)))
    if not instances:
        raise ConfigError(f"{path} holds no task instance")
    return list(instances.values())


def _read_line(line: bytes, name: str, read_swe: RowReader) -> TaskInstance:
    """Return the instance that a line is. Raises msgspec.DecodeError, UnicodeDecodeError."""
    row = msgspec.json.decode(line)
    if isinstance(row, dict) and "handler" not in row:
        found = next((instance for read in (*ROW_READERS, read_swe) if (instance := read(row, name)) is not None), None)
        if found is not None:
            return found
    return msgspec.convert(row, TaskInstance)


def _bad_lines(path: Path, bad: list[str], good: int) -> str:
    more = f"; and {len(bad) - MAX_BAD_LINES} more" if len(bad) > MAX_BAD_LINES else ""
    fate = f"none of the file is used, not the {good} good lines either: mend it, or leave bad lines out"
    return f"{path}, {'; '.join(bad[:MAX_BAD_LINES])}{more}; {fate}"
