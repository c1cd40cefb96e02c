"""An index over a `trajectories.msgpack`: for each outcome a row, its place in the file, and its text for searches.

Outcomes stay on the disk and are read one at a time. Blocks on the disk.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from bisect import bisect_right
from collections import Counter
from contextlib import suppress
from itertools import chain, count, pairwise
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np

from prorl_trio.file_systems import open_regular
from prorl_trio.runs.recording import length_of
from prorl_trio.types.errors import ConfigError, UnknownJob
from prorl_trio.types.models import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

HEADER_BYTES: Final = 5
ARRAY32: Final = 0xDD
MAX_HEAD_CHARS: Final = 200
FAMILY_TAG: Final = "family"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one outcome, for lists, filters and sorting.

    Attributes:
        place: its place in the file, from 0. `job_id`: with a number after it if an earlier outcome has the same.
        `error`, `task`: the beginning of its error, and of its task.
        stop: its trajectory's stop reason; empty without a trajectory.
        handler, family: the task's handler and family; empty if unknown.
        agent: the program that worked on it, or the kind of agent that it claims to be; empty for the node's own.
        versions: the policy versions that its tokens were sampled under.
        tokens: in all segments. `sampled`: by the policy. `logprob`: mean over the sampled tokens; None without any.
        run_s, eval_s: seconds of the stages. `waited_s`: seconds in all queues.
    """

    place: int
    job_id: str
    instance_id: str
    group_id: str
    status: str
    reward: float | None
    cause: str
    error: str
    task: str
    stop: str
    handler: str
    family: str
    agent: str
    versions: list[str]
    tokens: int
    sampled: int
    turns: int
    calls: int
    segments: int
    logprob: float | None
    run_s: float
    eval_s: float
    waited_s: float


Figure = Literal[
    "place", "job_id", "instance_id", "group_id", "status", "reward", "cause", "stop", "handler", "family", "agent",
    "tokens", "sampled", "turns", "calls", "segments", "logprob", "run_s", "eval_s", "waited_s",
]  # fmt: skip
"""Figures to sort rows by."""
FACETS: Final = ("status", "cause", "stop", "handler", "agent", "family")
"""Fields of rows with few distinct values, offered as filters."""


class RowFilter(msgspec.Struct, frozen=True, kw_only=True):
    """A filter for rows. An empty text, or None, matches all rows; `-` matches an empty value.

    Attributes:
        text: occurs anywhere in the rollout, in any case.
        status, cause, stop, handler, agent, family, group: have this value.
        version: some token was sampled under this policy version.
        reward_min, reward_max, tokens_min, tokens_max: inclusive bounds; `tokens` counts sampled tokens. A rollout
            without a reward is outside of any bound on rewards.
        sort: the figure to sort by. `descending`: the largest first. Rows without that figure always come last.
    """

    text: str = ""
    status: str = ""
    cause: str = ""
    stop: str = ""
    handler: str = ""
    agent: str = ""
    family: str = ""
    group: str = ""
    version: str = ""
    reward_min: float | None = None
    reward_max: float | None = None
    tokens_min: int | None = None
    tokens_max: int | None = None
    sort: Figure = "place"
    descending: bool = False


_decode = msgspec.msgpack.Decoder(Outcome).decode
_decode_list = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


