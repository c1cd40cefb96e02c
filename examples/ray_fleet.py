"""A fleet's client in a named Ray actor. Any process of the Ray cluster that needs rollouts finds it by its name.

python examples/ray_fleet.py /shared/runs/7

The folder is the `fleet.dir` of the nodes, on a disk that all machines share. Ray needs no port of the nodes, and the
nodes do not depend on Ray. Only the actor reads the folder, which contains the nodes' tokens.
"""

from __future__ import annotations

import sys
from typing import Any

import ray

from prorl_trio import BlockingClient, JobSpec, Outcome, Rejected, TaskInstance

NAME, NAMESPACE = "rollouts", "prorl"
SESSION = "ray"  # a restarted actor resumes the jobs of its predecessor
TASKS = 8


class Rollouts:
    """The client of the fleet, for one process that consumes outcomes and any number that submit jobs."""

    def __init__(self, fleet: str) -> None:
        self._client = BlockingClient(fleet=fleet, session_id=SESSION)
        self._results = self._client.results(follow=True)

    def submit(self, specs: list[JobSpec]) -> list[Rejected]:
        """Submit jobs and return the refusals. Submitting the same jobs again has no effect."""
        return [answer for answer in self._client.submit(specs) if isinstance(answer, Rejected)]

    def next_outcome(self) -> Outcome:
        """Wait for the next outcome. Requesting it acknowledges the previous one."""
        return next(self._results)

    def close(self) -> None:
        """Acknowledge the last outcome. Jobs continue."""
        self._client.close()


def open_rollouts(fleet: str) -> Any:
    """Return the named actor, and start it if necessary."""
    return (
        ray.remote(Rollouts)
        .options(
            name=NAME,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=-1,  # a call that was lost with its actor is retried, which is safe
            max_concurrency=4,  # one call may wait for an outcome while others submit
            num_cpus=0,
        )
        .remote(fleet)
    )


def rollout(number: int) -> JobSpec:
    """Make a job."""
    payload = {"question": f"What is {number} * 7?", "answer": str(number * 7)}
    return JobSpec(job_id=f"sum-{number}", instance=TaskInstance(instance_id="sum", handler="math", payload=payload))


def submit_by_name(numbers: list[int]) -> list[Rejected]:
    """Submit jobs from any process of the cluster."""
    refused: list[Rejected] = ray.get(ray.get_actor(NAME, NAMESPACE).submit.remote([rollout(n) for n in numbers]))
    return refused


def take(count: int) -> dict[str, float | None]:
    """Return the rewards of `count` jobs by id. After a crash of the actor the last outcome is delivered again."""
    actor = ray.get_actor(NAME, NAMESPACE)
    rewards: dict[str, float | None] = {}
    while len(rewards) < count:
        outcome = ray.get(actor.next_outcome.remote())
        rewards[outcome.job_id] = outcome.reward
    return rewards


def main() -> None:
    """Submit from a Ray task and consume outcomes here."""
    ray.init()
    actor = open_rollouts(sys.argv[1])
    refused = ray.get(ray.remote(submit_by_name).options(num_cpus=0).remote(list(range(TASKS))))
    print(len(refused), "refused;", take(TASKS - len(refused)))  # noqa: T201 - its output
    ray.get(actor.close.remote())
    ray.kill(actor)


if __name__ == "__main__":
    main()
