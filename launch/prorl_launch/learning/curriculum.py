"""The selection of training problems. Families that are rarely solved are sampled more often."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_launch.learning.prompt import PAYLOAD
from prorl_trio.sampling import ManifestLine
from prorl_trio.tasks.sets.maths import SUM_PAYLOAD
from prorl_trio.tasks.sets.word_problems import FAMILIES, easy_problem, word_problem

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from prorl_trio.tasks.sets.word_problems import WordProblem
    from prorl_trio.types.models import TaskInstance

WINDOW: Final = 24
"""Number of recent rollouts in a family's success rate."""
LEAST: Final = 0.3
"""Weight of a family that is always solved, so that it is not forgotten. A never solved family has this plus 1."""
_DECIDED: Final = ("trained", "uninformative")
_LINE: Final = msgspec.json.Decoder(ManifestLine)


class Sums:
    """Sums and short questions with one-digit numbers, for an agent whose format was not demonstrated to the policy."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def instance(self, number: int) -> TaskInstance:
        """Return task `number`: a pure function."""
        return easy_problem(number, seed=self._seed).instance(**SUM_PAYLOAD)

    def observe(self, lines: Iterable[ManifestLine]) -> None:
        """Ignore the rewards: all families have equal weight."""

    def observe_file(self, manifest: Path) -> None:
        """Ignore the rewards."""


class Curriculum:
    """A source of training problems with prioritized sampling.

    Families are sampled in proportion to 1 - s, for their success rate s. Kimi k1.5 (arXiv 2501.12599, section 2.3.4)
    does this for single problems, but here problems do not repeat. Families alternate by smooth weighted round robin,
    so a family is never absent for longer than its weight implies.
    """

    def __init__(self, seed: int) -> None:
        """Begin with success rates of 0: all families have equal weight."""
        self._seed = seed
        self._rewards: dict[str, deque[float]] = {family.name: deque(maxlen=WINDOW) for family in FAMILIES}
        self._due = dict.fromkeys(self._rewards, 0.0)

    def problem(self, number: int) -> WordProblem:
        """Return problem `number` of the next family; each call advances the round robin."""
        weights = {name: 1.0 + LEAST - self.success_rate(name) for name in self._rewards}
        for name, weight in weights.items():
            self._due[name] += weight
        family = max(self._due, key=self._due.__getitem__)
        self._due[family] -= sum(weights.values())
        return word_problem(number, seed=self._seed, family=family)

    def instance(self, number: int) -> TaskInstance:
        """Return `problem` as a task for a policy that has seen demonstrations of the tool."""
        return self.problem(number).instance(**PAYLOAD)

    def success_rate(self, family: str) -> float:
        """Return the mean reward of the family's last `WINDOW` rollouts; missing rollouts count as 0."""
        return sum(tuple(self._rewards[family])) / WINDOW

    def observe(self, lines: Iterable[ManifestLine]) -> None:
        """Record the rewards of rollouts whose group was decided. May be called from another thread."""
        for line in lines:
            if line.fate in _DECIDED and line.reward is not None:
                self._rewards[line.instance_id.partition("-")[0]].append(line.reward)

    def observe_file(self, manifest: Path) -> None:
        """Record the rollouts that a run sampled before it was interrupted. An incomplete last line is skipped."""
        if manifest.is_file():
            whole, _, _ = manifest.read_bytes().rpartition(b"\n")
            self.observe(_LINE.decode_lines(whole))
