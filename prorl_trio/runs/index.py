"""An index over a `trajectories.msgpack`: a row for each outcome, its place in the file, and its text for searches.

Outcomes stay on the disk and are read one at a time. Blocks on the disk; one lock guards everything.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from bisect import bisect_right
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np

from prorl_trio.runs.recording import length_of
from prorl_trio.types.errors import ConfigError, UnknownJob
from prorl_trio.types.models import Outcome, StopReason, TerminalStatus, Timing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

HEADER_BYTES: Final = 5
ARRAY32: Final = 0xDD
MAX_ERROR_CHARS: Final = 200
FAMILY_TAG: Final = "family"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one outcome, by which it is listed, filtered and sorted.

    Attributes:
        place: its place in the file, from 0.
        job_id, instance_id, group_id, status, reward, cause, code, attempt: see `Outcome`.
        error: the beginning of its error.
        stop: its trajectory's stop reason; empty if it has no trajectory.
        handler, family: of its task, as far as they are known; else empty.
        agent: the program that worked on it, or the kind of agent that it says it is; empty for the node's own.
        versions: policy versions that its tokens were sampled under.
        tokens: in all segments. `sampled`: by the policy.
        turns, calls, segments: counts.
        logprob: mean of the sampled tokens; None without any.
        init_s, run_s, eval_s: seconds of the stages. `waited_s`: in their queues.
    """

    place: int
    job_id: str
    instance_id: str
    group_id: str
    status: TerminalStatus
    reward: float | None
    cause: str
    code: str
    attempt: int
    error: str
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
    init_s: float
    run_s: float
    eval_s: float
    waited_s: float


Figure = Literal[
    "place", "job_id", "instance_id", "group_id", "status", "reward", "cause", "stop", "handler", "family", "agent",
    "tokens", "sampled", "turns", "calls", "segments", "logprob", "init_s", "run_s", "eval_s", "waited_s", "attempt",
]  # fmt: skip
"""What rows are sorted by."""
FACETS: Final = ("status", "cause", "stop", "handler", "agent", "family")
"""Fields of rows with few values, which filters offer."""


class RowFilter(msgspec.Struct, frozen=True, kw_only=True):
    """What the listed rows have in common. An empty text, or None, leaves all rows; `-` is an empty value.

    Attributes:
        text: is somewhere in the rollout, in any case.
        status, cause, stop, handler, agent, family, group: have this value.
        version: some token was sampled under this policy version.
        reward_min, reward_max, tokens_min, tokens_max: bounds, inclusive; `tokens` counts the sampled ones. A rollout
            without a reward is outside of any bound of rewards.
        sort: the figure to sort by. `descending`: the largest first; rows without that figure come last either way.
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


class _Span(msgspec.Struct):
    policy_version: str


class _Segment(msgspec.Struct):
    logprobs: memoryview
    loss_mask: memoryview
    spans: list[_Span]
    parent: int | None = None
    agent_type: str = ""


class _Message(msgspec.Struct):
    content: str


class _Call(msgspec.Struct):
    name: str


class _Turn(msgspec.Struct):
    text: str
    tool_calls: list[_Call]
    observations: list[str]
    messages: list[_Message] = []


class _Trajectory(msgspec.Struct):
    segments: list[_Segment]
    turns: list[_Turn]
    stop_reason: StopReason


class _Indexed(msgspec.Struct):
    """The parts of an outcome that the index has; decoding passes over all others."""

    job_id: str
    instance_id: str
    group_id: str
    status: TerminalStatus
    reward: float | None
    cause: str | None
    error: str
    trajectory: _Trajectory | None
    details: msgspec.Raw
    timing: Timing
    tags: dict[str, str] = {}
    error_code: str | None = None
    evaluation_log: str = ""
    attempt: int = 1


_decode = msgspec.msgpack.Decoder(_Indexed).decode
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode
_decode_list = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


class SearchText:
    """The lower-case text of every rollout, one after the other in an unlinked temporary file, which is mapped."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="prorl-view-")  # noqa: SIM115 - `close` closes it
        self._starts: list[int] = []
        self._size = 0

    def add(self, parts: Iterable[str]) -> None:
        """Append the text of the next rollout. Its parts are separated by a NUL, which no query contains."""
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
                place = bisect_right(self._starts, at) - 1
                found.add(place)
                if place + 1 == len(self._starts):
                    break
                at = text.find(needle, self._starts[place + 1])
        return found

    def close(self) -> None:
        """Free the disk space."""
        self._file.close()


