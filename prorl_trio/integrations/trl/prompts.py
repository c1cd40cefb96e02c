"""From a prompt, which is all that TRL hands on, back to the task instance that it is of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prorl_trio.types.models import TaskInstance


class TaskLookup:
    """The task instances of a dataset, by prompt.

        tasks = TaskLookup(dataset, lambda row: TaskInstance(instance_id=row["id"], handler="math", payload=...))
        GRPOTrainer(..., train_dataset=dataset, rollout_func=RolloutFunction(client, tasks, ...))

    Args:
        rows: of a dataset, each with a column `prompt`: text or messages. Two rows of one prompt must give the same
            instance: nothing else tells them apart.
        instance_of: makes the instance of a row.

    Raises:
        ConfigError: a row has no prompt, or two rows have the same and different instances.
    """

    def __init__(
        self, rows: Iterable[Mapping[str, Any]], instance_of: Callable[[Mapping[str, Any]], TaskInstance]
    ) -> None:
        self._instances: dict[bytes, TaskInstance] = {}
        for number, row in enumerate(rows):
            if row.get("prompt") is None:
                raise ConfigError(f"row {number} of the dataset has no `prompt`")
            instance = instance_of(row)
            known = self._instances.setdefault(_key(row["prompt"]), instance)
            if known != instance:
                raise ConfigError(
                    f"rows of the dataset with the instances {known.instance_id!r} and {instance.instance_id!r} have "
                    f"the same prompt, and TRL hands on nothing else: {row['prompt']!r:.200}"
                )

    def __len__(self) -> int:
        return len(self._instances)

    def __call__(self, prompt: Any) -> TaskInstance:
        """Return the instance of a prompt, as text or messages. Raises ConfigError: it is not in the dataset."""
        try:
            return self._instances[_key(prompt)]
        except KeyError:
            raise ConfigError(f"no row of the dataset has this prompt: {prompt!r:.200}") from None


def _key(prompt: Any) -> bytes:
    return msgspec.json.encode(prompt, order="deterministic")
