"""A run without a trainer: submit jobs to a node, collect every outcome, write them to disk."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio

from prorl_ipc.session import Rejected
from prorl_trio.runs.recording import (
    RUN_INFO,
    SUMMARY,
    TRAJECTORIES,
    OutcomeFile,
    RunInfo,
    Summary,
    summarise,
    write_json,
)
from prorl_trio.types.errors import ServiceError
from prorl_trio.types.models import JobSpec, Outcome, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from prorl_trio.client.client import RolloutClient
    from prorl_trio.types.models import TaskInstance

CANCEL_TIMEOUT_S: Final = 5.0
"""Maximum seconds that an interrupted run waits for the node to cancel its remaining jobs."""


def make_jobs(
    instances: Sequence[TaskInstance],
    *,
    rollouts: int,
    sampling: SamplingParams,
    max_turns: int,
    agent: str | None = None,
) -> list[JobSpec]:
    """Return `rollouts` jobs for each instance, one group per instance, with new unique ids."""
    run_id = uuid.uuid4().hex[:8]
    return [
        JobSpec(
            job_id=f"{run_id}-{instance.instance_id}-{rollout}",
            instance=instance,
            group_id=f"{run_id}-{instance.instance_id}",
            sampling=sampling,
            max_turns=max_turns,
            agent=agent,
        )
        for instance in instances
        for rollout in range(rollouts)
    ]


def describe_rejection(rejected: Rejected) -> str:
    """Return a sentence with the rejected job and the reason."""
    where = f" (at {rejected.path})" if rejected.path and rejected.path not in rejected.message else ""
    return f"job {rejected.job_id} was rejected ({rejected.code}): {rejected.message}{where}"


async def collect(
    client: RolloutClient,
    specs: Sequence[JobSpec],
    folder: Path,
    info: RunInfo,
    on_outcome: Callable[[Outcome], None],
    on_rejected: Callable[[Sequence[Rejected]], None],
) -> tuple[Summary, list[Outcome]]:
    """Submit `specs`, write each outcome to `folder` as it arrives, then the summary; return both.

    `on_outcome` is called with each outcome. `on_rejected` is called once with the jobs that the node rejected, if any;
    the other jobs still run. After a cancel or an error, the outcomes so far and their summary are on disk. All jobs of
    the session are then cancelled on the node, waiting up to `CANCEL_TIMEOUT_S`. The session must therefore have no
    other jobs.

    Raises:
        ServiceError: the node rejected every job (the message names the first, with the reason), or the session is
            over.
        ConfigError: `folder` cannot be written to.
    """
    started_s = trio.current_time()
    outcomes: list[Outcome] = []
    rejected: list[Rejected] = []
    over = False
    write_json(folder / RUN_INFO, info)
    with OutcomeFile(folder / TRAJECTORIES) as file:
        try:
            rejected += [answer for answer in await client.submit(specs) if isinstance(answer, Rejected)]
            if rejected:
                if len(rejected) == len(specs):
                    raise ServiceError(f"every job was rejected; {describe_rejection(rejected[0])}")
                on_rejected(rejected)
            async for outcome in client.results():
                file.append(outcome)
                outcomes.append(outcome)
                on_outcome(outcome)
            over = True
        finally:
            if not over:
                # Report the error that ended the run, not a failure to notify the node.
                with trio.move_on_after(CANCEL_TIMEOUT_S, shield=True), suppress(ServiceError):
                    await client.cancel(whole_session=True)
            summary = summarise(outcomes, trio.current_time() - started_s, rejected=len(rejected))
            write_json(folder / SUMMARY, summary)
    return summary, outcomes