class SearchText:
    """The lower-case text of all rollouts, concatenated in an unlinked, memory-mapped temporary file."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="prorl-view-")  # noqa: SIM115 - `close` closes it
        self._starts: list[int] = []
        self._size = 0

    def add(self, parts: Iterable[str]) -> None:
        """Append the text of the next rollout. Its parts are separated by NUL, which no query contains."""
        text = "\0".join(parts).lower().encode(errors="surrogatepass") + b"\0"
        self._starts.append(self._size)
        self._file.write(text)
        self._size += len(text)

    def find(self, query: str) -> set[int]:
        """Return the places of all rollouts whose text contains `query`, in any case."""
        self._file.flush()
        needle, found = query.replace("\0", "").lower().encode(errors="surrogatepass"), set[int]()
        if not self._size:
            return found
        with mmap.mmap(self._file.fileno(), self._size, access=mmap.ACCESS_READ) as text:
            at = text.find(needle)
            while at >= 0:
                place = bisect_right(self._starts, at)
                found.add(place - 1)
                at = text.find(needle, self._starts[place]) if place < len(self._starts) else -1
        return found

    def close(self) -> None:
        self._file.close()


class OutcomeIndex:
    """The outcomes of one file, which may grow. Safe to use from several threads.

    Args:
        path: path of the file.
        tasks: handler and family by instance id, if known.
        agent: the default agent, for outcomes that name none.

    Raises OSError if the file cannot be opened, and ConfigError if it has another format.
    """

    def __init__(self, path: Path, tasks: Mapping[str, tuple[str, str]] | None = None, agent: str = "") -> None:
        self._path = path
        self._tasks = tasks or {}
        self._agent = agent
        self._lock = threading.Lock()
        self._file = os.fdopen(open_regular(path), "rb", buffering=0)
        self._text = SearchText()
        self._extents: list[tuple[int, int]] = []
        self._places: dict[str, int] = {}
        self._end = HEADER_BYTES
        self.rows: list[Row] = []
        try:
            self.refresh()
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. The index is unusable afterwards."""
        self._file.close()
        self._text.close()

    def refresh(self) -> None:
        """Add the outcomes that were appended since the last call.

        Raises ConfigError if the file is not a file of outcomes.
        """
        with self._lock:
            size = os.fstat(self._file.fileno()).st_size
            header = os.pread(self._file.fileno(), HEADER_BYTES, 0)
            if len(header) < HEADER_BYTES or header[0] != ARRAY32:
                raise ConfigError(f"{self._path} is no file of trajectories")
            count = int.from_bytes(header[1:], "big")
            if count <= len(self.rows) or size <= self._end:
                return
            with mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
                for start, end in self._entries(view, count):
                    self._add(bytes(view[start:end]), start, end)

    def _entries(self, view: memoryview, count: int) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each new outcome. Outcomes truncated by a kill or a copy are skipped."""
        if not self.rows:
            with suppress(msgspec.DecodeError):  # something follows the array, or it is truncated
                entries = _decode_list(view)
                yield from pairwise(np.cumsum([HEADER_BYTES, *map(len, entries)]).tolist())
                return
        for _ in range(count - len(self.rows)):
            length = length_of(view[self._end :])
            if length is None:
                return
            yield self._end, self._end + length

    def _add(self, data: bytes, start: int, end: int) -> None:
        found = self._outcome(data, start)
        row = self._row(found)
        self._text.add(_texts(found))
        self._places[row.job_id] = row.place
        self._extents.append((start, end))
        self._end = end
        self.rows.append(row)

    def _outcome(self, data: bytes, start: int) -> Outcome:
        try:
            return _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise ConfigError(f"{self._path}: the outcome at byte {start} cannot be read: {exc}") from exc

    def _row(self, found: Outcome) -> Row:
        trajectory, timing = found.trajectory, found.timing
        segments = [] if trajectory is None else trajectory.segments
        turns = [] if trajectory is None else trajectory.turns
        said = [message for turn in turns for message in turn.messages]
        sampled, total = 0, 0.0
        for segment in segments:
            sampled += int(np.count_nonzero(segment.loss_mask))
            total += float(np.dot(segment.logprobs, segment.loss_mask))
        handler, family = self._tasks.get(found.instance_id, ("", ""))
        versions = dict.fromkeys(span.policy_version for segment in segments for span in segment.spans)
        return Row(
            place=len(self.rows),
            job_id=self._name_of(found.job_id),
            instance_id=found.instance_id,
            group_id=found.group_id,
            status=found.status,
            reward=found.reward,
            cause=found.cause or "",
            error=found.error[:MAX_HEAD_CHARS],
            task=next((each.content for each in said if each.role == "user"), "")[:MAX_HEAD_CHARS],
            stop="" if trajectory is None else trajectory.stop_reason,
            handler=handler,
            family=found.tags.get(FAMILY_TAG, family),
            agent=self._agent or next((each.agent_type for each in segments if each.parent is None), ""),
            versions=list(versions),
            tokens=sum(map(len, segments)),
            sampled=sampled,
            turns=len(turns),
            calls=sum(len(turn.tool_calls) for turn in turns),
            segments=len(segments),
            logprob=total / sampled if sampled else None,
            run_s=timing.run_s,
            eval_s=timing.eval_s,
            waited_s=timing.queued_init_s + timing.queued_run_s + timing.queued_eval_s,
        )

    def _name_of(self, job_id: str) -> str:
        """Return the id, with a number if the run has several outcomes with it."""
        others = (f"{job_id} ({number})" for number in count(2))
        return next(name for name in chain([job_id], others) if name not in self._places)

    def row(self, job_id: str) -> Row:
        """Return the figures of one outcome. Raises UnknownJob if the id is unknown."""
        try:
            return self.rows[self._places[job_id]]
        except KeyError:
            raise UnknownJob(f"no outcome of a job {job_id!r} is in this run") from None

    def read(self, job_id: str) -> Outcome:
        """Return a whole outcome, read from the disk. Raises UnknownJob if the id is unknown, and ConfigError."""
        start, end = self._extents[self.row(job_id).place]
        return self._outcome(os.pread(self._file.fileno(), end - start, start), start)

    def select(self, wanted: RowFilter) -> list[Row]:
        """Return the rows that match, sorted."""
        rows: Sequence[Row] = self.rows
        if wanted.text:
            with self._lock:
                places = self._text.find(wanted.text)
            rows = [row for row in rows if row.place in places]
        for name in (*FACETS, "group"):
            if value := getattr(wanted, name):
                field, equal = "group_id" if name == "group" else name, "" if value == "-" else value
                rows = [row for row in rows if getattr(row, field) == equal]
        if wanted.version:
            rows = [row for row in rows if wanted.version in row.versions]
        for name, low, high in (
            ("reward", wanted.reward_min, wanted.reward_max),
            ("sampled", wanted.tokens_min, wanted.tokens_max),
        ):
            least, most = -np.inf if low is None else low, np.inf if high is None else high
            if (low, high) != (None, None):
                rows = [row for row in rows if (value := getattr(row, name)) is not None and least <= value <= most]
        known = [row for row in rows if getattr(row, wanted.sort) is not None]
        known.sort(key=lambda row: getattr(row, wanted.sort), reverse=wanted.descending)
        return known + [row for row in rows if getattr(row, wanted.sort) is None]

    def facets(self) -> dict[str, dict[str, int]]:
        """Return the number of occurrences of each value of the fields in `FACETS`, and of each policy version."""
        counts = {name: dict(Counter(getattr(row, name) for row in self.rows).most_common()) for name in FACETS}
        counts["version"] = dict(Counter(version for row in self.rows for version in row.versions))
        return counts


def groups_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows by group, in the order in which the groups first occur, with rewards, mean and spread."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group_id or row.job_id, []).append(row)
    return [_group(name, members) for name, members in groups.items()]


def _group(name: str, members: list[Row]) -> dict[str, Any]:
    rewards = [row.reward for row in members if row.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    spread = None if mean is None else (sum((each - mean) ** 2 for each in rewards) / len(rewards)) ** 0.5
    return {
        "group": name,
        "instance": members[0].instance_id,
        "task": members[0].task,
        "mean": mean,
        "spread": spread,
        "sampled": sum(row.sampled for row in members),
        "rollouts": [[row.job_id, row.reward, row.cause or row.stop, row.sampled] for row in members],
    }


def _texts(found: Outcome) -> Iterator[str]:
    yield from (found.job_id, found.instance_id, found.error, found.evaluation_log, *found.tags.values())
    yield from _scalars(found.details)
    for turn in () if found.trajectory is None else found.trajectory.turns:
        yield from (message.content for message in turn.messages)
        yield turn.text
        yield from turn.observations


def _scalars(value: object) -> Iterator[str]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
        else:
            yield str(value)
