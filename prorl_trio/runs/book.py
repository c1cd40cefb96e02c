"""The recorded runs of a folder: found, described, and opened on demand. Blocks on the disk."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from prorl_trio.file_systems import open_regular
from prorl_trio.runs.index import HEADER_BYTES, OutcomeIndex
from prorl_trio.runs.recording import RUN_INFO, SUMMARY, TRAJECTORIES
from prorl_trio.runs.rollout_view import RolloutView, Vocabulary
from prorl_trio.types.errors import ConfigError, UnknownJob

CURVE: Final = "curve.json"
SETTINGS: Final = "settings.json"
EVALUATION: Final = "evaluation.json"
REPORT: Final = "report.json"
TASKS: Final = "tasks.jsonl"
MAX_DEPTH: Final = 4
MAX_RUNS: Final = 2000
OPEN_ROLLOUTS: Final = 8
"""Number of rollouts whose decoded tokens are cached."""


class _Curve(msgspec.Struct):
    steps: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []


class _Task(msgspec.Struct):
    instance_id: str
    handler: str = ""
    family: str = ""


class Run:
    """One folder with outcomes, a learning curve, or both.

    Attributes:
        run_id: the run's path below the viewed folder; `.` for that folder itself.
        path: the folder.
    """

    def __init__(self, run_id: str, path: Path) -> None:
        self.run_id = run_id
        self.path = path
        self._lock = threading.Lock()
        self._index: OutcomeIndex | None = None

    def describe(self) -> dict[str, Any]:
        """Return the run's entry in the list of runs, without reading the outcomes."""
        info, settings = self.json(RUN_INFO), self.json(SETTINGS)
        summary, curve = self.json(SUMMARY), self.curve()
        steps = curve.get("steps", [])
        return {
            "run": self.run_id,
            "name": shown_path(Path(self.path.name)) if self.run_id == "." else self.run_id,
            "kind": "learning" if curve else "evaluation" if (self.path / EVALUATION).exists() else "run",
            "model": self.model(),
            "tasks": info.get("tasks", ""),
            "rollouts": self._count() or (steps[-1].get("rollouts", 0) if steps else 0),
            "reward_mean": summary.get("reward_mean", self.json(REPORT).get("reward_mean")),
            "steps": len(steps),
            "of": settings.get("steps"),
            "changed_s": self._changed_s(),
        }

    def about(self) -> dict[str, Any]:
        """Return the figures in the run's own files, and the values for filters."""
        index, described = self.index(), self.describe()
        rewards = [row.reward for row in index.rows if row.reward is not None] if index else []
        return {
            **described,
            "rollouts": len(index.rows) if index else described["rollouts"],
            "reward_mean": sum(rewards) / len(rewards) if rewards else described["reward_mean"],
            "facets": index.facets() if index else {},
            "recorded": index is not None,
            "curve": self.curve(),
            "figures": self.json(REPORT) or self.json(SUMMARY),
        }

    def model(self) -> str:
        """Return the model's folder, or an empty string if it is unknown."""
        return str(self.json(RUN_INFO).get("model") or self.json(SETTINGS).get("model") or "")

    def json(self, name: str) -> dict[str, Any]:
        """Return a JSON object of the run's folder; empty if the file is missing or incomplete."""
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(_read(self.path / name), type=dict[str, Any])
        return {}

    def curve(self) -> dict[str, Any]:
        """Return the learning curve; empty if there is none, or the file is another program's."""
        with suppress(msgspec.ValidationError):
            found = self.json(CURVE)
            msgspec.convert(found, _Curve)
            return found
        return {}

    def index(self) -> OutcomeIndex | None:
        """Return the index of the run's outcomes, including the latest; None without outcomes."""
        with self._lock:
            if self._index is None and (self.path / TRAJECTORIES).exists():
                agent = self.json(EVALUATION).get("agent", "") or self.json(SETTINGS).get("agent", "")
                self._index = OutcomeIndex(self.path / TRAJECTORIES, self._tasks(), str(agent))
            elif self._index is not None:
                self._index.refresh()
            return self._index

    def close(self) -> None:
        if self._index is not None:
            self._index.close()

    def _count(self) -> int:
        with suppress(OSError), os.fdopen(open_regular(self.path / TRAJECTORIES), "rb") as file:
            return int.from_bytes(file.read(HEADER_BYTES)[1:], "big")
        return 0

    def _changed_s(self) -> float:
        with suppress(OSError):  # it, or a file of it, was removed
            return max((found.stat().st_mtime for found in self.path.iterdir() if found.is_file()), default=0.0)
        return 0.0

    def _tasks(self) -> dict[str, tuple[str, str]]:
        with suppress(OSError, msgspec.DecodeError):
            tasks = msgspec.json.Decoder(_Task).decode_lines(_read(self.path / TASKS))
            return {task.instance_id: (task.handler, task.family) for task in tasks}
        return {}


