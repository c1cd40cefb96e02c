"""What a preset says of an agent, and where the agent is installed."""

from __future__ import annotations

import logging
import platform
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
        index: which of the two. What is of PyPI comes with a Python of its own: see `python_program`.
        python: the version of Python that it needs at least.
        versions: those that it was tested with, the newest first.
        start: says how it is started.
    """

    name: str
    source: tuple[str, ...]
    index: Literal["npm", "pypi"]
    versions: tuple[str, ...]
    start: Callable[[Start], Started]
    python: tuple[int, int] = (3, 11)

    @property
    def folder(self) -> Path:
        """Where it is installed on this machine: the root of a layer, which has it below `INSIDE`."""
        return cache_dir() / "agents" / f"{self.name}-{self.versions[0]}"

    @property
    def is_installed(self) -> bool:
        """Return whether its installation was finished."""
        return (self.folder / INSTALLED).exists()


LOADER: Final = f"ld-linux-{platform.machine().replace('_', '-')}.so." + (
    "2" if platform.machine() == "x86_64" else "1"
)
PACKAGES: Final = "packages"
"""The folder of the packages of an agent of PyPI, beside the `bin` and `lib` of its Python."""
_BOOT: Final = (
    "import runpy, sys; sys.path.insert(0, sys.argv[1]); what = sys.argv[2]; del sys.argv[1:3]; "
    "run = runpy.run_path if what.endswith('.py') else runpy.run_module; "
    "run(what, run_name='__main__', **({} if run is runpy.run_path else {'alter_sys': True}))"
)


def python_program(start: Start, what: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module, or a file `.py`, by an agent's own Python, not by one of the image.

    It is started by its own loader, so that it may be in any folder, and needs no variables, which the programs that
    the agent runs would inherit.
    """
    root = start.root
    python = (f"{root}/lib/{LOADER}", "--library-path", f"{root}/lib", f"{root}/bin/python3", "-I")
    return (*python, "-c", _BOOT, f"{root}/{PACKAGES}", what, *arguments)


def python_script(start: Start, text: str, **env: str) -> Started:
    """Return how a script is run by an agent's own Python: with the instruction and the model's name as arguments."""
    argv = python_program(start, f"{start.home}/agent.py", start.instruction, start.model)
    return Started(argv=argv, env={"HOME": start.home, **env}, files={"agent.py": text})


SHELL_TOOL: Final = '''\
import subprocess


def shell(command: str) -> str:
    """Run a shell command and return its output.

    Args:
        command: what to run.
    """
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    done = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, **how)
    return f"{done.stdout[-20000:]}\\n[exit code {done.returncode}]"


'''
"""The tool of presets that are made with a framework: what such a script begins with."""


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
