"""The arithmetic of admission: how many groups may start, and which complete ones to take, so that none gets stale.

A group submitted at version s may be trained on at the versions s to s + max_staleness, so it has a deadline. A version
trains on B groups. Let t groups be taken so far at version v. Let L(d) be the number of live groups (running or
complete) with a deadline up to d. A schedule that meets all deadlines exists if and only if, for each d >= v, L(d) is
at most

    B * (d - v + 1) - t                                                                                        (1)

Admission ensures it for the last deadline, d = v + max_staleness. That is the capacity of AReaL (arXiv:2505.24298,
section 5.1), (max_staleness + v + 1) * B - accepted - running. There, accepted is v * B + t + the complete groups. This
alone does not bound staleness, because fast groups may repeatedly take the places of slow ones. So a batch takes the
earliest deadlines first. It takes a group with a later deadline only if (1) then holds for all others (earliest
deadline first, Jackson's rule). So no group is overtaken too often or discarded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

RECENT: Final = 64
"""Number of recent groups used to estimate the share of informative ones."""
PRIOR_INFORMATIVE: Final = 2.0
PRIOR_GROUPS: Final = 4.0
"""The prior of the share is one half with the weight of four groups, a Beta(2, 2) distribution."""


def capacity(*, per_step: int, max_staleness: int, taken_here: int, ready: int, running: int) -> int:
    """Return how many groups may start now; negative if there are too many.

    This is AReaL's formula, under the assumption that each earlier step took `per_step` groups. A step that took fewer
    does not add room now, and a step that took more does not reduce it.

    Args:
        per_step: B.
        max_staleness: in updates.
        taken_here: number of groups taken at this version.
        ready: number of complete waiting groups.
        running: number of running groups.
    """
    return (max_staleness + 1) * per_step - taken_here - ready - running


def expected_share(recent: Sequence[bool]) -> float:
    """Return the expected share of informative groups: the mean of a Beta posterior over the recent ones."""
    return (sum(recent) + PRIOR_INFORMATIVE) / (len(recent) + PRIOR_GROUPS)


def groups_wanted(*, target: float, ready: int, running: int, share: float) -> int:
    """Return how many groups to start so that `target` informative ones are available or expected."""
    return max(0, math.ceil((target - ready) / share - running))


def keeps_deadlines(deadlines: Iterable[int], *, version: int, per_step: int, slots: int) -> bool:
    """Return True if (1) holds for groups with these deadlines, with `slots` places left at `version`."""
    for count, deadline in enumerate(sorted(deadlines), start=1):
        if count > slots + per_step * (deadline - version):
            return False
    return True


def pick(
    ready: Sequence[tuple[int, int]], running: Collection[int], *, k: int, version: int, per_step: int, slots: int
) -> list[int] | None:
    """Return the numbers of the `k` groups to take, oldest first; None if more groups must complete first.

    Args:
        ready: deadline and number of each complete group.
        running: the deadlines of the running groups that continue.
        k: number of groups to take.
        version: updates so far.
        per_step: B.
        slots: places left of the B at this version. Groups beyond that do not take another group's place.
    """
    order = sorted(ready)
    picked = order[:k]
    if len(picked) < k:
        return None
    left = [deadline for deadline, _ in order[k:]] + list(running)
    kept = keeps_deadlines(left, version=version, per_step=per_step, slots=max(0, slots - k))
    # If no running group is more urgent than the picked ones, waiting would not improve the choice.
    if not kept and any(deadline < picked[-1][0] for deadline in running):
        return None
    return [number for _, number in picked]
