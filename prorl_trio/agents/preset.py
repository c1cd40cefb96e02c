"""What a preset says of an agent, and where the agent is installed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

logger = logging.getLogger(__name__)

GROUP: Final = "prorl_trio.agents"
"""The entry points by which packages offer presets: `mine = "my_package.agents:PRESET"`."""
INSIDE: Final = "/opt/agents"
"""Where agents are in a sandbox, each in a folder of its name. Nothing there can be written."""
INSTALLED: Final = ".installed"
"""A file in the folder of an agent whose installation was finished."""


class Start(NamedTuple):
    """What an agent is started with.

    Attributes:
        root: the folder that it was installed into, as its process sees it.
        home: a folder of its own for this rollout, which can be written.
        url: of the gateway, without the path of an API.
        key: that its SDK is to show.
        model: the name that the model goes by.
        instruction: what is to be done.
        context_tokens: the most that a dialogue may have.
        output_tokens: the most that a turn may have.
    """

    root: str
    home: str
    url: str
    key: str
    model: str
    instruction: str
    context_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Started:
    """How an agent is started: its command, its variables, and files by their path below `Start.home`."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """An agent that people have.

    Attributes:
        name: by which jobs ask for it.
        source: the packages that it is made of, `{version}` being its own: of npm, or of PyPI.
        index: which of the two.
        versions: those that it was tested with, the newest first.
        start: says how it is started.
        failed: the exit codes with which it may end although it has done its work, beside 0.
    """

    name: str
    source: tuple[str, ...]
    index: Literal["npm", "pypi"]
    versions: tuple[str, ...]
    start: Callable[[Start], Started]
    failed: frozenset[int] = frozenset()

    @property
    def folder(self) -> Path:
        """Where it is installed on this machine: the root of a layer, which has it below `INSIDE`."""
        return cache_dir() / "agents" / f"{self.name}-{self.versions[0]}"

    @property
    def is_installed(self) -> bool:
        """Return whether its installation was finished."""
        return (self.folder / INSTALLED).exists()


@cache
def presets() -> dict[str, Preset]:
    """Return the presets of all installed packages, by name. One that cannot be imported is left out, and logged."""
    found: dict[str, Preset] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        try:
            preset = point.load()
        except Exception as exc:
            logger.error("the preset %r of the entry point %s cannot be loaded: %s", point.name, point.value, exc)
            continue
        found[preset.name] = preset
    return found


def find_preset(name: str) -> Preset:
    """Return a preset whose agent is installed on this machine. Raises ConfigError: there is none, with the remedy."""
    preset = presets().get(name)
    if preset is None:
        raise ConfigError(f"there is no agent {name!r}; there are: {', '.join(presets()) or 'none'}")
    if not preset.is_installed:
        raise ConfigError(
            f"the agent {name!r} is not installed on this machine: run `prorl-trio agents install {name}`"
        )
    return preset
