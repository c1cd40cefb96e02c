"""The figures of `perf.race`: rates of each entrant over rounds, and whether the work was the same. Pure."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

import msgspec

from perf.harness import Bar, Bars, Finding, Role, Rows, rows_of
from perf.peers.race_round import RaceRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

NODE: Final = "node"
BARE: Final = "bare"
SAME_REWARD: Final = 0.1
"""Mean rewards that differ by no more are of the same work."""
SAME_TOKENS: Final = 0.15
"""So are tokens a rollout that differ by no more than this share."""
BUSY_CORES: Final = 0.1
"""Strangers that take more of the machine, in cores, are worth a sentence."""


class Entrant(msgspec.Struct, frozen=True, kw_only=True):
    """A way to make the rollouts. `name`: in metrics; `title`: for people."""

    name: str
    title: str
    role: Role = "peer"


class Lap(msgspec.Struct, frozen=True, kw_only=True):
    """A round of one entrant, and the engine's seconds of CPU meanwhile."""

    entrant: str
    record: RaceRecord
    engine_cpu_s: float

    @property
    def rollouts_per_min(self) -> float:
        """Return the completed rollouts of a minute, over the whole round."""
        return 60 * len(self.record.rollouts) / self.record.wall_s

    @property
    def tokens(self) -> int:
        """Return the sampled tokens."""
        return sum(rollout.tokens for rollout in self.record.rollouts)

    @property
    def tokens_per_s(self) -> float:
        """Return the sampled tokens of a second, over the whole round."""
        return self.tokens / self.record.wall_s

    @property
    def steady_tokens_per_s(self) -> float:
        """Return them up to the start of the last rollout, from where slots get empty.

        A rollout's tokens are taken to come evenly. 0 if all rollouts start at once.
        """
        rollouts = self.record.rollouts
        until_s = max(rollout.start_s for rollout in rollouts)
        if until_s <= 0:
            return 0.0
        shares = (
            min(1.0, (until_s - each.start_s) / (each.end_s - each.start_s)) if each.end_s > each.start_s else 1.0
            for each in rollouts
        )
        return sum(share * each.tokens for share, each in zip(shares, rollouts, strict=True)) / until_s

    @property
    def others_cores(self) -> float:
        """Return how many cores went to programs that do not race, on average."""
        known_s = self.engine_cpu_s + self.record.framework_cpu_s + self.record.sandboxes_cpu_s
        return max(0.0, self.record.machine_cpu_s - known_s) / self.record.wall_s

    def mean(self, figure: str) -> float:
        """Return the mean of a figure of `RaceRollout`."""
        return statistics.fmean(getattr(rollout, figure) for rollout in self.record.rollouts)

    @property
    def rollout_s(self) -> float:
        """Return the median seconds of a rollout."""
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
"""Figures of a lap; seconds of CPU are those of a rollout."""
SPREAD: Final = ("rollouts_per_min", "tokens_per_s", "steady_tokens_per_s")


def race_finding(entrants: Sequence[Entrant], laps: Sequence[Lap], caption: Sequence[str]) -> Finding:
    """Return the tables and bars of all laps: medians over rounds, with the lowest and highest.

    Args:
        entrants: in the order of the tables. Each has laps, equally many.
        laps: of all rounds, an entrant's in the order of the rounds.
        caption: paragraphs; what the figures say of themselves is put before them.
    """
    by_name = {entrant.name: [lap for lap in laps if lap.entrant == entrant.name] for entrant in entrants}
    metrics: dict[str, float] = {}
    for name, own in by_name.items():
        for figure, of in FIGURES.items():
            values = [of(lap) for lap in own]
            metrics[f"race.{name}.{figure}"] = statistics.median(values)
            if figure in SPREAD:
                metrics[f"race.{name}.{figure}_min"] = min(values)
                metrics[f"race.{name}.{figure}_max"] = max(values)
    for entrant in entrants:
        if entrant.name != NODE:
            metrics[f"race.node_over_{entrant.name}"] = _ratio(by_name[NODE], by_name[entrant.name])
    said = [*verdicts(entrants, metrics), *differences(entrants, metrics), *disturbances(laps)]
    return Finding(
        title="A fair race",
        tables=[_speed_rows(by_name, entrants, metrics), _work_rows(entrants, metrics)],
        figures=[
            _race_bars(entrants, metrics, "rollouts_per_min", "Rollouts per minute", "rollouts/min"),
            _race_bars(entrants, metrics, "tokens_per_s", "Sampled tokens per second", "tokens/s"),
        ],
        caption=[*said, *caption],
        metrics=metrics,
    )


