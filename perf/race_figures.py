"""The figures of `perf.race`: rates of each entrant over rounds, and whether the work was the same. Pure."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

import msgspec

from perf.harness import Bar, Bars, Report, Role, Rows, rows_of
from perf.peers.race_round import RaceRecord
from perf.rollouts import steady_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

NODE: Final = "node"
BARE: Final = "bare"
SAME_REWARD: Final = 0.1
"""Mean rewards within this difference count as the same work."""
SAME_TOKENS: Final = 0.15
"""Tokens per rollout within this relative difference count as the same work."""
BUSY_CORES: Final = 0.1
"""Load from unrelated processes, in cores, from which the report mentions it."""


class Entrant(msgspec.Struct, frozen=True, kw_only=True):
    """A way to run the rollouts. `name`: in metrics; `title`: for people."""

    name: str
    title: str
    role: Role = "peer"


class Lap(msgspec.Struct, frozen=True, kw_only=True):
    """A round of one entrant, and the engine's CPU seconds in it."""

    entrant: str
    record: RaceRecord
    engine_cpu_s: float

    @property
    def rollouts_per_min(self) -> float:
        """Return the completed rollouts per minute, over the whole round."""
        return 60 * len(self.record.rollouts) / self.record.wall_s

    @property
    def tokens(self) -> int:
        return sum(rollout.tokens for rollout in self.record.rollouts)

    @property
    def tokens_per_s(self) -> float:
        """Return the sampled tokens per second, over the whole round."""
        return self.tokens / self.record.wall_s

    @property
    def steady_tokens_per_s(self) -> float:
        """Return the sampled tokens per second until the last rollout starts, from where slots become empty.

        A rollout's tokens are assumed to arrive evenly. 0 if all rollouts start at once.
        """
        rollouts = self.record.rollouts
        spans = [(rollout.start_s, rollout.end_s) for rollout in rollouts]
        return steady_rate(spans, max(start_s for start_s, _ in spans), [rollout.tokens for rollout in rollouts])

    @property
    def others_cores(self) -> float:
        """Return the mean number of cores used by unrelated programs."""
        known_s = self.engine_cpu_s + self.record.framework_cpu_s + self.record.sandboxes_cpu_s
        return max(0.0, self.record.machine_cpu_s - known_s) / self.record.wall_s

    def mean(self, figure: str) -> float:
        return statistics.fmean(getattr(rollout, figure) for rollout in self.record.rollouts)

    @property
    def rollout_s(self) -> float:
        return statistics.median(rollout.end_s - rollout.start_s for rollout in self.record.rollouts)


FIGURES: Final[dict[str, Callable[[Lap], float]]] = {
    "rollouts_per_min": lambda lap: lap.rollouts_per_min,
    "tokens_per_s": lambda lap: lap.tokens_per_s,
    "steady_tokens_per_s": lambda lap: lap.steady_tokens_per_s,
    "rollout_s": lambda lap: lap.rollout_s,
    "reward": lambda lap: lap.mean("reward"),
    "turns": lambda lap: lap.mean("turns"),
    "tool_calls": lambda lap: lap.mean("tool_calls"),
    "tokens": lambda lap: lap.mean("tokens"),
    "others_cores": lambda lap: lap.others_cores,
    "wall_s": lambda lap: lap.record.wall_s,
    "engine_cpu_s": lambda lap: lap.engine_cpu_s / len(lap.record.rollouts),
    "framework_cpu_s": lambda lap: lap.record.framework_cpu_s / len(lap.record.rollouts),
    "sandboxes_cpu_s": lambda lap: lap.record.sandboxes_cpu_s / len(lap.record.rollouts),
}
"""Figures of a lap; CPU seconds are per rollout."""
SPREAD: Final = ("rollouts_per_min", "tokens_per_s", "steady_tokens_per_s")


SPEED: Final = {
    "rounds": "{rounds}",
    "rollouts/min": "{rollouts_per_min:.1f} ({rollouts_per_min_min:.1f} to {rollouts_per_min_max:.1f})",
    "tokens/s": "{tokens_per_s:.1f} ({tokens_per_s_min:.1f} to {tokens_per_s_max:.1f})",
    "tokens/s before the tail": (
        "{steady_tokens_per_s:.1f} ({steady_tokens_per_s_min:.1f} to {steady_tokens_per_s_max:.1f})"
    ),
    "tokens/s of the limit": "{of_limit:.0%}",
    "s a rollout": "{rollout_s:.2f}",
}
WORK: Final = {
    "s a round": "{wall_s:.1f}",
    "solved": "{solved:.0%}",
    "turns": "{turns:.2f}",
    "tool calls": "{tool_calls:.2f}",
    "tokens": "{tokens:.1f}",
    "ms of CPU: engine": "{engine_cpu_ms:.0f}",
    "ms of CPU: framework": "{framework_cpu_ms:.0f}",
    "ms of CPU: sandboxes": "{sandboxes_cpu_ms:.0f}",
    "cores of strangers": "{others_cores:.2f}",
}
"""Columns of the tables."""


