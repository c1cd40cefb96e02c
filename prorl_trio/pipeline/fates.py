"""Lengths of rollouts, in seconds and in tokens, by whether they were delivered. Pure.

A trainer that learns from delivered rollouts learns from the policy only if both distributions are alike. If the
dropped rollouts are the long ones, the policy learns to be short.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, Literal, get_args

Fate = Literal["admitted", "delivered", "dropped"]
"""`admitted` rollouts began RUN. `delivered` ones completed. `dropped` ones failed, timed out, were cancelled, or ran
again as another attempt."""

RUN_BOUNDS_S: Final = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0)
TOKEN_BOUNDS: Final = (0.0, *(float(2**n) for n in range(5, 18)))


class Distribution:
    """Counts by size.

    `counts[i]` counts values above `bounds[i - 1]` and up to `bounds[i]`; the last counts all larger ones.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Return the bound that covers `share` of the values.

        Above all bounds it is the largest one; without values, 0.
        """
        left = share * self.count
        for bound, count in zip(self.bounds, self.counts, strict=False):
            left -= count
            if left <= 0:
                return bound if self.count else 0.0
        return self.bounds[-1]

    def figures(self) -> dict[str, float]:
        """Return the mean, and the bounds that cover half (`p50`) and nine tenths (`p90`) of the values."""
        mean = self.total / self.count if self.count else 0.0
        return {"mean": round(mean, 3), "p50": self.quantile(0.5), "p90": self.quantile(0.9)}


class Fates:
    """The distributions of seconds and tokens for each fate."""

    def __init__(self) -> None:
        self.run_s: dict[Fate, Distribution] = {fate: Distribution(RUN_BOUNDS_S) for fate in get_args(Fate)}
        self.tokens: dict[Fate, Distribution] = {fate: Distribution(TOKEN_BOUNDS) for fate in get_args(Fate)}

    def ended(self, run_s: float, tokens: int, *, delivered: bool) -> None:
        """Count an attempt under its fates: `run_s` seconds in RUN, and `tokens` sampled by the policy."""
        fates: tuple[Fate, Fate] = ("admitted", "delivered" if delivered else "dropped")
        for fate in fates:
            self.run_s[fate].add(run_s)
            self.tokens[fate].add(tokens)

    def statistics(self) -> dict[str, dict[str, object]]:
        """Return for each fate the number of attempts, and figures of their seconds in RUN and of their tokens."""
        return {
            fate: {
                "count": self.run_s[fate].count,
                "run_s": self.run_s[fate].figures(),
                "tokens": self.tokens[fate].figures(),
            }
            for fate in self.run_s
        }
