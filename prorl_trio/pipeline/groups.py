"""Groups of rollouts that end early, pure: selects rollouts to cancel when a group is done or its deadline passes.

Times are passed in, on one monotonic clock. A key identifies a group (session and group id).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

    from prorl_trio.types.models import GroupPolicy

MAX_IDLE_GROUPS: Final = 10_000
"""Limit of remembered groups with missing rollouts but without live ones. Beyond it, the oldest is forgotten."""

J = TypeVar("J")


class _Group(Generic[J]):
    """A group whose deadline clock runs while it has live rollouts and none of its rollouts waits in a queue."""

    def __init__(self, policy: GroupPolicy) -> None:
        self.policy = policy
        self._used_s = 0.0
        self._since_s: float | None = None
        """The time at which the clock started; None while it is stopped."""
        self._queued: set[J] = set()
        self.live: list[J] = []
        self.seen = 0
        self.completed = 0
        self.stopped = ""
        """Why the remaining rollouts were cancelled; empty before that."""

    def moved(self, member: J, now_s: float, *, queued: bool) -> None:
        """Note whether `member` waits in a queue from now on. A rollout that ended does not."""
        (self._queued.add if queued else self._queued.discard)(member)
        if self._since_s is not None:
            self._used_s += now_s - self._since_s
        self._since_s = now_s if self.live and not self._queued else None

    def due_s(self) -> float | None:
        """Return the time of the deadline if nothing changes, or None."""
        if self.stopped or self._since_s is None or self.policy.deadline_s is None:
            return None
        return self._since_s + self.policy.deadline_s - self._used_s


class GroupTable(Generic[J]):
    """The groups with a policy. The first accepted rollout sets the group's policy.

    A group is forgotten when all its `size` rollouts have been submitted and ended; its id can then be reused.
    """

    def __init__(self, max_idle: int = MAX_IDLE_GROUPS) -> None:
        self._groups: dict[Hashable, _Group[J]] = {}
        self._idle: dict[Hashable, None] = {}
        """Groups without a live rollout, oldest first."""
        self._max_idle = max_idle

    def __len__(self) -> int:
        return len(self._groups)

    def accepted(self, key: Hashable, member: J, policy: GroupPolicy, now_s: float) -> str:
        """Add a new rollout, which waits in a queue, to its group; the group's first rollout sets its policy.

        Returns the reason to cancel the rollout at once if the group was already stopped, else an empty string.
        """
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(policy)
        self._idle.pop(key, None)
        group.live.append(member)
        group.moved(member, now_s, queued=True)
        group.seen += 1
        return group.stopped

    def moved(self, key: Hashable, member: J, now_s: float, *, queued: bool) -> None:
        """Note that a live rollout left a queue, or (`queued`) entered one. An unknown rollout is ignored."""
        group = self._groups.get(key)
        if group is not None and member in group.live:
            group.moved(member, now_s, queued=queued)

    def ended(self, key: Hashable, member: J, now_s: float, *, completed: bool) -> tuple[list[J], str]:
        """Remove an ended rollout from its group; return the rollouts to cancel now, and the reason.

        The group's other live rollouts are returned when this completion reaches `min_completed`. Otherwise the list is
        empty and the reason meaningless. An unknown rollout is ignored. A group whose rollouts have all ended may be
        forgotten.
        """
        group = self._groups.get(key)
        if group is None or member not in group.live:
            return [], ""
        group.live.remove(member)
        group.moved(member, now_s, queued=False)
        group.completed += completed
        needed = group.policy.min_completed
        rest: list[J] = []
        if not group.stopped and needed and group.completed >= needed:
            group.stopped = (
                f"early stop: {group.completed} rollouts of the group have completed, min_completed is {needed}"
            )
            rest = list(group.live)
        if not group.live:
            self._idle[key] = None
            if group.seen >= group.policy.size:
                self._forget(key)
            elif len(self._idle) > self._max_idle:
                self._forget(next(iter(self._idle)))
        return rest, group.stopped

    def due(self, now_s: float) -> list[tuple[list[J], str]]:
        """Stop the groups whose deadline has passed; return for each its live rollouts to cancel, and the reason."""
        stopped: list[tuple[list[J], str]] = []
        for group in self._groups.values():
            due_s = group.due_s()
            if due_s is not None and due_s <= now_s:
                group.stopped = f"early stop: the group's deadline_s of {group.policy.deadline_s} s has passed"
                stopped.append((list(group.live), group.stopped))
        return stopped

    def next_deadline_s(self) -> float | None:
        """Return the time at which the next group is due, or None."""
        return min((due_s for g in self._groups.values() if (due_s := g.due_s()) is not None), default=None)

    def _forget(self, key: Hashable) -> None:
        del self._groups[key], self._idle[key]