def race_report(entrants: Sequence[Entrant], laps: Sequence[Lap], caption: Sequence[str]) -> Report:
    """Return the tables and bars of all laps: medians over rounds, with minimum and maximum.

    Args:
        entrants: in the order of the tables. Each has the same number of laps.
        laps: of all rounds, an entrant's in the order of the rounds.
        caption: paragraphs; sentences on the figures precede them.
    """
    by_name = {entrant.name: [lap for lap in laps if lap.entrant == entrant.name] for entrant in entrants}
    metrics: dict[str, float] = {}
    for name, own in by_name.items():
        for figure, value_of in FIGURES.items():
            values = [value_of(lap) for lap in own]
            metrics[f"race.{name}.{figure}"] = statistics.median(values)
            if figure in SPREAD:
                metrics[f"race.{name}.{figure}_min"] = min(values)
                metrics[f"race.{name}.{figure}_max"] = max(values)
    for entrant in entrants:
        if entrant.name != NODE:
            metrics[f"race.node_over_{entrant.name}"] = _ratio(by_name[NODE], by_name[entrant.name])
    cells = dict(metrics)
    for name, own in by_name.items():
        of = f"race.{name}"
        cells |= {f"{of}.rounds": len(own), f"{of}.of_limit": _ratio(own, by_name[BARE])}
        cells |= {
            f"{of}.{who}_cpu_ms": 1e3 * metrics[f"{of}.{who}_cpu_s"] for who in ("engine", "framework", "sandboxes")
        }
        if name != BARE:
            cells[f"{of}.solved"] = metrics[f"{of}.reward"]
    titles = {entrant.name: entrant.title for entrant in entrants}

    def table(title: str, columns: Mapping[str, str]) -> Rows:
        return rows_of(title, titles, {"through": titles.__getitem__, **columns}, metrics=cells, of="race")

    return Report(
        title="A fair race",
        tables=[table("Speed: median (lowest to highest)", SPEED), table("Work and CPU of a rollout, medians", WORK)],
        figures=[
            _race_bars(entrants, metrics, "rollouts_per_min", "Rollouts per minute", "rollouts/min"),
            _race_bars(entrants, metrics, "tokens_per_s", "Sampled tokens per second", "tokens/s"),
        ],
        notes=[*verdicts(entrants, metrics), *disturbances(laps), *caption],
        detail_metrics=metrics,
    )


def verdicts(entrants: Sequence[Entrant], metrics: Mapping[str, float]) -> list[str]:
    """Return sentences on the node's speed relative to each peer, and on whether the peer's work was the same."""
    said: list[str] = []
    for entrant in entrants:
        if entrant.role != "peer":
            continue
        ours, theirs = (
            {figure: metrics[f"race.{name}.{figure}"] for figure in (*FIGURES, "tokens_per_s_min", "tokens_per_s_max")}
            for name in (NODE, entrant.name)
        )
        rollouts, tokens = (ours[figure] / theirs[figure] for figure in ("rollouts_per_min", "tokens_per_s"))
        overlap = (
            ours["tokens_per_s_min"] <= theirs["tokens_per_s_max"]
            and theirs["tokens_per_s_min"] <= ours["tokens_per_s_max"]
        )
        beyond = "their rounds overlap" if overlap else "beyond the spread of their rounds"
        said.append(
            f"The node makes {rollouts:.2f} times the rollouts, and {tokens:.2f} times the tokens, of "
            f"{entrant.title}; in tokens {beyond}."
        )
        if abs(ours["reward"] - theirs["reward"]) > SAME_REWARD:
            said.append(
                f"Not the same work: the node's rollouts solve {ours['reward']:.0%}, those of {entrant.title} "
                f"{theirs['reward']:.0%}. Compare tokens per second."
            )
        elif abs(ours["tokens"] / theirs["tokens"] - 1) > SAME_TOKENS:
            said.append(
                f"Rollouts differ in length: {ours['tokens']:.1f} tokens through the node, {theirs['tokens']:.1f} "
                f"through {entrant.title}. Compare tokens per second."
            )
    return said


def disturbances(laps: Sequence[Lap]) -> list[str]:
    """Return a sentence on the load from other programs, if it was high."""
    cores = [lap.others_cores for lap in laps]
    if max(cores) <= BUSY_CORES:
        return []
    return [
        f"The machine was not quiet: other programs took {min(cores):.2f} to {max(cores):.2f} cores of it in a round, "
        "which slows down everybody, and not alike."
    ]


def _ratio(ours: Sequence[Lap], theirs: Sequence[Lap]) -> float:
    """Return the median over rounds of our tokens per second over the other's in the same round."""
    return statistics.median(mine.tokens_per_s / other.tokens_per_s for mine, other in zip(ours, theirs, strict=True))


def _race_bars(entrants: Sequence[Entrant], metrics: Mapping[str, float], figure: str, title: str, unit: str) -> Bars:
    bars = []
    for entrant in entrants:
        value, high = (metrics[f"race.{entrant.name}.{figure}{end}"] for end in ("", "_max"))
        bars.append(Bar(label=entrant.title, value=value, role=entrant.role, high=high))
    return Bars(title=title, unit=f"{unit} (median; whisker to the highest)", bars=bars)
