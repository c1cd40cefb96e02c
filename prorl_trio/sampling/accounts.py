"""The bookkeeping of a run: one line for each rollout, and statistics of batches. Plain functions of the state."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from prorl_trio.sampling.admission import expected_share
from prorl_trio.sampling.batch import BatchStatistics, Group, ManifestLine
from prorl_trio.sampling.state import group_id, job_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prorl_trio.sampling.batch import Fate, Why
    from prorl_trio.sampling.state import GroupState, SamplerState
    from prorl_trio.types.models import Outcome


WINDOW: Final = 1024
"""Number of recent groups of each kind whose durations are stored."""


def work_s(outcome: Outcome) -> float:
    """Return the seconds spent on a rollout, without waits in queues."""
    timing = outcome.timing
    return timing.init_s + timing.run_s + timing.eval_s


def keep_latest(window: list[float], value: float) -> None:
    """Append `value`, and drop the oldest beyond `WINDOW`."""
    window.append(value)
    if len(window) > WINDOW:
        del window[0]


def ks_distance(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the two-sample Kolmogorov-Smirnov distance, sup over x of |F1(x) - F2(x)|; None if a sample is empty.

    F1 and F2 are the empirical distribution functions (Smirnov 1939): F(x) is the share of a sample that is <= x. Both
    are constant between the observed values, so the supremum is reached at an observed value.
    """
    if not len(first) or not len(second):
        return None
    a, b = np.sort(np.asarray(first, dtype=np.float64)), np.sort(np.asarray(second, dtype=np.float64))
    observed = np.concatenate((a, b))
    f1 = np.searchsorted(a, observed, side="right") / len(a)
    f2 = np.searchsorted(b, observed, side="right") / len(b)
    return float(np.max(np.abs(f1 - f2)))


def fate_of(
    state: SamplerState,
    group: GroupState,
    index: int,
    fate: Fate,
    why: Why = "",
    *,
    outcome: Outcome | None = None,
    staleness: int | None = None,
) -> ManifestLine:
    """Return the line of a member's current rollout; `outcome`: its outcome, if the member has none."""
    member = group.members[index]
    line = ManifestLine(
        job_id=job_id(state.run, group, index),
        batch=state.next_batch,
        group=group.number,
        member=index,
        attempt=member.attempt,
        instance_id=group.instance.instance_id,
        fate=fate,
        why=why,
        staleness=staleness,
    )
    outcome = outcome or member.outcome
    if outcome is None:
        return line
    return msgspec.structs.replace(
        line,
        reward=outcome.reward,
        correct=None if member.outcome is None else member.correct,
        status=outcome.status,
        cause=outcome.cause,
        error_code=outcome.error_code,
        duration_s=work_s(outcome),
    )


def carried_lines(state: SamplerState) -> Iterator[ManifestLine]:
    """Yield a line for each rollout that is carried to a later batch."""
    places: tuple[tuple[dict[int, GroupState], Why], ...] = ((state.ready, "waiting"), (state.running, "running"))
    for groups, why in places:
        for group in groups.values():
            for index, member in enumerate(group.members):
                if not member.stuck:
                    yield fate_of(state, group, index, "carried", why)


def whole_group(state: SamplerState, group: GroupState) -> Group:
    """Return a group as passed to the trainer, at the current version."""
    now = len(state.versions) - 1
    updates = {version: index for index, version in enumerate(state.versions)}
    outcomes = [member.outcome for member in group.members if member.outcome is not None]
    # An unannounced version belongs to an update that is in progress or was abandoned; it is not older than the group.
    met = [
        updates.get(span.policy_version, group.born)
        for outcome in outcomes
        if outcome.trajectory is not None
        for segment in outcome.trajectory.segments
        for span in segment.spans
    ]
    return Group(
        number=group.number,
        group_id=group_id(state.run, group.number),
        instance=group.instance,
        outcomes=outcomes,
        correct=[member.correct for member in group.members],
        submitted_version=group.born_version,
        staleness=max(0, now - min(met, default=group.born)),
    )


def count(state: SamplerState, name: str, number: int = 1) -> None:
    """Add to a counter of the run, and to the counter since the previous batch."""
    for totals in (state.totals, state.since_batch):
        setattr(totals, name, getattr(totals, name) + number)


def duration_s(group: GroupState) -> float:
    """Return the duration of a group's longest rollout in seconds; 0 without outcomes."""
    return max((work_s(member.outcome) for member in group.members if member.outcome is not None), default=0.0)


def batch_statistics(state: SamplerState, groups: Sequence[Group]) -> BatchStatistics:
    """Return the statistics of a batch of `groups` created now."""
    since = state.since_batch
    staleness = Counter(group.staleness for group in groups)
    return BatchStatistics(
        groups=len(groups),
        decided_groups=since.decided_groups,
        solved_groups=since.solved_groups,
        unsolved_groups=since.unsolved_groups,
        reward_mean=float(np.mean([group.rewards for group in groups])),
        resampled=since.resampled,
        cancelled=since.cancelled,
        carried_groups=len(state.ready),
        running_groups=len(state.running),
        staleness=dict(sorted(staleness.items())),
        **_shares(state),
    )


def run_statistics(state: SamplerState) -> dict[str, int | float | None]:
    """Return the statistics of the run so far, flat. Names shared with `BatchStatistics` have the same meaning."""
    return {
        "version": len(state.versions) - 1,
        "batches": state.next_batch - 1,
        "carried_groups": len(state.ready),
        "running_groups": len(state.running),
        "expected_share": expected_share(state.recent),
        **{name: getattr(state.totals, name) for name in state.totals.__struct_fields__},
        **_shares(state),
    }


def _shares(state: SamplerState) -> dict[str, float | None]:
    totals = state.totals
    return {
        "informative_share": sum(state.recent) / len(state.recent) if state.recent else None,
        "resampled_share": totals.resampled / totals.ended if totals.ended else None,
        "duration_ks": ks_distance(state.trained_s, state.submitted_s),
        "early_stop_ks": ks_distance(state.trained_s, state.eligible_s),
    }
