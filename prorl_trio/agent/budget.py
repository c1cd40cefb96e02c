"""The budget `agent_s` of one agent: its clock, and the scopes whose deadlines the clock moves."""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Self

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_trio.agent.context import RolloutContext


class AgentClock:
    """A clock that runs while the policy or its tools work, and is stopped otherwise.

    It counts tools that the policy called, from `begin` to `end`, and engines that produce tokens, reported afterwards
    by `produced`. It excludes waits for a backend or in an engine's queue, pauses, weight updates, and calls that fail,
    hang or are retried. Concurrent work counts once.
    """

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._used_s = 0.0
        self._tools = 0
        self._counted_until_s = -math.inf
        """The time up to which everything is counted or excluded for good."""

    def __repr__(self) -> str:
        return f"<AgentClock {self._used_s:.3g} of {self.budget_s:g} s, {self._tools} tools at work>"

    def begin(self, now_s: float) -> None:
        """Note that a tool has started: the clock runs until each `begin` is matched by an `end`."""
        if not self._tools:
            self._counted_until_s = now_s
        self._tools += 1

    def end(self, now_s: float) -> None:
        assert self._tools, "begin comes first"
        self._settle(now_s)
        self._tools -= 1

    def produced(self, since_s: float, now_s: float) -> float:
        """Count tokens that arrived at `now_s` after an engine worked since `since_s`. Return the seconds added."""
        if self._tools:  # the clock runs anyway
            return 0.0
        added_s = max(0.0, now_s - max(since_s, self._counted_until_s))
        self._used_s += added_s
        self._counted_until_s = max(self._counted_until_s, now_s)
        return added_s

    def leave_out(self, seconds: float, now_s: float) -> None:
        """Exclude seconds that just passed, in which no tool could work."""
        if self._tools:
            self._settle(now_s)
            self._used_s = max(0.0, self._used_s - seconds)

    def left_s(self, now_s: float) -> float:
        """Return the remaining seconds of the budget, at least 0."""
        if self._tools:
            self._settle(now_s)
        return max(0.0, self.budget_s - self._used_s)

    def ends_s(self, now_s: float) -> float:
        """Return when the budget will be used up if nothing changes; infinite while the clock is stopped."""
        left_s = self.left_s(now_s)
        return now_s + left_s if self._tools or not left_s else math.inf

    def _settle(self, now_s: float) -> None:
        """Count the time of running tools up to now."""
        self._used_s += now_s - self._counted_until_s
        self._counted_until_s = now_s


class AgentBudget:
    """The time of a RUN stage that the policy and its tools may use.

    This time is not charged to the stage's own budget, so a slow policy does not make its rollout `timed_out`. `scope`
    is cancelled when the budget is used up.
    """

    def __init__(self, context: RolloutContext, budget_s: float) -> None:
        self._context = context
        self._clock = AgentClock(budget_s)
        self.scope = trio.CancelScope()
        self.updates_in_tools = 0
        """Policy updates that arrived while tools ran, and so aged the rollout through the tools' time."""
        self._at_work = 0
        self._version = ""

    @property
    def used_up(self) -> bool:
        return self._clock.left_s(trio.current_time()) <= 0

    def tool(self, name: str) -> ToolTime:
        """Return a block in which the tool `name` works for the policy: `with budget.tool("bash"): ...`."""
        return ToolTime(self, name)

    def produced(self, since_s: float) -> None:
        """Charge the time since `since_s` (trio's clock) in which an engine produced the tokens that just arrived."""
        now_s = trio.current_time()
        self._context.leave_uncharged(self._clock.produced(since_s, now_s))
        self.scope.deadline = self._clock.ends_s(now_s)

    def leave_out(self, seconds: float) -> None:
        """Exclude seconds that just passed, in which the sandbox of a tool was suspended."""
        now_s = trio.current_time()
        self._clock.leave_out(seconds, now_s)
        self.scope.deadline = self._clock.ends_s(now_s)

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Charge the time of the block. Blocks may overlap."""
        now_s = trio.current_time()
        self._clock.begin(now_s)
        self._count_updates(+1)
        self.scope.deadline = self._clock.ends_s(now_s)
        at_most_s = self._clock.left_s(now_s)
        self._context.on_standstill.append(self.leave_out)
        try:
            with self._context.standing_in_line(f"tool {name}", "agent_budget", at_most_s=at_most_s):
                yield
        finally:
            self._context.on_standstill.remove(self.leave_out)
            now_s = trio.current_time()
            self._clock.end(now_s)
            self._count_updates(-1)
            self.scope.deadline = self._clock.ends_s(now_s)

    def _count_updates(self, tools: int) -> None:
        """Note that `tools` more tools run from now on. An update during several tools counts once."""
        backends = self._context.resources.backends
        if self._at_work:
            self.updates_in_tools += backends.versions.updates(self._version, backends.policy_version)
        self._version = backends.policy_version
        self._at_work += tools


class ToolTime:
    """The time that one tool takes from the budget, without its waits for other agents."""

    def __init__(self, budget: AgentBudget, name: str) -> None:
        self._budget = budget
        self._name = name
        self._asked = 0
        self._running = ExitStack()

    def __enter__(self) -> Self:
        self._running.enter_context(self._budget.running(self._name))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._running.close()

    @contextmanager
    def given_away(self) -> Iterator[None]:
        """Charge nothing during the block: another agent works for the tool, on its own budget. Blocks may overlap."""
        self._asked += 1
        self._running.close()
        try:
            yield
        finally:
            self._asked -= 1
            if not self._asked:
                self._running.enter_context(self._budget.running(self._name))
