"""The time that an action through a terminal on tmux takes beyond one through our shell, measured here if it can be."""

from __future__ import annotations

import importlib.util
import shutil
import statistics
from typing import TYPE_CHECKING, Final

import msgspec

from perf.dapo_work import PAPER_ACTION_S, PAPER_TMUX_ACTION_S
from perf.harness import tell
from perf.trace import QUICK_STEPS, load_trace, run_round
from perf.trace_systems import OURS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perf.trace_figures import Answered

__all__ = ["ExtraAction", "extra_of", "measure_extra_action"]

TMUX: Final = "tmux"
PAPER_EXTRA_S: Final = PAPER_TMUX_ACTION_S - PAPER_ACTION_S


class ExtraAction(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that tmux adds to an action; `measured`: here, over so many commands, or 0: they are the paper's.

    `why`: why they are not measured.
    """

    seconds: float
    measured: int = 0
    why: str = ""


async def measure_extra_action() -> ExtraAction:
    """Run the first commands of the recorded trace through both; take the paper's difference where tmux is missing."""
    if shutil.which("git") is None or importlib.util.find_spec("pytest") is None:
        return ExtraAction(seconds=PAPER_EXTRA_S, why="the trace runs git and pytest, and one of them is missing")
    tell(f"{QUICK_STEPS} recorded commands through our shell and through OpenHands' terminal on tmux")
    failures: dict[str, str] = {}
    answers = await run_round(load_trace()[:QUICK_STEPS], [OURS, TMUX], failures)
    return extra_of(answers, failures.get(TMUX, ""))


def extra_of(answers: Mapping[str, Sequence[Answered]], failure: str) -> ExtraAction:
    """Return the mean difference over the commands that both have answered alike; the paper's after a failure."""
    ours, theirs = answers.get(OURS, []), answers.get(TMUX, [])
    pairs = [] if failure else list(zip(ours, theirs, strict=True))
    both = [(one, other) for one, other in pairs if one.exit_code == other.exit_code]
    if not both:
        return ExtraAction(seconds=PAPER_EXTRA_S, why=failure or "tmux answered no command as our shell did")
    extra_s = statistics.fmean(other.elapsed_s - one.elapsed_s for one, other in both)
    return ExtraAction(seconds=max(0.0, extra_s), measured=len(both))
