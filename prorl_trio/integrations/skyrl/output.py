"""SkyRL's `GeneratorOutput` made from outcomes, in its step-wise form: a row for each segment. Pure, without SkyRL.

SkyRL computes the advantage of a trajectory from its last row, among the last rows of its group, and gives it to all
rows of the trajectory. So segments neither count as rollouts in the baseline, nor need rewards of their own. Every row
has the trajectory's reward nevertheless, because SkyRL's filters of groups without variance read all rows.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from prorl_trio.integrations.verl.rows import RowLimits, masked_row, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.integrations.verl.rows import Row
    from prorl_trio.types.models import Outcome

UNLIMITED: Final = RowLimits(2**31, 2**31)
CUT_SHORT: Final = frozenset({"context_budget", "no_end_of_turn", "max_turns", "agent_budget"})
"""The ends of a dialogue that SkyRL calls `length`."""


def output_of(
    trajectory_ids: Sequence[Any], outcomes: Sequence[Outcome], *, pad_token_id: int, trains: bool
) -> dict[str, Any]:
    """Return the rows of all trajectories, in order, all rows of a trajectory together.

    A rollout without a reward failed through no fault of the policy. It has no row, so the baseline of its group is
    that of the others. Two exceptions, when `trains`, have rows whose tokens are all masked:

    - A group without any reward has one such row, because SkyRL requires each prompt of a batch. Its reward is 0, which
      no gradient sees, but SkyRL's mean reward does.
    - A group of which one reward remains, of several. SkyRL would take this reward itself for an advantage.

    Args:
        trajectory_ids: of each outcome, SkyRL's `TrajectoryID` (instance_id and repetition_id).
        outcomes: in the same order.
        pad_token_id: the only token of a response without sampled tokens.
        trains: the output is trained on, not evaluated.
    """
    members = Counter(each.instance_id for each in trajectory_ids)
    rewarded = Counter(
        each.instance_id for each, outcome in zip(trajectory_ids, outcomes, strict=True) if outcome.reward is not None
    )
    table = _Table()
    absent = set(members) - set(rewarded)
    for trajectory_id, outcome in zip(trajectory_ids, outcomes, strict=True):
        group = trajectory_id.instance_id
        if outcome.reward is None:
            if trains and group in absent:
                absent.discard(group)
                table.add(trajectory_id, outcome, [masked_row(outcome, pad_token_id, UNLIMITED)], masked=True)
            continue
        rows = rows_of(outcome, UNLIMITED) or [masked_row(outcome, pad_token_id, UNLIMITED)]
        table.add(trajectory_id, outcome, rows, masked=trains and members[group] > rewarded[group] == 1)
    failed = [outcome for outcome in outcomes if outcome.reward is None]
    table.columns["rollout_metrics"] = {
        "generate/failed_rollouts": len(failed),
        "generate/groups_without_baseline": sum(
            members[group] > 1 and rewarded[group] < 2 and rewarded[group] < members[group] for group in members
        ),
        "generate/segments": len(table.columns["rewards"]),
        **table.versions(),
    }
    return table.columns


class _Table:
    """The columns of the output so far."""

    def __init__(self) -> None:
        self.columns: dict[str, Any] = {
            "prompt_token_ids": [],
            "response_ids": [],
            "rewards": [],
            "loss_masks": [],
            "stop_reasons": [],
            "rollout_logprobs": [],
            "trajectory_ids": [],
            "trajectory_generation_times": [],
            "is_last_step": [],
        }
        self._versions: set[int] = set()

    def add(self, trajectory_id: Any, outcome: Outcome, rows: Sequence[Row], *, masked: bool) -> None:
        """Add the rows of a trajectory."""
        trajectory = outcome.trajectory
        reason = "length" if trajectory is not None and trajectory.stop_reason in CUT_SHORT else "stop"
        for number, row in enumerate(rows, 1):
            values = {
                "prompt_token_ids": row.prompt_ids.tolist(),
                "response_ids": row.response_ids.tolist(),
                "rewards": outcome.reward or 0.0,
                "loss_masks": [0] * len(row.response_ids) if masked else row.response_mask.tolist(),
                "stop_reasons": reason,
                "rollout_logprobs": row.logprobs.tolist(),
                "trajectory_ids": trajectory_id,
                "trajectory_generation_times": outcome.timing.init_s + outcome.timing.run_s + outcome.timing.eval_s,
                "is_last_step": number == len(rows),
            }
            for name, value in values.items():
                self.columns[name].append(value)
            self._versions.update(int(version) for version in row.versions if version.isdecimal())

    def versions(self) -> dict[str, int]:
        """Return the oldest and the newest policy version of the sampled tokens."""
        if not self._versions:
            return {}
        return {"policy/min_version": min(self._versions), "policy/max_version": max(self._versions)}
