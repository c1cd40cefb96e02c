"""The rules for sampling groups, and the part of a job that all rollouts share."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from prorl_trio.types.models import AgentProgram, Budgets, JobSpec, McpServer, RetryPolicy, SamplingParams, TaskInstance

EarlyStop = Literal["keep", "cancel"]
"""The fate of running groups when a batch is complete: they continue and are trained on later, or are cancelled."""

MIN_SIZE: Final = 2


class GroupRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The rules of dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) with bounded staleness.

    Attributes:
        size: n, the rollouts of one instance; at least 2.
        groups_per_step: B, the groups for one policy update. Admission relies on it: take this many before each
            `advance`.
        max_staleness: limit on the policy updates between the oldest token of a group and the version at which it is
            taken. 0: strictly on-policy; then at most `groups_per_step` groups run at a time.
        dynamic: train only on informative groups, in which some rollouts are correct and others are not. False: train
            on all groups (plain GRPO).
        early_stop: the fate of running groups when a batch is complete. `keep`: they continue, and are trained on
            later. `cancel`: the early termination of the paper, which favours short rollouts.
        ahead: number of informative groups to have available or expected, in units of `groups_per_step`. The number of
            running groups follows from the recent share of informative ones. Larger values hide slow rollouts and make
            tokens older, within `max_staleness`.
        max_tries: consecutive failures of one member of a group before `take` raises `RolloutsFail`.
        patience_groups: consecutive uninformative groups before `take` raises `NothingToLearn`.
    """

    size: int
    groups_per_step: int
    max_staleness: int = 0
    dynamic: bool = True
    early_stop: EarlyStop = "keep"
    ahead: float = 1.5
    max_tries: int = 8
    patience_groups: int = 200

    def __post_init__(self) -> None:
        if self.size < MIN_SIZE:
            raise ValueError(
                f"size must be >= {MIN_SIZE}, got {self.size}: rewards of a group are compared with each other, and "
                "a rollout alone teaches nothing"
            )
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step must be >= 1, got {self.groups_per_step}")
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must be >= 0, got {self.max_staleness}")
        if not 1 <= self.ahead <= 1000:
            raise ValueError(f"ahead must be in [1, 1000], got {self.ahead}")
        if self.max_tries < 1:
            raise ValueError(f"max_tries must be >= 1, got {self.max_tries}")
        if self.patience_groups < 1:
            raise ValueError(f"patience_groups must be >= 1, got {self.patience_groups}")
        if self.early_stop not in ("keep", "cancel"):
            raise ValueError(f"early_stop must be keep or cancel, got {self.early_stop!r}")


class JobTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of a `JobSpec` that are independent of the rollout. See `JobSpec`."""

    sampling: SamplingParams = SamplingParams()
    budgets: Budgets = Budgets()
    max_turns: int = 8
    tags: dict[str, str] = {}
    retry: RetryPolicy = RetryPolicy()
    max_trajectory_tokens: int | None = None
    max_completion_tokens: int | None = None
    agent: AgentProgram | str | None = None
    mcp: list[McpServer | str] | None = None

    def spec(self, job_id: str, group_id: str, instance: TaskInstance) -> JobSpec:
        """Return the job of one rollout."""
        return JobSpec(
            job_id=job_id,
            instance=instance,
            group_id=group_id,
            sampling=self.sampling,
            budgets=self.budgets,
            max_turns=self.max_turns,
            tags=self.tags,
            retry=self.retry,
            max_trajectory_tokens=self.max_trajectory_tokens,
            max_completion_tokens=self.max_completion_tokens,
            agent=self.agent,
            mcp=self.mcp,
        )