class RunBook:
    """The runs at and below a folder. Safe to use from several threads.

    `model` is the folder whose tokenizer decodes tokens, instead of each run's own. Raises ConfigError if it has no
    tokenizer, or if the viewed folder contains no run. Errors of a run's own files (OSError, ConfigError) are raised
    when the run is viewed.
    """

    def __init__(self, root: Path, model: Path | None = None) -> None:
        self.root = root
        self._model = model
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._vocabularies: dict[Path, Vocabulary | None] = {}
        self._open: OrderedDict[tuple[str, str], RolloutView] = OrderedDict()
        if model is not None:
            try:
                self._vocabularies[model] = Vocabulary(model)
            except (OSError, ValueError) as exc:
                raise ConfigError(f"{model} has no tokenizer that can be used: {exc}") from exc
        if not self.runs():
            raise ConfigError(
                f"{root} has no recorded run: neither {TRAJECTORIES} nor {CURVE} in it, or up to {MAX_DEPTH} folders "
                "below it"
            )

    def runs(self) -> list[Run]:
        """Return every run, including new ones, at most `MAX_RUNS`."""
        with self._lock:
            found = {shown_path(path.relative_to(self.root)): path for path in _find_runs(self.root)}
            return [self._runs.setdefault(run_id, Run(run_id, path)) for run_id, path in found.items()]

    def run(self, run_id: str) -> Run:
        """Return a run by its id. Raises UnknownJob if it does not exist."""
        if (run := self._runs.get(run_id)) is None:
            raise UnknownJob(f"there is no run {run_id!r}")
        return run

    def index(self, run_id: str) -> OutcomeIndex:
        """Return the index of a run. Raises UnknownJob if the run or its outcomes do not exist."""
        index = self.run(run_id).index()
        if index is None:
            raise UnknownJob(f"the run {run_id!r} has no outcomes")
        return index

    def rollout(self, run_id: str, job_id: str) -> RolloutView:
        """Return a rollout for viewing. Raises UnknownJob if it does not exist."""
        index = self.index(run_id)
        with self._lock:
            key = run_id, job_id
            if key not in self._open:
                self._open[key] = RolloutView(index.read(job_id), self._vocabulary(self._runs[run_id]))
                if len(self._open) > OPEN_ROLLOUTS:
                    self._open.popitem(last=False)
            self._open.move_to_end(key)
            return self._open[key]

    def _vocabulary(self, run: Run) -> Vocabulary | None:
        named = run.model()
        folder = self._model or (Path(named) if named else None)
        if folder is None:
            return None
        if folder not in self._vocabularies:
            self._vocabularies[folder] = None
            with suppress(OSError, ValueError):  # tokens are then shown by their ids
                self._vocabularies[folder] = Vocabulary(folder)
        return self._vocabularies[folder]

    def close(self) -> None:
        for run in self._runs.values():
            run.close()


def _read(path: Path) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def shown_path(path: Path) -> str:
    """Return a path as text that can be sent: a name may be no UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _find_runs(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        path = Path(folder)
        if TRAJECTORIES in names or CURVE in names:
            found.append(path)
        if len(found) >= MAX_RUNS:
            break
        if len(path.relative_to(root).parts) >= MAX_DEPTH:
            below.clear()
        below[:] = sorted(name for name in below if not name.startswith("."))
    return found
