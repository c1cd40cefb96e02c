"""Options of sbatch's that a fleet cannot have, and variables of the environment that overrule what was said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_PREFIX: Final = "SBATCH_"
_LONG: Final = {
    "A": "account",
    "C": "constraint",
    "G": "gpus",
    "J": "job-name",
    "M": "clusters",
    "W": "wait",
    "a": "array",
    "c": "cpus-per-task",
    "k": "no-kill",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "t": "time",
}
_FLAGS: Final = frozenset("hHIkOQsuvVW")
"""Short options without a value: others may follow in the same word, as in `-HW`."""
_VARIABLES: Final = {
    "array": ("ARRAY_INX",),
    "mem": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
    "no-requeue": ("REQUEUE",),
    "requeue": ("NO_REQUEUE",),
    "time": ("TIMELIMIT",),
}
"""Variables with other names than the options that they overrule."""


def check_options(groups: Sequence[Sequence[str]], env: Mapping[str, str]) -> None:
    """Refuse what would not give the fleet that was asked for.

    A job of one group is submitted with its options on the command line, which overrule the environment. sbatch mixes
    up the groups of several there (seen in 22.05: a time limit of the second holds for the first), so theirs are in the
    script alone, which the environment overrules.

    Args:
        groups: the options of each group of the job.
        env: that of sbatch.

    Raises:
        ConfigError: an option, or a variable, is refused.
    """
    names = [name for group in groups for name in _names(group)]
    if "wait" in names or f"{_PREFIX}WAIT" in env:
        said = "--wait" if "wait" in names else f"{_PREFIX}WAIT"
        raise ConfigError(f"{said}: a fleet runs until it is ended; `prorl-trio slurm status` tells of it")
    if "clusters" in names or f"{_PREFIX}CLUSTERS" in env:
        said = "--clusters" if "clusters" in names else f"{_PREFIX}CLUSTERS"
        raise ConfigError(f"{said}: the other commands would ask this cluster; run them all on a machine of that one")
    if len(groups) == 1:
        return
    for name in names:
        same = name.upper().replace("-", "_")
        for variable in (f"{_PREFIX}{each}" for each in _VARIABLES.get(name, (same,))):
            if variable in env:
                raise ConfigError(
                    f"{variable} is set, and sbatch would let it overrule --{name} in a job of several groups; unset it"
                )


def _names(options: Sequence[str]) -> Iterator[str]:
    """Yield the long names of options, without their values."""
    for word in options:
        if word.startswith("--"):
            yield word[2:].partition("=")[0]
        elif word.startswith("-"):
            for letter in word[1:]:
                yield _LONG.get(letter, letter)
                if letter not in _FLAGS:
                    break  # the rest is its value