def verdicts(entrants: Sequence[Entrant], metrics: Mapping[str, float]) -> list[str]:
    """Return a sentence for each peer: whether the node was faster than it, or slower, and by how much."""
    said = []
    for entrant in entrants:
        if entrant.role != "peer":
            continue
        rollouts, tokens = (
            metrics[f"race.{NODE}.{figure}"] / metrics[f"race.{entrant.name}.{figure}"]
            for figure in ("rollouts_per_min", "tokens_per_s")
        )
        overlap = (
            metrics[f"race.{NODE}.tokens_per_s_min"] <= metrics[f"race.{entrant.name}.tokens_per_s_max"]
            and metrics[f"race.{entrant.name}.tokens_per_s_min"] <= metrics[f"race.{NODE}.tokens_per_s_max"]
        )
        beyond = "their rounds overlap" if overlap else "beyond the spread of their rounds"
        said.append(
            f"The node makes {rollouts:.2f} times the rollouts, and {tokens:.2f} times the tokens, of "
            f"{entrant.title}; in tokens {beyond}."
        )
    return said


def differences(entrants: Sequence[Entrant], metrics: Mapping[str, float]) -> list[str]:
    """Return a sentence for each peer whose work was not the node's."""
    said = []
    for entrant in entrants:
        if entrant.role != "peer":
            continue
        rewards, tokens = (
            (metrics[f"race.{NODE}.{figure}"], metrics[f"race.{entrant.name}.{figure}"])
            for figure in ("reward", "tokens")
        )
        if abs(rewards[0] - rewards[1]) > SAME_REWARD:
            said.append(
                f"Not the same work: the node's rollouts solve {rewards[0]:.0%}, those of {entrant.title} "
                f"{rewards[1]:.0%}. Compare tokens per second."
            )
        elif abs(tokens[0] / tokens[1] - 1) > SAME_TOKENS:
            said.append(
                f"Rollouts differ in length: {tokens[0]:.1f} tokens through the node, {tokens[1]:.1f} through "
                f"{entrant.title}. Compare tokens per second."
            )
    return said


def disturbances(laps: Sequence[Lap]) -> list[str]:
    """Return a sentence on what else ran meanwhile, if that was much."""
    cores = [lap.others_cores for lap in laps]
    if max(cores) <= BUSY_CORES:
        return []
    return [
        f"The machine was not quiet: other programs took {min(cores):.2f} to {max(cores):.2f} cores of it in a round, "
        "which slows down everybody, and not alike."
    ]


def _ratio(ours: Sequence[Lap], theirs: Sequence[Lap]) -> float:
    """Return the median over rounds of our tokens per second over theirs of the same round."""
    return statistics.median(mine.tokens_per_s / other.tokens_per_s for mine, other in zip(ours, theirs, strict=True))


def _speed_rows(
    by_name: Mapping[str, Sequence[Lap]], entrants: Sequence[Entrant], metrics: Mapping[str, float]
) -> Rows:
    def spread(figure: str) -> Callable[[Entrant], str]:
        def cell(entrant: Entrant) -> str:
            median, low, high = (metrics[f"race.{entrant.name}.{figure}{end}"] for end in ("", "_min", "_max"))
            return f"{median:.1f} ({low:.1f} to {high:.1f})"

        return cell

    return rows_of(
        "Speed: median (lowest to highest)",
        entrants,
        {
            "through": lambda entrant: entrant.title,
            "rounds": lambda entrant: str(len(by_name[entrant.name])),
            "rollouts/min": spread("rollouts_per_min"),
            "tokens/s": spread("tokens_per_s"),
            "tokens/s before the tail": spread("steady_tokens_per_s"),
            "tokens/s of the limit": lambda entrant: f"{_ratio(by_name[entrant.name], by_name[BARE]):.0%}",
            "s a rollout": lambda entrant: f"{metrics[f'race.{entrant.name}.rollout_s']:.2f}",
        },
    )


def _work_rows(entrants: Sequence[Entrant], metrics: Mapping[str, float]) -> Rows:
    def cell(figure: str, spec: str, scale: float = 1.0) -> Callable[[Entrant], str]:
        return lambda entrant: format(scale * metrics[f"race.{entrant.name}.{figure}"], spec)

    solved = cell("reward", ".0%")
    return rows_of(
        "Work and CPU of a rollout, medians",
        entrants,
        {
            "through": lambda entrant: entrant.title,
            "s a round": cell("wall_s", ".1f"),
            "solved": lambda entrant: solved(entrant) if entrant.name != BARE else "",
            "turns": cell("turns", ".2f"),
            "tool calls": cell("tool_calls", ".2f"),
            "tokens": cell("tokens", ".1f"),
            **{
                f"ms of CPU: {part}": cell(f"{part}_cpu_s", ".0f", 1e3) for part in ("engine", "framework", "sandboxes")
            },
            "cores of strangers": cell("others_cores", ".2f"),
        },
    )


def _race_bars(entrants: Sequence[Entrant], metrics: Mapping[str, float], figure: str, title: str, unit: str) -> Bars:
    bars = []
    for entrant in entrants:
        value, high = (metrics[f"race.{entrant.name}.{figure}{end}"] for end in ("", "_max"))
        bars.append(Bar(label=entrant.title, value=value, role=entrant.role, high=high))
    return Bars(title=title, unit=f"{unit} (median; whisker to the highest)", bars=bars)
