"""The policy's use of its own budget, pure: times are passed in, in seconds on one monotonic clock."""

from __future__ import annotations

import math


class AgentClock:
    """Runs while the policy is at work, and stands otherwise.

    At work is a tool that it called, from `begin` to `end`, and an engine that gives it tokens, as `produced` tells
    afterwards. All other time is somebody else's: waits for a backend or in an engine's own queue, pauses, updates of
    the weights, calls that fail, hang or are sent again. What goes on at the same time counts once.
    """

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._used_s = 0.0
        self._tools = 0
        self._counted_until_s = -math.inf
        """The time before which everything is counted, or will never be."""

    def __repr__(self) -> str:
        return f"<AgentClock {self._used_s:.3g} of {self.budget_s:g} s, {self._tools} tools at work>"

    def begin(self, now_s: float) -> None:
        """Note that a tool has begun to work: the clock runs until as many `end` calls have followed."""
        if not self._tools:
            self._counted_until_s = now_s
        self._tools += 1

    def end(self, now_s: float) -> None:
        """Note that a tool has ended which began."""
        assert self._tools, "begin comes first"
        self._settle(now_s)
        self._tools -= 1

    def produced(self, since_s: float, now_s: float) -> float:
        """Tokens came at `now_s` that an engine worked on since `since_s`. Return what that adds, in seconds."""
        if self._tools:  # it runs anyway
            return 0.0
        added_s = max(0.0, now_s - max(since_s, self._counted_until_s))
        self._used_s += added_s
        self._counted_until_s = max(self._counted_until_s, now_s)
        return added_s

    def leave_out(self, seconds: float, now_s: float) -> None:
        """Do not count seconds that have just passed, in which no tool could work."""
        if self._tools:
            self._settle(now_s)
            self._used_s = max(0.0, self._used_s - seconds)

    def left_s(self, now_s: float) -> float:
        """Seconds of the budget that are left, at least 0."""
        if self._tools:
            self._settle(now_s)
        return max(0.0, self.budget_s - self._used_s)

    def ends_s(self, now_s: float) -> float:
        """Return when the budget is used up if nothing changes: never, as long as the clock stands before that."""
        left_s = self.left_s(now_s)
        return now_s + left_s if self._tools or not left_s else math.inf

    def _settle(self, now_s: float) -> None:
        """Count what the tools at work have taken."""
        self._used_s += now_s - self._counted_until_s
        self._counted_until_s = now_s
