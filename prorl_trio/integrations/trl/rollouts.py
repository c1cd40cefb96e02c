"""Rollouts of given instances, each with a reward if that can be had: submitted, awaited, and sampled again."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_ipc.session import Rejected
from prorl_trio.types.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from prorl_trio.client import BlockingClient
    from prorl_trio.client.sampling import JobTemplate
    from prorl_trio.types.models import JobSpec, Outcome, TaskInstance

MAX_TRIES: Final = 8


class RolloutsRejected(RuntimeError):
    """The node takes no such jobs."""


def run_rollouts(
    client: BlockingClient,
    instances: Sequence[TaskInstance],
    template: Callable[[TaskInstance], JobTemplate],
    *,
    evaluation: bool,
    stall_s: float,
    max_tries: int = MAX_TRIES,
) -> list[Outcome]:
    """Return an outcome for each instance, in their order.

    One that has no reward (the infrastructure failed) is sampled again, up to `max_tries` times, and returned without
    one then. Rollouts in a row of the same instance are a group. A node that was killed goes on with them when it is
    back.

    Raises:
        RolloutsRejected: the node rejects a job.
        TimeoutError: no rollout has ended for `stall_s`; what is at work is cancelled.
        ServiceError: the session is over.
    """
    run = uuid.uuid4().hex[:12]
    specs: dict[str, JobSpec] = {}
    places: dict[str, int] = {}
    group = -1
    for place, instance in enumerate(instances):
        group += place == 0 or instance != instances[place - 1]
        spec = template(instance).spec(f"{run}-{place}-0", f"{run}-{group}", instance)
        specs[spec.job_id] = msgspec.structs.replace(spec, priority="eval") if evaluation else spec
        places[spec.job_id] = place
    outcomes: list[Outcome | None] = [None] * len(instances)
    try:
        _submit(client, list(specs.values()))
        while places:
            outcome = _next(client, stall_s, places.keys())
            if outcome.job_id not in places:  # of an earlier call that was interrupted
                continue
            place = places.pop(outcome.job_id)
            tries = int(outcome.job_id.rpartition("-")[2]) + 1
            if outcome.reward is None and tries < max_tries:
                again = msgspec.structs.replace(specs[outcome.job_id], job_id=f"{run}-{place}-{tries}")
                specs[again.job_id] = again
                places[again.job_id] = place
                _submit(client, [again])
            else:
                outcomes[place] = outcome.detached()
    except BaseException:
        _give_up(client, list(places))
        raise
    return [outcome for outcome in outcomes if outcome is not None]


def _submit(client: BlockingClient, specs: list[JobSpec]) -> None:
    for answer in client.submit(specs):
        if isinstance(answer, Rejected):
            raise RolloutsRejected(f"job {answer.job_id}: {answer.code}: {answer.message}")


def _next(client: BlockingClient, stall_s: float, ours: AbstractSet[str]) -> Outcome:
    try:
        return next(client.results(timeout_s=stall_s, follow=True))
    except TimeoutError:
        raise TimeoutError(
            f"no rollout has ended for {stall_s:g} s, {len(ours)} are missing: look at `prorl-trio status`, or bound "
            "what a rollout may take with JobTemplate(budgets=...)"
        ) from None


def _give_up(client: BlockingClient, job_ids: list[str]) -> None:
    with suppress(ServiceError):  # without a connection they go on, and their outcomes stay with the session
        client.cancel(job_ids)
