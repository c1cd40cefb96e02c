"""Run by the Python of Ray's environment: the steps of examples/ray_fleet.py, with a kill of its actor between them.

python ray_program.py FLEET_DIR RESULT_JSON JOBS
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray

import ray_fleet


class Rollouts(ray_fleet.Rollouts):
    """The example's, which tells its process."""

    def pid(self):
        return os.getpid()


def facts(outcome):
    """Return the fields that can be compared with the node's."""
    (segment,) = outcome.trajectory.segments
    return [outcome.job_id, outcome.reward, segment.token_ids.tolist(), segment.logprobs.tolist()]


def steps(fleet, jobs):
    """Submit from another process, take some, kill the actor, and take the rest."""
    ray_fleet.Rollouts = Rollouts  # type: ignore[misc]  # what `open_rollouts` starts
    actor = ray_fleet.open_rollouts(fleet)
    first = ray.get(actor.pid.remote())
    submit = ray.remote(ray_fleet.submit_by_name).options(num_cpus=0)
    refused = len(ray.get(submit.remote([*range(jobs // 2)])))
    assert not refused, "nothing would come"
    taken = [ray.get(actor.next_outcome.remote()) for _ in range(jobs // 2)]
    os.kill(first, signal.SIGKILL)
    refused += len(ray.get(submit.remote([*range(jobs // 2, jobs)])))
    rest: list[Any] = []
    wanted = {f"sum-{number}" for number in range(jobs // 2, jobs)} | {taken[-1].job_id}  # that is acknowledged by none
    while not wanted <= {outcome.job_id for outcome in rest}:
        rest.append(ray.get(actor.next_outcome.remote()))
    again = ray.get(ray_fleet.open_rollouts(fleet).pid.remote())
    ray.get(actor.close.remote())
    ray.kill(actor)
    return {"refused": refused, "taken": [*map(facts, taken)], "rest": [*map(facts, rest)], "pids": [first, again]}


def main():
    fleet, result, jobs = sys.argv[1:]
    # Ray waits 30 s for its agent, which is not long where that is compiled only then.
    subprocess.run([sys.executable, "-c", "import ray.dashboard.agent"], check=True)
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # short, for its sockets
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder)
        found = steps(fleet, int(jobs))
        ray.shutdown()
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
