"""From samples of the trace to figures: who answered right, and what each costs above the bare pty. Pure."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Answered", "Figures", "Step", "figures_of", "words_of"]

ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\a\x1b]*(?:\a|\x1b\\)|\x1b[@-Z\\-_]")
RULER = re.compile(r"[=_]{3,}")
CLOCK = re.compile(r"\b\d+\.\d+s\b|\b\d\d:\d\d\b")


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the recorded trace.

    `kind` groups commands of one cost; `exit_code` is what it must end with.
    """

    kind: str
    command: str
    exit_code: int


class Answered(msgspec.Struct, frozen=True):
    """A system's answer to one step. `words` is its output as `words_of` has it."""

    elapsed_s: float
    exit_code: int | None
    words: tuple[str, ...]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a system over all steps that it and the floor answered right.

    Attributes:
        steps: their indices, the same for all lists below.
        elapsed_s: the median over rounds.
        first_s: in the first round, which all systems ran: for comparing times of systems with fewer rounds.
        overhead_s: the time beyond the floor's in the same round, median over rounds. Below zero is noise.
        wrong: the steps that it answered otherwise than the floor or the record, or not at all.
    """

    steps: list[int]
    elapsed_s: list[float]
    first_s: list[float]
    overhead_s: list[float]
    wrong: list[int]

    def among(self, values: Sequence[float], steps: Sequence[int]) -> list[float]:
        """Return those of `values`, one of the lists above, that belong to `steps`."""
        wanted = set(steps)
        return [value for step, value in zip(self.steps, values, strict=True) if step in wanted]

    def overhead_percentile_ms(self, percent: float) -> float:
        """Over steps."""
        return float(np.percentile(self.overhead_s, percent)) * 1e3


def words_of(output: str, *, root: str, command: str) -> tuple[str, ...]:
    """The words of an output, sorted: equal for the same output on terminals of different widths and folders.

    Left out is what differs with no fault of anyone: colours, rulers as wide as the terminal, clocks, the folder, and
    the command itself where a terminal echoes it.
    """
    text = CLOCK.sub("TIME", RULER.sub(" ", ANSI.sub("", output).replace(root, "ROOT")))
    words, echo = text.split(), command.split()
    return tuple(sorted(words[len(echo) :] if words[: len(echo)] == echo else words))


def figures_of(
    steps: Sequence[Step], rounds: Sequence[Sequence[Answered]], floors: Sequence[Sequence[Answered]]
) -> Figures:
    """Compare a system with the floor, round by round. Rounds that the system did not finish are shorter."""
    right: list[int] = []
    elapsed_s: list[float] = []
    first_s: list[float] = []
    overhead_s: list[float] = []
    for index, step in enumerate(steps):
        pairs = [
            (answers[index], floor[index])
            for answers, floor in zip(rounds, floors, strict=False)
            if index < len(answers)
        ]
        if pairs and all(_is_right(answer, floor, step) for answer, floor in pairs):
            right.append(index)
            elapsed_s.append(statistics.median(answer.elapsed_s for answer, _ in pairs))
            first_s.append(pairs[0][0].elapsed_s)
            overhead_s.append(statistics.median(answer.elapsed_s - floor.elapsed_s for answer, floor in pairs))
    return Figures(
        steps=right,
        elapsed_s=elapsed_s,
        first_s=first_s,
        overhead_s=overhead_s,
        wrong=sorted(set(range(len(steps))) - set(right)),
    )


def _is_right(answer: Answered, floor: Answered, step: Step) -> bool:
    return answer.exit_code == floor.exit_code == step.exit_code and answer.words == floor.words
