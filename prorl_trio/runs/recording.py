"""A run on disk: `trajectories.msgpack` (a msgpack array of `Outcome`, valid after every append), `summary.json`."""

from __future__ import annotations

import struct
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec
import numpy as np

from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from io import FileIO
    from types import TracebackType


_HEADER: Final = struct.Struct(">BI")
_ARRAY32: Final = 0xDD
TRAJECTORIES: Final = "trajectories.msgpack"
SUMMARY: Final = "summary.json"
RUN_INFO: Final = "run.json"

_FIXED: Final = (
    dict.fromkeys((0xC0, 0xC2, 0xC3), 0)
    | {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
    | {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
)
"""Bytes that follow a type byte whose value has one length."""
_BINARY: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4}
_TEXT: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_NESTED: Final = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_LENGTH: Final = _BINARY | _TEXT | _NESTED
"""Bytes of the length that follows a type byte."""
_EXTENSIONS: Final = (0xC7, 0xC8, 0xC9)
_MAPS: Final = (0xDE, 0xDF)


def length_of(content: bytes | memoryview) -> int | None:
    """Return the bytes that the value at the start of `content` takes; None if it is cut off, or is no msgpack."""
    position, pending = 0, 1
    while pending:
        if position >= len(content):
            return None
        kind, pending = content[position], pending - 1
        position += 1
        if kind < 0x80 or kind >= 0xE0:
            continue
        if kind < 0xA0:
            pending += (kind & 0xF) * (2 if kind < 0x90 else 1)
        elif kind < 0xC0:
            position += kind & 0x1F
        elif kind in _FIXED:
            position += _FIXED[kind]
        elif kind in _LENGTH:
            after = position + _LENGTH[kind]
            length = int.from_bytes(content[position:after], "big")
            position = after
            if kind in _NESTED:
                pending += length * (2 if kind in _MAPS else 1)
            else:
                position += length + (kind in _EXTENSIONS)
        else:
            return None
    return position if position <= len(content) else None


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A description of a run, for people who look at it later.

    Attributes:
        model: the folder whose tokenizer decodes the run's tokens; empty if that is not known.
        tasks: the task set's name or file.
        started: the name of the run's folder, a local time.
    """

    model: str
    tasks: str
    started: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run.

    Attributes:
        jobs: outcomes; `rejected` jobs are not among them.
        reward_mean: mean over the jobs with a reward; None if there are none.
        turns_mean: mean over the jobs with a trajectory.
        tokens_per_s: sampled tokens per second of the run's wall clock.
        rejected: jobs that the node did not accept.
    """

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
    """A file to which outcomes are appended as one msgpack array. Blocks on the disk.

    The array's count is written after each outcome, so that a killed run, or a full disk, leaves a file with the
    outcomes before: `read_outcomes` leaves out what a kill cut off.

    Args:
        path: of the file.
        go_on: append to the file that is there, after its last whole outcome. Else it must not be there yet.

    Raises:
        ConfigError: the file exists already (or does not, with `go_on`), is something else, or cannot be written.
    """

    def __init__(self, path: Path, *, go_on: bool = False) -> None:
        self._path = path
        self._count, end = _extent(path) if go_on else (0, 0)
        with named_path(path):
            self._file: FileIO = path.open("r+b" if go_on else "xb", buffering=0)
            if go_on:
                self._file.truncate(end)
            else:
                self._write(_HEADER.pack(_ARRAY32, 0))

    def append(self, outcome: Outcome) -> None:
        """Write one outcome (some 9 bytes a token), then the new count.

        Raises:
            ConfigError: it cannot be written; the file is as before.
        """
        with named_path(self._path):
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
        """Write all of `content`: one write to a disk that gets full takes only a part."""
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def trajectories_in(path: Path | str) -> Path:
    """Return the file of trajectories in the run's folder `path`; a path of anything else as it is."""
    path = Path(path)
    return path / TRAJECTORIES if path.is_dir() else path


def read_outcomes(path: Path | str) -> list[Outcome]:
    """Return every whole outcome of a `trajectories.msgpack`, or of that file in a run's folder.

    Raises:
        ConfigError: it cannot be read, or is not such a file.
    """
    path = trajectories_in(path)
    content = _content(path)
    end = length_of(content)
    if end is None:
        _refuse_cut(path, content)
    try:  # what is behind the array was being written when the run was killed
        return msgspec.msgpack.decode(content[:end], type=list[Outcome])
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is no file of trajectories: {exc}") from exc


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc


def _extent(path: Path) -> tuple[int, int]:
    """Return how many outcomes a file has, and where the last whole one ends. Raises ConfigError."""
    content = _content(path)
    end = length_of(content)
    if end is None:
        _refuse_cut(path, content)
    if end is None or not content or content[0] != _ARRAY32:
        raise ConfigError(f"{path} is no file of trajectories")
    return _HEADER.unpack_from(content)[1], end


def _refuse_cut(path: Path, content: bytes) -> None:
    """Raise ConfigError if a file of trajectories ends before the last outcome that it counts."""
    if len(content) < _HEADER.size or content[0] != _ARRAY32:
        return
    count, whole, place = _HEADER.unpack_from(content)[1], 0, _HEADER.size
    view = memoryview(content)
    while (length := length_of(view[place:])) is not None and whole < count:
        whole, place = whole + 1, place + length
    raise ConfigError(
        f"{path} is cut off: it counts {count} outcomes, and {whole} of them are whole. A killed run leaves no such "
        "file: copy the file again from where it was recorded, or start a new run"
    )


def read_run_info(folder: Path) -> RunInfo | None:
    """Return the description of the run in `folder`; None if there is no such file.

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
    """Write `content` to `path` as indented JSON, in place of what was there.

    Raises:
        ConfigError: it cannot be written.
    """
    with named_path(path):
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))


def run_folder(root: Path) -> Path:
    """Make and return the folder `root/<local time>` for a new run; a number is appended if that name is taken.

    Raises:
        ConfigError: it cannot be made.
    """
    with named_path(root):
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
def named_path(path: Path) -> Iterator[None]:
    """Raise an OSError of the block, which writes, as a ConfigError that names `path`."""
    try:
        yield
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be written: {exc.strerror}") from exc


def summarise(outcomes: Sequence[Outcome], wall_s: float, *, rejected: int = 0) -> Summary:
    """Return the figures of a run that took `wall_s` seconds."""
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
