"""The choice of the problems that a run trains on: families that are seldom solved come up more often."""

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
"""Rollouts of a family by which its success rate is told."""
LEAST: Final = 0.3
"""Weight of a family that is always solved, so that it is not forgotten; one that never is has this and 1."""
_DECIDED: Final = ("trained", "uninformative")
_LINE: Final = msgspec.json.Decoder(ManifestLine)


class Sums:
    """Sums and short questions with numbers of one digit, for an agent whose format nobody showed to the policy."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def instance(self, number: int) -> TaskInstance:
        """Return task `number`: a pure function."""
        return easy_problem(number, seed=self._seed).instance(**SUM_PAYLOAD)

    def observe(self, lines: Iterable[ManifestLine]) -> None:
        """Take note of nothing: all come up alike."""

    def observe_file(self, manifest: Path) -> None:
        """Take note of nothing."""


class Curriculum:
    """A source of problems to train on, by prioritized sampling.

    Families come up in proportion to 1 - s, for their success rate s (Kimi k1.5, arXiv 2501.12599, section 2.3.4, where
    that is said of single problems; these are too many for any to come up twice). They take turns by smooth weighted
    round robin, so a family is never absent for longer than its weight says.
    """

    def __init__(self, seed: int) -> None:
        """Begin with success rates of 0: all families alike."""
        self._seed = seed
        self._rewards: dict[str, deque[float]] = {family.name: deque(maxlen=WINDOW) for family in FAMILIES}
        self._due = dict.fromkeys(self._rewards, 0.0)

    def problem(self, number: int) -> WordProblem:
        """Return problem `number`, of the family whose turn it is; each call is a turn."""
        weights = {name: 1.0 + LEAST - self.success_rate(name) for name in self._rewards}
        for name, weight in weights.items():
            self._due[name] += weight
        family = max(self._due, key=self._due.__getitem__)
        self._due[family] -= sum(weights.values())
        return word_problem(number, seed=self._seed, family=family)

    def instance(self, number: int) -> TaskInstance:
        """Return `problem` as a task for a policy that was shown the tool."""
        return self.problem(number).instance(**PAYLOAD)

    def success_rate(self, family: str) -> float:
        """Return the mean reward of the family's last `WINDOW` rollouts; those that are missing count as 0."""
        return sum(tuple(self._rewards[family])) / WINDOW

    def observe(self, lines: Iterable[ManifestLine]) -> None:
        """Take note of the rewards of rollouts whose group was decided. May be called from another thread."""
        for line in lines:
            if line.fate in _DECIDED and line.reward is not None:
                self._rewards[line.instance_id.partition("-")[0]].append(line.reward)

    def observe_file(self, manifest: Path) -> None:
        """Take note of what a run had sampled before it was interrupted; a last line that is not whole is left out."""
        if manifest.is_file():
            whole, _, _ = manifest.read_bytes().rpartition(b"\n")
            self.observe(_LINE.decode_lines(whole))
