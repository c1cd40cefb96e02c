"""Lengths of rollouts, in seconds and in tokens, by whether anything came of them. Pure.

A trainer that learns from what is delivered learns from the policy only where both are distributed alike: if those that
are dropped are the long ones, it learns to be short.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, Literal, get_args

Fate = Literal["admitted", "delivered", "dropped"]
"""`admitted` are all that began RUN; `delivered` those of them that completed; `dropped` the others: failed, timed out,
cancelled, or run again as another attempt."""

RUN_BOUNDS_S: Final = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0)
TOKEN_BOUNDS: Final = (0.0, *(float(2**n) for n in range(5, 18)))


class Distribution:
    """Counts by size. `counts[i]` are those up to `bounds[i]`, and above the bound before; the last above all."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Return the number of values."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Return the bound that `share` of them are within; the largest there is for those above all; 0 of none."""
        left = share * self.count
        for bound, count in zip(self.bounds, self.counts, strict=False):
            left -= count
            if left <= 0:
                return bound if self.count else 0.0
        return self.bounds[-1]

    def figures(self) -> dict[str, float]:
        """Return the mean, and bounds that half of the values (`p50`) and nine tenths (`p90`) are within."""
        mean = self.total / self.count if self.count else 0.0
        return {"mean": round(mean, 3), "p50": self.quantile(0.5), "p90": self.quantile(0.9)}


class Fates:
    """Both distributions, for each fate."""

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
        """Return for each fate the number of attempts, and the figures of their seconds in RUN and of their tokens."""
        return {
            fate: {
                "count": self.run_s[fate].count,
                "run_s": self.run_s[fate].figures(),
                "tokens": self.tokens[fate].figures(),
            }
            for fate in self.run_s
        }
