"""The arithmetic of `AsyncGRPOTrainer`'s steps: how many groups a policy update is trained on, and how old they get.

A step takes R rows from the rollout buffer, whatever groups they are of, and the loader one micro-batch more, ahead of
time. A group of n rollouts gives n rows, or up to M * n where rollouts have up to M segments. So with M = 1 an update
is trained on B = R / n groups, and the bound of staleness that admission keeps (`client.sampling`) is TRL's. With M > 1
it may take M updates until B groups are used up. The sampler is then told of an update once they are, so its bound S is
one of (S + 1) * M updates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prorl_trio.client.sampling import GroupRules
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["group_rules", "rows_per_update"]


def rows_per_update(args: Any) -> int:
    """Return R, the rows between two policy updates.

    Args:
        args: an `AsyncGRPOConfig`.

    Raises:
        ConfigError: the arguments leave it open.
    """
    if args.token_budget is None or args.token_budget > 0:
        raise ConfigError(
            f"token_budget is {args.token_budget}: steps would take any number of rows, so that no admission can keep "
            "max_staleness. Set token_budget=0, and per_device_train_batch_size and gradient_accumulation_steps "
            "to the rows of a step"
        )
    micro_batch = args.per_device_train_batch_size * args.world_size
    return int(micro_batch * args.gradient_accumulation_steps * args.weight_sync_steps)


def group_rules(args: Any, rows_per_rollout: int, options: Mapping[str, Any]) -> GroupRules:
    """Return the rules of sampling by which TRL never discards a row as stale.

    Args:
        args: an `AsyncGRPOConfig`.
        rows_per_rollout: M, the most rows that a rollout gives.
        options: further fields of `GroupRules`.

    Raises:
        ConfigError: there are no such rules, or `options` has one that follows from `args`.
    """
    rows, size = rows_per_update(args), args.num_generations
    if rows % size:
        raise ConfigError(
            f"an update is trained on {rows} rows (per_device_train_batch_size {args.per_device_train_batch_size} * "
            f"processes {args.world_size} * gradient_accumulation_steps {args.gradient_accumulation_steps} * "
            f"weight_sync_steps {args.weight_sync_steps}), which is no multiple of num_generations = {size}"
        )
    max_staleness = args.max_staleness if rows_per_rollout == 1 else args.max_staleness // rows_per_rollout - 1
    if max_staleness < 1:
        least = 1 if rows_per_rollout == 1 else 2 * rows_per_rollout
        raise ConfigError(
            f"max_staleness is {args.max_staleness}, and must be at least {least} with rollouts of up to "
            f"{rows_per_rollout} rows: AsyncGRPOTrainer takes a micro-batch ahead of each step"
        )
    derived = {"size": size, "groups_per_step": rows // size, "max_staleness": max_staleness}
    if clash := sorted(set(options) & set(derived)):
        raise ConfigError(f"{', '.join(clash)}: follows from AsyncGRPOConfig; set it there")
    try:
        return GroupRules(**derived, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{type(args).__name__}: {error}") from error
