"""The live jobs of a node or of a fleet's head, by id, status, session and group: few questions walk them all."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain, islice
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from prorl_trio.types.models import Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_trio.types.models import JobSpec


class Live(Protocol):
    """A live job, as far as it is searched for."""

    spec: JobSpec
    accepted_s: float

    @property
    def session_id(self) -> str: ...

    @property
    def status(self) -> Status: ...


LiveT = TypeVar("LiveT", bound=Live)


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """A filter for live jobs. None, or no tags, matches all; a job has at least these `tags`."""

    status: Status | None = None
    session_id: str | None = None
    group_id: str | None = None
    tags: dict[str, str] = {}


class LiveJobs(Generic[LiveT]):
    """All live jobs, oldest first. Whoever changes the status of one calls `moved`."""

    def __init__(self) -> None:
        self._by_id: dict[str, LiveT] = {}
        self._status_of: dict[str, Status] = {}
        self._by_status: defaultdict[Status, dict[str, LiveT]] = defaultdict(dict)
        self._by_session: dict[str, dict[str, LiveT]] = {}
        self._by_group: dict[str, dict[str, LiveT]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveT]:
        """Iterate over a snapshot."""
        return iter(list(self._by_id.values()))

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._by_id

    def __getitem__(self, job_id: str) -> LiveT:
        return self._by_id[job_id]

    def get(self, job_id: str) -> LiveT | None:
        return self._by_id.get(job_id)

    def add(self, job: LiveT) -> None:
        job_id, status = job.spec.job_id, job.status
        self._by_id[job_id] = self._by_status[status][job_id] = job
        self._status_of[job_id] = status
        self._by_session.setdefault(job.session_id, {})[job_id] = job
        if job.spec.group_id:
            self._by_group.setdefault(job.spec.group_id, {})[job_id] = job

    def moved(self, job: LiveT) -> None:
        """Note that the job may have another status."""
        job_id = job.spec.job_id
        del self._by_status[self._status_of[job_id]][job_id]
        self._status_of[job_id] = job.status
        self._by_status[job.status][job_id] = job

    def remove(self, job_id: str) -> LiveT:
        job = self._by_id.pop(job_id)
        del self._by_status[self._status_of.pop(job_id)][job_id]
        for index, key in ((self._by_session, job.session_id), (self._by_group, job.spec.group_id)):
            if key in index:
                index[key].pop(job_id, None)
                if not index[key]:
                    del index[key]
        return job

    def count(self, session_id: str) -> int:
        """Return the number of live jobs of that session."""
        return len(self._by_session.get(session_id, ()))

    def by_status(self) -> Counter[str]:
        return Counter({status: len(jobs) for status, jobs in self._by_status.items() if jobs})

    def find(self, wanted: JobFilter, limit: int) -> tuple[int, list[LiveT]]:
        """Return the number of jobs that match, and the first `limit`, oldest first.

        For one condition other than tags, it looks only at these; for several, at all jobs of the group, else of the
        session, else of the status; for tags alone at all jobs. The jobs of a status are in the order of entering it.
        """
        found, rest = self._by_id, msgspec.structs.asdict(wanted)
        if wanted.group_id:
            found, rest["group_id"] = self._by_group.get(wanted.group_id, {}), None
        elif wanted.session_id is not None:
            found, rest["session_id"] = self._by_session.get(wanted.session_id, {}), None
        elif wanted.status is not None:
            found, rest["status"] = self._by_status[wanted.status], None
        left = JobFilter(**rest)
        if left == JobFilter():
            return len(found), list(islice(found.values(), limit))
        matching = [job for job in found.values() if _matches(job, left)]
        return len(matching), matching[:limit]

    def most_advanced(self, limit: int) -> list[LiveT]:
        """Return at most `limit` jobs: those that wait for INIT after all others, each oldest first."""
        others = chain.from_iterable(jobs.values() for status, jobs in self._by_status.items() if status != "queued")
        chosen = sorted(islice(others, limit), key=lambda job: job.accepted_s)
        return [*chosen, *islice(self._by_status["queued"].values(), limit - len(chosen))]


def _matches(job: Live, wanted: JobFilter) -> bool:
    return (
        wanted.status in (None, job.status)
        and wanted.group_id in (None, job.spec.group_id)
        and wanted.session_id in (None, job.session_id)
        and wanted.tags.items() <= job.spec.tags.items()
    )