class OutcomeIndex:
    """The outcomes of one file, which may grow. Safe to use from several threads.

    Args:
        path: of the file.
        tasks: handler and family by instance id, as far as they are known.
        agent: the program that works on the tasks, where outcomes themselves name none.

    Raises:
        ConfigError: the file cannot be read, or is something else.
    """

    def __init__(self, path: Path, tasks: Mapping[str, tuple[str, str]] | None = None, agent: str = "") -> None:
        self._path = path
        self._tasks = tasks or {}
        self._agent = agent
        self._lock = threading.Lock()
        self._text = SearchText()
        self._extents: list[tuple[int, int]] = []
        self._places: dict[str, int] = {}
        self._end = HEADER_BYTES
        self.rows: list[Row] = []
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as exc:
            raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
        try:
            self.refresh()
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; the index cannot be used any more."""
        self._file.close()
        self._text.close()

    def refresh(self) -> None:
        """Add the outcomes that were appended since the last call. Costs one system call if there are none.

        Raises:
            ConfigError: the file is not one of trajectories.
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
        """Yield where each new outcome begins and ends; outcomes that a kill or a copy cut off are left out."""
        if not self.rows and (lengths := _lengths(view, count)):
            ends = np.cumsum([HEADER_BYTES, *lengths]).tolist()
            yield from pairwise(ends)
            return
        for _ in range(count - len(self.rows)):
            length = length_of(view[self._end :])
            if length is None:
                return
            yield self._end, self._end + length

    def _add(self, data: bytes, start: int, end: int) -> None:
        try:
            found = _decode(data)
            row = self._row(found)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{self._path}: the outcome at byte {start} cannot be read: {exc}") from exc
        self._text.add(_texts(found))
        self._places[row.job_id] = row.place
        self._extents.append((start, end))
        self._end = end
        self.rows.append(row)

    def _row(self, found: _Indexed) -> Row:
        trajectory, timing = found.trajectory, found.timing
        segments = [] if trajectory is None else trajectory.segments
        turns = [] if trajectory is None else trajectory.turns
        sampled, total = 0, 0.0
        for segment in segments:
            mask = np.frombuffer(segment.loss_mask, dtype="u1")
            sampled += int(np.count_nonzero(mask))
            total += float(np.dot(np.frombuffer(segment.logprobs, dtype="<f4"), mask))
        handler, family = self._tasks.get(found.instance_id, ("", ""))
        versions = dict.fromkeys(span.policy_version for segment in segments for span in segment.spans)
        return Row(
            place=len(self.rows),
            job_id=found.job_id,
            instance_id=found.instance_id,
            group_id=found.group_id,
            status=found.status,
            reward=found.reward,
            cause=found.cause or "",
            code=found.error_code or "",
            attempt=found.attempt,
            error=found.error[:MAX_ERROR_CHARS],
            stop="" if trajectory is None else trajectory.stop_reason,
            handler=handler,
            family=found.tags.get(FAMILY_TAG, family),
            agent=self._agent or next((each.agent_type for each in segments if each.parent is None), ""),
            versions=list(versions),
            tokens=sum(len(segment.loss_mask) for segment in segments),
            sampled=sampled,
            turns=len(turns),
            calls=sum(len(turn.tool_calls) for turn in turns),
            segments=len(segments),
            logprob=total / sampled if sampled else None,
            init_s=timing.init_s,
            run_s=timing.run_s,
            eval_s=timing.eval_s,
            waited_s=timing.queued_init_s + timing.queued_run_s + timing.queued_eval_s,
        )

    def read(self, job_id: str) -> Outcome:
        """Return a whole outcome, read from the disk.

        Raises:
            UnknownJob: there is none of this id.
        """
        try:
            start, end = self._extents[self._places[job_id]]
        except KeyError:
            raise UnknownJob(f"no outcome of a job {job_id!r} is in this run") from None
        return _decode_outcome(os.pread(self._file.fileno(), end - start, start))

    def row(self, job_id: str) -> Row:
        """Return the figures of one outcome; raise UnknownJob as `read` does."""
        if job_id not in self._places:
            raise UnknownJob(f"no outcome of a job {job_id!r} is in this run")
        return self.rows[self._places[job_id]]

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
        rows = list(_within(rows, "reward", wanted.reward_min, wanted.reward_max))
        rows = list(_within(rows, "sampled", wanted.tokens_min, wanted.tokens_max))
        known = [row for row in rows if getattr(row, wanted.sort) is not None]
        known.sort(key=lambda row: getattr(row, wanted.sort), reverse=wanted.descending)
        return known + [row for row in rows if getattr(row, wanted.sort) is None]

    def facets(self) -> dict[str, dict[str, int]]:
        """Return how often each value of the fields of `FACETS`, and each policy version, occurs."""
        counts = {name: dict(Counter(getattr(row, name) for row in self.rows).most_common()) for name in FACETS}
        counts["version"] = dict(Counter(version for row in self.rows for version in row.versions))
        return counts


def groups_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows by group, in the order in which the groups first occur: their rewards, with mean and spread."""
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
        "mean": mean,
        "spread": spread,
        "sampled": sum(row.sampled for row in members),
        "rollouts": [[row.job_id, row.reward, row.cause or row.stop, row.sampled] for row in members],
    }


def _within(rows: Iterable[Row], name: str, low: float | None, high: float | None) -> Iterable[Row]:
    if low is None and high is None:
        return rows
    least, most = -np.inf if low is None else low, np.inf if high is None else high
    return (row for row in rows if (value := getattr(row, name)) is not None and least <= value <= most)


def _lengths(view: memoryview, count: int) -> list[int]:
    """Return the bytes of each outcome, read by msgspec; empty where something follows the array, or it is cut off."""
    try:
        entries = _decode_list(view)
    except msgspec.DecodeError:
        return []
    return [len(entry) for entry in entries] if len(entries) == count else []


def _texts(found: _Indexed) -> Iterator[str]:
    yield from (found.job_id, found.instance_id, found.error, found.evaluation_log, *found.tags.values())
    yield bytes(found.details).decode(errors="replace")
    for turn in () if found.trajectory is None else found.trajectory.turns:
        yield from (message.content for message in turn.messages)
        yield turn.text
        yield from turn.observations
