"""The arithmetic by which `AsyncGRPOTrainer` never has a reason to throw a row away.

TRL takes R rows from the rollout buffer between two policy updates, whatever groups they are of, and some ahead of
time. A row may lie T updates behind when it is taken (`max_staleness`). A group of n rollouts gives n * M rows at most,
where rollouts have up to M segments. So updates do not come after a fixed number of groups, and the sampler is given
another clock: it is told of a "version" whenever B = R / n groups and all their rows were taken, and is bound to S of
those. A group that is begun in one of them is among the next (S + 1) * B that are taken, and until its last row is, at
most (S + 1) * B * n * M are. In that time there are at most (S + 1) * B * n * M / R updates, rounded up: at most T for

    S = T * R / (B * n * M) - 1, rounded down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prorl_trio.client.sampling import GroupRules
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    """Return the rules of sampling, in the sampler's own clock.

    Args:
        args: an `AsyncGRPOConfig`.
        rows_per_rollout: M, the most rows that a rollout gives.
        options: further fields of `GroupRules`.

    Raises:
        ConfigError: there are no such rules, or `options` has one that follows from `args`.
    """
    rows, size = rows_per_update(args), args.num_generations
    groups = max(1, rows // size)
    max_staleness = args.max_staleness * rows // (groups * size * rows_per_rollout) - 1
    if max_staleness < 0:
        least = -(-groups * size * rows_per_rollout // rows)
        raise ConfigError(
            f"max_staleness is {args.max_staleness}, and must be at least {least} with {rows} rows an update, groups "
            f"of {size} and up to {rows_per_rollout} rows a rollout: AsyncGRPOTrainer takes rows ahead of its updates"
        )
    derived = {"size": size, "groups_per_step": groups, "max_staleness": max_staleness}
    if clash := sorted(set(options) & set(derived)):
        raise ConfigError(f"{', '.join(clash)}: follows from AsyncGRPOConfig; set it there")
    try:
        return GroupRules(**derived, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{type(args).__name__}: {error}") from error
