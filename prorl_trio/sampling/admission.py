"""The arithmetic of admission: how many groups may be begun, and which whole ones be taken, so that none gets stale.

A group that is submitted at version s may be trained on at the versions s to s + max_staleness: it has a deadline. A
version trains on B groups. So there is a schedule that keeps all deadlines if and only if, at version v with t groups
taken so far, for each d >= v the live groups (at work, or whole) with a deadline up to d number at most

    B * (d - v + 1) - t                                                                                        (1)

Admission keeps it for the last deadline, d = v + max_staleness. That is the capacity of AReaL (arXiv:2505.24298,
section 5.1), (max_staleness + v + 1) * B - accepted - running, where accepted = v * B + t + the whole groups. Alone
it does not bound staleness: fast groups may take the places of slow ones again and again. So a batch takes the earliest
deadlines first, and one with a later deadline only if (1) holds for all others afterwards (earliest deadline first,
Jackson's rule). Then none is overtaken too often, and none has to be discarded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

RECENT: Final = 64
"""Groups that tell the share of informative ones."""
PRIOR_INFORMATIVE: Final = 2.0
PRIOR_GROUPS: Final = 4.0
"""Before anything is known, the share is a half, with the weight of four groups (a Beta(2, 2) prior)."""


def capacity(*, per_step: int, max_staleness: int, taken_here: int, ready: int, running: int) -> int:
    """Return how many groups may be begun now; below 0 if there are too many.

    AReaL's formula, in which each step before this one took `per_step` groups: one that took fewer gives no room now,
    and one that took more takes none away.

    Args:
        per_step: B.
        max_staleness: in updates.
        taken_here: groups taken at this version.
        ready: whole groups that wait.
        running: groups at work.
    """
    return (max_staleness + 1) * per_step - taken_here - ready - running


def expected_share(recent: Sequence[bool]) -> float:
    """Return the expected share of informative groups: the mean of a Beta posterior over the recent ones."""
    return (sum(recent) + PRIOR_INFORMATIVE) / (len(recent) + PRIOR_GROUPS)


def groups_wanted(*, target: float, ready: int, running: int, share: float) -> int:
    """Return how many groups to begin so that `target` informative ones are there or may be expected."""
    return max(0, math.ceil((target - ready) / share - running))


def keeps_deadlines(deadlines: Iterable[int], *, version: int, per_step: int, slots: int) -> bool:
    """Return True if (1) holds for groups of these deadlines, with `slots` places left at `version`."""
    for count, deadline in enumerate(sorted(deadlines), start=1):
        if count > slots + per_step * (deadline - version):
            return False
    return True


def pick(
    ready: Sequence[tuple[int, int]], running: Collection[int], *, k: int, version: int, per_step: int, slots: int
) -> list[int] | None:
    """Return the numbers of the `k` groups to take, oldest first; None if more must be decided first.

    Args:
        ready: deadline and number of each whole group.
        running: the deadlines of the groups at work that go on.
        k: how many.
        version: updates so far.
        per_step: B.
        slots: places left of the B at this version. Groups beyond that take no other group's place.
    """
    order = sorted(ready)
    picked = order[:k]
    if len(picked) < k:
        return None
    left = [deadline for deadline, _ in order[k:]] + list(running)
    kept = keeps_deadlines(left, version=version, per_step=per_step, slots=max(0, slots - k))
    # Where no group at work is more urgent than those picked, to wait would not make a better choice.
    if not kept and any(deadline < picked[-1][0] for deadline in running):
        return None
    return [number for _, number in picked]
