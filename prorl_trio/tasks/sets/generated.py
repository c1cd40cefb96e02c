"""Endless sets of generated tasks: families of reasoning-gym, named `reasoning-gym:FAMILY[:N[:SEED]]`."""

from __future__ import annotations

from importlib.metadata import version
from itertools import count
from typing import TYPE_CHECKING, Final

from prorl_trio.tasks.handlers.stem.generated import REFUSED, check_family
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX: Final = "reasoning-gym:"
DEFAULT_ROWS: Final = 100
MAX_ROWS: Final = 1_000_000
INSTRUCTION: Final = "When you know the answer, call finish with it, in the form that the question asks for."


def load_reasoning_gym(name: str) -> list[TaskInstance]:
    """Return N tasks (default 100) of a family, generated with the seeds SEED (default 0), SEED + 1 and so on.

    The same name gives the same tasks, and seeds N apart give other tasks, so a family is endless. A task with an empty
    correct answer is skipped in favour of the next seed. The tasks are for the handler `stem`, with bash and IPython.

    Raises:
        ConfigError: the name is malformed, the family is unknown or refused (with the reason), or the package
            reasoning-gym is missing.
    """
    family, rows, seed = _parts(name)
    try:
        import reasoning_gym  # imported late, because the package is an extra
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"task set {name} needs the package {exc.name}: pip install 'prorl-trio[reasoning-gym]'"
        ) from exc
    if family not in DATASETS:
        known = ", ".join(sorted(set(DATASETS) - set(REFUSED)))
        raise ConfigError(f"task set {name}: reasoning-gym has no family {family!r}; it has: {known}")
    try:
        check_family(family)
    except ValueError as exc:
        raise ConfigError(f"task set {name}: {exc}") from exc
    made_by = version("reasoning-gym")

    def tasks() -> Iterator[TaskInstance]:
        for each in count(seed):
            entry = reasoning_gym.create_dataset(family, seed=each, size=1)[0]
            if entry["answer"] == "":  # verifiers would then accept answers that they cannot parse
                continue
            grader = {"kind": "reasoning_gym", "family": family, "seed": each, "version": made_by}
            yield TaskInstance(
                instance_id=f"{family}-{each}",
                handler="stem",
                payload={
                    "question": entry["question"],
                    "grader": grader,
                    "tools": ["bash", "ipython"],
                    "instruction": INSTRUCTION,
                },
                family=family,
            )

    made = tasks()
    return [next(made) for _ in range(rows)]


def _parts(name: str) -> tuple[str, int, int]:
    family, *numbers = name.removeprefix(PREFIX).split(":")
    if (
        not family
        or len(numbers) > 2
        or not all(each.isascii() and each.isdigit() and len(each) < 10 for each in numbers)
    ):
        raise ConfigError(f"{name!r} is not of the form {PREFIX}FAMILY[:N[:SEED]], with whole numbers N and SEED")
    rows, seed = [*map(int, numbers), *(DEFAULT_ROWS, 0)[len(numbers) :]]
    if not 1 <= rows <= MAX_ROWS:
        raise ConfigError(f"{name!r}: N must be in [1, {MAX_ROWS}], got {rows}")
    return family, rows, seed
