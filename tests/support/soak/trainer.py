"""A trainer in a process of its own: `python -m support.soak.trainer URL TOKEN JOURNAL JOBS DETAILS_BYTES`.

Submits the jobs `job-0` to `job-JOBS` that are not in its journal, and writes each outcome there before it asks for the
next, which acknowledges it. Every second job has a retry policy, see `is_retried`. Killed and started again, it just
goes on. Exits with 0 when it has all of them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import trio

from prorl_ipc.session import Rejected
from prorl_trio.client import RolloutClient, connect
from prorl_trio.types.models import JobSpec, Outcome, RetryPolicy, SamplingParams, TaskInstance
from support.soak.journal import Entry, Journal
from support.soak.parent import end_with_parent

SESSION_ID: Final = "soak"
CONNECT_TIMEOUT_S: Final = 120.0
MAX_OUTPUT_TOKENS: Final = 200
RETRY: Final = RetryPolicy(max_attempts=100, causes=("sandbox",), backoff_s=0.1)
"""Of more attempts than all kills of a soak together cost one job."""


def job_id(number: int) -> str:
    """Of a job of the soak."""
    return f"job-{number}"


def is_retried(name: str) -> bool:
    """Whether that job of the soak is run again when its sandbox is lost; the others fail then."""
    return int(name.removeprefix("job-")) % 2 == 1


def soak_spec(name: str, retry: RetryPolicy = RetryPolicy(), details_bytes: int = 0) -> JobSpec:  # noqa: B008 - it is immutable
    """A job for the handler `soak`, whose outcome has so many bytes of details."""
    payload = {"details_bytes": details_bytes} if details_bytes else {}
    return JobSpec(
        job_id=name,
        instance=TaskInstance(instance_id=name, handler="soak", payload=payload),
        sampling=SamplingParams(max_output_tokens=MAX_OUTPUT_TOKENS),
        max_turns=4,
        retry=retry,
    )


def _entry(cursor: int, outcome: Outcome) -> Entry:
    segments = outcome.trajectory.segments if outcome.trajectory else []
    return Entry(
        cursor=cursor,
        job_id=outcome.job_id,
        status=outcome.status,
        cause=outcome.cause,
        reward=outcome.reward,
        attempt=outcome.attempt,
        tokens=sum(len(segment) for segment in segments),
    )


async def work(url: str, token: str, journal: Journal, jobs: int, details_bytes: int = 0) -> None:
    """Until all jobs are in the journal."""
    cursor = max((entry.cursor for entry in journal.entries), default=0)
    taken = {entry.job_id for entry in journal.entries}
    async with (
        connect(url, token, session_id=SESSION_ID, resume_after=cursor, connect_timeout_s=CONNECT_TIMEOUT_S) as client,
        trio.open_nursery() as nursery,
    ):
        names = [job_id(n) for n in range(jobs) if job_id(n) not in taken]
        policies = [RETRY if is_retried(name) else RetryPolicy() for name in names]
        missing = [soak_spec(name, policy, details_bytes) for name, policy in zip(names, policies, strict=True)]
        nursery.start_soon(_submit, client, missing)
        while len(taken) < jobs:
            cursor, outcome = await client.next_after(cursor)
            await trio.to_thread.run_sync(journal.append, _entry(cursor, outcome))
            taken.add(outcome.job_id)
        client.acknowledge(cursor)


async def _submit(client: RolloutClient, specs: list[JobSpec]) -> None:
    refused = [answer for answer in await client.submit(specs) if isinstance(answer, Rejected)]
    assert not refused, refused[:3]


def _main() -> None:
    url, token, path, jobs, details_bytes = sys.argv[1:]
    trio.run(work, url, token, Journal(Path(path)), int(jobs), int(details_bytes))


if __name__ == "__main__":
    end_with_parent()
    _main()
