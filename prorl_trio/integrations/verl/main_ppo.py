"""verl's `main_ppo`, with rollouts on a node: `python -m prorl_trio.integrations.verl.main_ppo`. Needs verl.

It takes the same arguments. Only the training process differs: see `trainers`.
"""

from __future__ import annotations

from typing import Any

try:
    import ray
    from verl.trainer import main_ppo
except ImportError as exc:
    raise ImportError("this needs verl: pip install 'prorl-trio[verl]'") from exc

_TaskRunner: Any = main_ppo.TaskRunnerV1.__ray_metadata__.modified_class.__ray_actor_class__
"""verl's class, from which Ray has made an actor."""


@ray.remote
class NodeTaskRunner(_TaskRunner):  # type: ignore[misc] # verl has no types
    """verl's task runner, with trainers that notify the node about weights."""

    def run(self, config: Any) -> None:
        """Train. See `verl.trainer.main_ppo.TaskRunnerV1`."""
        from prorl_trio.integrations.verl.trainers import install

        install()
        super().run(config)


def main() -> None:
    """Run verl's `main_ppo` with this task runner and the arguments of the command line."""
    main_ppo.TaskRunnerV1 = NodeTaskRunner
    main_ppo.main()


if __name__ == "__main__":
    main()
