"""A fleet's client in a Ray actor with a name: whichever process of the Ray cluster wants rollouts finds it by that.

python examples/ray_fleet.py /shared/runs/7

The folder is the `fleet.dir` of the nodes, on a disk that all machines share. Ray needs no port of the nodes, and the
nodes know nothing of Ray. Only the actor reads the folder, which holds the nodes' tokens.
"""

from __future__ import annotations

import sys
from typing import Any

import ray

from prorl_trio import BlockingClient, JobSpec, Outcome, Rejected, TaskInstance

NAME, NAMESPACE = "rollouts", "prorl"
SESSION = "ray"  # an actor that Ray starts again comes back to what the one before it submitted
TASKS = 8


class Rollouts:
    """The client of the fleet, for one process that takes outcomes and any number that submit jobs."""

    def __init__(self, fleet: str) -> None:
        self._client = BlockingClient(fleet=fleet, session_id=SESSION)
        self._results = self._client.results(follow=True)

    def submit(self, specs: list[JobSpec]) -> list[Rejected]:
        """Submit jobs, and return the refusals. The same jobs once more are the same jobs."""
        return [answer for answer in self._client.submit(specs) if isinstance(answer, Rejected)]

    def next_outcome(self) -> Outcome:
        """Wait for the next outcome. To ask for it is to acknowledge the one before."""
        return next(self._results)

    def close(self) -> None:
        """Acknowledge the last outcome. Jobs go on."""
        self._client.close()


def open_rollouts(fleet: str) -> Any:
    """Return the actor, started if there is none of that name."""
    return (
        ray.remote(Rollouts)
        .options(
            name=NAME,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=-1,  # a call that was lost with its actor is made again: no harm, as said above
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
    """Return the rewards of so many jobs by id. After a crash of the actor the outcome taken last comes once more."""
    actor = ray.get_actor(NAME, NAMESPACE)
    rewards: dict[str, float | None] = {}
    while len(rewards) < count:
        outcome = ray.get(actor.next_outcome.remote())
        rewards[outcome.job_id] = outcome.reward
    return rewards


def main() -> None:
    """Submit from a task of Ray, take from here."""
    ray.init()
    actor = open_rollouts(sys.argv[1])
    refused = ray.get(ray.remote(submit_by_name).options(num_cpus=0).remote(list(range(TASKS))))
    print(len(refused), "refused;", take(TASKS - len(refused)))  # noqa: T201 - its output
    ray.get(actor.close.remote())
    ray.kill(actor)


if __name__ == "__main__":
    main()
