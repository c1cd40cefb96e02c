"""A run on disk: `trajectories.msgpack` (a msgpack array of `Outcome`, valid after every append), `summary.json`."""

from __future__ import annotations

import struct
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Self

import msgspec
import numpy as np

from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from io import FileIO
    from pathlib import Path
    from types import TracebackType

__all__ = [
    "OutcomeFile",
    "RunInfo",
    "Summary",
    "read_outcomes",
    "read_run_info",
    "run_folder",
    "summarise",
    "write_json",
]

_HEADER: Final = struct.Struct(">BI")
_ARRAY32: Final = 0xDD
TRAJECTORIES: Final = "trajectories.msgpack"
SUMMARY: Final = "summary.json"
RUN_INFO: Final = "run.json"


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was, for whoever looks at it later. `model` is the folder its tokens are decoded with, if that
    is known."""

    model: str
    tasks: str
    started: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in flat figures. Means are over jobs with a reward (`reward_mean`; None: there is none) and over all
    with a trajectory (`turns_mean`); `tokens_per_s` counts sampled tokens over the wall clock of the run. `rejected`
    were not taken by the node, and are none of `jobs`."""

    jobs: int
    completed: int
    failed: int
    cancelled: int
    timed_out: int
    prefix_breaks: int
    reward_mean: float | None
    turns_mean: float
    tool_calls: int
    tokens_per_s: float
    wall_s: float
    rejected: int = 0


class OutcomeFile:
    """Appends outcomes to a msgpack array whose count is updated in place, so that a killed run leaves a valid file,
    and a full disk one with what came before. Blocks on the disk.

    Raises:
        ConfigError: the file is there already, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0
        with _named(path):
            self._file: FileIO = path.open("xb", buffering=0)
            self._write(_HEADER.pack(_ARRAY32, 0))

    def append(self, outcome: Outcome) -> None:
        """Write one outcome (some 9 bytes a token), then the new count."""
        with _named(self._path):
            end = self._file.seek(0, 2)
            try:
                self._write(msgspec.msgpack.encode(outcome))
            except OSError:
                self._file.truncate(end)
                raise
            self._file.seek(0)
            self._write(_HEADER.pack(_ARRAY32, self._count + 1))
            self._count += 1

    def _write(self, content: bytes) -> None:
        """All of it: a disk that gets full takes a part."""
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_outcomes(path: Path) -> list[Outcome]:
    """Every outcome of a `trajectories.msgpack`.

    Raises:
        ConfigError: it cannot be read, or is not such a file.
    """
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=list[Outcome])
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is no file of trajectories: {exc}") from exc


def read_run_info(folder: Path) -> RunInfo | None:
    """What is remembered of a run; None: nothing.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    path = folder / RUN_INFO
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunInfo)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} does not describe a run: {exc}") from exc


def write_json(path: Path, content: msgspec.Struct) -> None:
    """Write `content` for people and programs. Raises ConfigError: it cannot be written."""
    with _named(path):
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))


def run_folder(root: Path) -> Path:
    """Make `root/<local time>` for a new run; a number is appended if it is taken.

    Raises:
        ConfigError: it cannot be made.
    """
    with _named(root):
        return _new_folder(root)


def _new_folder(root: Path) -> Path:
    name = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        folder = root / f"{name}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise ConfigError(f"{root} already holds 99 runs of this second")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Says which file it is that cannot be written."""
    try:
        yield
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be written: {exc.strerror}") from exc


def summarise(outcomes: Sequence[Outcome], wall_s: float, *, rejected: int = 0) -> Summary:
    """The run's figures."""
    statuses = [outcome.status for outcome in outcomes]
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    trajectories = [outcome.trajectory for outcome in outcomes if outcome.trajectory is not None]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    sampled = sum(turn.completion_end - turn.completion_start for turn in turns)
    return Summary(
        jobs=len(outcomes),
        completed=statuses.count("completed"),
        failed=statuses.count("failed"),
        cancelled=statuses.count("cancelled"),
        timed_out=statuses.count("timed_out"),
        prefix_breaks=sum(trajectory.prefix_breaks for trajectory in trajectories),
        reward_mean=float(np.mean(rewards)) if rewards else None,
        turns_mean=len(turns) / len(trajectories) if trajectories else 0.0,
        tool_calls=sum(len(turn.tool_calls) for turn in turns),
        tokens_per_s=sampled / wall_s if wall_s > 0 else 0.0,
        wall_s=wall_s,
        rejected=rejected,
    )
